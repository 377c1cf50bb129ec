"""upfirdn2d on GPUs: Triton kernels and their launches.

Both layouts are one: an image is ``planes`` planes of ``height`` rows of ``width`` pixels of ``inner`` values, with
``planes = N * C, inner = 1`` for contiguous and ``planes = N, inner = C`` for channels_last tensors.

Three kernels. Filters of a few taps take ``_polyphase_kernel``, which keeps a window in registers; large ones
``_taps_kernel``, which loops over the taps; the filter's gradient has its own, in two stages.
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

from .._shared.gpu import Launch, form, planned, power_of_2
from .._shared.layout import dense_strides, is_channels_last, to_layout
from .._shared.tuning import tuned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_UNROLLED_PRODUCTS = 1024  # multiply-adds per thread beyond which _polyphase_kernel is not unrolled
_UNROLLED_BYTES, _FUSED_PRODUCTS, _ROWS, _COLUMNS = tuned(
    __name__,
    _UNROLLED_BYTES=(800, 500, 1200),  # of window that a thread may hold in registers
    _FUSED_PRODUCTS=(40, 25, 60),  # multiply-adds per output beyond which a separable filter takes two passes
    _ROWS=(1.0, 0.5, 2.0),  # of outputs of a thread, as a multiple of what is fastest on an H200
    _COLUMNS=(1.0, 0.5, 2.0),
)


# --- in registers ---------------------------------------------------------------------------------------------


@triton.jit
def _split(x, N: tl.constexpr):  # [L, N] -> N times [L]
    if N == 1:
        return (x.reshape([x.shape[0]]),)
    else:
        even, odd = tl.split(x.reshape([x.shape[0], N // 2, 2]))
        if N == 2:
            return (even.reshape([x.shape[0]]), odd.reshape([x.shape[0]]))
        else:
            a, c = tl.split(even.reshape([x.shape[0], N // 4, 2]))
            b, d = tl.split(odd.reshape([x.shape[0], N // 4, 2]))
            if N == 4:
                L: tl.constexpr = x.shape[0]
                return (a.reshape([L]), b.reshape([L]), c.reshape([L]), d.reshape([L]))
            else:
                a0, a1 = tl.split(a)
                b0, b1 = tl.split(b)
                c0, c1 = tl.split(c)
                d0, d1 = tl.split(d)
                return (a0, b0, c0, d0, a1, b1, c1, d1)


@triton.jit
def _join(t, N: tl.constexpr):  # N times [L] -> [L, N]
    L: tl.constexpr = t[0].shape[0]
    if N == 1:
        return t[0].reshape([L, 1])
    elif N == 2:
        return tl.join(t[0], t[1])
    elif N == 4:
        return tl.join(tl.join(t[0], t[2]), tl.join(t[1], t[3])).reshape([L, 4])
    else:
        even = tl.join(tl.join(t[0], t[4]), tl.join(t[2], t[6]))
        odd = tl.join(tl.join(t[1], t[5]), tl.join(t[3], t[7]))
        return tl.join(even, odd).reshape([L, 8])


# Not specialised: what only counts. A network has images of many sizes, and each kernel takes two seconds to compile.
@triton.jit(do_not_specialize=["planes", "in_h", "out_h", "shift_y", "shift_x", "tiles_y", "tiles_x", "log_y", "log_x"])
def _polyphase_kernel(
    x_ptr,
    f_ptr,
    y_ptr,
    planes,
    in_h,
    in_w_units,
    inner,
    out_h,
    out_w_units,
    shift_y,
    shift_x,
    tiles_y,
    tiles_x,
    log_y,
    log_x,
    gain,
    KX: tl.constexpr,
    KY: tl.constexpr,
    SEPARABLE: tl.constexpr,
    FLIP: tl.constexpr,
    UX: tl.constexpr,
    UY: tl.constexpr,
    DX: tl.constexpr,
    DY: tl.constexpr,
    PAD_X: tl.constexpr,
    PAD_Y: tl.constexpr,
    BX: tl.constexpr,
    BY: tl.constexpr,
    IN_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    WIDE_LOADS: tl.constexpr,
    WIDE_STORES: tl.constexpr,
    INNER: tl.constexpr,
    VECTOR: tl.constexpr,
    THREADS: tl.constexpr,
):
    # A thread owns BY x BX outputs of a plane (channels_last: of VECTOR channels) and reads each input of their
    # window once, all at the start. Every output phase is written out, so a tap's weight is a register known at
    # compile time and the zeros between the inputs cost nothing. A program is 2**log_x threads along
    # a row times 2**log_y rows of blocks times as many planes as that leaves of THREADS: wide enough for whole cache
    # lines, high enough to share the halo.
    # In a contiguous image the inputs of a block (SX of them) are one vector load, and the outputs one vector store;
    # that needs rows that are whole blocks (WIDE_LOADS, WIDE_STORES; widths come in units so that Triton sees it).
    SX: tl.constexpr = BX * DX // UX
    SY: tl.constexpr = BY * DY // UY
    FIRST: tl.constexpr = -PAD_X // UX // SX * SX if WIDE_LOADS else -(PAD_X // UX)
    LAST: tl.constexpr = ((BX - 1) * DX + KX - 1 - PAD_X) // UX
    ROWS: tl.constexpr = ((BY - 1) * DY + KY - 1 - PAD_Y) // UY + 1
    WINDOW: tl.constexpr = (LAST - FIRST) // SX * SX + SX if WIDE_LOADS else LAST - FIRST + 1

    in_w = in_w_units * IN_UNIT
    out_w = out_w_units * OUT_UNIT
    pid = tl.program_id(0)
    thread = tl.arange(0, THREADS)
    column = (pid % tiles_x << log_x) + (thread & (1 << log_x) - 1)
    row = (pid // tiles_x % tiles_y << log_y) + (thread >> log_x & (1 << log_y) - 1)
    plane = pid // tiles_x // tiles_y * (THREADS >> log_x + log_y) + (thread >> log_x + log_y)
    if INNER:
        blocks = inner // VECTOR
        channel = column % blocks * VECTOR
        column = column // blocks
    else:
        channel = 0
    if VECTOR > 1:
        column, row, plane, channel = column[:, None], row[:, None], plane[:, None], channel[:, None]
        channel += tl.arange(0, VECTOR)[None, :]
    alive = plane < planes

    # the window
    i = row * SY - shift_y
    j = (column - shift_x) * SX if WIDE_LOADS else column * SX - shift_x
    x_ptr += ((plane.to(tl.int64) * in_h + i) * in_w + j) * inner + channel
    window = ()
    for r in tl.static_range(ROWS):
        inside = alive & (i + r >= 0) & (i + r < in_h)
        if WIDE_LOADS:
            for c in tl.static_range(FIRST, FIRST + WINDOW, SX):
                at = tl.arange(0, SX)[None, :] + c
                mask = inside[:, None] & (j[:, None] + at >= 0) & (j[:, None] + at < in_w)
                values = tl.load(x_ptr[:, None] + (tl.cast(in_w, tl.int64) * r + at), mask, 0.0)
                window = window + _split(values.to(tl.float32), SX)
        else:
            for c in tl.static_range(FIRST, LAST + 1):
                mask = inside & (j + c >= 0) & (j + c < in_w)
                values = tl.load(x_ptr + (tl.cast(in_w, tl.int64) * r + c) * inner, mask, 0.0)
                window = window + (values.to(tl.float32),)

    # the weights, by the position in the window that they look at
    weights = ()
    if SEPARABLE:
        for a in tl.static_range(KX):
            weights = weights + (tl.load(f_ptr + (a if FLIP else KX - 1 - a)),)
        rows = ()
        for r in tl.static_range(ROWS):
            for p in tl.static_range(BX):
                total = tl.full(window[0].shape, 0.0, tl.float32)
                for a in tl.static_range(KX):
                    if (p * DX + a - PAD_X) % UX == 0:
                        total += weights[a] * window[r * WINDOW + (p * DX + a - PAD_X) // UX - FIRST]
                rows = rows + (total,)
    else:
        for a in tl.static_range(KX * KY):
            weights = weights + (tl.load(f_ptr + (a if FLIP else KX * KY - 1 - a)),)

    # the outputs
    i = row * BY
    j = column * BX
    y_ptr += ((plane.to(tl.int64) * out_h + i) * out_w + j) * inner + channel
    for q in tl.static_range(BY):
        inside = alive & (i + q < out_h)
        out = ()
        for p in tl.static_range(BX):
            total = tl.full(window[0].shape, 0.0, tl.float32)
            for b in tl.static_range(KY):
                if (q * DY + b - PAD_Y) % UY == 0:
                    if SEPARABLE:
                        total += weights[b] * rows[(q * DY + b - PAD_Y) // UY * BX + p]
                    else:
                        for a in tl.static_range(KX):
                            if (p * DX + a - PAD_X) % UX == 0:
                                total += (
                                    weights[b * KX + a]
                                    * window[(q * DY + b - PAD_Y) // UY * WINDOW + (p * DX + a - PAD_X) // UX - FIRST]
                                )
            out = out + ((total * gain).to(y_ptr.dtype.element_ty),)
        if WIDE_STORES:
            at = tl.arange(0, BX)[None, :]
            mask = inside[:, None] & (j[:, None] + at < out_w)
            tl.store(y_ptr[:, None] + (tl.cast(out_w, tl.int64) * q + at), _join(out, BX), mask)
        else:
            for p in tl.static_range(BX):
                offset = (tl.cast(out_w, tl.int64) * q + p) * inner
                tl.store(y_ptr + offset, out[p], inside & (j + p < out_w))


# --- large filters --------------------------------------------------------------------------------------------


@triton.jit
def _taps_kernel(
    x_ptr,
    f_ptr,
    y_ptr,
    total,
    in_h,
    in_w,
    inner,
    out_h,
    out_w,
    pad_y,
    pad_x,
    kx,
    ky,
    gain,
    FLIP: tl.constexpr,
    UX: tl.constexpr,
    UY: tl.constexpr,
    DX: tl.constexpr,
    DY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A thread owns outputs BLOCK / threads apart, in memory order, and walks over the taps that meet an input and
    # not a zero between two; inputs and weights come from the caches. Any size of filter, and any factors.
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    alive = index < total
    channel = index % inner
    column = (index // inner % out_w).to(tl.int32)
    row = (index // inner // out_w % out_h).to(tl.int32)
    plane = index // inner // out_w // out_h
    a = _first_tap(column * DX - pad_x, UX)
    b = _first_tap(row * DY - pad_y, UY)
    j = (column * DX - pad_x + a) // UX
    i = (row * DY - pad_y + b) // UY
    x_ptr += ((plane * in_h + i) * in_w + j) * inner + channel
    sum = tl.full([BLOCK], 0.0, tl.float32)
    for m in range(tl.cdiv(ky, UY)):
        inside = alive & (b + m * UY < ky) & (i + m >= 0) & (i + m < in_h)
        at = b + m * UY if FLIP else ky - 1 - b - m * UY
        for n in range(tl.cdiv(kx, UX)):
            mask = inside & (a + n * UX < kx) & (j + n >= 0) & (j + n < in_w)
            tap = a + n * UX if FLIP else kx - 1 - a - n * UX
            weight = tl.load(f_ptr + at * kx + tap, mask, 0.0)
            value = tl.load(x_ptr + (tl.cast(m, tl.int64) * in_w + n) * inner, mask, 0.0)
            sum += weight * value.to(tl.float32)
    tl.store(y_ptr + index, (sum * gain).to(y_ptr.dtype.element_ty), alive)


@triton.jit
def _first_tap(t, U: tl.constexpr):  # the least a >= 0 with t + a a multiple of U
    return ((-t) % U + U) % U


# --- gradient of the filter -----------------------------------------------------------------------------------


@triton.jit
def _filter_partial_kernel(
    x_ptr,
    dy_ptr,
    partial_ptr,
    total,
    in_h,
    in_w,
    inner,
    out_h,
    out_w,
    pad_y,
    pad_x,
    kx,
    taps,
    FLIP: tl.constexpr,
    UX: tl.constexpr,
    UY: tl.constexpr,
    DX: tl.constexpr,
    DY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program owns one tap and CHUNK outputs in memory order: it multiplies every dy by the input that the tap
    # looked at and adds them up in one fixed order. Neighbouring programs are the taps of one chunk, so that all
    # but the first read from the L2 cache.
    tap = tl.program_id(0) % taps
    chunk = tl.program_id(0) // taps
    at = tap if FLIP else taps - 1 - tap
    sum = tl.full([BLOCK], 0.0, tl.float32)
    first = chunk.to(tl.int64) * CHUNK
    for start in range(0, tl.minimum(total - first, CHUNK).to(tl.int32), BLOCK):
        index = first + start + tl.arange(0, BLOCK)
        column = (index // inner % out_w).to(tl.int32) * DX - pad_x + at % kx
        row = (index // inner // out_w % out_h).to(tl.int32) * DY - pad_y + at // kx
        plane = index // inner // out_w // out_h
        mask = (index < total) & (column >= 0) & (column < in_w * UX) & (row >= 0) & (row < in_h * UY)
        mask &= (column % UX == 0) & (row % UY == 0)
        offset = ((plane * in_h + row // UY) * in_w + column // UX) * inner + index % inner
        dy = tl.load(dy_ptr + index, mask, 0.0).to(tl.float32)
        sum += dy * tl.load(x_ptr + offset, mask, 0.0).to(tl.float32)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64), tl.sum(sum))


@triton.jit
def _filter_total_kernel(partial_ptr, df_ptr, chunks, taps, gain, BLOCK: tl.constexpr):
    # A program owns one tap and adds up its partial sums in one fixed order.
    tap = tl.program_id(0)
    sum = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        sum += tl.load(partial_ptr + chunk.to(tl.int64) * taps + tap, chunk < chunks, 0.0)
    tl.store(df_ptr + tap, tl.sum(sum) * gain)


# --- launches -------------------------------------------------------------------------------------------------


@planned
def upfirdn2d(
    x: Tensor,
    f: Tensor | None,
    up_x: int,
    up_y: int,
    down_x: int,
    down_y: int,
    pad_x: int,
    pad_y: int,
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
) -> Callable[..., Tensor]:
    """``y`` ``[N, C, out_h, out_w]`` in the dtype and layout of ``x``."""
    taps = None if f is None else f.shape
    axes = (up_x, up_y, down_x, down_y, pad_x, pad_y)
    channels_last, dense, shape, strides, rows, columns, middle = _plan(
        x.shape, x.stride(), x.dtype, taps, axes, out_w, out_h, flip, gain
    )
    dtype, device = x.dtype, x.device
    simple = dense and f is not None and f.is_contiguous()

    def run(x: Tensor, f: Tensor | None, *_: Any) -> Tensor:
        if not simple:
            x, f = to_layout(x, channels_last), _one(device) if f is None else f.contiguous()
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if columns is None:
            rows(x, f, y)
        else:
            between = torch.empty_strided((middle,), (1,), dtype=torch.float32, device=device)
            rows(x, f, between)
            columns(between, f, y)
        return y

    return run


def upfirdn2d_filter_backward(
    x: Tensor,
    dy: Tensor,
    fw: int,
    fh: int,
    up_x: int,
    up_y: int,
    down_x: int,
    down_y: int,
    pad_x: int,
    pad_y: int,
    flip: bool,
    gain: float,
) -> Tensor:
    """The gradient ``[fh, fw]`` of a 2-D filter, float32."""
    channels_last = is_channels_last(x)
    x, dy = to_layout(x, channels_last), to_layout(dy, channels_last)
    n, c, h, w = x.shape
    axes = (up_x, up_y, down_x, down_y, pad_x, pad_y)
    chunks, partial, total = _filter_sums(n, c, h, w, *dy.shape[2:], channels_last, x.dtype, fw, fh, axes, flip, gain)
    sums = x.new_empty(chunks * fw * fh, dtype=torch.float32)
    df = x.new_empty((fh, fw), dtype=torch.float32)
    partial(x, dy, sums)
    total(sums, df)
    return df


class _Plan(NamedTuple):
    """What a call allocates and launches."""

    channels_last: bool
    dense: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: Launch
    columns: Launch | None = None  # a second pass
    between: int = 0  # the size of what lies between; float32


@functools.lru_cache(maxsize=4096)
def _plan(
    size: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    taps: tuple[int, ...] | None,
    axes: tuple[int, ...],
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
) -> _Plan:
    channels_last, dense, _ = form(size, strides)
    n, c, h, w = size
    shape = (n, c, out_h, out_w)
    ky, kx = (1, 1) if taps is None else taps * 2 if len(taps) == 1 else taps
    separable = taps is not None and len(taps) == 1
    result = (channels_last, dense, shape, dense_strides(shape, channels_last))
    image = (n, c, h, w, channels_last)
    one = _polyphase(*image, dtype.itemsize, kx, ky, separable, axes, out_w, out_h, flip, gain)
    if one is not None:
        return _Plan(*result, one)
    if not separable:
        return _Plan(*result, _by_taps(*image, kx, ky, axes, out_w, out_h, flip, gain))
    up_x, up_y, down_x, down_y, pad_x, pad_y = axes
    across, down = (up_x, 1, down_x, 1, pad_x, 0), (1, up_y, 1, down_y, 0, pad_y)
    between = (n, c, h, out_w, channels_last)
    rows = _polyphase(*image, dtype.itemsize, kx, 1, False, across, out_w, h, flip, 1.0)
    columns = _polyphase(*between, 4, 1, ky, False, down, out_w, out_h, flip, gain)
    return _Plan(
        *result,
        rows or _by_taps(*image, kx, 1, across, out_w, h, flip, 1.0),
        columns or _by_taps(*between, 1, ky, down, out_w, out_h, flip, gain),
        n * c * h * out_w,
    )


def _polyphase(
    n: int,
    c: int,
    h: int,
    w: int,
    channels_last: bool,
    element_size: int,
    kx: int,
    ky: int,
    separable: bool,
    axes: tuple[int, ...],
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
) -> Launch | None:
    """The launch of the register kernel, or None where it would not fit into registers."""
    up_x, up_y, down_x, down_y, pad_x, pad_y = axes
    tile = _tile(channels_last, element_size, c, up_x, up_y, down_x, down_y, kx, ky, separable)
    if tile is None:
        return None
    block_x, block_y, vector, threads_x, threads = tile
    step_x = block_x * down_x // up_x
    planes, inner = (n, c) if channels_last else (n * c, 1)
    wide_loads = not channels_last and step_x in (1, 2, 4, 8) and w % step_x == 0
    wide_stores = not channels_last and block_x in (2, 4, 8) and out_w % block_x == 0
    # Padding splits into whole steps, which are a shift of the window, and a rest that the kernel knows.
    step = up_x * step_x if wide_loads else up_x
    shift_x, rest_x = pad_x // step, pad_x % step
    shift_y, rest_y = pad_y // up_y, pad_y % up_y
    blocks_x = -(-out_w // block_x) * (inner // vector)
    blocks_y = -(-out_h // block_y)
    tile_x = min(power_of_2(blocks_x), threads_x)
    tile_y = min(power_of_2(blocks_y), threads // tile_x)
    tiles_x, tiles_y = -(-blocks_x // tile_x), -(-blocks_y // tile_y)
    in_unit, out_unit = (step_x if wide_loads else 1), (block_x if wide_stores else 1)
    return Launch(
        _polyphase_kernel,
        tiles_x * tiles_y * -(-planes // (threads // (tile_x * tile_y))) if inner else 0,
        (
            *(planes, h, w // in_unit, inner, out_h, out_w // out_unit, shift_y, shift_x, tiles_y, tiles_x),
            *(tile_y.bit_length() - 1, tile_x.bit_length() - 1, gain),
        ),
        (
            *(kx, ky, separable, flip, up_x, up_y, down_x, down_y, rest_x, rest_y, block_x, block_y, in_unit, out_unit),
            *(wide_loads, wide_stores, channels_last, vector, threads),
        ),
        num_warps=threads // 32,
    )


class _Tile(NamedTuple):
    """What a thread and a program of ``_polyphase_kernel`` own."""

    block_x: int  # outputs of a thread
    block_y: int
    vector: int  # channels of a thread (channels_last)
    threads_x: int  # threads along a row of memory
    threads: int  # threads of a program


def _tile(
    channels_last: bool,
    element_size: int,
    channels: int,
    up_x: int,
    up_y: int,
    down_x: int,
    down_y: int,
    kx: int,
    ky: int,
    separable: bool,
) -> _Tile | None:
    """The tile for one class of shapes, None if a thread would need too many registers or products."""
    unit_x, unit_y = up_x // math.gcd(up_x, down_x), up_y // math.gcd(up_y, down_y)
    narrow = element_size == 2
    same = up_x == down_x and up_y == down_y
    # The fastest on an H200 for 4x4 taps, of those in docs/measurements/h200-fir.md.
    if channels_last:
        vector = math.gcd(channels, 4)
        if narrow:
            wide, high = (4, 2) if down_x > 1 else (2, 8)
        else:
            wide, high = (4, 4) if same else (2, 2)
    else:
        vector = 1
        wide = max(16 // element_size // down_x, 1)
        high = 8 if down_x > 1 and not narrow else 6 if same and narrow else 4
    wide, high = max(int(wide * _COLUMNS), 1), max(int(high * _ROWS), 1)
    # One of two passes has neighbours along one axis only.
    if kx == 1 and ky > 1:
        wide, high = 1 if channels_last else wide, 8
    elif ky == 1 and kx > 1:
        wide, high = 8 if channels_last else max(min(8, 8 * up_x // down_x), 1), 1 if channels_last else 2
    while True:
        block_x, block_y = max(wide // unit_x, 1) * unit_x, max(high // unit_y, 1) * unit_y
        columns = ((block_x - 1) * down_x + kx) / up_x
        rows = ((block_y - 1) * down_y + ky) / up_y
        if separable:
            products = rows * block_x * kx / up_x + block_x * block_y * ky / up_y
        else:
            products = block_x * block_y * (kx / up_x) * (ky / up_y)
        fused = not separable or products <= _FUSED_PRODUCTS * block_x * block_y
        if (
            products * vector <= _UNROLLED_PRODUCTS
            and rows * columns * vector * element_size <= _UNROLLED_BYTES
            and fused
        ):
            return _Tile(block_x, block_y, vector, 128 if narrow and not channels_last else 32, 128)
        if wide <= 1 and high <= 1:
            return None
        wide, high = max(wide // 2, 1), max(high // 2, 1)


def _by_taps(
    n: int,
    c: int,
    h: int,
    w: int,
    channels_last: bool,
    kx: int,
    ky: int,
    axes: tuple[int, ...],
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
) -> Launch:
    up_x, up_y, down_x, down_y, pad_x, pad_y = axes
    block, total = 512, n * c * out_h * out_w
    return Launch(
        _taps_kernel,
        -(-total // block),
        (total, h, w, c if channels_last else 1, out_h, out_w, pad_y, pad_x, kx, ky, gain),
        (flip, up_x, up_y, down_x, down_y, block),
    )


@functools.lru_cache(maxsize=1024)
def _filter_sums(
    n: int,
    c: int,
    h: int,
    w: int,
    out_h: int,
    out_w: int,
    channels_last: bool,
    dtype: torch.dtype,
    fw: int,
    fh: int,
    axes: tuple[int, ...],
    flip: bool,
    gain: float,
) -> tuple[int, Launch, Launch]:
    up_x, up_y, down_x, down_y, pad_x, pad_y = axes
    total, chunk, taps = n * c * out_h * out_w, 32768, fw * fh
    chunks = -(-total // chunk)
    scalars = (total, h, w, c if channels_last else 1, out_h, out_w, pad_y, pad_x, fw, taps)
    partial = Launch(_filter_partial_kernel, chunks * taps, scalars, (flip, up_x, up_y, down_x, down_y, chunk, 1024), 8)
    return chunks, partial, Launch(_filter_total_kernel, taps, (chunks, taps, gain), (256,))


@functools.cache
def _one(device: torch.device) -> Tensor:
    """The filter of one tap that None stands for."""
    return torch.ones(1, device=device)
