"""``torch_utils.ops.upfirdn2d``: FIR filters with resampling.

What pixfuse does better on purpose:

* ``setup_filter`` never overwrites the array it is given, and refuses a negative gain for a separable filter.
* A float64 image is filtered in float64, a 16-bit one in float32: the taps and the gain are never rounded to 16 bits.
* A negative gain is right for separable filters too. An empty batch and zero channels give empty results everywhere.
* bfloat16 runs on every device. A filter that requires a gradient gets one. numpy integers are integers.
* Integer and complex images are refused instead of computed with truncated taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import downsample2d as _downsample2d
from ... import filter2d as _filter2d
from ... import setup_filter as _setup_filter
from ... import upfirdn2d as _upfirdn2d
from ... import upsample2d as _upsample2d
from ._impl import check_impl

__all__ = ["downsample2d", "filter2d", "setup_filter", "upfirdn2d", "upsample2d"]


def setup_filter(
    f: Any,
    device: torch.device | str = torch.device("cpu"),  # noqa: B008 (the peer's default)
    normalize: bool = True,
    flip_filter: bool = False,
    gain: float = 1,
    separable: bool | None = None,
) -> Tensor:
    """See :func:`pixfuse.setup_filter`."""
    return _setup_filter(f, device, normalize, flip_filter, gain, separable)


def upfirdn2d(
    x: Tensor,
    f: Tensor | None,
    up: int | Sequence[int] = 1,
    down: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
    impl: str = "cuda",
) -> Tensor:
    """See :func:`pixfuse.upfirdn2d`; two values of ``padding`` are ``[x, y]``, each for both sides of its axis."""
    check_impl("upfirdn2d", impl)
    return _upfirdn2d(x, f, up, down, padding, flip_filter, gain)


def filter2d(
    x: Tensor,
    f: Tensor | None,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
    impl: str = "cuda",
) -> Tensor:
    """See :func:`pixfuse.filter2d`."""
    check_impl("filter2d", impl)
    return _filter2d(x, f, padding, flip_filter, gain)


def upsample2d(
    x: Tensor,
    f: Tensor | None,
    up: int | Sequence[int] = 2,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
    impl: str = "cuda",
) -> Tensor:
    """See :func:`pixfuse.upsample2d`; the gain is multiplied by the factors of both axes."""
    check_impl("upsample2d", impl)
    return _upsample2d(x, f, up, padding, flip_filter, gain)


def downsample2d(
    x: Tensor,
    f: Tensor | None,
    down: int | Sequence[int] = 2,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
    impl: str = "cuda",
) -> Tensor:
    """See :func:`pixfuse.downsample2d`."""
    check_impl("downsample2d", impl)
    return _downsample2d(x, f, down, padding, flip_filter, gain)
