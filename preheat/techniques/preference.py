"""Preference: trains on answers that people preferred to others, or liked and disliked. DPO and related losses.

What: compares the log-probabilities of the preferred and the other answer, each relative to a reference model: the
model before training. With an adapter, the reference is the base without it, which costs no memory; otherwise a frozen
copy. `dpo`; `ipo`; `hinge`; without a reference `simpo` (mean log-probability per token, and a margin), `cpo` and
`orpo` (with the likelihood of the preferred answer); for single answers that were liked or not `kto`, which compares
the reward with the divergence from the reference, and `apo_zero`, which compares it with 0. A first pass computes the
log-probabilities without gradients; they give the weight of each token's gradient in the loss, and one weighted pass
over the head computes exactly that gradient. So the head may be chunked, and the logits of two answers are never in
memory.
Helps: aligns a model's answers with preferences, from comparisons alone.
Hurts: twice the sequences, and with a reference a third pass (with `kto` two more, for the divergence); too high a
learning rate, or too many epochs, lowers the likelihood of preferred answers too (watch `chosen_logp`; `nll`
counteracts it).
Source: DPO, Rafailov et al. 2023 (arXiv:2305.18290); IPO, Azar et al. 2023 (arXiv:2310.12036); hinge: SLiC, Zhao et al.
2023 (arXiv:2305.10425); SimPO, Meng et al. 2024 (arXiv:2405.14734); CPO, Xu et al. 2024 (arXiv:2401.08417); ORPO, Hong
et al. 2024 (arXiv:2403.07691); KTO, Ethayarajh et al. 2024 (arXiv:2402.01306); APO-zero, D'Oosterlinck et al. 2024
(arXiv:2408.06266); `nll`: Pang et al. 2024 (arXiv:2404.19733).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from preheat.core import (
    Batch,
    Build,
    Change,
    Context,
    ExampleKind,
    LossSum,
    Numerics,
    Order,
    Slot,
    Stage,
    Tag,
    Technique,
    Trials,
)
from preheat.core.run_records import Notice
from preheat.errors import DataError
from preheat.recipe import Bound, NonNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor, nn

    from preheat.ops.losses.preference import AnswerIndex

__all__ = ["Preference", "preference_loss"]

# Losses that compare the two answers directly, without the model before training.
_WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")
# Losses of single answers.
_SINGLE = ("kto", "apo_zero")
# Losses whose sigmoid has a variant with label smoothing (pair_losses).
_SMOOTHED = ("dpo", "cpo", "simpo")


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor | float = 0.0,
    reference_rejected: Tensor | float = 0.0,
    **settings: Any,
) -> Tensor:
    """Returns the loss of each pair of answers from their log-probabilities; differentiable, for custom training loops.

    Args:
        chosen, rejected: [pairs], summed over each answer's tokens (for `simpo` and `orpo` the mean).
        reference_chosen, reference_rejected: those of the reference model.
        settings: loss (dpo, ipo, hinge, simpo, cpo, orpo), beta, gamma, label_smoothing: see
            `preheat.ops.losses.preference.pair_losses`.

    Raises:
        ValueError: unknown loss.

    Example:
        >>> import torch
        >>> preference_loss(
        ...     torch.tensor([-3.0]), torch.tensor([-9.0]), torch.tensor([-4.0]), torch.tensor([-8.0]), beta=0.5
        ... )
        tensor([0.3133])
    """
    from preheat.ops.losses.preference import pair_losses

    return pair_losses(chosen, rejected, reference_chosen, reference_rejected, **settings)


@dataclass(frozen=True, kw_only=True)
class Preference(Technique):
    # After structure and precision are applied, so that a copy has them too; before what only training needs.
    stage: ClassVar[Stage] = Stage.PIPELINE_SPLIT
    numerics: ClassVar[Numerics] = "different"
    trials: ClassVar[Trials] = Trials(
        settings=(
            {"loss": "orpo"},
            {"loss": "simpo", "label_smoothing": 0.1},
            {"loss": "apo_zero"},
            {"loss": "kto"},
        ),
        # At the start, policy and reference agree: the difference is 0, and the loss -log sigmoid(0) = log 2.
        first_loss={
            None: math.log(2),
            "orpo": math.log(96) + 0.1 * math.log(2),
            "simpo": 0.9 * math.log(1 + math.exp(0.5)) + 0.1 * math.log(1 + math.exp(-0.5)),
            "apo_zero": 0.5,
            "kto": 0.5,
        },
    )
    unsupported_for_images: ClassVar[str] = "supports only text so far; leave it out"
    owns: ClassVar[frozenset[Slot]] = frozenset({Slot.OBJECTIVE, Slot.ROW_LOSS})
    provides: ClassVar[frozenset[Tag]] = frozenset({Tag.WHOLE_EXAMPLES})

    loss: Literal["dpo", "ipo", "hinge", "simpo", "cpo", "orpo", "kto", "apo_zero"] = "dpo"
    """dpo, ipo, hinge: pairs, against a reference; simpo, cpo, orpo: pairs, without one; kto, apo_zero: single answers,
    liked or not, against a reference. kto estimates the divergence from it in each sequence, with the answers there
    after each other's prompts; in one with a single answer it is 0, as with apo_zero."""
    beta: Literal["auto"] | Positive = "auto"
    """Strength of the pull towards the reference: smaller values allow larger changes. For orpo the weight of its odds
    ratio. auto: 2 for simpo, otherwise 0.1."""
    gamma: NonNegative = 0.5
    """With `simpo`: margin that beta times the difference should exceed."""
    label_smoothing: Annotated[float, Bound(0, 0.5)] = 0.0
    """With `dpo`, `cpo` and `simpo`: assumed fraction of pairs whose order is wrong."""
    desirable_weight: Positive = 1.0
    """With `kto`: weight of liked answers; this weight times their number should be 1 to 1.33 times that of the
    others."""
    undesirable_weight: Positive = 1.0
    """With `kto`: weight of disliked answers."""
    length_normalized: bool = False
    """Use the mean log-probability per token instead of the sum, so that length itself is not learnt (simpo and orpo
    always do)."""
    nll: Literal["auto"] | NonNegative = "auto"
    """Weight of the preferred answer's mean negative log-probability per token, added to the loss. auto: 1 for cpo and
    orpo, otherwise 0."""
    reference: Literal["auto", "none"] = "auto"
    """auto: the base under the adapter, otherwise a frozen copy of the model, if the loss has a reference; none: no
    reference."""

    @property
    def _beta(self) -> float:
        return float(self.beta) if self.beta != "auto" else 2.0 if self.loss == "simpo" else 0.1

    @property
    def _nll(self) -> float:
        return float(self.nll) if self.nll != "auto" else float(self.loss in ("cpo", "orpo"))

    @property
    def _uses_reference(self) -> bool:
        return self.reference == "auto" and self.loss not in _WITHOUT_REFERENCE

    @property
    def _normalizes(self) -> bool:
        # SimPO and ORPO are defined over mean log-probabilities per token.
        return self.length_normalized or self.loss in ("simpo", "orpo")

    def examples(self) -> ExampleKind:
        return ExampleKind("desirable" if self.loss in _SINGLE else "pairs")

    def check(self, context: Context) -> list[str]:
        problems = []
        if self.label_smoothing and self.loss not in _SMOOTHED:
            problems.append(f"label_smoothing: {self.loss} has no variant with it; use {', '.join(_SMOOTHED)}, or 0")
        if self.label_smoothing == 0.5:
            problems.append("label_smoothing: at 0.5 either order is as good, and nothing is learnt; use 0.1")
        if self.loss in _SINGLE and self._nll:
            problems.append(f"nll: is for the preferred answers of pairs; leave it out with loss: {self.loss}")
        if self.loss in _SINGLE and self.reference == "none":
            problems.append(
                "reference: without one no single answer is likely enough to be liked; leave it out with loss: "
                f"{self.loss}"
            )
        # Disabling a PiSSA adapter leaves the residual of its singular directions, not the model before training.
        if self._uses_reference and Tag.MODIFIED_BASE in context.tags:
            problems.append(
                "reference: the adapter starts inside the base's weights, so the base without it is not the original "
                "model; use another variant of the adapter, or a loss without a reference (simpo, cpo, orpo)"
            )
        recipe = context.recipe
        if recipe.data.packing == "stream":
            problems.append("data.packing: stream cuts answers at sequence ends; use auto or whole")
        if recipe.evaluate.baselines:
            problems.append("evaluate.baselines: a unigram model compares no answers; set it to false")
        return problems

    def evaluation_scores(self) -> Mapping[str, bool]:
        if self.loss in _SINGLE:
            return {"reward_accuracy": True, "reward_desirable": True, "reward_undesirable": False}
        return {"reward_accuracy": True, "reward_margin": True, "chosen_logp": True, "rejected_logp": False}

    def apply(self, build: Build, part: nn.Module) -> Change:
        import copy

        from preheat.ops.losses.cross_entropy import CrossEntropy

        loss_name = {"dpo": "DPO", "ipo": "IPO", "simpo": "SimPO", "cpo": "CPO", "orpo": "ORPO", "kto": "KTO"}.get(
            self.loss, self.loss
        )
        summary, count = f"{loss_name} loss, beta {self._beta:g}", 1
        if not self._uses_reference:
            summary += ", no reference model"
        elif Tag.ADAPTER in build.tags:
            summary += "; the reference is the base without its adapter"
        else:
            # Still on meta: the weight source fills it like the model.
            reference_model = copy.deepcopy(part).requires_grad_(False).eval()
            build.parts["reference"] = [reference_model]
            count = sum(p.numel() for p in reference_model.parameters())
            summary += f"; the reference is a frozen copy of {count:,} parameters"
        build.claim(Slot.ROW_LOSS, CrossEntropy(), self.name())  # log-probabilities are compared without regularization
        build.claim(Slot.OBJECTIVE, self._build_objective(build, part), self.name())
        if self.loss == "kto":
            # On the host, which knows the lengths.
            build.hooks.transforms.append((Order.PACK, _exchange_in(build)))
        build.loss.scores = _compute_scores
        return Change(summary, count)

    def _build_objective(self, build: Build, part: nn.Module) -> Callable[..., LossSum]:
        import torch

        from preheat.ops.adapters.peft_layers import disable_adapters
        from preheat.ops.losses.cross_entropy import Recorded, WeightedCrossEntropy
        from preheat.ops.losses.preference import AnswerIndex, mean_by_row

        # Log-probabilities of the answers, [answers].
        def logp(
            states: Tensor, batch: Batch, answers: AnswerIndex, over_logits: Callable[..., Tensor], of: nn.Module
        ) -> Tensor:
            recorded = Recorded()
            # `of`: the head of that model, not of the trained one.
            over_logits(states, batch.labels, row_loss=recorded, of=of)
            # [rows * length] negative log-probabilities of the labels to sums per answer.
            sums = -answers.sums(recorded.found())
            return sums / answers.lengths if self._normalizes else sums

        def reference(batch: Batch, answers: AnswerIndex, over_logits: Callable[..., Tensor]) -> Tensor:
            if "reference" in build.parts:
                (reference_model,) = build.parts["reference"]

                def run() -> Tensor:
                    hidden = build.slot(Slot.HIDDEN)(reference_model, batch)
                    return logp(hidden, batch, answers, over_logits, reference_model)

                # The scope gathers a sharded reference's weights around both its layers and its head.
                logps: Tensor = build.slot(Slot.UNSHARD_SCOPE)(reference_model, run)
                return logps
            # The reference is the model without its adapter, in the state that the copy would have.
            with disable_adapters(part):
                return measure(batch, answers, over_logits)

        def measure(batch: Batch, answers: AnswerIndex, over_logits: Callable[..., Tensor]) -> Tensor:
            """Returns the log-probabilities of the trained model without dropout."""
            training = part.training
            part.eval()
            try:
                return logp(build.slot(Slot.HIDDEN)(part, batch), batch, answers, over_logits, part)
            # Restored even after an error: recovery from one retries the step.
            finally:
                part.train(training)

        @torch.no_grad()
        def divergence(batch: Batch, over_logits: Callable[..., Tensor]) -> Tensor:
            """Returns for each answer the divergence from the reference, estimated with the exchanged answers."""
            other = batch.exchanged
            assert other is not None, "the transform exchanges the answers of each batch"
            answers = AnswerIndex.of(other)
            ratios = measure(other, answers, over_logits) - reference(other, answers, over_logits)
            return mean_by_row(ratios, [len(row) for row in batch.desirable])

        def objective(batch: Batch, hidden: Callable[[Batch], Tensor], over_logits: Callable[..., Tensor]) -> LossSum:
            # Evaluation runs this objective too, without gradients.
            training = torch.is_grad_enabled()
            # A stream cannot be checked before it is read.
            if not (batch.desirable if self.loss in _SINGLE else batch.group == 2):
                raise DataError(
                    f"techniques.preference: loss {self.loss} finds no "
                    f"{self.examples().kind} in the sequences {batch.rows[:8]}"
                )
            answers = AnswerIndex.of(batch)
            # First the reference, so that its activations are freed before those of the training pass are kept.
            with torch.no_grad():
                reference_logps = (
                    reference(batch, answers, over_logits)
                    if self._uses_reference
                    else torch.zeros_like(answers.lengths)
                )
            baseline = torch.zeros_like(answers.lengths)
            if self.loss == "kto":
                baseline = divergence(batch, over_logits)
            # The one pass with gradients: [rows, length, width].
            states = hidden(batch)
            # First pass over the head: log-probabilities alone, so the logits may be chunked and are not kept.
            with torch.no_grad():
                logps = logp(states.detach(), batch, answers, over_logits, part)
            # The losses are tiny functions of [answers] numbers: autograd differentiates them by the log-probabilities.
            with torch.set_grad_enabled(training):
                losses, metrics = self._compute_losses(
                    logps.requires_grad_(training), reference_logps, baseline, answers, batch
                )
            total = losses.sum()
            if not training:
                return LossSum(total, batch.weight, metrics)
            # d loss / d log p of each answer, [answers].
            (slope,) = torch.autograd.grad(total, logps)
            # Weight per token: d loss / d log p, so that the sum of -weight log p has the gradient of the loss, though
            # not its value.
            weights = answers.spread(-slope / answers.lengths if self._normalizes else -slope, batch.labels)
            # Second pass over the head, with the weights: this is the pass that back-propagates.
            surrogate = over_logits(states, batch.labels, weights, row_loss=WeightedCrossEntropy())
            # The value of the true loss with the gradient of the surrogate.
            return LossSum(total.detach() + (surrogate - surrogate.detach()), batch.weight, metrics)

        return objective

    def _compute_losses(
        self, logps: Tensor, reference_logps: Tensor, baseline: Tensor, answers: AnswerIndex, batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the losses of the examples, differentiable by `logps`, and the summed metrics."""
        from preheat.hardware.transfers import to_device
        from preheat.ops.losses.preference import kto_losses, pair_losses, unpaired_losses

        # The implicit reward of DPO: beta times log(p / p of the reference).
        reward = self._beta * (logps - reference_logps).detach()
        if self.loss in _SINGLE:
            desirable = to_device([n for row in batch.desirable for n in row], logps.device)
            # A liked answer should have a positive reward, a disliked one a negative one.
            correct = (reward > 0) == (desirable > 0)
            metrics = {
                "reward_accuracy": correct.float().sum(),
                "desirable": desirable.sum(),
                "reward_desirable": (reward * desirable).sum(),
            }
            metrics["reward_undesirable"] = (reward * (1 - desirable)).sum()
            if self.loss == "apo_zero":
                return unpaired_losses(logps, reference_logps, desirable, beta=self._beta), metrics
            weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
            losses = kto_losses(logps, reference_logps, desirable, baseline, beta=self._beta, **weights)
            return losses, metrics | {"divergence": baseline.sum()}
        # Answers alternate: chosen, rejected, chosen, ...
        chosen, rejected = logps[0::2], logps[1::2]
        losses = pair_losses(
            chosen,
            rejected,
            reference_logps[0::2],
            reference_logps[1::2],
            loss=self.loss,
            beta=self._beta,
            gamma=self.gamma,
            label_smoothing=self.label_smoothing,
        )
        if self._nll:
            # Per token, so that its weight does not depend on the answer's length.
            losses = losses - self._nll * (chosen if self._normalizes else chosen / answers.lengths[0::2])
        margin = reward[0::2] - reward[1::2]
        metrics = {
            "reward_accuracy": (margin > 0).float().sum(),
            "reward_margin": margin.sum(),
            "chosen_logp": chosen.detach().sum(),
            "rejected_logp": rejected.detach().sum(),
        }
        return losses, metrics


_ALONE = (
    "techniques.preference: sequences of a single answer have no other for KTO's divergence, which is 0 there, as with "
    "loss: apo_zero; raise batch.seq_len, so that several answers share a sequence"
)


def _exchange_in(build: Build) -> Callable[[Batch], Batch]:
    """Returns the transform that adds the exchanged answers to a batch, and gives notice once if there are none."""
    from preheat.hardware.transfers import is_dry_run
    from preheat.ops.losses.preference import exchange_answers

    noticed = False

    def exchange(batch: Batch) -> Batch:
        nonlocal noticed
        if not noticed and all(len(row) < 2 for row in batch.desirable) and not is_dry_run():
            noticed = True
            build.state.events.append(Notice(message=_ALONE))
        return replace(batch, exchanged=exchange_answers(batch))

    return exchange


def _compute_scores(metrics: Mapping[str, Tensor], weight: float) -> dict[str, float]:
    """Returns the means over the pairs; for single answers, the mean rewards of liked and of disliked ones."""
    if "desirable" not in metrics:
        # For pairs, `weight` is their number.
        return {name: float(total) / weight for name, total in metrics.items()}
    desirable = float(metrics["desirable"])
    means = {"reward_accuracy": float(metrics["reward_accuracy"]) / weight}
    if desirable:
        means["reward_desirable"] = float(metrics["reward_desirable"]) / desirable
    if weight > desirable:
        means["reward_undesirable"] = float(metrics["reward_undesirable"]) / (weight - desirable)
    if "divergence" in metrics:
        means["divergence"] = float(metrics["divergence"]) / weight
    return means
