"""The factors of the modulated convolution on GPUs: Triton kernels for their value and gradients.

A weight is a matrix of C channels by K taps per output channel, whatever the order of these two in memory. The value is
one launch, of a program per output channel: it normalises its row, adds up the squares per channel, and goes through
the images one by one for their demodulation (all styles together are a few KiB, which stay in the cache). The gradient
is two: the same kernel keeps what it found in a scratch, then one program per tile of the weight or of the styles
reads that. Sums run in an order that the number of images has no part in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.gpu import Launch, dense, new, planned, power_of_2
from .._shared.layout import compute_dtype, dense_strides, is_channels_last
from . import reference
from .reference import PLAIN, ROUNDED

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ROW = 8192  # elements of a row that a program keeps in registers; longer rows go by in parts
_NARROW = 64  # channels up to which a row is a smaller tile
_TILE = 2048  # elements of the weight whose gradients a program makes
_STYLES = 32  # channels of the styles whose gradients a program makes
_OUTPUTS = 64  # output channels that it adds up at a time

_EPS, _ROOT = tl.constexpr(reference.EPS), tl.constexpr(reference.EPS**0.5)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _taps(t, c, k, C, K, stride_c, stride_k):
    """Channels by taps of the row that ``t`` points to, in float32."""
    at = c.to(tl.int64)[:, None] * stride_c + k.to(tl.int64)[None, :] * stride_k
    return tl.load(t + at, mask=(c < C)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _channels(t, c, C, stride):
    """Channels of the row that ``t`` points to, in float32."""
    return tl.load(t + c.to(tl.int64) * stride, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def _over(t, largest, NORMALISED: tl.constexpr):
    return tl.div_rn(t, largest) if NORMALISED else t


# One binary for any number and any slice of the images, so that an image does not depend on others to the last bit, and
# for all layers of a network: these kernels are small, so that their compilation costs more than their run time.
_SIZES = ["N", "O", "C", "K", "weight_o", "weight_c", "weight_k", "styles_n", "styles_c", "powers_at", "largest_at"]
_jit = functools.partial(triton.jit, do_not_specialize_on_alignment=["styles", "ds"])


# A program owns the output channel of its number, and the styles of the images whose number modulo O that is. It writes
# w, s and the demodulation, or the scratch: the squares [O, C], from ``dd`` the gradients of the powers [N, O], and the
# largest magnitudes of the O rows and N images. ``root`` is that of the length of a row. ONE: a row is one tile.
@_jit(do_not_specialize=[*_SIZES, "w_c", "w_k"])
def _factors_kernel(
    weight, styles, dd, w, s, demodulation, scratch,
    N, O, C, K, weight_o, weight_c, weight_k, styles_n, styles_c, w_c, w_k, powers_at, largest_at, root,
    NORMALISED: tl.constexpr, ONE: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64)
    channels, k = tl.arange(0, BC), tl.arange(0, BK)
    row = weight + o * weight_o
    largest_w = tl.full((), 1.0, tl.float32)
    if NORMALISED:
        top = tl.zeros((BC, BK), tl.float32)
        for c0 in range(0, C, BC):
            top = tl.maximum(top, tl.abs(_taps(row, c0 + channels, k, C, K, weight_c, weight_k)))
        largest_w = tl.maximum(tl.max(tl.max(top, 1), 0), _TINY) * root
    squares = tl.zeros((BC,), tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + channels
        u = _over(_taps(row, c, k, C, K, weight_c, weight_k), largest_w, NORMALISED)
        squares = tl.sum(u * u, 1)
        if w is not None:
            at = o * C * K + c.to(tl.int64)[:, None] * w_c + k.to(tl.int64)[None, :] * w_k
            tl.store(w + at, u.to(w.dtype.element_ty), mask=(c < C)[:, None] & (k < K)[None, :])
        if scratch is not None:
            tl.store(scratch + o * C + c, squares, mask=c < C)
    if scratch is not None:
        tl.store(scratch + largest_at + o, largest_w)

    for image in range(N):
        n = tl.cast(image, tl.int64)
        mine = n % O == o
        style = styles + n * styles_n
        largest_s = tl.full((), 1.0, tl.float32)
        eps = tl.full((), _EPS, tl.float32)
        if NORMALISED:
            most = tl.zeros((BC,), tl.float32)
            for c0 in range(0, C, BC):
                most = tl.maximum(most, tl.abs(_channels(style, c0 + channels, C, styles_c)))
            largest_s = tl.maximum(tl.max(most, 0), _TINY)
            eps = tl.div_rn(tl.div_rn(_ROOT, largest_s), largest_w)
            eps = eps * eps
        power = tl.zeros((BC,), tl.float32)
        for c0 in range(0, C, BC):
            c = c0 + channels
            if not ONE:
                u = _over(_taps(row, c, k, C, K, weight_c, weight_k), largest_w, NORMALISED)
                squares = tl.sum(u * u, 1)
            v = _over(_channels(style, c, C, styles_c), largest_s, NORMALISED)
            power += v * v * squares
            if s is not None:
                tl.store(s + n * C + c, v.to(s.dtype.element_ty), mask=(c < C) & mine)
        d = tl.rsqrt(tl.sum(power, 0) + eps)
        if demodulation is not None:
            tl.store(demodulation + n * O + o, d.to(demodulation.dtype.element_ty))
        if scratch is not None:
            g = tl.load(dd + n * O + o).to(tl.float32)
            tl.store(scratch + powers_at + n * O + o, g * (d * d * d) * -0.5)
            tl.store(scratch + largest_at + O + n, largest_s, mask=mine)


@triton.jit
def _weight_tile(
    pid, weight, styles, dw, scratch, dweight, chunks,
    N, O, C, K, weight_o, weight_c, weight_k, styles_n, styles_c, dw_o, dw_c, dw_k, out_c, out_k, powers_at, largest_at,
    NORMALISED: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Of one output channel ``dw + 2 w sum_n dpower s^2``, divided as ``w`` was."""
    o, c, k = (pid // chunks).to(tl.int64), pid % chunks * BC + tl.arange(0, BC), tl.arange(0, BK)
    total = tl.zeros((BC,), tl.float32)
    for image in range(N):
        n = tl.cast(image, tl.int64)
        largest_s = tl.load(scratch + largest_at + O + n)
        v = _over(_channels(styles + n * styles_n, c, C, styles_c), largest_s, NORMALISED)
        total += tl.load(scratch + powers_at + n * O + o) * v * v
    largest_w = tl.load(scratch + largest_at + o)
    u = _over(_taps(weight + o * weight_o, c, k, C, K, weight_c, weight_k), largest_w, NORMALISED)
    d = 2.0 * u * total[:, None]
    if dw is not None:
        d += _taps(dw + o * dw_o, c, k, C, K, dw_c, dw_k)
    at = o * C * K + c.to(tl.int64)[:, None] * out_c + k.to(tl.int64)[None, :] * out_k
    d = _over(d, largest_w, NORMALISED).to(dweight.dtype.element_ty)
    tl.store(dweight + at, d, mask=(c < C)[:, None] & (k < K)[None, :])


@triton.jit
def _styles_tile(
    pid, styles, ds, scratch, dstyles, blocks, O, C, styles_n, styles_c, powers_at, largest_at,
    NORMALISED: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Of one image ``ds + 2 s sum_o dpower squares``, divided as ``s`` was."""
    n, c = (pid // blocks).to(tl.int64), pid % blocks * BC + tl.arange(0, BC)
    total = tl.zeros((BO, BC), tl.float32)
    for o0 in range(0, O, BO):
        o = o0 + tl.arange(0, BO)
        dpower = tl.load(scratch + powers_at + n * O + o, mask=o < O, other=0.0)
        squares = scratch + o.to(tl.int64)[:, None] * C + c[None, :]
        total += dpower[:, None] * tl.load(squares, mask=(o < O)[:, None] & (c < C)[None, :], other=0.0)
    largest_s = tl.load(scratch + largest_at + O + n)
    v = _over(_channels(styles + n * styles_n, c, C, styles_c), largest_s, NORMALISED)
    d = 2.0 * v * tl.sum(total, 0)
    if ds is not None:
        d += _channels(ds + n * C, c, C, 1)
    tl.store(dstyles + n * C + c, _over(d, largest_s, NORMALISED).to(dstyles.dtype.element_ty), mask=c < C)


# The first ``weights`` programs own a tile of one row of the weight each, the others one of an image's styles.
@_jit(do_not_specialize=[*_SIZES, "weights", "chunks", "blocks", "dw_o", "dw_c", "dw_k", "out_c", "out_k"])
def _gradients_kernel(
    weight, styles, dw, ds, scratch, dweight, dstyles, weights, chunks, blocks,
    N, O, C, K, weight_o, weight_c, weight_k, styles_n, styles_c, dw_o, dw_c, dw_k, out_c, out_k, powers_at, largest_at,
    NORMALISED: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < weights:
        if dweight is not None:
            _weight_tile(
                pid, weight, styles, dw, scratch, dweight, chunks,
                N, O, C, K, weight_o, weight_c, weight_k, styles_n, styles_c,
                dw_o, dw_c, dw_k, out_c, out_k, powers_at, largest_at, NORMALISED, BC, BK,
            )  # fmt: skip
    else:
        if dstyles is not None:
            _styles_tile(
                pid - weights, styles, ds, scratch, dstyles, blocks, O, C, styles_n, styles_c, powers_at, largest_at,
                NORMALISED, BS, BO,
            )  # fmt: skip


# --- launches -------------------------------------------------------------------------------------------------

_Strides = tuple[int, int, int]


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> _Strides | None:
    """The strides of ``[O, C, kh, kw]`` as ``[O, C, kh * kw]``, or None where they are not those of one."""
    kh, kw = shape[2:]
    if kh > 1 and kw > 1 and strides[2] != kw * strides[3]:
        return None
    return strides[0], strides[1], (strides[3] if kw > 1 else strides[2]) if kh * kw > 1 else 1


def _dense(shape: tuple[int, ...], channels_last: bool) -> _Strides:
    return _strides(shape, dense_strides(shape, channels_last)) or (0, 0, 0)


class _Problem(NamedTuple):
    """What decides all launches of a call."""

    weight: tuple[int, ...]  # shape
    images: int
    weight_strides: _Strides
    styles_strides: tuple[int, ...]
    dtype: int
    dtypes: tuple[torch.dtype | None, ...]  # of the tensors

    @property
    def sizes(self) -> tuple[int, ...]:
        """N, O, C, K and the strides."""
        O, C, kh, kw = self.weight
        return self.images, O, C, kh * kw, *self.weight_strides, *self.styles_strides

    @property
    def scratch(self) -> tuple[int, int, int]:
        """Where its second and third part begin, and its size."""
        N, (O, C) = self.images, self.weight[:2]
        return O * C, (C + N) * O, (C + N) * O + O + N


@functools.lru_cache(maxsize=1024)
def _factors(problem: _Problem, channels_last: bool) -> Launch:
    O, C, kh, kw = problem.weight
    _, w_c, w_k = _dense(problem.weight, channels_last)
    BK = power_of_2(kh * kw)
    BC = max(_ROW // BK, 1)
    BC = BC if BC <= _NARROW or C > _NARROW else _NARROW
    scalars = (*problem.sizes, w_c, w_k, *problem.scratch[:2], float(C * kh * kw) ** 0.5)
    constants = (problem.dtype != PLAIN, C <= BC, BC, BK)
    return Launch(_factors_kernel, O, scalars, constants, num_warps=min(max(BC * BK // 1024, 1), 8))


@functools.lru_cache(maxsize=1024)
def _gradients(problem: _Problem, dw: _Strides, channels_last: bool, need_dweight: bool, need_dstyles: bool) -> Launch:
    O, C, kh, kw = problem.weight
    BK = power_of_2(kh * kw)
    BC = max(_TILE // BK, 1)
    chunks, blocks = -(-C // BC), -(-C // _STYLES)
    weights = O * chunks * need_dweight
    scalars = (weights, chunks, blocks, *problem.sizes, *dw, *_dense(problem.weight, channels_last)[1:])
    return Launch(
        _gradients_kernel, weights + problem.images * blocks * need_dstyles, (*scalars, *problem.scratch[:2]),
        (problem.dtype != PLAIN, BC, BK, _STYLES, _OUTPUTS),
    )  # fmt: skip


def _problem(weight: Tensor, styles: Tensor, dtype: int, *others: Tensor | None) -> tuple[_Problem, bool]:
    """The problem of these tensors, and whether the weight must be made dense first."""
    strides = _strides(weight.shape, weight.stride())
    given = strides or _dense(weight.shape, False)
    dtypes = tuple(None if t is None else t.dtype for t in (weight, styles, *others))
    return _Problem(weight.shape, styles.shape[0], given, styles.stride(), dtype, dtypes), strides is None


@planned
def modulation(
    weight: Tensor, styles: Tensor, dtype: int, channels_last: bool, gated: bool
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """``w``, ``s`` and the demodulation; see ``reference.py``."""
    if 0 in (*weight.shape, *styles.shape):
        return reference.modulation
    problem, scattered = _problem(weight, styles, dtype)
    launch = _factors(problem, channels_last)
    result = ROUNDED[dtype] or compute_dtype(weight)
    shape, (N, C), O = weight.shape, styles.shape, weight.shape[0]

    def run(weight: Tensor, styles: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        if scattered:
            weight = weight.contiguous()
        d = new(styles, (N, O), False, result)
        if dtype == PLAIN:
            launch(weight, styles, None, None, None, d, None)
            return new(styles, (0,), False, result), new(styles, (0,), False, result), d
        w, s = new(weight, shape, channels_last, result), new(styles, (N, C), False, result)
        launch(weight, styles, None, w, s, d, None)
        return w, s, d

    return run


@planned
def modulation_backward(
    weight: Tensor, styles: Tensor, dw: Tensor | None, ds: Tensor | None, dd: Tensor | None, dtype: int,
    need_dweight: bool, need_dstyles: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:  # fmt: skip
    """``dweight`` and ``dstyles``; see ``reference.py``."""
    if dd is None or 0 in (*weight.shape, *styles.shape):
        return reference.modulation_backward
    problem, scattered = _problem(weight, styles, dtype, dw, ds, dd)
    channels_last = is_channels_last(weight)
    strides = (0, 0, 0) if dw is None else _strides(dw.shape, dw.stride())
    factors = _factors(problem, False)
    gradients = _gradients(
        problem, strides or _dense(weight.shape, False), channels_last, need_dweight, need_dstyles
    )  # fmt: skip
    shape, (N, C), scratch = weight.shape, styles.shape, problem.scratch[2]

    def run(
        weight: Tensor, styles: Tensor, dw: Tensor | None, ds: Tensor | None, dd: Tensor, *_: Any
    ) -> tuple[Tensor, Tensor]:
        if scattered:
            weight = weight.contiguous()
        if dw is not None and strides is None:
            dw = dw.contiguous()
        found = new(weight, (scratch,), False, torch.float32)
        factors(weight, styles, dense(dd), None, None, None, found)
        dweight = new(weight, shape, channels_last) if need_dweight else None
        dstyles = new(styles, (N, C), False) if need_dstyles else None
        gradients(weight, styles, dw, dense(ds), found, dweight, dstyles)
        return new(weight, (0,), False) if dweight is None else dweight, (
            new(styles, (0,), False) if dstyles is None else dstyles
        )

    return run
