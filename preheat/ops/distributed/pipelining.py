"""Pipeline parallelism with torch's schedules: stages, activations sent between them, and a timeline of the work."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _Action, _ComputationType

from preheat.core import Batch
from preheat.torch_compat import KNOWS_RECEIVED_SHAPES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti
    from torch.distributed.pipelining.stage import _RecvInfo


__all__ = ["SCHEDULES", "Pipeline", "Span", "add_copies", "pad_micro_batches", "ranks_of", "watch_micro_batches"]

SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Span:
    """A computation of one rank on the timeline.

    Attributes:
        device: its rank in the pipeline.
        stage: stage of the model.
        micro: micro-batch.
        what: forward, backward, backward_input or backward_weight (schedules that split the backward pass); first: a
            pass without gradients before them.
        start, end: seconds since all ranks started.
    """

    device: int
    stage: int
    micro: int
    what: str
    start: float
    end: float


def ranks_of(stages: int, devices: int, schedule: str) -> list[int]:
    """Returns the rank of each stage: round-robin, or for zbv in a V: the first rank also holds the last stage."""
    # zbv: 0 1 2 ... 2 1 0, so that the loss is on the rank of the first stage.
    turn = list(range(devices))
    if schedule == "zbv":
        turn += turn[::-1]
    return [turn[stage % len(turn)] for stage in range(stages)]


def pad_micro_batches(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Pads to at least `count` micro-batches of equal row count, as schedules require; padding has no labels."""
    # Stages exchange tensors of one shape, fixed when the schedule is built.
    rows = max(len(batch.tokens) for batch in batches)

    def pad_batch(batch: Batch, weight: int) -> Batch:
        missing = rows - len(batch.tokens)
        if not missing:
            return batch
        # Repeats the last row, whose tokens are valid for any model; labels of -100 give it no loss.
        last, documents = len(batch.tokens) - 1, batch.mask.documents
        tokens, positions = (torch.cat([t, t[last:].expand(missing, -1)]) for t in (batch.tokens, batch.positions))
        labels = torch.cat([batch.labels, torch.full_like(batch.labels[last:], -100).expand(missing, -1)])
        mask = replace(batch.mask, documents=documents and (*documents, *documents[last:] * missing))
        real = batch.padding if batch.padding is not None else torch.zeros_like(batch.labels, dtype=torch.bool)
        padding = torch.cat([real, real.new_ones((missing, real.shape[1]))])
        return replace(
            batch,
            tokens=tokens,
            labels=labels,
            positions=positions,
            mask=mask,
            weight=weight,
            padding=padding,
            sources=None,  # the loss by source is not recorded with pipelines
        )

    padded = [pad_batch(batch, batch.weight) for batch in batches]
    # A micro-batch of weight 0 takes time, but adds nothing to the loss or the gradients.
    labels = padded[-1].labels
    nothing = torch.ones_like(labels, dtype=torch.bool)
    empty = replace(padded[-1], labels=torch.full_like(labels, -100), weight=0, padding=nothing)
    return padded + [empty] * (count - len(padded))


def _is_forward(action: _Action | None) -> bool:
    return action is not None and action.computation_type == _ComputationType.FORWARD


_watcher: Callable[[int, str, bool], None] | None = None


@contextmanager
def watch_micro_batches(tell: Callable[[int, str, bool], None]) -> Iterator[None]:
    """Context manager that calls `tell` with the number of a micro-batch and the kind of pass (`Span.what`) when it
    starts (True) and ends (False) a pass through a stage of this rank."""
    global _watcher
    before, _watcher = _watcher, tell
    try:
        yield
    finally:
        _watcher = before


def _plan_forward(orders: Sequence[Sequence[tuple[int, int]]]) -> list[list[tuple[int, int] | None]]:
    """Plans forward passes in rounds, after each of which the ranks exchange hidden states.

    Args:
        orders: for each rank, the (stage, micro-batch) of its passes in order.

    Returns:
        For each round, the pass of each rank; None: it waits.

    Example:
        >>> _plan_forward([[(0, 0), (0, 1)], [(1, 0), (1, 1)]])
        [[(0, 0), None], [(0, 1), (1, 0)], [None, (1, 1)]]
    """
    queues = [deque(order) for order in orders]
    ready = {(0, micro) for order in orders for stage, micro in order if stage == 0}
    rounds: list[list[tuple[int, int] | None]] = []
    while any(queues):
        passes = [queue.popleft() if queue and queue[0] in ready else None for queue in queues]
        assert any(passes), "the passes of some rank are in no order that can run"
        # Results of this round are inputs of the next one.
        ready |= {(done[0] + 1, done[1]) for done in passes if done is not None}
        rounds.append(passes)
    return rounds


def add_copies(grads: Sequence[Tensor], other: int, group: ProcessGroup) -> None:
    """Adds another rank's gradients of the same parameters in place, so that both ranks hold the same sums.

    Args:
        other: group rank with the copies, which must call this too.
    """
    buffers = [torch.empty_like(grad) for grad in grads]
    # Both directions in one batch: two ranks that each send first would wait for each other.
    ops = [dist.P2POp(dist.isend, grad, group=group, group_peer=other) for grad in grads]
    ops += [dist.P2POp(dist.irecv, grad, group=group, group_peer=other) for grad in buffers]
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    for grad, received in zip(grads, buffers, strict=True):
        grad.add_(received)


def _copy_without_buffers(received: Sequence[_RecvInfo]) -> tuple[_RecvInfo, ...]:
    """Copies a stage's receive infos without their buffers; if only these know the shapes, they stay."""
    if not KNOWS_RECEIVED_SHAPES:
        return tuple(received)
    infos = tuple(copy.copy(info) for info in received)
    for info in infos:
        info.buffer = None
    return infos


class _Stage(PipelineStage):
    """torch's PipelineStage, which runs `Pipeline.compute` in place of the module and records timings."""

    def __init__(self, pipeline: Pipeline, number: int, hidden: Tensor):
        module = pipeline.modules[number]
        last = number == pipeline.count - 1
        super().__init__(
            module,
            number,
            pipeline.count,
            pipeline.device,
            # Meta tensors: only shapes and dtypes matter.
            input_args=() if number == 0 else (hidden,),
            # The last stage returns its loss, [1].
            output_args=(torch.empty(1, device="meta", requires_grad=True),) if last else (hidden,),
            group=pipeline.group,
        )
        self.pipeline, self.micro = pipeline, 0

    # The constructor fixes the shapes that stages exchange. torch still votes over the network on whether all stages
    # have done so, which a dry run, alone in a fake process group, cannot answer.
    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        if dist.get_backend(self.group) == "fake":
            return torch.tensor([1])
        return super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        if dist.get_backend(self.group) == "fake":
            return torch.tensor([1])
        return super()._warmup_backward_result(received_result)

    # Before its first step, torch sends a number between neighboring stages; 2.11 also within a rank, but gloo cannot.
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    # torch allocates receive buffers for every micro-batch of a step, both ways, and keeps all of them: with many
    # micro-batches more than a stage's activations. Here each is allocated just before it is filled and freed after
    # the micro-batch's backward pass. torch 2.11 needs them to know shapes: there they are kept, and plans count them.
    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        # For one micro-batch, whose buffers are dropped at once; the infos of all others are copies of it.
        super()._setup_forward_recv_info(1, has_backward)
        received = _copy_without_buffers(self.args_recv_info[0])
        self.args_recv_info |= {micro: _copy_without_buffers(received) for micro in range(num_microbatches)}

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int | None]]) -> tuple[_RecvInfo, ...]:
        return _copy_without_buffers(super()._create_grad_recv_info(act_send_info))

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...], *group: Any) -> list[dist.P2POp]:
        for info in recv_infos if KNOWS_RECEIVED_SHAPES else ():
            if info.buffer is None and info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos, *group)  # a group from torch 2.14 on

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        # `forward_maybe_with_nosync` is not given the number.
        self.micro = fwd_chunk_id
        with self.pipeline.noted(self.stage_index, fwd_chunk_id, "forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Tensor, **_: object) -> Tensor:
        # The module itself is not called: the engine's slots (loss, sharding, autocast) compute the stage.
        return self.pipeline.compute(self.stage_index, self.micro, args[0] if args else None)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        what = "backward" if kwargs.get("full_backward", True) else "backward_input"
        with self.pipeline.noted(self.stage_index, bwd_chunk_id, what):
            self.pipeline.tell_backward(bwd_chunk_id)
            result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        # Both passes of this micro-batch have used its received tensors.
        for buffers in (self.args_recv_info, self.grad_recv_info):
            buffers[bwd_chunk_id] = _copy_without_buffers(buffers.get(bwd_chunk_id, ()))
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.pipeline.noted(self.stage_index, bwd_chunk_id, "backward_weight"):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipeline:
    """Stages on a group of devices, run by one of torch's schedules.

    Args:
        modules: this rank's stages by number.
        count: total number of stages.
        group: process group with one rank per pipeline device, in order.
        schedule: a key of `SCHEDULES`.
        forward: (module, batch; `hidden` set except for the first stage) -> hidden states; for the last stage the sum
            of the losses, [].
        width, dtype: of the hidden states that are sent.
        before_backward: called with a micro-batch before its backward pass through a stage.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        count: int,
        group: ProcessGroup,
        schedule: str,
        forward: Callable[[nn.Module, Batch], Tensor],
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        before_backward: Callable[[Batch], None] = lambda batch: None,
    ):
        self.before_backward = before_backward
        self.modules, self.count, self.group, self.schedule = modules, count, group, schedule
        self.forward, self.width, self.dtype, self.device = forward, width, dtype, device
        self.ranks = ranks_of(count, dist.get_world_size(group), schedule)
        self.rank = dist.get_rank(group)
        self.spans: list[Span] | None = None
        self._began = 0.0
        # The schedule with its stages, which know the shapes of one size only.
        self._formed: tuple[Any, Any] = (None, None)  # sizes, and torch's schedule for them
        self._batches: Sequence[Batch] = ()
        self._weight: float | Tensor = 1
        self._total: Tensor | None = None
        # Before any messages in batches, NCCL needs a call in which all ranks of the group take part.
        dist.all_reduce(torch.zeros((), device=device), group=group)

    def _schedule(self, micro: int, rows: int, length: int) -> Any:
        """Returns torch's schedule for micro-batches of these sizes; caches one, since a run rarely changes them."""
        wanted = (micro, rows, length)
        if self._formed[0] != wanted:
            hidden = torch.empty(rows, length, self.width, dtype=self.dtype, device="meta", requires_grad=True)
            stages = [_Stage(self, number, hidden) for number in self.modules]
            kind = SCHEDULES[self.schedule]
            # torch's schedules of one stage per rank take the stage, the others a list.
            arg: Any = stages[0] if kind in (ScheduleGPipe, Schedule1F1B) else stages
            # `compute` has already divided by the weight of the global batch, so torch must not scale by micro-batches.
            self._formed = (wanted, kind(arg, micro, loss_fn=lambda loss, _: loss, scale_grads=False))
        return self._formed[1]

    def compute(self, number: int, micro: int, hidden: Tensor | None) -> Tensor:
        """Runs one stage on a micro-batch: returns hidden states to send, or the loss contribution, [1]."""
        batch = self._batches[micro]
        out = self.forward(self.modules[number], batch if number == 0 else replace(batch, hidden=hidden))
        if number < self.count - 1:
            assert out.dtype == self.dtype, f"stage {number} returns {out.dtype} instead of {self.dtype}"
            return out
        self._total = out.detach() if self._total is None else self._total + out.detach()
        return torch.stack([out / self._weight])

    def tell_backward(self, micro: int) -> None:
        self.before_backward(self._batches[micro])

    def step(self, batches: Sequence[Batch], weight: float | Tensor, *, cut: int = 1) -> Tensor:
        """Accumulates gradients of `sum of losses / weight` over micro-batches of equal shape into `.grad`.

        Args:
            weight: at least 1.
            cut: hidden states hold 1 / `cut` of a row's positions.

        Returns:
            The sum of the losses on the rank of the last stage; 0 on the others.
        """
        rows, length = batches[0].tokens.shape
        self._batches, self._weight, self._total = batches, weight, None
        # Targets are unused (`compute` reads its batch's labels), but the schedule splits them by micro-batch.
        self._schedule(len(batches), rows, length // cut).step(target=torch.zeros(len(batches)), return_outputs=False)
        self._batches, total, self._total = (), self._total, None
        return torch.zeros((), device=self.device) if total is None else total

    def read(self, batch: Batch, *, cut: int = 1) -> Tensor:
        """Returns the sum of a batch's losses, forward only, on every rank of the pipeline."""
        total = torch.zeros((), device=self.device)

        def compute(number: int, _: int, batch: Batch) -> Tensor:
            out = self.forward(self.modules[number], batch)
            if number == self.count - 1:
                total.copy_(out)
            return out

        self._run_rounds([batch], self._order_stages(1), compute, cut)
        # Only the last stage's rank has a total that is not 0.
        dist.all_reduce(total, group=self.group)
        return total

    def pass_forward(self, batches: Sequence[Batch], forward: Callable[[nn.Module, Batch], Tensor], cut: int) -> None:
        """Runs `forward` on micro-batches of equal shape through all stages, forward only.

        Each rank runs its passes in the order of the schedule, so that random numbers are drawn alike in both.

        Args:
            forward: (module, batch) -> hidden states, as the pipeline's own; what the last stage returns is dropped.
            cut: as in `step`.
        """

        def compute(number: int, micro: int, batch: Batch) -> Tensor:
            with self.noted(number, micro, "first"):
                return forward(self.modules[number], batch)

        rows, length = batches[0].tokens.shape
        schedule = self._schedule(len(batches), rows, length // cut)
        orders = (
            self._order_stages(len(batches))
            if isinstance(schedule, PipelineScheduleSingle)
            else [
                [(action.stage_index, action.microbatch_index) for action in order if _is_forward(action)]
                for _, order in sorted(schedule.pipeline_order.items())
            ]
        )
        self._run_rounds(batches, orders, compute, cut)

    def _order_stages(self, micros: int) -> list[list[tuple[int, int]]]:
        """Returns the passes of each rank by micro-batch, and of each by stage."""
        ranks = range(dist.get_world_size(self.group))
        passes = [(stage, micro) for micro in range(micros) for stage in range(self.count)]
        return [[each for each in passes if self.ranks[each[0]] == rank] for rank in ranks]

    def _run_rounds(
        self,
        batches: Sequence[Batch],
        orders: Sequence[Sequence[tuple[int, int]]],
        compute: Callable[[int, int, Batch], Tensor],
        cut: int,
    ) -> None:
        """Computes each pass of this rank, and exchanges hidden states with other ranks between the rounds."""
        rows, length = batches[0].tokens.shape
        inputs: dict[tuple[int, int], Tensor] = {}
        for passes in _plan_forward(orders):
            ops: list[dist.P2POp] = []
            for rank, each in enumerate(passes):
                if each is None:
                    continue
                number, micro = each
                following = (number + 1, micro)
                if rank == self.rank:
                    hidden = inputs.pop(each, None)
                    out = compute(number, micro, replace(batches[micro], hidden=hidden) if number else batches[micro])
                    if number == self.count - 1:
                        continue
                    assert out.dtype == self.dtype, f"stage {number} returns {out.dtype} instead of {self.dtype}"
                    if self.ranks[number + 1] == self.rank:
                        inputs[following] = out
                    else:
                        ops.append(self._exchange(dist.isend, out.contiguous(), self.ranks[number + 1]))
                elif number < self.count - 1 and self.ranks[number + 1] == self.rank:
                    shape = (rows, length // cut, self.width)
                    inputs[following] = torch.empty(shape, dtype=self.dtype, device=self.device)
                    ops.append(self._exchange(dist.irecv, inputs[following], rank))
            # In one batch: two ranks that each send first would wait for each other.
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()

    def _exchange(self, operation: Callable[..., object], hidden: Tensor, other: int) -> dist.P2POp:
        return dist.P2POp(operation, hidden, group=self.group, group_peer=other)

    @contextmanager
    def noted(self, stage: int, micro: int, what: str) -> Iterator[None]:
        """Context manager around a pass, of which it tells `watch_micro_batches`, or records a span while
        `recorded` is active."""
        if _watcher is not None:
            _watcher(micro, what, True)
            yield
            _watcher(micro, what, False)
            return
        if self.spans is None:
            yield
            return
        start = self._elapsed_seconds()
        yield
        self.spans.append(Span(self.rank, stage, micro, what, start, self._elapsed_seconds()))

    def _elapsed_seconds(self) -> float:
        if self.device.type == "cuda":  # waits for queued kernels, so that the time is their end
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self._began

    @contextmanager
    def recorded(self) -> Iterator[list[Span]]:
        """Context manager that records the timeline; on exit the list holds the spans of all ranks, sorted by start."""
        result: list[Span] = []
        # All clocks begin at the same moment, so spans of different ranks can be compared.
        dist.barrier(self.group)
        self._began, self.spans = time.perf_counter(), []
        try:
            yield result
            everyone: list[list[Span]] = [[]] * dist.get_world_size(self.group)
            dist.all_gather_object(everyone, self.spans, group=self.group)
            result.extend(sorted((span for spans in everyone for span in spans), key=lambda span: span.start))
        finally:
            self.spans = None
