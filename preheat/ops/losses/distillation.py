"""Distillation losses between a student and its teacher.

The reference of each is its plain form: `Distilled.__call__` under autograd, `divergence` over explicit probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from preheat.core import RowLoss
from preheat.ops.losses.cross_entropy import IGNORED, CrossEntropy

__all__ = [
    "CommonHead",
    "Direction",
    "Distilled",
    "Likeliest",
    "TeacherHead",
    "distance",
    "divergence",
    "top_tokens",
    "mapped_distance",
    "compute_means",
    "restore_distribution",
]

Direction = Literal["forward", "reverse"]

_BLOCK = 1 << 21
"""Logits per block, in fp32 (8 MiB): computing a block's gradient takes about eight tensors of this size."""


class Likeliest(NamedTuple):
    """A distribution given by its top-k tokens and the remaining probability of all others.

    Attributes:
        values: [..., k + 1] log-probabilities, the last for all other tokens together; the probabilities sum to 1.
        indices: [..., k] int64, the top-k tokens.
    """

    values: Tensor
    indices: Tensor


def top_tokens(logits: Tensor, k: int, temperature: float = 1.0) -> Likeliest:
    """Returns the top-k tokens of each row; at most all but one token, so that a remainder always exists.

    Args:
        logits: [..., vocabulary].

    Example:
        >>> top = top_tokens(torch.tensor([0.0, 2.0, 0.0]).exp().log(), 1)
        >>> top.values.exp().sum().item(), top.indices.tolist()
        (1.0, [1])
    """
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    values, indices = logp.topk(min(k, logp.shape[-1] - 1), dim=-1)
    return Likeliest(_append_rest(values), indices)


def _append_rest(values: Tensor) -> Tensor:
    """Appends the log-probability of all other tokens to [..., k]; returns [..., k + 1]."""
    # The clamp below 1 keeps log1p finite if the top k hold all of the probability.
    rest = torch.log1p(-values.exp().sum(dim=-1, keepdim=True).clamp(max=1 - 1e-7))
    # Normalized again, since the clamp may have raised the remainder.
    return torch.log_softmax(torch.cat([values, rest], dim=-1), dim=-1)


def restore_distribution(values: Tensor, indices: Tensor) -> Likeliest:
    """Restores a distribution that was stored in few bits: normalized fp32 values, int64 indices."""
    return Likeliest(torch.log_softmax(values.float(), dim=-1), indices.long())


def divergence(student: Tensor, teacher: Tensor | Likeliest, direction: Direction = "forward") -> Tensor:
    """Returns the Kullback-Leibler divergence of each row, [n] in nats; differentiable.

    For a top-k teacher, the student's other tokens are pooled like the teacher's: 0 if both agree.

    Args:
        student: [n, vocabulary] logits, already divided by the temperature, as are the teacher's.
        direction: forward: KL(teacher || student), mode-covering; reverse: KL(student || teacher), mode-seeking.

    Example:
        >>> even, sure = torch.zeros(1, 2), torch.tensor([[0.0, 2.0]])
        >>> divergence(even, sure), divergence(even, sure, "reverse")
        (tensor([0.3278]), tensor([0.4338]))
    """
    logp = torch.log_softmax(student.float(), dim=-1)
    if isinstance(teacher, Likeliest):
        logq = teacher.values
        among = torch.zeros_like(logp, dtype=torch.bool).scatter_(-1, teacher.indices, True)  # [n, vocabulary]
        # Log-probability of all other tokens together, [n, 1]; finite, because 0 * -inf would be NaN in the reverse
        # direction.
        rest = (
            logp.masked_fill(among, -torch.inf)
            .logsumexp(dim=-1, keepdim=True)
            .clamp(min=torch.finfo(torch.float32).min)
        )
        logp = torch.cat([logp.gather(-1, teacher.indices), rest], dim=-1)  # [n, k + 1]
    else:
        logq = torch.log_softmax(teacher.float(), dim=-1)
    # KL(of || to) = sum of exp(of) (of - to)
    to, of = (logp, logq) if direction == "forward" else (logq, logp)
    return (of.exp() * (of - to)).sum(dim=-1)


def distance(states: Tensor, teacher: Tensor) -> Tensor:
    """Returns the relative squared distance of hidden states, ||a - b||² / ||b||² per position, [...] fp32;
    differentiable.

    Args:
        states, teacher: [..., width].

    Example:
        >>> distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
        tensor([0.2500])
    """
    states, teacher = states.float(), teacher.float()
    return (states - teacher).square().sum(dim=-1) / teacher.square().sum(dim=-1).clamp(min=1e-12)


def mapped_distance(
    states: Sequence[Tensor], teacher: Sequence[Tensor], maps: Sequence[Tensor], labels: Tensor
) -> Tensor:
    """Sums the distances of linearly mapped student states to the teacher's over trained positions; mean over layers.

    Args:
        states: [rows, length, width] per compared layer.
        teacher: [rows, length, width of the teacher] per layer.
        maps: [width of the teacher, width] each.
        labels: [rows, length], -100: not trained.
    """
    # [rows, length]; padding and prompts do not count, as in the cross entropy.
    trained = labels != IGNORED
    parts = [
        torch.where(trained, distance(functional.linear(own.to(by.dtype), by), theirs), 0.0).sum()
        for own, theirs, by in zip(states, teacher, maps, strict=True)
    ]
    return torch.stack(parts).mean()


class TeacherHead:
    """The teacher's head: computes logits per chunk in a reused buffer.

    Args:
        weight: [rows, width] of its head, in the dtype of the matmul; bias: [rows] of its head, or None.
        rows: rows of the student's head; rows beyond them belong to no token.
        cap: caps logits as cap * tanh(logits / cap).
    """

    def __init__(self, weight: Tensor, rows: int, cap: float | None = None, bias: Tensor | None = None):
        assert weight.shape[0] >= rows, "check refuses a teacher with fewer rows than the student"
        self.weight, self.cap = weight.detach()[:rows], cap
        self.bias = bias.detach()[:rows] if bias is not None else None
        self._buffer: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """Maps [n, width] to [n, rows], valid until the next call."""
        states = states.detach()
        # The first chunk is the largest, so the buffer is allocated once; the last chunk takes a part of it.
        if self._buffer is None or self._buffer.shape[0] < states.shape[0]:
            self._buffer = states.new_empty((states.shape[0], self.weight.shape[0]))
        # Weight and states already have the dtype of the matmul.
        with torch.autocast(states.device.type, enabled=False):
            logits = torch.mm(states, self.weight.t(), out=self._buffer[: states.shape[0]])
            if self.bias is not None:
                logits += self.bias
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)


class CommonHead:
    """Top-k distribution of a teacher with another tokenizer, over the tokens that both vocabularies contain.

    Args:
        head: computes its logits over its full vocabulary from its last hidden states.
        own, theirs: ids of the common tokens in the student's and the teacher's vocabulary, [n] each.
        top: number of them that are kept per position; all other tokens, common or not, are pooled.
        temperature: divides the logits.
    """

    def __init__(
        self, head: Callable[[Tensor], Tensor], own: Tensor, theirs: Tensor, top: int, temperature: float = 1.0
    ):
        self.head, self.own, self.theirs = head, own, theirs
        self.top, self.temperature = min(top, len(own)), temperature

    def __call__(self, states: Tensor) -> Likeliest:
        """Maps [n, width] to the distribution of each position in the student's token ids."""
        logits = self.head(states).float() / self.temperature  # [n, teacher's vocabulary]
        # Normalized over the teacher's full vocabulary before the common tokens are selected, so that the probability
        # of tokens which the student lacks joins the pool instead of being spread over the common ones.
        values, at = (logits.index_select(-1, self.theirs) - logits.logsumexp(dim=-1, keepdim=True)).topk(
            self.top, dim=-1
        )
        # `at` indexes the list of common tokens; `own` turns it into the student's token ids.
        return Likeliest(_append_rest(values), self.own[at])


class Distilled:
    """(1 - m) cross entropy + m T² divergence from a teacher at temperature T, per row; 0 if the label is -100.

    T² keeps the divergence's gradients at the same scale for any temperature (Hinton et al. 2015, section 2). The
    gradient by the logits is computed in place in blocks of rows, as in `CrossEntropy`: with student and teacher
    probabilities p and q at T it is (1 - m)(p1 - onehot) + m T (p - q), or for the reverse direction m T p (log p - log
    q - divergence).

    Args:
        head: computes the teacher's distribution from the aligned tensors after the labels: a `TeacherHead` from its
            hidden states, or a `CommonHead` with top-k tokens at the same temperature. None: the aligned tensors are
            the top-k distribution itself, values [n, k + 1] and indices [n, k].
        mixture: m, the teacher's weight.
        written: the last aligned tensor is [n] fp32: 0 for tokens of the data, otherwise the weight of a token that the
            student sampled itself; there m is 1, since sampled labels teach nothing.
        partly: the last aligned tensor is [n] fp32: 1 at positions with a teacher distribution; m is 0 elsewhere.

    Attributes:
        sums: sums over all rows so far, on the device: cross entropy and divergence without their factors; with
            `written` or `partly` also the number of positions of each.

    Example:
        >>> teacher = TeacherHead(torch.eye(2), 2)
        >>> Distilled(teacher, mixture=1.0)(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([[0.0, 2.0]]))
        tensor([0.3278])
    """

    def __init__(
        self,
        head: Callable[[Tensor], Tensor | Likeliest] | None,
        *,
        direction: Direction = "forward",
        temperature: float = 1.0,
        mixture: float = 0.5,
        written: bool = False,
        partly: bool = False,
    ):
        assert not (written and partly), "one of them is the last of what is aligned"
        self.head, self.direction = head, direction
        self.temperature, self.mixture, self.written, self.partly = temperature, mixture, written, partly
        self.sums: dict[str, Tensor] = {}

    @property
    def measured(self) -> RowLoss:
        """The loss to report: cross entropy of the labels."""
        return CrossEntropy()

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        labels, *extra = aligned
        ce_weight, kl_weight, places = self._shares(extra, labels)
        logits, trained = logits.float(), labels != IGNORED
        ce = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        teacher = self._teacher(extra)
        # Top-k distributions were computed or stored at this temperature; full logits still need it.
        if not isinstance(teacher, Likeliest):
            teacher = teacher.float() / self.temperature
        # ignore_index zeroes the cross entropy of rows of label -100, and this the divergence.
        kl = torch.where(trained, divergence(logits / self.temperature, teacher, self.direction), 0.0)
        self._add(ce, kl, places)
        return ce_weight * ce + self.temperature**2 * kl_weight * kl

    def value_and_grad_(self, logits: Tensor, labels: Tensor, *aligned: Tensor) -> tuple[Tensor, Tensor]:
        """As `CrossEntropy.value_and_grad_`."""
        extra = list(aligned)
        ce_weight, kl_weight, places = self._shares(extra, labels)
        trained, teacher = labels != IGNORED, self._teacher(extra)
        ce, kl = (logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(2))
        # Block by block, because a divergence needs several fp32 tensors as wide as the logits at once.
        for at in _iterate_blocks(*logits.shape):
            part = Likeliest(*(t[at] for t in teacher)) if isinstance(teacher, Likeliest) else teacher[at]
            # Weights per row become [block, 1], to scale rows of [block, vocabulary].
            shares = [s[at].unsqueeze(1) if isinstance(s, Tensor) else s for s in (ce_weight, kl_weight)]
            ce[at], kl[at] = self._block_(logits[at], labels[at].clamp(min=0), part, *shares)
        # Rows of label -100 were computed with label 0, and the factor of 0 returned below removes their gradients.
        ce, kl = torch.where(trained, ce, 0.0), torch.where(trained, kl, 0.0)
        self._add(ce, kl, places)
        return ce_weight * ce + self.temperature**2 * kl_weight * kl, trained

    def _shares(self, extra: list[Tensor], labels: Tensor) -> tuple[float | Tensor, float | Tensor, dict[str, Tensor]]:
        """Returns the weights of cross entropy and divergence, per row if they differ, and the positions of each; pops
        the deciding tensor from `extra`.
        """
        # Every position has a label and a teacher distribution.
        if not (self.written or self.partly):
            return 1 - self.mixture, self.mixture, {}
        counts, trained = extra.pop(), labels != IGNORED
        here = counts > 0
        # A stored teacher that covers some positions: cross entropy alone at the others.
        if self.partly:
            return (
                torch.where(here, 1 - self.mixture, 1.0),
                torch.where(here, self.mixture, 0.0),
                {"divergence": trained & here},
            )
        # Texts sampled by the student: divergence alone, with the sample's weight; text of the data keeps the mixture.
        places = {"label_loss": trained & ~here, "divergence": trained}
        return torch.where(here, 0.0, 1 - self.mixture), torch.where(here, counts, self.mixture), places

    def _teacher(self, extra: Sequence[Tensor]) -> Tensor | Likeliest:
        return restore_distribution(*extra) if self.head is None else self.head(*extra)

    def _add(self, ce: Tensor, kl: Tensor, places: Mapping[str, Tensor]) -> None:
        # Sums stay on the device: reading them here would synchronize in every chunk.
        parts = {"label_loss": ce, "divergence": kl}
        for name, at in places.items():
            parts |= {name: parts[name] * at, f"{name.removesuffix('_loss')}_places": at}
        for name, values in parts.items():
            total = values.detach().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def _block_(
        self,
        logits: Tensor,
        labels: Tensor,
        teacher: Tensor | Likeliest,
        ce_weight: float | Tensor,
        kl_weight: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns cross entropy and divergence of a block of rows; overwrites the logits with their gradient."""
        # [block] row and column of each label.
        own = (torch.arange(len(labels), device=labels.device), labels)
        scores = logits.float()
        logp = torch.log_softmax(scores, dim=-1)  # [block, vocabulary]
        ce = -logp[own]
        # The cross entropy is at temperature 1, the divergence at T.
        tempered = logp if self.temperature == 1 else torch.log_softmax(scores / self.temperature, dim=-1)
        if isinstance(teacher, Likeliest):
            kl, slope = _top_divergence(tempered, teacher, self.direction)
        else:
            kl, slope = _full_divergence(
                tempered, torch.log_softmax(teacher.float() / self.temperature, dim=-1), self.direction
            )
        # T² from the loss times 1 / T from d (logits / T) / d logits.
        slope.mul_(kl_weight * self.temperature)
        # At mixture 1 the cross entropy has no weight, except at positions without a teacher.
        if self.mixture < 1 or self.partly:
            # d ce / d logits = softmax(logits) - onehot(label). This overwrites `logp`, which may be `tempered` too:
            # the divergence has been computed by now.
            p = logp.exp_()
            p[own] -= 1
            slope.add_(p.mul_(ce_weight))
        logits.copy_(slope)
        return ce, kl


def _iterate_blocks(rows: int, vocabulary: int) -> Iterator[slice]:
    rows_per_block = max(1, _BLOCK // vocabulary)
    return (slice(start, min(start + rows_per_block, rows)) for start in range(0, rows, rows_per_block))


def _full_divergence(logp: Tensor, logq: Tensor, direction: Direction) -> tuple[Tensor, Tensor]:
    """Returns the divergence [n] of log-probabilities [n, vocabulary] and its gradient by the student's logits."""
    if direction == "forward":
        # KL(q || p) = sum of q (log q - log p); its gradient by the student's logits is p - q.
        q, p = logq.exp(), logp.exp()
        kl = logq.sub_(logp).mul_(q).sum(dim=-1)
        return kl, p.sub_(q)
    # KL(p || q) = sum of p (log p - log q); its gradient by the student's logits is p (log p - log q - KL).
    p = logp.exp()
    gap = logq.neg_().add_(logp)
    kl = (p * gap).sum(dim=-1)
    return kl, gap.sub_(kl.unsqueeze(1)).mul_(p)


def _top_divergence(logp: Tensor, teacher: Likeliest, direction: Direction) -> tuple[Tensor, Tensor]:
    """As `_full_divergence` for a top-k teacher with all other tokens pooled.

    The gradient by the logit of a pooled token v is that of the pool times p_v over the pool's probability.
    """
    logq, count = teacher.values, teacher.indices.shape[-1]  # [n, k + 1]
    # Row and column of each of the k tokens; [n, 1] and [n, k] broadcast.
    among = (torch.arange(logp.shape[0], device=logp.device).unsqueeze(1), teacher.indices)
    p, own = logp.exp(), logp[among]
    # With the k tokens at 0, the row sums to the probability of the pool.
    p.index_put_(among, own.new_zeros(()))
    rest = p.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    together = torch.cat([own, rest.log()], dim=-1)  # [n, k + 1], the student's log-probabilities
    if direction == "forward":
        q = logq.exp()
        kl = (q * (logq - together)).sum(dim=-1)
        slope = together.exp() - q
    else:
        gap = together - logq
        mass = together.exp()
        kl = (mass * gap).sum(dim=-1)
        slope = mass * (gap - kl.unsqueeze(1))
    # Spreads the pool's gradient over its tokens in proportion to p, then writes those of the k tokens.
    p.mul_(slope[:, count:] / rest).index_put_(among, slope[:, :count])
    return kl, p


def compute_means(sums: Mapping[str, Tensor], weight: float) -> dict[str, float]:
    """Converts a step's `Distilled.sums` to means over its trained tokens, for logging.

    If the student sampled tokens, each mean is over its own positions, and `on_policy` is the fraction of sampled
    tokens. If the teacher covers only some positions, `compared` is their fraction.

    Example:
        >>> compute_means({"label_loss": torch.tensor(3.0), "divergence": torch.tensor(1.0)}, 2.0)
        {'label_loss': 1.5, 'divergence': 0.5}
    """
    totals = {name: float(total) for name, total in sums.items()}
    # Without counts of their own, both sums run over all trained tokens.
    labelled, places = totals.pop("label_places", weight), totals.pop("divergence_places", weight)
    over = {"label_loss": labelled, "divergence": places}
    averages = {name: total / over.get(name, weight) for name, total in totals.items() if over.get(name, weight)}
    if "label_places" in sums and places:
        return averages | {"on_policy": 1 - labelled / places}
    return averages | ({"compared": places / weight} if "divergence_places" in sums and weight else {})
