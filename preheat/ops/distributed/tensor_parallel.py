"""A model's matrices shared out among devices by torch's parallel styles, and cross entropy over logits whose columns are shared out."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.weak import WeakTensorKeyDictionary

from preheat.core import RowLoss
from preheat.core.tp_style import Share
from preheat.errors import RunError
from preheat.ops.distributed.dtensor_utils import local
from preheat.ops.losses.cross_entropy import (
    IGNORED,
    CrossEntropy,
    Recorded,
    RegularizedCrossEntropy,
    Softcapped,
    WeightedCrossEntropy,
    chunked_logits,
)

__all__ = ["SharedCrossEntropy", "parallelize", "shared_logits", "sum_partial"]


Given = WeakTensorKeyDictionary
"""What a block was given, gathered -> `_Gathered`, as long as it lives."""


class _Whole(ParallelStyle):
    """A module with the same weights and input on all devices; its result cut along the sequence where `output` says so."""

    def __init__(self, output: Placement | None = None):
        self.output = output or Replicate()

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def enter(_: Any, inputs: Any, mesh: Any) -> Any:
            return tuple(
                x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
                for x in inputs
            )

        def leave(_: Any, output: Any, mesh: Any) -> Any:
            return output.redistribute(placements=[self.output]).to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


class _Rows(ParallelStyle):
    """An embedding of whose rows each device has a share and looks up these alone; what is found is summed.

    torch's own rowwise embedding makes the gradient of all rows on each device (torch 2.13), as large as the whole vocabulary.
    """

    def __init__(self, output: Placement):
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        embedding: Any = module
        cut = distribute_tensor(embedding.weight, device_mesh, [Shard(0)], src_data_rank=None)
        embedding.register_parameter("weight", nn.Parameter(cut))
        look_up, pad = embedding.forward, embedding.padding_idx

        def forward(tokens: Tensor) -> Tensor:
            weight = embedding.weight
            share = weight.to_local()
            place = tokens - device_mesh.get_local_rank() * share.shape[0]
            mine = (place >= 0) & (place < share.shape[0])
            here = None if pad is None else pad - device_mesh.get_local_rank() * share.shape[0]
            try:
                embedding._parameters["weight"] = share
                embedding.padding_idx = here if here is not None and 0 <= here < share.shape[0] else None
                rows = look_up(place.clamp(0, share.shape[0] - 1))
            finally:
                embedding._parameters["weight"], embedding.padding_idx = weight, pad
            rows = torch.where(mine.unsqueeze(-1), rows, 0.0)
            spread = DTensor.from_local(rows, device_mesh, [Partial()], run_check=False)
            return spread.redistribute(placements=[self.output]).to_local()

        embedding.forward = forward
        return module


class _Input(ParallelStyle):
    """A block gets its input whole, once for all of its maps: their gradients by it are added before they are summed over the devices."""

    def __init__(self, layout: Placement, given: Given | None):
        self.held, self.given = layout, given

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def gather(_: Any, args: Any, kwargs: Any) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            piece = DTensor.from_local(x, device_mesh, [self.held], run_check=False)
            x = piece.redistribute(placements=[Replicate()])
            if self.given is not None:
                self.given[x] = _Gathered(piece.detach())
            return ((x, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": x})

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class _Gathered:
    """What a block was given, gathered anew for the backward passes of all its maps."""

    def __init__(self, piece: Any):
        self.piece, self.users = piece, 0
        self.whole: DTensor | None = None

    def again(self) -> DTensor:
        """On its way when this returns: what uses it waits for it. The last user lets go of it."""
        full = self.whole
        if full is None:
            full = self.piece.redistribute(placements=[Replicate()], async_op=True)
        self.users -= 1
        self.whole = full if self.users > 0 else None
        return full


class _RegatheringLinear(torch.autograd.Function):
    """`F.linear` of a gathered input that keeps this device's piece of it alone (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: _Gathered, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.gathered = gathered
        gathered.users += 1
        ctx.save_for_backward(weight)
        ctx.biased = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (weight,) = grads, ctx.saved_tensors
        x = ctx.gathered.again()  # while the gradient by the input is made
        by_input = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)
        by_weight = rows.t() @ x.to(grad.dtype).flatten(0, -2)
        return by_input, None, by_weight, rows.sum(0) if ctx.biased else None


class _Columns(ColwiseParallel):
    """A map whose outputs are shared out, and which keeps of its input what `_Input` says."""

    def __init__(self, given: Given):
        super().__init__()
        self.given = given

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        super()._apply(module, device_mesh)
        linear: Any = module
        plain = linear.forward

        def forward(x: Tensor) -> Tensor:
            gathered = self.given.get(x)
            if gathered is None or not linear.weight.requires_grad:
                return plain(x)
            return _RegatheringLinear.apply(x, gathered, linear.weight, linear.bias)

        linear.forward = forward
        return module


def _styles(stream: Placement, rows_divide: bool, regather: bool) -> dict[Share, tuple[ParallelStyle, ...]]:
    """torch's style of each share; `stream`: how what flows between blocks is held."""
    cut, given = stream == Shard(1), WeakTensorKeyDictionary() if regather else None
    ends: dict[Share, tuple[ParallelStyle, ...]] = {
        Share.EMBEDDING: (_Rows(stream),),
        Share.HEAD: (ColwiseParallel(output_layouts=Replicate()),),
    }
    replicated: dict[Share, tuple[ParallelStyle, ...]] = {Share.EMBEDDING: (_Whole(stream),), Share.HEAD: (_Whole(),)}
    return {
        Share.BLOCK: (_Input(stream, given),),
        Share.COLUMNS: (ColwiseParallel() if given is None else _Columns(given),),
        Share.COLUMNS_GATHERED: (ColwiseParallel(output_layouts=Replicate()),),
        Share.ROWS: (RowwiseParallel(output_layouts=stream),),
        Share.ROWS_SPLIT: (RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),),
        Share.ROWS_SUMMED: (RowwiseParallel(),),
        Share.WHOLE_CUT: (_Whole(stream),),
        Share.HEADS: (SequenceParallel(sequence_dim=2, use_local_output=True),),  # [rows, length, heads, head_dim]
        Share.WHOLE: (_Whole(),),
        Share.BETWEEN: (SequenceParallel(use_local_output=True) if cut else _Whole(),),
        Share.LAST: (
            SequenceParallel(),
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        )
        if cut
        else (_Whole(),),
    } | (ends if rows_divide else replicated)


def parallelize(
    model: Any,
    shares: Mapping[str, Share],
    mesh: Any,
    *,
    sequence: bool = False,
    vocabulary: bool = True,
    regather: bool = False,
) -> int:
    """Shares out a model's matrices along a mesh of one dimension, in place; what is not shared out becomes whole DTensors. On meta too.

    Args:
        shares: name of a module -> what is done with it (`preheat.models.tp_plan.shares`).
        sequence: between blocks, activations are cut along the sequence, whose length must divide by the mesh.
        vocabulary: share out the rows of embedding and head; without, they stand whole on each device.
        regather: with `sequence`, keep each device's piece of what a block was given, and gather it again in backward.

    Returns:
        How many matrices are shared out.

    Raises:
        ValueError: a matrix that does not divide by the mesh, or nothing that could be gathered again.
    """
    if regather and Share.COLUMNS not in shares.values():
        raise ValueError(
            "regather: this family's plan leaves no map's outputs cut, so nothing is gathered for one; leave it out"
        )
    degree, count = mesh.size(), 0
    styles = _styles(Shard(1) if sequence else Replicate(), vocabulary, sequence and regather)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # a pipeline's stage may lack either
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, kind in shares.items():
        module = model.get_submodule(name)
        for style in styles[kind]:
            style.src_data_rank = None  # each device takes its share of what it has; nothing is sent
            parallelize_module(module, mesh, style, src_data_rank=None)
        for key, p in module.named_parameters(recurse=False):
            cut = [place.dim for place in p.placements if place.is_shard()]
            count += bool(cut) and key == "weight"
            if any(p.shape[dim] % degree for dim in cut):
                raise ValueError(f"{name}.{key} {tuple(p.shape)} does not divide among {degree} devices")
    if sequence and embedding is not None:
        embedding.register_forward_pre_hook(functools.partial(_refuse_length, degree))
    if tied:
        head.weight = embedding.weight
    for name, p in model.named_parameters():  # a style makes parameters anew
        p.requires_grad_(name in trained)
    return count - tied


def _refuse_length(degree: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    if args[0].shape[1] % degree:  # DTensor would take the first device's share for that of all
        raise RunError(f"sequence_parallel: rows of {args[0].shape[1]} tokens cannot be cut among {degree} devices")


def sum_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Sums the gradients of weights that stand whole on each device, where each saw its own heads or places only. In place, in one message."""
    waiting: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        if isinstance(p.grad, DTensor) and any(place.is_partial() for place in p.grad.placements):
            assert p.grad.device_mesh.ndim == 1, "FSDP has summed the others already"
            waiting.setdefault((p.grad.device_mesh, p.grad.dtype), []).append(p)
    for (mesh, _), members in waiting.items():
        grads = [local(p.grad) for p in members]  # type: ignore[arg-type]
        flat = torch.cat([t.flatten() for t in grads])
        dist.all_reduce(flat, group=mesh.get_group())
        for p, part in zip(members, flat.split([t.numel() for t in grads]), strict=True):
            p.grad = DTensor.from_local(part.view(p.shape), mesh, [Replicate()], run_check=False)


# --- the loss -----------------------------------------------------------------------------------------------------


class SharedCrossEntropy:
    """`RegularizedCrossEntropy` of logits whose columns are shared out among the devices of a group, in equal parts by rank.

    Each device gives its columns' gradient; the losses are those of all columns, the same on each device. Two small messages are sent:
    the largest logit of each row, then a row's sums.

    Args:
        group: of processes.
    """

    def __init__(self, group: Any, smoothing: float = 0.0, z: float = 0.0):
        self.group, self.smoothing, self.z = group, smoothing, z

    @property
    def measured(self) -> RowLoss:
        return SharedCrossEntropy(self.group)

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        """Losses [n] of this device's columns [n, share] and labels [n]; the logits are overwritten."""
        return self.value_and_grad_(logits, *aligned)[0]

    def value_and_grad_(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        trained, share = labels != IGNORED, logits.shape[1]
        place = labels - self.group.rank() * share
        mine = (place >= 0) & (place < share)
        own = (torch.arange(labels.shape[0], device=labels.device), place.clamp(0, share - 1))
        parts = [torch.where(mine, logits[own].float(), 0.0)]
        if self.smoothing:
            parts.append(logits.sum(dim=-1, dtype=torch.float32))
        peak = logits.amax(dim=-1).float()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.group)
        chances = logits.float().sub_(peak.unsqueeze(1)).exp_()
        sums = torch.stack([chances.sum(dim=-1), *parts])
        dist.all_reduce(sums, group=self.group)
        lse, columns = peak + sums[0].log(), share * self.group.size()
        losses = lse - (1 - self.smoothing) * sums[1] + self.z * lse.square()
        factor = 1 + 2 * self.z * lse
        chances.div_(sums[0].unsqueeze(1))
        chances[own] -= torch.where(mine, (1 - self.smoothing) / factor, 0.0)
        if self.smoothing:
            losses -= self.smoothing * sums[2] / columns
            chances.sub_((self.smoothing / columns / factor).unsqueeze(1))
        logits.copy_(chances)
        return torch.where(trained, losses, 0.0), torch.where(trained, factor, 0.0)


class _Kept:
    """`Recorded`, of losses that come from another."""

    def __init__(self, recorded: Recorded, loss: SharedCrossEntropy):
        self.recorded, self.loss = recorded, loss

    @property
    def measured(self) -> RowLoss:
        return self

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        return self.recorded.keep(self.loss(logits, *aligned))

    def value_and_grad_(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses = self(logits, labels)
        return losses, torch.zeros_like(losses)


@functools.singledispatch
def _over_shares(loss: Any, group: Any) -> RowLoss:
    """The same loss of logits whose columns are shared out."""
    raise TypeError(f"{type(loss).__name__} has no form for logits that are shared out; set loss_parallel: false")


@_over_shares.register
def _(loss: CrossEntropy, group: Any) -> RowLoss:
    return SharedCrossEntropy(group)


@_over_shares.register
def _(loss: RegularizedCrossEntropy, group: Any) -> RowLoss:
    return SharedCrossEntropy(group, loss.smoothing, loss.z)


@_over_shares.register
def _(loss: WeightedCrossEntropy, group: Any) -> RowLoss:
    return WeightedCrossEntropy(SharedCrossEntropy(group))


@_over_shares.register
def _(loss: Softcapped, group: Any) -> RowLoss:
    return Softcapped(_over_shares(loss.loss, group), loss.cap)


@_over_shares.register
def _(loss: Recorded, group: Any) -> RowLoss:
    return _Kept(loss, SharedCrossEntropy(group))


def shared_logits(hidden: Tensor, head: nn.Module, row_loss: RowLoss, *aligned: Tensor, rows: int = 512) -> Tensor:
    """`chunked_logits` where each device has some rows of the head's weight and makes the logits of these alone.

    The loss is the same on each device, and so is the gradient by `hidden`, which is summed over them once.

    Args:
        hidden: [..., width], the same on each device of the head's mesh.
        head: its `weight` [vocabulary, width] a DTensor cut along its rows; a plain one is taken as it is.
    """
    weight: Any = head.weight
    if not isinstance(weight, DTensor):  # a reference model that nobody shared out
        return chunked_logits(hidden, head, row_loss, *aligned, rows=rows)
    assert weight.placements == (Shard(0),), "a head whose rows are shared out, with nothing else between"
    mesh = weight.device_mesh
    spread = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    mine: Any = SimpleNamespace(weight=weight.to_local())
    return chunked_logits(spread, mine, _over_shares(row_loss, mesh.get_group()), *aligned, rows=rows)
