"""One training step of a build: gradients, then update. It never synchronizes with the device; the loop does.

loss = gradients(build, batches, lr) # LossSum: total and weight
stats = update(build, lr)            # norm of the gradients, and whether all was finite
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from preheat.core import DATA, Axis, Batch, Build, LossSum, RowLoss, Shape, Slot
from preheat.data.loader import sample_order
from preheat.models import hf
from preheat.ops.attention.sdpa import reference_attention
from preheat.ops.distributed.dtensor_utils import group_by_dtype, local, total_norm
from preheat.ops.gradient_accumulation import accumulate
from preheat.ops.losses.cross_entropy import CrossEntropy, Softcapped, sum_chunked_loss, sum_full_loss
from preheat.ops.losses.source_sums import SourceSums

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from preheat.core import SlotFunction
    from preheat.ops.optim.param_groups import ParamGroup

__all__ = [
    "add_up",
    "forward",
    "flatten_result",
    "accumulate_gradients",
    "read_step_stats",
    "record_sources",
    "split_sources",
    "install_defaults",
    "transform",
    "unflatten_result",
    "update",
]

SOURCE_LOSSES, SOURCE_LABELS = "source_losses", "source_labels"
"""Metrics of a mixture, [sources]: sums of losses, and numbers of labels."""


def transform(build: Build, batch: Batch) -> Batch:
    """Applies the build's transforms to a batch, in their order."""
    return build.transform_batch(batch)


def forward(build: Build, batch: Batch) -> LossSum:
    """The loss of one micro-batch, under the build's contexts (such as autocast)."""
    return build.slot(Slot.MODEL_LOSS)(build, batch)


def _compute_model_loss(build: Build, batch: Batch) -> LossSum:
    part = build.trained[0]
    # FSDP gathers weights around this call, so everything that touches the part's weights runs inside.
    total, metrics = build.slot(Slot.UNSHARD_SCOPE)(part, lambda: build.slot(Slot.STAGE_LOSS)(part, batch))
    # Loss scaling multiplies the gradient only: the reported loss stays in nats.
    for change in build.loss.scaling:
        total = change(total)
    return LossSum(total, batch.weight, metrics)


def _compute_stage_loss(build: Build, part: PreTrainedModel, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of a micro-batch's losses, and its metrics: tensors in a tuple, which FSDP's hooks traverse."""
    with ExitStack() as stack:
        for context in build.hooks.around_forward:
            stack.enter_context(context())
        if hf.head(part) is None:  # a pipeline stage that is not the last
            hidden = build.slot(Slot.HIDDEN)(part, batch)
            # torch's pipelines and FSDP modify it in place, which a view does not allow.
            return (hidden.clone() if hidden._is_view() else hidden, {})

        # An objective with several passes passes the row loss of each, and the model whose head it uses.
        def sum_over_logits(
            hidden: Tensor,
            *aligned: Tensor,
            row_loss: RowLoss | None = None,
            of: PreTrainedModel = part,
            sums: SourceSums | None = None,
        ) -> Tensor:
            if row_loss is None:
                owned: RowLoss = build.slot(Slot.ROW_LOSS)  # type: ignore[assignment]
                # Evaluation leaves out label smoothing and z-loss, so that recipes can be compared.
                row_loss = owned if part.training else owned.measured
            if (cap := hf.softcap(of)) is not None:  # the model caps its logits, whatever the loss
                row_loss = Softcapped(row_loss, cap)
            if sums is not None:
                row_loss = sums.record(row_loss)
            if build.loss.head_dtype is None:
                return build.slot(Slot.OVER_LOGITS)(hidden, hf.head(of), row_loss, *aligned)
            # Autocast would cast the head's matmul back to half precision.
            with torch.autocast(build.torch_device.type, enabled=False):
                return build.slot(Slot.OVER_LOGITS)(hidden.to(build.loss.head_dtype), hf.head(of), row_loss, *aligned)

        loss: LossSum = build.slot(Slot.OBJECTIVE)(batch, lambda b: build.slot(Slot.HIDDEN)(part, b), sum_over_logits)
        return loss.total, loss.metrics


def add_up(sums: dict[str, Tensor], metrics: Mapping[str, Tensor]) -> None:
    """Adds the metrics of a micro-batch to `sums`, in place."""
    for name, value in metrics.items():
        # Not `+=`, which would also change the first micro-batch's own metric in place.
        sums[name] = sums[name] + value if name in sums else value


def accumulate_gradients(build: Build, batches: Sequence[Batch], lr: float | None = None) -> LossSum:
    """Accumulates into `.grad` the gradients of the mean loss per trained token (or example) of the global batch.

    Args:
        lr: the rate of this step, for builds that update weights in the backward pass; the previous step's by default.
    """
    if lr is not None:
        # Also here, not in `update` alone: an optimizer in the backward pass steps before `update` runs.
        _set_rate(build, lr)
    weight: float | Tensor = sum(batch.weight for batch in batches)
    # Ranks may have different numbers of trained tokens; dividing by their own would weigh tokens unequally.
    if build.mesh.size(*DATA) > 1:  # summed over the data-parallel devices, without a synchronization
        weight = build.mesh.add(torch.full((), float(weight), device=build.torch_device), *DATA).clamp(min=1)
    # The weight is known before the first backward pass, so each micro-batch's loss is divided by that of all.
    loss: LossSum = build.slot(Slot.FORWARD_BACKWARD)(build, batches, weight)
    build.loss.metrics = loss.metrics
    # Sums over ranks, tied copies, unscaling (`Finish`): after the last micro-batch, before anything reads a norm.
    for _, finish in sorted(build.hooks.finish_gradients, key=lambda pair: pair[0]):
        finish(build)
    return loss


def update(build: Build, lr: float) -> Tensor:
    """Clips, updates the weights and clears the gradients. If the norm is not finite, no weight changes.

    Returns:
        [norm of the gradients before clipping, 1 if it is finite], on the device.
    """
    _set_rate(build, lr)
    # Everything below stays on the device: the norm and the flag are read with the loss, once per step.
    norm = build.slot(Slot.CLIP)(build)
    finite = build.slot(Slot.UPDATE)(build, norm)
    for after in build.hooks.after_update:
        after(build)
    # Freed rather than zeroed: gradients take no memory outside of a step.
    build.optimizer.zero_grad(set_to_none=True)
    # A skipped update counts too: its rows are consumed. The loop, which reads the flag, counts it as skipped.
    build.state.step += 1
    return torch.stack([norm, finite])


class Numbers(NamedTuple):
    """A step's results on the host: sums over all devices, and flags that any of them raised."""

    total: float
    metrics: dict[str, Tensor]
    weight: float
    more: list[float]
    flags: tuple[bool, ...]


def read_step_stats(build: Build, loss: LossSum, more: Tensor, flags: Sequence[bool]) -> Numbers:
    """Reads a step's results back from the device: the only synchronization of a step, with one collective.

    Args:
        loss: result of `accumulate_gradients`, this device's part of it.
        more: numbers that are the same on all devices, [n].
        flags: of this process; each is raised for all if one raises it.
    """
    # One vector for the loss and its metrics, so that a single all-reduce adds them up.
    flat, raised = flatten_result(loss.total, loss.metrics), tuple(flags)
    if build.mesh.world > 1:
        # Flags travel as numbers in the same message: a sum above 0 means that some rank raised it.
        flat = build.mesh.add(torch.cat([flat, torch.tensor(flags, dtype=flat.dtype).to(flat.device)]))
        flat, ends = flat.split([len(flat) - len(flags), len(flags)])
        flat = flat / build.mesh.size(Axis.TENSOR)  # tensor-parallel devices have the same rows and losses
        # `more` is equal on all ranks already, so it is not reduced; the summed flags only ride along to the host.
        more = torch.cat([more.double(), ends])
    weight = torch.as_tensor(loss.weight).to(flat).view(1)
    # The host waits here for everything that the step has queued.
    read = torch.cat([flat, weight, more.double()]).cpu()
    total, metrics = unflatten_result(read[: len(flat)], loss.metrics)
    divisor, *rest = read[len(flat) :].tolist()
    if build.mesh.world > 1:
        rest, raised = rest[: -len(flags)], tuple(flag > 0 for flag in rest[-len(flags) :])
    return Numbers(float(total), metrics, divisor, rest, raised)


def flatten_result(total: Tensor, metrics: Mapping[str, Tensor]) -> Tensor:
    """Packs a loss and its metrics into one fp64 vector, to be sent or read at once."""
    # fp64: a count of tokens above 2**24 is not exact in fp32.
    return torch.cat([total.double().view(1), *(value.double().flatten() for value in metrics.values())])


def unflatten_result(vector: Tensor, like: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Unpacks a vector of `flatten_result`; names and shapes of the metrics are those of `like`."""
    total, *values = vector.split([1, *(value.numel() for value in like.values())])
    return total[0], {name: value.view(like[name].shape) for name, value in zip(like, values, strict=True)}


def _set_rate(build: Build, lr: float) -> None:
    for group in build.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


# --- the default of each slot -------------------------------------------------------------------------------------


def _build_hidden(build: Build) -> Callable[[PreTrainedModel, Batch], Tensor]:
    def compute_hidden(part: PreTrainedModel, batch: Batch) -> Tensor:
        # Looked up in each call: techniques may claim the slots after this default was installed.
        attention = build.slot(Slot.ATTENTION_EXCHANGE)(build.slot(Slot.ATTENTION_KERNEL))
        return hf.hidden_states(part, batch.tokens, batch.positions, batch.mask, attention, batch.hidden, batch.images)

    return compute_hidden


def _next_token_loss(
    build: Build, batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]
) -> LossSum:
    """Next-token prediction on the trained labels: pretraining and supervised fine-tuning alike."""
    if not build.loss.sources or batch.sources is None:
        return LossSum(over_logits(hidden(batch), batch.labels), batch.weight)
    sums = SourceSums(len(build.loss.sources))
    total = over_logits(hidden(batch), batch.labels, batch.sources, sums=sums)
    return LossSum(total, batch.weight, {SOURCE_LOSSES: sums.losses, SOURCE_LABELS: sums.labels})


def record_sources(build: Build, names: Sequence[str]) -> str:
    """Makes the losses of a build include those of each source of a mixture, if its kernels give losses of single rows.

    Returns:
        Why they do not; "" if they do.
    """
    over_logits = build.slot(Slot.OVER_LOGITS)
    owners = [build.owner(slot) for slot in (Slot.OBJECTIVE, Slot.OVER_LOGITS)]
    if owners[0] != "plain":
        return f"{owners[0]} trains on another objective than the next token"
    if getattr(over_logits, "func", over_logits) not in (sum_full_loss, sum_chunked_loss):
        return f"the kernel of {owners[1]} only gives the sum of the losses of all tokens"
    if build.mesh.size(Axis.PIPELINE) > 1:
        return "only the last device of a pipeline computes losses"
    build.loss.sources = tuple(names)
    return ""


def split_sources(build: Build, metrics: Mapping[str, Tensor]) -> dict[str, float] | None:
    """Returns the mean loss of each source with a label among the metrics of a loss; None if they have none."""
    if SOURCE_LOSSES not in metrics:
        return None
    sums = zip(build.loss.sources, metrics[SOURCE_LOSSES].tolist(), metrics[SOURCE_LABELS].tolist(), strict=True)
    return {name: loss / labels for name, loss, labels in sums if labels}


def _forward_backward(build: Build, batches: Sequence[Batch], global_weight: float | Tensor) -> LossSum:
    metrics: dict[str, Tensor] = {}

    # Only with hooks: `dynamic_batch` passes an iterator, which has no length.
    left = len(batches) if build.hooks.before_backward else 0

    def sum_loss(batch: Batch) -> Tensor:
        nonlocal left
        left -= 1
        for tell in build.hooks.before_backward:
            # FSDP postpones the reduction of gradients to the last micro-batch.
            tell(left == 0)
        loss = forward(build, batch)
        add_up(metrics, loss.metrics)
        return loss.total

    total = accumulate(_iterate_transformed(build, batches), sum_loss, global_weight)
    return LossSum(total, global_weight, metrics)


def _iterate_transformed(build: Build, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Transforms each micro-batch; the next one is copied to the device while the current one computes."""
    if build.hooks.transfer is None:
        yield from (transform(build, batch) for batch in batches)
        return
    left = iter(batches)
    following = next(left, None)
    while following is not None:
        ready = [transform(build, following)]
        following = next(left, None)
        if following is not None:
            # Before the yield: the copy overlaps with the computation that the consumer queues next.
            build.begin(following)
        yield ready.pop()  # keep no reference, so that its memory is free while the next one computes


def _clip(build: Build) -> Tensor:
    """The fp32 norm over all gradients; scales gradients down in place if it exceeds `optimizer.max_grad_norm`."""
    named = [(name, p.grad) for name, p in build.parameters() if p.grad is not None]
    grads = [grad for _, grad in named]
    together = build.device.kind == "cuda" and build.storage_device is None  # a CPU has no launch overhead to save
    # A parameter that several ranks hold a copy of must count once in their common norm.
    counted = (grad for name, grad in named if name not in build.parallel.duplicated_params)
    norm = total_norm(counted, together=together)
    if build.mesh.size(Axis.PIPELINE) > 1:  # each stage has parameters of its own
        # Squares add up, norms do not.
        norm = build.mesh.add(norm.square(), Axis.PIPELINE).sqrt()
    limit = build.recipe.optimizer.max_grad_norm
    if limit > 0:
        # As torch.nn.utils.clip_grad_norm_ does, 1e-6 included; without a branch on the norm, which would wait for it.
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for members in group_by_dtype(map(local, grads)):
            if together and members[0].dtype == factor.dtype:  # of another dtype torch takes them one by one anyway
                torch._foreach_mul_(members, factor)
            else:
                for g in members:
                    g.mul_(factor)
    return norm


def _update(build: Build, norm: Tensor) -> Tensor:
    # A flag rather than an `if`: branching on the norm would synchronize with the device.
    finite = torch.isfinite(norm).to(torch.float32)
    build.optimizer.found_inf = 1 - finite  # torch's fused optimizers skip the update if this is 1
    build.optimizer.step()
    return finite


def _build_schedule(build: Build) -> Callable[[float], Shape]:
    batch = build.recipe.batch
    # Rounded up twice: the last rank and the last micro-batch may have fewer rows.
    rows = -(-batch.size // build.mesh.size(*DATA))  # per data-parallel device
    return lambda progress: Shape(batch.size, batch.seq_len, -(-rows // build.state.accumulation))


def _build_optimizer(build: Build) -> Callable[..., torch.optim.Optimizer]:
    def make(groups: list[ParamGroup], *, lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        from preheat.ops.optim.optimizers import fused_adamw

        return fused_adamw(groups, lr=lr, betas=betas, eps=eps)

    return make


def install_defaults(build: Build) -> None:
    """Installs the default of every slot."""
    plain: dict[Slot, SlotFunction] = {
        Slot.UNSHARD_SCOPE: lambda part, run: run(),
        Slot.STAGE_LOSS: functools.partial(_compute_stage_loss, build),
        Slot.MODEL_LOSS: _compute_model_loss,
        Slot.HIDDEN: _build_hidden(build),
        Slot.ROW_LOSS: CrossEntropy(),
        Slot.OVER_LOGITS: sum_full_loss,
        Slot.OBJECTIVE: functools.partial(_next_token_loss, build),
        Slot.FORWARD_BACKWARD: _forward_backward,
        Slot.CLIP: _clip,
        Slot.UPDATE: _update,
        Slot.BATCH_SHAPE: _build_schedule(build),
        Slot.SAMPLE_ORDER: lambda rows, seed, committed, total: sample_order(rows, seed, committed),
        Slot.ATTENTION_KERNEL: reference_attention,
        Slot.ATTENTION_EXCHANGE: lambda kernel: kernel,
        Slot.OPTIMIZER: _build_optimizer(build),
    }
    for slot, function in plain.items():
        build.claim(slot, function, "plain")
