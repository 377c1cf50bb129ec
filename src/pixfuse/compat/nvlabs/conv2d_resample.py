"""``torch_utils.ops.conv2d_resample``: a convolution between an upsampling and a downsampling filter.

The convolutions inside follow ``conv2d_gradfix.no_weight_gradients`` and are cheap to differentiate twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ... import conv2d_resample as _conv2d_resample

__all__ = ["conv2d_resample"]


def conv2d_resample(
    x: Tensor,
    w: Tensor,
    f: Tensor | None = None,
    up: int = 1,
    down: int = 1,
    padding: int | Sequence[int] = 0,
    groups: int = 1,
    flip_weight: bool = True,
    flip_filter: bool = False,
) -> Tensor:
    """See :func:`pixfuse.conv2d_resample`."""
    return _conv2d_resample(x, w, f, up, down, padding, groups, flip_weight, flip_filter)
