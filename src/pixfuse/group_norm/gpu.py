"""group_norm on GPUs: Triton kernels for the value and the gradients, in either layout of x.

An image is a matrix of C channels by P pixels (P the product of the spatial axes), stored channel by channel or, in
channels_last, pixel by pixel. A program owns a tile of BC channels by BP pixels, oriented so that memory is
contiguous along its last axis; everything per channel is a vector that broadcasts over the pixels, so one kernel
serves both layouts. Two designs, chosen by the shape of an image and never by the batch:

* a group that fits in the registers of one program: one launch that reads x (and dy) once;
* larger groups: a launch that reduces chunks of tiles to partial sums, and one that pools the partial sums of its
  groups (a few numbers, in a fixed order) and writes the result. The second runs through the images backwards, so
  that it begins with what the first has left in the L2 cache.

Statistics are pairs (mean, root mean square deviation) of deviations from the first element of the group. Such pairs
are pooled without cancellation and without overflow, and a constant image has deviations of exactly zero.
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

from .._shared.gpu import Form, Launch, dense, form, new, planned, power_of_2
from .._shared.gpu_math import sigmoid
from .._shared.layout import to_layout
from .._shared.tuning import tuned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ONE_PASS, _ONE_PASS_BACKWARD, _TILE, _WARPS, _STAGES, _STAGES_BACKWARD, _CHUNKS = tuned(
    __name__,
    _ONE_PASS=(16384, 8192, 4096),  # elements of the largest tile that holds whole groups
    _ONE_PASS_BACKWARD=(8192, 4096, 16384),
    _TILE=(2048, 1024, 4096),  # elements of a tile of the two-launch design
    _WARPS=(2, 1, 4),  # of a program there
    _STAGES=(4, 2, 3),  # tiles on their way while one is reduced
    _STAGES_BACKWARD=(3, 2, 4),
    _CHUNKS=(256, 128, 512),  # programs that reduce one image, about
)
_TOTALLED = 32768  # sums of a channel that one program adds up; PyTorch's reduction spreads more over several
_POOLED = 2048  # partial sums that the second launch pools by itself; more are pooled by a launch between


# --- device functions -----------------------------------------------------------------------------------------


@triton.jit
def _over_pixels(v, CL: tl.constexpr):
    """A vector of channels as the tile's column or row."""
    return v[None, :] if CL else v[:, None]


@triton.jit
def _over_channels(v, CL: tl.constexpr):
    """A vector of pixels as the tile's row or column."""
    return v[:, None] if CL else v[None, :]


@triton.jit
def _offsets(c, p, C, P, CL: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of a tile from its corner, whose channels and pixels ``c`` and ``p`` count from 0."""
    if WIDE:
        c, p = c.to(tl.int64), p.to(tl.int64)
    return p[:, None] * C + c[None, :] if CL else c[:, None] * P + p[None, :]


@triton.jit
def _mask(c, p, C, P, CL: tl.constexpr):
    return (p < P)[:, None] & (c < C)[None, :] if CL else (c < C)[:, None] & (p < P)[None, :]


@triton.jit
def _members(c, g, D):
    """Which of the channels ``c`` are in which of the groups ``g``: [NG, BC]."""
    return (c // D)[None, :] == g[:, None]


@triton.jit
def _grouped(v, members, NG: tl.constexpr, EVEN: tl.constexpr):
    """Values of channels as rows of groups, to be reduced along axis 1; EVEN: groups of BC / NG whole channels."""
    if EVEN:
        return tl.reshape(v, (NG, v.shape[0] // NG))
    else:
        return tl.where(members, v[None, :], 0.0)


@triton.jit
def _spread(v, members, BC: tl.constexpr, EVEN: tl.constexpr):
    """Values of groups as values of their channels: [NG] to [BC]."""
    if EVEN:
        return tl.reshape(tl.broadcast_to(v[:, None], (v.shape[0], BC // v.shape[0])), (BC,))
    else:
        return tl.sum(tl.where(members, v[:, None], 0.0), 0)


@triton.jit
def _pool(mean, rms, share, AXIS: tl.constexpr):
    """The pairs (mean, rms) of parts with the given shares (they add up to 1) as the pair of the whole."""
    whole = tl.sum(share * mean, AXIS)
    away = mean - tl.expand_dims(whole, AXIS)
    size = tl.max(tl.where(share > 0.0, tl.maximum(tl.abs(away), rms), 0.0), AXIS)
    size = tl.maximum(size, 1e-30)
    unit = tl.expand_dims(1.0 / size, AXIS)
    near, far = rms * unit, away * unit
    return whole, size * tl.sqrt(tl.sum(tl.where(share > 0.0, share * (near * near + far * far), 0.0), AXIS))


@triton.jit
def _pool_slots(part, row, g, valid, slots, P, C, D, CHUNK, K, BC, N_STRIDE, SLOTS: tl.constexpr):
    """Pool the partial pairs of the groups ``g`` of an image, whose partial pairs begin at ``part + row``.

    Slot ``s`` of a group is chunk ``s // K`` and the ``s % K``-th channel tile that the group touches.
    """
    s = tl.arange(0, SLOTS)[None, :]
    gc = g[:, None]
    chunk, tile = s // K, gc * D // BC + s % K
    pixels = tl.minimum(CHUNK, P - chunk * CHUNK)
    channels = tl.minimum((tile + 1) * BC, (gc + 1) * D) - tl.maximum(tile * BC, gc * D)
    there = (s < slots) & (channels > 0) & valid[:, None]
    at = part + row + gc * slots + s
    mean = tl.load(at, mask=there, other=0.0)
    rms = tl.load(at + N_STRIDE, mask=there, other=0.0)
    share = tl.where(there, (pixels.to(tl.float32) * (1.0 / P)) * (channels.to(tl.float32) * (1.0 / D)), 0.0)
    return _pool(mean, rms, share, 1)


@triton.jit
def _rstd(rms, eps):
    """``1 / sqrt(rms^2 + eps)``, also where the square leaves the range of float32."""
    extreme = (rms > 1e15) | (rms < 1e-15)
    root = tl.sqrt_rn(eps * 1.0)
    size = tl.maximum(rms, root)
    a, b = rms / size, root / size
    return tl.where(
        extreme,
        1.0 / (size * tl.sqrt(a * a + b * b)),
        tl.div_rn(1.0, tl.sqrt_rn(tl.where(extreme, 1.0, rms * rms + eps))),
    )


@triton.jit
def _silu_slope(z, EXACT: tl.constexpr):
    s = sigmoid(z, EXACT)
    return s * (1.0 + z * (1.0 - s))


@triton.jit
def _parameter(p, c, C, default):
    """The gamma or beta of the channels ``c`` in float32; ``default`` where there is none."""
    if p is None:
        return tl.full(c.shape, default, tl.float32)
    else:
        return tl.load(p + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def _activate(z, element: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr):
    if ACT:
        z = z.to(element).to(tl.float32) if ROUND else z
        z = z * sigmoid(z, element == tl.float32)
    return z


@triton.jit
def _through_act(dy, xhat, gamma, beta, element: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr):
    """The gradient of z from that of y."""
    if ACT:
        z = xhat * gamma + beta
        z = z.to(element).to(tl.float32) if ROUND else z
        dy = dy * _silu_slope(z, element == tl.float32)
    return dy


# --- one launch: whole groups in registers --------------------------------------------------------------------


# A program owns GB whole groups of one image, all pixels, and keeps them in registers: the sum, the squares around
# the mean and the result all come from one read. Tiles are padded to powers of 2, the padding is masked.
@triton.jit
def _whole_kernel(
    x, weight, bias, y, mean, rstd, C, P, D, G, tiles, eps,
    GB: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, NG: tl.constexpr, EVEN: tl.constexpr,
    CL: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n, g0 = pid // tiles, pid % tiles * GB
    element: tl.constexpr = x.dtype.element_ty
    lc, p = tl.arange(0, BC), tl.arange(0, BP)
    c = g0 * D + lc
    used = (lc < GB * D) & (c < C)
    base = n.to(tl.int64) * C * P + g0 * D * (1 if CL else P)
    offsets = _offsets(lc, p, C, P, CL, False)
    mask = _over_pixels(used, CL) & _over_channels(p < P, CL)
    v = tl.load(x + base + offsets, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(x + base + lc // D * D * (1 if CL else P), mask=used, other=0.0).to(tl.float32)
    v = tl.where(mask, v - _over_pixels(first, CL), 0.0)

    g = g0 + tl.arange(0, NG)
    members = _members(c, g, D) & used[None, :]
    PIXELS: tl.constexpr = 0 if CL else 1
    size = D * 1.0 * P
    centre = tl.sum(_grouped(tl.sum(v, PIXELS) / size, members, NG, EVEN), 1)  # [NG]
    v = tl.where(mask, v - _over_pixels(_spread(centre, members, BC, EVEN), CL), 0.0)
    # The rounding of the mean shows where the first element lies far out: take it off as well.
    rest = tl.sum(_grouped(tl.sum(v, PIXELS) / size, members, NG, EVEN), 1)
    v = tl.where(mask, v - _over_pixels(_spread(rest, members, BC, EVEN), CL), 0.0)
    if element == tl.float16:
        scale = tl.full((BC,), 1.0, tl.float32)
    else:  # squares of the largest and smallest numbers leave float32
        top = tl.max(tl.abs(v), PIXELS)
        top = _spread(tl.max(_grouped(top, members, NG, EVEN), 1), members, BC, EVEN)  # of the group
        scale = tl.where(top > 1e15, 8.271806125530277e-25, tl.where(top < 1e-15, 1.2089258196146292e24, 1.0))
    scaled = v * _over_pixels(scale, CL)
    squares = tl.sum(scaled * scaled, PIXELS) / size
    rms = tl.sqrt(tl.sum(_grouped(squares, members, NG, EVEN), 1))
    rms = rms / tl.max(_grouped(scale, members, NG, EVEN), 1)
    r = _rstd(rms, eps)
    gm = (g < G) & (tl.arange(0, NG) < GB)
    g_first = tl.load(x + base + tl.arange(0, NG) * D * (1 if CL else P), mask=gm, other=0.0).to(tl.float32)
    tl.store(mean + n.to(tl.int64) * G + g, g_first + (centre + rest), mask=gm)
    tl.store(rstd + n.to(tl.int64) * G + g, r, mask=gm)

    a = _spread(r, members, BC, EVEN) * _parameter(weight, c, C, 1.0)
    z = v * _over_pixels(a, CL) + _over_pixels(_parameter(bias, c, C, 0.0), CL)
    tl.store(y + base + offsets, _activate(z, element, ACT, ROUND).to(element), mask=mask)


# As above with dy beside x: per channel the sums of dz and dz * xhat, per group those times gamma, then dx. The
# channels' sums of each image go to ``sums`` [2, N, C], whose sum over N is the gradient of weight and bias.
@triton.jit
def _whole_backward_kernel(
    dy, x, mean, rstd, weight, bias, dx, sums, C, P, D, G, tiles, N,
    GB: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, NG: tl.constexpr, EVEN: tl.constexpr,
    CL: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr, NEED_DX: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n, g0 = (pid // tiles).to(tl.int64), pid % tiles * GB
    element: tl.constexpr = x.dtype.element_ty
    lc, p = tl.arange(0, BC), tl.arange(0, BP)
    c = g0 * D + lc
    used = (lc < GB * D) & (c < C)
    base = n * C * P + g0 * D * (1 if CL else P)
    offsets = _offsets(lc, p, C, P, CL, False)
    mask = _over_pixels(used, CL) & _over_channels(p < P, CL)
    v = tl.load(x + base + offsets, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dy + base + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(mean + n * G + c // D, mask=used, other=0.0)
    r = tl.load(rstd + n * G + c // D, mask=used, other=0.0)
    gamma, beta = _parameter(weight, c, C, 1.0), _parameter(bias, c, C, 0.0)
    PIXELS: tl.constexpr = 0 if CL else 1
    members = _members(c, g0 + tl.arange(0, NG), D) & used[None, :]
    size = D * 1.0 * P
    v -= _over_pixels(m, CL)
    if element == tl.float32:  # take off the rounding of the mean, too
        rest = tl.sum(_grouped(tl.sum(tl.where(mask, v, 0.0), PIXELS) / size, members, NG, EVEN), 1)
        v -= _over_pixels(_spread(rest, members, BC, EVEN), CL)
    xhat = v * _over_pixels(r, CL)
    dz = _through_act(d, xhat, _over_pixels(gamma, CL), _over_pixels(beta, CL), element, ACT, ROUND)
    dz = tl.where(mask, dz, 0.0)
    s1, s0 = tl.sum(tl.where(mask, dz * xhat, 0.0), PIXELS), tl.sum(dz, PIXELS)
    if sums is not None:
        tl.store(sums + n * C + c, s1, mask=used)
        tl.store(sums + (N + n) * C + c, s0, mask=used)
    if NEED_DX:
        t1 = tl.sum(_grouped(s1 * gamma, members, NG, EVEN), 1) / size
        t0 = tl.sum(_grouped(s0 * gamma, members, NG, EVEN), 1) / size
        t1, t0 = _spread(t1, members, BC, EVEN), _spread(t0, members, BC, EVEN)
        out = dz * _over_pixels(gamma, CL) - _over_pixels(t0, CL) - xhat * _over_pixels(t1, CL)
        tl.store(dx + base + offsets, (out * _over_pixels(r, CL)).to(element), mask=mask)


# --- two launches: partial sums, then the result --------------------------------------------------------------


@triton.jit
def _scaled_squares(
    x, offsets, c, p0, C, P, step, centre, scale,
    STEPS: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, CL: tl.constexpr,
):  # fmt: skip
    """The sum over the pixels of a chunk of ``((x - centre) * scale)^2``; ``x`` points to its first tile."""
    squares = tl.zeros((BP, BC) if CL else (BC, BP), tl.float32)
    for i in range(STEPS):
        mask = _mask(c, p0 + i * BP + tl.arange(0, BP), C, P, CL)
        v = (tl.load(x + offsets, mask=mask).to(tl.float32) - _over_pixels(centre, CL)) * scale
        squares += tl.where(mask, v * v, 0.0)
        x += step
    return tl.sum(squares, 0 if CL else 1)


# A program owns one chunk (STEPS tiles of pixels) of BC channels of an image. It centres on the mean of its first
# tile, accumulates each thread's deviations and their squares in registers and reduces once at the end: cancellation
# costs a factor STEPS of precision at most. Channels are then pooled into groups; a group may go over several tiles.
@triton.jit
def _partial_kernel(
    x, part, C, P, D, G, chunks, tiles, slots, n_stride, step,
    K: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    BC: tl.constexpr, BP: tl.constexpr, NG: tl.constexpr, EVEN: tl.constexpr,
    CL: tl.constexpr, FULL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n = (pid // (chunks * tiles)).to(tl.int64)
    rest = pid % (chunks * tiles)
    chunk, tile = (rest // tiles, rest % tiles) if CL else (rest % chunks, rest // chunks)
    element: tl.constexpr = x.dtype.element_ty
    PIXELS: tl.constexpr = 0 if CL else 1
    lc, lp = tl.arange(0, BC), tl.arange(0, BP)
    c0, p0 = tile * BC, chunk * (STEPS * BP)
    c = c0 + lc
    image = x + n * C * P
    corner = image + (p0.to(tl.int64) * C + c0 if CL else c0.to(tl.int64) * P + p0)
    offsets = _offsets(lc, lp, C, P, CL, WIDE)
    first = tl.load(image + (c // D * D).to(tl.int64) * (1 if CL else P), mask=c < C, other=0.0).to(tl.float32)
    mask = None if FULL else _mask(c, p0 + lp, C, P, CL)
    v = tl.load(corner + offsets, mask=mask).to(tl.float32) - _over_pixels(first, CL)
    v = v if FULL else tl.where(mask, v, 0.0)
    centre = first + tl.sum(v, PIXELS) / tl.minimum(BP, P - p0)
    v -= _over_pixels(centre - first, CL)
    v = v if FULL else tl.where(mask, v, 0.0)
    s1, s2 = v, v * v
    at = corner
    for i in tl.range(1, STEPS, num_stages=STAGES):
        at += step
        here = None if FULL else _mask(c, p0 + i * BP + lp, C, P, CL)
        v = tl.load(at + offsets, mask=here).to(tl.float32) - _over_pixels(centre, CL)
        v = v if FULL else tl.where(here, v, 0.0)
        s1 += v
        s2 += v * v
    s1, s2 = tl.sum(s1, PIXELS), tl.sum(s2, PIXELS)
    scale = tl.full((), 1.0, tl.float32)
    if element != tl.float16:
        largest = tl.max(s2, 0)
        if (largest > 1e34) | (largest < 1e-26):  # the squares leave float32: once more with scaled deviations
            scale = tl.where(largest > 1.0, 8.271806125530277e-25, 1.2089258196146292e24)
            s2 = _scaled_squares(corner, offsets, c, p0, C, P, step, centre, scale, STEPS, BC, BP, CL)
    pixels = tl.minimum(STEPS * BP, P - p0).to(tl.float32)
    s1, s2 = s1 / pixels, s2 / pixels
    away = s1 * scale
    rms = tl.sqrt(tl.maximum(s2 - away * away, 0.0)) / scale
    channel_mean = (centre - first) + s1

    g = c0 // D + tl.arange(0, NG)
    members = _members(c, g, D) & (c < C)[None, :]
    lo, hi = tl.maximum(g * D, c0), tl.minimum((g + 1) * D, tl.minimum(c0 + BC, C))
    share = _grouped(tl.full((BC,), 1.0, tl.float32), members, NG, EVEN) / tl.maximum(hi - lo, 1)[:, None]
    mean, rms = _pool(_grouped(channel_mean, members, NG, EVEN), _grouped(rms, members, NG, EVEN), share, 1)
    at = part + (n * G + g) * slots + chunk * K + tile - g * D // BC
    tl.store(at, mean, mask=hi > lo)
    tl.store(at + n_stride, rms, mask=hi > lo)


# A program pools all partial pairs of one group of one image: SLOTS (at least the number of slots) fit in registers.
@triton.jit
def _pool_kernel(
    part, pooled, C, P, D, G, slots, n_stride, pooled_stride,
    CHUNK: tl.constexpr, K: tl.constexpr, BC: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n = (pid // G).to(tl.int64)
    g = pid % G + tl.arange(0, 1)
    m, rms = _pool_slots(part, n * G * slots, g, g < G, slots, P, C, D, CHUNK, K, BC, n_stride, SLOTS)
    tl.store(pooled + n * G + g, m)
    tl.store(pooled + pooled_stride + n * G + g, rms)


# A program owns one tile. It pools the partial pairs of the groups it touches, or reads them pooled (SLOTS 1), while
# its x is on the way. That is read for the last time, so neither x nor y shall displace in the cache what other
# programs still need. (Several tiles a program, loaded ahead, were 4 to 5% slower on an H200: fewer programs fit.)
@triton.jit
def _apply_kernel(
    x, part, weight, bias, y, mean, rstd, C, P, D, G, blocks, tiles, slots, n_stride, last, eps,
    CHUNK: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, PBC: tl.constexpr,
    BC: tl.constexpr, BP: tl.constexpr, NG: tl.constexpr, EVEN: tl.constexpr,
    CL: tl.constexpr, FULL: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    pid = last - tl.program_id(0)
    n = (pid // (blocks * tiles)).to(tl.int64)
    rest = pid % (blocks * tiles)
    block, tile = (rest // tiles, rest % tiles) if CL else (rest % blocks, rest // blocks)
    element: tl.constexpr = x.dtype.element_ty
    lc, lp = tl.arange(0, BC), tl.arange(0, BP)
    c0, p0 = tile * BC, block * BP
    c = c0 + lc
    corner = n * C * P + (p0.to(tl.int64) * C + c0 if CL else c0.to(tl.int64) * P + p0)
    at = corner + _offsets(lc, lp, C, P, CL, WIDE)
    mask = None if FULL else _mask(c, p0 + lp, C, P, CL)
    v = tl.load(x + at, mask=mask, eviction_policy="evict_first")

    g = c0 // D + tl.arange(0, NG)
    there = (g < G) & (g * D < c0 + BC)
    if SLOTS == 1:
        m = tl.load(part + n * G + g, mask=there, other=0.0)
        rms = tl.load(part + n_stride + n * G + g, mask=there, other=0.0)
    else:
        m, rms = _pool_slots(part, n * G * slots, g, there, slots, P, C, D, CHUNK, K, PBC, n_stride, SLOTS)
    r = _rstd(rms, eps)
    x0 = x + n * C * P
    across = 1 if CL else P
    # The program that has the first pixel and the first channel of a group writes the group's statistics.
    mine = there & (g * D >= c0) & (block == 0)
    g_first = tl.load(x0 + (g * D).to(tl.int64) * across, mask=mine, other=0.0).to(tl.float32)
    tl.store(mean + n * G + g, g_first + m, mask=mine)
    tl.store(rstd + n * G + g, r, mask=mine)

    members = _members(c, g, D)
    first = tl.load(x0 + (c // D * D).to(tl.int64) * across, mask=c < C, other=0.0).to(tl.float32)
    first, m = _over_pixels(first, CL), _over_pixels(_spread(m, members, BC, EVEN), CL)
    a = _over_pixels(_spread(r, members, BC, EVEN) * _parameter(weight, c, C, 1.0), CL)
    b = _over_pixels(_parameter(bias, c, C, 0.0), CL)
    z = _activate((v.to(tl.float32) - first - m) * a + b, element, ACT, ROUND)
    tl.store(y + at, z.to(element), mask=mask, eviction_policy="evict_first")


# A program owns one chunk of BC channels of an image, as in _partial_kernel. It sums dz * xhat and dz per channel,
# for the gradients of weight and bias ([2, N, C, chunks]), and times gamma per group, for dx ([2, N, G, slots]).
# ``mean_rest``, if there is one, is what rounding to float32 took off the mean.
@triton.jit
def _partial_backward_kernel(
    dy, x, mean, mean_rest, rstd, weight, bias, sums, part,
    C, P, D, G, chunks, tiles, slots, sums_stride, n_stride, step,
    K: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    BC: tl.constexpr, BP: tl.constexpr, NG: tl.constexpr, EVEN: tl.constexpr,
    CL: tl.constexpr, FULL: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n = (pid // (chunks * tiles)).to(tl.int64)
    rest = pid % (chunks * tiles)
    chunk, tile = (rest // tiles, rest % tiles) if CL else (rest % chunks, rest // chunks)
    element: tl.constexpr = x.dtype.element_ty
    PIXELS: tl.constexpr = 0 if CL else 1
    lc, lp = tl.arange(0, BC), tl.arange(0, BP)
    c0, p0 = tile * BC, chunk * (STEPS * BP)
    c = c0 + lc
    corner = n * C * P + (p0.to(tl.int64) * C + c0 if CL else c0.to(tl.int64) * P + p0)
    dy += corner
    x += corner
    offsets = _offsets(lc, lp, C, P, CL, WIDE)
    m = _over_pixels(tl.load(mean + n * G + c // D, mask=c < C, other=0.0), CL)
    if mean_rest is not None:
        m2 = _over_pixels(tl.load(mean_rest + n * G + c // D, mask=c < C, other=0.0), CL)
    r = _over_pixels(tl.load(rstd + n * G + c // D, mask=c < C, other=0.0), CL)
    gamma = _parameter(weight, c, C, 1.0)
    wide_gamma, beta = _over_pixels(gamma, CL), _over_pixels(_parameter(bias, c, C, 0.0), CL)
    s1 = tl.zeros((BP, BC) if CL else (BC, BP), tl.float32)
    s0 = tl.zeros((BP, BC) if CL else (BC, BP), tl.float32)
    for _ in tl.range(STEPS, num_stages=STAGES):
        mask = None if FULL else _mask(c, p0 + lp, C, P, CL)
        v = tl.load(x + offsets, mask=mask).to(tl.float32)
        d = tl.load(dy + offsets, mask=mask).to(tl.float32)
        v -= m
        if mean_rest is not None:
            v -= m2
        xhat = v * r
        dz = _through_act(d, xhat, wide_gamma, beta, element, ACT, ROUND)
        product = dz * xhat
        s0 += dz if FULL else tl.where(mask, dz, 0.0)
        s1 += product if FULL else tl.where(mask, product, 0.0)
        x += step
        dy += step
        p0 += BP
    s1, s0 = tl.sum(s1, PIXELS), tl.sum(s0, PIXELS)
    if sums is not None:
        at = sums + (n * C + c) * chunks + chunk
        tl.store(at, s1, mask=c < C)
        tl.store(at + sums_stride, s0, mask=c < C)
    if part is not None:
        g = c0 // D + tl.arange(0, NG)
        members = _members(c, g, D) & (c < C)[None, :]
        at = part + (n * G + g) * slots + chunk * K + tile - g * D // BC
        there = (g < G) & (g * D < c0 + BC)
        tl.store(at, tl.sum(_grouped(s1 * gamma, members, NG, EVEN), 1), mask=there)
        tl.store(at + n_stride, tl.sum(_grouped(s0 * gamma, members, NG, EVEN), 1), mask=there)


@triton.jit
def _sum_slots(part, row, g, valid, slots, D, K, BC, N_STRIDE, SLOTS: tl.constexpr):
    """The two sums over the slots of the groups ``g``; the slots are those of ``_pool_slots``."""
    s = tl.arange(0, SLOTS)[None, :]
    gc = g[:, None]
    there = (s < slots) & valid[:, None] & ((gc * D // BC + s % K) * BC < (gc + 1) * D)
    at = part + row + gc * slots + s
    t1 = tl.sum(tl.load(at, mask=there, other=0.0), 1)
    return t1, tl.sum(tl.load(at + N_STRIDE, mask=there, other=0.0), 1)


@triton.jit
def _sum_kernel(
    part, pooled, D, G, slots, n_stride, pooled_stride, K: tl.constexpr, BC: tl.constexpr, SLOTS: tl.constexpr
):
    pid = tl.program_id(0)
    n = (pid // G).to(tl.int64)
    g = pid % G + tl.arange(0, 1)
    t1, t0 = _sum_slots(part, n * G * slots, g, g < G, slots, D, K, BC, n_stride, SLOTS)
    tl.store(pooled + n * G + g, t1)
    tl.store(pooled + pooled_stride + n * G + g, t0)


# A program adds up one channel's sums over all images and chunks: blocks of BN images by BS chunks, in their order.
@triton.jit
def _total_kernel(sums, dweight, dbias, N, C, chunks, BN: tl.constexpr, BS: tl.constexpr):
    pid = tl.program_id(0)
    which, c = (pid // C).to(tl.int64), pid % C
    total = tl.zeros((BN, BS), tl.float32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)[:, None]
        for s0 in range(0, chunks, BS):
            s = s0 + tl.arange(0, BS)[None, :]
            at = ((which * N + n) * C + c) * chunks + s
            total += tl.load(sums + at, mask=(n < N) & (s < chunks), other=0.0)
    if which == 0:
        tl.store(dweight + c, tl.sum(tl.sum(total, 1), 0))
    else:
        tl.store(dbias + c, tl.sum(tl.sum(total, 1), 0))


# A program owns one tile of dx; the sums of its groups it adds up itself or reads, as in _apply_kernel.
@triton.jit
def _apply_backward_kernel(
    dy, x, mean, mean_rest, rstd, weight, bias, part, dx, C, P, D, G, blocks, tiles, slots, n_stride, last,
    K: tl.constexpr, SLOTS: tl.constexpr, PBC: tl.constexpr,
    BC: tl.constexpr, BP: tl.constexpr, NG: tl.constexpr, EVEN: tl.constexpr,
    CL: tl.constexpr, FULL: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    pid = last - tl.program_id(0)
    n = (pid // (blocks * tiles)).to(tl.int64)
    rest = pid % (blocks * tiles)
    block, tile = (rest // tiles, rest % tiles) if CL else (rest % blocks, rest // blocks)
    element: tl.constexpr = x.dtype.element_ty
    lc, lp = tl.arange(0, BC), tl.arange(0, BP)
    c0, p0 = tile * BC, block * BP
    c = c0 + lc
    corner = n * C * P + (p0.to(tl.int64) * C + c0 if CL else c0.to(tl.int64) * P + p0)
    at = corner + _offsets(lc, lp, C, P, CL, WIDE)
    mask = None if FULL else _mask(c, p0 + lp, C, P, CL)
    v = tl.load(x + at, mask=mask, eviction_policy="evict_first")
    d = tl.load(dy + at, mask=mask, eviction_policy="evict_first")

    g = c0 // D + tl.arange(0, NG)
    there = (g < G) & (g * D < c0 + BC)
    if SLOTS == 1:
        t1 = tl.load(part + n * G + g, mask=there, other=0.0)
        t0 = tl.load(part + n_stride + n * G + g, mask=there, other=0.0)
    else:
        t1, t0 = _sum_slots(part, n * G * slots, g, there, slots, D, K, PBC, n_stride, SLOTS)
    size = D * 1.0 * P
    members = _members(c, g, D)
    v = v.to(tl.float32) - _over_pixels(tl.load(mean + n * G + c // D, mask=c < C, other=0.0), CL)
    if mean_rest is not None:
        v -= _over_pixels(tl.load(mean_rest + n * G + c // D, mask=c < C, other=0.0), CL)
    r = tl.load(rstd + n * G + c // D, mask=c < C, other=0.0)
    t1 = _over_pixels(_spread(t1 / size, members, BC, EVEN) * r, CL)
    t0 = _over_pixels(_spread(t0 / size, members, BC, EVEN) * r, CL)
    gamma = _parameter(weight, c, C, 1.0)
    a, r = _over_pixels(gamma * r, CL), _over_pixels(r, CL)
    gamma, beta = _over_pixels(gamma, CL), _over_pixels(_parameter(bias, c, C, 0.0), CL)
    xhat = v * r
    dz = _through_act(d.to(tl.float32), xhat, gamma, beta, element, ACT, ROUND)
    out = dz * a - t0 - xhat * t1
    tl.store(dx + at, out.to(element), mask=mask, eviction_policy="evict_first")


# --- launches -------------------------------------------------------------------------------------------------


class _Tiling(NamedTuple):
    """How the two-launch design cuts an image: a function of the image's shape and layout alone."""

    channels: int  # of a tile
    pixels: int  # of a tile
    steps: int  # tiles of pixels in a chunk
    tiles: int  # along the channels
    chunks: int  # along the pixels
    touched: int  # most tiles that a group touches
    groups: int  # most groups that a tile touches
    full: bool  # no tile sticks out of the image

    @property
    def slots(self) -> int:
        """Partial sums of a group."""
        return self.chunks * self.touched


def _block(size: int, largest: int, smallest: int) -> int:
    """The largest power of 2 up to ``largest`` that covers ``size`` in blocks with nearly the least padding."""
    blocks = [b for b in (1 << k for k in range(13)) if smallest <= b <= max(min(largest, power_of_2(size)), smallest)]
    least = min(-(-size // b) * b for b in blocks)
    return max(b for b in blocks if -(-size // b) * b <= 1.07 * least)


@functools.lru_cache(maxsize=1024)
def _tiling(C: int, P: int, G: int, channels_last: bool) -> _Tiling:
    D = C // G
    if channels_last:
        channels = _block(C, 128, 32)
        pixels = min(_TILE // channels, power_of_2(P))
    else:
        pixels = _block(P, _TILE, 128)
        channels = min(_TILE // pixels, power_of_2(C))
    tiles, blocks = -(-C // channels), -(-P // pixels)
    steps = max(tiles * blocks // _CHUNKS, min(tiles * blocks // 128, 4), 1)  # some work each, if it goes round
    steps = min(steps, blocks)
    firsts = range(0, C, D)
    return _Tiling(
        channels, pixels, steps, tiles, -(-blocks // steps),
        touched=max((c + D - 1) // channels - c // channels + 1 for c in firsts),
        groups=power_of_2(max((min(c + channels, C) - 1) // D - c // D + 1 for c in range(0, C, channels))),
        full=C % channels == 0 and P % (pixels * steps) == 0,
    )  # fmt: skip


def _whole_tile(C: int, P: int, G: int, channels_last: bool, itemsize: int, limit: int) -> tuple[int, int, int] | None:
    """Groups, channels and pixels of the tile of the one-launch design, or None if it does not suit."""
    D, pixels = C // G, power_of_2(P)
    # Rows of at least 64 bytes in channels_last, of tiles with some work for four warps in either layout.
    wanted = max(64 // itemsize if channels_last else 1, min(1024 // pixels, 128))
    groups = min(max(wanted // D, 1), G)
    channels = power_of_2(groups * D)
    if channels * pixels > limit:
        groups = min(max(32 // itemsize // D, 1), G) if channels_last else 1
        channels = power_of_2(groups * D)
    return (groups, channels, pixels) if channels * pixels <= limit else None


def _even(D: int, channels: int, groups: int) -> bool:
    """Whether a tile's channels are that many whole groups of a power of 2."""
    return D * groups == channels and D & (D - 1) == 0


def _warps(elements: int) -> int:
    return min(max(elements // 1024, 4), 16)


class _Forward(NamedTuple):
    form: Form
    launches: tuple[Launch, ...]
    partials: int = 0  # floats of scratch
    pooled: int = 0


@functools.lru_cache(maxsize=4096)
def _forward(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, weight: torch.dtype | None,
    bias: torch.dtype | None, G: int, eps: float, act: int, round_before_act: bool,
    in_parts: bool = False,
) -> _Forward:  # fmt: skip
    """The plan of a call; ``weight`` and ``bias`` only tell calls with other tensors apart.

    With ``in_parts`` three launches for any image: between the last two others may have a say.
    """
    of_x = form(shape, strides)
    channels_last = of_x.channels_last
    N, C = shape[:2]
    P = math.prod(shape[2:])
    if 0 in shape:
        return _Forward(of_x, ())
    D = C // G
    whole = None if in_parts else _whole_tile(C, P, G, channels_last, dtype.itemsize, _ONE_PASS)
    if whole:
        groups, channels, pixels = whole
        tiles, held = -(-G // groups), power_of_2(groups)
        launch = Launch(
            _whole_kernel, N * tiles, (C, P, D, G, tiles, eps),
            (groups, channels, pixels, held, _even(D, channels, held), channels_last, act, round_before_act),
            num_warps=_warps(channels * pixels),
        )  # fmt: skip
        return _Forward(of_x, (launch,))
    t = _tiling(C, P, G, channels_last)
    wide = (t.pixels * C if channels_last else t.channels * P) >= 2**31
    stride, chunk = N * G * t.slots, t.steps * t.pixels
    step = t.pixels * C if channels_last else t.pixels
    tile = (t.channels, t.pixels, t.groups, _even(D, t.channels, t.groups), channels_last)
    partial = Launch(
        _partial_kernel, N * t.chunks * t.tiles, (C, P, D, G, t.chunks, t.tiles, t.slots, stride, step),
        (t.touched, t.steps, _STAGES, *tile, t.full, wide), num_warps=_WARPS,
    )  # fmt: skip
    slots = power_of_2(t.slots)
    pool = None
    if in_parts or t.groups * slots > _POOLED:
        pool = Launch(_pool_kernel, N * G, (C, P, D, G, t.slots, stride, N * G), (chunk, t.touched, t.channels, slots))
        slots, stride = 1, N * G
    blocks = -(-P // t.pixels)
    programs, full = N * blocks * t.tiles, P % t.pixels == 0 and C % t.channels == 0
    apply = Launch(
        _apply_kernel, programs, (C, P, D, G, blocks, t.tiles, t.slots, stride, programs - 1, eps),
        (chunk, t.touched, slots, t.channels, *tile, full, wide, act, round_before_act), num_warps=_WARPS,
    )  # fmt: skip
    launches = (partial, apply) if pool is None else (partial, pool, apply)
    return _Forward(of_x, launches, 2 * N * G * t.slots, 2 * N * G if pool else 0)


@planned
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float, act: int,
    round_before_act: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """``y``, ``mean`` and ``rstd``; see ``reference.py``."""
    (channels_last, whole, strides), launches, partials, pooled = _forward(
        x.shape, x.stride(), x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype,
        num_groups, eps, act, round_before_act,
    )  # fmt: skip
    shape, dtype, device = x.shape, x.dtype, x.device
    stats = (shape[0], num_groups), (num_groups, 1)
    simple = whole and all(p is None or p.is_contiguous() for p in (weight, bias))

    def value(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
        if not simple:
            x, weight, bias = to_layout(x, channels_last), dense(weight), dense(bias)
        y = torch.empty_like(x) if simple else torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if len(launches) == 1:
            launches[0](x, weight, bias, y, mean, rstd)
        elif launches:
            part = torch.empty_strided((partials,), (1,), dtype=torch.float32, device=device)
            launches[0](x, part)
            if pooled:
                own = torch.empty_strided((pooled,), (1,), dtype=torch.float32, device=device)
                launches[1](part, own)
                part = own
            launches[-1](x, part, weight, bias, y, mean, rstd)
        return y

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        mean = torch.empty_strided(*stats, dtype=torch.float32, device=device)
        rstd = torch.empty_like(mean)
        if not launches:
            mean.zero_(), rstd.zero_()
        return value(x, weight, bias, mean, rstd), mean, rstd

    def first(x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any) -> tuple[Tensor]:
        # By the same kernels: without mean and rstd they would compile to other roundings. Nobody reads these two.
        unread = torch.empty_strided(*stats, dtype=torch.float32, device=device)
        return (value(x, weight, bias, unread, unread),)

    run.first = first  # type: ignore[attr-defined]
    return run


class _Backward(NamedTuple):
    form: Form
    launches: tuple[Launch, ...]
    whole: bool  # one launch
    chunks: int  # parts of a channel's sums
    partials: int  # floats of scratch
    pooled: int


@functools.lru_cache(maxsize=4096)
def _backward(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, others: tuple[torch.dtype | None, ...],
    G: int, act: int, round_before_act: bool, need_dx: bool, need_sums: bool,
    in_parts: bool = False,
) -> _Backward:  # fmt: skip
    """The plan of a call; ``others`` and ``need_sums`` only tell calls with other tensors apart."""
    of_x = form(shape, strides)
    channels_last = of_x.channels_last
    N, C = shape[:2]
    P = math.prod(shape[2:])
    if 0 in shape:
        return _Backward(of_x, (), False, 0, 0, 0)
    D = C // G
    whole = None if in_parts else _whole_tile(C, P, G, channels_last, dtype.itemsize, _ONE_PASS_BACKWARD)
    if whole:
        groups, channels, pixels = whole
        tiles, held = -(-G // groups), power_of_2(groups)
        launch = Launch(
            _whole_backward_kernel, N * tiles, (C, P, D, G, tiles, N),
            (groups, channels, pixels, held, _even(D, channels, held), channels_last, act, round_before_act, need_dx),
            num_warps=_warps(2 * channels * pixels),
        )  # fmt: skip
        return _Backward(of_x, (launch,), True, 1, 0, 0)
    t = _tiling(C, P, G, channels_last)
    wide = (t.pixels * C if channels_last else t.channels * P) >= 2**31
    stride, step = N * G * t.slots, t.pixels * C if channels_last else t.pixels
    tile = (t.channels, t.pixels, t.groups, _even(D, t.channels, t.groups), channels_last)
    partial = Launch(
        _partial_backward_kernel, N * t.chunks * t.tiles,
        (C, P, D, G, t.chunks, t.tiles, t.slots, N * C * t.chunks, stride, step),
        (t.touched, t.steps, _STAGES_BACKWARD, *tile, t.full, wide, act, round_before_act), num_warps=_WARPS,
    )  # fmt: skip
    if not need_dx:
        return _Backward(of_x, (partial,), False, t.chunks, 0, 0)
    slots = power_of_2(t.slots)
    pool = None
    if in_parts or t.groups * slots > _POOLED:
        pool = Launch(_sum_kernel, N * G, (D, G, t.slots, stride, N * G), (t.touched, t.channels, slots))
        slots, stride = 1, N * G
    blocks = -(-P // t.pixels)
    programs, full = N * blocks * t.tiles, P % t.pixels == 0 and C % t.channels == 0
    apply = Launch(
        _apply_backward_kernel, programs, (C, P, D, G, blocks, t.tiles, t.slots, stride, programs - 1),
        (t.touched, slots, t.channels, *tile, full, wide, act, round_before_act),
        num_warps=_WARPS,
    )  # fmt: skip
    launches = (partial, apply) if pool is None else (partial, pool, apply)
    return _Backward(of_x, launches, False, t.chunks, 2 * N * G * t.slots, 2 * N * G if pool else 0)


@planned
def group_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int,
    act: int, round_before_act: bool, need_dx: bool, need_dweight: bool, need_dbias: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """``dx``, ``dweight`` and ``dbias``; see ``reference.py``."""
    need_sums = need_dweight or need_dbias
    plan = _backward(
        x.shape, x.stride(), x.dtype,
        (dy.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype),
        num_groups, act, round_before_act, need_dx, need_sums,
    )  # fmt: skip
    channels_last, whole, strides = plan.form
    shape, dtype, device = x.shape, x.dtype, x.device
    N, C = shape[0], shape[1]
    simple = whole and dy.stride() == strides
    simple = simple and all(t is None or t.is_contiguous() for t in (mean, rstd, weight, bias))
    nothing = functools.partial(torch.empty, 0, dtype=torch.float32, device=device)

    def run(
        dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not simple:
            dy, x = to_layout(dy, channels_last), to_layout(x, channels_last)
            mean, rstd, weight, bias = mean.contiguous(), rstd.contiguous(), dense(weight), dense(bias)
        dx = torch.empty_strided(shape, strides, dtype=dtype, device=device) if need_dx else None
        sums = new(x, (2, N, C, plan.chunks), False, torch.float32) if need_sums and plan.launches else None
        if plan.whole:
            plan.launches[0](dy, x, mean, rstd, weight, bias, dx, sums)
        elif plan.launches:
            given = (dy, x, mean, None, rstd, weight, bias)
            part = new(x, (plan.partials,), False, torch.float32) if need_dx else None
            plan.launches[0](*given, sums, part)
            if plan.pooled:
                pooled = new(x, (plan.pooled,), False, torch.float32)
                plan.launches[1](part, pooled)
                part = pooled
            if need_dx:
                plan.launches[-1](*given, part, dx)
        if dx is None:
            dx = x.new_empty(0)
        if not need_sums:
            return dx, nothing(), nothing()
        dweight, dbias = _add_up(x.new_zeros((2, N, C, 1), dtype=torch.float32) if sums is None else sums)
        return dx, dweight if need_dweight else nothing(), dbias if need_dbias else nothing()

    return run


# --- an image in parts: what parts.py calls, the launches of the two-launch design one by one ---------------------


def statistics(x: Tensor, num_groups: int) -> Tensor:
    """``[2, N, num_groups]``: the mean of the deviations from a group's first element, and their rms from that."""
    plan = _forward(x.shape, x.stride(), x.dtype, None, None, num_groups, 0.0, 0, False, True)
    x = x if plan.form.dense else to_layout(x, plan.form.channels_last)
    N = x.shape[0]
    part = x.new_empty(plan.partials, dtype=torch.float32)
    pooled = x.new_empty((2, N, num_groups), dtype=torch.float32)
    plan.launches[0](x, part)
    plan.launches[1](part, pooled)
    return pooled


def normalise(
    x: Tensor, deviations: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float, act: int,
    round_before_act: bool,
) -> Tensor:  # fmt: skip
    """The result for what ``statistics`` gives, of this image or of a larger one that it is a part of."""
    plan = _forward(
        x.shape, x.stride(), x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype,
        num_groups, eps, act, round_before_act, True,
    )  # fmt: skip
    channels_last, whole, strides = plan.form
    x = x if whole else to_layout(x, channels_last)
    y = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    mean, rstd = torch.empty_like(deviations)
    weight, bias = dense(weight), dense(bias)
    plan.launches[2](x, deviations, weight, bias, y, mean, rstd)
    return y


def sums(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int,
    act: int, round_before_act: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sums ``[2, N, num_groups]`` that dx needs, dweight and dbias; the mean is float64."""
    plan, given = _in_parts(dy, x, mean, rstd, weight, bias, num_groups, act, round_before_act)
    N, C = x.shape[:2]
    channel_sums = x.new_empty((2, N, C, plan.chunks), dtype=torch.float32)
    part = x.new_empty(plan.partials, dtype=torch.float32)
    pooled = x.new_empty((2, N, num_groups), dtype=torch.float32)
    plan.launches[0](*given, channel_sums, part)
    plan.launches[1](part, pooled)
    return pooled, *_add_up(channel_sums)


def gradient(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int,
    act: int, round_before_act: bool, means: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient from what ``sums`` gives, added up over the whole image and divided by a group's size."""
    plan, given = _in_parts(dy, x, mean, rstd, weight, bias, num_groups, act, round_before_act)
    dx = torch.empty_like(given[1])
    size = x.shape[1] // num_groups * x.shape[2:].numel()
    plan.launches[2](*given, (means * size).contiguous(), dx)  # which the kernel divides by
    return dx


def _in_parts(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int,
    act: int, round_before_act: bool,
) -> tuple[_Backward, tuple[Any, ...]]:  # fmt: skip
    plan = _backward(
        x.shape, x.stride(), x.dtype,
        (dy.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype),
        num_groups, act, round_before_act, True, True, True,
    )  # fmt: skip
    channels_last, whole, strides = plan.form
    x = x if whole else to_layout(x, channels_last)
    dy = dy if dy.stride() == strides else to_layout(dy, channels_last)
    weight, bias = dense(weight), dense(bias)
    near = mean.to(torch.float32).contiguous()
    rest = (mean - near).to(torch.float32).contiguous()
    return plan, (dy, x, near, rest, rstd.contiguous(), weight, bias)


def _add_up(sums: Tensor) -> tuple[Tensor, Tensor]:
    """``[2, N, C, chunks]`` summed over the images and the chunks; two tensors, for results share no memory."""
    _, N, C, chunks = sums.shape
    if N * chunks > _TOTALLED or sums.numel() == 0:
        return sums[0].sum((0, 2)), sums[1].sum((0, 2))
    dweight, dbias = new(sums, (C,), False), new(sums, (C,), False)
    _totalling(N, C, chunks)(sums, dweight, dbias)
    return dweight, dbias


@functools.lru_cache(maxsize=1024)
def _totalling(N: int, C: int, chunks: int) -> Launch:
    width = min(power_of_2(chunks), 512)
    return Launch(_total_kernel, 2 * C, (N, C, chunks), (min(power_of_2(N), 2048 // width), width))
