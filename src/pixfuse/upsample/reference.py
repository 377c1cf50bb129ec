"""Resizing in plain PyTorch: the definition.

``upsample_nearest`` repeats every sample. ``interpolate`` applies the tables of ``taps.py`` axis by axis and its
backward the transposed ones. Nearest modes copy samples in their own dtype; the others compute in float32 (float64
for float64) and round once, uint8 to the nearest integer from 0 to 255 (ties to even).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.layout import compute_dtype, is_channels_last, to_layout
from .taps import NEAREST, NEAREST_EXACT, Taps, taps


def upsample_nearest(x: Tensor, scale: Sequence[int], gain: float) -> Tensor:
    """Every sample ``scale[d]`` times along spatial axis ``d``, times ``gain``."""
    y = x.clone() if gain == 1 else x.to(compute_dtype(x)) * gain
    for d, times in enumerate(scale, 2):
        if times != 1:
            y = y.repeat_interleave(times, d)
    return to_layout(y.to(x.dtype), is_channels_last(x))


def upsample_nearest_backward(dy: Tensor, scale: Sequence[int], gain: float) -> Tensor:
    """The sum over each block of ``dy``, times ``gain``."""
    dx = dy.to(compute_dtype(dy)) * gain
    for d, times in enumerate(scale, 2):
        if times != 1:
            dx = dx.unflatten(d, (dx.shape[d] // times, times)).sum(d + 1)
    return to_layout(dx.to(dy.dtype), is_channels_last(dy))


def interpolate(
    x: Tensor, size: Sequence[int], mode: int, align_corners: bool, antialias: bool, scale: Sequence[float]
) -> Tensor:
    """``x`` resized to the spatial ``size``; see ``taps.taps`` for the other arguments."""
    tables = [
        taps(n, out_size, factor, mode, align_corners, antialias)
        for n, out_size, factor in zip(x.shape[2:], size, scale, strict=True)
    ]
    return resize(x, tables, mode in (NEAREST, NEAREST_EXACT))


def resize(x: Tensor, tables: Sequence[Taps | None], copies: bool) -> Tensor:
    """``x`` resized by a table for each spatial axis; ``copies``: the tables only copy samples."""
    y = x.clone() if copies or x.dtype == torch.float64 else x.to(compute_dtype(x))
    for d, table in enumerate(tables, 2):
        y = y if table is None else _gather(y, d, table)
    if y.dtype != x.dtype and x.dtype == torch.uint8:
        y = y.round().clamp(0, 255)
    return to_layout(y.to(x.dtype), is_channels_last(x))


def interpolate_backward(
    dy: Tensor, size: Sequence[int], mode: int, align_corners: bool, antialias: bool, scale: Sequence[float]
) -> Tensor:
    """The transposed map: ``dx`` of the spatial ``size`` of the input."""
    dx = dy.clone() if dy.dtype == torch.float64 else dy.to(compute_dtype(dy))
    for d, (in_size, factor) in enumerate(zip(size, scale, strict=True), 2):
        table = taps(in_size, dy.shape[d], factor, mode, align_corners, antialias)
        dx = dx if table is None else _gather(dx, d, table.transposed(in_size))
    return to_layout(dx.to(dy.dtype), is_channels_last(dy))


def _gather(x: Tensor, dim: int, table: Taps) -> Tensor:
    """The map of ``table`` along axis ``dim``. Samples that an output does not use cannot reach it, not even NaN."""
    along = [-1 if d == dim else 1 for d in range(x.dim())]
    y: Tensor | None = None
    for k in range(table.weights.shape[1]):
        used = table.start + k < table.stop
        taken = (table.start + k * used).clip(max=x.shape[dim] - 1)
        part = x.index_select(dim, torch.from_numpy(taken).to(x.device))
        if not (table.weights[:, k] == 1).all():
            part = part * torch.tensor(table.weights[:, k], dtype=x.dtype, device=x.device).reshape(along)
        if not used.all():
            part = torch.where(torch.from_numpy(used).to(x.device).reshape(along), part, 0)
        y = part if y is None else y + part
    assert y is not None  # a table has at least one column
    return y
