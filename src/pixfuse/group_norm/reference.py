"""Group normalisation and SiLU: the definition.

``xhat = (x - mean) * rstd`` with the mean and the variance of each group of ``C / num_groups`` channels of an image,
``rstd = 1 / sqrt(variance + eps)``, ``z = gamma * xhat + beta``, ``y = z`` or ``z * sigmoid(z)``. Everything is
computed in float32 (float64 for float64) and rounded once; ``round_before_act`` rounds ``z`` to the dtype of ``x`` too.

The statistics take two passes, first the mean and then the squares around it. Sums run over ``x`` minus the first
element of the group, so that a large mean costs no accuracy and a constant image has deviations of exactly zero; and
deviations whose squares would leave the range of the dtype are scaled by a power of two first. Neither the element
nor the scale is part of the function, so they carry no derivative.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.layout import compute_dtype, is_channels_last, to_layout

SILU = 1
_UNSCALED = 2.0**40  # deviations from its inverse up to it are squared as they are


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    act: int,
    round_before_act: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``y`` of the shape, dtype and layout of ``x``; ``mean`` and ``rstd`` ``[N, num_groups]`` in the compute dtype."""
    if x.shape[1] == 0:
        stats = x.new_zeros((x.shape[0], num_groups), dtype=compute_dtype(x))
        return to_layout(x + 0, is_channels_last(x)), stats, stats.clone()
    centred, first, mean, scale = _centre(x, num_groups, math.sqrt(eps))
    variance = centred.square().mean(-1, keepdim=True)
    rstd = (variance + eps * scale * scale).rsqrt()
    z = affine((centred * rstd).reshape(x.shape), weight, bias)
    if act == SILU:
        z = F.silu(z.to(x.dtype).to(z.dtype) if round_before_act else z)
    y = to_layout(z.to(x.dtype), is_channels_last(x))
    return y, (first + mean / scale).squeeze(-1), (rstd * scale).squeeze(-1)


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    act: int,
    round_before_act: bool,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dx`` like ``x``; ``dweight`` and ``dbias`` ``[C]`` in the compute dtype; ``[0]`` for what is not needed.

    A function of ``dy``, ``x``, ``weight`` and ``bias`` alone: the statistics follow from ``x``, and ``rstd`` is there
    for its value only (it knows eps). ``bias`` matters for SiLU only.
    """
    dtype, channels_last = compute_dtype(x), is_channels_last(x)
    if x.shape[1] == 0:
        dx = to_layout(dy + 0, channels_last) if need_dx else dy.new_empty(0)
        return dx, dy.new_empty(0, dtype=dtype), dy.new_empty(0, dtype=dtype)
    rstd = rstd.detach().unsqueeze(-1)
    centred, _, _, scale = _centre(x, num_groups, 1 / rstd)
    variance = centred.square().mean(-1, keepdim=True)
    scaled_rstd = ((scale / rstd).square() + (variance - variance.detach())).rsqrt()
    xhat = (centred * scaled_rstd).reshape(x.shape)
    g = through_act(dy.to(dtype), xhat, weight, bias, act, x.dtype if round_before_act else dtype)
    axes = [d for d in range(x.dim()) if d != 1]
    dweight = (g * xhat).sum(axes) if need_dweight else g.new_empty(0)
    dbias = g.sum(axes) if need_dbias else g.new_empty(0)
    if not need_dx:
        return dy.new_empty(0), dweight, dbias
    g, xhat = affine(g, weight, None).reshape(centred.shape), xhat.reshape(centred.shape)
    dx = g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True)
    dx = (scaled_rstd * scale * dx).reshape(x.shape)
    return to_layout(dx.to(x.dtype), channels_last), dweight, dbias


def _centre(x: Tensor, num_groups: int, floor: Tensor | float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``scale * (x - mean)``, the first elements, ``scale * (mean - first)`` and ``scale``.

    They are ``[N, num_groups, size of a group or 1]``. ``floor`` is a lower bound of the normalisation's denominator.
    """
    t = x.to(compute_dtype(x)).reshape(x.shape[0], num_groups, x.shape[1:].numel() // num_groups)
    first = t[..., :1].detach()
    t = t - first
    size = t.detach().abs().amax(-1, keepdim=True).clamp(min=floor)
    extreme = size.isfinite() & (size > 0) & ((size > _UNSCALED) | (size < 1 / _UNSCALED))
    limit = 120 if t.dtype == torch.float32 else 1000
    scale = torch.where(extreme, size.log2().floor().neg().clamp(-limit, limit).exp2(), 1)
    t = t * scale
    mean = t.mean(-1, keepdim=True)
    t = t - mean
    rest = t.mean(-1, keepdim=True)  # the rounding of the mean, felt when the first element is far out
    return t - rest, first, mean + rest, scale


def through_act(
    g: Tensor, xhat: Tensor, weight: Tensor | None, bias: Tensor | None, act: int, z_dtype: torch.dtype
) -> Tensor:
    """The gradient of ``z`` from that of ``y``, where ``z`` was rounded to ``z_dtype``."""
    if act != SILU:
        return g
    z = affine(xhat, weight, bias).to(z_dtype).to(g.dtype)
    s = z.sigmoid()
    return g * (s * (1 + z * (1 - s)))


def affine(t: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``t`` times ``weight`` plus ``bias``, per channel, in the dtype of ``t``."""
    shape = [-1 if d == 1 else 1 for d in range(t.dim())]
    if weight is not None:
        t = t * weight.to(t.dtype).reshape(shape)
    return t if bias is None else t + bias.to(t.dtype).reshape(shape)
