"""The image ops of mmcv (``mmcv.ops``) on pixfuse: same names, arguments and padding.

Two values of ``padding`` are ``[x, y]``, each for both sides of its axis. ``use_custom_op`` is checked and otherwise
without effect: both values take the kernel that :func:`pixfuse.backend` reports.

What pixfuse does better on purpose, besides what :mod:`pixfuse.compat.nvlabs` lists:

* Nothing compiled is needed to import, and mmcv-lite is enough.
* ``fused_bias_leakyrelu`` runs on the CPU.
* ``conv2d`` does not warn, and ``no_weight_gradients`` acts on it as on ``conv_transpose2d``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ... import bias_act as _bias_act
from ... import downsample2d as _downsample2d
from ... import filter2d as _filter2d
from ... import filtered_lrelu as _filtered_lrelu
from ... import upfirdn2d as _upfirdn2d
from ... import upsample2d as _upsample2d
from ..._shared import checks
from .._stylegan2 import LeakyReLU, leaky_relu
from . import conv2d_gradfix
from .conv2d_gradfix import conv2d, conv_transpose2d

__all__ = [
    "FusedBiasLeakyReLU",
    "bias_act",
    "conv2d",
    "conv2d_gradfix",
    "conv_transpose2d",
    "downsample2d",
    "filter2d",
    "filtered_lrelu",
    "fused_bias_leakyrelu",
    "upfirdn2d",
    "upsample2d",
]


def upfirdn2d(
    input: Tensor,
    filter: Tensor | None,
    up: int | Sequence[int] = 1,
    down: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
    use_custom_op: bool = True,
) -> Tensor:
    """See :func:`pixfuse.upfirdn2d`; two values of ``padding`` are ``[x, y]``, each for both sides of its axis."""
    checks.flag("upfirdn2d", "use_custom_op", use_custom_op)
    return _upfirdn2d(input, filter, up, down, padding, flip_filter, gain)


def filter2d(
    input: Tensor,
    filter: Tensor | None,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
    use_custom_op: bool = True,
) -> Tensor:
    """See :func:`pixfuse.filter2d`."""
    checks.flag("filter2d", "use_custom_op", use_custom_op)
    return _filter2d(input, filter, padding, flip_filter, gain)


def upsample2d(
    input: Tensor,
    filter: Tensor | None,
    up: int | Sequence[int] = 2,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
    use_custom_op: bool = True,
) -> Tensor:
    """See :func:`pixfuse.upsample2d`; the gain is multiplied by the factors of both axes."""
    checks.flag("upsample2d", "use_custom_op", use_custom_op)
    return _upsample2d(input, filter, up, padding, flip_filter, gain)


def downsample2d(
    input: Tensor,
    filter: Tensor | None,
    down: int | Sequence[int] = 2,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
    use_custom_op: bool = True,
) -> Tensor:
    """See :func:`pixfuse.downsample2d`."""
    checks.flag("downsample2d", "use_custom_op", use_custom_op)
    return _downsample2d(input, filter, down, padding, flip_filter, gain)


def bias_act(
    input: Tensor,
    bias: Tensor | None = None,
    dim: int = 1,
    act: str = "linear",
    alpha: float | None = None,
    gain: float | None = None,
    clamp: float | None = None,
    use_custom_op: bool = True,
) -> Tensor:
    """See :func:`pixfuse.bias_act`."""
    checks.flag("bias_act", "use_custom_op", use_custom_op)
    return _bias_act(input, bias, dim, act, alpha, gain, clamp)


def filtered_lrelu(
    input: Tensor,
    filter_up: Tensor | None = None,
    filter_down: Tensor | None = None,
    bias: Tensor | None = None,
    up: int = 1,
    down: int = 1,
    padding: int | Sequence[int] = 0,
    gain: float = np.sqrt(2),
    slope: float = 0.2,
    clamp: float | None = None,
    flip_filter: bool = False,
    use_custom_op: bool = True,
) -> Tensor:
    """See :func:`pixfuse.filtered_lrelu`."""
    checks.flag("filtered_lrelu", "use_custom_op", use_custom_op)
    return _filtered_lrelu(input, filter_up, filter_down, bias, up, down, padding, gain, slope, clamp, flip_filter)


def fused_bias_leakyrelu(input: Tensor, bias: Tensor, negative_slope: float = 0.2, scale: float = 2**0.5) -> Tensor:
    """``scale * leaky_relu(input + bias, negative_slope)``, the bias along axis 1."""
    checks.floating("fused_bias_leakyrelu", "bias", bias)
    return leaky_relu("fused_bias_leakyrelu", input, bias, negative_slope, scale)


class FusedBiasLeakyReLU(LeakyReLU):
    """The module of :func:`fused_bias_leakyrelu`."""

    def __init__(self, num_channels: int, negative_slope: float = 0.2, scale: float = 2**0.5) -> None:
        super().__init__(num_channels, True, negative_slope, scale)
