"""Compression pipelines: a sequence of compress, train and export steps, measured on the same held-out text.

    name: edge
    chain:
      - {compress: width, settings: {parameters: 0.7}}
      - {train: 0.1, techniques: {distillation: {teacher: $start}}}
      - {compress: int8}

`run_chain` writes one subfolder per step (a model, a run or an export), and `compress.json` in the format of
`compress.compress` with the steps as its variants, so that the same page can be made of it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from preheat import recipe as recipes
from preheat.compress import compress
from preheat.compress.atomic_folder import require_new
from preheat.compress.before_after import Baseline
from preheat.compress.calibration_text import Texts, find_texts
from preheat.compress.compress import Variant
from preheat.compress.export import huggingface, registry
from preheat.compress.unfinished_run import unfinished
from preheat.core import Slot, Stage, Tag, Technique, TechniqueError, incompatibilities
from preheat.engine.builder import alone, peak_learning_rate, techniques_of
from preheat.errors import PreheatError, RecipeError, RunError, nearest
from preheat.inference.load import load_model
from preheat.models.hf import require_decoder_only
from preheat.recipe import Bound, Model, Recipe, Sample, Stop
from preheat.recipe.consistency import folder_name_problem
from preheat.recipe.validate import RecipeReader
from preheat.recipe.yaml_io import read
from preheat.run_dir import to_json, write_asked
from preheat.training.session import plan_here

__all__ = ["START", "Chain", "Step", "load_chain", "run_chain", "said_of"]

START = "$start"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: exactly one of compress, train and export."""

    compress: str | None = None
    """A method of `preheat compress`."""
    train: Annotated[float, Bound(0, open_low=True)] | None = None
    """Continues training on this fraction of the run's tokens; for a model's folder, of one epoch over the data."""
    rate: Annotated[float, Bound(0, open_low=True)] = 0.25
    """train: peak learning rate, as a fraction of the run's: a modified trained model needs less than a new one."""
    export: str | None = None
    """A format of `preheat export`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """compress: the method's; train: keys of the recipe, `optimizer.lr: 1e-4`; export: `dtype`."""
    techniques: Mapping[str, Any] = field(default_factory=dict)
    """train: techniques with their settings, in addition to the run's. `$start` is the folder of the original model."""
    where_possible: tuple[str, ...] = ()
    """train: those of the techniques that are skipped, with a note, if this model does not support them."""

    def __post_init__(self) -> None:
        kinds = [kind for kind in ("compress", "train", "export") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a step is one of compress, train, export; this one states {' and '.join(kinds) or 'none'}"
            )
        if self.train is None and (self.techniques or self.where_possible):
            raise ValueError("techniques and where_possible are for a step that trains")
        if strange := [name for name in self.where_possible if name not in self.techniques]:
            raise ValueError(f"where_possible: {strange[0]} does not stand in the step's techniques")


@dataclass(frozen=True)
class Chain:
    """A named sequence of steps.

    Attributes:
        places: location of each step for error messages: FILE:LINE: chain.N.
    """

    name: str
    steps: tuple[Step, ...]
    places: tuple[str, ...]


def load_chain(path: str | Path) -> Chain:
    """Reads a chain from a YAML file, or a built-in one by name.

    Raises:
        RecipeError: no such file; or all errors in it, including settings of the steps' techniques, one per line.

    Example:
        >>> kinds = ("compress", "train", "export")
        >>> [next(kind for kind in kinds if getattr(step, kind)) for step in load_chain("inference-speed").steps]
        ['train', 'compress']
    """
    file = Path(path)
    if not file.is_file():
        known = {name: built_in for name, built_in in recipes.built_in().items() if built_in.parent.name == "chains"}
        if str(path) not in known:
            raise RecipeError(
                f"--recipe {path}: no such file, and no built-in chain of that name; {nearest(str(path), list(known))}"
            )
        file = known[str(path)]
    values, lines = read(file, str(path))
    if not isinstance(values, Mapping) or not isinstance(values.get("chain"), list) or not values["chain"]:
        raise RecipeError(
            f"{path}: is no chain: it has no list of steps under `chain`; preheat recipes show edge shows one"
        )
    reader = RecipeReader(str(path), lines)
    for key in values:
        if key not in ("name", "chain"):
            reader.say((key,), f"unknown key '{key}'; a chain has a name and its steps")
    steps, places = [], []
    for n, settings in enumerate(values["chain"]):
        at = ("chain", str(n))
        steps.append(step := reader.flat(Step, settings, at))
        places.append(f"{path}:{lines[at]}: chain.{n}")
        if step is not None:
            reader.techniques(step.techniques, (*at, "techniques"))
    name = str(values.get("name", file.stem))
    if "name" in values and (problem := folder_name_problem(name)):
        reader.say(("name",), f"name: {problem}")
    reader.refuse()
    return Chain(name, tuple(steps), tuple(places))


@dataclass
class _State:
    """State of a running chain.

    Attributes:
        place: input of the next step: a model's folder or a run's.
        recipe: its data and techniques are used by the steps that train.
        texts: calibration and held-out rows.
        start: the folder of the original model.
        out: the folder of the chain.
        tokens: that the run was trained on; None: train on fractions of one epoch over the data.
        rate: peak learning rate of the run.
        notes: on the steps.
        exports: results of the export writers.
    """

    place: Path
    recipe: Recipe
    texts: Texts
    start: Path
    out: Path
    tokens: int | None
    rate: float
    notes: list[str] = field(default_factory=list)
    exports: list[dict[str, Any]] = field(default_factory=list)


def run_chain(
    source: str | Path,
    chain: Chain,
    out: str | Path,
    *,
    data: str | None = None,
    measured: int = 64,
    turns: int = 5,
    page: compress.Page = lambda folder: None,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Runs a chain on a trained model; `out` and the finished steps are kept if a later step fails.

    Args:
        source: a run, whose data and techniques the training steps reuse; or a model's folder, with `data`.
        data: a text to calibrate, train and measure with.
        measured: maximum number of held-out rows.
        turns: timed turns per model.
        page: called with the folder after compress.json is written, to write a page.
        say: progress callback.

    Returns:
        As `compress.compress`, for the last step; `variants` are the steps, `said` lists what was skipped and why,
        `exports` the results of the export writers.

    Raises:
        RecipeError, DataError, RunError: before the first step if the error can be known by then.
    """
    out = Path(out)
    require_new(out, source)
    methods = _methods(chain)
    opened = load_model(source)
    require_decoder_only(opened.build.trained[0], "preheat compress")  # type: ignore[arg-type]
    is_run, step_of_source = opened.step is not None, opened.step
    if not is_run and data is None:
        raise RecipeError("--data: is needed with a model's folder: name the text to calibrate, train and measure with")
    recipe = replace(alone(opened.recipe), data=replace(opened.recipe.data, tokenizer=opened.tokenizer_folder))
    if data is not None:
        validation = recipe.data.validation if is_run else 0.1
        recipe = replace(recipe, data=replace(recipe.data, source=data, validation=validation))
    recipes.check(recipe)
    # `compress` would hold out every fifth row; here training has its own validation split, which must stay unseen.
    texts = find_texts(replace(opened, recipe=recipe, step=opened.step or 0), None, rows=128, length=None)
    start = out / "0-start"
    tokens = (opened.step or 0) * recipe.batch.size * recipe.batch.seq_len
    state = _State(start, recipe, texts, start, out, tokens or None, peak_learning_rate(opened.build))
    _require_possible(chain, state, opened.build.device.kind)
    say("writing the model that it begins with")
    huggingface.write(source, start)  # creates `out`, or leaves nothing behind
    if chain.steps[0].train is not None:
        try:
            with said_of(chain.places[0]):
                _possible(chain.steps[0], state, plan_here)
        except PreheatError:
            shutil.rmtree(out)  # no step has run yet
            raise
    say("measuring the model that it begins with")
    before = Baseline.of(opened, texts, measured=measured)
    del opened
    figures: list[dict[str, Any]] = []
    models = {"before": before.plain}
    for number, step in enumerate(chain.steps, 1):
        say(f"step {number} of {len(chain.steps)}: {_words(step)}")
        with said_of(chain.places[number - 1]):
            name, description = _take(step, number, state, methods.get(number))
        if step.export is None:
            say(f"step {number} of {len(chain.steps)}: measuring")
            row, timed = before.against(load_model(state.place))
            row |= {
                "name": name,
                "method": _words(step),
                "settings": dict(step.settings),
                "what": description,
                "bytes": row["after"]["bytes"],
            }
            models[name] = timed
            figures.append(row)
    say("timing")
    before.time(figures, models, turns=turns)
    summary = compress.summed(
        state.place, figures, (figures[-1]["name"], "the last step of the chain"), str(source), texts
    )
    summary |= {"said": compress.once([unfinished(source, step_of_source), *state.notes]), "exports": state.exports}
    write_asked(out / "compress.json", to_json(summary, indent=1), fix="free some room; the steps' folders are whole")
    page(out)
    return summary


def _methods(chain: Chain) -> dict[int, Variant]:
    """Returns the compression methods by step number; reports errors of any step before the first one starts."""
    if chain.steps[0].export is not None:
        raise RecipeError(f"{chain.places[0]}: exports what the chain begins with; use preheat export")
    variants: dict[int, Variant] = {}
    for number, (step, place) in enumerate(zip(chain.steps, chain.places, strict=True), 1):
        with said_of(place):
            if step.compress is not None:
                variants[number] = compress.made_of(step.compress, step.settings)
            if step.export is not None:
                registry.place_of(Path(), step.export, step.settings.get("dtype"))
                registry.require_settings(step.export, step.settings)
                if strange := sorted(step.settings.keys() - {"dtype", "tolerance", "length"}):
                    raise RecipeError(
                        f"export to {step.export} has no setting '{strange[0]}'; it has dtype, tolerance, length"
                    )
    return variants


@contextlib.contextmanager
def said_of(place: str) -> Iterator[None]:
    """Context manager that adds a step's location to RecipeErrors."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from None


def _require_possible(chain: Chain, state: _State, device: str) -> None:
    """Raises RecipeError for errors of training steps that do not depend on the model.

    These are wrong keys, occupied slots and incompatible techniques. Everything else is checked when the step is
    reached, since earlier steps may change the model.
    """

    def check(recipe: Recipe) -> None:
        chosen = techniques_of(recipe)
        tags = frozenset(tag for t in chosen for tag in t.provided()) | {Tag(device)}
        if problems := incompatibilities(chosen, tags):
            raise TechniqueError(problems)

    for step, place in zip(chain.steps, chain.places, strict=True):
        if step.train is not None:
            with said_of(place):
                _possible(step, state, check)


def _words(step: Step) -> str:
    if step.compress is not None:
        return step.compress
    return f"export to {step.export}" if step.export else " + ".join(["train", *step.techniques])


def _take(step: Step, number: int, state: _State, variant: Variant | None) -> tuple[str, str]:
    """Runs one step and points `state.place` at its output; returns the step's name and a description."""
    if variant is not None:
        name = f"{number}-{variant.name}"
        summary = compress.compress(state.place, [variant], state.out / name, texts=state.texts, measured=1, turns=1)
        state.place = state.out / name
        state.notes += summary["said"]
        return name, summary["variants"][0]["what"]
    if step.export is not None:
        name = f"{number}-{step.export}"
        state.exports.append(registry.write(step.export, state.place, state.out / name, **step.settings))
        state.notes.append(state.exports[-1]["note"])
        return name, ""
    name = f"{number}-train"
    if (state.place / "recipe.yaml").is_file():
        folder = state.out / f"{number}-from"
        huggingface.write(state.place, folder)
        state.place = folder
    trained = _trained(step, state, state.out / name)
    state.place = state.out / name
    return name, trained


def _trained(step: Step, state: _State, out: Path) -> str:
    from preheat.training.loop import train

    recipe, skipped = _possible(step, state, plan_here)
    state.notes += [f"{name} was left out: {why}" for name, why in skipped.items()]
    result = train(recipe, out=out, progress=False)
    if result["stopped"]:
        raise RunError(
            f"{out}: its training was ended by {result['stopped']} at step {result['steps']:,}, so the chain "
            "ends here; preheat train "
            f"{out}/recipe.yaml --out {out} --resume goes on with that step"
        )
    names = ", ".join(name for name in step.techniques if name not in skipped)
    return (
        f"trained {result['steps']} steps with {names or 'no further technique'}; loss {result['validation_loss']:.4f}"
    )


def _possible(step: Step, state: _State, check: Callable[[Recipe], object]) -> tuple[Recipe, dict[str, str]]:
    """Returns a step's recipe without the optional techniques that `check` rejects, and why each is rejected."""
    wanted = {name: _filled(settings or {}, state) for name, settings in step.techniques.items()}
    skipped: dict[str, str] = {}
    while True:
        recipe = _recipe(step, state, {name: wanted[name] for name in wanted if name not in skipped})
        try:
            check(recipe)
        except TechniqueError as error:
            refused = next((p for p in error.problems if p.technique in step.where_possible), None)
            if refused is None:
                raise
            skipped[refused.technique] = refused.text
        else:
            return recipe, skipped


def _filled(settings: Mapping[str, Any], state: _State) -> dict[str, Any]:
    return {key: str(state.start) if value == START else value for key, value in settings.items()}


def _kept(recipe: Recipe) -> dict[str, Technique]:
    """Returns the run's techniques that apply to any model: kernel stage or later, no objective and no parallelism."""
    return {
        name: t
        for name, t in recipe.techniques.items()
        if t.stage >= Stage.KERNEL and Slot.OBJECTIVE not in t.owned() and not t.is_parallel()
    }


def _recipe(step: Step, state: _State, techniques: Mapping[str, Any]) -> Recipe:
    reader = RecipeReader("chain", {})
    added = reader.techniques(techniques)
    reader.refuse()
    base, share = state.recipe, step.train or 0.0
    stop = Stop(epochs=share) if state.tokens is None else Stop(tokens=max(1, round(share * state.tokens)))
    recipe = replace(
        base,
        model=Model(path=str(state.place)),
        techniques=_kept(base) | added,
        optimizer=replace(base.optimizer, lr=step.rate * state.rate),
        stop=stop,
        sample=Sample(),
    )
    items = [f"{key}={json.dumps(value)}" for key, value in step.settings.items()]
    return recipes.override(recipe, *items, where="settings") if items else recipe
