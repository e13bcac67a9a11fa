"""The build: a recipe made concrete, with the slots that techniques own. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from preheat.technique.base import Device, ModelFacts, registry
from preheat.technique.batch import Batch, Stateful
from preheat.technique.mesh import Mesh
from preheat.technique.places import Change, Finish, Order, Slot, Tag

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from preheat.recipe import Recipe

__all__ = ["Beforehand", "Build"]


class Beforehand(Protocol):
    """What looks at the training rows before the first of them is read."""

    def __call__(self, rows: Any, numbers: Iterable[int], progress: Callable[[str, float, float], None]) -> None:
        """Looks at `numbers` of the `rows` (data.Rows or StreamRows), those that will be read; `progress` is told (what, done, of how much)."""

    def once(self, batch: Batch) -> None:
        """What it does to one micro-batch, for a dry run to see."""


@dataclass
class Build:
    """A recipe made concrete. `preheat.engine.build.build` makes it; techniques change it; steps run it."""

    recipe: Recipe
    device: Device
    model: ModelFacts
    tags: frozenset[Tag]
    """Complete before the first technique applies."""
    torch_device: torch.device
    home: torch.device | None = None
    """Where weights, their gradients and the optimizer's states lie, if not on the device."""
    mesh: Mesh = field(default_factory=Mesh)
    """Over which devices, and which of them this is."""
    parts: dict[str, list[nn.Module]] = field(default_factory=dict)
    """Role -> pipeline parts; on meta until MATERIALIZE."""
    weights: Any = None
    """models.weights.WeightSource: where the values of the parameters come from."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Role -> another WeightSource, where a part's values stand in a folder of their own: no checkpoint holds them, and a resumed run must find the same."""
    optimizer: Any = None
    around_optimizer: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = field(default_factory=list)
    """Each takes what makes the optimizer and gives what makes it otherwise: over shares of the parameters, for one."""
    schedule: Any = None
    state: dict[str, Stateful] = field(default_factory=dict)
    """Whatever must be in a checkpoint besides weights and optimizer."""
    transforms: list[tuple[Order, Callable[[Batch], Batch]]] = field(default_factory=list)
    transfer: Any = None
    """engine.transfer.Transfer, one of the transforms: how batches get to the device; None if they lie there."""
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
    idle: Callable[[int], float] = lambda micro_batches: 0.0
    """Micro-batches of a step -> time that this device will wait for others, as a share of that in which it works."""
    copies: set[str] = field(default_factory=set)
    """Names of parameters that another device of the pipeline has too, and counts in the norm."""
    before_rows: list[Beforehand] = field(default_factory=list)
    before_backward: list[Callable[[bool], None]] = field(default_factory=list)
    """Told before each micro-batch whether it is the last of its global batch: whose backward pass must leave gradients complete."""
    changes: dict[str, list[Change]] = field(default_factory=dict)
    scores: Callable[[Mapping[str, Tensor], float], dict[str, Any]] = lambda metrics, weight: {}
    """The objective's metrics, as sums, and their weight -> what is written down of them."""
    read: Callable[[Tensor], Tensor] = lambda p: p.detach()
    """A parameter's value, to be saved: gathered where an engine has taken it apart in a way of its own."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Of the last gradients: the objective's and the engine's sums over this device's rows."""
    counters: dict[str, Callable[[], int]] = field(default_factory=dict)
    """What techniques count on the host while steps run (recompilations), by name: a key of each step's metrics."""
    step: int = 0
    """Optimizer steps committed so far."""
    _slots: dict[Slot, tuple[str, Callable[..., Any]]] = field(default_factory=dict)

    @property
    def trained(self) -> list[nn.Module]:
        """The parts that are trained."""
        return self.parts["trained"]

    def transformed(self, batch: Batch) -> Batch:
        """The batch as the model takes it: the transforms in their order."""
        moved = self.transfer.begun(batch) if self.transfer is not None else None
        batch = moved if moved is not None else self._changed(batch, Order.SHIFT, Order.SPLIT)
        return self._changed(batch, Order.MOVE, Order.MOVE, but=self.transfer if moved is not None else None)

    def begin(self, batch: Batch) -> None:
        """Begins to copy the micro-batch that is `transformed` next to the device, beside what is queued there from now on."""
        if self.transfer is not None:
            self.transfer.begin(batch, self._changed(batch, Order.SHIFT, Order.SPLIT))

    def _changed(self, batch: Batch, first: Order, last: Order, but: Any = None) -> Batch:
        for order, change in sorted(self.transforms, key=lambda pair: pair[0]):
            if first <= order <= last and (but is None or change is not but):
                batch = change(batch)
        return batch

    def look(self, rows: Any, numbers: Iterable[int], progress: Callable[[str, float, float], None]) -> None:
        """Lets those who asked look at the rows that will be read, before the first is."""
        for beforehand in self.before_rows:
            beforehand(rows, numbers, progress)

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
        """Trained parameters by name, over all parts. Names are those of the whole model, which parts share out."""
        return [(name, p) for part in self.trained for name, p in part.named_parameters() if p.requires_grad]
