"""``torch_utils.ops.filtered_lrelu``: leaky ReLU at a higher resolution, without aliasing.

What pixfuse does better on purpose:

* Every factor, filter size, dtype and layout takes the fused kernel, without warnings, on any stream.
* The bias may have another floating dtype than ``x``. An empty batch works on GPUs.
* The derivative at 0 is ``slope`` on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ... import filtered_lrelu as _filtered_lrelu
from ._impl import check_impl

__all__ = ["filtered_lrelu"]


def filtered_lrelu(
    x: Tensor,
    fu: Tensor | None = None,
    fd: Tensor | None = None,
    b: Tensor | None = None,
    up: int = 1,
    down: int = 1,
    padding: int | Sequence[int] = 0,
    gain: float = np.sqrt(2),
    slope: float = 0.2,
    clamp: float | None = None,
    flip_filter: bool = False,
    impl: str = "cuda",
) -> Tensor:
    """See :func:`pixfuse.filtered_lrelu`."""
    check_impl("filtered_lrelu", impl)
    return _filtered_lrelu(x, fu, fd, b, up, down, padding, gain, slope, clamp, flip_filter)
