"""Standalone attention: a module, a drop-in for torch's MultiheadAttention, and the function that both use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear

from preheat.core import MaskSpec
from preheat.ops.attention.blockwise import attend_blockwise
from preheat.ops.attention.causal_cpu import is_supported
from preheat.ops.attention.sdpa import cast_to_autocast, is_packed, is_visible, sdpa_attention, starts_of
from preheat.ops.attention.varlen import is_varlen_supported

if TYPE_CHECKING:
    from preheat.ops.autograd_context import AutogradContext


__all__ = [
    "BLOCKS_UP_TO",
    "EfficientAttention",
    "attend_any",
    "attend_in_chunks",
    "attend_fastest",
    "convert_multihead",
]

# Tokens up to which blockwise attention beats torch's kernel in bf16 on a CPU: benchmarks/results/attention_cpu.md.
BLOCKS_UP_TO = 2048
_QUERIES = 128


def attend_fastest(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float) -> Tensor:
    """Computes attention by the fastest kernel for these tensors and this mask; none materializes the scores."""
    length, half = q.shape[2], q.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(q.device.type)
    cuda = q.device.type != "cpu"
    # Of these kernels, only blocks and the variable-length one skip what lies outside of a window.
    if mask.window is not None and mask.window < length and not (cuda and half and is_varlen_supported(q, k, v, mask)):
        return attend_blockwise(q, k, v, mask, scale)
    # Flash takes half precision only; the memory-efficient kernel also takes fp32.
    if cuda:
        return sdpa_attention(q, k, v, mask, scale, kernel="flash" if half else "efficient")
    blocks = (half and length <= BLOCKS_UP_TO) or is_supported(q, k, v)
    return (attend_blockwise if blocks else sdpa_attention)(q, k, v, mask, scale)


def attend_any(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, *, dropout: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Uses `attend_fastest`, or `attend_in_chunks` with dropout, a bias, or unequal numbers of queries and keys."""
    # Fused kernels take neither dropout nor a bias, and documents and global tokens only if attention is causal.
    fused = dropout == 0 and bias is None and q.shape[2] == k.shape[2]
    if fused and (mask.causal or not (is_packed(mask) or mask.global_tokens)):
        return attend_fastest(q, k, v, mask, scale)
    return attend_in_chunks(q, k, v, mask, scale, dropout=dropout, bias=bias)


def attend_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    scale: float,
    *,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    queries: int = _QUERIES,
) -> Tensor:
    """Computes attention with dropout and any bias in chunks of queries, recomputed in backward. Memory is linear in
    length.

    Args:
        q: [rows, heads, n, head_dim]; k, v: [rows, the same or fewer heads, m, head_dim].
        dropout: fraction of the probabilities set to 0.
        bias: float added to the scores, or bool (true: visible); broadcast to [rows, heads, n, m].
        queries: queries per chunk; n: one chunk, with all scores in memory.

    Fully masked queries give 0. A window masks keys here but does not skip their computation.
    """
    length, total = q.shape[2], k.shape[2]
    if mask.causal and length != total:
        # The first query's position among the keys is unknown: a cache of earlier keys, or cross-attention.
        raise ValueError(
            f"causal attention of {length} queries on {total} keys: give the positions of the queries by a bias"
        )
    q, k, v = cast_to_autocast(q, k, v)
    if queries >= length:
        # A single chunk saves its scores for backward: nothing is recomputed.
        for *_, piece in _iterate_chunks(q, k, mask, scale, dropout, queries):
            return piece(q, k, v, bias)  # inside of the loop, which keeps autocast off
    return _Chunks.apply(q, k, v, bias, mask, scale, dropout, queries)


class _Chunks(torch.autograd.Function):
    """Chunked attention with preallocated results.

    Allocating results between the large temporary scores would fragment the heap, which then grows with the square of
    the length (torch's checkpoint did so: 1.9 GiB for 121 MiB alive).
    """

    @staticmethod
    def forward(
        ctx: AutogradContext,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: MaskSpec,
        scale: float,
        dropout: float,
        queries: int,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        ctx.settings = mask, scale, dropout, queries
        # CUDA has a generator per device; the CPU's is always recorded.
        ctx.devices = [q.device] if q.device.type == "cuda" else []
        # One RNG state for all chunks: backward draws in the same order.
        ctx.drawn = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, ctx.devices)] if dropout else []
        out = q.new_empty(*q.shape[:3], v.shape[-1])  # [rows, heads, n, head_dim of v]
        # Causal chunks read only keys up to their last query, which halves the work.
        for begin, end, keys, piece in _iterate_chunks(q, k, *ctx.settings):
            out[:, :, begin:end] = piece(
                q[:, :, begin:end], k[:, :, :keys], v[:, :, :keys], _slice_bias(bias, begin, end, keys)
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        # A relative position bias may be trained; a mask has no gradient.
        learned = bias is not None and ctx.needs_input_grad[3]
        # fp32 at least: every chunk of queries adds to the gradients of the same keys and values.
        totals: list[Tensor] = [
            torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for t in (q, k, v, *([bias] * learned))
        ]
        # Forked, so that drawing again in backward does not move the generators that later layers use.
        with torch.random.fork_rng(ctx.devices, enabled=bool(ctx.drawn)):
            if ctx.drawn:
                torch.set_rng_state(ctx.drawn[0])
                for state, device in zip(ctx.drawn[1:], ctx.devices, strict=True):
                    torch.cuda.set_rng_state(state, device)
            for begin, end, keys, piece in _iterate_chunks(q, k, *ctx.settings):

                def cut(
                    q: Tensor,
                    k: Tensor,
                    v: Tensor,
                    bias: Tensor | None = None,
                    # A default binds this iteration's bounds.
                    at: tuple[int, int, int] = (begin, end, keys),
                ) -> list[Any]:
                    return [q[:, :, at[0] : at[1]], k[:, :, : at[2]], v[:, :, : at[2]], _slice_bias(bias, *at)]

                # Detached, so that autograd differentiates this chunk alone and frees its scores before the next one.
                inputs: list[Any] = [t if t is None else t.detach() for t in cut(q, k, v, bias)]
                wanted = [t.requires_grad_() for t in inputs[: 3 + learned]]
                with torch.enable_grad():
                    out = piece(*inputs)
                # The views of `totals` receive this chunk's gradients; without a trained bias there are three.
                parts = torch.autograd.grad(out, wanted, grads[0][:, :, begin:end])
                for into, part in zip(cut(*totals), parts, strict=False):  # type: ignore[arg-type]
                    into.add_(part)
        # Eight inputs; the settings have no gradients.
        back = [g.to(t.dtype) for g, t in zip(totals, (q, k, v, bias), strict=False)]
        return (*back, *[None] * (8 - len(back)))


def _iterate_chunks(
    q: Tensor, k: Tensor, mask: MaskSpec, scale: float, dropout: float, queries: int
) -> Iterator[tuple[int, int, int, Callable[..., Tensor]]]:
    """Yields (first query, end, number of visible keys, attention function) of each chunk."""
    length, total = q.shape[2], k.shape[2]
    starts = starts_of(mask, total, q.device) if mask.documents is not None or mask.global_tokens else None
    for begin in range(0, length, queries):
        end = min(begin + queries, length)
        piece = functools.partial(_attend_chunk, mask=mask, scale=scale, dropout=dropout, starts=starts, begin=begin)
        # The tensors already have their dtype, and backward runs without autocast.
        with torch.autocast(q.device.type, enabled=False):
            yield begin, end, end if mask.causal else total, piece


def _slice_bias(bias: Tensor | None, begin: int, end: int, keys: int) -> Tensor | None:
    if bias is None:
        return None
    # Dimensions of 1 broadcast and stay: a padding mask is [rows, 1, 1, m].
    bias = bias if bias.shape[-2] == 1 else bias[..., begin:end, :]
    return bias if bias.shape[-1] == 1 else bias[..., :keys]


def _attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    mask: MaskSpec,
    scale: float,
    dropout: float,
    starts: Tensor | None,
    begin: int,
) -> Tensor:
    # n queries of this chunk; `shared` key and value heads.
    rows, heads, n, _ = q.shape
    shared, keys = k.shape[1:3]
    # Heads that share a key are stacked as rows, so that keys are not repeated.
    scores = (
        torch.matmul(q.reshape(rows, shared, -1, q.shape[3]), k.transpose(-1, -2)).view(rows, heads, n, keys) * scale
    )
    # Positions of queries [n, 1] and keys [1, keys].
    i, j = torch.arange(begin, begin + n, device=q.device)[:, None], torch.arange(keys, device=q.device)[None, :]
    # Document starts of the queries [rows, 1, n, 1] and of the keys [rows, 1, 1, keys].
    where: tuple[Tensor, ...] = (
        () if starts is None else (starts[:, None, begin : begin + n, None], starts[:, None, None, :keys])
    )
    scores = scores.masked_fill(~is_visible(mask, i, j, *where), float("-inf"))
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    # A query that sees no key (padding, for example) gives 0.
    seeing = scores.detach().amax(-1, keepdim=True) > float("-inf")
    # A row of -inf would give NaN, also in the gradient: clamp to the lowest number and zero the result.
    scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    probs = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)) * seeing
    probs = drop(probs.to(v.dtype), dropout)  # [rows, heads, n, keys]
    return torch.matmul(probs.view(rows, shared, -1, keys), v).view(rows, heads, n, -1)


class EfficientAttention(nn.Module):
    """Multi-head self-attention: projections around preheat's kernels.

    Args:
        dim: width of the input and output.
        num_heads: number of heads; must divide `dim`.
        dropout: dropout on the probabilities in training.
        causal: each token sees itself and earlier tokens.
        memory_efficient: memory linear in length; False: materializes all scores (for comparison).

    Raises:
        ValueError: invalid sizes or dropout.

    Example:
        >>> layer = EfficientAttention(16, 4, dropout=0.0, causal=True, memory_efficient=True)
        >>> layer(torch.randn(2, 10, 16)).shape
        torch.Size([2, 10, 16])
    """

    def __init__(
        self, dim: int, num_heads: int, dropout: float = 0.0, causal: bool = True, memory_efficient: bool = True
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads: {num_heads} heads do not divide a width of {dim}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: {dropout} must be at least 0 and below 1")
        self.dim, self.num_heads, self.dropout = dim, num_heads, dropout
        self.causal, self.memory_efficient = causal, memory_efficient
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, *, mask: MaskSpec | None = None) -> Tensor:
        """Attends over x [rows, length, dim]; returns the same shape. Fully masked tokens get the bias of `out`.

        Args:
            key_padding_mask: [rows, length], true at keys that are hidden.
            mask: window or documents, replaces `causal`.
        """
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        # q, k and v: [rows, heads, length, head_dim] each.
        mask = mask if mask is not None else MaskSpec(causal=self.causal)
        # torch's convention is true for hidden, a bias' is true for visible.
        bias = None if key_padding_mask is None else ~key_padding_mask.bool()[:, None, None, :]
        dropout, scale = self.dropout if self.training else 0.0, q.shape[-1] ** -0.5
        if self.memory_efficient:
            out = attend_any(q, k, v, mask, scale, dropout=dropout, bias=bias)
        else:
            out = attend_in_chunks(q, k, v, mask, scale, dropout=dropout, bias=bias, queries=length)
        return self.out(out.transpose(1, 2).reshape(rows, length, self.dim))

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, num_heads={self.num_heads}, dropout={self.dropout}, causal={self.causal}, "
            f"memory_efficient={self.memory_efficient}"
        )


class EfficientMultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with preheat's kernels; created by `convert_multihead`.

    `need_weights`: True also returns the weights, by torch's implementation with all scores in memory; False or None
    returns (output, None).
    """

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        # Fused kernels never hold the weights, so torch computes them.
        if need_weights:
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                True,
                attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        # As torch: is_causal is a hint about attn_mask and not a mask itself.
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask: is_causal only describes attn_mask; give the mask too")
        lone = query.ndim == 2  # a single unbatched sequence
        if lone:
            query, key, value = (t[None] for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        # One stacked projection if queries, keys and values have the same width, else three.
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None, None, None)
        weights = (
            self.in_proj_weight.chunk(3)
            if self._qkv_same_embed_dim
            else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        )
        q, k, v = (
            linear(t, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        # The hint replaces the mask tensor, so that a fused kernel can serve. With unequal lengths the mask decides.
        causal = is_causal and query.shape[1] == key.shape[1]
        bias = _join_masks(None if causal else attn_mask, key_padding_mask, self.num_heads)
        dropout = self.dropout if self.training else 0.0
        out = attend_any(q, k, v, MaskSpec(causal=causal), self.head_dim**-0.5, dropout=dropout, bias=bias)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out[0] if lone else out if self.batch_first else out.transpose(0, 1)), None


def _join_masks(attn_mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """Combines torch's two masks (true: hidden, or float) into one bias (true: visible), without expanding them."""
    parts = []
    if attn_mask is not None:
        # [n, m], or [rows * heads, n, m]
        parts.append(attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, heads)))
    if padding is not None:
        parts.append(padding[:, None, None, :])
    parts = [~p if p.dtype == torch.bool else p for p in parts]
    if len(parts) < 2:
        return parts[0] if parts else None
    if all(p.dtype == torch.bool for p in parts):  # both say visible
        return parts[0] & parts[1]
    # A float mask is added to the scores, so a bool one becomes 0 and -inf.
    floats = [
        p if p.dtype != torch.bool else torch.zeros_like(p, dtype=torch.float32).masked_fill(~p, float("-inf"))
        for p in parts
    ]
    return floats[0] + floats[1]


def convert_multihead(model: nn.Module) -> int:
    """Switches every torch.nn.MultiheadAttention of a model to preheat's kernels in place; weights and names stay.

    Only the class of each module changes, so that references from optimizers, hooks and parents stay valid.

    Returns:
        The number of changed modules.

    Raises:
        ValueError: a module uses bias_k, bias_v or add_zero_attn, or is a subclass.
    """
    # All modules are checked before the first one changes, so that an error leaves the model as it was.
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    modules = [(name, m) for name, m in modules if not isinstance(m, EfficientMultiheadAttention)]
    for name, module in modules:
        # A subclass may override forward, which the new class would hide.
        if type(module) is not nn.MultiheadAttention:
            raise ValueError(
                f"{name}: {type(module).__name__} changes torch's MultiheadAttention, so it cannot be replaced"
            )
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            raise ValueError(
                f"{name}: bias_k, bias_v and add_zero_attn have no efficient kernel; build it without them"
            )
    for _, module in modules:
        module.__class__ = EfficientMultiheadAttention
    return len(modules)
