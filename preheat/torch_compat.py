"""Names and behaviour of torch that differ between the supported releases, each with its form for older releases.

preheat runs on torch 2.11 and newer. Other modules call these functions and do not ask for torch's version. To raise
the minimum version, delete the older forms.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed import ProcessGroup

__all__ = [
    "KNOWS_RECEIVED_SHAPES",
    "add_product_",
    "all_gather_single",
    "export_options",
    "fake_device",
    "gather_first_dimension",
    "find_fsdp_groups",
    "has_expandable_segments",
    "linear_cross_entropy",
    "read_activity",
    "why_no_linear_cross_entropy",
    "why_no_integer_shards",
    "reduce_scatter_single",
    "scatter_first_dimension",
    "allocate_unsharded",
]

# `torch.__version__` compares itself with texts by version: 2.9 is older than 2.11, 2.13.0a0 older than 2.13.
_IS_2_12, _IS_2_13 = torch.__version__ >= "2.12", torch.__version__ >= "2.13"

KNOWS_RECEIVED_SHAPES = _IS_2_12
"""Stages of a pipeline know the shape of a tensor that they will receive without a buffer for it."""

# Returns the device that a fake tensor represents. From 2.13 on `fake_device` is a property that reads `_fake_device`;
# dry runs read it so often that the property's call takes noticeable time.
fake_device: Callable[[FakeTensor], torch.device] = attrgetter("_fake_device" if _IS_2_13 else "fake_device")


def add_product_(total: Tensor, left: Tensor, right: Tensor, *, beta: float) -> None:
    """Computes total = beta * total + left @ right in place on CUDA, in the dtype of `total` without rounding between.

    Args:
        total: [n, m], also of a wider dtype than the factors.
        left: [n, k].
        right: [k, m].
        beta: 0 ignores the old contents.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if type(total) is FakeTensor and not _IS_2_13:
        # CUDA has `out_dtype`, but before 2.13 fake tensors decompose this overload as the one without it, and fail.
        # That one has the same operands and result; fake tensors promote the factors.
        torch.addmm(total, left, right, beta=beta, out=total)
        return
    torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)


def has_expandable_segments() -> bool:
    """True if expandable segments of torch's CUDA allocator are on."""
    if _IS_2_13:
        return "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()
    return bool(torch._C._cuda_memorySnapshot(None)["allocator_settings"]["expandable_segments"])


def why_no_linear_cross_entropy() -> str:
    """Returns why `linear_cross_entropy` cannot be called, and the fix; "" if it can."""
    if _IS_2_13:
        return ""
    return f"torch {torch.__version__} has no chunked linear_cross_entropy; use ours, or torch 2.13"


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, ignore_index: int, rows: int
) -> Tensor:
    """Returns the summed cross entropy of `hidden @ weight.T + bias` by torch's own kernel, `rows` rows at a time.

    Args:
        hidden: [n, width].
        weight: [vocabulary, width].
        labels: [n].
        bias: [vocabulary].
        ignore_index: label of rows that do not count.
        rows: rows of logits that are computed at once.
    """
    assert not why_no_linear_cross_entropy()
    # By default torch does not chunk, so the chunk size is explicit.
    options = torch.nn.LinearCrossEntropyOptions(  # type: ignore[attr-defined]
        batch_chunk_size=rows, chunking_method=None
    )
    loss: Tensor = functional.linear_cross_entropy(  # type: ignore[attr-defined]
        hidden, weight, labels, linear_bias=bias, reduction="sum", ignore_index=ignore_index, options=options
    )
    return loss


def why_no_integer_shards() -> str:
    """Returns why FSDP cannot shard integer weights, and the fix; "" if it can."""
    # 2.11 makes each shard trainable first, which fails for integers, and casts them to the dtype of gathers.
    return "" if _IS_2_12 else f"torch {torch.__version__} cannot shard integer weights; use torch 2.12 or newer"


def find_fsdp_groups(state: Any) -> list[Any]:
    """Returns the parameter groups of a module's FSDP state; 2.11 has at most one."""
    if _IS_2_12:
        groups: list[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def allocate_unsharded(parameter: Any, full: Tensor) -> Tensor:
    """Returns a local tensor of a gathered weight's shape as FSDP hands it to modules: a DTensor if the weight was one.

    Args:
        parameter: FSDPParam.
        full: the local tensor.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad

    if not _IS_2_12:
        return _from_local_no_grad(full, parameter._tp_spec) if parameter.is_dtensor else full
    if parameter._unsharded_dtensor_spec is None:
        return full
    return _from_local_no_grad(full, parameter._get_unsharded_dtensor_spec(full))


def export_options() -> dict[str, Any]:
    """Returns the options of `torch.export.export` for a dynamic length of grouped attention heads."""
    # Before 2.13 export cannot prove min(16 * n, 32 * n) == 16 * n, so the graph asserts it when it runs.
    return {} if _IS_2_13 else {"prefer_deferred_runtime_asserts_over_guards": True}


def read_activity(event: Any) -> str:
    """Returns the kind of an event of torch's profiler, as in an exported trace: cpu_op, kernel, gpu_memcpy, ...

    Args:
        event: `torch._C._autograd._KinetoEvent`.
    """
    if _IS_2_12:
        return str(event.activity_type())
    # Before 2.12 an event does not tell. CUDA's own calls on the host have metadata or no number, operators differ.
    on_host = event.device_type() == torch.autograd.DeviceType.CPU
    if event.is_user_annotation():
        return "user_annotation" if on_host else "gpu_user_annotation"
    if on_host:
        return "cpu_op" if event.correlation_id() and not event.metadata_json() else "cuda_runtime"
    return {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(event.name().partition(" ")[0], "kernel")


def all_gather_single(output: Tensor, part: Tensor) -> None:
    """Gathers the parts of all ranks into one tensor; before 2.13 named `all_gather_into_tensor`."""
    import torch.distributed as dist

    (dist.all_gather_single if _IS_2_13 else dist.all_gather_into_tensor)(output, part)


def reduce_scatter_single(part: Tensor, full: Tensor) -> None:
    """Sums a tensor over all ranks, and leaves each its part; before 2.13 named `reduce_scatter_tensor`."""
    import torch.distributed as dist

    (dist.reduce_scatter_single if _IS_2_13 else dist.reduce_scatter_tensor)(part, full)


def gather_first_dimension(part: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the parts of all ranks of a group, joined along the first dimension; may still be under way."""
    from torch.distributed import _functional_collectives as collectives

    return (collectives.all_gather_single if _IS_2_13 else collectives.all_gather_tensor)(part, 0, group)


def scatter_first_dimension(full: Tensor, group: ProcessGroup) -> Tensor:
    """Returns a rank's part along the first dimension of the sum over a group's ranks; may still be under way."""
    from torch.distributed import _functional_collectives as collectives

    reduce = collectives.reduce_scatter_single if _IS_2_13 else collectives.reduce_scatter_tensor
    return reduce(full, "sum", 0, group)
