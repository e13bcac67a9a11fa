"""Triton kernels. Import only on CUDA, or on a CPU with Triton's interpreter (TRITON_INTERPRET=1).

Seeds are passed as two 31-bit halves. Arguments that change between steps are excluded from specialization, which would
recompile the kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "adamw_kernel",
    "eight_bits_kernel",
    "gated_silu_backward_kernel",
    "gated_silu_kernel",
    "nf4_kernel",
    "rotary_kernel",
]


@triton.jit
def nf4_kernel(codes, scales, ranges, pairs, levels, out, n_bytes, last, DOUBLE: tl.constexpr, BYTES: tl.constexpr):
    """Dequantizes `BYTES` bytes of two weights each, the first in the high half; multiplies in fp32 and rounds once.

    Args:
        scales: uint8 with `DOUBLE`, else fp32; one per 32 bytes.
        ranges: fp32, one per 256 scales, with their mean at `last`.
        pairs: fp32 [256, 2], the two weights of a byte. The first 16 rows hold each level in turn, in few cache lines.
        levels: fp32 [256], levels of an 8-bit scale.
    """
    # int64: a large embedding has more than 2**31 elements.
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    mask = at < n_bytes
    byte = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    # Blocks of 64 weights share a scale: 32 bytes.
    block = at // 32
    if DOUBLE:
        level = tl.load(scales + block, mask=mask, other=0).to(tl.int32)
        # Double quantization: scale = level * range of its 256 scales + the mean of all.
        scale = tl.load(levels + level) * tl.load(ranges + block // 256, mask=mask, other=0.0) + tl.load(ranges + last)
    else:
        scale = tl.load(scales + block, mask=mask, other=0.0)
    # [BYTES, 2], flat in the order of the weights. Column 1 of row n is level n for the first 16 rows.
    both = tl.join(tl.load(pairs + 2 * (byte >> 4) + 1) * scale, tl.load(pairs + 2 * (byte & 15) + 1) * scale)
    to = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out + to, tl.reshape(both, (2 * BYTES,)).to(out.dtype.element_ty), mask=to < 2 * n_bytes)


@triton.jit
def _one_less_power(y):
    """1 - exp(y) for y <= 0, precise near 0, as Adam's bias correction of the first steps needs."""
    # -(e^y - 1) = -y (1 + y/2 (1 + y/3 (1 + ...))): nine terms of the Taylor series, in two lines.
    series = 1.0 + y / 6 * (1.0 + y / 7 * (1.0 + y / 8 * (1.0 + y / 9)))
    series = 1.0 + y / 2 * (1.0 + y / 3 * (1.0 + y / 4 * (1.0 + y / 5 * series)))
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit(
    do_not_specialize=[
        "lr",
        "decay",
        "more1",
        "less2",
        "more2",
        "log1",
        "log2",
        "eps",
        "seed_low",
        "seed_high",
        "base",
        "shift",
        "apart",
        "inner",
        "far",
    ]
)
def adamw_kernel(
    weight, grad, mean, square, master, step, found_inf,
    lr, decay, more1, less2, more2, log1, log2, eps, seed_low, seed_high, base, shift, n, apart, inner, far,
    MASTER: tl.constexpr, GUARDED: tl.constexpr, SHIFTED: tl.constexpr, RUNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Fused AdamW of a half-precision weight, equal to torch's. `MASTER`: rounds the fp32 master; else rounds
    stochastically.

    One Philox counter yields four sets of random bits and depends on the position in the full parameter, so that a
    shard is rounded as it would be on one device. Changes nothing if `found_inf` is not 0.

    Args:
        step: fp32, number of earlier updates.
        base, shift: the shard starts `shift` elements after the start of block `base`; without a shift, loads are wide.
        n, apart, inner, far: elements; with `RUNS`, those of each of several ranges. Groups of `inner` begin `far`
            elements after each other in the full parameter, and the ranges of a group `apart` elements. The grid's
            first axis counts ranges.
        decay: 1 - lr * weight_decay. more1, more2: 1 - beta. less2: beta2. log1, log2: natural logarithms of the betas.
    """
    # 31 bits each: Triton passes an int argument below 2**31 as int32 and a larger one as int64, which are two kernels.
    low, high = seed_low.to(tl.uint64), seed_high.to(tl.uint64)
    block = tl.program_id(1 if RUNS else 0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    if RUNS:
        run = tl.program_id(0).to(tl.int64)
        place = (base * (4 * LANES) + shift) + run // inner * far + run % inner * apart
        base, shift = place // (4 * LANES), place % (4 * LANES)
        weight += run * n
        grad += run * n
        mean += run * n
        square += run * n
        master += run * n
    # Four uint32 for each lane: one for each part of the block.
    random = tl.randint4x((high << 31) | low, ((base + block) * LANES + lanes).to(tl.int32))
    # The caller advances the step after the kernel.
    t = tl.load(step) + 1.0
    # 1 - beta^t = 1 - exp(t log beta)
    size = lr / _one_less_power(t * log1)
    root = tl.sqrt(_one_less_power(t * log2))
    if GUARDED:
        bad = tl.load(found_inf) != 0.0
    for part in tl.static_range(4):
        at = block * (4 * LANES) + part * LANES + lanes
        mask = at < n
        # The random bits belong to positions of the full parameter; the shard begins `shift` elements into its block.
        if SHIFTED:
            at -= shift
            mask = (at >= 0) & (at < n)
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        m0 = tl.load(mean + at, mask=mask, other=0.0)
        v0 = tl.load(square + at, mask=mask, other=0.0)
        w0 = tl.load((master if MASTER else weight) + at, mask=mask, other=0.0).to(tl.float32)
        m = m0 + more1 * (g - m0)
        v = v0 * less2 + more2 * g * g
        # w (1 - lr wd) - lr mhat / (sqrt(vhat) + eps), with mhat = m / (1 - beta1^t) and vhat = v / (1 - beta2^t)
        w = w0 * decay - size * m / (tl.sqrt(v) / root + eps)
        if GUARDED:
            m, v, w = tl.where(bad, m0, m), tl.where(bad, v0, v), tl.where(bad, w0, w)
        half = w
        if not MASTER:  # an unchanged weight is already a bf16 number, which the noise below its last bit cannot change
            # As `stochastic_round_`: 16 random bits below bf16's last one, then truncation.
            noise = (random[part] >> 8).to(tl.int32, bitcast=True) & 0xFFFF
            rounded = ((w.to(tl.int32, bitcast=True) + noise) & -65536).to(tl.float32, bitcast=True)
            # Infinity and NaN stay: noise would turn infinity into NaN.
            half = tl.where(tl.abs(w) < float("inf"), rounded, w)
        tl.store(mean + at, m, mask=mask)
        tl.store(square + at, v, mask=mask)
        tl.store(weight + at, half.to(weight.dtype.element_ty), mask=mask)
        if MASTER:
            tl.store(master + at, w, mask=mask)


@triton.jit
def eight_bits_kernel(
    x, codes, scales, out, rows, outputs, inputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr
):  # fmt: skip
    """out [rows, outputs] = x [rows, inputs] @ codes [outputs, inputs].t() * scales, for few rows; reads each code
    once.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, inputs, INPUTS):
        # [INPUTS]: this step's part of the sum
        place = start + tl.arange(0, INPUTS)
        left_mask = (row < rows)[:, None] & (place < inputs)[None, :]
        # [ROWS, INPUTS]
        left = tl.load(x + row.to(tl.int64)[:, None] * inputs + place[None, :], mask=left_mask, other=0.0)
        right_mask = (output < outputs)[None, :] & (place < inputs)[:, None]
        # [INPUTS, OUTPUTS], transposed by its strides
        right = tl.load(codes + output.to(tl.int64)[None, :] * inputs + place[:, None], mask=right_mask, other=0)
        sums += tl.dot(left, right.to(left.dtype))
    # One scale per output, so it can be applied after the sum.
    scale = tl.load(scales + output, mask=output < outputs, other=0.0).to(tl.float32)
    to = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(
        out + to,
        (sums * scale[None, :]).to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < outputs)[None, :],
    )


@triton.jit
def gated_silu_kernel(a, b, out, n, LANES: tl.constexpr):
    """out = silu(a) * b, computed in fp32 and rounded once."""
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = at < n
    x = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated_silu_backward_kernel(grad, a, b, by_a, by_b, n, OVERWRITE: tl.constexpr, LANES: tl.constexpr):
    """Gradients of silu(a) * b from that of the result; `OVERWRITE`: writes silu(a) * b over `grad`."""
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = at < n
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(x)
    silu = x * share
    # silu'(x) = s + x s (1 - s), with s = sigmoid(x)
    tl.store(by_a + at, (g * y * (share + silu * (1.0 - share))).to(by_a.dtype.element_ty), mask=mask)
    tl.store(by_b + at, (g * silu).to(by_b.dtype.element_ty), mask=mask)
    if OVERWRITE:
        tl.store(grad + at, (silu * y).to(grad.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    x, cos, sin, out, row_stride, head_stride, token_stride, angle_stride, length, heads, width,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotates the halves of each head of one token against each other; `BACK`: by the transposed rotation.

    Args:
        x: [rows, heads, length, width] of these strides, the last 1; out: contiguous [rows, length, heads, width].
        cos, sin: [rows or 1, length, width], contiguous; `angle_stride` is that of their rows, 0 if there is one.
    """
    place = tl.program_id(0).to(tl.int64)
    row, token = place // length, place % length
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    half = width // 2
    mask = (head < heads) & (column < half)
    angle = row * angle_stride + token * width + column
    begin = row * row_stride + token * token_stride + head * head_stride + column
    first = tl.load(x + begin, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + begin + half, mask=mask, other=0.0).to(tl.float32)
    cos1 = tl.load(cos + angle, mask=column < half, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + angle + half, mask=column < half, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + angle, mask=column < half, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + angle + half, mask=column < half, other=0.0).to(tl.float32)
    if BACK:
        turned1, turned2 = first * cos1 + second * sin2, second * cos2 - first * sin1
    else:
        turned1, turned2 = first * cos1 - second * sin1, second * cos2 + first * sin2
    to = (place * heads + head) * width + column
    tl.store(out + to, turned1.to(out.dtype.element_ty), mask=mask)
    tl.store(out + to + half, turned2.to(out.dtype.element_ty), mask=mask)
