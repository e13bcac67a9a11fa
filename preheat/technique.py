"""What a technique is, the build that it acts on, and the registry. No torch: `preheat --help` reads this.

A technique is one idea that changes a build: one file in `preheat/techniques/`, found by its name, the key in the recipe.

    recipe ──check──▶ Build on meta ──apply, in the order of Stage──▶ Build with slots owned ──▶ step
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NewType, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from preheat.data.kinds import Examples
    from preheat.recipe import Recipe

__all__ = ["Batch", "Build", "Change", "Context", "Device", "Finish", "LossSum", "MaskSpec", "ModelFacts", "Order", "RowLoss"]
__all__ += ["Shape", "Slot", "Stage", "Stateful", "Tag", "Technique", "conflicts_of", "registry"]

Tag = NewType("Tag", str)
"""A capability that a technique brings, needs or cannot bear: `bf16-weights`, `frozen-base`. Never a class's name."""


class Stage(IntEnum):
    """When in the build a technique acts: the one order."""

    STRUCTURE = 0
    COMPRESS = 1
    ADAPT = 2
    FAKE_QUANTIZE = 3
    KERNEL = 4
    SPLIT = 5
    PARALLEL = 6
    CHECKPOINT = 7
    COMPILE = 8
    SHARD = 9
    MATERIALIZE = 10
    OPTIMIZER = 11
    LOADER = 12


class Slot(StrEnum):
    """A place in the build that exactly one technique may own; the engine's plain form stands there until one does."""

    HIDDEN = "hidden"  #            (part, batch) -> Tensor [rows, length, width]
    ROW_LOSS = "row_loss"  #        RowLoss: (logits [n, vocabulary], *aligned [n]) -> Tensor [n]
    OVER_LOGITS = "over_logits"  #  (hidden, head, row_loss, *aligned) -> Tensor, the sum of the row losses
    OBJECTIVE = "objective"  #      (batch, hidden, over_logits) -> LossSum
    FORWARD_BACKWARD = "forward_backward"  # (build, batches, global_weight) -> LossSum
    CLIP = "clip"  #                (build) -> norm, a tensor
    UPDATE = "update"  #            (build, norm) -> finite, a tensor
    BATCH_SHAPE = "batch_shape"  #  (progress from 0 to 1) -> Shape; that of 1 needs the most memory
    SAMPLE_ORDER = "sample_order"  # (rows, seed, committed, samples of the whole run or None) -> Iterator[int], rows by number
    ATTENTION_KERNEL = "attention_kernel"  #     (q, k, v, mask, scale) -> Tensor
    ATTENTION_EXCHANGE = "attention_exchange"  # (kernel) -> kernel
    # Beyond DESIGN.md's list: bf16 weights and a low-bit AdamW each bring an optimizer; the second would replace the first unseen.
    OPTIMIZER = "optimizer"  #      (groups, settings) -> torch.optim.Optimizer


class Order(IntEnum):
    """The order of transforms on a batch."""

    SHIFT = 0
    PACK = 1
    SPLIT = 2
    MOVE = 3


class Finish(IntEnum):
    """The order in which gradients are finished before clipping."""

    REDUCE = 0
    TIE = 1
    UNSCALE = 2


@dataclass(frozen=True)
class Change:
    """What a technique did to a build: it stands in the run and in the report."""

    what: str
    """In words: 'attention of 6 layers by SDPA'."""
    count: int
    """How many modules, parameters or steps it touched."""
    kernel: str = ""
    """The kernel that serves it, where there is a choice."""

    def __post_init__(self) -> None:
        if self.count < 1 or not self.what:
            raise ValueError(f"an empty change ({self.what!r}, {self.count}): the technique found nothing to act on")


@dataclass(frozen=True)
class MaskSpec:
    """Which tokens may see which, as data: never an n x n tensor.

    Attributes:
        causal: a token sees itself and what stands before it.
        window: and at most so many tokens back, itself included; None: all.
        global_tokens: so many tokens at a document's beginning see all of it and are seen by all, whatever the window.
        documents: for each row of the batch the lengths of its documents, on the host; their sum is the row's length.
            A token sees its own document only. None: each row is one document.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    global_tokens: int = 0


@dataclass(frozen=True)
class Shape:
    """Rows of the next global batch, their length, rows of a micro-batch. Shorter rows: `rows` is ceil(whole * batch.length / length)."""

    rows: int
    length: int
    micro: int


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        tokens: [rows, length] int64.
        labels: [rows, length] int64, aligned with `tokens`: the label of place t is the token at t + 1; -100: not trained.
        positions: [rows, length] int64, counted within each document.
        mask: which tokens see which.
        weight: on the host, what the loss is the mean over: trained labels, or examples where an objective compares them.
        rows: which rows of the data these are, for messages and for `rerun`.
        group: sequences of an example, which stand side by side: 2 where they are compared, what is preferred first.
        liked: for each row, and each of its sequences without the padding, 1 where the answer was liked and 0 where not; (): not said.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    mask: MaskSpec
    weight: int
    rows: tuple[int, ...] = ()
    group: int = 1
    liked: tuple[tuple[int, ...], ...] = ()


@dataclass
class LossSum:
    """A loss as its sum and the weight to divide by, so that parts of a batch add up exactly; metrics are sums too."""

    total: Tensor
    weight: int | float
    metrics: dict[str, Tensor] = field(default_factory=dict)


class RowLoss(Protocol):
    """A loss of each row of logits. With `value_and_grad_` it can be differentiated without autograd, in place."""

    @property
    def measured(self) -> RowLoss:
        """What an evaluation takes: this loss in nats, without what only training adds."""

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor: ...


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


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


@dataclass(frozen=True)
class Device:
    """What a check may know of the device."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory: int  # bytes that a run may use
    capability: tuple[int, int] | None = None  # CUDA's


@dataclass(frozen=True)
class Context:
    """What `check`, `options` and `rungs` may look at."""

    recipe: Recipe
    model: ModelFacts
    device: Device
    tags: frozenset[Tag]


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """One idea that changes a build. Abstract or final: subclassed once, no method overridden twice.

    A subclass's fields are its settings in the recipe; the text under each field is its help. The module's docstring
    says what it does, when it helps, when it hurts, and its source.
    """

    stage: ClassVar[Stage]
    numerics: ClassVar[Literal["exact", "rounding", "different"]]
    """exact: same result but for the order of sums; rounding: same up to the number format; different: another model or loss."""
    owns: ClassVar[frozenset[Slot]] = frozenset()
    provides: ClassVar[frozenset[Tag]] = frozenset()
    needs: ClassVar[frozenset[Tag]] = frozenset()
    conflicts: ClassVar[frozenset[Tag]] = frozenset()
    roles: ClassVar[frozenset[str]] = frozenset({"trained"})

    def owned(self) -> frozenset[Slot]:
        """The slots of `owns` that these settings take."""
        return self.owns

    def provided(self) -> frozenset[Tag]:
        """The tags of `provides` that these settings bring."""
        return self.provides

    @classmethod
    def name(cls) -> str:
        """The key in the recipe: the module's name."""
        return cls.__module__.rpartition(".")[2]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            if base is not Technique and issubclass(base, Technique) and base.name() in _REGISTRY:
                raise TypeError(f"{cls.__name__} extends the technique {base.name()}: techniques are not subclassed twice")
        _REGISTRY[cls.name()] = cls

    def configure(self, config: Any, recipe: Recipe) -> None:  # noqa: B027  # most techniques leave the architecture alone
        """Changes the model's transformers configuration before it is checked and the model made, in place.

        Raises:
            ValueError: this model cannot have it; the words begin with the knob.
        """

    def examples(self) -> Examples | None:
        """What rows must hold for it; None: it does not matter."""
        return None

    def check(self, context: Context) -> list[str]:
        """Why this cannot serve here, in words; empty when it can."""
        return []

    @abstractmethod
    def apply(self, build: Build, part: nn.Module) -> Change:
        """Acts on one part of the build: a few lines that call the plain functions of the module."""

    def options(self, context: Context) -> Iterable[Technique]:
        """Settings worth searching."""
        return [self]

    def rungs(self, context: Context) -> Iterable[Technique]:
        """Settings with the same weights and less memory: what recovery may switch to, mildest first."""
        return []

    def settle(self, context: Context, share: Callable[[Technique], float]) -> Technique:
        """Itself with values for what only a dry run can choose; `share(other)` is the predicted peak as a share of the memory."""
        return self

    def period(self) -> int:
        """Layers after which the effect repeats."""
        return 1


_REGISTRY: dict[str, type[Technique]] = {}


@functools.cache
def _load() -> None:
    import importlib

    importlib.import_module("preheat.techniques")  # a name, not an import: this module stands below the techniques


def registry() -> Mapping[str, type[Technique]]:
    """Every technique by name, in alphabetical order."""
    _load()
    return {name: _REGISTRY[name] for name in sorted(_REGISTRY)}


def conflicts_of(techniques: Iterable[Technique], context: Context) -> list[tuple[str, str]]:
    """Why these techniques cannot serve together here: (technique, words) each."""
    found: list[tuple[str, str]] = []
    owner: dict[Slot, str] = {}
    chosen = sorted(techniques, key=lambda t: (t.stage, t.name()))
    brings = {t.name(): t.provided() for t in chosen}
    for t in chosen:
        for slot in sorted(t.owned()):
            if slot in owner:
                found.append((t.name(), f"owns the slot '{slot}', which {owner[slot]} owns already; leave one out"))
            owner.setdefault(slot, t.name())
        found.extend(
            (t.name(), f"needs {need}, which nothing in this recipe provides") for need in sorted(t.needs - context.tags)
        )
        for other, tags in brings.items():
            if other != t.name() and t.conflicts & tags:
                found.append((t.name(), f"cannot go with {other} ({', '.join(sorted(t.conflicts & tags))})"))
        found.extend((t.name(), words) for words in t.check(context))
    return found


@dataclass
class Build:
    """A recipe made concrete. `preheat.engine.build.build` makes it; techniques change it; steps run it."""

    recipe: Recipe
    device: Device
    model: ModelFacts
    tags: frozenset[Tag]
    """Complete before the first technique applies."""
    torch_device: torch.device
    parts: dict[str, list[nn.Module]] = field(default_factory=dict)
    """Role -> pipeline parts; on meta until MATERIALIZE."""
    weights: Any = None
    """models.weights.WeightSource: where the values of the parameters come from."""
    optimizer: Any = None
    schedule: Any = None
    state: dict[str, Stateful] = field(default_factory=dict)
    """Whatever must be in a checkpoint besides weights and optimizer."""
    transforms: list[tuple[Order, Callable[[Batch], Batch]]] = field(default_factory=list)
    around_forward: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    """Contexts entered around each forward pass, autocast for one."""
    on_loss: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    """What the loss of each micro-batch passes through before its backward pass: loss scaling for one."""
    head_dtype: torch.dtype | None = None
    """Precision of output head and loss, where it is not that of the rest."""
    endures_overflow: Callable[[], Tensor] | None = None
    """On the device, after an update: 1 where gradients that are not finite may cost one step only, as with a loss scale."""
    finish_gradients: list[tuple[Finish, Callable[[Build], None]]] = field(default_factory=list)
    after_update: list[Callable[[Build], None]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """What techniques did during a step, {kind, ...} each: the loop writes it into the run, and says it where there are `words`."""
    accumulation: int = 1  # micro-batches in a global batch
    changes: dict[str, list[Change]] = field(default_factory=dict)
    scores: Callable[[Mapping[str, Tensor], float], dict[str, float]] = lambda metrics, weight: {}
    """The objective's metrics, as sums, and their weight -> what is written down of them."""
    counters: dict[str, Callable[[], int]] = field(default_factory=dict)
    """What techniques count on the host while steps run (recompilations), by name: a key of each step's metrics."""
    step: int = 0
    """Optimizer steps committed so far."""
    _slots: dict[Slot, tuple[str, Callable[..., Any]]] = field(default_factory=dict)

    @property
    def trained(self) -> list[nn.Module]:
        """The parts that are trained."""
        return self.parts["trained"]

    def slot(self, slot: Slot) -> Callable[..., Any]:
        """What stands in a slot."""
        return self._slots[slot][1]

    def owner(self, slot: Slot) -> str:
        return self._slots[slot][0]

    def own(self, slot: Slot, function: Callable[..., Any], owner: str) -> None:
        """Puts `function` into a slot for `owner`. The engine's plain form ('plain') may be replaced, once."""
        held = self._slots.get(slot)
        if held is not None and held[0] not in ("plain", owner):
            raise ValueError(f"slot '{slot}' is owned by {held[0]} already; {owner} cannot own it too")
        assert owner == "plain" or slot in registry()[owner].owns, f"{owner} does not declare that it owns {slot}"
        self._slots[slot] = (owner, function)

    def slots(self) -> dict[str, str]:
        """Who owns what."""
        return {str(slot): owner for slot, (owner, _) in sorted(self._slots.items())}

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trained parameters by name, over all parts."""
        many = len(self.trained) > 1
        return [
            (f"part{index}.{name}" if many else name, parameter)
            for index, part in enumerate(self.trained)
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        ]
