"""Cross-entropy losses over logits, whole and chunked. The reference of each is autograd through its plain form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from preheat.core import RowLoss
from preheat.ops import rowwise_cpu
from preheat.ops.adapters.tied_head import pair_of
from preheat.ops.distributed.dtensor_utils import full_tensor
from preheat.ops.dry_run_loops import fold_identical
from preheat.ops.losses.chunked_grads import LogitAdapter, sum_product
from preheat.torch_compat import linear_cross_entropy

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext


__all__ = [
    "IGNORED",
    "CrossEntropy",
    "DynamicCrossEntropy",
    "Recorded",
    "RegularizedCrossEntropy",
    "Softcapped",
    "WeightedCrossEntropy",
    "sum_chunked_loss",
    "sum_liger_loss",
    "sum_torch_loss",
    "sum_full_loss",
]

IGNORED = -100  # label of positions that are not trained, as in torch and transformers


class CrossEntropy:
    """Cross entropy of each row of logits against its label; 0 if the label is -100.

    Example:
        >>> CrossEntropy()(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor([1.3863, 0.0000])
    """

    @property
    def measured(self) -> RowLoss:
        """The loss to report: itself, already in nats."""
        return self

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        """Returns fp32 losses [n] from logits [n, vocabulary] and labels [n]; differentiable."""
        (labels,) = aligned
        return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")

    def value_and_grad_(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the losses and overwrites the logits with their gradient, up to a factor per row.

        Returns:
            losses: [n] fp32.
            factor: [n]; d losses[i] / d logits[i] is factor[i] times the new `logits[i]`. The factor lets the caller
                scale smaller tensors instead of making another pass over the logits.
        """
        trained = labels != IGNORED
        if logits.is_contiguous() and rowwise_cpu.is_supported(logits):
            return rowwise_cpu.cross_entropy_(logits, labels), trained
        # Label -100 is no column: its rows read column 0 instead, and the last line sets their loss and factor to 0.
        # Indexing, because gather and scatter traverse all logits on a CPU (24 ms against 0.01 ms at 512 x 32,000).
        own = (torch.arange(labels.shape[0], device=labels.device), labels.clamp(min=0))
        # In place is safe: softmax reads each full row before it writes it.
        if logits.dtype == torch.bfloat16:
            # loss = -log softmax(logits)[label].
            # bf16 has fp32's exponent range: no probability above 1e-38 is lost, and its rounding changes the loss by
            # at most 0.004, less than rounding the logits did. This saves two passes over the logits.
            torch.softmax(logits, dim=-1, out=logits)
            losses = -logits[own].float().clamp(min=torch.finfo(torch.float32).tiny).log()
        else:
            # loss = logsumexp - score, with logsumexp = peak - log(probability of the most likely token). In fp16 the
            # label's own probability is 0 below 6e-8, so its log is not used. Both are read before softmax overwrites
            # the logits.
            peak, score = logits.amax(dim=-1).float(), logits[own].float()
            torch.softmax(logits, dim=-1, out=logits)
            # The most likely token has probability exp(peak - logsumexp) >= 1 / vocabulary, so its log is safe.
            losses = peak - score - logits.amax(dim=-1).float().log()
        # d loss / d logits = softmax(logits) - onehot(label); only the label's column differs from the probabilities.
        logits.index_put_(own, logits[own] - 1)
        # The factor is 1 for trained rows and 0 for the others; the caller casts the bool to its dtype.
        return torch.where(trained, losses, 0.0), trained


class RegularizedCrossEntropy:
    """Cross entropy with label smoothing and z-loss: (1 - s) ce + s mean over tokens of -log p + z logsumexp ** 2.

    Its gradient by the logits is (1 + 2 z lse) p - (1 - s) onehot - s / vocabulary, computed in place as in
    `CrossEntropy`. For evaluation, `measured` is the plain loss.

    Args:
        smoothing: s, the part of the label's weight that is spread over all tokens (Szegedy et al. 2016,
            arXiv:1512.00567, section 7).
        z: weight of the squared logsumexp, which keeps logits from drifting (Chowdhery et al. 2022, arXiv:2204.02311,
            section 5: 1e-4).

    Example:
        >>> RegularizedCrossEntropy(smoothing=0.5)(torch.tensor([[0.0, 2.0]]), torch.tensor([1]))
        tensor([0.6269])
    """

    def __init__(self, smoothing: float = 0.0, z: float = 0.0):
        self.smoothing, self.z = smoothing, z
        self.measured = CrossEntropy()

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        (labels,) = aligned
        logits = logits.float()
        plain = functional.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=self.smoothing
        )
        # torch ignores rows of label -100 in the cross entropy alone, so the z-loss masks them itself.
        return plain + torch.where(labels != IGNORED, self.z * torch.logsumexp(logits, dim=-1).square(), 0.0)

    def value_and_grad_(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        trained = labels != IGNORED
        own = (torch.arange(labels.shape[0], device=labels.device), labels.clamp(min=0))
        # All sums over raw logits come first: softmax overwrites them.
        peak, score = logits.amax(dim=-1).float(), logits[own].float()
        # Without smoothing the mean has weight 0, so any finite tensor serves and saves a pass over the logits.
        mean = logits.mean(dim=-1, dtype=torch.float32) if self.smoothing else score
        torch.softmax(logits, dim=-1, out=logits)
        # log p_max = peak - logsumexp, and p_max >= 1 / vocabulary.
        lse = peak - logits.amax(dim=-1).float().log()
        # -log p(token) = lse - logit(token), and the mean of that over all tokens is lse - mean.
        losses = lse - (1 - self.smoothing) * score - self.smoothing * mean + self.z * lse.square()
        # The caller multiplies by the factor, so the other two terms of the gradient are divided by it. It is 0 only at
        # lse = -1 / (2 z), which is -5,000 for z = 1e-4.
        factor = 1 + 2 * self.z * lse
        logits.index_put_(own, (logits[own] - (1 - self.smoothing) / factor).to(logits.dtype))
        if self.smoothing:
            logits.sub_((self.smoothing / logits.shape[-1] / factor).to(logits.dtype).unsqueeze(1))
        return torch.where(trained, losses, 0.0), torch.where(trained, factor, 0.0)


class Recorded:
    """Cross entropy that records the negative log-probability of each label, across chunks. No gradients.

    Computes in fp32 for any logits dtype: sums over long answers are compared, and bf16's rounding would accumulate.

    Example:
        >>> row_loss = Recorded()
        >>> _ = row_loss(torch.zeros(2, 4), torch.tensor([1, -100]))
        >>> row_loss.found()
        tensor([1.3863, 0.0000])
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    @property
    def measured(self) -> RowLoss:
        return self

    def found(self) -> Tensor:
        """Returns [n] fp32, all rows in order."""
        return torch.cat(self._parts)

    def keep(self, losses: Tensor) -> Tensor:
        """Records losses of the next rows that were computed elsewhere."""
        self._parts.append(losses.detach())
        return losses

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        return self.keep(CrossEntropy()(logits, *aligned).detach())

    def value_and_grad_(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # A factor of 0 makes all gradients 0. Without this method a chunked loss would run autograd for each chunk.
        losses = self(logits, labels)
        return losses, torch.zeros_like(losses)


class Softcapped:
    """Applies another loss to cap * tanh(logits / cap), as in Gemma 2's head. The input logits are uncapped.

    Args:
        loss: loss of the capped logits; if it computes its gradient in place, so does this.

    Example:
        >>> Softcapped(CrossEntropy(), 30.0)(torch.zeros(1, 4), torch.tensor([2]))
        tensor([1.3863])
    """

    def __init__(self, loss: RowLoss, cap: float):
        self.loss, self.cap = loss, cap
        # Set per instance: the chunked loss differentiates by autograd if it finds None here.
        self.value_and_grad_ = self._in_place if getattr(loss, "value_and_grad_", None) is not None else None

    @property
    def measured(self) -> RowLoss:
        return Softcapped(self.loss.measured, self.cap)

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        return self.loss(torch.tanh(logits.float() / self.cap) * self.cap, *aligned)

    def _in_place(self, logits: Tensor, *aligned: Tensor) -> tuple[Tensor, Tensor]:
        # `logits` is reused three times: for logits / cap, for the capped logits, and for their gradient. `bent` is the
        # only second tensor of [n, vocabulary].
        bent = logits.div_(self.cap).tanh()
        losses, factor = self.loss.value_and_grad_(  # type: ignore[attr-defined]
            torch.mul(bent, self.cap, out=logits), *aligned
        )
        # Chain rule: d (cap tanh(x / cap)) / dx = 1 - tanh(x / cap)².
        logits.mul_(1 - bent.square_())
        return losses, factor


class WeightedCrossEntropy:
    """Cross entropy with a weight per row, of any sign.

    Args:
        loss: another implementation of the cross entropy.

    Example:
        >>> WeightedCrossEntropy()(torch.zeros(2, 4), torch.tensor([1, 2]), torch.tensor([1.0, -0.5]))
        tensor([ 1.3863, -0.6931])
    """

    def __init__(self, loss: Any = None):
        self.loss = loss or CrossEntropy()

    @property
    def measured(self) -> RowLoss:
        return self

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        labels, weights = aligned
        return self.loss(logits, labels) * weights

    def value_and_grad_(self, logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        losses, factor = self.loss.value_and_grad_(logits, labels)
        # A row's weight scales its gradient as it scales its loss, so the factor carries it.
        return losses * weights, factor * weights


class DynamicCrossEntropy:
    """Cross entropy weighted by the label's probability p, as a constant: -p log p, of gradient p (softmax - onehot).

    Wu et al. 2025, dynamic fine-tuning (arXiv:2508.05629).

    Args:
        loss: another implementation of the cross entropy.

    Example:
        >>> DynamicCrossEntropy()(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor([0.3466, 0.0000])
    """

    def __init__(self, loss: Any = None):
        self.loss = loss or CrossEntropy()

    @property
    def measured(self) -> RowLoss:
        return CrossEntropy()

    def __call__(self, logits: Tensor, *aligned: Tensor) -> Tensor:
        losses: Tensor = self.loss(logits, *aligned)
        return losses * torch.exp(-losses.detach())

    def value_and_grad_(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses, factor = self.loss.value_and_grad_(logits, labels)
        # The loss is -log p: no further pass over the logits.
        probability = torch.exp(-losses)
        return losses * probability, factor * probability


def sum_full_loss(hidden: Tensor, head: torch.nn.Module, row_loss: RowLoss, *aligned: Tensor) -> Tensor:
    """Sums the row losses with all logits in memory: the plain form.

    Args:
        hidden: [rows, length, width]; aligned: [rows, length] or [rows, length, n] each; head: a linear map.
    """
    logits = head(hidden).flatten(0, 1)  # [rows * length, vocabulary]
    return row_loss(logits, *(a.flatten(0, 1) for a in aligned)).sum()


class _Chunked(torch.autograd.Function):
    """Sum of row losses in chunks of `rows`. Gradients are computed in forward: logits are not saved or recomputed."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_loss: RowLoss,
        rows: int,
        cuda: bool,
        dtype: torch.dtype,
        differentiate: bool,
        low: Tensor | None,
        up: Tensor | None,
        *aligned: Tensor,
    ) -> Tensor:
        hidden_dtype, weight_dtype = hidden.dtype, weight.dtype
        # `differentiate` comes from the caller, because forward always runs without gradients, and `needs_input_grad`
        # is true under no_grad too.
        wants_hidden, wants_weight, wants_bias = (differentiate and needs for needs in ctx.needs_input_grad[:3])
        # [n, width] and [vocabulary, width]; a cast weight is one copy for all chunks.
        hidden, weight = hidden.detach().to(dtype), weight.detach().to(dtype)
        adapter = LogitAdapter(low, up, dtype, differentiate) if low is not None and up is not None else None
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden, dtype=hidden_dtype) if wants_hidden else None
        # Uninitialized, since the first chunk overwrites it; in the weight's own dtype, since every chunk adds to it.
        grad_weight = torch.empty_like(weight, dtype=weight_dtype) if wants_weight else None
        # [vocabulary], in the bias's own dtype too.
        grad_bias = torch.zeros_like(bias) if bias is not None and wants_bias else None
        bias = bias.detach().to(dtype) if bias is not None else None
        # [rows, vocabulary], reused by every chunk: first logits, then their gradient.
        logits_buffer = hidden.new_empty((min(rows, hidden.shape[0]), weight.shape[0]))
        # A row loss with its own gradient writes it into the buffer; for others, autograd allocates per chunk.
        in_place = getattr(row_loss, "value_and_grad_", None)
        for start in fold_identical(range(0, hidden.shape[0], rows)):
            part = hidden[start : start + rows]  # [chunk, width]
            chunk_inputs = [a[start : start + rows] for a in aligned]
            # [chunk, vocabulary]
            if bias is None:
                logits = torch.mm(part, weight.t(), out=logits_buffer[: part.shape[0]])
            else:
                logits = torch.addmm(bias, part, weight.t(), out=logits_buffer[: part.shape[0]])
            if adapter is not None:
                # An adapted head: W x + B A x, without building W + B A.
                adapter.add_(logits, start)
            if in_place is not None:
                losses, factor = in_place(logits, *chunk_inputs)
                factor = factor.to(dtype).unsqueeze(1)  # [chunk, 1]
            else:
                # Detached, so that autograd differentiates the row loss alone and frees its tensors with the chunk.
                with torch.enable_grad():
                    leaf = logits.detach().requires_grad_()
                    losses = row_loss(leaf, *chunk_inputs)
                    (logits,) = torch.autograd.grad(losses.sum(), leaf)
                losses, factor = losses.detach(), logits.new_ones((part.shape[0], 1))
            total += losses.sum(dtype=torch.float32)
            if adapter is not None:
                adapter.differentiate(logits, factor, start)
            # From here on `logits` holds d loss / d logits, up to the factor. The factor multiplies tensors of [chunk,
            # width], which are vocabulary / width times smaller than the logits.
            if grad_bias is not None:
                # [1, chunk] x [chunk, vocabulary]: a matmul takes no copy of the logits for the factor.
                grad_bias += torch.mm(factor.t(), logits).squeeze(0)
            if grad_hidden is not None:
                torch.mul(torch.mm(logits, weight), factor, out=grad_hidden[start : start + rows])
            if grad_weight is not None:
                product = part * factor
                # grad_weight += gradient.t() @ part: [vocabulary, chunk] x [chunk, width]
                if grad_weight.dtype == dtype:
                    grad_weight.addmm_(logits.t(), product, beta=float(start > 0))  # beta 0 ignores the old contents
                else:
                    sum_product(grad_weight, logits, product, first=start == 0, at_once=cuda)
        beside_grads = adapter.grads if adapter is not None else (None, None)
        grads = (grad_hidden, grad_weight, grad_bias, *beside_grads)
        # Backward has no work left but a scaling, so it needs the gradients themselves and none of the inputs.
        ctx.save_for_backward(*(g for g in grads if g is not None))
        ctx.wants = tuple(g is not None for g in grads), len(aligned)
        return total

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wants, count = ctx.wants
        saved = iter(ctx.saved_tensors)
        # The loss is a sum, so grads[0] is one number: the caller's scale, such as 1 / tokens.
        # In place: these tensors belong to this call alone.
        hidden, weight, bias, low, up = (next(saved).mul_(grads[0]) if wanted else None for wanted in wants)
        return (hidden, weight, bias, None, None, None, None, None, low, up, *([None] * count))


def sum_chunked_loss(
    hidden: Tensor, head: torch.nn.Module, row_loss: RowLoss, *aligned: Tensor, rows: int = 512, cuda: bool = False
) -> Tensor:
    """Sums the row losses with `rows` rows of logits in memory at a time. Supports a single backward.

    Computes in autocast's dtype if it is on, otherwise in that of `hidden`.

    Args:
        hidden: [..., width]; head: a module with a `weight` [vocabulary, width] and a `bias` [vocabulary] or None.
        aligned: [...] each, or [..., n]: further inputs of the row loss per position.
        row_loss: if it has `value_and_grad_`, its gradient is computed in place; otherwise by autograd per chunk.
        cuda: runs on CUDA, or is planned for it: half-precision matmuls accumulate into an fp32 head's gradient in
            fp32.

    Example:
        >>> head = torch.nn.Linear(8, 100, bias=False)
        >>> hidden, labels = torch.randn(6, 8, requires_grad=True), torch.arange(6)
        >>> a = sum_chunked_loss(hidden, head, CrossEntropy(), labels, rows=4)
        >>> b = torch.nn.functional.cross_entropy(head(hidden), labels, reduction="sum")
        >>> bool(torch.isclose(a, b))
        True
    """
    device = hidden.device.type
    dtype = _compute_dtype(hidden)
    flat = hidden.reshape(-1, hidden.shape[-1])  # [n, width]
    # Autocast does not cast operators with `out=`, so everything is cast here, once.
    with torch.autocast(device, enabled=False):
        # Autograd differentiates the small product hidden @ down, [n, rank]; the chunks give the gradients by its
        # result and by `up`, which is as wide as the vocabulary.
        pair = pair_of(head)
        low, up = (pair.lowered(flat.to(dtype)), pair.up) if pair is not None else (None, None)
        return _Chunked.apply(
            flat,
            *_gather_head(head),
            row_loss,
            rows,
            cuda,
            dtype,
            torch.is_grad_enabled(),
            low,
            up,
            # [...] becomes [n], and [..., k] becomes [n, k].
            *(a.reshape(-1, *a.shape[hidden.dim() - 1 :]) for a in aligned),
        )


def _gather_head(head: torch.nn.Module) -> tuple[Tensor, Tensor | None]:
    """Returns the head's weight and bias; sharded ones are gathered, and their gradients sharded again."""
    weight, bias = head.weight, head.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return full_tensor(weight), full_tensor(bias) if bias is not None else None


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


# Under a dispatch mode (such as the dry run's fake tensors) the next two cannot run, or hide their allocations: our own
# loop replaces them, with chunks of the same size.


def sum_torch_loss(
    hidden: Tensor, head: torch.nn.Module, row_loss: RowLoss, *aligned: Tensor, rows: int = 512
) -> Tensor:
    """Returns the summed loss, as `sum_chunked_loss`, by torch's `linear_cross_entropy` (torch 2.13).

    Only for plain cross entropy. `rows`: rows of logits that are computed at once.
    """
    assert isinstance(row_loss, CrossEntropy), f"torch's kernel has no {type(row_loss).__name__}"
    if is_in_torch_dispatch_mode():
        return sum_chunked_loss(hidden, head, row_loss, *aligned, rows=rows)
    dtype, (weight, bias), (labels,) = _compute_dtype(hidden), _gather_head(head), aligned
    with torch.autocast(hidden.device.type, enabled=False):
        flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
        return linear_cross_entropy(
            flat,
            weight.to(dtype),
            labels.reshape(-1),
            bias=bias.to(dtype) if bias is not None else None,
            ignore_index=IGNORED,
            rows=rows,
        ).float()


def sum_liger_loss(hidden: Tensor, head: torch.nn.Module, row_loss: RowLoss, *aligned: Tensor) -> Tensor:
    """`sum_chunked_loss` by Liger's fused linear cross entropy, with chunks whose logits are as large as `hidden`."""
    assert isinstance(row_loss, CrossEntropy), f"Liger's kernel has no {type(row_loss).__name__}"
    flat = hidden.reshape(-1, hidden.shape[-1])
    if is_in_torch_dispatch_mode():
        # Liger's own rule: ceil(vocabulary / width) chunks, whose rows are rounded up to a power of two.
        chunks = -(-_gather_head(head)[0].shape[0] // flat.shape[1])
        rows = 2 ** math.ceil(math.log2(-(-flat.shape[0] // chunks)))
        return sum_chunked_loss(hidden, head, row_loss, *aligned, rows=rows)
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    dtype, (weight, bias), (labels,) = _compute_dtype(hidden), _gather_head(head), aligned
    with torch.autocast(hidden.device.type, enabled=False):
        return liger_fused_linear_cross_entropy(
            flat.to(dtype),
            weight.to(dtype),
            labels.reshape(-1),
            bias=bias.to(dtype) if bias is not None else None,
            ignore_index=IGNORED,
            reduction="sum",
            accum_dtype=torch.float32,  # dtype in which chunks accumulate the weight's gradient
        )
