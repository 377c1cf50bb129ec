"""Convolution with resampling, and modulated convolution: the definitions, without shortcuts.

``y = D_down · [F if down > 1] · W · [up² F if up > 1] · P · U_up · x``, right to left: zero insertion, one padding,
filter, convolution without padding, filter, decimation. ``U`` to ``F`` and ``F`` to ``D`` are one ``upfirdn2d`` each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..upfirdn2d import upfirdn2d

Quad = tuple[int, int, int, int]


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
        w = w * torch.rsqrt(w.square().sum((2, 3, 4), keepdim=True) + 1e-8)
    return w
