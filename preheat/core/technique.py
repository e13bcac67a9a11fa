"""The four types that name one another: a `Recipe` names `Technique`s, their checks look at a `Context`, and they
change a `Build`. No torch.

They are in one file since each is half of another's definition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from preheat.core import schema
from preheat.core.batch import Batch, Stateful
from preheat.core.example_kind import ExampleKind
from preheat.core.field_types import Seed
from preheat.core.mesh import Axis, Mesh
from preheat.core.slots import Change, Finish, Order, Slot, Stage
from preheat.core.tags import Tag
from preheat.core.trials import Trials
from preheat.core.vision import Vision

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = [
    "Build",
    "Context",
    "DatasetPass",
    "Device",
    "Hooks",
    "ModelFacts",
    "Numerics",
    "Recipe",
    "Searchable",
    "Technique",
]


@dataclass(frozen=True)
class ModelFacts:
    """What a check may know of the model without building it."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool
    window: int | None = None
    score_softcap: float | None = None  # attention's scores are cap * tanh(score / cap), as in Gemma 2
    logit_softcap: float | None = None  # so are the logits
    experts: int = 0  # of a layer; 0: one feed-forward block for all tokens
    experts_per_token: int = 0
    expert_width: int = 0  # inner width of one expert
    expert_layers: int = 0  # layers that have experts
    vision: Vision | None = None  # how it reads images; None: it reads text alone
    encoder: bool = False  # an encoder reads prompts and a decoder writes answers, `layers` of both together


@dataclass(frozen=True)
class Device:
    """What a check may know of the device."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory: int  # bytes that a run may use
    capability: tuple[int, int] | None = None  # CUDA's
    at_hand: bool = True  # False: it is planned for from elsewhere, where what runs on it need not be installed
    expandable: bool = False  # torch's allocator has one segment a stream that grows, in place of many of fixed sizes
    notice: str = ""  # what the user should know of how it is used


@dataclass(frozen=True)
class Context:
    """What `check`, `options` and `rungs` may look at."""

    recipe: Recipe
    model: ModelFacts
    device: Device
    tags: frozenset[Tag]
    sizes: Mapping[Axis, int] = field(default_factory=lambda: dict.fromkeys(Axis, 1))
    """Devices along each axis of the mesh."""


Numerics = Literal["exact", "rounding", "different"]
"""What a technique changes of the numbers. exact: the order of sums alone; rounding: the number format; different:
another model or loss."""


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """One idea that changes a build. Abstract or final: subclassed once, no method overridden twice.

    A subclass's fields are its settings in the recipe; the text under each field is its help. The module's docstring
    says what it does, when it helps, when it hurts, and its source.
    """

    stage: ClassVar[Stage]
    numerics: ClassVar[Literal["exact", "rounding", "different"]]
    """exact: same result but for the order of sums; rounding: same up to the number format; different: another model or
    loss."""
    trials: ClassVar[Trials] = Trials()
    """How tests and benchmarks of every technique try this one."""
    owns: ClassVar[frozenset[Slot]] = frozenset()
    provides: ClassVar[frozenset[Tag]] = frozenset()
    needs: ClassVar[frozenset[Tag]] = frozenset()
    conflicts: ClassVar[frozenset[Tag]] = frozenset()
    roles: ClassVar[frozenset[str]] = frozenset({"trained"})
    training_only: ClassVar[bool] = False
    """It changes how a model is trained, and nothing of what it is then: whoever opens a run to read from it leaves it
    out."""
    unsupported_for_images: ClassVar[str] = ""
    """Why it does not serve models that read images, and what to do; empty: it does."""
    supports_encoder_decoder: ClassVar[bool] = False
    """Whether it serves models with an encoder as well, and was tried with them."""

    def owned(self) -> frozenset[Slot]:
        """The slots of `owns` that these settings take."""
        return self.owns

    def provided(self) -> frozenset[Tag]:
        """The tags of `provides` that these settings bring."""
        return self.provides

    def acts(self) -> bool:
        """Whether these settings do anything: what does nothing has no needs and no conflicts."""
        return True

    def read_on(self, device: Device) -> Technique:
        """These settings if the trained model is only read, on a device that may be another than it was trained on."""
        return self

    def host_overhead(self) -> float:
        """How many times as long as without it the host takes for an operator of a step: Python that comes between
        operators."""
        return 1.0

    def startup_seconds(self, device: Device) -> float:
        """Seconds that a run takes once, before its first step, because of it."""
        return 0.0

    @classmethod
    def name(cls) -> str:
        """The key in the recipe: the module's name."""
        return cls.__module__.rpartition(".")[2]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:  # Searchable
            return
        for base in cls.__mro__[1:]:
            if base not in (Technique, Searchable) and issubclass(base, Technique) and base.name() in _REGISTRY:
                raise TypeError(
                    f"{cls.__name__} extends the technique {base.name()}: techniques are not subclassed twice"
                )
        _REGISTRY[cls.name()] = cls

    def configure(self, config: Any, recipe: Recipe) -> Any:
        """Changes the model's transformers configuration before it is checked and the model made, in place.

        Returns:
            None, or another configuration to go on with, where the model becomes one of another family.

        Raises:
            ValueError: this model cannot have it; the words begin with the knob.
        """
        return None

    def examples(self) -> ExampleKind | None:
        """What rows must hold for it; None: it does not matter."""
        return None

    def degrees(self) -> Mapping[Axis, int]:
        """Devices that it asks for along axes of the mesh; 0: all that the others leave."""
        return {}

    @classmethod
    def is_parallel(cls) -> bool:
        """Whether it shares out the work of one device among several; numbers stay what they were."""
        return cls.degrees is not Technique.degrees

    def check(self, context: Context) -> list[str]:
        """Why this cannot serve here, in words; empty when it can."""
        return []

    @abstractmethod
    def apply(self, build: Build, part: nn.Module) -> Change:
        """Acts on one part of the build: a few lines that call the plain functions of the module."""

    def micro_batch_count(self) -> int:
        """Micro-batches that it cuts a device's rows into."""
        return 1

    def period(self) -> int:
        """Layers after which the effect repeats."""
        return 1


class Searchable(Technique):
    """A technique that a search may add, or that recovery from an out-of-memory error may switch on."""

    last_resort: ClassVar[bool] = False
    """It costs time that a plan does not see yet: a search adds it only if nothing else fits."""
    searched_on: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    """Kinds of devices on which a search adds it: those on which plans predict rightly whether it is faster."""
    memory_saving: ClassVar[bool] = False
    """Whether a run that is out of memory may add it, with any of its `options`: the same weights, data and loss in
    less memory. A run may be resumed with it, without it, or with other settings of it."""

    def search_numerics(self) -> Numerics | None:
        """What a run gives up of its numbers if a search adds these settings; None: a search never does.

        It speaks of the whole run, and `numerics` of the gradients alone. None is for other models, data, objectives
        and optimizers than the recipe's, and for what a plan cannot see the good of.
        """
        return None

    def options(self, context: Context) -> Iterable[Technique]:
        """Settings worth searching; if it is `memory_saving`, the mildest first."""
        return [self]

    def fallbacks(self, context: Context) -> Iterable[Technique]:
        """Settings with the same weights and less memory, for recovery, the mildest first."""
        return []

    def left_open(self, device: Device) -> bool:
        """Whether a plan (`resolve_auto`) or a search decides by which settings it acts on such a device."""
        return False

    def resolve_auto(self, context: Context, plan: Callable[[Technique], Mapping[str, Any]]) -> Technique:
        """Itself with values for what only a dry run can choose.

        Args:
            plan: of the recipe with another technique in the place of this one; its keys are
                `preheat.run_dir.PLAN_KEYS`.
        """
        return self


_REGISTRY: dict[str, type[Technique]] = {}
"""Filled as technique modules are imported; `preheat.core.registry` imports them all."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run. Frozen: `dataclasses.replace` or `override` make another."""

    name: str = "run"
    """A short name, used for the run's folder."""
    seed: Seed = 0
    """Decides weights, data order and every other draw."""
    model: schema.Model = field(default_factory=schema.Model)
    data: schema.Data = field(default_factory=schema.Data)
    batch: schema.Batch = field(default_factory=schema.Batch)
    optimizer: schema.Optimizer = field(default_factory=schema.Optimizer)
    schedule: schema.Schedule = field(default_factory=schema.Schedule)
    stop: schema.Stop = field(default_factory=schema.Stop)
    evaluate: schema.Evaluate = field(default_factory=schema.Evaluate)
    checkpoint: schema.Checkpoint = field(default_factory=schema.Checkpoint)
    sample: schema.Sample = field(default_factory=schema.Sample)
    hardware: schema.Hardware = field(default_factory=schema.Hardware)
    parallel: schema.Parallel = field(default_factory=schema.Parallel)
    techniques: Mapping[str, Technique] = field(default_factory=dict)
    """Techniques by name with their settings; the order does not matter (their stages decide)."""


class DatasetPass(Protocol):
    """A pass over the training rows before the first of them is trained on."""

    def __call__(self, rows: Any, numbers: Iterable[int], progress: Callable[[str, float, float], None]) -> None:
        """Reads `numbers` of the `rows` (data.Rows or StreamRows), those that will be trained on; reports progress as
        (what, done, of how much)."""

    def once(self, batch: Batch) -> None:
        """What it does to one micro-batch, for a dry run."""


class BatchTransfer(Protocol):
    """Moves micro-batches to the device, the next one while the step runs (`engine.transfer.Transfer`)."""

    def __call__(self, host: Batch) -> Batch:
        """Moves a batch now."""

    def begin(self, read: Batch, host: Batch) -> None:
        """Begins to copy `host`, which is what the transforms make of `read`."""

    def begun(self, read: Batch) -> Batch | None:
        """The copy that was begun of this batch; None if none was."""


@dataclass
class Hooks:
    """What techniques add around the parts of a step. Each list is called in the order of its entries.

    Attributes:
        transforms: of a batch on its way to the model, in the order of `Order`.
        around_forward: contexts that are entered around each forward pass, autocast for one.
        before_backward: called before each micro-batch with `is_last`; the last backward pass must leave gradients
            complete.
        finish_gradients: called on complete gradients before clipping, in the order of `Finish`.
        after_update: called after each optimizer step.
        around_optimizer: each wraps the function that makes the optimizer: over shards of the parameters, for one.
        dataset_passes: passes over the training rows before the first of them is trained on.
        transfer: one of the transforms: how batches get to the device; None if they are there already.
    """

    transforms: list[tuple[Order, Callable[[Batch], Batch]]] = field(default_factory=list)
    around_forward: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    before_backward: list[Callable[[bool], None]] = field(default_factory=list)
    finish_gradients: list[tuple[Finish, Callable[[Build], None]]] = field(default_factory=list)
    after_update: list[Callable[[Build], None]] = field(default_factory=list)
    around_optimizer: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = field(default_factory=list)
    dataset_passes: list[DatasetPass] = field(default_factory=list)
    transfer: BatchTransfer | None = None


@dataclass
class LossSettings:
    """What belongs to the loss besides the slots that compute it.

    Attributes:
        scaling: the loss of each micro-batch passes through these before its backward pass: loss scaling for one.
        head_dtype: dtype of the output head and the loss; None: that of the rest.
        skippable_overflow: a device flag after an update: 1 if a non-finite gradient should skip the step in place of
            ending the run (fp16 loss scaling).
        scores: (the objective's metrics as sums, their weight) -> what the run records of them.
        metrics: of the last gradients: sums over this device's rows.
    """

    scaling: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    head_dtype: torch.dtype | None = None
    skippable_overflow: Callable[[], Tensor] | None = None
    scores: Callable[[Mapping[str, Tensor], float], dict[str, Any]] = lambda metrics, weight: {}
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class ParallelSettings:
    """What is particular to a build on several devices; the mesh itself is `Build.mesh`.

    Attributes:
        bubble_fraction: micro-batches of a step -> time in which this device waits for others, relative to the time in
            which it works.
        duplicated_params: names of parameters that another pipeline stage has too and counts in the norm.
        full_parameter: the whole value of a parameter, to be saved: gathered if an engine keeps it in its own layout.
    """

    bubble_fraction: Callable[[int], float] = lambda micro_batches: 0.0
    duplicated_params: set[str] = field(default_factory=set)
    full_parameter: Callable[[Tensor], Tensor] = lambda p: p.detach()


@dataclass
class BuildState:
    """What changes while the build runs.

    Attributes:
        saved: whatever a checkpoint must hold besides weights and optimizer, by name.
        step: optimizer steps committed so far.
        accumulation: micro-batches in a global batch.
        events: what techniques did during a step, {kind, ...} each: the loop writes it into the run, and shows its
            `words` if it has any.
        counters: what techniques count on the host (recompilations), by name: a key of each step's metrics.
    """

    saved: dict[str, Stateful] = field(default_factory=dict)
    step: int = 0
    accumulation: int = 1
    events: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, Callable[[], int]] = field(default_factory=dict)


@dataclass
class Build:
    """A recipe made concrete. `preheat.engine.builder.build` makes it; techniques change it; steps run it.

    Attributes:
        tags: of all techniques and the device; complete before the first technique applies.
        torch_device: where the model computes.
        storage_device: where weights, gradients and optimizer states are kept, if not there.
        mesh: over which devices, and which of them this is.
        parts: role -> pipeline parts; on meta until MATERIALIZE.
        weights: where the values of the parameters come from.
        sources: role -> another source, if a part's values are in a folder of their own: no checkpoint holds them, and
            a resumed run must find the same.
        changes: technique -> what it did.
    """

    recipe: Recipe
    device: Device
    model: ModelFacts
    tags: frozenset[Tag]
    torch_device: torch.device
    storage_device: torch.device | None = None
    mesh: Mesh = field(default_factory=Mesh)
    parts: dict[str, list[nn.Module]] = field(default_factory=dict)
    weights: Any = None
    sources: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    loss: LossSettings = field(default_factory=LossSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    hooks: Hooks = field(default_factory=Hooks)
    state: BuildState = field(default_factory=BuildState)
    changes: dict[str, list[Change]] = field(default_factory=dict)
    _slots: dict[Slot, tuple[str, Callable[..., Any]]] = field(default_factory=dict)

    @property
    def trained(self) -> list[nn.Module]:
        """The parts that are trained."""
        return self.parts["trained"]

    def transformed(self, batch: Batch) -> Batch:
        """The batch as the model takes it: the transforms in their order."""
        transfer = self.hooks.transfer
        moved = transfer.begun(batch) if transfer is not None else None
        batch = moved if moved is not None else self._changed(batch, Order.SHIFT, Order.SPLIT)
        return self._changed(batch, Order.MOVE, Order.MOVE, but=transfer if moved is not None else None)

    def begin(self, batch: Batch) -> None:
        """Begins to copy the micro-batch that is `transformed` next to the device, beside what is queued there from now
        on."""
        if self.hooks.transfer is not None:
            self.hooks.transfer.begin(batch, self._changed(batch, Order.SHIFT, Order.SPLIT))

    def _changed(self, batch: Batch, first: Order, last: Order, but: object = None) -> Batch:
        for order, change in sorted(self.hooks.transforms, key=lambda pair: pair[0]):
            if first <= order <= last and (but is None or change is not but):
                batch = change(batch)
        return batch

    def run_dataset_passes(
        self, rows: Any, numbers: Iterable[int], progress: Callable[[str, float, float], None]
    ) -> None:
        """Passes over the rows that will be read, before the first of them is trained on; arguments as of
        `DatasetPass`."""
        for dataset_pass in self.hooks.dataset_passes:
            dataset_pass(rows, numbers, progress)

    def slot(self, slot: Slot) -> Callable[..., Any]:
        """What stands in a slot."""
        return self._slots[slot][1]

    def owner(self, slot: Slot) -> str:
        return self._slots[slot][0]

    def own(self, slot: Slot, function: Callable[..., Any], owner: str) -> None:
        """Puts `function` into a slot for `owner`. The engine's plain form ('plain') may be replaced, once."""
        current = self._slots.get(slot)
        if current is not None and current[0] not in ("plain", owner):
            raise ValueError(f"slot '{slot}' is owned by {current[0]} already; {owner} cannot own it too")
        assert owner == "plain" or slot in _REGISTRY[owner].owns, f"{owner} does not declare that it owns {slot}"
        self._slots[slot] = (owner, function)

    def slots(self) -> dict[str, str]:
        """Who owns what."""
        return {str(slot): owner for slot, (owner, _) in sorted(self._slots.items())}

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trained parameters by name, over all parts. Names are those of the whole model, which parts share out."""
        return [(name, p) for part in self.trained for name, p in part.named_parameters() if p.requires_grad]
