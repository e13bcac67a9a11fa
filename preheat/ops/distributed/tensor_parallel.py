"""Tensor parallelism with torch's parallel styles, and cross entropy over vocabulary-sharded logits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
from preheat.core.tp_style import TpStyle
from preheat.errors import RunError
from preheat.ops.distributed.dtensor_utils import local, parts_of, split_dim
from preheat.ops.distributed.expert_tensor_parallel import ExpertBlock, LocalWeights, Stacks
from preheat.ops.losses.cross_entropy import (
    IGNORED,
    CrossEntropy,
    DynamicCrossEntropy,
    Recorded,
    RegularizedCrossEntropy,
    Softcapped,
    WeightedCrossEntropy,
    sum_chunked_loss,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from preheat.ops.autograd_context import AutogradContext


__all__ = ["SharedCrossEntropy", "broadcast_replicated", "parallelize", "sum_sharded_loss", "sum_partial"]


_OWN_MESSAGE = 1 << 20
"""Bytes from which a gradient is broadcast in place; smaller ones share a message, whose copies they are small for."""
_Parameters = dict[str, nn.Parameter | None]
Given = WeakTensorKeyDictionary
"""Gathered block input -> its `_Gathered`, while the input is alive."""


class _Replicated(ParallelStyle):
    """A module replicated on all ranks; `output` may shard its result along the sequence."""

    def __init__(self, output: Placement | None = None):
        self.output = output or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
            return tuple(
                x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
                for x in inputs
            )

        def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            # Blocks exchange plain tensors: transformers' code between them does not know DTensor.
            return output.redistribute(placements=[self.output]).to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


class _Rows(ParallelStyle):
    """An embedding sharded by rows: each rank looks up its own rows and the results are summed.

    torch's rowwise embedding (torch 2.13) allocates the gradient of the full vocabulary on each rank.
    """

    def __init__(self, output: Placement):
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        embedding: Any = module
        # Rank r has rows r * n / degree to (r + 1) * n / degree of the vocabulary.
        cut = distribute_tensor(embedding.weight, device_mesh, [Shard(0)], src_data_rank=None)
        embedding.register_parameter("weight", nn.Parameter(cut))
        look_up, pad = embedding.forward, embedding.padding_idx

        def forward(tokens: Tensor) -> Tensor:
            weight = embedding.weight
            # [vocabulary / degree, width]
            share = weight.to_local()
            index = tokens - device_mesh.get_local_rank() * share.shape[0]
            # [rows, length]: true for tokens whose row this rank has. Exactly one rank has each.
            is_local = (index >= 0) & (index < share.shape[0])
            here = None if pad is None else pad - device_mesh.get_local_rank() * share.shape[0]
            # The module's own forward looks up in the local rows, which keeps a family's extras such as a scale.
            try:
                embedding._parameters["weight"] = share
                # An index outside of the local rows would be an error in torch, or the wrong row.
                embedding.padding_idx = here if here is not None and 0 <= here < share.shape[0] else None
                rows = look_up(index.clamp(0, share.shape[0] - 1))
            finally:
                embedding._parameters["weight"], embedding.padding_idx = weight, pad
            # Zeros for all other tokens, so that the sum over the ranks is the embedding.
            rows = torch.where(is_local.unsqueeze(-1), rows, 0.0)
            spread = DTensor.from_local(rows, device_mesh, [Partial()], run_check=False)
            return spread.redistribute(placements=[self.output]).to_local()

        embedding.forward = forward
        return module


class _Input(ParallelStyle):
    """Gathers a block's input once for all its linear layers, whose input gradients are added before the reduction."""

    def __init__(self, layout: Placement, given: Given | None):
        self.held, self.given = layout, given

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(
            _: object, args: tuple[Tensor, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
            # Families differ in whether a block gets its input by position or by name.
            x = args[0] if args else kwargs["hidden_states"]
            piece = DTensor.from_local(x, device_mesh, [self.held], run_check=False)
            x = piece.redistribute(placements=[Replicate()])
            # Noted by tensor, weakly: the linear layers of this block look it up in `_Columns`.
            if self.given is not None:
                self.given[x] = _Gathered(piece.detach())  # type: ignore[arg-type]  # a DTensor, too
            return ((x, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": x})

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


@contextlib.contextmanager
def _use_local_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which modules compute with the local parts of their parameters."""
    stores: list[tuple[_Parameters, _Parameters]] = []
    try:
        for module in modules:
            store: _Parameters = module._parameters
            stores.append((store, dict(store)))
            for key, p in store.items():
                if isinstance(p, DTensor):
                    store[key] = p.to_local()  # type: ignore[assignment]  # autograd's result is no parameter
        yield
    finally:
        for store, before in stores:
            store |= before


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Replaces the parameters of a module, without its children's, by DTensors of one placement."""
    for key, p in [*module.named_parameters(recurse=False)]:
        # Each rank slices its own copy, without a broadcast.
        module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [placement], src_data_rank=None)))


class _OfHeads(ParallelStyle):
    """A block whose own parameters have an entry for each head, such as attention sinks: a rank reads its heads'."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _use_local_parameters([module]):
                return plain(*args, **kwargs)

        module.forward = forward
        return module


class _WholeBlock(ParallelStyle):
    """A block that every rank computes with all parameters for all positions; nothing inside knows DTensor.

    Inputs and the gradients of outputs are equal on all ranks, so the gradients of the parameters are, too: no sum.
    With kernels whose backward pass is not deterministic they are equal up to rounding (`broadcast_replicated`).
    """

    def __init__(self, stream: Placement):
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for child in module.modules():
            _distribute(child, device_mesh, Replicate())
        plain = module.forward

        def moved(x: Tensor, before: Placement, after: Placement) -> Tensor:
            spread = DTensor.from_local(x, device_mesh, [before], run_check=False)
            return spread.redistribute(placements=[after]).to_local()

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Families differ in whether a block gets its input by position or by name.
            if args:
                args = (moved(args[0], self.stream, Replicate()), *args[1:])
            else:
                kwargs["hidden_states"] = moved(kwargs["hidden_states"], self.stream, Replicate())
            with _use_local_parameters(module.modules()):
                out = plain(*args, **kwargs)
            if isinstance(out, tuple):
                return (moved(out[0], Replicate(), self.stream), *out[1:])
            return moved(out, Replicate(), self.stream)

        module.forward = forward
        return module


class _Gathered:
    """A block input that is gathered again for the backward passes of the block's linear layers."""

    def __init__(self, piece: DTensor):
        self.piece, self.users = piece, 0
        self.whole: DTensor | None = None

    def again(self) -> DTensor:
        """Starts the gather if needed and returns the asynchronous result; the last user releases it."""
        # The first user starts the gather; q, k and v (or gate and up) share its result.
        full = self.whole
        if full is None:
            full = self.piece.redistribute(placements=[Replicate()], async_op=True)
        # After the last user the gathered input is garbage again: one block's input at a time is in memory.
        self.users -= 1
        self.whole = full if self.users > 0 else None
        return full


class _RegatheringLinear(torch.autograd.Function):
    """`F.linear` that saves only the local shard of its gathered input (Korthikanti et al. 2022, arXiv:2205.05198,
    section 4.2.2).
    """

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, gathered: _Gathered, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.gathered = gathered
        # Counted in forward, so that backward knows which user is the last.
        gathered.users += 1
        # The input is not saved: `gathered` has this rank's shard of it.
        ctx.save_for_backward(weight)
        ctx.biased = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (weight,) = grads, ctx.saved_tensors
        x = ctx.gathered.again()  # overlaps with the matmul of the input gradient
        # A partial sum over this rank's outputs; DTensor reduces it behind this operator.
        by_input = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        # [positions, out / degree]
        rows = grad.flatten(0, -2)
        by_weight = rows.t() @ x.to(grad.dtype).flatten(0, -2)
        return by_input, None, by_weight, rows.sum(0) if ctx.biased else None


class _Columns(ColwiseParallel):
    """A column-parallel layer that saves only the local shard of its input (see `_Input`)."""

    def __init__(self, given: Given):
        super().__init__()
        self.given = given

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        linear: Any = module
        plain = linear.forward

        def forward(x: Tensor) -> Tensor:
            gathered = self.given.get(x)
            # A frozen weight needs no input in its backward pass, so there is nothing to gather again.
            if gathered is None or not linear.weight.requires_grad:
                return plain(x)
            return _RegatheringLinear.apply(x, gathered, linear.weight, linear.bias)

        linear.forward = forward
        return module


def _build_styles(stream: Placement, rows_divide: bool, regather: bool) -> dict[TpStyle, tuple[ParallelStyle, ...]]:
    """Returns torch's style for each share; `stream` is the placement of activations between blocks."""
    # Shard(1) is the sequence of [rows, length, width].
    cut, given = stream == Shard(1), WeakTensorKeyDictionary() if regather else None
    ends: dict[TpStyle, tuple[ParallelStyle, ...]] = {
        TpStyle.EMBEDDING: (_Rows(stream),),
        # Gathered for a loss that needs all logits; `sum_sharded_loss` reads the local weight instead.
        TpStyle.HEAD: (ColwiseParallel(output_layouts=Replicate()),),
    }
    replicated: dict[TpStyle, tuple[ParallelStyle, ...]] = {
        TpStyle.EMBEDDING: (_Replicated(stream),),
        TpStyle.HEAD: (_Replicated(),),
    }
    return {
        TpStyle.BLOCK: (_Input(stream, given),),
        TpStyle.BLOCK_OF_HEADS: (_Input(stream, given), _OfHeads()),
        TpStyle.BLOCK_WHOLE: (_WholeBlock(stream),),
        TpStyle.BLOCK_OF_EXPERTS: (ExpertBlock(stream),),
        TpStyle.EXPERTS: (Stacks(),),
        TpStyle.PARTIAL_COLUMNS: (LocalWeights(Shard(0)),),
        TpStyle.PARTIAL_ROWS: (LocalWeights(Shard(1)),),
        TpStyle.PARTIAL_WHOLE: (LocalWeights(Replicate()),),
        TpStyle.COLUMNS: (ColwiseParallel() if given is None else _Columns(given),),
        TpStyle.COLUMNS_GATHERED: (ColwiseParallel(output_layouts=Replicate()),),
        TpStyle.ROWS: (RowwiseParallel(output_layouts=stream),),
        TpStyle.ROWS_SPLIT: (RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),),
        TpStyle.ROWS_SUMMED: (RowwiseParallel(),),
        TpStyle.REPLICATED_THEN_SPLIT: (_Replicated(stream),),
        TpStyle.HEADS: (SequenceParallel(sequence_dim=2, use_local_output=True),),  # [rows, length, heads, head_dim]
        TpStyle.REPLICATED: (_Replicated(),),
        TpStyle.BETWEEN: (SequenceParallel(use_local_output=True) if cut else _Replicated(),),
        TpStyle.LAST: (
            SequenceParallel(),
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        )
        if cut
        else (_Replicated(),),
    } | (ends if rows_divide else replicated)


def parallelize(
    model: PreTrainedModel,
    shares: Mapping[str, TpStyle],
    mesh: DeviceMesh,
    *,
    sequence: bool = False,
    vocabulary: bool = True,
    regather: bool = False,
) -> int:
    """Applies tensor parallelism along a one-dimensional mesh, in place and also on meta; other weights become
    replicated.

    Args:
        shares: module name -> how it is sharded (`preheat.models.tp_plan.shares`).
        sequence: shard activations between blocks along the sequence, whose length must divide by the mesh.
        vocabulary: shard the rows of embedding and head; otherwise they are replicated.
        regather: with `sequence`, save only the local shard of block inputs and gather it again in backward.

    Returns:
        The number of sharded matrices.

    Raises:
        ValueError: a matrix does not divide by the mesh, or `regather` has nothing to gather.
    """
    if regather and TpStyle.COLUMNS not in shares.values():
        raise ValueError("regather: this family's plan leaves no output sharded, so nothing is gathered; leave it out")
    degree, count = mesh.size(), 0
    styles = _build_styles(Shard(1) if sequence else Replicate(), vocabulary, sequence and regather)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # a pipeline stage may lack either
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    # Noted before the styles run, which create new parameters that all require gradients.
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, kind in shares.items():
        module = model.get_submodule(name)
        # Some shares need two styles in order, such as the last norm and the gather behind it.
        for style in styles[kind]:
            style.src_data_rank = None  # each rank slices its own copy, without a broadcast
            parallelize_module(module, mesh, style, src_data_rank=None)
        for key, p in module.named_parameters(recurse=False):
            # DTensor accepts uneven shards, but views into heads need equal ones.
            # The last dimension of a mesh is the tensor axis; `expert_parallel` may have split experts along another.
            cut = split_dim(p.placements[-1])
            count += cut is not None and (key == "weight" or (p.ndim == 3 and "_lora_" not in key))
            if cut is not None and (size := p.shape[cut] // parts_of(p.placements[-1])) % degree:
                raise ValueError(
                    f"degree: {name}.{key} {tuple(p.shape)} does not divide by {degree} devices; use a degree that "
                    f"divides {size}"
                )
    if sequence and embedding is not None:
        embedding.register_forward_pre_hook(functools.partial(_refuse_length, degree))
    # The styles gave embedding and head a parameter each; a tied model has one.
    if tied:
        head.weight = embedding.weight
    for name, p in model.named_parameters():  # styles create new parameters
        p.requires_grad_(name in trained)
    return count - tied


def _refuse_length(degree: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    if args[0].shape[1] % degree:  # DTensor would assume the first rank's shard size everywhere
        raise RunError(
            f"sequence_parallel: sequences of {args[0].shape[1]} tokens cannot be split across {degree} devices"
        )


def broadcast_replicated(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Replaces, in place, the gradients of replicated weights by the first rank's; call it before `sum_partial`.

    Each rank computes them from equal inputs, but kernels whose backward pass is not deterministic round differently,
    and nothing would bring copies of a weight together again. A broadcast rather than a mean: it sends half as much and
    leaves equal gradients as they are.

    Args:
        mesh: the one-dimensional mesh of tensor parallelism.
    """
    group = mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    small: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if not isinstance(p.grad, DTensor) or not _is_replicated(p.grad, ranks):
            continue
        grad = local(p.grad)
        if grad.nbytes >= _OWN_MESSAGE and grad.is_contiguous():
            dist.broadcast(grad, ranks[0], group=group)
        else:
            small.setdefault(grad.dtype, []).append(grad)
    for grads in small.values():
        flat = torch.cat([t.flatten() for t in grads])
        dist.broadcast(flat, ranks[0], group=group)
        for t, part in zip(grads, flat.split([t.numel() for t in grads]), strict=True):
            t.copy_(part.view(t.shape))


def _is_replicated(grad: DTensor, ranks: list[int]) -> bool:
    """True if a gradient is replicated along the dimension of its mesh that has these ranks."""
    mesh = grad.device_mesh
    return any(
        place.is_replicate() and dist.get_process_group_ranks(mesh.get_group(dim)) == ranks
        for dim, place in enumerate(grad.placements)
    )


def sum_partial(parameters: Iterable[nn.Parameter]) -> None:
    """All-reduces, in place and as one message, the partial gradients of replicated weights that saw only local heads,
    positions or parts of experts.
    """
    # By group and dtype: one message each.
    waiting: dict[tuple[dist.ProcessGroup, torch.dtype], list[nn.Parameter]] = {}
    for p in parameters:
        if isinstance(p.grad, DTensor) and any(place.is_partial() for place in p.grad.placements):
            (dim,) = (n for n, place in enumerate(p.grad.placements) if place.is_partial())
            waiting.setdefault((p.grad.device_mesh.get_group(dim), p.grad.dtype), []).append(p)
    for (group, _), members in waiting.items():
        grads = [local(p.grad) for p in members]  # type: ignore[arg-type]
        flat = torch.cat([t.flatten() for t in grads])
        # A sum, because each rank's gradient covers other heads, positions or parts of experts.
        dist.all_reduce(flat, group=group)
        # Replicate from here on, so that norm and clipping count the gradient once.
        for p, part in zip(members, flat.split([t.numel() for t in grads]), strict=True):
            before: Any = p.grad
            summed = [Replicate() if place.is_partial() else place for place in before.placements]
            p.grad = DTensor.from_local(
                part.view(local(before).shape),
                before.device_mesh,
                summed,
                run_check=False,
                shape=before.shape,
                stride=before.stride(),
            )


# --- the loss -----------------------------------------------------------------------------------------------------


class SharedCrossEntropy:
    """`RegularizedCrossEntropy` for logits sharded by columns, in equal parts by rank.

    Each rank computes its columns' gradient; the losses cover all columns and are equal on every rank. It takes two
    small all-reduces: the largest logit of each row, then the row's sums.

    Args:
        group: process group.
    """

    def __init__(self, group: dist.ProcessGroup, smoothing: float = 0.0, z: float = 0.0):
        self.group, self.smoothing, self.z = group, smoothing, z

    @property
    def measured(self) -> RowLoss:
        return SharedCrossEntropy(self.group)

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        """Returns losses [n] from this rank's columns [n, share] and labels [n]; overwrites the logits."""
        return self.value_and_grad_(logits, *aligned)[0]

    def value_and_grad_(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        trained, share = labels != IGNORED, logits.shape[1]
        # Column of each label on this rank; outside of [0, share) on all ranks but one.
        index = labels - self.group.rank() * share
        is_local = (index >= 0) & (index < share)
        # Clamped, because labels of other ranks (and -100) must index something; `is_local` masks their values.
        own = (torch.arange(labels.shape[0], device=labels.device), index.clamp(0, share - 1))
        # [n]: the logit of the label, on one rank only; the sum over ranks passes it to all.
        parts = [torch.where(is_local, logits[own].float(), 0.0)]
        if self.smoothing:
            parts.append(logits.sum(dim=-1, dtype=torch.float32))
        # The largest logit of all columns, so that exp() of none overflows.
        peak = logits.amax(dim=-1).float()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.group)
        # [n, share], not normalized yet.
        probs = logits.float().sub_(peak.unsqueeze(1)).exp_()
        # [2 or 3, n]: denominators, logits of the labels and, with smoothing, sums of all logits: one message.
        sums = torch.stack([probs.sum(dim=-1), *parts])
        dist.all_reduce(sums, group=self.group)
        # lse [n] = log sum exp over the whole vocabulary
        lse, columns = peak + sums[0].log(), share * self.group.size()
        # -log p = lse - logit; z-loss adds z * lse^2.
        losses = lse - (1 - self.smoothing) * sums[1] + self.z * lse.square()
        # d loss / d logits = (1 + 2 z lse) p - (1 - s) onehot - s / vocabulary; `factor` is taken out per row.
        factor = 1 + 2 * self.z * lse
        probs.div_(sums[0].unsqueeze(1))
        # The gradient of cross entropy: probabilities minus 1 at the label, which one rank alone holds.
        probs[own] -= torch.where(is_local, (1 - self.smoothing) / factor, 0.0)
        if self.smoothing:
            losses -= self.smoothing * sums[2] / columns
            probs.sub_((self.smoothing / columns / factor).unsqueeze(1))
        logits.copy_(probs)
        return torch.where(trained, losses, 0.0), torch.where(trained, factor, 0.0)


class _WholeCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits sharded by columns, with the operators of torch's loss_parallel.

    Forward keeps the log-probabilities in fp32; backward makes three more tensors of their size.
    Source: torch/distributed/tensor/parallel/loss.py.
    """

    @staticmethod
    def forward(ctx: AutogradContext, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        share, trained = logits.shape[1], labels != IGNORED
        index = labels - group.rank() * share
        is_local = trained & (index >= 0) & (index < share)
        own = (torch.arange(labels.shape[0], device=labels.device), index.clamp(0, share - 1))
        x = logits.float()
        peak = x.amax(dim=-1, keepdim=True)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = x - peak
        total = shifted.exp().sum(dim=-1, keepdim=True)
        dist.all_reduce(total, group=group)
        log_probs = shifted - total.log()
        losses = torch.where(is_local, -log_probs[own], 0.0)
        dist.all_reduce(losses, group=group)
        ctx.save_for_backward(log_probs, *own, trained, is_local)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, *own, trained, is_local = ctx.saved_tensors
        rows, columns = own
        by_label = torch.zeros_like(log_probs)
        by_label[rows, columns] = -is_local.float()
        by_logits = (by_label + log_probs.exp()) * torch.where(trained, grads[0], 0.0).unsqueeze(1)
        return by_logits.to(ctx.dtype), None, None


class _RecordedShards:
    """`Recorded` for losses computed by a `SharedCrossEntropy`."""

    def __init__(self, recorded: Recorded, loss: SharedCrossEntropy):
        self.recorded, self.loss = recorded, loss

    @property
    def measured(self) -> RowLoss:
        return self

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        # Losses are equal on all ranks, so each rank records them by itself.
        return self.recorded.keep(self.loss(logits, *aligned))

    def value_and_grad_(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses = self(logits, labels)
        # No gradient: the factors are 0.
        return losses, torch.zeros_like(losses)


@functools.singledispatch
def _shard_loss(loss: RowLoss, group: dist.ProcessGroup) -> RowLoss:
    """Returns the equivalent loss for column-sharded logits."""
    # The losses registered below have a form for sharded columns.
    raise TypeError(f"{type(loss).__name__} does not support sharded logits; set loss_parallel: false")


@_shard_loss.register
def _(loss: CrossEntropy, group: dist.ProcessGroup) -> RowLoss:
    return SharedCrossEntropy(group)


@_shard_loss.register
def _(loss: RegularizedCrossEntropy, group: dist.ProcessGroup) -> RowLoss:
    return SharedCrossEntropy(group, loss.smoothing, loss.z)


@_shard_loss.register
def _(loss: WeightedCrossEntropy, group: dist.ProcessGroup) -> RowLoss:
    return WeightedCrossEntropy(SharedCrossEntropy(group))


@_shard_loss.register
def _(loss: DynamicCrossEntropy, group: dist.ProcessGroup) -> RowLoss:
    return DynamicCrossEntropy(SharedCrossEntropy(group))


@_shard_loss.register
def _(loss: Softcapped, group: dist.ProcessGroup) -> RowLoss:
    return Softcapped(_shard_loss(loss.loss, group), loss.cap)


@_shard_loss.register
def _(loss: Recorded, group: dist.ProcessGroup) -> RowLoss:
    return _RecordedShards(loss, SharedCrossEntropy(group))


def sum_sharded_loss(hidden: Tensor, head: nn.Module, row_loss: RowLoss, *aligned: Tensor, rows: int = 512) -> Tensor:
    """`sum_chunked_loss` for a head sharded by rows: each rank computes the logits of its own rows only.

    The loss is equal on every rank, and so is the gradient by `hidden`, which is all-reduced once.

    Args:
        hidden: [..., width], equal on every rank of the head's mesh.
        head: `weight` [vocabulary, width] and any `bias` [vocabulary] are DTensors sharded by rows; plain tensors are
            used as they are.
        rows: logits in memory at a time; 0: all, in fp32 until backward, for a plain `CrossEntropy` only.
    """
    weight: Any = head.weight
    if not isinstance(weight, DTensor):  # a reference model without tensor parallelism
        return sum_chunked_loss(hidden, head, row_loss, *aligned, rows=rows or hidden[..., 0].numel())
    assert weight.placements == (Shard(0),), "a head whose rows are sharded, with nothing else between"
    mesh = weight.device_mesh
    # Each rank's gradient by `hidden` covers its own columns only; Partial makes DTensor add them up.
    spread = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    bias: Any = head.bias
    if not rows:
        if type(row_loss) is not CrossEntropy:
            raise TypeError(f"{type(row_loss).__name__} does not support whole logits; leave rows: 0 out")
        logits = F.linear(spread, weight.to_local(), bias.to_local() if bias is not None else None)
        (labels,) = aligned
        return torch.sum(_WholeCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), mesh.get_group()))
    # `sum_chunked_loss` needs no more of a head than its weight and bias.
    mine: Any = SimpleNamespace(weight=weight.to_local(), bias=bias.to_local() if bias is not None else None)
    return sum_chunked_loss(spread, mine, _shard_loss(row_loss, mesh.get_group()), *aligned, rows=rows)
