"""Functions that several kernels need, as Triton code: float32 in, float32 out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(t, EXACT: tl.constexpr):
    """``e^t``. Triton's own loses a bit for every factor 2 of ``|t|``; EXACT stays within 2 ulp at three more steps."""
    if EXACT:
        whole = t * 1.4426950408889634
        rest = tl.fma(t, 1.4426950408889634, -whole) + t * 1.925963033500e-08
        # An overflow must stay one: its rest is not a number.
        return tl.exp2(whole) * (1.0 + tl.where(tl.abs(t) < 200.0, rest * 0.6931471805599453, 0.0))
    return tl.exp(t)


@triton.jit
def sigmoid(t, EXACT: tl.constexpr):
    """``1 / (1 + e^-t)``; not EXACT: to about 2^-21 in 5 instructions, for results of 16 bits."""
    if EXACT:
        return 1.0 / (1.0 + exp(-t, True))
    else:
        root = tl.rsqrt(1.0 + tl.exp2(t * -1.4426950408889634))
        return root * root


@triton.jit
def tanh(t):
    """``tanh t`` to a few ulp: a rational function near 0, where the quotient of exponentials cancels."""
    u = t * t
    top = t * (135135.0 + u * (17325.0 + u * (378.0 + u)))
    near = top / (135135.0 + u * (62370.0 + u * (3150.0 + u * 28.0)))
    far = 1.0 - 2.0 / (1.0 + exp(2.0 * tl.abs(t), True))
    return tl.where(tl.abs(t) < 0.8, near, tl.where(t < 0.0, -far, far))


@triton.jit
def expm1(t):
    """``e^t - 1`` without cancellation near 0."""
    e = exp(t, True)
    return tl.where(tl.abs(t) < 1.0, tanh(0.5 * t) * (e + 1.0), e - 1.0)


@triton.jit
def log1p(t):
    """``ln(1 + t)`` for ``0 <= t <= 1`` (Kahan's form: the rounding of ``1 + t`` divides out)."""
    u = 1.0 + t
    return tl.where(u == 1.0, t, tl.log(u) * (t / tl.where(u == 1.0, 1.0, u - 1.0)))
