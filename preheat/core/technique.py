"""Recipes contain techniques, which check a context and change a build. No torch.

They are in one file because their definitions refer to each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from preheat.core import schema
from preheat.core.batch import Batch, Stateful
from preheat.core.device import Device
from preheat.core.example_kind import ExampleKind
from preheat.core.field_types import Numerics, Seed
from preheat.core.mesh import Axis, Mesh
from preheat.core.run_records import MicroBatchSize, Notice, OtherEvent
from preheat.core.slots import Change, Finish, Order, Slot, SlotFunction, Stage
from preheat.core.tags import Tag
from preheat.core.trials import Trials
from preheat.core.vision import Vision

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from preheat.core.json_types import JsonObject
    from preheat.core.plan import Plan

__all__ = [
    "Build",
    "Context",
    "DatasetPass",
    "Hooks",
    "LossScaling",
    "ModelFacts",
    "Recipe",
    "Searchable",
    "Technique",
]


@dataclass(frozen=True)
class ModelFacts:
    """Properties of the model that are known without building it."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool
    # Below: what only some families have. The defaults mean that the model does not.
    window: int | None = None
    score_softcap: float | None = None  # attention scores are cap * tanh(score / cap), as in Gemma 2
    logit_softcap: float | None = None  # the same for logits
    experts: int = 0  # per layer; 0: a dense model
    experts_per_token: int = 0
    expert_width: int = 0  # inner width of one expert
    expert_layers: int = 0  # layers that have experts
    balance_loss: bool = False  # a loss that balances the experts' load is added to that of the tokens
    sinks: bool = False  # attention has a learned score per head without a key (gpt-oss)
    special_mixers: bool = False  # recurrent mixers, sinks or chunks, whose indices come from the documents of a batch
    recurrent_layers: int = 0  # layers with a mixer that reads tokens in order: Mamba, delta rule, short convolution
    foreign_experts: bool = False  # the model's own code computes the experts, which techniques cannot change then
    vision: Vision | None = None  # image input; None: text only
    encoder: bool = False  # encoder-decoder; `layers` counts both
    alibi_dim: int = 0  # dimensions of queries and keys besides head_dim, which have ALiBi's distances; 0: none
    quantized: str = ""  # `quant_method` of a folder whose weights stay packed; "": none, or they are dequantized

    @property
    def storage_tags(self) -> frozenset[Tag]:
        """The tags that the storage of the model's weights provides."""
        return frozenset({Tag.QUANTIZED_BASE} if self.quantized else ())


@dataclass(frozen=True)
class Context:
    """The inputs of `check`, `options` and `fallbacks`."""

    recipe: Recipe
    model: ModelFacts
    device: Device
    tags: frozenset[Tag]
    sizes: Mapping[Axis, int] = field(default_factory=lambda: dict.fromkeys(Axis, 1))
    """Devices along each axis of the mesh."""
    per_host: int = 0
    """Devices of a host; 0: unknown."""


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """One idea that changes a build. Abstract or final: subclassed once, no method overridden twice.

    A subclass's fields are its settings in the recipe; the text under each field is its help. The module's docstring
    states what it does, when it helps, when it hurts, and its source.
    """

    # Without defaults: a technique must state both, and the registry reports one that does not.
    stage: ClassVar[Stage]
    numerics: ClassVar[Numerics]
    """exact: same result up to the order of sums; rounding: same up to the number format; different: another model or
    loss."""
    trials: ClassVar[Trials] = Trials()
    """Configurations for the tests and benchmarks that run over all techniques."""
    owns: ClassVar[frozenset[Slot]] = frozenset()
    provides: ClassVar[frozenset[Tag]] = frozenset()
    needs: ClassVar[frozenset[Tag]] = frozenset()
    conflicts: ClassVar[frozenset[Tag]] = frozenset()
    roles: ClassVar[frozenset[str]] = frozenset({"trained"})
    selected_by: ClassVar[str] = ""
    """Key and value of the recipe that select it, if it is not a key of `techniques`: an engine."""
    training_only: ClassVar[bool] = False
    """Affects training only; ignored when a finished run is loaded for inference."""
    unsupported_for_images: ClassVar[str] = ""
    """Reason why it does not support models that read images, and what to do; empty: supported."""
    supports_encoder_decoder: ClassVar[bool] = False
    """True if it supports models with an encoder and has been tested with them."""

    def claimed(self) -> frozenset[Slot]:
        """Returns the slots of `owns` that these settings use."""
        return self.owns

    def provided(self) -> frozenset[Tag]:
        """Returns the tags of `provides` that these settings provide."""
        return self.provides

    def evaluation_scores(self) -> Mapping[str, bool]:
        """Returns the scores that this objective's evaluations add: name -> whether higher is better."""
        return {}

    def acts(self) -> bool:
        """Returns False if these settings do nothing: then the technique has no needs and no conflicts."""
        return True

    def read_on(self, device: Device) -> Technique:
        """Returns the settings for inference on a device that may differ from the training device."""
        return self

    def host_overhead(self) -> float:
        """Returns the factor on the host's time per operator: the cost of Python code between operators."""
        return 1.0

    def startup_seconds(self, device: Device) -> float:
        """Returns the one-time cost in seconds before the first step."""
        return 0.0

    def beside_engine(self) -> str:
        """Returns what to write instead if an engine (`parallel.engine`) does by itself what this one replaces."""
        return "leave it out"

    @classmethod
    def name(cls) -> str:
        """Returns the key in the recipe: the module's name."""
        # From the file, so that the recipe's key, the module and the documentation cannot differ.
        return cls.__module__.rpartition(".")[2]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:  # Searchable
            return
        # Final: a subclass would share slots and tags with its base in ways that nobody checks.
        for base in cls.__mro__[1:]:
            if base not in (Technique, Searchable) and issubclass(base, Technique) and base.name() in _REGISTRY:
                raise TypeError(
                    f"{cls.__name__} extends the technique {base.name()}: techniques are not subclassed twice"
                )
        # The same module may define its class again (importlib.reload).
        if (other := _REGISTRY.get(cls.name())) is not None and other.__module__ != cls.__module__:
            raise TypeError(f"{other.__module__} has a technique of the name {cls.name()} already; rename the module")
        _REGISTRY[cls.name()] = cls

    def configure(self, config: PretrainedConfig, recipe: Recipe) -> PretrainedConfig | None:
        """Changes the model's transformers configuration in place, before it is checked and the model is created.

        Returns:
            None, or another configuration to continue with, if the model becomes one of another family.

        Raises:
            ValueError: the model does not support it; the message begins with the setting.
        """
        return None

    def examples(self) -> ExampleKind | None:
        """Returns the kind of examples that the rows must contain; None: any."""
        return None

    def degrees(self) -> Mapping[Axis, int]:
        """Returns the requested devices along axes of the mesh; 0: all that the others leave."""
        return {}

    @classmethod
    def is_parallel(cls) -> bool:
        """Returns True if it splits the work of one device across several; results are unchanged."""
        # Overriding `degrees` is the definition of a parallel technique.
        return cls.degrees is not Technique.degrees

    def expert_degree(self, sizes: Mapping[Axis, int]) -> int:
        """Returns the number of devices that split the experts of a layer, on a mesh of these sizes."""
        return 1

    def micro_batches_in_flight(self, micro_batches: int) -> float:
        """Returns the largest number of micro-batches whose activations the first device of a pipeline holds."""
        return 1.0

    def stages_per_device(self) -> int:
        """Returns the number of stages of a pipeline on each device."""
        return 1

    def fullest_devices(self, context: Context, config: PretrainedConfig) -> set[int]:
        """Returns the devices along a pipeline of which one needs the most memory."""
        return {0}

    def bubble_fraction(self, micro_batches: int) -> float:
        """Returns the idle time of a device relative to its compute time, which a dry run of one device cannot see."""
        return 0.0

    def check(self, context: Context) -> list[str]:
        """Returns the reasons why it cannot be used here; empty if it can."""
        return []

    @abstractmethod
    def apply(self, build: Build, part: nn.Module) -> Change:
        """Changes one part of the build: a few lines that call the module's functions."""

    def micro_batch_count(self) -> int:
        """Returns the number of micro-batches that a device's rows are split into."""
        return 1

    def period(self) -> int:
        """Returns the number of layers after which the effect repeats."""
        return 1


class Searchable(Technique):
    """A technique that a search may add, or that recovery from an out-of-memory error may switch on."""

    last_resort: ClassVar[bool] = False
    """Its plan does not include its full time cost: a search adds it only if nothing else fits."""
    searched_on: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    """Device kinds on which a search adds it: those for which plans predict its speed correctly."""
    memory_saving: ClassVar[bool] = False
    """True if the recovery from out-of-memory errors may add it with its `options`, or those that `is_memory_saving`
    admits: the same weights, data and loss with less memory. A run may be resumed with it, without it, or with other
    settings of it."""

    def search_numerics(self) -> Numerics | None:
        """Returns the numerical effect on the whole run if a search adds these settings; None: never added.

        `numerics` concerns the gradients only. None is for techniques that change the model, data, objective or
        optimizer, and for those whose benefit a plan cannot predict.
        """
        return None

    def options(self, context: Context) -> Iterable[Technique]:
        """Returns settings worth searching; if it is `memory_saving`, the mildest first."""
        return [self]

    def fallbacks(self, context: Context) -> Iterable[Technique]:
        """Returns settings with the same weights and less memory, for recovery, the mildest first."""
        return []

    def is_memory_saving(self) -> bool:
        """Returns True if these settings are such as `memory_saving` describes."""
        return self.memory_saving

    def left_open(self, device: Device) -> bool:
        """Returns True if a plan (`resolve_auto`) or a search chooses the settings on such a device."""
        return False

    def resolve_auto(self, context: Context, plan: Callable[[Technique], Plan]) -> Technique:
        """Returns the technique with its `auto` settings resolved by a dry run.

        Args:
            plan: plans the recipe with another technique in place of this one.
        """
        return self


# Here and not in the registry's module, because `__init_subclass__` fills it and the registry imports this module.
_REGISTRY: dict[str, type[Technique]] = {}
"""Filled as technique modules are imported; `preheat.core.registry` imports them all."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The complete definition of a run. Frozen: `dataclasses.replace` or `override` create a changed copy."""

    name: str = "run"
    """A short name, used for the run's folder."""
    seed: Seed = 0
    """Seed of weights, data order and all other random numbers."""
    model: schema.Model = field(default_factory=schema.Model)
    data: schema.Data = field(default_factory=schema.Data)
    batch: schema.Batch = field(default_factory=schema.Batch)
    optimizer: schema.Optimizer = field(default_factory=schema.Optimizer)
    schedule: schema.Schedule = field(default_factory=schema.Schedule)
    stop: schema.Stop = field(default_factory=schema.Stop)
    evaluate: schema.Evaluate = field(default_factory=schema.Evaluate)
    checkpoint: schema.Checkpoint = field(default_factory=schema.Checkpoint)
    sample: schema.Sample = field(default_factory=schema.Sample)
    tracking: schema.Tracking = field(default_factory=schema.Tracking)
    hardware: schema.Hardware = field(default_factory=schema.Hardware)
    parallel: schema.Parallel = field(default_factory=schema.Parallel)
    techniques: Mapping[str, Technique] = field(default_factory=dict)
    """Techniques by name with their settings; the order does not matter (their stages decide)."""


class DatasetPass(Protocol):
    """A pass over the training rows before the first step."""

    def __call__(self, rows: Any, numbers: Iterable[int], progress: Callable[[str, float, float], None]) -> None:
        """Reads the given `numbers` of the `rows` (data.Rows or StreamRows); reports progress as (name, done,
        total)."""

    def once(self, batch: Batch) -> None:
        """Processes one micro-batch, for a dry run."""


class BatchTransfer(Protocol):
    """Copies micro-batches to the device, prefetching the next one during the step (`engine.transfer.Transfer`)."""

    def __call__(self, host: Batch) -> Batch:
        """Copies a batch now."""

    def begin(self, read: Batch, host: Batch) -> None:
        """Starts to copy `host`, the transformed form of `read`."""

    def begun(self, read: Batch) -> Batch | None:
        """Returns the prefetched copy of this batch; None if there is none."""


@dataclass
class Hooks:
    """Callbacks that techniques add to a step. Each list is called in order.

    Attributes:
        transforms: transforms of a batch before the model, in the order of `Order`.
        around_forward: contexts around each forward pass, e.g. autocast.
        around_batches: wrappers of the slot FORWARD_BACKWARD's function, which a technique that replaces that function
            instead of calling it applies to its own.
        before_backward: called before each micro-batch with `is_last`; the last backward pass must leave gradients
            complete.
        before_recompute: called with the transformed micro-batch before its backward pass, if the latest forward pass
            may have been another one's (in a pipeline).
        finish_gradients: called on complete gradients before clipping, in the order of `Finish`.
        after_update: called after each optimizer step, also after a skipped one (`Build.optimizer.found_inf` is 1).
        around_optimizer: wrappers of the function that creates the optimizer, e.g. to shard the parameters.
        dataset_passes: passes over the training rows before the first step.
        transfer: the transform that copies batches to the device; None if they are there already.
    """

    # Pairs, so that techniques of any stage can add one at the right position of the order.
    transforms: list[tuple[Order, Callable[[Batch], Batch]]] = field(default_factory=list)
    # Functions, because a context manager can be entered only once.
    around_forward: list[Callable[[], AbstractContextManager[object]]] = field(default_factory=list)
    around_batches: list[Callable[[SlotFunction], SlotFunction]] = field(default_factory=list)
    before_backward: list[Callable[[bool], None]] = field(default_factory=list)
    before_recompute: list[Callable[[Batch], None]] = field(default_factory=list)
    finish_gradients: list[tuple[Finish, Callable[[Build], None]]] = field(default_factory=list)
    after_update: list[Callable[[Build], None]] = field(default_factory=list)
    around_optimizer: list[Callable[[SlotFunction], SlotFunction]] = field(default_factory=list)
    dataset_passes: list[DatasetPass] = field(default_factory=list)
    transfer: BatchTransfer | None = None


@dataclass(frozen=True)
class LossScaling:
    """Loss scaling of a build, for the loop that counts the skipped steps and explains them.

    Attributes:
        scale: returns the present loss scale, on the device.
        initial: the key of the scale that a run begins with, and its value.
        remedy: a sentence that says what to do against overflow.
    """

    scale: Callable[[], Tensor]
    initial: str
    remedy: str


@dataclass
class LossSettings:
    """Settings of the loss besides the slots that compute it.

    Attributes:
        scaling: functions applied to the loss of each micro-batch before its backward pass, e.g. loss scaling.
        head_dtype: dtype of the output head and the loss; None: that of the rest.
        dynamic_scale: set with fp16 loss scaling: a step whose gradients overflow is then skipped instead of ending the
            run, while the scale is at least 1.
        scores: (the objective's metrics as sums, their weight) -> metrics that the run records.
        metrics: of the last gradients: sums over this device's rows.
        sources: names of the sources whose losses are recorded by source; (): they are not.
    """

    scaling: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    head_dtype: torch.dtype | None = None
    dynamic_scale: LossScaling | None = None
    scores: Callable[[Mapping[str, Tensor], float], JsonObject] = lambda metrics, weight: {}
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    sources: tuple[str, ...] = ()


@dataclass
class ParallelSettings:
    """Settings of a build on several devices; the mesh itself is `Build.mesh`.

    Attributes:
        bubble_fraction: micro-batches of a step -> idle time of this device, relative to its compute time: while a
            pipeline fills and drains, and while it waits for devices with more to compute.
        duplicated_params: names of parameters that another pipeline stage has too and counts in the norm.
        pass_forward: (micro-batches of a step, function of a part and a transformed micro-batch that returns hidden
            states) -> runs the function forward through all stages of a pipeline; None: there is one part.
        full_parameter: returns the full value of a parameter for saving: gathered if an engine keeps it in its own
            layout.
    """

    bubble_fraction: Callable[[int], float] = lambda micro_batches: 0.0
    duplicated_params: set[str] = field(default_factory=set)
    pass_forward: Callable[[Sequence[Batch], Callable[[nn.Module, Batch], Tensor]], None] | None = None
    full_parameter: Callable[[Tensor], Tensor] = lambda p: p.detach()


@dataclass
class BuildState:
    """The mutable state of a running build.

    Attributes:
        saved: what a checkpoint must contain besides weights and optimizer, by name.
        step: steps committed so far, skipped ones included.
        skipped: those of them that changed no weight because scaled gradients overflowed.
        accumulation: micro-batches in a global batch.
        events: what techniques did during a step; the loop writes them to the run, and prints notices.
        counters: host-side counters of techniques (e.g. recompilations) by name: a key of each step's metrics.
    """

    saved: dict[str, Stateful] = field(default_factory=dict)
    step: int = 0
    skipped: int = 0
    accumulation: int = 1
    events: list[Notice | MicroBatchSize | OtherEvent] = field(default_factory=list)
    counters: dict[str, Callable[[], int]] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Updates of the weights so far: the number that an optimizer counts its steps by."""
        return self.step - self.skipped


@dataclass
class Build:
    """A recipe instantiated. `preheat.engine.builder.build` creates it; techniques change it; steps run it.

    Attributes:
        tags: of all techniques and the device; complete before the first technique applies.
        torch_device: where the model computes.
        storage_device: where weights, gradients and optimizer states are stored, if elsewhere.
        mesh: the devices, and this process's position among them.
        parts: role -> pipeline parts; on meta until MATERIALIZE.
        weights: the source of the parameters' values.
        sources: role -> another source, if a part's values are in a separate folder: checkpoints do not contain them,
            and a resumed run must find the same.
        changes: technique -> its changes.
    """

    recipe: Recipe
    device: Device
    model: ModelFacts
    tags: frozenset[Tag]
    torch_device: torch.device
    storage_device: torch.device | None = None
    mesh: Mesh = field(default_factory=Mesh)
    parts: dict[str, list[nn.Module]] = field(default_factory=dict)
    # `models.weights.WeightSource`, which core cannot name: it imports nothing of the packages above it.
    weights: Any = None
    sources: dict[str, Any] = field(default_factory=dict)
    # One of torch's, or an object with that interface which is none: of zero1, of DeepSpeed. None until OPTIMIZER.
    optimizer: Any = None
    loss: LossSettings = field(default_factory=LossSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    hooks: Hooks = field(default_factory=Hooks)
    state: BuildState = field(default_factory=BuildState)
    changes: dict[str, list[Change]] = field(default_factory=dict)
    _slots: dict[Slot, tuple[str, SlotFunction]] = field(default_factory=dict)

    @property
    def trained(self) -> list[nn.Module]:
        """The trained parts."""
        return self.parts["trained"]

    def transform_batch(self, batch: Batch) -> Batch:
        """Returns the batch as the model takes it, after all transforms."""
        transfer = self.hooks.transfer
        # The transforms before MOVE ran when the prefetch began: they must not run twice.
        moved = transfer.begun(batch) if transfer is not None else None
        batch = moved if moved is not None else self._apply_transforms(batch, Order.PACK, Order.SPLIT)
        # The rest of MOVE runs in either case; the transfer itself is left out if its work is done.
        return self._apply_transforms(batch, Order.MOVE, Order.MOVE, but=transfer if moved is not None else None)

    def begin(self, batch: Batch) -> None:
        """Starts to copy the next micro-batch for `transform_batch` to the device, overlapped with the queued
        kernels."""
        if self.hooks.transfer is not None:
            self.hooks.transfer.begin(batch, self._apply_transforms(batch, Order.PACK, Order.SPLIT))

    def _apply_transforms(self, batch: Batch, first: Order, last: Order, but: object = None) -> Batch:
        # `sorted` is stable: transforms of one order run as techniques added them.
        for order, change in sorted(self.hooks.transforms, key=lambda pair: pair[0]):
            if first <= order <= last and (but is None or change is not but):
                batch = change(batch)
        return batch

    def run_dataset_passes(
        self, rows: Any, numbers: Iterable[int], progress: Callable[[str, float, float], None]
    ) -> None:
        """Runs the passes over the rows that will be read, before the first step; arguments as for `DatasetPass`."""
        for dataset_pass in self.hooks.dataset_passes:
            dataset_pass(rows, numbers, progress)

    def slot(self, slot: Slot) -> SlotFunction:
        """Returns the function installed in a slot."""
        return self._slots[slot][1]

    def owner(self, slot: Slot) -> str:
        return self._slots[slot][0]

    def claim(self, slot: Slot, function: SlotFunction, owner: str) -> None:
        """Installs `function` in a slot for `owner`. The engine's default ('plain') may be replaced, once."""
        current = self._slots.get(slot)
        # The conflict of two techniques; `conflicts_of` normally finds it before the build.
        if current is not None and current[0] not in ("plain", owner):
            raise ValueError(f"slot '{slot}' is owned by {current[0]} already; {owner} cannot own it too")
        # `owns` must be complete: conflicts are found by it, before any code runs.
        assert owner == "plain" or slot in _REGISTRY[owner].owns, f"{owner} does not declare that it owns {slot}"
        self._slots[slot] = (owner, function)

    def slots(self) -> dict[str, str]:
        """Returns the owner of each slot."""
        return {str(slot): owner for slot, (owner, _) in sorted(self._slots.items())}

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the trained parameters of all parts by name. Names are those of the unsplit model."""
        return [(name, p) for part in self.trained for name, p in part.named_parameters() if p.requires_grad]
