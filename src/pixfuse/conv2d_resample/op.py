"""The public functions ``conv2d_resample`` and ``modulated_conv2d``: compositions of convolutions and ``upfirdn2d``.

What demodulation makes of weight and styles is an op, in ``modulation.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared import checks
from .._shared.conv import as_x_is, autocast_device, conv2d, conv_transpose2d, gate, gated, on_shards, scaled, split_as
from .._shared.layout import cast, compute_dtype, is_channels_last
from .._shared.library import ALIASES
from ..upfirdn2d import upfirdn2d
from ..upfirdn2d.op import Quad, check_fixed_filter, filter_size, parse_padding
from . import reference
from .modulation import modulation
from .reference import EXACT, PLAIN, ROUNDED


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
    """Convolve with optional upsampling before and downsampling after, the filters' padding included.

    1. insert ``up - 1`` zeros after every sample, pad, and if ``up > 1`` filter with ``f``, times ``up**2``
    2. convolve with ``w``, without padding
    3. if ``down > 1`` filter with ``f``, and keep every ``down``-th row and column

    The padding is ``padding`` plus what ``upsample2d`` and ``downsample2d`` add for ``f``, all at the start. Linear
    steps change places where that saves work: 1x1 convolutions run at the low resolution, others as strided or
    transposed ones. Differentiable in ``x`` and ``w`` any number of times.

    Args:
        x: floating tensor ``[N, C, H, W]``.
        w: weight ``[out, C / groups, kh, kw]`` of the dtype of ``x`` (any floating dtype under autocast).
        f: float32 filter ``[fh, fw]`` or ``[k]`` (see ``setup_filter``), or None for one tap of 1; not
            differentiable.
        up: upsampling factor, at least 1.
        down: downsampling factor, at least 1.
        padding: one int, ``[x, y]`` or ``[x0, x1, y0, y1]``, counted in upsampled positions; negative numbers crop.
        groups: number of groups of channels, as in ``torch.nn.functional.conv2d``.
        flip_weight: True correlates with ``w``, as PyTorch does; False convolves.
        flip_filter: False convolves with ``f``; True correlates.

    Returns:
        ``[N, out, (H * up + y0 + y1 - kh + 1) // down, (W * up + x0 + x1 - kw + 1) // down]`` with the numbers of
        ``padding``; the dtype of ``x``, or that of convolutions under autocast.

    Raises:
        TypeError: an argument is of the wrong kind, or a tensor is not floating.
        ValueError: a size, range, dtype or device does not fit, or the result would be empty.

    Source: Karras et al., "Analyzing and Improving the Image Quality of StyleGAN" (2020).

    Example:
        >>> import torch, pixfuse
        >>> x, w = torch.ones(1, 3, 4, 4), torch.ones(8, 3, 3, 3)
        >>> pixfuse.conv2d_resample(x, w, pixfuse.setup_filter([1, 3, 3, 1]), up=2, padding=1).shape
        torch.Size([1, 8, 8, 8])
    """
    op = "conv2d_resample"
    groups = checks.integer(op, "groups", groups, 1)
    _check_flags(op, flip_weight=flip_weight, flip_filter=flip_filter)
    _check_pair(op, x, "w", w, groups)
    if not torch.is_autocast_enabled(autocast_device(x)) and w.dtype != x.dtype:
        checks.refuse(op, "w", f"have the dtype of x ({checks.dtype_name(x.dtype)})", w)
    up, down, pads = _geometry(op, x, w, f, up, down, padding)
    (w,) = as_x_is(op, x, w=w)
    return _resampled(x, w, f, up, down, pads, groups, flip_weight, flip_filter)


def modulated_conv2d(
    x: Tensor,
    weight: Tensor,
    styles: Tensor,
    noise: Tensor | None = None,
    up: int = 1,
    down: int = 1,
    padding: int | Sequence[int] = 0,
    resample_filter: Tensor | None = None,
    demodulate: bool = True,
    flip_weight: bool = True,
    fused_modconv: bool = True,
) -> Tensor:
    """Convolution whose weight is scaled per image by a style, the style block of StyleGAN2.

    1. ``w[n] = weight * styles[n]`` along the input channels
    2. with ``demodulate``: divide ``w[n]`` by ``sqrt(sum(w[n]**2) + 1e-8)`` per output channel
    3. ``conv2d_resample`` of image ``n`` with ``w[n]``, then add ``noise``

    The factors are computed in float32 (float64 for float64) whatever the dtype of ``x``. For 16-bit ``x`` they are
    normalised first (which demodulation undoes), so that no product overflows.

    Args:
        x: floating tensor ``[N, C, H, W]``.
        weight: ``[out, C, kh, kw]`` of any floating dtype.
        styles: ``[N, C]`` of any floating dtype.
        noise: added to the result, of a shape that broadcasts to it, or None.
        up: see ``conv2d_resample``.
        down: see ``conv2d_resample``.
        padding: see ``conv2d_resample``.
        resample_filter: ``f`` of ``conv2d_resample``.
        demodulate: whether to normalise the weights (step 2).
        flip_weight: see ``conv2d_resample``.
        fused_modconv: scale the weights and convolve with a group per image; False scales the images before and
            after one shared convolution instead. The same numbers up to rounding, at another speed. A program that is
            exported for batches of any size takes the latter: no format has a number of groups that varies.
            So do DTensors and images in channels_last, which groups would cost their layout.

    Returns:
        the tensor that ``conv2d_resample`` gives.

    Raises:
        TypeError: an argument is of the wrong kind, or a tensor is not floating.
        ValueError: a size, range, dtype or device does not fit, or the result would be empty.

    Source: Karras et al., "Analyzing and Improving the Image Quality of StyleGAN" (2020), section 2.2.

    Example:
        >>> import torch, pixfuse
        >>> x, weight, styles = torch.ones(2, 3, 4, 4), torch.ones(8, 3, 3, 3), torch.ones(2, 3)
        >>> pixfuse.modulated_conv2d(x, weight, styles, padding=1).shape
        torch.Size([2, 8, 4, 4])
    """
    op = "modulated_conv2d"
    _check_flags(op, demodulate=demodulate, flip_weight=flip_weight, fused_modconv=fused_modconv)
    _check_pair(op, x, "weight", weight, 1)
    checks.floating(op, "styles", styles)
    if styles.dim() != 2 or styles.shape[0] != x.shape[0] or styles.shape[1] != x.shape[1]:
        wanted = f"have shape [{x.shape[0]}, {x.shape[1]}] (images and channels of x)"
        checks.refuse(op, "styles", wanted, checks.words(f"shape {list(styles.shape)}"))
    checks.same_device(op, "styles", styles, x)
    up, down, pads = _geometry(op, x, weight, resample_filter, up, down, padding, "resample_filter")
    if noise is not None:
        _check_noise(op, noise, x, weight, resample_filter, up, down, pads)
        checks.same_device(op, "noise", noise, x)

    weight, styles = as_x_is(op, x, weight=weight, styles=styles)
    n, c, h, width = x.shape
    conv = (resample_filter, up, down, pads)
    # Split images and images in channels_last stay as they are where one convolution has all of them.
    one_for_all = on_shards(x) or is_channels_last(x) or (torch.compiler.is_exporting() and isinstance(n, torch.SymInt))
    shared = not fused_modconv or one_for_all or 0 in (n, c, weight.shape[0])
    w, s, d = _factors(x, weight, styles, demodulate, shared)
    if shared:
        y = _resampled(x, cast(w, x.dtype), *conv, 1, flip_weight, False, cast(s, x.dtype), source=weight)
        if d is not None:
            y = scaled(y, cast(d, y.dtype))
    else:
        w = cast(w, compute_dtype(x)) * cast(s, compute_dtype(x))[:, None, :, None, None]
        if d is not None:
            w = w * d[:, :, None, None, None]
        w, x = w.to(x.dtype).flatten(0, 1), x.reshape(1, n * c, h, width)
        y = _resampled(x, w, *conv, n, flip_weight, False, gated=False)  # w is made of styles too
        y = y.reshape(n, -1, *y.shape[2:])
    return y if noise is None else split_as(y, y + split_as(y, noise).to(y.dtype))


def _factors(
    x: Tensor, weight: Tensor, styles: Tensor, demodulate: bool, shared: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weight, styles and the demodulation ``[N, out]``, such that the result is ``demodulation * (w * (s * x))``.

    For 16-bit ``x`` they are normalised, and for a ``shared`` convolution rounded; see ``reference.modulation``.
    """
    by_definition = _by_definition(x)
    if by_definition or not shared:  # else the op and the convolution do that
        weight = gate(weight)
    if not demodulate:
        return weight, styles, None
    if compute_dtype(weight) != compute_dtype(x):
        weight = weight.to(compute_dtype(x))
    dtype = PLAIN
    if x.dtype.itemsize == 2:  # autocast rounds by itself
        dtype = ROUNDED.index(x.dtype) if shared and not torch.is_autocast_enabled(autocast_device(x)) else EXACT
    channels_last = dtype != PLAIN and is_channels_last(x)
    if by_definition:
        with torch.autocast("cpu", enabled=False):
            w, s, d = reference.modulation(weight, styles, dtype, channels_last, False)
    else:
        w, s, d = modulation(weight, styles, dtype, channels_last, gated(weight))
    return (weight, styles, d) if dtype == PLAIN else (w, s, d)


def _by_definition(x: Tensor) -> bool:
    """Whether autograd shall see into the factors: it keeps what an op without a kernel computes twice."""
    return x.device.type == "cpu" and not on_shards(x)


def _resampled(
    x: Tensor,
    w: Tensor,
    f: Tensor | None,
    up: int,
    down: int,
    pads: Quad,
    groups: int,
    flip_weight: bool,
    flip_filter: bool,
    scale: Tensor | None = None,
    gated: bool = True,
    source: Tensor | None = None,
) -> Tensor:
    """The formula of ``reference.conv2d_resample`` with its linear steps in the cheapest order.

    ``scale`` ``[N, C]`` multiplies ``x``, or what a filter made of it. The last two as in ``_shared.conv.conv2d``.
    """
    if up > 1 and torch.compiler.is_compiling():  # Inductor transposes no convolution by a weight of symbolic size
        for size in w.shape:
            operator.index(size)  # makes it a constant
    kh, kw = map(int, w.shape[2:])
    x0, x1, y0, y1 = pads
    if x.numel() == 0 or w.numel() == 0:  # convolutions refuse some of these
        height, width = _sizes(x, w, f, up, down, pads)
        x = x if scale is None else scaled(x, scale)
        return (x.sum() + (gate(w) if gated else w).sum()).expand(x.shape[0], w.shape[0], height, width).contiguous()
    how = (groups, flip_weight, scale, gated, source)
    if up == 1 and (down == 1 or f is None):  # no filter at all
        if x0 == x1 >= 0 and y0 == y1 >= 0:
            return _conv(x, w, down, (y0, x0), *how)
        return _conv(upfirdn2d(x, None, padding=pads), w, down, (0, 0), *how)
    if up == 1:
        if kh == kw == 1:  # filter and decimate first
            return _conv(upfirdn2d(x, f, 1, down, pads, flip_filter), w, 1, (0, 0), *how)
        return _conv(upfirdn2d(x, f, 1, 1, pads, flip_filter), w, down, (0, 0), *how)

    if kh == kw == 1:  # convolve before inserting zeros
        y = upfirdn2d(_conv(x, w, 1, (0, 0), *how), f, up, 1, pads, flip_filter, up**2)
    else:
        # The transposed convolution inserts the zeros and pads by k - 1 - inner on all sides (leaving out the zeros
        # after the last sample); the filter's step pads what is then lacking, or crops what is too much.
        x0, x1, y0, y1 = x0 - (kw - 1), x1 - (kw - up), y0 - (kh - 1), y1 - (kh - up)
        inner_x, inner_y = max(min(-x0, -x1, kw - 1), 0), max(min(-y0, -y1, kh - 1), 0)
        y = _conv_transposed(x, w, up, (inner_y, inner_x), *how)
        rest = (x0 + inner_x, x1 + inner_x, y0 + inner_y, y1 + inner_y)
        y = upfirdn2d(y, f, 1, 1, rest, flip_filter, up**2)
    return y if down == 1 else upfirdn2d(y, f, 1, down, 0, flip_filter)


def _conv(
    x: Tensor,
    w: Tensor,
    stride: int,
    padding: tuple[int, int],
    groups: int,
    flip_weight: bool,
    scale: Tensor | None,
    gated: bool,
    source: Tensor | None,
) -> Tensor:
    w = w if flip_weight or w.shape[2] == w.shape[3] == 1 else w.flip(2, 3)
    return conv2d(x, w, stride=stride, padding=padding, groups=groups, scale=scale, gated=gated, source=source)


def _conv_transposed(
    x: Tensor,
    w: Tensor,
    stride: int,
    padding: tuple[int, int],
    groups: int,
    flip_weight: bool,
    scale: Tensor | None,
    gated: bool,
    source: Tensor | None,
) -> Tensor:
    """Convolution of ``x`` with ``stride - 1`` zeros between its samples; a transposed one scatters, so convolves."""
    w = w.flip(2, 3) if flip_weight else w
    # [in, out / groups, kh, kw]
    w = w.transpose(0, 1) if groups == 1 else w.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return conv_transpose2d(
        x, w, stride=stride, padding=padding, groups=groups, scale=scale, gated=gated, source=source
    )


# --- checks ---------------------------------------------------------------------------------------------------


def _check_flags(op: str, **flags: Any) -> None:
    for name, value in flags.items():
        checks.flag(op, name, value)


def _check_pair(op: str, x: Any, name: str, w: Any, groups: int) -> None:
    """``x`` is an image, and ``w`` a weight for it."""
    checks.image(op, x, (4,))
    checks.floating(op, name, w)
    wanted = None  # words are made for a refusal only: a compiled call with dynamic sizes has no constant ones
    if w.dim() != 4 or 0 in w.shape[2:]:
        wanted = "be 4-D ([out, in / groups, kh, kw]) with at least one tap"
    elif x.shape[1] != w.shape[1] * groups:
        wanted = f"have {x.shape[1]} / {groups} input channels (channels of x / groups)"
    if wanted is not None:
        checks.refuse(op, name, wanted, checks.words(f"shape {list(w.shape)}"))
    if w.shape[0] % groups:
        checks.refuse(op, "groups", f"divide the {w.shape[0]} output channels of {name}", groups)
    checks.same_device(op, name, w, x)


def _geometry(
    op: str, x: Tensor, w: Tensor, f: Any, up: Any, down: Any, padding: Any, name: str = "f"
) -> tuple[int, int, Quad]:
    """Factors, and the padding with the filters' own: ``(x0, x1, y0, y1)``. Checks them, ``f`` and the size."""
    up, down = checks.integer(op, "up", up, 1), checks.integer(op, "down", down, 1)
    given = parse_padding(op, padding)
    check_fixed_filter(op, name, f, x)
    pads = list(given)
    for axis, k in enumerate(map(int, filter_size(f))):  # torch.jit.trace has tensors there
        if up > 1:
            pads[2 * axis] += (k + up - 1) // 2
            pads[2 * axis + 1] += (k - up) // 2
        if down > 1:
            pads[2 * axis] += (k - down + 1) // 2
            pads[2 * axis + 1] += (k - down) // 2
    quad: Quad = (pads[0], pads[1], pads[2], pads[3])
    height, width = _sizes(x, w, f, up, down, quad)
    if height < 1 or width < 1:
        got = checks.words(f"{list(given)} for x of shape {list(x.shape)} and a weight of shape {list(w.shape)}")
        checks.refuse(op, "padding", "leave at least one output sample", got)
    return up, down, quad


def _sizes(x: Tensor, w: Tensor, f: Tensor | None, up: int, down: int, pads: Quad) -> tuple[Any, Any]:
    """Height and width of the result."""
    fw, fh = filter_size(f)
    taps = (up > 1) + (down > 1)
    height = x.shape[2] * up + pads[2] + pads[3] - (w.shape[2] - 1) - taps * (fh - 1)
    width = x.shape[3] * up + pads[0] + pads[1] - (w.shape[3] - 1) - taps * (fw - 1)
    return (height - 1) // down + 1, (width - 1) // down + 1


def _check_noise(
    op: str, noise: Any, x: Tensor, weight: Tensor, f: Tensor | None, up: int, down: int, pads: Quad
) -> None:
    checks.floating(op, "noise", noise)
    shape = (x.shape[0], weight.shape[0], *_sizes(x, weight, f, up, down, pads))
    fits = noise.dim() <= 4 and all(
        a == 1 or a == b for a, b in zip(reversed(noise.shape), reversed(shape), strict=False)
    )
    if not fits:
        wanted = f"broadcast to the result's shape {list(shape)}"
        checks.refuse(op, "noise", wanted, checks.words(f"shape {list(noise.shape)}"))


ALIASES.update({f.__name__: "upfirdn2d" for f in (conv2d_resample, modulated_conv2d)})  # their only op with kernels
