"""upsample_nearest and interpolate on GPUs: Triton kernels that only gather, for values and gradients.

Dense memory is ``[outer, D, H, W, inner]``: the images one after another with the channels innermost (channels_last),
or the channels' planes one after another with ``inner`` 1. Fewer spatial axes have leading ones of size 1.

* ``upsample_nearest`` reads every input sample once and writes its block; the backward reads every sample of dy once.
* ``interpolate`` and its backward apply the tables of ``taps.py``, forwards or transposed, to all axes at once; an
  axis pair with many taps goes axis by axis through a float32 intermediate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.gpu import Launch, form, new, planned, power_of_2
from .._shared.layout import dense_strides, to_layout
from .._shared.tuning import tuned
from .taps import CUBIC, LINEAR, NEAREST, NEAREST_EXACT, axis_taps, taps

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip

_TILE, _DOUBLE, _DOUBLE_PIXELS, _STRIP, _HALVE, _HALVE_PIXELS, _STRIP_BACKWARD = tuned(
    __name__,
    _TILE=(2048, 1024, 4096),  # elements of a program
    # Twice the size: elements of a row of a program, of planes and channels_last, and its rows of the smaller image.
    _DOUBLE=(256, 512, 1024),
    _DOUBLE_PIXELS=(512, 256, 1024),
    _STRIP=(16, 8, 32),
    # Its transpose: columns that a thread holds, elements of a row of a program divided by these, and rows.
    _HALVE=((4, 128), (2, 128), (2, 256)),
    _HALVE_PIXELS=((2, 512), (2, 256), (1, 1024)),
    _STRIP_BACKWARD=(32, 16, 8),
)
_TAPS = 36  # taps of an output above which the axes are resized one after another


# --- whole factors --------------------------------------------------------------------------------------------


@triton.jit
def _rows(pid, W, tiles, H, rows, BR: tl.constexpr, BW: tl.constexpr):
    """A program's input rows, their numbers ``(plane, row)``, its columns and which of all these exist."""
    r = (pid // tiles).to(tl.int64) * BR + tl.arange(0, BR)
    w = pid % tiles * BW + tl.arange(0, BW)
    return r, r // H, r % H, w, (r < rows)[:, None] & (w < W)[None, :]


# A program owns BR input rows by BW columns (contiguous layout). A row is widened in registers to SW (at least sw)
# columns a sample and stored to each of its sd * sh output rows.
@triton.jit
def _repeat_kernel(
    x, y, gain, W, H, rows, tiles, sw,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    r, plane, h, w, mask = _rows(tl.program_id(0), W, tiles, H, rows, BR, BW)
    v = tl.load(x + r[:, None] * W + w[None, :], mask=mask)
    if SCALED:
        v = (v.to(tl.float32) * gain).to(v.dtype)
    v = tl.reshape(tl.broadcast_to(v[:, :, None], (BR, BW, SW)), (BR, BW * SW))
    j = tl.arange(0, BW * SW)
    w0 = tl.program_id(0) % tiles * BW
    column = (w0 + j // SW) * sw + j % SW
    out = (r < rows)[:, None] & ((w0 + j // SW < W) & (j % SW < sw))[None, :]
    for a in range(SD):
        for b in range(SH):
            row = (plane * SD + a) * (H * SH) + h * SH + b
            tl.store(y + row[:, None] * (W * sw) + column[None, :], v, mask=out)


# The transpose: a program owns BR rows by BW columns of dx and sums the blocks of dy, which it reads as wide rows.
@triton.jit
def _block_sum_kernel(
    dy, dx, gain, W, H, rows, tiles, sw,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    r, plane, h, w, mask = _rows(tl.program_id(0), W, tiles, H, rows, BR, BW)
    j = tl.arange(0, BW * SW)
    w0 = tl.program_id(0) % tiles * BW
    column = (w0 + j // SW) * sw + j % SW
    there = (r < rows)[:, None] & ((w0 + j // SW < W) & (j % SW < sw))[None, :]
    total = tl.zeros((BR, BW * SW), tl.float32)
    for a in range(SD):
        for b in range(SH):
            row = (plane * SD + a) * (H * SH) + h * SH + b
            total += tl.load(dy + row[:, None] * (W * sw) + column[None, :], mask=there, other=0.0).to(tl.float32)
    total = tl.sum(tl.reshape(total, (BR, BW, SW)), 2) * gain
    tl.store(dx + r[:, None] * W + w[None, :], total.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _pixels(pid, C, W, H, pixels, tiles, BP: tl.constexpr, BC: tl.constexpr):
    """A program's input pixels ``(plane, row, column)``, their offsets with its channels, and which of these exist."""
    p = (pid // tiles).to(tl.int64) * BP + tl.arange(0, BP)
    c = pid % tiles * BC + tl.arange(0, BC)
    row = p // W
    return row // H, row % H, p % W, c, p[:, None] * C + c[None, :], (p < pixels)[:, None] & (c < C)[None, :]


# channels_last: a program owns BP input pixels by BC channels, read once and stored to each pixel of their blocks.
@triton.jit
def _repeat_pixels_kernel(
    x, y, gain, C, W, H, pixels, tiles,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    plane, h, w, c, offsets, mask = _pixels(tl.program_id(0), C, W, H, pixels, tiles, BP, BC)
    v = tl.load(x + offsets, mask=mask)
    if SCALED:
        v = (v.to(tl.float32) * gain).to(v.dtype)
    for a in range(SD):
        for b in range(SH):
            corner = ((plane * SD + a) * (H * SH) + h * SH + b) * (W * SW) + w * SW
            for k in range(SW):
                tl.store(y + (corner + k)[:, None] * C + c[None, :], v, mask=mask)


# The transpose: a program owns BP pixels by BC channels of dx and reads each pixel of their blocks of dy once.
@triton.jit
def _block_sum_pixels_kernel(
    dy, dx, gain, C, W, H, pixels, tiles,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    plane, h, w, c, offsets, mask = _pixels(tl.program_id(0), C, W, H, pixels, tiles, BP, BC)
    total = tl.zeros((BP, BC), tl.float32)
    for a in range(SD):
        for b in range(SH):
            corner = ((plane * SD + a) * (H * SH) + h * SH + b) * (W * SW) + w * SW
            for k in range(SW):
                total += tl.load(dy + (corner + k)[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + offsets, (total * gain).to(dx.dtype.element_ty), mask=mask)


# --- twice the size, linear and cubic ---------------------------------------------------------------------------


@triton.jit
def _strip(pid, tiles, blocks, strips, BW: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, CL: tl.constexpr):
    """A program's channels (planes), first column, first row and the number of its image (0 in contiguous layout)."""
    if CL:
        tile, block, rest = pid % tiles, pid // tiles % blocks, pid // tiles // blocks
        strip, image = rest % strips, rest // strips
    else:
        block, strip, tile = pid % blocks, pid // blocks % strips, pid // blocks // strips
        image = tile * 0
    return tile * BC + tl.arange(0, BC), block * BW, strip * R, image.to(tl.int64)


@triton.jit
def _repeated(tile, N: tl.constexpr):
    """A tuple of ``N`` times the tile."""
    tiles = (tile,)
    for _ in tl.static_range(N - 1):
        tiles = tiles + (tile,)
    return tiles


# A program owns R input rows by BW columns of BC channels or planes, and the 2 R output rows that they make. Row by
# row it loads K shifted rows, combines them to the two horizontal phases and keeps those of the last K rows in
# registers; they make two output rows, which leave interleaved. Weights are constants, so zeros cost nothing; beyond
# the border the outermost sample is repeated.
@triton.jit
def _double_kernel(
    x, y, C, H, W, tiles, blocks, strips,
    WEIGHTS: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BW: tl.constexpr, BC: tl.constexpr, CL: tl.constexpr,
):  # fmt: skip
    c, w0, r0, image = _strip(tl.program_id(0), tiles, blocks, strips, BW, BC, R, CL)
    w = w0 + tl.arange(0, BW)
    element: tl.constexpr = y.dtype.element_ty
    if CL:
        mask = (w < W)[:, None] & (c < C)[None, :]
        x += image * H * W * C + c[None, :]
        y += image * 4 * H * W * C + (2 * w[:, None] * C + c[None, :])
        wide = mask
    else:
        mask = (c < C)[:, None] & (w < W)[None, :]
        planes = c.to(tl.int64)[:, None] * H * W
        column = 2 * w0 + tl.arange(0, 2 * BW)
        wide = (c < C)[:, None] & (column < 2 * W)[None, :]
        x += planes
        y += planes * 4 + column[None, :]
    none = tl.zeros(mask.shape, tl.float32)
    evens, odds = _repeated(none, K), _repeated(none, K)  # of the last K rows
    for j in range(R + K - 1):
        row = tl.minimum(tl.maximum(r0 + j - K // 2, 0), H - 1).to(tl.int64) * W
        even, odd = none, none
        for k in tl.static_range(K):
            # The middle one is clamped too: otherwise it alone would be loaded in vectors, and change threads.
            at = row + tl.minimum(tl.maximum(w + (k - K // 2), 0), W - 1)
            v = tl.load(x + (at[:, None] * C if CL else at[None, :]), mask=mask, other=0.0).to(tl.float32)
            if WEIGHTS[k] != 0.0:
                even += WEIGHTS[k] * v
            if WEIGHTS[K + k] != 0.0:
                odd += WEIGHTS[K + k] * v
        evens, odds = evens[1:] + (even,), odds[1:] + (odd,)
        i = r0 + j - (K - 1)
        if (j >= K - 1) & (i < H):
            for phase in tl.static_range(2):
                even, odd = none, none
                for k in tl.static_range(K):
                    if WEIGHTS[phase * K + k] != 0.0:
                        even += WEIGHTS[phase * K + k] * evens[k]
                        odd += WEIGHTS[phase * K + k] * odds[k]
                to = (2 * i + phase).to(tl.int64) * (2 * W)
                if CL:
                    tl.store(y + to * C, even.to(element), mask=wide)
                    tl.store(y + (to + 1) * C, odd.to(element), mask=wide)
                else:
                    both = tl.join(even.to(element), odd.to(element))
                    tl.store(y + to, tl.reshape(both, (BC, 2 * BW)), mask=wide)


# The transpose. A program owns R rows by BW groups of B columns of BC channels or planes of dx; a thread holds whole
# groups. Input i is used by the outputs 2 i - K / 2 + 1 up to 2 i + K / 2, at the border as inside; only the weights
# differ there, so they come from tables [K, W] and [K, H]. Rows of dy are loaded once for all columns of a group, in
# pairs of columns where these lie side by side, and summed along their length as they come, two a turn; the last K of
# these sums are kept and summed down.
@triton.jit
def _halve_kernel(
    dy, across, down, dx, C, H, W, tiles, blocks, strips,
    K: tl.constexpr, R: tl.constexpr, BW: tl.constexpr, B: tl.constexpr, BC: tl.constexpr, CL: tl.constexpr,
):  # fmt: skip
    c, w0, r0, image = _strip(tl.program_id(0), tiles, blocks, strips, BW * B, BC, R, CL)
    w = w0 + tl.arange(0, BW) * B
    if CL:
        channels = c < C
        mine = channels[None, :]
        dy += image * 4 * H * W * C + (2 * w.to(tl.int64)[:, None] * C + c[None, :])
        dx += image * H * W * C + (w[:, None] * C + c[None, :])
    else:
        planes = c.to(tl.int64)[:, None] * H * W
        channels = (c < C)[:, None]
        mine = channels[:, :, None] & (w[:, None] + tl.arange(0, B)[None, :] < W)[None, :, :]
        dy += planes[:, :, None] * 4 + (2 * w[:, None] + tl.arange(0, 2)[None, :])[None, :, :]
        dx += planes[:, :, None] + (w[:, None] + tl.arange(0, B)[None, :])[None, :, :]
    weights = ()
    for p in tl.static_range(B):
        for k in tl.static_range(K):
            f = tl.load(across + k * W + (w + p), mask=w + p < W, other=0.0)
            weights = weights + (f[:, None] if CL else f[None, :],)
    none = tl.zeros((BW, BC) if CL else (BC, BW), tl.float32)
    rows = _repeated(none, K * B)
    for turn in range(R + K // 2 - 1):
        for half in tl.static_range(2):
            row = 2 * (r0 + turn) + (half + 1 - K // 2)
            inside = (row >= 0) & (row < 2 * H)
            start = row.to(tl.int64) * (2 * W)
            columns = ()  # from 2 w - K / 2 on
            if CL:
                at = dy + (start + (1 - K // 2)) * C
                for t in tl.static_range(1, 2 * B + K - 1):
                    there = inside & ((2 * w + (t - K // 2)).to(tl.uint32, bitcast=True) < (2 * W).to(tl.uint32))
                    columns = columns + (tl.load(at, mask=there[:, None] & mine, other=0.0).to(tl.float32),)
                    at += C
                columns = (none,) + columns
            else:
                from_here = dy + start
                for pair in tl.static_range(B + K // 2):
                    # W counts pairs of columns of dy.
                    there = inside & ((w + (pair - K // 4)).to(tl.uint32, bitcast=True) < W.to(tl.uint32))
                    there = channels[:, :, None] & there[None, :, None]
                    v0, v1 = tl.split(tl.load(from_here + (2 * pair - K // 2), mask=there, other=0.0))
                    columns = columns + (v0.to(tl.float32), v1.to(tl.float32))
            for p in tl.static_range(B):
                total = none
                for k in tl.static_range(K):
                    total += weights[p * K + k] * columns[2 * p + 1 + k]
                rows = rows + (total,)
            rows = rows[B:]
        i = r0 + turn - (K // 2 - 1)
        if (turn >= K // 2 - 1) & (i < H):
            totals = _repeated(none, B)
            for k in tl.static_range(K):
                weight = tl.load(down + k * H + i)
                for p in tl.static_range(B):
                    totals = totals[1:] + (totals[0] + weight * rows[k * B + p],)
            to = i.to(tl.int64) * W
            element: tl.constexpr = dx.dtype.element_ty
            if CL:
                for p in tl.static_range(B):
                    tl.store(dx + (to + p) * C, totals[p].to(element), mask=mine & (w + p < W)[:, None])
            else:
                out = tl.join(totals[0], totals[1])
                if B == 4:
                    out = tl.join(tl.join(totals[0], totals[2]), tl.join(totals[1], totals[3]))
                    out = tl.reshape(out, (BC, BW, 4))
                tl.store(dx + to, out.to(element), mask=mine)


# --- tables ---------------------------------------------------------------------------------------------------


@triton.jit
def _taps_of(start, stop, o, there):
    """First input sample and number of samples of the outputs ``o`` along an axis; itself without a table."""
    if start is None:
        return o, tl.full(o.shape, 1, tl.int32)
    else:
        first = tl.load(start + o, mask=there, other=0)
        return first, tl.load(stop + o, mask=there, other=0) - first


# A program owns BP output pixels by BC channels (contiguous layout: planes). What the pixels read, and with what
# weights, is the same for all channels and is held per pixel; the sum stays in registers. Pixels lie along axis 0 in
# both layouts: Triton lays the threads of a gather along it, which is what contiguous planes need.
@triton.jit
def _resample_kernel(
    x, start_d, stop_d, weights_d, start_h, stop_h, weights_h, start_w, stop_w, weights_w, y,
    C, D, H, W, OD, OH, OW, pixels, tiles, blocks,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    CL: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # channels_last: (image, block, tile of channels); contiguous: (tile of planes, block), C counting all planes.
    tile = pid % tiles if CL else pid // blocks
    block = pid // tiles % blocks if CL else pid % blocks
    image = pid // (tiles * blocks)
    c = tile * BC + tl.arange(0, BC)
    p = block.to(tl.int64) * BP + tl.arange(0, BP)
    there = p < pixels
    ow, row = (p % OW).to(tl.int32), p // OW
    oh, od = (row % OH).to(tl.int32), (row // OH).to(tl.int32)
    d, nd = _taps_of(start_d, stop_d, od, there)
    h, nh = _taps_of(start_h, stop_h, oh, there)
    w, nw = _taps_of(start_w, stop_w, ow, there)
    element: tl.constexpr = y.dtype.element_ty
    mask = there[:, None] & (c < C)[None, :]
    if CL:
        x += image.to(tl.int64) * D * H * W * C + c[None, :]
        y += image.to(tl.int64) * pixels * C + (p[:, None] * C + c[None, :])
    else:
        x += c.to(tl.int64)[None, :] * D * H * W
        y += c.to(tl.int64)[None, :] * pixels + p[:, None]
    pitch = C if CL else 1
    if COPY:  # of any dtype
        at = (d.to(tl.int64) * H + h) * W + w
        v = tl.load(x + (at * pitch)[:, None], mask=mask)
    else:
        v = tl.zeros((BP, BC), tl.float32)
        for i in range(KD):
            for j in range(KH):
                at = ((d + i).to(tl.int64) * H + (h + j)) * W + w
                used = there & (i < nd) & (j < nh)
                f = tl.full((BP,), 1.0, tl.float32)
                if weights_d is not None:
                    f *= tl.load(weights_d + i * OD + od, mask=used, other=0.0)
                if weights_h is not None:
                    f *= tl.load(weights_h + j * OH + oh, mask=used, other=0.0)
                for k in range(KW):
                    g = f
                    inside = used & (k < nw)
                    if weights_w is not None:
                        g = f * tl.load(weights_w + k * OW + ow, mask=inside, other=0.0)
                    s = tl.load(x + ((at + k) * pitch)[:, None], mask=mask & inside[:, None], other=0.0)
                    v += g[:, None] * s.to(tl.float32)
        if element == tl.uint8:  # to nearest, ties to even, saturated
            v = tl.minimum(tl.maximum((v + 12582912.0) - 12582912.0, 0.0), 255.0)
    tl.store(y, v.to(element), mask=mask)


# --- launches -------------------------------------------------------------------------------------------------


def _three(sizes: Sequence[int], fill: int = 1) -> tuple[int, int, int]:
    """Spatial sizes of one to three axes as ``(D, H, W)``."""
    return (fill,) * (3 - len(sizes)) + tuple(sizes)  # type: ignore[return-value]


class _Whole(NamedTuple):
    """What a resize by whole factors allocates and launches."""

    channels_last: bool
    dense: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    launch: Launch


@functools.lru_cache(maxsize=4096)
def _whole_factor(
    given: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, backward: bool, gain: float, *scale: int
) -> _Whole:
    """The plan for a tensor of shape ``given``; calls of another ``dtype`` have launches of their own."""
    channels_last, dense, _ = form(given, strides)
    sizes = (n // s if backward else n * s for n, s in zip(given[2:], scale, strict=True))
    result = (*given[:2], *sizes)
    shape = result if backward else given  # of the smaller image
    plan = (channels_last, dense, result, dense_strides(result, channels_last))
    C, (D, H, W), (sd, sh, sw) = shape[1], _three(shape[2:]), _three(scale)
    scaled = gain != 1
    if channels_last:
        pixels = shape[0] * D * H * W
        channels = min(power_of_2(C), 128)
        block = _TILE // channels
        tiles = -(-C // channels)
        launch = Launch(
            _block_sum_pixels_kernel if backward else _repeat_pixels_kernel, -(-pixels // block) * tiles,
            (gain, C, W, H, pixels, tiles), (sd, sh, sw, block, channels, scaled),
        )  # fmt: skip
        return _Whole(*plan, launch)
    rows = shape[0] * C * D * H
    wide = power_of_2(sw)
    columns = min(power_of_2(W), max(_TILE // wide, 1))
    height = max(_TILE // (columns * wide), 1)
    tiles = -(-W // columns)
    launch = Launch(
        _block_sum_kernel if backward else _repeat_kernel, -(-rows // height) * tiles,
        (gain, W, H, rows, tiles, sw), (sd, sh, wide, height, columns, scaled),
    )  # fmt: skip
    return _Whole(*plan, launch)


@planned
def upsample_nearest(x: Tensor, scale: Sequence[int], gain: float) -> Callable[..., Tensor]:
    """Every sample ``scale[d]`` times along spatial axis ``d``, times ``gain``."""
    return _by_whole_factors(x, scale, gain, False)


@planned
def upsample_nearest_backward(dy: Tensor, scale: Sequence[int], gain: float) -> Callable[..., Tensor]:
    """The sum over each block of ``dy``, times ``gain``."""
    return _by_whole_factors(dy, scale, gain, True)


def _by_whole_factors(x: Tensor, scale: Sequence[int], gain: float, backward: bool) -> Callable[..., Tensor]:
    channels_last, dense, shape, strides, launch = _whole_factor(
        x.shape, x.stride(), x.dtype, backward, float(gain), *scale
    )
    dtype, device = x.dtype, x.device

    def run(x: Tensor, *_: Any) -> Tensor:
        if not dense:
            x = to_layout(x, channels_last)
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if dtype == torch.bool:
            launch(_bytes(x), _bytes(y))
        else:
            launch(x, y)
        return y

    return run


def _bytes(x: Tensor) -> Tensor:
    """Bools as the bytes that they are."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


@functools.lru_cache(maxsize=256)
def _table(
    in_size: int, out_size: int, scale: float, mode: int, align_corners: bool, antialias: bool, transposed: bool,
    device: torch.device, piece: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """Start, stop (int32) and weights (float32, tap by tap) of an axis on a device; None where nothing changes.

    The copy waits for its end, so that every stream may use the table. Like a kernel's compilation, it belongs before
    the capture of a CUDA graph.
    """
    table = axis_taps(in_size, out_size, scale, mode, align_corners, antialias, transposed, piece)
    if table is None:
        return None
    start, stop = (torch.from_numpy(a.astype("int32")).to(device) for a in (table.start, table.stop))
    return start, stop, torch.from_numpy(table.weights.T.astype("float32")).contiguous().to(device)


def _resampling(
    shape: tuple[int, ...], size: tuple[int, ...], taps_of: tuple[int, ...], channels_last: bool, copy: bool
) -> Launch:
    """The launch from an input of ``shape`` to the spatial ``size``."""
    N, C, (OD, OH, OW) = shape[0], shape[1], size
    pixels = OD * OH * OW
    if channels_last:
        channels = min(power_of_2(C), 128)
        block = min(_TILE // channels, power_of_2(pixels))
        images = N
    else:
        C *= N
        block = min(power_of_2(pixels), 256)
        channels = min(_TILE // block, power_of_2(C))
        images = 1
    tiles, blocks = -(-C // channels), -(-pixels // block)
    return Launch(
        _resample_kernel, images * tiles * blocks, (C, *_three(shape[2:]), OD, OH, OW, pixels, tiles, blocks),
        (*taps_of, block, channels, channels_last, copy),
    )  # fmt: skip


_captured: set[Tensor] = set()


def _keep(x: Tensor, tables: Sequence[Tensor | None]) -> None:
    """A captured CUDA graph reads its tables at every replay, so they must outlive the caches."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        _captured.update(t for t in tables if t is not None)


def _is_double(
    small: Sequence[int], large: Sequence[int], mode: int, rest: tuple[bool, bool], scale: Sequence[float]
) -> bool:
    """Whether the kernels for twice the size do it."""
    return (
        len(small) == 2
        and mode in (LINEAR, CUBIC)
        and rest == (False, False)
        and all(o == 2 * i and s in (0, 2) for i, o, s in zip(small, large, scale, strict=True))
    )


def _double(shape: tuple[int, ...], mode: int, channels_last: bool, backward: bool, dtype: torch.dtype) -> Launch:
    """The launch for the smaller image's ``shape``."""
    N, C, H, W = shape
    group = 1
    if backward:
        group, tile = _HALVE_PIXELS if channels_last else _HALVE
    else:
        tile = _DOUBLE_PIXELS if channels_last else _DOUBLE * 2 if mode == LINEAR else _DOUBLE
    across = -(-W // group)
    if channels_last:
        channels = min(power_of_2(C), 64)
        images = N
    else:
        C *= N
        channels = min(max(tile // power_of_2(across), 1), power_of_2(C))
        images = 1
    columns = min(tile // channels, power_of_2(across))
    tiles, blocks = -(-C // channels), -(-across // columns)
    rows = min(_STRIP_BACKWARD if backward else _STRIP, power_of_2(H))
    strips = -(-H // rows)
    scalars = (C, H, W, tiles, blocks, strips)
    programs = images * tiles * blocks * strips
    if backward:
        taps_of = 4 if mode == LINEAR else 8
        return Launch(_halve_kernel, programs, scalars, (taps_of, rows, columns, group, channels, channels_last))
    window = 3 if mode == LINEAR else 5
    constants = (_phases(mode, window), window, rows, columns, channels, channels_last)
    return Launch(_double_kernel, programs, scalars, constants)


def _phases(mode: int, window: int) -> tuple[float, ...]:
    """Weights of the even and of the odd outputs ``2 i`` and ``2 i + 1`` for inputs ``i - window // 2`` on."""
    table = taps(16, 32, 2.0, mode, False, False)
    assert table is not None  # the sizes differ
    weights = []
    for phase in range(2):
        first = int(table.start[16 + phase]) - 8 + window // 2
        row = [0.0] * window
        row[first : first + table.weights.shape[1]] = map(float, table.weights[16 + phase])
        weights += row
    return tuple(weights)


@functools.lru_cache(maxsize=256)
def _windows(size: int, mode: int, taps_of: int, device: torch.device) -> Tensor:
    """Weights ``[taps, size]`` of input ``i`` in the outputs from ``2 i - taps / 2 + 1`` on; see ``_table``."""
    table = taps(size, 2 * size, 2.0, mode, False, False)
    assert table is not None  # the sizes differ
    back = table.transposed(size)
    weights = torch.zeros(taps_of, size)
    for i in range(size):
        for k in range(int(back.stop[i] - back.start[i])):
            weights[int(back.start[i]) + k - (2 * i - taps_of // 2 + 1), i] = float(back.weights[i, k])
    return weights.to(device)


class _Pass(NamedTuple):
    """One launch of a resize, with the tables that it reads; ``shape`` is that of a float32 result in between."""

    launch: Launch
    tables: tuple[Tensor | None, ...]
    shape: tuple[int, ...] | None


class _Resize(NamedTuple):
    """What a resize allocates and launches."""

    channels_last: bool
    dense: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    passes: tuple[_Pass, ...]


@functools.lru_cache(maxsize=4096)
def _resizing(
    given: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...],
    mode: int, rest: tuple[bool, bool], scale: tuple[float, ...], back: bool,
) -> _Resize:  # fmt: skip
    """From an image of shape ``given`` to spatial ``sizes``, by the tables forwards or (``back``) transposed."""
    channels_last, dense, _ = form(given, strides)
    shape = (*given[:2], *sizes)
    plan = (channels_last, dense, shape, dense_strides(shape, channels_last))
    if 0 in shape:
        return _Resize(*plan, ())
    small, large = (shape, given) if back else (given, shape)
    if dtype.is_floating_point and _is_double(small[2:], large[2:], mode, rest, scale):
        launch = _double(small, mode, channels_last, back, dtype)
        count = 4 if mode == LINEAR else 8
        windows = [_windows(n, mode, count, device) for n in (small[3], small[2])] if back else []
        return _Resize(*plan, (_Pass(launch, tuple(windows), None),))
    tables = [
        _table(*((o, i) if back else (i, o)), float(s), mode, *rest, back, device)
        for i, o, s in zip(given[2:], sizes, scale, strict=True)
    ]
    copy = (mode in (NEAREST, NEAREST_EXACT) and not back) or not any(tables)
    return _Resize(*plan, _passes(given, sizes, tables, channels_last, copy))


def _passes(
    given: tuple[int, ...], sizes: Sequence[int], tables: Sequence[tuple[Tensor, Tensor, Tensor] | None],
    channels_last: bool, copy: bool,
) -> tuple[_Pass, ...]:  # fmt: skip
    groups = [list(range(len(tables)))]  # of axes that are resized together
    if math.prod(1 if t is None else t[2].shape[0] for t in tables) > _TAPS:
        # Axis by axis, the one that shrinks the most first.
        order = sorted((d for d, t in enumerate(tables) if t), key=lambda d: sizes[d] / given[2 + d])
        groups = [[d] for d in order]
    passes: list[_Pass] = []
    for number, axes in enumerate(groups):
        now = [t if d in axes else None for d, t in enumerate(tables)]
        last = number == len(groups) - 1
        shape = (*given[:2], *(n if t is None else o for n, o, t in zip(given[2:], sizes, now, strict=True)))
        every = [None] * (3 - len(now)) + now
        counts = tuple(1 if t is None else t[2].shape[0] for t in every)
        launch = _resampling(given, _three(shape[2:]), counts, channels_last, copy)
        passes.append(_Pass(launch, tuple(a for t in every for a in (t or (None,) * 3)), None if last else shape))
        given = shape
    return tuple(passes)


def _resize(
    x: Tensor, sizes: Sequence[int], mode: int, rest: tuple[bool, bool], scale: Sequence[float], back: bool
) -> Callable[..., Tensor]:
    plan = _resizing(x.shape, x.stride(), x.dtype, x.device, tuple(sizes), mode, rest, tuple(scale), back)
    return _running(x, *plan)


def _running(
    x: Tensor, channels_last: bool, dense: bool, shape: tuple[int, ...], strides: tuple[int, ...],
    passes: Sequence[_Pass],
) -> Callable[..., Tensor]:  # fmt: skip
    dtype, device = x.dtype, x.device

    def run(x: Tensor, *_: Any) -> Tensor:
        if not dense:
            x = to_layout(x, channels_last)
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for launch, tables, between in passes:
            if tables:
                _keep(x, tables)
            to = y if between is None else new(x, between, channels_last, torch.float32)
            if dtype == torch.bool:
                launch(_bytes(x), *tables, _bytes(to))
            else:
                launch(x, *tables, to)
            x = to
        return y

    return run


def resize(x: Tensor, maps: Sequence[tuple[Any, ...]], sizes: Sequence[int], copies: bool) -> Tensor:
    """``x`` resized by a map for each spatial axis (see ``axis_taps``); ``copies``: they only copy samples."""
    plan = _resizing_by(x.shape, x.stride(), x.dtype, x.device, tuple(maps), tuple(sizes), copies)
    return _running(x, *plan)(x)


@functools.lru_cache(maxsize=1024)
def _resizing_by(
    given: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    maps: tuple[tuple[Any, ...], ...], sizes: tuple[int, ...], copies: bool,
) -> _Resize:  # fmt: skip
    channels_last, dense, _ = form(given, strides)
    shape = (*given[:2], *sizes)
    tables = [_table(*m[:-1], device, m[-1]) for m in maps]
    passes = _passes(given, sizes, tables, channels_last, copies or not any(tables)) if 0 not in shape else ()
    return _Resize(channels_last, dense, shape, dense_strides(shape, channels_last), passes)


@planned
def interpolate(
    x: Tensor, size: Sequence[int], mode: int, align_corners: bool, antialias: bool, scale: Sequence[float]
) -> Callable[..., Tensor]:
    """``x`` resized to the spatial ``size``; see ``reference.py``."""
    return _resize(x, size, mode, (align_corners, antialias), scale, False)


@planned
def interpolate_backward(
    dy: Tensor, size: Sequence[int], mode: int, align_corners: bool, antialias: bool, scale: Sequence[float]
) -> Callable[..., Tensor]:
    """The transposed map: ``dx`` of the spatial ``size`` of the input."""
    return _resize(dy, size, mode, (align_corners, antialias), scale, True)
