"""Steps of chains over language models: compression methods, training with techniques, export formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from preheat import recipe as recipes
from preheat.compress import compress
from preheat.compress.before_after import Baseline, Untimed
from preheat.compress.calibration_text import find_texts
from preheat.compress.chain import START, Chain, Step, Steps, add_location
from preheat.compress.compress import Say, Variant
from preheat.compress.export import gguf_families, huggingface, registry
from preheat.compress.unfinished_run import note_unfinished
from preheat.core import Slot, Stage, Tag, Technique, TechniqueError, incompatibilities
from preheat.engine.builder import find_peak_learning_rate, list_techniques, to_single_device
from preheat.errors import PreheatError, RecipeError, RunError
from preheat.inference.load import load_model
from preheat.models.hf import require_decoder_only
from preheat.planning.plan_request import plan_on_this_machine
from preheat.recipe import Model, Recipe, Sample, Stop
from preheat.recipe.validate import RecipeReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from preheat.core.compression import CompressionResult
    from preheat.core.export import ExportResult

__all__ = ["TextSteps"]


class TextSteps(Steps["PreTrainedModel"]):
    """Steps over a run or a language model's folder.

    Attributes:
        place: input of the next step: a model's folder or a run's.
        start: the folder of the original model.
        recipe: its data and techniques are used by the steps that train.
        texts: calibration and held-out rows.
        tokens: that the run was trained on; None: train on fractions of one epoch over the data.
        rate: peak learning rate of the run.
        notes: on the steps.
        exports: results of the export writers.
    """

    measures_exports = False

    def __init__(self, source: str | Path, chain: Chain, out: Path, *, data: str | None, measured: int, say: Say):
        self._source, self._chain, self._out, self._measured, self._say = source, chain, out, measured, say
        self._methods = _parse_methods(chain)
        opened = load_model(source)
        require_decoder_only(opened.build.trained[0], "preheat compress")  # type: ignore[arg-type]
        if any(step.export == "gguf" for step in chain.steps):
            gguf_families.require_supported(opened.build.trained[0].config)  # type: ignore[arg-type]
        is_run = opened.step is not None
        if not is_run and data is None:
            raise RecipeError(
                "--data: is needed with a model's folder: name the text to calibrate, train and measure with"
            )
        # `alone` leaves out parallelism, which changes no result; the tokenizer is read from the model's folder.
        recipe = replace(
            to_single_device(opened.recipe), data=replace(opened.recipe.data, tokenizer=opened.tokenizer_folder)
        )
        if data is not None:
            # A folder has no validation split, so a tenth of the text is held out.
            validation = recipe.data.validation if is_run else 0.1
            recipe = replace(recipe, data=replace(recipe.data, source=data, validation=validation))
        # Errors of the command line appear before anything is measured.
        recipes.check(recipe)
        self.recipe = recipe
        # Only the first step's model is known before the text is read.
        if 1 in self._methods:
            with add_location(chain.locations[0]):
                compress.require_modules(opened.build.trained[0], [self._methods[1].method])  # type: ignore[arg-type]
        # `compress` would hold out every fifth row; here training has its own validation split, which must stay unseen.
        self.texts = find_texts(replace(opened, recipe=recipe, step=opened.step or 0), None, rows=128, length=None)
        self.start = self.place = out / "0-start"
        # Tokens of the run: steps x rows x length. None for a folder, which has no step.
        self.tokens = (opened.step or 0) * recipe.batch.size * recipe.batch.seq_len or None
        self.rate = find_peak_learning_rate(opened.build)
        self.notes: list[str] = []
        self.exports: list[ExportResult] = []
        self._rows: list[Untimed] = []
        self._opened = opened
        self._step_of_source = opened.step
        # Last, because it needs `start`, `tokens` and `rate`.
        self._require_possible(opened.build.device.kind)

    def begin(self) -> PreTrainedModel:
        chain = self._chain
        self._say("writing the original model")
        huggingface.write(self._source, self.start)  # creates `out`, or leaves nothing behind
        # Only the first step's model is known now; the models of later steps do not exist yet.
        if chain.steps[0].train is not None:
            try:
                with add_location(chain.locations[0]):
                    self._drop_impossible(chain.steps[0], plan_on_this_machine)
            except PreheatError:
                shutil.rmtree(self._out)  # no step has run yet
                raise
        self._say("measuring the original model")
        self._before = Baseline.of(self._opened, self.texts, measured=self._measured)
        # Frees the model, of which `Baseline` has a bf16 copy.
        del self._opened
        return self._before.plain

    def label(self, step: Step) -> str:
        if step.compress is not None:
            return step.compress
        return f"export to {step.export}" if step.export else " + ".join(["train", *step.techniques])

    def compress(self, step: Step, number: int) -> tuple[str, str]:
        variant = self._methods[number]
        name = f"{number}-{variant.name}"
        # One row and one turn, because `measure` measures all steps alike afterwards.
        summary = compress.compress(self.place, [variant], self._out / name, texts=self.texts, measured=1, turns=1)
        self.place = self._out / name
        self.notes += summary.notes
        return name, summary.variants[0].what

    def export(self, step: Step, number: int) -> tuple[str, str]:
        name = f"{number}-{step.export}"
        self.exports.append(registry.write(str(step.export), self.place, self._out / name, **step.settings))
        self.notes.append(self.exports[-1].note)
        return name, ""

    def train(self, step: Step, number: int) -> tuple[str, str]:
        from preheat.training.loop import train

        name = f"{number}-train"
        out = self._out / name
        # The last step was a training run, whose adapters have to be merged before the next recipe.
        if (self.place / "recipe.yaml").is_file():
            folder = self._out / f"{number}-from"
            huggingface.write(self.place, folder)
            self.place = folder
        # Planned on this machine: techniques may fit the original model and not the one of this step.
        recipe, skipped = self._drop_impossible(step, plan_on_this_machine)
        self.notes += [f"{name} was left out: {why}" for name, why in skipped.items()]
        result = train(recipe, out=out, progress=False)
        # Interrupted: an incomplete step must not be the input of the next one.
        if result["stopped"]:
            raise RunError(
                f"{out}: its training was ended by {result['stopped']} at step {result['steps']:,}, so the chain ends "
                f"here; preheat train {out}/recipe.yaml --out {out} --resume continues that step"
            )
        self.place = out
        names = ", ".join(name for name in step.techniques if name not in skipped) or "no further technique"
        return name, f"trained {result['steps']} steps with {names}; loss {result['validation_loss']:.4f}"

    def measure(self, step: Step, name: str, what: str) -> PreTrainedModel:
        comparison, timed = self._before.against(load_model(self.place))
        settings = dict(step.settings)
        self._rows.append(Untimed(name, self.label(step), settings, what, comparison.after.bytes, comparison))
        return timed

    def summarize(self, models: Mapping[str, PreTrainedModel], turns: int) -> CompressionResult:
        speeds = self._before.time(models, turns=turns)
        rows = [row.timed(speeds) for row in self._rows]
        choice = (rows[-1].name, "the last step of the chain")
        notes = compress.remove_duplicates([note_unfinished(self._source, self._step_of_source), *self.notes])
        return compress.summarize_variants(self.place, rows, choice, str(self._source), self.texts, notes, self.exports)

    def _require_possible(self, device: str) -> None:
        """Raises RecipeError for errors of training steps that do not depend on the model.

        These are wrong keys, occupied slots and incompatible techniques. Everything else is checked when the step is
        reached, since earlier steps may change the model.
        """

        # Tags of the techniques and of the device only; those of the model are unknown before its step.
        def check(recipe: Recipe) -> None:
            chosen = list_techniques(recipe)
            tags = frozenset(tag for t in chosen for tag in t.provided()) | {Tag(device)}
            if problems := incompatibilities(chosen, tags):
                raise TechniqueError(problems)

        for step, place in zip(self._chain.steps, self._chain.locations, strict=True):
            if step.train is not None:
                with add_location(place):
                    self._drop_impossible(step, check)

    def _drop_impossible(self, step: Step, check: Callable[[Recipe], object]) -> tuple[Recipe, dict[str, str]]:
        """Returns a step's recipe without the optional techniques that `check` rejects, and why each is rejected."""
        wanted = {
            # `$start` in a teacher's setting is the original model's folder.
            name: {key: str(self.start) if value == START else value for key, value in (settings or {}).items()}
            for name, settings in step.techniques.items()
        }
        skipped: dict[str, str] = {}
        # Each rejection may name one optional technique; without it, others may be rejected or accepted.
        while True:
            recipe = self._build_recipe(step, {name: wanted[name] for name in wanted if name not in skipped})
            try:
                check(recipe)
            except TechniqueError as error:
                # A problem with a technique that is not optional is an error of the chain.
                refused = next((p for p in error.problems if p.technique in step.where_possible), None)
                if refused is None:
                    raise
                skipped[refused.technique] = refused.text
            else:
                return recipe, skipped

    def _build_recipe(self, step: Step, techniques: Mapping[str, object]) -> Recipe:
        reader = RecipeReader("chain", {})
        added = reader.techniques(techniques)
        reader.refuse()
        base, share = self.recipe, step.train or 0.0
        # At least one token, so that a tiny fraction still trains one step.
        stop = Stop(epochs=share) if self.tokens is None else Stop(tokens=max(1, round(share * self.tokens)))
        recipe = replace(
            base,
            model=Model(path=str(self.place)),
            # The step's own settings have precedence over the run's.
            techniques=_keep_techniques(base) | added,
            optimizer=replace(base.optimizer, lr=step.rate * self.rate),
            stop=stop,
            # No samples of text during the steps.
            sample=Sample(),
        )
        # JSON is YAML, so that strings and lists survive the way through `override`.
        items = [f"{key}={json.dumps(value)}" for key, value in step.settings.items()]
        return recipes.override(recipe, *items, where="settings") if items else recipe


def _parse_methods(chain: Chain) -> dict[int, Variant]:
    """Returns the compression methods by step number; reports errors of any step before the first one starts."""
    if chain.steps[0].export is not None:
        raise RecipeError(f"{chain.locations[0]}: exports the unchanged model; use preheat export")
    variants: dict[int, Variant] = {}
    for number, (step, place) in enumerate(zip(chain.steps, chain.locations, strict=True), 1):
        with add_location(place):
            if step.compress is not None:
                variants[number] = compress.build_variant(step.compress, step.settings)
            if step.export is not None:
                # Called for its errors: it rejects unknown formats and dtypes.
                registry.choose_default_output(Path(), step.export, step.settings.get("dtype"))
                registry.require_settings(step.export, step.settings)
                if strange := sorted(step.settings.keys() - {"dtype", "tolerance", "length"}):
                    raise RecipeError(
                        f"export to {step.export} has no setting '{strange[0]}'; it has dtype, tolerance, length"
                    )
    return variants


def _keep_techniques(recipe: Recipe) -> dict[str, Technique]:
    """Returns the run's techniques that apply to any model: kernel stage or later, no objective and no parallelism."""
    return {
        name: t
        for name, t in recipe.techniques.items()
        if t.stage >= Stage.KERNEL and Slot.OBJECTIVE not in t.claimed() and not t.is_parallel()
    }
