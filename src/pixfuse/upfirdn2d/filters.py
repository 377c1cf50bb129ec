"""Building a filter, and ``upfirdn2d`` with the padding that keeps an image where it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._shared import checks
from .._shared.library import ALIASES
from .op import check_tensors, filter_size, parse_factors, parse_padding, resample


def setup_filter(
    f: Any,
    device: torch.device | str = "cpu",
    normalize: bool = True,
    flip_filter: bool = False,
    gain: float = 1,
    separable: bool | None = None,
) -> Tensor:
    """Make the float32 filter that ``upfirdn2d`` takes. ``f`` itself is never changed.

    1. a scalar becomes one tap; a 1-D filter that is not to be separable becomes its outer product with itself
    2. divide by the sum of the elements, if ``normalize`` (a filter of sum 0 has no normal form: inf or NaN)
    3. turn around every axis, if ``flip_filter``
    4. multiply by ``gain``, or by its square root for a separable filter, which acts twice

    Args:
        f: anything that ``torch.as_tensor`` takes, of shape ``[fh, fw]``, ``[k]`` or ``[]``; None is one tap of 1.
        device: where the result lies.
        normalize: make the response to a constant image 1 (before ``gain``).
        flip_filter: turn the filter around.
        gain: factor of the filter, at least 0 if it is separable.
        separable: keep a 1-D filter 1-D; the default does so from 8 taps on.

    Returns:
        float32 ``[fh, fw]`` or ``[k]``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: ``f`` is empty or has more than two axes, or does not fit ``separable`` or ``gain``.

    Example:
        >>> import pixfuse
        >>> pixfuse.setup_filter([1, 3, 3, 1], separable=True)
        tensor([0.1250, 0.3750, 0.3750, 0.1250])
    """
    gain = checks.real("setup_filter", "gain", gain)
    checks.flag("setup_filter", "normalize", normalize)
    checks.flag("setup_filter", "flip_filter", flip_filter)
    if separable is not None:
        checks.flag("setup_filter", "separable", separable)
    try:
        given = f if isinstance(f, Tensor) else torch.as_tensor(1 if f is None else np.array(f))
        if given.is_complex():
            raise TypeError
    except (TypeError, ValueError, RuntimeError):
        checks.refuse("setup_filter", "f", "be None, a real number, or an array of them", f, TypeError)
    if given.dim() > 2 or given.numel() == 0:
        shape = checks.words(f"shape {list(given.shape)}")
        checks.refuse("setup_filter", "f", "have shape [kh, kw], [k] or [] and at least one element", shape)
    if separable and given.dim() == 2:
        checks.refuse("setup_filter", "separable", "be None or False for a 2-D filter", separable)

    checks.strided("setup_filter", "f", given)
    taps = given.to(torch.float64)  # products and sums of float32 taps stay in range
    if taps.dim() == 0:
        taps = taps[None]
    if separable is None:
        separable = taps.dim() == 1 and taps.numel() >= 8
    if separable and gain < 0:
        remedy = "pass separable=False, or the gain to upfirdn2d"
        checks.refuse("setup_filter", "gain", "be at least 0 for a separable filter", gain, remedy=remedy)
    if taps.dim() == 1 and not separable:
        taps = taps[:, None] * taps
    if normalize:
        taps = taps / taps.sum()
    if flip_filter:
        taps = taps.flip([*range(taps.dim())])
    return (taps * gain ** (taps.dim() / 2)).to(device, torch.float32)


def filter2d(
    x: Tensor,
    f: Tensor | None,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
) -> Tensor:
    """Filter every channel of every image, padded with zeros so that the size stays.

    ``upfirdn2d`` with ``k // 2`` zeros before and ``(k - 1) // 2`` after each axis.

    Args:
        x: floating tensor ``[N, C, H, W]``.
        f: filter as for ``upfirdn2d``.
        padding: further padding, as for ``upfirdn2d``; negative values crop.
        flip_filter: correlate instead of convolve.
        gain: factor of the result.

    Returns:
        ``[N, C, H + y0 + y1, W + x0 + x1]`` in the dtype and layout of ``x``.

    Raises:
        TypeError: an argument is of the wrong kind, or a tensor has the wrong dtype.
        ValueError: a size, range or device does not fit.

    Example:
        >>> import torch, pixfuse
        >>> pixfuse.filter2d(torch.ones(1, 1, 1, 4), torch.tensor([[0.5, 0.5]]))
        tensor([[[[0.5000, 1.0000, 1.0000, 1.0000]]]])
    """

    def centre(k: int, up: int, down: int) -> tuple[int, int]:
        return k // 2, (k - 1) // 2

    return _padded("filter2d", centre, x, f, 1, 1, padding, flip_filter, gain)


def upsample2d(
    x: Tensor,
    f: Tensor | None,
    up: int | Sequence[int] = 2,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
) -> Tensor:
    """Enlarge every image ``up`` times: insert zeros, filter, and make up for the zeros by a gain of ``up * up``.

    ``upfirdn2d`` with ``(k + up - 1) // 2`` zeros before and ``(k - up) // 2`` after each axis.

    Args:
        x: floating tensor ``[N, C, H, W]``.
        f: filter as for ``upfirdn2d``.
        up: factor, or ``[x, y]``.
        padding: further padding in positions of the result, as for ``upfirdn2d``; negative values crop.
        flip_filter: correlate instead of convolve.
        gain: factor of the result, on top of that for the zeros.

    Returns:
        ``[N, C, H * up + y0 + y1, W * up + x0 + x1]`` in the dtype and layout of ``x``.

    Raises:
        TypeError: an argument is of the wrong kind, or a tensor has the wrong dtype.
        ValueError: a size, range or device does not fit.

    Example:
        >>> import torch, pixfuse
        >>> pixfuse.upsample2d(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[0.5, 0.5]]), up=[2, 1])
        tensor([[[[1., 1., 2., 2.]]]])
    """

    def centre(k: int, up: int, down: int) -> tuple[int, int]:
        return (k + up - 1) // 2, (k - up) // 2

    return _padded("upsample2d", centre, x, f, up, 1, padding, flip_filter, gain)


def downsample2d(
    x: Tensor,
    f: Tensor | None,
    down: int | Sequence[int] = 2,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
) -> Tensor:
    """Shrink every image ``down`` times: filter, then keep every ``down``-th row and column.

    ``upfirdn2d`` with ``(k - down + 1) // 2`` zeros before and ``(k - down) // 2`` after each axis.

    Args:
        x: floating tensor ``[N, C, H, W]``.
        f: filter as for ``upfirdn2d``.
        down: factor, or ``[x, y]``.
        padding: further padding in positions of ``x``, as for ``upfirdn2d``; negative values crop.
        flip_filter: correlate instead of convolve.
        gain: factor of the result.

    Returns:
        ``[N, C, (H + y0 + y1) // down, (W + x0 + x1) // down]`` in the dtype and layout of ``x``.

    Raises:
        TypeError: an argument is of the wrong kind, or a tensor has the wrong dtype.
        ValueError: a size, range or device does not fit.

    Example:
        >>> import torch, pixfuse
        >>> pixfuse.downsample2d(torch.tensor([[[[1.0, 3.0, 5.0, 7.0]]]]), torch.tensor([[0.5, 0.5]]), down=[2, 1])
        tensor([[[[2., 6.]]]])
    """

    def centre(k: int, up: int, down: int) -> tuple[int, int]:
        return (k - down + 1) // 2, (k - down) // 2

    return _padded("downsample2d", centre, x, f, 1, down, padding, flip_filter, gain)


def _padded(
    op: str,
    centre: Callable[[int, int, int], tuple[int, int]],
    x: Tensor,
    f: Tensor | None,
    up: Any,
    down: Any,
    padding: Any,
    flip_filter: bool,
    gain: float,
) -> Tensor:
    """``upfirdn2d`` with the padding ``centre(k, up, down)`` on each axis besides that of the caller."""
    check_tensors(op, x, f)
    (up_x, up_y), (down_x, down_y) = parse_factors(op, up, down)
    gain = checks.real(op, "gain", gain) * (up_x * up_y)
    fw, fh = filter_size(f)
    more = (*centre(fw, up_x, down_x), *centre(fh, up_y, down_y))
    x0, x1, y0, y1 = (p + q for p, q in zip(parse_padding(op, padding), more, strict=True))
    return resample(op, x, f, (up_x, up_y), (down_x, down_y), (x0, x1, y0, y1), flip_filter, gain)


ALIASES.update({f.__name__: "upfirdn2d" for f in (filter2d, upsample2d, downsample2d)})
