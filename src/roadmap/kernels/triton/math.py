"""The pieces every Triton kernel shares: float32-accurate scores out of half-precision products, and H.

A unit vector u is kept as two float16 vectors, hi + lo = 4096·u to 22 bits, and a score is three float16 products,

    q·g = 2⁻²⁴ (q_lo·g_hi + q_hi·g_lo + q_hi·g_hi)        (lo·lo is below the last bit)

The tensor cores add with truncation, which over 512 dimensions would bias a score near 0.8 by 2e-6. So no
accumulator lives longer than one block of 64 dimensions (of 16 where there are no more than 64); the blocks are added
in float32 with rounding. Measured on an H200 over 4096 x 4096 scores: error 1.0e-7 rms where cuBLAS float32 has 2.5e-7,
at four times its speed (docs/kernel-design.md). An element's arithmetic does not depend on where in a tile it lies, so
equal vectors tie exactly.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# The interpreter walks tiles in Python, and small ones meet more edges on small inputs.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEPTH = 16 if _INTERPRETED else 64  # dimensions per accumulator; vectors are padded to a multiple of it
_PORTABLE = tl.constexpr(_INTERPRETED)
TILE = 16 if _INTERPRETED else 128  # rows and columns of a tile of scores; matrices are padded to a multiple of it

# The score of what is no negative: so far below every threshold that it adds nothing, whatever tau is.
ABSENT = tl.constexpr(-1000.0)


@triton.jit
def _sum_of_squares(Row, scale, row, M, D, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, PADDED, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(Row + d, mask=(d < D) & (row < M), other=0.0).to(tl.float32) * scale
        square += x * x
    return tl.sum(square, 0)


@triton.jit
def unit_rows(
    X, Order, Hi, Lo, Norms, M, D, stride, PADDED: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr
):
    """Row r of Hi and Lo: vector Order[r] at length 4096, split; zeros in the padding. Norms[r]: the length it had."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_ORDER:
        source = tl.load(Order + row, mask=row < M, other=0)
    scale = 1.0
    square = _sum_of_squares(X + source * stride, scale, row, M, D, PADDED, BLOCK)
    if (square < 8.271806125530277e-25) & (row < M):  # 2⁻⁸⁰: squares may have vanished
        scale = 1.2379400392853803e27  # 2⁹⁰
        square = _sum_of_squares(X + source * stride, scale, row, M, D, PADDED, BLOCK)
    if square > 1.2676506002282294e30:  # 2¹⁰⁰: squares may have overflowed
        scale = 8.077935669463161e-28  # 2⁻⁹⁰
        square = _sum_of_squares(X + source * stride, scale, row, M, D, PADDED, BLOCK)
    norm = tl.sqrt_rn(square)
    length = norm / scale
    tl.store(Norms + row, length, mask=row < M)
    poison = (length + 1.0 / length) * 0.0  # NaN scores where there is no direction
    for start in range(0, PADDED, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(X + source * stride + d, mask=(d < D) & (row < M), other=0.0).to(tl.float32) * scale
        u = tl.where(row < M, tl.div_rn(x, norm) + poison, 0.0) * 4096.0
        hi = u.to(tl.float16)
        lo = (u - hi.to(tl.float32)).to(tl.float16)
        tl.store(Hi + row * PADDED + d, hi, mask=d < PADDED)
        tl.store(Lo + row * PADDED + d, lo, mask=d < PADDED)


@triton.jit
def score_tile(
    QHi, QLo, GHi, GLo, row_first, column_first,
    DIM: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scores of BM rows x BN columns, float32; the tile must lie inside the padded matrices.

    64-bit addresses are scalars and the offsets within a tile 32-bit: registers are what limits these kernels.
    """
    STEP: tl.constexpr = 16 if DIM <= DEPTH else DEPTH  # one accumulator for all of a short vector truncates too often
    d = tl.arange(0, STEP)
    q = tl.arange(0, BM)[:, None] * DIM + d[None, :]
    g = tl.arange(0, BN)[None, :] * DIM + d[:, None]
    q_first = tl.cast(row_first, tl.int64) * DIM
    g_first = tl.cast(column_first, tl.int64) * DIM
    scores = tl.zeros((BM, BN), tl.float32)
    for start in range(0, DIM, STEP):
        q_hi = tl.load(QHi + q_first + start + q)
        g_hi = tl.load(GHi + g_first + start + g)
        part = tl.dot(q_hi, tl.load(GLo + g_first + start + g))
        part = tl.dot(tl.load(QLo + q_first + start + q), g_hi, part)
        part = tl.dot(q_hi, g_hi, part)
        scores += part
    return scores * 5.9604644775390625e-08  # 2⁻²⁴


@triton.jit
def exp2(x):
    if _PORTABLE:
        power = tl.exp2(x)
    else:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return power


@triton.jit
def reciprocal(x):
    if _PORTABLE:
        inverse = 1.0 / x
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse


@triton.jit
def sigmoid(t, inv_tau):
    x = t * (inv_tau * -1.4426950408889634)
    if _PORTABLE:
        smooth = 1.0 / (1.0 + tl.exp2(x))
    else:  # two special functions and an addition; the portable form spends a dozen instructions on denormals
        smooth = tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return smooth


@triton.jit
def step_and_slope(t, inv_tau, rho_tau, delta, jump, top, SUPAP: tl.constexpr):
    """H⁻(t), and tau times its derivative: Eq. (4), or the sigmoid of SmoothAP.

    `rho_tau` is rho · tau, `jump` what is added from t = 0 on, `top` where the linear part begins.
    """
    smooth = sigmoid(t, inv_tau)
    slope = smooth - smooth * smooth
    if SUPAP:
        far = t > delta
        value = tl.where(far, (rho_tau * inv_tau) * (t - delta) + top, smooth + tl.where(t >= 0, jump, 0.0))
        slope = tl.where(far, rho_tau, slope)
    else:
        value = smooth
    return value, slope
