"""Loads a trained model from a run's newest complete checkpoint, a Hugging Face folder, or an adapter's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from preheat import recipe as recipes
from preheat import remote_code
from preheat.core import Build
from preheat.engine.builder import build, to_single_device
from preheat.engine.checkpoint import Progress, at_checkpoint, find, load_weights, parse_step, read_progress
from preheat.engine.device import resolve_device
from preheat.errors import RecipeError, RunError, SettingError
from preheat.inference.text_generation import Prompt, write_texts
from preheat.model_folder import count_embedding_rows
from preheat.models.generation.generate import Written
from preheat.models.weights import WeightSource
from preheat.recipe import Model, Recipe, Sample, Stop
from preheat.run.reader import Reader

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from preheat.ops.adapters.peft_io import AdapterFolder

DeviceKind = Literal["auto", "cpu", "cuda"]

__all__ = ["LoadedModel", "load_draft_model", "load_model", "read_recipe", "require_model"]


@dataclass
class LoadedModel:
    recipe: Recipe
    build: Build
    tokenizer: PreTrainedTokenizerFast
    step: int | None
    """Of the checkpoint; None for a model's or an adapter's folder."""
    tokenizer_folder: str
    """The folder that the tokenizer was read from."""
    adapter: AdapterFolder | None = None
    """The adapter's folder, if an adapter was loaded."""
    template: str | None = None
    """Name of the chat template that the run was trained with (its tokenizer has it); None for plain text."""
    classes: tuple[str, ...] = ()
    """Class names of the run's data, in the order of the head's rows."""
    _drafts: dict[str, PreTrainedModel] = field(default_factory=dict)
    """Draft models loaded so far, by path."""

    def write(self, prompts: Sequence[Prompt], settings: Sample | None = None, **kwargs: Any) -> list[Written]:
        """Continues texts and answers chats with `write_texts`; `kwargs`: template, seed, batch, on_text, kept, timed.

        Example:
            >>> load_model("runs/demo").write(["import os\\n"])[0].text                                 # doctest: +SKIP
        """
        # Loaded once per path, since a chat calls this for every message.
        path = settings.draft_model if settings is not None else None
        if path is not None and path not in self._drafts:
            self._drafts[path] = load_draft_model(path, self.tokenizer)
        return write_texts(self.build, self.tokenizer, prompts, settings, draft=self._drafts.get(path or ""), **kwargs)


def load_model(
    path: str | Path,
    *,
    base: str | None = None,
    checkpoint: str | int | None = None,
    at_start: bool = False,
    trust_remote_code: bool = False,
    device: DeviceKind | None = None,
) -> LoadedModel:
    """Loads a run's checkpoint, a Hugging Face folder (also a compressed one), or a PEFT adapter on its base.

    Args:
        path: a run, one of its checkpoints (`runs/x/checkpoints/step-N`), a model's folder or an adapter's.
        checkpoint: of a run: best, last or a step; the newest intact one by default.
        base: the base model of an adapter or a run, if it is no longer at the path that these name.
        at_start: of a run, the initial model: its base with its techniques, before the first step.
        trust_remote_code: run Python code from the model's folder; its author can then do anything that you can.
        device: cpu or cuda; None: the recipe's `hardware.device`.

    Raises:
        RunError: none of these, no complete checkpoint (of that step), or a base that changed since the run was
            trained.
        RecipeError: the base is not available, or is not the one of the adapter or run.
    """
    with remote_code.trust_remote_code(trust_remote_code):
        return _open(at_checkpoint(Path(path), checkpoint), base, at_start, device)


def _open(path: Path, base: str | None, at_start: bool, device: DeviceKind | None) -> LoadedModel:
    # runs/x/checkpoints/step-N means the run x at step N: the recipe is in the run's folder.
    step = parse_step(path.name)
    if step is not None and (path.parent.parent / "recipe.yaml").is_file():
        path = path.parent.parent
    else:
        step = None
    # Runs first: `step` and `at_start` are for them alone.
    if (path / "recipe.yaml").is_file():
        return _load_at_start(path, base, device) if at_start else _run(path, step, base, device)
    if at_start:
        raise RunError(f"{path}: is not a run, so the model before it is unknown; name two models to compare them")
    if (path / "adapter_config.json").is_file():
        return _load_adapter(path, base, device)
    if base is not None:
        raise RecipeError(f"--base: {path} is neither an adapter (no adapter_config.json) nor a run; leave it out")
    require_model(path)
    return _load_folder(str(path), str(path), device)


def _set_device(recipe: Recipe, device: DeviceKind | None) -> Recipe:
    return recipe if device is None else replace(recipe, hardware=replace(recipe.hardware, device=device))


def load_draft_model(path: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Loads the draft model of another model, whose tokenizer is given.

    Raises:
        RecipeError: it has another tokenizer, or no KV cache.
        RunError: there is no model at the path.
    """
    from preheat.models.generation.generate import has_attention_pattern

    try:
        draft = load_model(path)
    except RunError as error:
        raise RunError(f"sample.draft_model: {error}") from None
    ours, theirs = tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    # The verifying model compares ids, so a draft must give every id the same meaning.
    if ours != theirs:
        odd = next((piece for piece in ours if theirs.get(piece) != ours[piece]), None)
        odd = odd if odd is not None else next(piece for piece in theirs if piece not in ours)
        token_ids = [str(vocabulary.get(odd, "no token")) for vocabulary in (ours, theirs)]
        raise RecipeError(
            f"sample.draft_model: {path}: has another tokenizer ({len(theirs):,} tokens, the model {len(ours):,}; "
            f"{odd!r} is {token_ids[1]} there and {token_ids[0]} here), and a draft proposes tokens: use a smaller "
            "model of the same family, or sample.prompt_lookup_tokens, which needs none"
        )
    model: PreTrainedModel = draft.build.trained[0]
    if has_attention_pattern(model):
        raise RecipeError(
            f"sample.draft_model: {path}: its layers have attention patterns, so it recomputes all tokens for each "
            "new one; use a draft without"
        )
    return model


def require_model(path: str | Path) -> None:
    """Raises RunError if `path` has nothing that `load_model` can load."""
    place = Path(path)
    run = place.parent.parent if parse_step(place.name) is not None else place
    if not any(file.is_file() for file in (run / "recipe.yaml", place / "config.json", place / "adapter_config.json")):
        raise RunError(
            f"{path}: is neither a run (no recipe.yaml), nor a Hugging Face model folder (no config.json), nor an "
            "adapter (no adapter_config.json)"
        )


def read_recipe(path: Path, base: str | None = None) -> Recipe:
    """Returns the recipe of a run for a single device, with the current folder of its base.

    Args:
        base: as in `load_model`.

    Raises:
        RecipeError, RunError: the base is not available, or is not the one of the run.
    """
    run = Reader(path)
    # The weights of the base are compared with those that a checkpoint recorded, if there is one.
    newest, _ = find(path / "checkpoints", run=run.id)
    return _resolve_base(run, base, read_progress(newest) if newest else None)


def _load_at_start(path: Path, base: str | None, on: DeviceKind | None) -> LoadedModel:
    from preheat.data.tokenizer import load_tokenizer

    run = Reader(path)
    recipe = _set_device(read_recipe(path, base), on)
    classes = tuple(run.data.classes or ())
    tokenizer = load_tokenizer(str(path / "tokenizer"))
    device, _ = resolve_device(recipe)
    # A run trained on a GPU may be read on a CPU, where some techniques compute in another way.
    recipe = replace(recipe, techniques={name: t.read_on(device) for name, t in recipe.techniques.items()})
    model_build = build(recipe, vocabulary=count_embedding_rows(tokenizer), device=device)
    return LoadedModel(recipe, model_build, tokenizer, 0, str(path / "tokenizer"), classes=classes)


def _resolve_base(run: Reader, base: str | None, progress: Progress | None) -> Recipe:
    """A run's recipe for a single device, with the current folder of its base.

    A folder that moved is searched for next to the run and in the working directory, by the last parts of its path; its
    weights must be those that the run was trained on.
    """
    path = run.path
    # Reading needs one device, however many trained.
    recipe = to_single_device(recipes.parse(run.recipe_text, where=str(path / "recipe.yaml")))
    named = recipe.model.path
    if named is None:
        if base is not None:
            raise RecipeError(f"--base: {path} is a run of a new model and contains all of it; leave it out")
        return recipe
    # Random weights have no fingerprint of a folder to compare with.
    trained = (
        progress.fingerprints.get("weights") if progress is not None and recipe.model.weights != "random" else None
    )
    if base is not None:
        if not (Path(base) / "config.json").is_file():
            raise RecipeError(
                f"--base: {base}: not a model's folder (no config.json); name the one that {path} was trained on"
            )
        if trained is not None and WeightSource(Path(base), knob="--base").fingerprint() != trained:
            raise RecipeError(
                f"--base: {base} has other weights than those that {path} was trained on ({named}); name that model"
            )
        return replace(recipe, model=replace(recipe.model, path=base))
    # A relative name may be on the hub; it is resolved when the model is built.
    if not Path(named).is_absolute() or Path(named).is_dir():
        return recipe
    parts = Path(named).parts[1:]
    for home in (Path.cwd(), path.resolve().parent, path.resolve().parent.parent):
        # From the most specific end of the path (three parts) to its last part alone.
        for count in range(min(len(parts), 3), 0, -1):
            folder = home.joinpath(*parts[-count:])
            # A folder of the same name may hold another model, so only equal weights are accepted.
            if trained and (folder / "config.json").is_file() and WeightSource(folder).fingerprint() == trained:
                return replace(recipe, model=replace(recipe.model, path=str(folder)))
    raise RunError(f"{path}: its base model {named}: no such folder; give its current folder with --base")


def _run(path: Path, step: int | None, base: str | None, on: DeviceKind | None) -> LoadedModel:
    from preheat.data.tokenizer import load_tokenizer

    run = Reader(path)
    data = run.data
    # Damaged checkpoints are skipped: a crash while saving leaves the one before it intact.
    newest, damaged = find(path / "checkpoints", step, run=run.id)
    if newest is None:
        raise RunError(
            f"{path}: "
            + (
                f"no checkpoint is intact ({damaged[0][0].name}: {damaged[0][1]})"
                if damaged
                else "has no checkpoint yet"
            )
        )
    tokenizer = load_tokenizer(str(path / "tokenizer"))
    progress = read_progress(newest)
    recipe = _set_device(_resolve_base(run, base, progress), on)
    device, _ = resolve_device(recipe)
    # The checkpoint includes an adapter's start, whose folder may be gone. A curriculum's `start` is something else.
    techniques = {
        name: replace(t, start=None)  # type: ignore[call-arg]
        if ("start", None) in {(f.name, f.default) for f in dataclasses.fields(t)}
        else t
        for name, t in ((name, t.read_on(device)) for name, t in recipe.techniques.items())
        if not t.training_only
    }
    model_build = build(
        replace(recipe, techniques=techniques), vocabulary=count_embedding_rows(tokenizer), device=device
    )
    if (
        model_build.weights.folder is not None
        and progress.fingerprints.get("weights") != model_build.weights.fingerprint()
    ):
        raise RunError(
            f"{path}: the weights in {recipe.model.path} changed since the run was trained on them; restore the "
            "earlier ones"
        )
    # Over the weights of the base: a checkpoint may hold the trained parameters alone.
    load_weights(model_build, newest)
    template = data.template if data.chat else None
    classes = tuple(data.classes or ())
    return LoadedModel(
        recipe, model_build, tokenizer, progress.step, str(path / "tokenizer"), template=template, classes=classes
    )


def _load_folder(model: str, tokenizer_folder: str, on: DeviceKind | None) -> LoadedModel:
    from preheat.data.tokenizer import load_tokenizer
    from preheat.models.hf import configure, read_facts

    recipe = _set_device(Recipe(name="opened", model=Model(path=model), stop=Stop(max_steps=1)), on)
    # A length of 2 passes the check of any model; the positions are what is asked for.
    positions = read_facts(configure(replace(recipe, batch=replace(recipe.batch, seq_len=2)))).positions
    tokenizer = load_tokenizer(tokenizer_folder)
    # Nothing is trained here: batch and length only have to be valid.
    recipe = replace(recipe, batch=replace(recipe.batch, size=8, seq_len=min(512, positions or 512)))
    device, _ = resolve_device(recipe)
    model_build = build(recipe, vocabulary=count_embedding_rows(tokenizer), device=device, reading=True)
    return LoadedModel(recipe, model_build, tokenizer, None, tokenizer_folder)


def _load_adapter(path: Path, base: str | None, on: DeviceKind | None) -> LoadedModel:
    from preheat.models import configs
    from preheat.models.adapter_targets import require_adaptable
    from preheat.models.text_part import name_in_text
    from preheat.ops.adapters.peft_io import put_in, read_folder
    from preheat.ops.quantization.packed_experts import pack_modules_
    from preheat.ops.quantization.serialization import is_compressed

    folder = read_folder(path, "adapter")
    named = base or folder.base
    if named is None:
        raise RecipeError(f"adapter: {path} names no base model; name it with --base")
    # The adapter's tokenizer comes first: training may have added tokens to the base's.
    own = any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    try:
        opened = _load_folder(named, str(path) if own else named, on)
    except RecipeError as error:
        if base is not None:
            raise RecipeError(f"--base: {error}") from None
        if not Path(named).exists():
            raise RecipeError(
                f"adapter: {path}: its base model is not there ({error}); name the base's folder with --base"
            ) from None
        raise
    model = opened.build.trained[0]
    # An adapter corrects the weights that it was trained on, and quantized ones are no plain matrices.
    if is_compressed(model):
        knob = "--base" if base is not None else f"adapter: {path}"
        raise RecipeError(
            f"{knob}: {named} is compressed, and quantized weights cannot take adapters; name the original model"
        )
    # Before anything is put into the model: an adapter fits only the weights that it was trained on.
    folder.on_base(named, opened.build.weights, stated=base is not None)
    if configs.wrapper_config(opened.recipe) is not None:
        folder = folder.on_text_part(name_in_text)
    # Rounds the base as in training, since the adapter corrects the rounded weights.
    if packed := folder.written.get("nf4"):
        pack_modules_([model.get_submodule(name) for name in packed["modules"]], double=packed["double_quantization"])
    try:
        require_adaptable(model, folder.config)
    except SettingError as error:
        raise RecipeError(f"adapter: {path}: {error}") from None
    put_in(model, folder)
    return replace(opened, adapter=folder)
