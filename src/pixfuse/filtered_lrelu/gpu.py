"""filtered_lrelu on GPUs: one Triton kernel for the value, the tangent and the gradient.

All three resample twice with a factor per sample between: ``D(act(U x))``, ``D(m(U x) * U v)`` and, with the
transposed filters, ``Uᵀ(m(U x) * Dᵀ dy)``. The upsampled image never reaches memory, and ``m`` is computed again.

Scales commute with the leaky ReLU, so the kernel works on samples without the gains and its limit is the clamp
divided by them; one product at the end makes up for it. Layouts as in ``upfirdn2d/gpu.py``: ``planes`` of ``height``
rows of ``width`` pixels of ``inner`` values.
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

from .._shared.gpu import Form, Launch, dense, form, new, planned
from .._shared.layout import dense_strides, to_layout
from .._shared.tuning import tuned
from ..upfirdn2d import upfirdn2d
from ..upfirdn2d.op import filter_size
from .reference import biased

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

(_REGISTERS,) = tuned(__name__, _REGISTERS=(255, 200, 150))  # values that a thread may hold, as _block counts them
_SPILLING = 330  # and what it may hold where the alternative is no kernel at all
_THREADS = 32  # one warp a program: with so many registers, that fills a multiprocessor best
_RESIDENT = 132 * 9 * 32  # about the threads that an H200 runs at a time


@triton.jit
def _weights(ptr, K: tl.constexpr, FLIP: tl.constexpr, THREADS: tl.constexpr):
    weights = ()
    for a in tl.static_range(K):
        weights = weights + (tl.full([THREADS], tl.load(ptr + (a if FLIP else K - 1 - a)), tl.float32),)
    return weights


@triton.jit
def _loaded(ptr, row, height, column, width, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    values = ()
    for r in tl.static_range(ROWS):
        inside = (row + r).to(tl.uint32, bitcast=True) < height.to(tl.uint32)
        at = ptr + tl.cast(width, tl.int64) * r * inner
        for c in tl.static_range(COLUMNS):
            mask = inside & ((column + c).to(tl.uint32, bitcast=True) < width.to(tl.uint32))
            values = values + (tl.load(at, mask, 0.0),)
            at += inner
    return values


@triton.jit
def _biased_rows(
    values, row, height, column, width, bias, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = ()
    for r in tl.static_range(ROWS):
        inside = (row + r).to(tl.uint32, bitcast=True) < height.to(tl.uint32)
        for c in tl.static_range(COLUMNS):
            mask = inside & ((column + c).to(tl.uint32, bitcast=True) < width.to(tl.uint32))
            value = values[r * COLUMNS + c].to(tl.float32)
            rows = rows + (tl.where(mask, value + bias, 0.0) if BIAS else value,)
    return rows


@triton.jit
def _zeros(N: tl.constexpr, THREADS: tl.constexpr, DTYPE: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(N):
        zeros = zeros + (tl.full([THREADS], 0.0, DTYPE),)
    return zeros


@triton.jit
def _upsampled(
    rows,
    weights,
    S: tl.constexpr,
    U: tl.constexpr,
    K: tl.constexpr,
    PAD_X: tl.constexpr,
    PAD_Y: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # WIDTH samples of the upsampled row S of a step, from all input rows that it needs: columns first, then the row.
    # Not by tl.fma: LLVM would vectorise that into more instructions and registers; a * b + c becomes an FMA as well.
    between = ()
    for c in tl.static_range(COLUMNS):
        total = tl.full(rows[0].shape, 0.0, tl.float32)
        for a in tl.static_range((PAD_Y - S) % U, K, U):
            total += weights[a] * rows[(S + a - PAD_Y) // U * COLUMNS + c]
        between = between + (total,)
    samples = ()
    for t in tl.static_range(WIDTH):
        total = tl.full(rows[0].shape, 0.0, tl.float32)
        for a in tl.static_range((PAD_X - t) % U, K, U):
            total += weights[a] * between[(t + a - PAD_X) // U]
        samples = samples + (total,)
    return samples


@triton.jit
def _activated(samples, slope, limit, CONVEX: tl.constexpr, CLAMP: tl.constexpr):
    out = ()
    for t in tl.static_range(len(samples)):
        if CONVEX:  # 0 <= slope <= 1
            w = tl.maximum(samples[t], samples[t] * slope, propagate_nan=tl.PropagateNan.ALL)
        else:
            w = tl.where(samples[t] > 0, samples[t], samples[t] * slope)
        out = out + (tl.clamp(w, -limit, limit, propagate_nan=tl.PropagateNan.ALL) if CLAMP else w,)
    return out


@triton.jit
def _scaled(values, samples, slope, limit, CLAMP: tl.constexpr):  # values times the slope of the activation at samples
    out = ()
    for t in tl.static_range(len(samples)):
        bent = tl.where(samples[t] > 0, 1.0, slope)
        if CLAMP:
            bent = tl.where(tl.abs(samples[t] * bent) > limit, 0.0, bent)
        out = out + (values[t] * bent,)
    return out


@triton.jit
def _added(
    sums,
    samples,
    weights,
    S: tl.constexpr,
    D: tl.constexpr,
    KD: tl.constexpr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    B: tl.constexpr,
):
    # The sums of B columns of outputs and the part in them of the upsampled row S of a step: columns, then the row.
    across = ()
    for p in tl.static_range(B):
        total = tl.full(samples[0].shape, 0.0, tl.float32)
        for c in tl.static_range(KD):
            total += weights[c] * samples[p * D + c]
        across = across + (total,)
    added = ()
    for k in tl.static_range(OLD + NEW):  # for output k - OLD the row is number S - (k - OLD) * D
        if S - (k - OLD) * D >= 0 and S - (k - OLD) * D < KD:
            weight = weights[S - (k - OLD) * D]
            for p in tl.static_range(B):
                added = added + (sums[k * B + p] + weight * across[p],)
        else:
            added = added + sums[k * B : (k + 1) * B]
    return added


@triton.jit
def _filtered_lrelu_kernel(
    x_ptr,
    b_ptr,
    fx_ptr,
    v_ptr,
    fv_ptr,
    fd_ptr,
    y_ptr,
    planes,
    channels,
    inner,
    x_h,
    x_w,
    v_h,
    v_w,
    out_h,
    out_w_units,
    shift_xy,
    shift_xx,
    shift_vy,
    shift_vx,
    blocks,
    segments,
    out_rows,
    steps,
    slope,
    limit,
    scale,
    BIAS: tl.constexpr,
    TWO: tl.constexpr,
    UX: tl.constexpr,
    KX: tl.constexpr,
    PAD_XY: tl.constexpr,
    PAD_XX: tl.constexpr,
    FLIP_X: tl.constexpr,
    UV: tl.constexpr,
    KV: tl.constexpr,
    PAD_VY: tl.constexpr,
    PAD_VX: tl.constexpr,
    FLIP_V: tl.constexpr,
    D: tl.constexpr,
    KD: tl.constexpr,
    FLIP_D: tl.constexpr,
    CONVEX: tl.constexpr,
    CLAMP: tl.constexpr,
    INNER: tl.constexpr,
    B: tl.constexpr,
    STEP: tl.constexpr,
    AHEAD: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    THREADS: tl.constexpr,
):
    # A thread owns B neighbouring output columns of a plane (channels_last: of one channel) and marches down a segment
    # of its rows, STEP upsampled rows at a time. Everything vertical stays in its registers: the last input rows, as
    # many as the upsampling filter spans, and the sums of the output rows that are not complete yet. Sideways it
    # computes the (B - 1) * D + KD upsampled columns that its outputs need, some of them as its neighbours do: that
    # costs less than passing them on. Only inputs are read, from L1 mostly, and only outputs are written.
    # TWO: the samples come from v, and those of x only say where the activation bends.
    WIDTH: tl.constexpr = (B - 1) * D + KD
    X_COLUMNS: tl.constexpr = (WIDTH + KX - 2 - PAD_XX) // UX + 1
    X_ROWS: tl.constexpr = (STEP + KX - 2 - PAD_XY) // UX + 1
    V_COLUMNS: tl.constexpr = (WIDTH + KV - 2 - PAD_VX) // UV + 1
    V_ROWS: tl.constexpr = (STEP + KV - 2 - PAD_VY) // UV + 1
    NEW: tl.constexpr = STEP // D  # output rows completed by a step
    OLD: tl.constexpr = (KD - 1) // D  # and those begun before it
    # The first steps only fill the registers. AHEAD: a step computes with the rows that the step before has loaded,
    # so that those of the next step are on their way meanwhile.
    X_WARM: tl.constexpr = (X_ROWS + STEP // UX - 1) // (STEP // UX) - 1 + AHEAD
    V_WARM: tl.constexpr = (V_ROWS + STEP // UV - 1) // (STEP // UV) - 1 + AHEAD
    WARM: tl.constexpr = V_WARM if TWO and V_WARM > X_WARM else X_WARM

    out_w = out_w_units * OUT_UNIT
    thread = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    run = (thread % (blocks * inner)).to(tl.int32)
    segment = (thread // (blocks * inner) % segments).to(tl.int32)
    plane = thread // (blocks * inner) // segments
    block = run // inner if INNER else run
    channel = run % inner if INNER else (plane % channels).to(tl.int32)
    alive = plane < planes
    bias = tl.load(b_ptr + channel, alive, 0.0).to(tl.float32) if BIAS else 0.0
    if not INNER:
        channel = tl.zeros_like(channel)
    out_row = segment * out_rows - OLD - WARM * NEW
    out_end = tl.minimum(segment * out_rows + out_rows, out_h)

    limit = tl.where(alive, limit, 0.0)  # a tensor, so that clamping to [0 - limit, limit] is one instruction
    x_weights = _weights(fx_ptr, KX, FLIP_X, THREADS)
    d_weights = _weights(fd_ptr, KD, FLIP_D, THREADS)
    # A thread too many begins below the image, where it loads nothing.
    FIRST: tl.constexpr = WARM + 1 - AHEAD  # steps before the rows of a segment's first output
    x_row = tl.where(alive, segment * (out_rows * D // UX) - shift_xy + X_ROWS - FIRST * (STEP // UX), x_h)
    x_column = block * (B * D // UX) - shift_xx
    x_ptr += ((plane * x_h + x_row) * x_w + x_column) * inner + channel
    x_rows = _zeros(X_ROWS * X_COLUMNS, THREADS, tl.float32)
    x_next = _zeros(STEP // UX * X_COLUMNS, THREADS, x_ptr.dtype.element_ty)
    if TWO:
        v_weights = _weights(fv_ptr, KV, FLIP_V, THREADS)
        v_row = tl.where(alive, segment * (out_rows * D // UV) - shift_vy + V_ROWS - FIRST * (STEP // UV), v_h)
        v_column = block * (B * D // UV) - shift_vx
        v_ptr += ((plane * v_h + v_row) * v_w + v_column) * inner + channel
        v_rows = _zeros(V_ROWS * V_COLUMNS, THREADS, tl.float32)
        v_next = _zeros(STEP // UV * V_COLUMNS, THREADS, v_ptr.dtype.element_ty)
    column = block * B
    y_ptr += ((plane * out_h + out_row) * out_w + column) * inner + channel
    sums = _zeros(OLD * B, THREADS, tl.float32)

    for step in range(steps):
        if not AHEAD:
            x_next = _loaded(x_ptr, x_row, x_h, x_column, x_w, inner, STEP // UX, X_COLUMNS)
        x_rows = x_rows[STEP // UX * X_COLUMNS :] + _biased_rows(
            x_next, x_row - AHEAD * (STEP // UX), x_h, x_column, x_w, bias, BIAS, STEP // UX, X_COLUMNS
        )
        if AHEAD:
            x_next = _loaded(x_ptr, x_row, x_h, x_column, x_w, inner, STEP // UX, X_COLUMNS)
        x_row += STEP // UX
        x_ptr += tl.cast(x_w, tl.int64) * (STEP // UX) * inner
        if TWO:
            if not AHEAD:
                v_next = _loaded(v_ptr, v_row, v_h, v_column, v_w, inner, STEP // UV, V_COLUMNS)
            v_rows = v_rows[STEP // UV * V_COLUMNS :] + _biased_rows(
                v_next, v_row, v_h, v_column, v_w, 0.0, False, STEP // UV, V_COLUMNS
            )
            if AHEAD:
                v_next = _loaded(v_ptr, v_row, v_h, v_column, v_w, inner, STEP // UV, V_COLUMNS)
            v_row += STEP // UV
            v_ptr += tl.cast(v_w, tl.int64) * (STEP // UV) * inner
        if step >= WARM:
            sums = sums + _zeros(NEW * B, THREADS, tl.float32)

            for s in tl.static_range(STEP):
                samples = _upsampled(x_rows, x_weights, s, UX, KX, PAD_XX, PAD_XY, X_COLUMNS, WIDTH)
                if TWO:
                    values = _upsampled(v_rows, v_weights, s, UV, KV, PAD_VX, PAD_VY, V_COLUMNS, WIDTH)
                    bent = _scaled(values, samples, slope, limit, CLAMP)
                else:
                    bent = _activated(samples, slope, limit, CONVEX, CLAMP)
                sums = _added(sums, bent, d_weights, s, D, KD, OLD, NEW, B)

            for k in tl.static_range(NEW):
                inside = alive & (out_row + k >= segment * out_rows) & (out_row + k < out_end)
                at = y_ptr + tl.cast(out_w, tl.int64) * k * inner
                for p in tl.static_range(0, B, OUT_UNIT):
                    mask = inside & (column + p < out_w)
                    if OUT_UNIT == 1:
                        tl.store(at, (sums[k * B + p] * scale).to(y_ptr.dtype.element_ty), mask)
                    else:
                        unit = tl.arange(0, OUT_UNIT)[None, :]
                        if OUT_UNIT == 2:
                            out = tl.join(sums[k * B + p], sums[k * B + p + 1])
                        else:
                            even = tl.join(sums[k * B + p], sums[k * B + p + 2])
                            odd = tl.join(sums[k * B + p + 1], sums[k * B + p + 3])
                            out = tl.join(even, odd).reshape([THREADS, 4])
                        tl.store(at[:, None] + unit, (out * scale).to(y_ptr.dtype.element_ty), mask[:, None])
                    at += OUT_UNIT * inner
            sums = sums[NEW * B :]
        out_row += NEW
        y_ptr += tl.cast(out_w, tl.int64) * NEW * inner


# --- launches -------------------------------------------------------------------------------------------------


class _Stream(NamedTuple):
    """An image that is upsampled: its size and how."""

    height: int
    width: int
    up: int
    taps: int
    pad_x: int
    pad_y: int
    flip: bool


@planned
def filtered_lrelu(
    x: Tensor,
    fu: Tensor | None,
    fd: Tensor | None,
    b: Tensor | None,
    up: int,
    down: int,
    pad_x: int,
    pad_y: int,
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
    slope: float,
    clamp: float,
) -> Callable[..., Tensor]:
    """``D act(U (x + b))``, in the layout of ``x``."""
    (channels_last, whole, _), shape, strides, launch = _value_plan(
        x.shape, x.stride(), x.dtype, None if b is None else b.dtype, _taps(fu), _taps(fd),
        up, down, pad_x, pad_y, out_w, out_h, flip, gain, slope, clamp,
    )  # fmt: skip
    dtype, device = x.dtype, x.device
    simple = whole and all(t is not None and t.is_contiguous() for t in (fu, fd)) and (b is None or b.is_contiguous())

    def run(x: Tensor, fu: Tensor | None, fd: Tensor | None, b: Tensor | None, *_: Any) -> Tensor:
        if not simple:
            x, fu, fd, b = to_layout(x, channels_last), _filter(fu, x), _filter(fd, x), dense(b)
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        launch(x, b, fu, None, None, fd, y)
        return y

    def step_by_step(x: Tensor, fu: Tensor | None, fd: Tensor | None, b: Tensor | None, *_: Any) -> Tensor:
        u = _upsampled_domain(fd, down, out_w, out_h)
        t = _resample(biased(to_layout(x, channels_last), b), fu, up, 1, pad_x, pad_y, *u, flip, up * up)
        t = gain * torch.where(t > 0, t, t * slope)
        t = t.clamp(-clamp, clamp) if clamp >= 0 else t
        return _resample(t, fd, 1, down, 0, 0, out_w, out_h, flip, 1.0).to(dtype)

    return step_by_step if launch is None else run


@functools.lru_cache(maxsize=4096)
def _value_plan(
    size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, bias: torch.dtype | None, ku: int, kd: int,
    up: int, down: int, pad_x: int, pad_y: int, out_w: int, out_h: int, flip: bool,
    gain: float, slope: float, clamp: float,
) -> tuple[Form, tuple[int, ...], tuple[int, ...], Launch | None]:  # fmt: skip
    """The form of x, shape and strides of the result, and the launch."""
    of_x, (n, c, h, w) = form(size, strides), size
    stream = _Stream(h, w, up, ku, pad_x, pad_y, flip)
    shape = (n, c, out_h, out_w)
    dtypes = (dtype, bias)
    launch = _plan(*shape, of_x.channels_last, dtypes, stream, None, down, kd, flip, gain, slope, clamp)
    return of_x, shape, dense_strides(shape, of_x.channels_last), launch


def filtered_lrelu_tangent(
    v: Tensor,
    x: Tensor,
    fu: Tensor | None,
    fd: Tensor | None,
    b: Tensor | None,
    up: int,
    down: int,
    pad_x: int,
    pad_y: int,
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
    slope: float,
    clamp: float,
) -> Tensor:
    """``D (m(U (x + b)) * U v)``, in the layout of ``x``."""
    channels_last = form(x.shape, x.stride()).channels_last
    x, v = to_layout(x, channels_last), to_layout(v, channels_last)
    n, c, h, w = x.shape
    of_x = _Stream(h, w, up, _taps(fu), pad_x, pad_y, flip)
    shape, dtypes = (n, c, out_h, out_w), (x.dtype, v.dtype, None if b is None else b.dtype)
    launch = _plan(*shape, channels_last, dtypes, of_x, of_x, down, _taps(fd), flip, gain, slope, clamp)
    if launch is None:
        u = _upsampled_domain(fd, down, out_w, out_h)
        t = _resample(biased(x, b), fu, up, 1, pad_x, pad_y, *u, flip, up * up)
        t = _factor(t, gain, slope, clamp) * _resample(v.float(), fu, up, 1, pad_x, pad_y, *u, flip, up * up)
        return _resample(t, fd, 1, down, 0, 0, out_w, out_h, flip, 1.0).to(x.dtype)
    y = new(x, shape, channels_last)
    fu = _filter(fu, x)
    launch(x, dense(b), fu, v, fu, _filter(fd, x), y)
    return y


def filtered_lrelu_backward(
    dy: Tensor,
    x: Tensor,
    fu: Tensor | None,
    fd: Tensor | None,
    b: Tensor | None,
    up: int,
    down: int,
    pad_x: int,
    pad_y: int,
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
    slope: float,
    clamp: float,
) -> Tensor:
    """``Uᵀ (m(U (x + b)) * Dᵀ dy)``, in the layout of ``x``."""
    channels_last = form(x.shape, x.stride()).channels_last
    x, dy = to_layout(x, channels_last), to_layout(dy, channels_last)
    n, c, h, w = x.shape
    ku, kd = _taps(fu), _taps(fd)
    # Samples are counted from the first that the transposed upsampling reads, which is ku - 1 - pad before the image.
    of_x = _Stream(h, w, up, ku, ku - 1, ku - 1, flip)
    of_dy = _Stream(out_h, out_w, down, kd, kd + ku - 2 - pad_x, kd + ku - 2 - pad_y, not flip)
    dtypes = (x.dtype, dy.dtype, None if b is None else b.dtype)
    launch = _plan(n, c, h, w, channels_last, dtypes, of_x, of_dy, up, ku, not flip, gain, slope, clamp)
    if launch is None:
        u = _upsampled_domain(fd, down, out_w, out_h)
        t = _resample(biased(x, b), fu, up, 1, pad_x, pad_y, *u, flip, up * up)
        kw, kh = filter_size(fd)
        t = _factor(t, gain, slope, clamp) * _resample(dy.float(), fd, down, 1, kw - 1, kh - 1, *u, not flip, 1.0)
        kw, kh = filter_size(fu)
        return _resample(t, fu, 1, up, kw - 1 - pad_x, kh - 1 - pad_y, w, h, not flip, up * up).to(x.dtype)
    dx = new(x, x.shape, channels_last)
    fu = _filter(fu, x)
    launch(x, dense(b), fu, dy, _filter(fd, x), fu, dx)
    return dx


def _taps(f: Tensor | None) -> int:
    """The taps of a separable filter; 0 for one that is not."""
    return 1 if f is None else len(f) if f.dim() == 1 else 0


def _filter(f: Tensor | None, x: Tensor) -> Tensor:
    return _one(x.device) if f is None else f.contiguous()


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)


# Filters that the kernel does not take go step by step, in float32.


def _factor(t: Tensor, gain: float, slope: float, clamp: float) -> Tensor:
    m = torch.where(t > 0, gain, gain * slope)
    return m if clamp < 0 else torch.where((m * t).abs() > clamp, 0.0, m)


def _upsampled_domain(fd: Tensor | None, down: int, out_w: int, out_h: int) -> tuple[int, int]:
    """Width and height of the samples that D reads."""
    kw, kh = filter_size(fd)
    return (out_w - 1) * down + kw, (out_h - 1) * down + kh


def _resample(
    x: Tensor,
    f: Tensor | None,
    up: int,
    down: int,
    pad_x: int,
    pad_y: int,
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
) -> Tensor:
    h, w = x.shape[2:]
    kw, kh = filter_size(f)
    after_x, after_y = (out_w - 1) * down + kw - w * up - pad_x, (out_h - 1) * down + kh - h * up - pad_y
    return upfirdn2d(x, f, up, down, [pad_x, after_x, pad_y, after_y], flip, gain)


@functools.lru_cache(maxsize=4096)
def _plan(
    n: int,
    c: int,
    out_h: int,
    out_w: int,
    channels_last: bool,
    dtypes: tuple[torch.dtype | None, ...],
    x: _Stream,
    v: _Stream | None,
    down: int,
    taps: int,
    flip: bool,
    gain: float,
    slope: float,
    clamp: float,
) -> Launch | None:
    """The launch on tensors of ``dtypes`` (the last is the bias'), or None if the filters do not suit the kernel.

    They must be separable and short enough for the registers.
    """
    if 0 in (x.taps, taps, v.taps if v else 1):
        return None
    streams = (x, v) if v else (x,)
    step = math.lcm(down, *(s.up for s in streams))
    block, ahead = _block(streams, down, taps, step)
    if block == 0:
        return None
    planes, inner = (n, c) if channels_last else (n * c, 1)
    blocks = -(-out_w // block)
    new, old = step // down, (taps - 1) // down
    warm = max(-(-_span(s.taps, step, s.pad_y % s.up, s.up) // (step // s.up)) for s in streams) - 1 + ahead
    segments = _segments(max(planes * blocks * inner, 1), out_h, old + warm * new // 2)
    out_rows = -(-out_h // (segments * new)) * new  # of a segment, which begins where a step does
    segments, steps = -(-out_h // out_rows), warm + -(-(out_rows + old) // new)
    scale = gain * x.up**2  # the factor of act and of the upsampling filter
    limit = clamp / abs(scale) if clamp >= 0 and scale else math.inf
    v = v or x
    scalars = (planes, c, inner, x.height, x.width, v.height, v.width, out_h)
    unit = 1 if channels_last else math.gcd(out_w, block, 4)
    return Launch(
        _filtered_lrelu_kernel,
        -(-planes * inner * blocks * segments // _THREADS),
        (
            *scalars,
            out_w // unit,
            *(x.pad_y // x.up, x.pad_x // x.up, v.pad_y // v.up, v.pad_x // v.up, blocks, segments, out_rows, steps),
            *(slope, limit, scale),
        ),
        (
            *(dtypes[-1] is not None, len(streams) == 2, x.up, x.taps, x.pad_y % x.up, x.pad_x % x.up, x.flip),
            *(v.up, v.taps, v.pad_y % v.up, v.pad_x % v.up, v.flip, down, taps, flip),
            *(0 <= slope <= 1, limit < math.inf, channels_last, block, step, ahead, unit, _THREADS),
        ),
        num_warps=_THREADS // 32,
    )


def _segments(threads: int, rows: int, overhead: int) -> int:
    """Into how many segments to cut the rows: each begins with ``overhead`` rows for nothing, few keep the GPU busy.

    0.7 fits the times of 1 to 8 segments on an H200 for the three shapes of docs/measurements/h200-fir.md.
    """
    waves = threads / _RESIDENT
    return min(range(1, min(rows, 64) + 1), key=lambda n: (1 + overhead * n / rows) * (1 + 0.7 / (waves * n)))


def _span(taps: int, samples: int, pad: int, up: int) -> int:
    """How many inputs so many neighbouring samples need."""
    return (samples + taps - 2 - pad) // up + 1


def _block(streams: tuple[_Stream, ...], down: int, taps: int, step: int) -> tuple[int, int]:
    """The output columns of a thread, the most that its registers hold (0 if none), and whether it loads ahead.

    Where its values spill already, loading ahead costs more than it saves: 5.7 instead of 3.3 ms for the backward of
    the second row in docs/measurements/h200-fir.md.
    """
    for block in (8, 4, 2, 1):
        width = (block - 1) * down + taps
        held = -(-taps // down) * block + width + taps
        for s in streams:
            columns, rows = _span(s.taps, width, s.pad_x % s.up, s.up), _span(s.taps, step, s.pad_y % s.up, s.up)
            held += columns * rows + s.taps
        if block * down % step:
            continue
        if held <= _REGISTERS or (block * down == step and held <= _SPILLING):
            return block, int(held <= _REGISTERS)
    return 0, 0
