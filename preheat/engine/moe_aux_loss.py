"""The load-balancing loss of mixture-of-experts models over the global batch, for any micro-batches and devices.

transformers adds this term to the loss of one forward pass (Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961,
equations 4 to 6, all layers together):

    coefficient * E * sum over experts e of f_e P_e

with E experts, f_e the tokens routed to e, per token and layer (they sum to the experts per token), P_e the mean over
tokens and layers of the router's probability of e. Here f and P are of the whole global batch: all micro-batches of all
devices (Qiu et al. 2025, arXiv:2501.11873, find that experts specialise better than with a balance per micro-batch).
f has no gradient, so with f known the loss is linear in the probabilities, and each micro-batch of each device adds its
term. With one micro-batch, f is summed over devices between the forward pass and the loss. With several, a first pass
without gradients and without the head counts the tokens: exactness costs about a third more compute in the layers.
`model.config: {router_aux_loss_coef: 0}` turns off the loss and that pass.

The term is also a sum over layers, so each stage of a pipeline adds the part of its own layers; f is summed over the
stages too, after a first pass through the pipeline. A stage without the head passes on hidden states instead of a loss,
and its part rides on them: its gradient is added in the stage's backward pass.

Every token of every document counts, trained or not. Padding goes through routers and experts too but is left out of
the counts and means, as in transformers with an attention mask: so the loss and the loads do not depend on the length
of a row. Evaluations omit the term.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from preheat.core import DATA, Axis, Batch, Build, Change, LossSum, Slot
from preheat.engine.step import transform
from preheat.models import hf, moe
from preheat.models.moe import BALANCE, TOKENS
from preheat.ops.grouped_mm import compute_experts

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from preheat.core import SlotFunction
    from preheat.core.json_types import JsonObject
    from preheat.ops.autograd_context import AutogradContext

__all__ = ["add_balance_loss", "compute_balance_part", "summarize_loads", "wrap_metrics"]


def compute_balance_part(counts: Tensor, sums: Tensor, chosen: int) -> Tensor:
    """One part's term of E * sum of f_e P_e; the terms of all parts sum to it.

    Args:
        counts: [experts], tokens routed to each expert, summed over the layers of the global batch.
        sums: [experts], the router's probabilities summed over the layers and tokens of the part.
        chosen: experts per token.

    Example:
        >>> even = torch.tensor([4.0, 4.0])  # 8 tokens, 1 expert each
        >>> float(compute_balance_part(even, even, 1))
        1.0
    """
    # f_e = counts_e / routed and P_e = sums_e / routed, so E * sum f_e P_e divides by routed twice.
    routed = counts.sum() / chosen  # tokens times layers
    return counts.numel() * (counts * sums).sum() / routed.square()


class _CarryLoss(torch.autograd.Function):
    """Returns hidden states; their backward pass also is that of a loss, with a gradient of 1."""

    @staticmethod
    def forward(hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.clone()  # torch's pipelines modify it in place, which a view does not allow

    @staticmethod
    def setup_context(ctx: AutogradContext, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad.new_ones((), dtype=ctx.dtype)


class _Balance:
    """Wraps the slots STAGE_LOSS and FORWARD_BACKWARD of a build."""

    def __init__(self, build: Build, config: PretrainedConfig):
        self.build = build
        self.staged = build.mesh.size(Axis.PIPELINE) > 1
        self.layers, self.experts = len(moe.routers(build.trained[0])), moe.sizes_of(config)[0]
        self.coefficient = moe.coefficient(config)
        self.chosen = moe.sizes_of(config)[1]
        moe.compute_by(build.trained[0], functools.partial(compute_experts, stepped=build.device.kind == "cpu"))
        # Records only while `open`: a layer that is recomputed in the backward pass would count its tokens twice.
        self.ledger = moe.record_routers(build.trained[0])
        self.weight: float | Tensor | None = None  # of the global batch; None between batches
        self.counts: Tensor | None = None  # of the global batch, if there was a first pass
        self.counted: Tensor | None = None  # by this device, in a first pass
        self.carried: Tensor | None = None  # the part of the loss of stages that return hidden states

    def forward_backward(
        self, plain: SlotFunction, build: Build, batches: Iterable[Batch], weight: float | Tensor
    ) -> LossSum:
        self.weight, self.counts, self.carried = weight, None, None
        if self.coefficient:
            if not isinstance(batches, Sequence):
                batches = list(batches)  # dynamic_batch yields them one by one, and they are read twice
            # A single micro-batch counts its tokens in its own forward pass, before its loss.
            self.counts = self._count_expert_loads(batches) if len(batches) > 1 or self.staged else None
        loss: LossSum = plain(build, batches, weight)
        self.weight = self.ledger.padding = None  # no layer is recomputed any more
        return loss if self.carried is None else replace(loss, total=loss.total + self.carried)

    def forward(self, plain: SlotFunction, part: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        # Evaluations report the loss without the balance term.
        if not torch.is_grad_enabled():
            return plain(part, batch)  # type: ignore[no-any-return]
        self.note_padding(batch)
        self.ledger.open = True
        try:
            total, metrics = plain(part, batch)
        finally:
            self.ledger.open = False
        # [layers, experts] and [experts]; `sums` carries the gradient.
        tokens, sums = self._read_records(part, batch)
        metrics = {**metrics, TOKENS: tokens}
        if self.coefficient:
            assert self.weight is not None, (
                "the pass over a global batch is not the engine's: the balance of its experts is not known"
            )
            counts = self.counts if self.counts is not None else self._sum_over_ranks(tokens.sum(0))
            tensor = self.build.mesh.size(Axis.TENSOR)
            if tensor > 1 and sums.requires_grad:
                # Each device of the tensor axis has the whole gradient by the probabilities, and the gradients of
                # routers are summed over them, because those by the routing weights are partial.
                sums.register_hook(lambda grad: grad / tensor)
            # Times the weight, because the caller divides the sum of losses by it.
            term = compute_balance_part(counts, sums, self.chosen) * self.weight
            metrics[BALANCE] = term.detach()
            share = self.coefficient * term
            total = self._carry(total, share) if hf.head(part) is None else total + share  # type: ignore[arg-type]
        return total, metrics

    def _carry(self, hidden: Tensor, share: Tensor) -> Tensor:
        """Adds the backward pass of a stage's share of the loss to that of its hidden states."""
        self.carried = share.detach() if self.carried is None else self.carried + share.detach()
        if not share.requires_grad:  # a stage without experts, or with frozen routers and no trained layer before them
            return hidden
        for change in self.build.loss.scaling:
            share = change(share)
        # The last stage's loss is divided by the weight when all of it is known.
        weight = self.weight.clamp(min=1) if isinstance(self.weight, Tensor) else max(self.weight or 0, 1)
        return _CarryLoss.apply(hidden, share / weight)  # type: ignore[no-any-return]

    def _read_records(self, part: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the tokens per expert of each layer of the model, zeros for those of other stages, and the summed
        probabilities of all layers of the part."""
        numbers = [moe.number_of(router) for router in moe.routers(part)]
        nothing = batch.tokens.new_zeros(self.experts, dtype=torch.float32) if len(numbers) < self.layers else None
        if not numbers:
            assert nothing is not None, "a whole model has layers with experts"
            return torch.stack([nothing] * self.layers), nothing
        tokens, sums = moe.read_router_records(part)
        if nothing is not None:
            assert tokens.shape[1] == self.experts, (
                f"routers choose among {tokens.shape[1]} experts, not {self.experts}"
            )
            own = dict(zip(numbers, tokens, strict=True))
            tokens = torch.stack([own.get(number, nothing) for number in range(self.layers)])
        return tokens, sums.sum(0)

    def note_padding(self, batch: Batch) -> None:
        """Tells the routers which positions of a micro-batch are padding, also when its layers are recomputed."""
        # A tensor even if nothing is padding: selective checkpointing numbers a layer's operators, and the compiler
        # would make two graphs.
        none = torch.zeros_like(batch.labels, dtype=torch.bool) if batch.padding is None else None
        self.ledger.padding = batch.padding if none is None else none

    def _run_layers(self, part: nn.Module, batch: Batch) -> Tensor:
        """Runs the layers alone and counts the routers' choices."""
        self.note_padding(batch)
        with ExitStack() as stack:
            # Autocast and the like, so that the routers see the same numbers as in training.
            for context in self.build.hooks.around_forward:
                stack.enter_context(context())
            hidden: Tensor = self.build.slot(Slot.HIDDEN)(part, batch)
        tokens = self._read_records(part, batch)[0].sum(0)
        self.counted = tokens if self.counted is None else self.counted + tokens
        return hidden

    def _count_expert_loads(self, batches: Sequence[Batch]) -> Tensor:
        """Tokens per expert in the global batch, summed over layers: [experts]."""
        from preheat.ops.distributed.fully_shard import keep_gathered

        self.counted = None
        devices = [self.build.torch_device] if self.build.torch_device.type == "cuda" else []
        # Restores the generators, so that the training pass has the same dropout in adapters, and routers choose alike.
        with torch.no_grad(), torch.random.fork_rng(devices=devices), keep_gathered():
            self.ledger.open = True
            try:
                (self.build.parallel.pass_forward or self._pass_forward)(batches, self._run_layers)
            finally:
                self.ledger.open = False
        assert self.counted is not None
        return self._sum_over_ranks(self.counted)

    def _pass_forward(self, batches: Sequence[Batch], compute: Callable[[nn.Module, Batch], Tensor]) -> None:
        part = self.build.trained[0]
        # By index: a dry run recognizes the first pass by it (planning/dry_run.py).
        for n in range(len(batches)):
            batch = transform(self.build, batches[n])
            self.build.slot(Slot.UNSHARD_SCOPE)(part, functools.partial(compute, part, batch))

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        if self.build.mesh.world == 1:
            return counts
        # Not over the tensor axis, whose devices see the same tokens.
        counts = self.build.mesh.add(counts.clone(), *DATA, Axis.CONTEXT)
        return self.build.mesh.add(counts, Axis.PIPELINE)  # the layers of all stages


def add_balance_loss(build: Build, config: PretrainedConfig) -> None:
    """Adds the load-balancing loss and the load metrics to a build whose model has experts, in place."""
    count, chosen, width = moe.sizes_of(config)
    layers = len(moe.routers(build.trained[0]))
    # The few layers of a dry run may be those before the experts. Stages of a pipeline must all make the group below.
    if not count or (not layers and build.mesh.size(Axis.PIPELINE) == 1):
        return
    balancer = _Balance(build, config)
    if build.mesh.size(*DATA, Axis.CONTEXT) > 1:
        build.mesh.group(*DATA, Axis.CONTEXT)  # creating a group is collective: all ranks do it now
    for slot, around in ((Slot.STAGE_LOSS, balancer.forward), (Slot.FORWARD_BACKWARD, balancer.forward_backward)):
        build.claim(slot, _wrap_slot(around, build.slot(slot)), "plain")
    build.hooks.around_batches.append(functools.partial(_wrap_slot, balancer.forward_backward))
    build.hooks.before_recompute.append(balancer.note_padding)
    shared = moe.shared_width(config)
    shared_note = f", plus a shared one of width {shared}" if shared else ""
    balancing = f"balance loss x {balancer.coefficient:g}" if balancer.coefficient else "no balance loss"
    ours = config.get_text_config().model_type in moe.FAMILIES
    computed = "as one grouped matmul" if moe.experts_of(build.trained[0]) else "by transformers' own code"
    router = "none is dropped; router in fp32" if ours else "router by transformers' own code"
    message = (
        f"{count} experts of width {width} in {layers} layers {computed}, {chosen} for a token{shared_note}; "
        f"{router}; {balancing}"
    )
    build.changes.setdefault("experts", []).append(Change(message, layers, "grouped_mm"))


def summarize_loads(tokens: Tensor) -> JsonObject:
    """Load balance of the experts.

    Args:
        tokens: [layers, experts], tokens routed to each expert.

    Returns:
        expert_loads: for each layer, the tokens of the busiest expert over the mean, 1 if all are equal; expert_load:
            of the worst layer; experts_idle: experts, over all layers, without a token.

    Example:
        >>> summarize_loads(torch.tensor([[2, 2], [4, 0]]))
        {'expert_load': 2.0, 'experts_idle': 1, 'expert_loads': [1.0, 2.0]}
    """
    tokens = tokens.double()
    of_layers = (tokens.max(dim=1).values / tokens.mean(dim=1)).tolist()
    return {
        "expert_load": max(of_layers),
        "experts_idle": int((tokens == 0).sum()),
        "expert_loads": [round(load, 3) for load in of_layers],
    }


def _wrap_slot(function: SlotFunction, plain: SlotFunction) -> SlotFunction:
    return lambda *args: function(plain, *args)


def wrap_metrics(
    inner: Callable[[Mapping[str, Tensor], float], JsonObject],
) -> Callable[[Mapping[str, Tensor], float], JsonObject]:
    """Wraps the objective's metrics: adds the load of experts (see `summarize_loads`) and the balance loss."""

    def add_load(metrics: Mapping[str, Tensor], weight: float) -> JsonObject:
        # The objective's own function knows only its own metrics.
        rest = {name: value for name, value in metrics.items() if name not in (TOKENS, BALANCE)}
        values = inner(rest, weight)
        if TOKENS in metrics:
            values |= summarize_loads(metrics[TOKENS])
        if BALANCE in metrics:
            values["balance_loss"] = float(metrics[BALANCE]) / float(weight)
        return values

    return add_load
