"""What a technique is, what it may look at, and the registry. No torch."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from preheat.technique.images import Vision
from preheat.technique.mesh import Axis
from preheat.technique.places import Change, Slot, Stage, Tag

if TYPE_CHECKING:
    from torch import nn

    from preheat.data.kinds import Examples
    from preheat.recipe import Recipe
    from preheat.technique.build import Build

__all__ = [
    "Context",
    "Device",
    "ModelFacts",
    "Technique",
    "clashes_of",
    "conflicts_of",
    "has_room",
    "on_one_device",
    "refusals",
    "registry",
    "spreading",
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


@dataclass(frozen=True)
class Context:
    """What `check`, `options` and `rungs` may look at."""

    recipe: Recipe
    model: ModelFacts
    device: Device
    tags: frozenset[Tag]
    sizes: Mapping[Axis, int] = field(default_factory=lambda: dict.fromkeys(Axis, 1))
    """Devices along each axis of the mesh."""


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
    last_resort: ClassVar[bool] = False
    """Costs time that a plan does not see yet: a search takes it only where nothing else fits."""
    searched_on: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    """Kinds of devices for which a search adds it: those where its plan was found to say what is faster."""
    leaves_nothing: ClassVar[bool] = False
    """It changes how a model is trained, and nothing of what it is then: whoever opens a run to read from it leaves it out."""
    text_only: ClassVar[str] = ""
    """Why it does not serve models that read images, and what to do; empty: it does."""
    encoder_too: ClassVar[bool] = False
    """Whether it serves models with an encoder as well, and was tried with them."""
    relieves: ClassVar[bool] = False
    """Whether a run that is out of memory may add it, with any of its `options`: the same weights, data and loss in less memory. A run may
    be resumed with it, without it or with other settings of it."""

    def owned(self) -> frozenset[Slot]:
        """The slots of `owns` that these settings take."""
        return self.owns

    def provided(self) -> frozenset[Tag]:
        """The tags of `provides` that these settings bring."""
        return self.provides

    def acts(self) -> bool:
        """Whether these settings do anything: what does nothing has no needs and no conflicts."""
        return True

    def left_open(self, device: Device) -> bool:
        """Whether a plan decides by which settings it acts on such a device (`settle`), or a search."""
        return False

    def slows_host(self) -> float:
        """How many times as long as without it the host takes for an operator of a step: Python that comes between operators."""
        return 1.0

    def starts_in(self, device: Device) -> float:
        """Seconds that a run takes once, before its first step, because of it."""
        return 0.0

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

    def configure(self, config: Any, recipe: Recipe) -> Any:
        """Changes the model's transformers configuration before it is checked and the model made, in place.

        Returns:
            None, or another configuration to go on with, where the model becomes one of another family.

        Raises:
            ValueError: this model cannot have it; the words begin with the knob.
        """
        return None

    def examples(self) -> Examples | None:
        """What rows must hold for it; None: it does not matter."""
        return None

    def degrees(self) -> Mapping[Axis, int]:
        """Devices that it asks for along axes of the mesh; 0: all that the others leave."""
        return {}

    @classmethod
    def spreads(cls) -> bool:
        """Whether it shares out the work of one device among several; numbers stay what they were."""
        return cls.degrees is not Technique.degrees

    def check(self, context: Context) -> list[str]:
        """Why this cannot serve here, in words; empty when it can."""
        return []

    @abstractmethod
    def apply(self, build: Build, part: nn.Module) -> Change:
        """Acts on one part of the build: a few lines that call the plain functions of the module."""

    def trades(self) -> Literal["exact", "rounding", "different"] | None:
        """What a run gives up of its numbers where a search adds these settings by itself; None: it never does.

        Over the whole run, where `numerics` may speak of the gradients alone. None is for other models, data, objectives and optimizers than
        the recipe's, and for what a plan cannot see the good of.
        """
        return None

    def options(self, context: Context) -> Iterable[Technique]:
        """Settings worth searching; where it `relieves`, mildest first."""
        return [self]

    def cuts(self) -> int:
        """Micro-batches that it cuts a device's rows into."""
        return 1

    def rungs(self, context: Context) -> Iterable[Technique]:
        """Settings with the same weights and less memory: what recovery may switch to, mildest first."""
        return []

    def settle(self, context: Context, plan: Callable[[Technique], Mapping[str, Any]]) -> Technique:
        """Itself with values for what only a dry run can choose.

        Args:
            plan: of the recipe with another technique in the place of this one; the keys are `preheat.run.PLAN_KEYS`.
        """
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


def has_room(plan: Mapping[str, Any]) -> bool:
    """Whether a plan fits in 90 % of the memory, so that it fits where it is too low by as much as nine in ten plans are at most."""
    return bool(plan["peak_gib"] <= 0.9 * plan["available_gib"])


def refusals(t: Technique, context: Context) -> list[str]:
    """Why a technique cannot serve here by itself, in words; empty when it can."""
    if not t.acts():
        return []
    if context.model.encoder and not t.encoder_too:
        return [f"was made for decoder-only models, and {context.model.family} has an encoder; leave it out"]
    return ([t.text_only] if t.text_only and context.model.vision else []) + t.check(context)


def on_one_device(techniques: Mapping[str, Technique]) -> dict[str, Technique]:
    """Those that are left on one device: not what shares out the work, nor what has its place beside that alone (experts shared out within fsdp)."""
    return {name: t for name, t in techniques.items() if not t.spreads() and not t.needs & spreading()}


def spreading() -> frozenset[Tag]:
    """What only techniques that share out the work provide."""
    return frozenset(tag for cls in registry().values() if cls.spreads() for tag in cls.provides)


def clashes_of(techniques: Iterable[Technique], tags: frozenset[Tag]) -> list[tuple[str, str]]:
    """Why these techniques cannot stand together, whatever the model: (technique, words) each.

    Args:
        tags: all that the recipe and the device provide.
    """
    found: list[tuple[str, str]] = []
    owner: dict[Slot, str] = {}
    chosen = sorted((t for t in techniques if t.acts()), key=lambda t: (t.stage, t.name()))
    brings = {t.name(): t.provided() for t in chosen}
    for t in chosen:
        for slot in sorted(t.owned()):
            if slot in owner:
                found.append((t.name(), f"owns the slot '{slot}', which {owner[slot]} owns already; leave one out"))
            owner.setdefault(slot, t.name())
        found.extend((t.name(), f"needs {need}, which nothing in this recipe provides") for need in sorted(t.needs - tags))
        for other, brought in brings.items():
            if other != t.name() and t.conflicts & brought:
                found.append((t.name(), f"cannot go with {other} ({', '.join(sorted(t.conflicts & brought))})"))
    return found


def conflicts_of(techniques: Iterable[Technique], context: Context) -> list[tuple[str, str]]:
    """Why these techniques cannot serve together here, their own checks included: (technique, words) each."""
    chosen = sorted(techniques, key=lambda t: (t.stage, t.name()))
    clashes = clashes_of(chosen, context.tags)
    found: list[tuple[str, str]] = []
    for t in chosen:
        found.extend(pair for pair in clashes if pair[0] == t.name())
        found.extend((t.name(), words) for words in refusals(t, context))
    return found
