"""The ops of rosinality's stylegan2-pytorch (``op``) on pixfuse: same names, arguments and padding.

Two values of ``pad`` are ``(before, after)`` for both axes; the kernel is 2-D and convolves, without gain.

What pixfuse does better on purpose:

* Importing compiles nothing, and works without a GPU.
* ``negative_slope`` counts on the CPU too (the peer always takes 0.2 there).
* Sums are kept in float32 for 16-bit images; a kernel may be float32 for any image, and gets its gradient on GPUs too.
* Gradients of any order. Zero channels give an empty result. A 1-D input of ``fused_leaky_relu`` is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..._shared import checks
from .._stylegan2 import LeakyReLU, leaky_relu, resample
from . import conv2d_gradfix

__all__ = ["FusedLeakyReLU", "conv2d_gradfix", "fused_leaky_relu", "upfirdn2d"]


def upfirdn2d(
    input: Tensor,
    kernel: Tensor,
    up: int | Iterable[int] = 1,
    down: int | Iterable[int] = 1,
    pad: Sequence[int] = (0, 0),
) -> Tensor:
    """Upsample, pad, convolve, downsample.

    Args:
        input: floating tensor ``[N, C, H, W]``.
        kernel: ``[kh, kw]`` of the dtype of ``input``, or float32.
        up: factor, or ``(x, y)``.
        down: factor, or ``(x, y)``.
        pad: ``(before, after)`` for both axes, or ``(x0, x1, y0, y1)``; negative values crop.
    """
    if not isinstance(pad, (list, tuple)):
        checks.refuse("upfirdn2d", "pad", "be a sequence of 2 or 4 ints", pad, TypeError)
    if len(pad) not in (2, 4):
        checks.refuse("upfirdn2d", "pad", "be (before, after) or (x0, x1, y0, y1)", pad)
    return resample(input, kernel, _factor(up), _factor(down), [*pad, *pad][:4])


def _factor(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, Tensor)) else value


def fused_leaky_relu(
    input: Tensor, bias: Tensor | None = None, negative_slope: float = 0.2, scale: float = 2**0.5
) -> Tensor:
    """``scale * leaky_relu(input + bias, negative_slope)``, the bias along axis 1."""
    return leaky_relu("fused_leaky_relu", input, bias, negative_slope, scale)


class FusedLeakyReLU(LeakyReLU):
    """The module of :func:`fused_leaky_relu`."""

    def __init__(self, channel: int, bias: bool = True, negative_slope: float = 0.2, scale: float = 2**0.5) -> None:
        super().__init__(channel, checks.flag("FusedLeakyReLU", "bias", bias), negative_slope, scale)
