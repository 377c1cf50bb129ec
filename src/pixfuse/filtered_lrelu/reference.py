"""Leaky ReLU between two resampling filters: the definition.

``t = x + b``, ``v = U t`` (upsampling FIR with padding, times up²), ``w = gain * (v if v > 0 else slope * v)``, clamped
to ``[-clamp, clamp]``, ``y = D w`` (downsampling FIR). Everything is computed in float32 (float64 for float64) and
rounded once. A negative clamp stands for none.

U and D are linear, so all derivatives are D, a factor per sample of ``v``, and U, or their transposes. The factor is
``gain``, ``gain * slope`` where not ``v > 0``, and 0 where ``|w| > clamp``; value, tangent and adjoint compute ``v`` by
the same expression. It is constant almost everywhere: the second derivative with respect to ``x`` is zero.

U is computed only where D reads it: ``(out - 1) * down + kd`` samples per axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._shared.layout import compute_dtype, is_channels_last, to_layout
from ..upfirdn2d.op import filter_size
from ..upfirdn2d.reference import upfirdn2d


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
) -> Tensor:
    """``y`` of shape ``[N, C, out_h, out_w]`` in the dtype and layout of ``x``."""
    v = _upsampled(biased(x, b), fu, fd, up, down, pad_x, pad_y, out_w, out_h, flip)
    w = gain * torch.where(v > 0, v, v * slope)
    if clamp >= 0:
        w = w.clamp(-clamp, clamp)
    y = _resample(w, fd, 1, down, 0, 0, out_w, out_h, flip, 1.0)
    return to_layout(y.to(x.dtype), is_channels_last(x))


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
    """``D M(x) U v``: the change of ``y`` for a change ``v`` of ``x``."""
    m = _factor(x, fu, fd, b, up, down, pad_x, pad_y, out_w, out_h, flip, gain, slope, clamp)
    w = m * _upsampled(v.to(m.dtype), fu, fd, up, down, pad_x, pad_y, out_w, out_h, flip)
    y = _resample(w, fd, 1, down, 0, 0, out_w, out_h, flip, 1.0)
    return to_layout(y.to(x.dtype), is_channels_last(x))


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
    """``Uᵀ M(x) Dᵀ dy``: the gradient of ``sum(dy * y)`` with respect to ``x``."""
    m = _factor(x, fu, fd, b, up, down, pad_x, pad_y, out_w, out_h, flip, gain, slope, clamp)
    kw, kh = filter_size(fd)
    dw = _resample(dy.to(m.dtype), fd, down, 1, kw - 1, kh - 1, m.shape[3], m.shape[2], not flip, 1.0)
    kw, kh = filter_size(fu)
    height, width = x.shape[2:]
    gain_up = float(up * up)
    dx = _resample(m * dw, fu, 1, up, kw - 1 - pad_x, kh - 1 - pad_y, width, height, not flip, gain_up)
    return to_layout(dx.to(x.dtype), is_channels_last(x))


def biased(x: Tensor, b: Tensor | None) -> Tensor:
    """``x`` plus the bias per channel, in the compute dtype."""
    t = x.to(compute_dtype(x))
    return t if b is None else t + b.to(t.dtype).reshape(-1, 1, 1)


def _upsampled(
    t: Tensor,
    fu: Tensor | None,
    fd: Tensor | None,
    up: int,
    down: int,
    pad_x: int,
    pad_y: int,
    out_w: int,
    out_h: int,
    flip: bool,
) -> Tensor:
    kw, kh = filter_size(fd)
    width, height = (out_w - 1) * down + kw, (out_h - 1) * down + kh
    return _resample(t, fu, up, 1, pad_x, pad_y, width, height, flip, float(up * up))


def _factor(
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
    v = _upsampled(biased(x, b), fu, fd, up, down, pad_x, pad_y, out_w, out_h, flip)
    m = torch.where(v > 0, torch.full_like(v, gain), gain * slope)
    if clamp >= 0:
        m = torch.where((gain * torch.where(v > 0, v, v * slope)).abs() > clamp, 0, m)
    return m


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
    return upfirdn2d(x, f, up, up, down, down, pad_x, pad_y, out_w, out_h, flip, gain)
