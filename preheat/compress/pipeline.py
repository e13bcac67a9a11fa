"""A chain: steps that make a trained model smaller one after the other, each measured on the same held-out text.

    name: edge
    chain:
      - {compress: width, settings: {parameters: 0.7}}
      - {train: 0.1, techniques: {distillation: {teacher: $start}}}
      - {compress: int8}

`run_chain` writes a folder with one for each step (a model's, a run's, or an export), `compress.json` as `compress.compress` writes it, with
the steps as its variants, and so the same page.
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
    """Goes on training: over this share of the tokens that the run was trained on, or of its data once where a model's folder is begun with."""
    rate: Annotated[float, Bound(0, open_low=True)] = 0.25
    """train: learning rate at its peak, as a share of the run's: a trained model that was changed wants less than a new one."""
    export: str | None = None
    """A format of `preheat export`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """compress: the method's; train: keys of the recipe, `optimizer.lr: 1e-4`; export: `dtype`."""
    techniques: Mapping[str, Any] = field(default_factory=dict)
    """train: with their settings, beside those that the run was trained with. `$start` is the folder of the model that the chain begins with."""
    where_possible: tuple[str, ...] = ()
    """train: of the techniques, those that are left out where this model cannot have them, which is said."""

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
    """Attributes:
    places: where each step stands, for messages: FILE:LINE: chain.N.
    """

    name: str
    steps: tuple[Step, ...]
    places: tuple[str, ...]


def load_chain(path: str | Path) -> Chain:
    """A chain from a YAML file, or by the name of a built-in one.

    Raises:
        RecipeError: no such file, or what is wrong in it, the settings of its steps' techniques included; a line each.

    Example:
        >>> [next(k for k in ("compress", "train", "export") if getattr(s, k)) for s in load_chain("inference-speed").steps]
        ['train', 'compress']
    """
    file = Path(path)
    if not file.is_file():
        known = {name: found for name, found in recipes.built_in().items() if found.parent.name == "chains"}
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
    for n, values_of_step in enumerate(values["chain"]):
        at = ("chain", str(n))
        steps.append(step := reader.flat(Step, values_of_step, at))
        places.append(f"{path}:{lines[at]}: chain.{n}")
        if step is not None:
            reader.techniques(step.techniques, (*at, "techniques"))
    name = str(values.get("name", file.stem))
    if "name" in values and (words := folder_name_problem(name)):
        reader.say(("name",), f"name: {words}")
    reader.refuse()
    return Chain(name, tuple(steps), tuple(places))


@dataclass
class _State:
    """Where a chain stands.

    Attributes:
        place: what the next step begins from: a model's folder or a run's.
        recipe: whose data and techniques the steps that train go on with.
        texts: to calibrate with and to measure on.
        start: the folder of the model that the chain began with.
        tokens: that a run was trained on; None: of one pass over the data. rate: its learning rate at the peak.
        said: what is to be known of the steps. exports: what the writers gave.
    """

    place: Path
    recipe: Recipe
    texts: Texts
    start: Path
    out: Path
    tokens: int | None
    rate: float
    said: list[str] = field(default_factory=list)
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
    say: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:
    """Runs a chain on a trained model; `out` and what each step wrote stay where a later one fails.

    Args:
        source: a run, whose data and techniques its steps go on with; or a model's folder, with `data`.
        data: a text to calibrate, train and measure with.
        measured: held-out rows, at most.
        turns: of the timing.
        page: given the folder with its compress.json, to put a page there.
        say: told what is being done.

    Returns:
        As `compress.compress`, of the last step; `variants` are the steps, `said` is what was left out and why, `exports` what was written for others.

    Raises:
        RecipeError, DataError, RunError: before the first step where that can be known.
    """
    out = Path(out)
    require_new(out, source)
    methods = _methods(chain)
    opened = load_model(source)
    require_decoder_only(opened.build.trained[0], "preheat compress")  # type: ignore[arg-type]
    ran, step_of_source = opened.step is not None, opened.step
    if not ran and data is None:
        raise RecipeError("--data: is needed with a model's folder: name the text to calibrate, train and measure with")
    recipe = replace(alone(opened.recipe), data=replace(opened.recipe.data, tokenizer=opened.tokenizer_folder))
    if data is not None:
        validation = recipe.data.validation if ran else 0.1
        recipe = replace(recipe, data=replace(recipe.data, source=data, validation=validation))
    # Not by parts of a named text, as `compress` does: the steps train on it, so what is measured on is what training holds out.
    texts = find_texts(replace(opened, recipe=recipe, step=opened.step or 0), None, rows=128, length=None)
    start = out / "0-start"
    tokens = (opened.step or 0) * recipe.batch.size * recipe.batch.length
    state = _State(start, recipe, texts, start, out, tokens or None, peak_learning_rate(opened.build))
    _require_possible(chain, state, opened.build.device.kind)
    say("writing the model that it begins with")
    huggingface.write(source, start)  # makes the folder, or leaves nothing
    if chain.steps[0].train is not None:
        try:
            with said_of(chain.places[0]):
                _possible(chain.steps[0], state, plan_here)
        except PreheatError:
            shutil.rmtree(out)  # nothing was done yet
            raise
    say("measuring the model that it begins with")
    before = Baseline.of(opened, texts, measured=measured)
    del opened
    found: list[dict[str, Any]] = []
    models = {"before": before.plain}
    for number, step in enumerate(chain.steps, 1):
        say(f"step {number} of {len(chain.steps)}: {_words(step)}")
        with said_of(chain.places[number - 1]):
            name, words = _take(step, number, state, methods.get(number))
        if step.export is None:
            say(f"step {number} of {len(chain.steps)}: measuring")
            told, timed = before.against(load_model(state.place))
            told |= {
                "name": name,
                "method": _words(step),
                "settings": dict(step.settings),
                "what": words,
                "bytes": told["after"]["bytes"],
            }
            models[name] = timed
            found.append(told)
    say("timing")
    before.time(found, models, turns=turns)
    made = compress.summed(state.place, found, (found[-1]["name"], "the last step of the chain"), str(source), texts)
    made |= {"said": compress.once([unfinished(source, step_of_source), *state.said]), "exports": state.exports}
    write_asked(out / "compress.json", to_json(made, indent=1), fix="free some room; the steps' folders are whole")
    page(out)
    return made


def _methods(chain: Chain) -> dict[int, Variant]:
    """By the step's number: what is wrong with any is said before the first begins."""
    if chain.steps[0].export is not None:
        raise RecipeError(f"{chain.places[0]}: exports what the chain begins with; use preheat export")
    found: dict[int, Variant] = {}
    for number, (step, place) in enumerate(zip(chain.steps, chain.places, strict=True), 1):
        with said_of(place):
            if step.compress is not None:
                found[number] = compress.made_of(step.compress, step.settings)
            if step.export is not None:
                registry.place_of(Path(), step.export, step.settings.get("dtype"))
                registry.require_settings(step.export, step.settings)
                if strange := sorted(step.settings.keys() - {"dtype", "tolerance", "length"}):
                    raise RecipeError(
                        f"export to {step.export} has no setting '{strange[0]}'; it has dtype, tolerance, length"
                    )
    return found


@contextlib.contextmanager
def said_of(place: str) -> Iterator[None]:
    """What is wrong in a step is said with where it stands."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from None


def _require_possible(chain: Chain, state: _State, device: str) -> None:
    """Raises RecipeError for what is wrong in a step that trains, whatever its model will be: keys, slots, what excludes each other.

    What depends on the model is known only where the step is reached: those before it may change the model.
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
    """Takes a step; the state's place is what it wrote. Returns its name and what was done."""
    if variant is not None:
        name = f"{number}-{variant.name}"
        made = compress.compress(state.place, [variant], state.out / name, texts=state.texts, measured=1, turns=1)
        state.place = state.out / name
        state.said += made["said"]
        return name, made["variants"][0]["what"]
    if step.export is not None:
        name = f"{number}-{step.export}"
        state.exports.append(registry.write(step.export, state.place, state.out / name, **step.settings))
        state.said.append(state.exports[-1]["note"])
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

    recipe, left = _possible(step, state, plan_here)
    state.said += [f"{name} was left out: {why}" for name, why in left.items()]
    made = train(recipe, out=out, progress=False)
    if made["stopped"]:
        raise RunError(
            f"{out}: its training was ended by {made['stopped']} at step {made['steps']:,}, so the chain ends here; preheat train "
            f"{out}/recipe.yaml --out {out} --resume goes on with that step"
        )
    names = ", ".join(name for name in step.techniques if name not in left)
    return f"trained {made['steps']} steps with {names or 'no further technique'}; loss {made['validation_loss']:.4f}"


def _possible(step: Step, state: _State, check: Callable[[Recipe], object]) -> tuple[Recipe, dict[str, str]]:
    """A step's recipe without those of `where_possible` that `check` refuses, and these with the reason."""
    wanted = {name: _filled(settings or {}, state) for name, settings in step.techniques.items()}
    left: dict[str, str] = {}
    while True:
        recipe = _recipe(step, state, {name: wanted[name] for name in wanted if name not in left})
        try:
            check(recipe)
        except TechniqueError as error:
            refused = next((p for p in error.problems if p.technique in step.where_possible), None)
            if refused is None:
                raise
            left[refused.technique] = refused.text
        else:
            return recipe, left


def _filled(settings: Mapping[str, Any], state: _State) -> dict[str, Any]:
    return {key: str(state.start) if value == START else value for key, value in settings.items()}


def _kept(recipe: Recipe) -> dict[str, Technique]:
    """The run's techniques that a model's folder does not have in it, and that leave the objective to the step."""
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
    made = replace(
        base,
        model=Model(path=str(state.place)),
        techniques=_kept(base) | added,
        optimizer=replace(base.optimizer, lr=step.rate * state.rate),
        stop=stop,
        sample=Sample(),
    )
    items = [f"{key}={json.dumps(value)}" for key, value in step.settings.items()]
    return recipes.override(made, *items, where="settings") if items else made
