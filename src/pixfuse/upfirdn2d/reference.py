"""Upsample, pad, filter, downsample: the definition.

The image is seen as extended by zeros. Along each axis sample ``i`` moves to position ``i * up + pad``, and tap ``a``
of output ``i`` looks at position ``i * down + a``; a negative ``pad`` crops. So the op is a linear map per axis, and
its transpose is the op with ``up`` and ``down`` exchanged, the filter turned around and ``k - 1 - pad`` for ``pad``.

Everything is computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.layout import compute_dtype, is_channels_last, to_layout


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
) -> Tensor:
    """``y`` ``[N, C, out_h, out_w]`` in the dtype and layout of ``x``; ``f`` is None, ``[k]`` or ``[fh, fw]``."""
    y = x.to(compute_dtype(x))
    f = y.new_ones(1, 1) if f is None else f.to(y.dtype)
    if not flip:  # a convolution: the first tap looks at the last position of its window
        f = f.flip([*range(f.dim())])
    if f.dim() == 1:
        y = _sum(f[b] * v for b, v in enumerate(_windows(y, -1, len(f), up_x, down_x, pad_x, out_w)))
        y = _sum(f[a] * v for a, v in enumerate(_windows(y, -2, len(f), up_y, down_y, pad_y, out_h)))
    else:
        fh, fw = f.shape
        y = _sum(
            f[a, b] * v
            for a, row in enumerate(_windows(y, -2, fh, up_y, down_y, pad_y, out_h))
            for b, v in enumerate(_windows(row, -1, fw, up_x, down_x, pad_x, out_w))
        )
    return to_layout((y * gain).to(x.dtype), is_channels_last(x))


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
    """The gradient ``[fh, fw]`` of a 2-D filter, in the compute dtype: for each tap, what it looked at times ``dy``."""
    t, dy = x.to(compute_dtype(x)), dy.to(compute_dtype(dy))
    out_h, out_w = dy.shape[2:]
    taps = [
        (v * dy).sum()
        for row in _windows(t, -2, fh, up_y, down_y, pad_y, out_h)
        for v in _windows(row, -1, fw, up_x, down_x, pad_x, out_w)
    ]
    df = torch.stack(taps).reshape(fh, fw) * gain
    return df if flip else df.flip([0, 1])


def _windows(x: Tensor, axis: int, k: int, up: int, down: int, pad: int, out: int) -> list[Tensor]:
    """For each tap ``a < k`` what the ``out`` outputs along ``axis`` see through it: positions ``i * down + a``."""
    x = x.movedim(axis, -1)
    x = F.pad(x.unsqueeze(-1), (0, up - 1)).flatten(-2)  # zeros after every sample, the last one too
    after = (out - 1) * down + k - x.shape[-1] - pad
    x = F.pad(x, (max(pad, 0), max(after, 0)))
    x = x[..., max(-pad, 0) : x.shape[-1] - max(-after, 0)]
    return [x[..., a : a + (out - 1) * down + 1 : down].movedim(-1, axis) for a in range(k)]


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
