"""The ops of BasicSR (``basicsr.ops``) on pixfuse: same names, arguments and padding.

``pad`` is ``(before, after)`` for both axes, and further values are not read, as in the peer; the kernel is 2-D and
convolves, without gain. The second argument of ``FusedLeakyReLU`` is the slope (in rosinality's, whether there is a
bias).

What pixfuse does better on purpose:

* Nothing is compiled at installation, import or the first call, and no environment variable is needed.
* ``fused_leaky_relu`` runs on the CPU too.
* Sums are kept in float32 for 16-bit images; a kernel may be float32 for any image, and gets its gradient on GPUs too.
* Gradients of any order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._shared import checks
from ._stylegan2 import LeakyReLU, leaky_relu, resample

__all__ = ["FusedLeakyReLU", "fused_leaky_relu", "upfirdn2d"]


def upfirdn2d(input: Tensor, kernel: Tensor, up: int = 1, down: int = 1, pad: Sequence[int] = (0, 0)) -> Tensor:
    """Upsample, pad, convolve, downsample.

    Args:
        input: floating tensor ``[N, C, H, W]``.
        kernel: ``[kh, kw]`` of the dtype of ``input``, or float32.
        up: factor of both axes.
        down: factor of both axes.
        pad: ``(before, after)`` for both axes; negative values crop.
    """
    op = "upfirdn2d"
    if not isinstance(pad, (list, tuple)):
        checks.refuse(op, "pad", "be a sequence (before, after) of ints", pad, TypeError)
    if len(pad) < 2:
        checks.refuse(op, "pad", "be (before, after)", pad)
    up, down = checks.integer(op, "up", up, 1), checks.integer(op, "down", down, 1)
    return resample(input, kernel, up, down, [*pad[:2], *pad[:2]])


def fused_leaky_relu(input: Tensor, bias: Tensor, negative_slope: float = 0.2, scale: float = 2**0.5) -> Tensor:
    """``scale * leaky_relu(input + bias, negative_slope)``, the bias along axis 1."""
    checks.floating("fused_leaky_relu", "bias", bias)
    return leaky_relu("fused_leaky_relu", input, bias, negative_slope, scale)


class FusedLeakyReLU(LeakyReLU):
    """The module of :func:`fused_leaky_relu`."""

    def __init__(self, channel: int, negative_slope: float = 0.2, scale: float = 2**0.5) -> None:
        super().__init__(channel, True, negative_slope, scale)
