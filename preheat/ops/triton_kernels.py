"""Triton kernels. Import only on CUDA, or on a CPU with Triton's interpreter (TRITON_INTERPRET=1).

Seeds are passed as two 31-bit halves. Arguments that change between steps are excluded from specialization, which would
recompile the kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["adamw_kernel", "eight_bits_kernel", "nf4_kernel"]


@triton.jit
def nf4_kernel(codes, scales, ranges, pairs, levels, out, n_bytes, last, DOUBLE: tl.constexpr, BYTES: tl.constexpr):
    """Dequantizes `BYTES` bytes of two weights each, the first in the high half; multiplies in fp32 and rounds once.

    Args:
        scales: uint8 with `DOUBLE`, else fp32; one per 32 bytes.
        ranges: fp32, one per 256 scales, with their mean at `last`.
        pairs: fp32 [256, 2], the two weights of a byte. The first 16 rows hold each level in turn, in few cache lines.
        levels: fp32 [256], levels of an 8-bit scale.
    """
    # 64-bit offsets: a stacked weight may have more than 2^31 elements.
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    mask = at < n_bytes
    byte = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    block = at // 32
    if DOUBLE:
        level = tl.load(scales + block, mask=mask, other=0).to(tl.int32)
        # Without fused multiply-add (the caller's option), so that the bits equal the CPU's.
        scale = tl.load(levels + level) * tl.load(ranges + block // 256, mask=mask, other=0.0) + tl.load(ranges + last)
    else:
        scale = tl.load(scales + block, mask=mask, other=0.0)
    # Row n < 16 of `pairs` is the byte n, whose high half is 0 and whose low half is n: its second column is level n.
    both = tl.join(tl.load(pairs + 2 * (byte >> 4) + 1) * scale, tl.load(pairs + 2 * (byte & 15) + 1) * scale)
    # Joined as [BYTES, 2] and flattened, the two weights of a byte are neighbors, so that stores are contiguous.
    to = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out + to, tl.reshape(both, (2 * BYTES,)).to(out.dtype.element_ty), mask=to < 2 * n_bytes)


@triton.jit
def _one_less_power(y):
    """1 - exp(y) for y <= 0, precise near 0, as Adam's bias correction of the first steps needs."""
    # Taylor series of expm1, nested, to y^9 / 9!: at -0.5 the next term is 3e-10, below fp32's resolution.
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
    ]
)
def adamw_kernel(
    weight, grad, mean, square, master, step, found_inf,
    lr, decay, more1, less2, more2, log1, log2, eps, seed_low, seed_high, base, shift, n,
    MASTER: tl.constexpr, GUARDED: tl.constexpr, SHIFTED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Fused AdamW of a half-precision weight, equal to torch's. `MASTER`: rounds the fp32 master; else rounds
    stochastically.

    One Philox counter yields four sets of random bits and depends on the position in the full parameter, so that a
    shard is rounded as it would be on one device. Changes nothing if `found_inf` is not 0.

    Args:
        step: fp32, number of earlier updates.
        base, shift: the shard starts `shift` elements after the start of block `base`; without a shift, loads are wide.
        decay: 1 - lr * weight_decay. more1, more2: 1 - beta. less2: beta2. log1, log2: natural logarithms of the betas.
    """
    low, high = seed_low.to(tl.uint64), seed_high.to(tl.uint64)
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    # Four sets of bits serve four parts of LANES elements: one Philox call per four elements.
    random = tl.randint4x((high << 31) | low, ((base + block) * LANES + lanes).to(tl.int32))
    t = tl.load(step) + 1.0
    # Bias correction: 1 - beta^t = 1 - exp(t log beta)
    size = lr / _one_less_power(t * log1)
    root = tl.sqrt(_one_less_power(t * log2))
    if GUARDED:
        bad = tl.load(found_inf) != 0.0
    for part in tl.static_range(4):
        at = block * (4 * LANES) + part * LANES + lanes
        mask = at < n
        # Lanes before the shard's first element are masked, so that each element keeps the random bits of its position
        # in the full parameter.
        if SHIFTED:
            at -= shift
            mask = (at >= 0) & (at < n)
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        m0 = tl.load(mean + at, mask=mask, other=0.0)
        v0 = tl.load(square + at, mask=mask, other=0.0)
        w0 = tl.load((master if MASTER else weight) + at, mask=mask, other=0.0).to(tl.float32)
        m = m0 + more1 * (g - m0)
        v = v0 * less2 + more2 * g * g
        # The order of torch.optim.AdamW: decoupled decay first, eps after the correction of the second moment.
        w = w0 * decay - size * m / (tl.sqrt(v) / root + eps)
        if GUARDED:
            # A skipped update writes the old values back; the flag is read on the device, so that the host need not
            # wait for it.
            m, v, w = tl.where(bad, m0, m), tl.where(bad, v0, v), tl.where(bad, w0, w)
        half = w
        if not MASTER:  # an unchanged weight is already a bf16 number, which the noise below its last bit cannot change
            # bf16 is the upper half of fp32. Adding 16 random bits below it and cutting them off rounds up with the
            # probability of the remainder, so that updates below bf16's spacing are not lost on average. In inf and NaN
            # the noise would change the kind of number.
            noise = (random[part] >> 8).to(tl.int32, bitcast=True) & 0xFFFF
            rounded = ((w.to(tl.int32, bitcast=True) + noise) & -65536).to(tl.float32, bitcast=True)
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
    # One program per tile [ROWS, OUTPUTS], with fp32 sums over all inputs.
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, inputs, INPUTS):
        place = start + tl.arange(0, INPUTS)
        left_mask = (row < rows)[:, None] & (place < inputs)[None, :]
        left = tl.load(x + row.to(tl.int64)[:, None] * inputs + place[None, :], mask=left_mask, other=0.0)
        right_mask = (output < outputs)[None, :] & (place < inputs)[:, None]
        right = tl.load(codes + output.to(tl.int64)[None, :] * inputs + place[:, None], mask=right_mask, other=0)
        # Codes up to 127 are exact in half precision; the scale follows once, at the end.
        sums += tl.dot(left, right.to(left.dtype))
    scale = tl.load(scales + output, mask=output < outputs, other=0.0).to(tl.float32)
    to = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(
        out + to,
        (sums * scale[None, :]).to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < outputs)[None, :],
    )
