"""Kinds of operators by which the time of a step is planned and profiled. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

__all__ = ["OperatorKind", "is_score_shaped", "kind_of"]

Shapes = Sequence[Sequence[int]]


class OperatorKind(StrEnum):
    """The kind of work of an operator in a training step.

    A dry run and a profile use the same rule, `kind_of`, so that their times can be compared.
    """

    MATMUL = "matmul"
    ATTENTION = "attention"
    """Attention, also of operators on all scores, and the fused kernels of recurrent layers."""
    NORM = "norm"
    LOSS = "loss"
    """The loss and other operators on logits, without the matmul of the head."""
    ELEMENTWISE = "elementwise"
    """Everything else that computes, embeddings and reductions included."""
    COPIES = "copies"
    OPTIMIZER = "optimizer"
    """Everything between the gradients and the end of the update, clipping included."""
    COMMUNICATION = "communication"
    HOST = "host only"
    """Python, autograd and the launch of operators, while nothing computes."""


_COLLECTIVE = ("c10d::", "_c10d_functional::", "nccl:", "gloo:", "record_param_comms", "ncclDevKernel", "ncclKernel")
_MATMULS = {
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "grouped_linear", "grouped_back", "grouped_outer"),
    *("convolution", "convolution_backward", "convolution_overrideable", "mkldnn_convolution"),
}
_MATMUL_KERNELS = ("gemm", "nvjet", "cutlass", "splitKreduce", "triton_tem_", "Cijk_")
_ATTENTION = ("attention", "flash_", "fmha", "flex_", "recurrent", "gated_delta", "selective_scan")
_RECURRENT = "preheat::fused_"  # the dry run's operators for the kernels of recurrent layers
_LOSSES = ("log_softmax", "nll_loss", "cross_entropy")
_COPIES = {
    *("copy_", "_to_copy", "clone", "cat", "stack", "repeat_interleave", "repeat", "slice_backward", "select_backward"),
    *("to_host", "copy_to_host_", "copy_to_device_", "split_with_sizes_copy", "all_gather_copy_in", "chunk_cat"),
    *("_foreach_copy_", "as_strided_copy"),
}
# Operators that only view, allocate or call others: a profile measures the host in them.
_HOST = {
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "t",
        "transpose",
        "permute",
        "as_strided",
        "slice",
        "select",
    ),
    *(
        "expand",
        "expand_as",
        "unsqueeze",
        "squeeze",
        "detach",
        "detach_",
        "alias",
        "narrow",
        "split",
        "chunk",
        "unbind",
    ),
    *("split_with_sizes", "unfold", "flatten", "view_as", "numpy_T", "item", "_local_scalar_dense", "is_nonzero"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "result_type"),
    *("resolve_conj", "resolve_neg", "requires_grad_", "lift_fresh", "data", "to", "contiguous", "broadcast_tensors"),
    *("matmul", "linear", "einsum", "dropout", "softmax", "log_softmax", "cross_entropy_loss", "type_as", "float"),
    *("scaled_dot_product_attention", "isfinite", "square", "one_hot", "outer", "_sparse_dense_add"),
}


def kind_of(
    operator: str, shapes: Shapes, *, length: int, vocabulary: int | None, updating: bool = False
) -> OperatorKind:
    """Returns the kind of an operator, or of a kernel that no operator launched.

    Args:
        operator: name, such as "aten::mm" or "mm".
        shapes: of its tensor arguments.
        length: tokens of a sequence, by which matrices of attention scores are known.
        vocabulary: rows of the head, by which logits are known; None: unknown.
        updating: it ran after the gradients were complete.

    Example:
        >>> str(kind_of("aten::addmm", [(768,), (64, 256), (256, 768)], length=64, vocabulary=None))
        'matmul'
        >>> str(kind_of("aten::_softmax", [(2, 4, 64, 64)], length=64, vocabulary=None))
        'attention'
    """
    name = operator.rpartition("::")[2]
    if operator.startswith(_COLLECTIVE):
        return OperatorKind.COMMUNICATION
    if (
        name in _HOST
        or operator.startswith(("autograd::", "profiler::"))
        or name.rstrip("0123456789").endswith("Backward")
    ):
        return OperatorKind.HOST
    if updating:
        return OperatorKind.OPTIMIZER
    attending = operator.startswith(_RECURRENT) or any(part in name for part in _ATTENTION)
    if attending or is_score_shaped(name, shapes, length):
        return OperatorKind.ATTENTION
    if name.rstrip("_") in _MATMULS or name.endswith("_mm") or any(part in name for part in _MATMUL_KERNELS):
        return OperatorKind.MATMUL
    if "_norm" in name:
        return OperatorKind.NORM
    of_logits = any(len(shape) > 1 and shape[-1] == vocabulary for shape in shapes)
    if any(part in name for part in _LOSSES) or of_logits:
        return OperatorKind.LOSS
    return OperatorKind.COPIES if name in _COPIES or name.startswith("Memcpy") else OperatorKind.ELEMENTWISE


def is_score_shaped(operator: str, shapes: Shapes, length: int) -> bool:
    """Returns True for an operator on the scores of attention: for each head, square and at most length x length.

    They are smaller if the documents of a sequence are computed one by one.
    """
    name = operator.rpartition("::")[2]
    if name.rstrip("_") in ("bmm", "baddbmm"):
        a, b = ([*shape] for shape in shapes[-2:]) if len(shapes) > 1 else ([], [])
        # Scores are an operand or the result.
        result = [a[-2], b[-1]] if len(a) > 2 and len(b) > 2 else []
        return any(_is_square(ends, length) for ends in (a[-2:], b[-2:], result))
    # At least 4 dimensions: a hidden size may equal the length.
    return any(len(shape) > 3 and _is_square(shape[-2:], length) for shape in shapes)


def _is_square(ends: Sequence[int], length: int) -> bool:
    return len(ends) == 2 and ends[0] == ends[1] and 1 < ends[0] <= length
