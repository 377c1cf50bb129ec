"""bias_act on GPUs: Triton kernels for the value and its two derivatives, in the memory order of x.

Dense memory is a row of elements whose bias index is ``offset // inner % size``: ``inner`` is 1 where the bias lies
along the innermost axis (channels_last), else the product of the axes inside it. Elementwise kernels walk that row
in vectors of V elements that share one bias or read V consecutive ones, so the division is done once per vector.
The bias gradient is summed by the kernel that makes dx, in two fixed stages: programs write sums of their own part,
then those are added up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.gpu import Launch, dense, form, new, planned, power_of_2
from .._shared.gpu_math import exp, expm1, log1p, sigmoid, tanh
from .._shared.layout import to_layout
from .._shared.tuning import tuned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Elements of a program, and programs that sum one bias gradient, about.
_BLOCK, _PARTS = tuned(__name__, _BLOCK=(2048, 1024, 4096), _PARTS=(1024, 512, 2048))

_RELU, _LRELU, _TANH, _SIGMOID, _ELU, _SELU, _SOFTPLUS, _SWISH = (tl.constexpr(i) for i in range(1, 9))
_SCALE, _ALPHA = tl.constexpr(1.0507009873554805), tl.constexpr(1.6732632423543773)  # selu's


# --- device functions -----------------------------------------------------------------------------------------


@triton.jit
def _value(t, alpha, ACT: tl.constexpr):
    if ACT == _RELU:
        t = tl.where(t <= 0.0, 0.0, t)
    elif ACT == _LRELU:
        t = tl.where(t > 0.0, t, t * alpha)
    elif ACT == _TANH:
        t = tanh(t)
    elif ACT == _SIGMOID:
        t = sigmoid(t, True)
    elif ACT == _ELU:
        t = tl.where(t > 0.0, t, expm1(t))
    elif ACT == _SELU:
        t = _SCALE * tl.where(t > 0.0, t, _ALPHA * expm1(t))
    elif ACT == _SOFTPLUS:
        t = tl.where(t <= 0.0, 0.0, t) + log1p(exp(-tl.abs(t), True))
    elif ACT == _SWISH:
        t = t / (1.0 + exp(-t, True))
    return t


@triton.jit
def _slope(t, alpha, ACT: tl.constexpr):
    if ACT == _RELU:
        t = tl.where(t > 0.0, 1.0, 0.0)
    elif ACT == _LRELU:
        t = tl.where(t > 0.0, 1.0, alpha)
    elif ACT == _TANH:
        u = exp(-2.0 * tl.abs(t), True)
        t = 4.0 * u / ((1.0 + u) * (1.0 + u))
    elif ACT == _SIGMOID:
        t = sigmoid(t, True) * sigmoid(-t, True)
    elif ACT == _ELU:
        t = tl.where(t > 0.0, 1.0, exp(t, True))
    elif ACT == _SELU:
        t = _SCALE * tl.where(t > 0.0, 1.0, _ALPHA * exp(t, True))
    elif ACT == _SOFTPLUS:
        t = sigmoid(t, True)
    elif ACT == _SWISH:
        s = sigmoid(t, True)
        t = s * (1.0 + t * sigmoid(-t, True))
    else:
        t = tl.full(t.shape, 1.0, tl.float32)
    return t


@triton.jit
def _curvature(t, ACT: tl.constexpr):
    if ACT == _TANH:
        u = exp(-2.0 * tl.abs(t), True)
        t = -2.0 * tanh(t) * (4.0 * u / ((1.0 + u) * (1.0 + u)))
    elif ACT == _SIGMOID:
        t = sigmoid(t, True) * sigmoid(-t, True) * -tanh(0.5 * t)  # 1 - 2 sigmoid(t)
    elif ACT == _ELU:
        t = tl.where(t > 0.0, 0.0, exp(t, True))
    elif ACT == _SELU:
        t = _SCALE * _ALPHA * tl.where(t > 0.0, 0.0, exp(t, True))
    elif ACT == _SOFTPLUS:
        t = sigmoid(t, True) * sigmoid(-t, True)
    elif ACT == _SWISH:
        t = sigmoid(t, True) * sigmoid(-t, True) * (2.0 - t * tanh(0.5 * t))
    else:
        t = tl.zeros(t.shape, tl.float32)
    return t


@triton.jit
def _through(dy, t, alpha, gain, clamp, ACT: tl.constexpr, CLAMPED: tl.constexpr, BY_OUTPUT: tl.constexpr):
    """From dy to dx; ``t`` is the activation's argument or, BY_OUTPUT, the op's result, whose sign says the same."""
    dx = dy * gain * _slope(t, alpha, ACT)
    if CLAMPED:
        v = t if BY_OUTPUT else gain * _value(t, alpha, ACT)
        dx = tl.where(tl.abs(v) < clamp, dx, 0.0)
    return dx


@triton.jit
def _vectors(b, n, size, inner, BLOCK: tl.constexpr, V: tl.constexpr, INNERMOST: tl.constexpr, WIDE: tl.constexpr):
    """Start, offsets and mask of a program's elements [BLOCK / V, V], and their biases (0 where b is None)."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row, v = tl.arange(0, BLOCK // V) * V, tl.arange(0, V)
    offsets = row[:, None] + v[None, :]
    mask = offsets < n - start
    if b is None:
        bias = 0.0
    elif INNERMOST:
        column = ((start % size).to(tl.int32) + row) % size
        bias = tl.load(b + (column[:, None] + v[None, :]), mask=mask, other=0.0).to(tl.float32)
    else:
        rest = start % inner
        rest = rest if WIDE else rest.to(tl.int32)
        index = ((rest + row) // inner + (start // inner) % size) % size
        bias = tl.load(b + index, mask=row < n - start, other=0.0).to(tl.float32)[:, None]
    return start, offsets, mask, bias


# --- kernels --------------------------------------------------------------------------------------------------


# A program owns BLOCK consecutive elements: one read, one write, nothing kept.
@triton.jit
def _value_kernel(
    x, b, y, n, size, inner, alpha, gain, clamp,
    ACT: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr, V: tl.constexpr, INNERMOST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    start, offsets, mask, bias = _vectors(b, n, size, inner, BLOCK, V, INNERMOST, WIDE)
    t = tl.load(x + start + offsets, mask=mask).to(tl.float32)
    v = gain * _value(t if b is None else t + bias, alpha, ACT)
    if CLAMPED:  # keeps a NaN
        v = tl.where(v > clamp, clamp, tl.where(v < -clamp, -clamp, v))
    tl.store(y + start + offsets, v.to(y.dtype.element_ty), mask=mask)


# As above: dx from dy and from x with its bias, from y, or from nothing (a linear function without clamp).
@triton.jit
def _backward_kernel(
    dy, x, b, y, dx, n, size, inner, alpha, gain, clamp,
    ACT: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr, V: tl.constexpr, INNERMOST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    start, offsets, mask, bias = _vectors(b, n, size, inner, BLOCK, V, INNERMOST, WIDE)
    d = tl.load(dy + start + offsets, mask=mask).to(tl.float32)
    if y is not None:
        d = _through(d, tl.load(y + start + offsets, mask=mask).to(tl.float32), alpha, gain, clamp, ACT, CLAMPED, True)
    elif x is not None:
        t = tl.load(x + start + offsets, mask=mask).to(tl.float32)
        d = _through(d, t if b is None else t + bias, alpha, gain, clamp, ACT, CLAMPED, False)
    else:
        d *= gain
    tl.store(dx + start + offsets, d.to(dx.dtype.element_ty), mask=mask)


# Memory as [outer, size, inner]. A program owns BC biases and, of ROUNDS outer indices, STEPS tiles of BP inner ones
# each (INNERMOST: the inner axis is the outer one). It writes dx, adds it up per thread and reduces once at the end.
@triton.jit
def _backward_sum_kernel(
    dy, x, b, y, dx, part, outer, size, inner, chunks, tiles, alpha, gain, clamp,
    ACT: tl.constexpr, CLAMPED: tl.constexpr, ROUNDS: tl.constexpr, STEPS: tl.constexpr,
    BC: tl.constexpr, BP: tl.constexpr, INNERMOST: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile, chunk, turn = pid % tiles, pid // tiles % chunks, pid // tiles // chunks
    c = tile * BC + tl.arange(0, BC)
    p0 = chunk.to(tl.int64) * (STEPS * BP)
    p = p0 + tl.arange(0, BP)
    bias = 0.0
    if b is not None:
        bias = tl.load(b + c, mask=c < size, other=0.0).to(tl.float32)
        bias = bias[None, :] if INNERMOST else bias[:, None]
    total = tl.zeros((BP, BC) if INNERMOST else (BC, BP), tl.float32)
    for i in range(ROUNDS * STEPS):
        image = turn.to(tl.int64) * ROUNDS + i // STEPS
        q = p + i % STEPS * BP
        if INNERMOST:
            mask = (q < inner)[:, None] & (c < size)[None, :]
            at = q[:, None] * size + c[None, :]
        else:
            mask = (c < size)[:, None] & (q < inner)[None, :] & (image < outer)
            at = image * size * inner + c.to(tl.int64)[:, None] * inner + q[None, :]
        d = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        if y is not None:
            t = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
            d = _through(d, t, alpha, gain, clamp, ACT, CLAMPED, True)
        elif x is not None:
            t = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            d = _through(d, t if b is None else t + bias, alpha, gain, clamp, ACT, CLAMPED, False)
        else:
            d *= gain
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
        total += tl.where(mask, d, 0.0)
    at = part + (turn * chunks + chunk).to(tl.int64) * size + c
    tl.store(at, tl.sum(total, 0 if INNERMOST else 1), mask=c < size)


# As the value: v * dy * gain * act''(t), 0 where clamped.
@triton.jit
def _second_kernel(
    v, dy, x, b, out, n, size, inner, alpha, gain, clamp,
    ACT: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr, V: tl.constexpr, INNERMOST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    start, offsets, mask, bias = _vectors(b, n, size, inner, BLOCK, V, INNERMOST, WIDE)
    t = tl.load(x + start + offsets, mask=mask).to(tl.float32)
    t = t if b is None else t + bias
    r = tl.load(v + start + offsets, mask=mask).to(tl.float32) * tl.load(dy + start + offsets, mask=mask).to(tl.float32)
    r *= gain * _curvature(t, ACT)
    if CLAMPED:
        r = tl.where(tl.abs(gain * _value(t, alpha, ACT)) < clamp, r, 0.0)
    tl.store(out + start + offsets, r.to(out.dtype.element_ty), mask=mask)


# --- launches -------------------------------------------------------------------------------------------------


def _axes(shape: tuple[int, ...], dim: int, channels_last: bool, biased: bool) -> tuple[int, int, int]:
    """Memory as ``outer, size, inner`` around the axis of the bias."""
    if not biased:
        return 1, 1, math.prod(shape)
    order = [*range(len(shape))]
    if channels_last:
        order.append(order.pop(1))
    at = order.index(dim)
    return math.prod(shape[d] for d in order[:at]), shape[dim], math.prod(shape[d] for d in order[at + 1 :])


@functools.lru_cache(maxsize=1024)
def _elementwise(
    kernel: triton.JITFunction, shape: tuple[int, ...], dim: int, channels_last: bool,
    dtypes: tuple[torch.dtype | None, ...], biased: bool, scalars: tuple[float, float, float], act: int,
) -> Launch:  # fmt: skip
    """The launch of an elementwise kernel on dense tensors of a shape; ``dtypes`` are those of its tensors."""
    _, size, inner = _axes(shape, dim, channels_last, biased)
    n = math.prod(shape)
    innermost = inner == 1 and biased
    vector = math.gcd(size if innermost else inner, 8)
    constants = (act, scalars[2] >= 0, _BLOCK, vector, innermost, inner >= 2**31 - _BLOCK)
    return Launch(kernel, -(-n // _BLOCK), (n, size, inner, *scalars), constants)


@planned
def bias_act(
    x: Tensor, b: Tensor | None, dim: int, act: int, alpha: float, gain: float, clamp: float
) -> Callable[..., Tensor]:
    """``y`` of the shape, dtype and layout of ``x``; see ``reference.py``."""
    channels_last, whole, _ = form(x.shape, x.stride())
    scalars = (float(alpha), float(gain), float(clamp))
    dtypes = (x.dtype, None if b is None else b.dtype)
    launch = _elementwise(_value_kernel, x.shape, dim, channels_last, dtypes, b is not None, scalars, act)
    simple = whole and (b is None or b.is_contiguous())

    def run(x: Tensor, b: Tensor | None, *_: Any) -> Tensor:
        if not simple:
            x, b = to_layout(x, channels_last), dense(b)
        y = torch.empty_like(x) if simple else new(x, x.shape, channels_last)
        launch(x, b, y)
        return y

    return run


@functools.lru_cache(maxsize=256)
def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number).to(dtype).item()


class _Summing(NamedTuple):
    launch: Launch
    parts: int


@functools.lru_cache(maxsize=1024)
def _summing(
    shape: tuple[int, ...], dim: int, channels_last: bool, dtypes: tuple[torch.dtype | None, ...],
    scalars: tuple[float, float, float], act: int,
) -> _Summing:  # fmt: skip
    outer, size, inner = _axes(shape, dim, channels_last, True)
    innermost = inner == 1
    if innermost:
        outer, inner = 1, outer
        channels = min(power_of_2(size), 64)
        pixels = _BLOCK // channels
    else:
        pixels = min(power_of_2(inner), _BLOCK)
        channels = min(power_of_2(size), _BLOCK // pixels)
    tiles, blocks = -(-size // channels), -(-inner // pixels)
    work = max(tiles * blocks * outer // _PARTS, 1)  # tiles of a program
    steps = min(work, blocks, 16)
    rounds = min(max(work // steps, 1), outer, 16)
    chunks, turns = -(-blocks // steps), -(-outer // rounds)
    launch = Launch(
        _backward_sum_kernel, turns * chunks * tiles, (outer, size, inner, chunks, tiles, *scalars),
        (act, scalars[2] >= 0, rounds, steps, channels, pixels, innermost),
    )  # fmt: skip
    return _Summing(launch, turns * chunks)


@planned
def bias_act_backward(
    dy: Tensor, x: Tensor | None, b: Tensor | None, y: Tensor | None, dim: int, act: int, alpha: float, gain: float,
    clamp: float, channels_last: bool, need_db: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:  # fmt: skip
    """``dx`` and ``db``; see ``reference.py``."""
    b = None if x is None else b
    dtypes = tuple(None if t is None else t.dtype for t in (dy, x, b, y))
    limit = _rounded(clamp, dy.dtype) if y is not None and clamp >= 0 else clamp  # y was rounded, so was its limit
    scalars = (float(alpha), float(gain), float(limit))
    shape, parts = dy.shape, 0
    if need_db and dy.numel() > 0:
        launch, parts = _summing(shape, dim, channels_last, dtypes, scalars, act)
    else:
        launch = _elementwise(_backward_kernel, shape, dim, channels_last, dtypes, b is not None, scalars, act)
    simple = form(shape, dy.stride()) == (channels_last, True, dy.stride()) and all(
        t is None or t.stride() == dy.stride() for t in (x, y)
    )

    def run(dy: Tensor, x: Tensor | None, b: Tensor | None, y: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
        if not simple:
            dy = to_layout(dy, channels_last)
            x, y = (None if t is None else to_layout(t, channels_last) for t in (x, y))
        dx = torch.empty_like(dy) if simple else new(dy, shape, channels_last)
        b = None if b is None or x is None else b.contiguous()
        if parts:
            part = new(dy, (parts, shape[dim]), False, torch.float32)
            launch(dy, x, b, y, dx, part)
            return dx, part.sum(0)
        launch(dy, x, b, y, dx)
        return dx, dy.new_zeros(shape[dim] if need_db else 0, dtype=torch.float32)

    return run


def bias_act_second(
    v: Tensor, dy: Tensor, x: Tensor, b: Tensor | None, dim: int, act: int, alpha: float, gain: float, clamp: float
) -> Tensor:
    """``v * dy * gain * act''(t)``; see ``reference.py``."""
    channels_last = form(x.shape, x.stride()).channels_last
    v, dy, x = (to_layout(t, channels_last) for t in (v, dy, x))
    b = None if b is None else b.contiguous()
    out = new(x, x.shape, channels_last)
    dtypes = tuple(None if t is None else t.dtype for t in (v, dy, x, b))
    scalars = (float(alpha), float(gain), float(clamp))
    launch = _elementwise(_second_kernel, x.shape, dim, channels_last, dtypes, b is not None, scalars, act)
    launch(v, dy, x, b, out)
    return out
