"""Convolution with resampling, modulated convolution and the factors of that: the definitions, without shortcuts.

``y = D_down · [F if down > 1] · W · [up² F if up > 1] · P · U_up · x``, right to left: zero insertion, one padding,
filter, convolution without padding, filter, decimation. ``U`` to ``F`` and ``F`` to ``D`` are one ``upfirdn2d`` each.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.layout import cast, compute_dtype, is_channels_last, to_layout
from ..upfirdn2d import upfirdn2d

Quad = tuple[int, int, int, int]

EPS = 1e-8
# What ``modulation`` gives: only the demodulation; all three factors rounded to one of two dtypes, or not rounded.
PLAIN, BFLOAT16, FLOAT16, EXACT = range(4)
ROUNDED = (None, torch.bfloat16, torch.float16, None)


def conv2d_resample(
    x: Tensor,
    w: Tensor,
    f: Tensor | None,
    up: int,
    down: int,
    padding: Quad,
    groups: int,
    flip_weight: bool,
    flip_filter: bool,
) -> Tensor:
    """``y`` by the formula; ``padding`` is all of it, ``(x0, x1, y0, y1)``."""
    y = upfirdn2d(x, f if up > 1 else None, up, 1, padding, flip_filter, up**2)
    y = F.conv2d(y, w if flip_weight else w.flip(2, 3), groups=groups)
    return upfirdn2d(y, f if down > 1 else None, 1, down, 0, flip_filter)


def modulated_weight(weight: Tensor, styles: Tensor, demodulate: bool) -> Tensor:
    """The weights ``[N, out, in, kh, kw]`` of each image (Karras et al. 2020, equations 1 and 3)."""
    w = weight * styles[:, None, :, None, None]
    if demodulate:
        w = w * torch.rsqrt(w.square().sum((2, 3, 4), keepdim=True) + EPS)
    return w


def modulation(
    weight: Tensor, styles: Tensor, dtype: int, channels_last: bool, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``w`` ``[O, C, kh, kw]``, ``s`` ``[N, C]``, ``demodulation`` ``[N, O]``: the image is ``d * conv(s * x, w)``.

    PLAIN: ``w`` and ``s`` are the arguments themselves, so they come empty. Else each row of the weight and of the
    styles is divided by its largest magnitude (the weight's also by the root of its length), so that no product
    overflows in 16 bits. The demodulation multiplies that back, so it counts as a constant for the gradients.

    ``channels_last`` is the layout of ``w``. ``gated``: the weight's gradient heeds ``no_weight_gradients``.
    """
    w, s, _, _, _, power = _factors(weight, styles, dtype)
    d = power.rsqrt()
    if dtype == PLAIN:
        return w.new_empty(0), s.new_empty(0), d
    rounded = ROUNDED[dtype] or w.dtype
    return to_layout(w.to(rounded), channels_last), s.to(rounded).contiguous(), d.to(rounded)


def modulation_backward(
    weight: Tensor,
    styles: Tensor,
    dw: Tensor | None,
    ds: Tensor | None,
    dd: Tensor | None,
    dtype: int,
    need_dweight: bool,
    need_dstyles: bool,
) -> tuple[Tensor, Tensor]:
    """``dweight`` and ``dstyles`` like ``weight`` and ``styles`` from the gradients of the three factors.

    None stands for zeros; ``[0]`` for what is not needed. The factors are computed again.
    """
    w, s, largest_w, largest_s, squares, power = _factors(weight, styles, dtype)
    dpower = None if dd is None else dd.to(w.dtype) * power.rsqrt() ** 3 * -0.5
    dweight, dstyles = weight.new_empty(0), styles.new_empty(0)
    if need_dweight:
        dw = torch.zeros_like(w) if dw is None else dw.to(w.dtype)
        if dpower is not None:
            dw = dw + 2 * w * (dpower.mT @ s.square())[:, :, None, None]
        dweight = to_layout(_over(dw, largest_w).to(weight.dtype), is_channels_last(weight))
    if need_dstyles:
        ds = torch.zeros_like(s) if ds is None else ds.to(s.dtype)
        if dpower is not None:
            ds = ds + 2 * s * (dpower[:, :, None] * squares).sum(1)
        dstyles = _over(ds, largest_s).to(styles.dtype).contiguous()
    return dweight, dstyles


def modulation_second(
    ddweight: Tensor | None,
    ddstyles: Tensor | None,
    weight: Tensor,
    styles: Tensor,
    dw: Tensor | None,
    ds: Tensor | None,
    dd: Tensor | None,
    dtype: int,
) -> tuple[Tensor | None, ...]:
    """The gradients of the first five arguments of ``modulation_backward`` from those of its results; None for zeros.

    With ``a`` and ``b``, the given gradients divided as ``w`` and ``s`` were, what is differentiated is
    ``sum(a dw) + sum(b ds) - sum(dd power^(-3/2) inner)``, where ``inner = (b s) @ squares^T + s^2 @ products^T`` and
    ``products`` are the sums of ``a w`` over the taps.
    """
    w, s, largest_w, largest_s, squares, power = _factors(weight, styles, dtype)
    a = None if ddweight is None else _over(cast(ddweight, w.dtype), largest_w)
    b = None if ddstyles is None else _over(cast(ddstyles, s.dtype), largest_s)
    ddw = None if a is None or dw is None else cast(a, dw.dtype)
    dds = None if b is None or ds is None else cast(b, ds.dtype)
    if dd is None or (a is None and b is None):
        return None, None, ddw, dds, None
    root, energies = power.rsqrt(), s.square()
    slope = -(root**3)
    dinner = cast(dd, w.dtype) * slope
    terms = []
    if a is not None:
        products = (a * w).sum((2, 3))
        terms.append(energies @ products.mT)
    if b is not None:
        bs = b * s
        terms.append(bs @ squares.mT)
    inner = functools.reduce(torch.add, terms)
    dpower = dinner * inner * (root.square() * -1.5)
    dsquares, denergies = dpower.mT @ energies, dpower @ squares
    if b is not None:
        dsquares = dsquares + dinner.mT @ bs
    if a is not None:
        denergies = denergies + dinner @ products
    total_w, total_s = 2 * w * dsquares[:, :, None, None], 2 * s * denergies
    if a is not None:
        total_w = total_w + (dinner.mT @ energies)[:, :, None, None] * a
    if b is not None:
        total_s = total_s + (dinner @ squares) * b
    dweight = to_layout(cast(_over(total_w, largest_w), weight.dtype), is_channels_last(weight))
    return dweight, cast(_over(total_s, largest_s), styles.dtype), ddw, dds, cast(slope * inner, dd.dtype)


def _factors(
    weight: Tensor, styles: Tensor, dtype: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """``w``, ``s``, what they were divided by, ``sum w^2`` ``[O, C]``, and the demodulation to the power -2."""
    w, s = (cast(t, compute_dtype(weight)) for t in (weight, styles))
    largest_w = largest_s = None
    eps: Tensor | float = EPS
    if dtype != PLAIN:
        tiny = torch.finfo(w.dtype).tiny
        if w.shape[1] > 0:
            largest_w = w.detach().abs().amax((1, 2, 3), keepdim=True).clamp(min=tiny) * math.prod(w.shape[1:]) ** 0.5
            largest_s = s.detach().abs().amax(1, keepdim=True).clamp(min=tiny)
        else:
            largest_w, largest_s = w.new_ones(w.shape[0], 1, 1, 1), s.new_ones(s.shape[0], 1)
        w, s = w / largest_w, s / largest_s
        eps = (EPS**0.5 / largest_s / largest_w.reshape(1, -1)).square()
    squares = w.square().sum((2, 3))
    # No matrix product: what that gives for an image depends on how many there are.
    return w, s, largest_w, largest_s, squares, (s.square()[:, None, :] * squares).sum(2) + eps


def _over(t: Tensor, largest: Tensor | None) -> Tensor:
    return t if largest is None else t / largest
