"""Grouped matmuls for MoE experts, and expert parallelism by all-to-all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from preheat.ops.distributed.dtensor_utils import local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from preheat.ops.autograd_context import AutogradContext


__all__ = [
    "ADAPTER",
    "EXCHANGE",
    "PACKED_SHAPES",
    "Exchange",
    "ExpertAdapter",
    "compute_experts",
    "group_rows",
    "grouped_back",
    "grouped_linear",
    "is_packed",
    "shape_of_stack",
    "stacks_of",
]

_STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of weight stacks of a layer's experts; without a gate it is up_proj."""
ADAPTER = "preheat_adapter"
"""Attribute of experts with LoRA (ops/adapters/moe_lora.py): the `ExpertAdapter`."""

EXCHANGE = "preheat_exchange"
"""Attribute of experts that are sharded over devices: the `Exchange`."""

PACKED_SHAPES = "packed_shapes"
"""Attribute of experts whose stacks are packed (ops/quantization/packed_experts.py): the shape of each, by its name."""

# Custom operators, because torch's `_grouped_mm` has no fake implementation for fp32 or for widths that are not
# multiples of 16 bytes, and no FLOP formula.


def _has_native_kernel(*tensors: Tensor) -> bool:
    """True if torch's grouped matmul supports the tensors without a sync.

    It needs 16-byte rows and no fp64; on CUDA, bf16 on Hopper or Blackwell. Otherwise it reads the bounds back.
    """
    device = tensors[0].device
    # 9 is Hopper, 10 Blackwell; on others torch loops over the experts after reading `ends` from the device.
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return False
    # Both sides of a matrix stack, since one of the operands may be read transposed.
    aligned = all(size * t.element_size() % 16 == 0 for t in tensors for size in t.shape[-2:] if t.ndim == 3)
    aligned = aligned and all(t.shape[-1] * t.element_size() % 16 == 0 for t in tensors)
    kinds = (torch.float32, torch.bfloat16, torch.float16) if device.type == "cpu" else (torch.bfloat16,)
    return aligned and tensors[0].dtype in kinds


def _compute_bounds(ends: Tensor) -> list[tuple[int, int]]:
    last = [int(n) for n in ends.tolist()]
    # Expert e has the rows [ends[e - 1], ends[e]).
    return list(zip([0, *last[:-1]], last, strict=True))


def _can_read_bounds(ends: Tensor) -> bool:
    """True if the host can read the bounds without a sync."""
    return ends.device.type == "cpu"


_BLOCK = 256
"""Maximum rows per block: each block copies an expert's matrix, which is cheap compared to a matmul of this many rows.
"""


class _Blocks(NamedTuple):
    """Rows of each expert in equal blocks; their number is the upper bound, so that no shape depends on the routing.

    Attributes:
        expert: [blocks], the expert of each block.
        at: [blocks, size], row indices; the total number of rows as padding.
        real: [blocks, size], false for padding.
    """

    expert: Tensor
    at: Tensor
    real: Tensor

    @classmethod
    def of(cls, ends: Tensor, rows: int) -> _Blocks:
        experts, device = ends.shape[0], ends.device
        # The mean rows of an expert, at most 256: with larger blocks most of the work would be padding.
        size = min(_BLOCK, -(-rows // experts))
        ends = ends.long()
        # [experts]: first row of each expert
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        # [experts]: blocks of each expert, the last one possibly partly filled; none for an expert without rows
        blocks = (ends - begins + size - 1) // size
        last = blocks.cumsum(0)
        # Upper bound of the number of blocks: each expert adds at most one that is not full.
        number = torch.arange(rows // size + experts, device=device)
        # The expert of block n is the first whose blocks end behind n; surplus blocks are padding of the last expert.
        expert = torch.bucketize(number, last, right=True).clamp(max=experts - 1)
        # First row of each block: the expert's first row plus the size of its earlier blocks.
        first = begins[expert] + (number - (last - blocks)[expert]) * size
        at = first[:, None] + torch.arange(size, device=device)
        real = at < ends[expert][:, None]
        return cls(expert, torch.where(real, at, rows), real)


def _multiply_blocks(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """`_multiply` by blocks of rows, without a device sync."""
    count = rows.shape[0]
    blocks = _Blocks.of(ends, count)
    out = rows.new_empty(count + 1, matrices.shape[2])  # the last row receives the padding
    for n in range(len(blocks.at)):
        # Indexed by a tensor on the device, so that the host need not know which expert it is.
        matrix = matrices.index_select(0, blocks.expert[n : n + 1])[0]
        # Padding reads the last row, and writes to the extra row behind it.
        out.index_copy_(0, blocks.at[n], rows[blocks.at[n].clamp(max=count - 1)] @ matrix)
    return out[:count]


def _sum_outer_blocks(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`_sum_outer` by blocks of rows, without a device sync. Accumulates in at least fp32."""
    blocks = _Blocks.of(ends, left.shape[0])
    wide = torch.promote_types(left.dtype, torch.float32)
    out = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1], dtype=wide)
    for n in range(len(blocks.at)):
        at = blocks.at[n].clamp(max=left.shape[0] - 1)
        # Sums over rows: padding must contribute zeros.
        rows = left[at].masked_fill(~blocks.real[n][:, None], 0)
        out.index_add_(
            0, blocks.expert[n : n + 1], (rows.t() @ right[at].masked_fill(~blocks.real[n][:, None], 0)).to(wide)[None]
        )
    return out.to(left.dtype)


def _multiply(rows: Tensor, weight: Tensor, ends: Tensor, flip: bool) -> Tensor:
    """Multiplies rows [n, in], grouped by expert up to `ends`, by each expert's matrix.

    `weight` is [experts, in, out], or [experts, out, in] with `flip`.
    """
    # A view: neither torch's grouped matmul nor `mm` needs it contiguous.
    matrices = weight.transpose(1, 2) if flip else weight
    if _has_native_kernel(rows, weight):
        return cast(Tensor, torch.nn.functional.grouped_mm(rows.contiguous(), matrices, offs=ends))
    if not _can_read_bounds(ends):
        return _multiply_blocks(rows, matrices, ends)
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for matrix, (first, last) in zip(matrices, _compute_bounds(ends), strict=True):
        torch.mm(rows[first:last], matrix, out=out[first:last])
    return out


@torch.library.custom_op("preheat::grouped_linear", mutates_args=())
def _multiply_groups(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    # Weights are stored [out, in], as in nn.Linear.
    return _multiply(rows, weight, ends, True)


@_multiply_groups.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@torch.library.custom_op("preheat::grouped_back", mutates_args=())
def _scatter_rows(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _multiply(rows, weight, ends, False)


@_scatter_rows.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("preheat::grouped_outer", mutates_args=())
def _sum_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Sums the outer products of left [n, a] and right [n, b] over each expert's rows: [experts, a, b]."""
    if _has_native_kernel(left, right):
        return cast(Tensor, torch.nn.functional.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends))
    if not _can_read_bounds(ends):
        return _sum_outer_blocks(left, right, ends)
    out = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    for matrix, (first, last) in zip(out, _compute_bounds(ends), strict=True):
        torch.mm(left[first:last].t(), right[first:last], out=matrix)
    return out


@_sum_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: AutogradContext, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    # Y = X W^T per expert: dX = dY W
    of_rows = _scatter_rows(grad, weight, ends) if ctx.needs_input_grad[0] else None
    # dW = dY^T X: [experts, out, in]
    of_weight = _sum_outer(grad, rows, ends) if ctx.needs_input_grad[1] else None
    return of_rows, of_weight, None


_multiply_groups.register_autograd(_backward, setup_context=_keep)


@register_flop_formula([torch.ops.preheat.grouped_linear, torch.ops.preheat.grouped_back])
def _count_product_flops(rows: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    # Each row meets one expert's matrix, so the number of experts does not count.
    return int(2 * rows[0] * weight[1] * weight[2])


@register_flop_formula(torch.ops.preheat.grouped_outer)
def _count_outer_flops(left: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    return int(2 * left[0] * left[1] * right[1])


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each row by its expert's matrix; differentiable.

    Args:
        rows: [n, in], sorted by expert, n > 0.
        weight: [experts, out, in].
        ends: [experts] int32, end of each expert's rows.

    Returns:
        [n, out].

    Example:
        >>> rows, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[[2.0]], [[3.0]]])
        >>> grouped_linear(rows, weight, torch.tensor([1, 2], dtype=torch.int32)).flatten().tolist()
        [2.0, 3.0]
    """
    return cast(Tensor, _multiply_groups(rows, weight, ends))


def grouped_back(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each row [n, out] by the transpose of its expert's matrix: the gradient of `grouped_linear`'s rows."""
    return cast(Tensor, _scatter_rows(rows, weight, ends))


def group_rows(expert: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts rows by expert.

    Args:
        expert: [n] int64, the expert of each row.

    Returns:
        order [n] (row at each sorted position), place [n] (sorted position of each row), counts [experts] int64.
    """
    # Stable, so that rows of one expert are summed in a fixed order: training is deterministic.
    order = expert.argsort(stable=True)
    # The inverse permutation.
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    counts = torch.zeros(experts, dtype=torch.int64, device=expert.device).scatter_add_(
        0, expert, torch.ones_like(expert)
    )
    return order, place, counts


_STEP = 16
"""Multiple to which an expert's rows are padded if the backend compiles a kernel for every number of rows."""


class Experts(Protocol):
    """The attributes of transformers' experts that their computation uses; `nn.Module` does not declare them."""

    num_experts: int
    gate_up_proj: Tensor
    down_proj: Tensor
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool

    def multiply_packed(self, name: str, rows: Tensor, ends: Tensor, /) -> Tensor: ...

    def act_fn(self, inner: Tensor, /) -> Tensor: ...

    def post_expert_norm(self, out: Tensor, /) -> Tensor: ...

    def _apply_gate(self, gate_up: Tensor, /) -> Tensor: ...


def compute_experts(
    experts: Experts, hidden: Tensor, chosen: Tensor, weights: Tensor, *, stepped: bool = False
) -> Tensor:
    """Computes a layer's experts on tokens by one grouped matmul for all, in autocast's dtype if it is on.

    Args:
        experts: module of transformers with weight stacks, in any of the layouts of its `use_experts_implementation`:
            gate_up_proj [experts, 2 inner, width] or up_proj, and down_proj [experts, width, inner], or local shards.
        hidden: [tokens, width].
        chosen, weights: [tokens, k], the experts of each token and their weights.
        stepped: pad each expert's rows to a multiple of 16, in half precision and if that adds few rows. On a CPU
            oneDNN generates a kernel for every new number of rows, which takes ten times as long as the matmul for 64
            experts whose rows change in every step.

    Returns:
        [tokens, width], in the dtype of `hidden`.
    """
    exchange = getattr(experts, EXCHANGE, None)
    # tokens * k rows, sorted by expert
    order, place, counts = group_rows(chosen.flatten(), experts.num_experts)
    kind = hidden.device.type
    stored = hidden.dtype if is_packed(experts) else experts.down_proj.dtype
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else stored
    # Row i of the flattened choices is of token i // k.
    rows = hidden.to(dtype)[order // chosen.shape[1]]
    if exchange is None:
        out = _compute(experts, rows, counts, stepped)
    else:
        received, numbers, split = exchange.send(rows, counts)
        out = exchange.back(_compute_unsorted(experts, received, numbers, stepped), split)
    # [tokens, k, width]
    out = out[place].view(*chosen.shape, -1)
    return (out * weights[..., None].to(out.dtype)).sum(dim=1).to(hidden.dtype)


def _compute_unsorted(experts: Experts, rows: Tensor, numbers: Tensor, stepped: bool) -> Tensor:
    """Computes the experts on unsorted rows [n, width]; `numbers` [n] is the expert of each."""
    count = rows.shape[0]
    # No token of any rank chose an expert of this rank.
    if not count:  # a row of zeros, since an empty matmul has no backward pass
        rows, numbers = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1)
    # Received rows are sorted by sender first, and the matmul needs them sorted by expert.
    order, place, counts = group_rows(numbers, local(experts.down_proj).shape[0])
    return _compute(experts, rows[order], counts, stepped)[place][:count]


def _compute(experts: Experts, rows: Tensor, counts: Tensor, stepped: bool) -> Tensor:
    count, n_experts = rows.shape[0], counts.shape[0]
    # Only if the padding adds at most about a quarter of the rows.
    if stepped and rows.element_size() == 2 and count >= 4 * _STEP * n_experts:
        # The maximum number of rows, so that shapes do not depend on the routing; the last expert gets the rest.
        total = -(-count // _STEP) * _STEP + n_experts * _STEP
        # [experts], each count rounded up
        wide = (counts + _STEP - 1) // _STEP * _STEP
        ends = wide.cumsum(0)
        # [rows]: how far each row shifts to make room for the padding of earlier experts
        moved = (ends - wide - counts.cumsum(0) + counts).repeat_interleave(counts, output_size=count)
        at = torch.arange(count, device=rows.device) + moved
        ends[-1] = total
        # Zero rows in between cost some matmul, and `[at]` drops their results.
        return _product(experts, rows.new_zeros(total, rows.shape[1]).index_copy(0, at, rows), ends)[at]
    return _product(experts, rows, counts.cumsum(0))


def _product(experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
    # torch's grouped matmul takes int32.
    ends = ends.to(torch.int32)
    # gate and up in one stack: one matmul instead of two.
    if experts.has_gate:
        inner = experts._apply_gate(_linear(experts, "gate_up_proj", rows, ends))
    else:
        inner = experts.act_fn(_linear(experts, "up_proj", rows, ends))
    out = _linear(experts, "down_proj", inner, ends)
    return experts.post_expert_norm(out) if experts.has_post_expert_norm else out


def _linear(experts: Experts, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    """Multiplies rows by the weight stack `name` and adds its bias and LoRA, if any."""
    if is_packed(experts):
        out: Tensor = experts.multiply_packed(name, rows, ends)
    else:
        weight = local(getattr(experts, name)).to(rows.dtype)
        # gpt-oss stores [experts, in, out].
        out = grouped_linear(rows, weight.transpose(1, 2) if experts.is_transposed else weight, ends)
    if experts.has_bias:
        bias = local(getattr(experts, f"{name}_bias"))
        # [rows]: the first expert whose end lies behind the row
        expert = torch.bucketize(torch.arange(rows.shape[0], device=rows.device), ends, right=True)
        # Rows that pad the last expert lie behind its end.
        out = out + bias.to(rows.dtype)[expert.clamp(max=bias.shape[0] - 1)]
    adapter: ExpertAdapter | None = getattr(experts, ADAPTER, None)
    if adapter is None or adapter.off:
        return out
    small, large = (local(getattr(experts, f"{name}_lora_{part}")).to(rows.dtype) for part in "AB")
    # scale * B (A x), each rank-r matrix per expert
    return out + adapter.scale * grouped_linear(grouped_linear(rows, small, ends), large, ends)


def is_packed(experts: object) -> bool:
    """True if a layer's experts have packed stacks, which `multiply_packed` dequantizes."""
    return hasattr(experts, PACKED_SHAPES)


def stacks_of(experts: nn.Module) -> tuple[str, ...]:
    """Returns the names of the weight stacks of a layer's experts.

    Each is [experts, out, in], or [experts, in, out] if the module says `is_transposed`.
    """
    return tuple(name for name in _STACKS if name in experts._parameters or name in getattr(experts, PACKED_SHAPES, ()))


def shape_of_stack(experts: nn.Module, name: str) -> tuple[int, int, int]:
    """Returns the number of experts, outputs and inputs of a weight stack, without dequantizing a packed one."""
    packed = getattr(experts, PACKED_SHAPES, None)
    count, *sides = packed[name] if packed else experts.get_parameter(name).shape
    into, out = sides if experts.is_transposed else reversed(sides)
    return count, out, into


class ExpertAdapter:
    """Settings of a layer's expert LoRA: its `scale`, and `off` to disable it."""

    def __init__(self, scale: float):
        self.scale, self.off = scale, False


class Exchange:
    """Expert parallelism: sends rows to the ranks of their experts and results back by all-to-all. Drops no rows.

    Differentiable. The row counts depend on the routing and are read back to the host once per layer, because torch's
    all-to-all needs them there. A dry run, whose tensors have no values, assumes balanced experts.

    Args:
        group: one-dimensional DeviceMesh; rank n holds the n-th part of the experts.
    """

    def __init__(self, group: DeviceMesh):
        self.group = group

    def send(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, tuple[list[int], list[int]]]:
        """Sends rows [n, width], sorted by expert, with `counts` [experts] of each.

        Returns:
            The received rows, sorted by sender and then by expert; the local expert of each row; the numbers of rows
            sent and received per rank.
        """
        from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

        devices = self.group.size()
        # [devices, experts of this rank]: rows from each sender
        arriving = all_to_all_single(counts, None, None, self.group).view(devices, -1)
        own = arriving.shape[1]
        # The only synchronization: the next all-to-all needs its sizes on the host.
        split = self._splits(rows.shape[0], counts.view(devices, -1).sum(1), arriving.sum(1))
        # Its backward pass sends gradients the other way, by the same sizes.
        received = all_to_all_single_autograd(rows, split[1], split[0], self.group)
        # 0 1 ... own - 1 for each sender; repeated below by the rows of each.
        numbers = torch.arange(own, device=rows.device).repeat(devices)
        if _is_fake(counts):
            return received, numbers.new_empty(received.shape[0]), split
        return received, numbers.repeat_interleave(arriving.flatten(), output_size=received.shape[0]), split

    def back(self, rows: Tensor, split: tuple[list[int], list[int]]) -> Tensor:
        """Sends each row back to its source rank."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        return cast(Tensor, all_to_all_single_autograd(rows, split[0], split[1], self.group))

    def _splits(self, rows: int, out: Tensor, into: Tensor) -> tuple[list[int], list[int]]:
        if _is_fake(out):
            devices = self.group.size()
            even = [rows // devices + (n < rows % devices) for n in range(devices)]
            return even, even
        # Stacked, so that one copy to the host brings both.
        both = torch.stack([out, into]).tolist()
        return both[0], both[1]


def _is_fake(t: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)
