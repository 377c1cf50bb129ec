"""The public functions ``upsample_nearest`` and ``interpolate``, and four operators: both maps and their transposes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared import checks
from .._shared.batching import into_batch
from .._shared.calls import remembered
from .._shared.layout import empty, is_channels_last, to_layout
from .._shared.library import Op, define_op, gpu_module, linear
from .._shared.sharding import IMAGE, Sharding, Window, inside
from . import reference
from .taps import AREA, CUBIC, LANCZOS, LINEAR, NEAREST, NEAREST_EXACT, axis_taps

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_COPIES = (NEAREST, NEAREST_EXACT)
_ALIGNED = (LINEAR, CUBIC)  # the modes that may align corners

# name: the op's mode and the ranks of x that it takes
_MODES = {
    "nearest": (NEAREST, (3, 4, 5)),
    "nearest-exact": (NEAREST_EXACT, (3, 4, 5)),
    "linear": (LINEAR, (3,)),
    "bilinear": (LINEAR, (4,)),
    "bicubic": (CUBIC, (4,)),
    "trilinear": (LINEAR, (5,)),
    "area": (AREA, (3, 4, 5)),
    "lanczos": (LANCZOS, (4,)),
}
_NAMES = tuple(_MODES)


@remembered()
def upsample_nearest(x: Tensor, scale: int | Sequence[int], gain: float = 1.0) -> Tensor:
    """Repeat every sample of an image a whole number of times along each spatial axis, and scale the result.

    ``y[n, c, i, j] = gain * x[n, c, i // scale[0], j // scale[1]]``, for one to three spatial axes.

    Args:
        x: tensor ``[N, C, *spatial]``, 3-D to 5-D: float64, float32, bfloat16, float16, bool or integer; any strides.
        scale: repetitions, an int ``>= 1`` for all spatial axes or one for each, in the order of the axes.
        gain: factor of the result, computed in float32 (float64 for float64) and rounded once; must be 1 for bool
            and integer images.

    Returns:
        a tensor ``[N, C, *(size * scale)]`` of the dtype and layout of ``x``. The gradient sums over each block,
        without atomics.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: a size or range does not fit.

    Example:
        >>> import torch, pixfuse
        >>> pixfuse.upsample_nearest(torch.tensor([[[1.0, 2.0]]]), 2)
        tensor([[[1., 1., 2., 2.]]])
    """
    op = "upsample_nearest"
    _check_image(op, x)
    factors = _check_scale(op, x.dim() - 2, scale)
    gain = checks.real(op, "gain", gain)
    _check_gain(op, x, gain)
    checks.result_size(op, "scale", (*x.shape, *factors), scale)
    result: Tensor = _nearest(x, factors, gain)
    return result


@remembered()
def interpolate(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    antialias: bool = False,
    recompute_scale_factor: bool | None = None,
) -> Tensor:
    """Resize an image as :func:`torch.nn.functional.interpolate` does, with one index rule for values and gradients.

    1. The output size is ``size``, or ``floor(input size * scale_factor)`` in float64.
    2. The source step of an axis is ``1 / scale_factor``; the ratio of the sizes where ``size`` is given, where
       ``recompute_scale_factor`` is true and for area; ``(in - 1) / (out - 1)`` with aligned corners. An axis whose
       size does not change is copied bit for bit, whatever the factor.
    3. Along each axis an output sample is a weighted sum of input samples; ``taps.py`` has the rules. Indices and
       weights are computed in float64 for every dtype of ``x``.
    4. Sums are float32 (float64 for float64) and rounded once; uint8 is rounded to nearest and saturated.

    Args:
        x: tensor ``[N, C, *spatial]``, 3-D to 5-D: float64, float32, bfloat16 or float16; also uint8, and for
            nearest and nearest-exact bool and every signed integer; any strides.
        size: spatial size of the result, an int for all axes or one for each, ``>= 1``.
        scale_factor: multiple of the input size, a positive number for all axes or one for each. Give either
            ``size`` or ``scale_factor``.
        mode: nearest, nearest-exact, area; linear (3-D x), bilinear, bicubic, lanczos (4-D), trilinear (5-D).
        align_corners: for linear, bilinear, bicubic and trilinear: whether the centres of the corner samples stay
            in place; None for False.
        antialias: stretch the kernel when shrinking, as Pillow does: for bilinear, bicubic and lanczos, which
            requires it.
        recompute_scale_factor: with ``scale_factor``: use it for the output size only.

    Returns:
        a tensor ``[N, C, *size]`` of the dtype and layout of ``x``. Its gradient gathers with the transposed
        weights.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: a size, range, name or combination does not fit.

    Example:
        >>> import torch, pixfuse
        >>> pixfuse.interpolate(torch.tensor([[[0.0, 4.0]]]), size=4, mode="linear")
        tensor([[[0., 1., 3., 4.]]])
    """
    op = "interpolate"
    checks.choice(op, "mode", mode, _NAMES)
    code, ranks = _MODES[mode]
    _check_image(op, x)
    if x.dim() not in ranks:
        checks.refuse(
            op, "x", f"be {ranks[0]}-D for mode {mode!r}", checks.words(f"{x.dim()}-D of shape {list(x.shape)}")
        )
    if antialias is not False:
        checks.flag(op, "antialias", antialias)
    if align_corners is not None:
        checks.flag(op, "align_corners", align_corners)
        if code in (*_COPIES, AREA):
            checks.refuse(op, "align_corners", f"be None for mode {mode!r}", align_corners)
    if recompute_scale_factor is not None:
        checks.flag(op, "recompute_scale_factor", recompute_scale_factor)
    spatial = x.shape[2:]
    if (size is None) == (scale_factor is None):
        given = "neither" if size is None else "both"
        checks.refuse(op, "size or scale_factor", "be given, one of the two", checks.words(given))
    if size is not None:
        if recompute_scale_factor:
            checks.refuse(op, "recompute_scale_factor", "be None or False with an explicit size", True)
        sizes = _per_axis(op, "size", size, len(spatial), checks.integer)
        checks.result_size(op, "size", (*x.shape[:2], *sizes), size)
        factors = [0.0] * len(sizes)
    else:
        factors = _per_axis(op, "scale_factor", scale_factor, len(spatial), checks.real)
        floor = torch.sym_int if torch.compiler.is_compiling() else int  # int takes a tenth of the time
        sizes = []
        for n, factor in zip(spatial, factors, strict=True):
            if not 0 < factor < math.inf:
                checks.refuse(op, "scale_factor", "be positive and finite", factor)
            sizes.append(floor(n * factor))
            if sizes[-1] < 1 <= n:
                checks.refuse(op, "scale_factor", f"give at least one sample from an axis of {n}", factor)
        checks.result_size(op, "scale_factor", (*x.shape[:2], *sizes), scale_factor)
        if recompute_scale_factor or align_corners or code == AREA:
            factors = [0.0] * len(sizes)
    if not torch.compiler.is_dynamo_compiling():  # the fake kernel does
        _check_combination(x, sizes, code, bool(align_corners), antialias)
    result: Tensor = _interpolate(x, sizes, code, bool(align_corners), antialias, factors)
    return result


# --- checks ---------------------------------------------------------------------------------------------------


def _check_image(op: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        checks.refuse(op, "x", "be a tensor", checks.words(type(x).__name__), TypeError)
    if x.dtype not in checks.FLOATS and x.dtype not in _INTEGERS:
        wanted = "be floating (float64, float32, bfloat16, float16), bool, uint8 or a signed integer"
        checks.refuse(op, "x", wanted, x, TypeError)
    checks.strided(op, "x", x)
    if x.dim() not in (3, 4, 5):
        got = checks.words(f"{x.dim()}-D of shape {list(x.shape)}")
        checks.refuse(op, "x", "be 3-D or 4-D or 5-D ([N, C, *spatial])", got)
    checks.spatial(op, x)


def _per_axis(op: str, argument: str, value: Any, axes: int, check: Callable[..., Any], *limits: int) -> list[Any]:
    """One checked value for each axis from one for all or a sequence of them."""
    if not isinstance(value, (list, tuple)):
        return [check(op, argument, value, *limits)] * axes
    if len(value) != axes:
        checks.refuse(op, argument, f"be one number or one for each of the {axes} spatial axes", value)
    return [check(op, argument, v, *limits) for v in value]


def _check_scale(op: str, axes: int, scale: Any) -> list[int]:
    return _per_axis(op, "scale", scale, axes, checks.integer, 1)


def _check_gain(op: str, x: Tensor, gain: float) -> None:
    if gain != 1 and x.dtype in _INTEGERS:
        checks.refuse(op, "gain", "be 1 for bool and integer images", gain)


def _check_interpolation(
    x: Any, size: Sequence[Any], mode: int, align_corners: bool, antialias: bool, scale: Sequence[float]
) -> None:
    """What the operator itself needs, for callers of ``torch.ops.pixfuse.interpolate`` too."""
    _check_image("interpolate", x)
    if len(size) != x.dim() - 2 or len(scale) != len(size):
        got = list(size)
        checks.refuse("interpolate", "size", f"have {x.dim() - 2} entries, one for each spatial axis", got)
    _check_combination(x, size, mode, align_corners, antialias)


def _check_combination(x: Tensor, size: Sequence[Any], mode: int, align_corners: bool, antialias: bool) -> None:
    op = "interpolate"
    if not 0 <= mode <= LANCZOS:
        checks.refuse(op, "mode", f"be from 0 to {LANCZOS}", mode)
    if x.dtype in _INTEGERS and x.dtype != torch.uint8 and mode not in _COPIES:
        checks.refuse(op, "x", "be floating or uint8 for modes other than nearest and nearest-exact", x, TypeError)
    if antialias and (mode not in (LINEAR, CUBIC, LANCZOS) or x.dim() != 4):
        checks.refuse(op, "antialias", "be False for modes other than bilinear, bicubic and lanczos", antialias)
    if mode == LANCZOS and not antialias:
        checks.refuse(op, "antialias", "be True for mode 'lanczos'", antialias)
    if align_corners and mode not in _ALIGNED:
        checks.refuse(op, "align_corners", "be None or False for modes without it", align_corners)
    for entry in size:
        if entry < 1:
            checks.refuse(op, "size", "be at least 1", entry)


# --- rules ----------------------------------------------------------------------------------------------------


def _nearest_fake(x: Tensor, scale: Sequence[int], gain: float) -> Tensor:
    _check_image("upsample_nearest", x)
    factors = _check_scale("upsample_nearest", x.dim() - 2, list(scale))
    _check_gain("upsample_nearest", x, gain)
    sizes = [n * s for n, s in zip(x.shape[2:], factors, strict=True)]
    return empty(x, (*x.shape[:2], *sizes), is_channels_last(x))


def _nearest_backward_fake(dy: Tensor, scale: Sequence[int], gain: float) -> Tensor:
    sizes = [n // s for n, s in zip(dy.shape[2:], scale, strict=True)]
    return empty(dy, (*dy.shape[:2], *sizes), is_channels_last(dy))


def _nearest_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.scale, ctx.gain = inputs
    ctx.channels_last = is_channels_last(x)


def _nearest_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _nearest_backward(to_layout(dy, ctx.channels_last), ctx.scale, ctx.gain), None, None


def _nearest_backward_gradient(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
    return _nearest(to_layout(ddx, ctx.channels_last), ctx.scale, ctx.gain), None, None


def _interpolate_fake(x: Tensor, size: Sequence[Any], *rest: Any) -> Tensor:
    _check_interpolation(x, size, *rest)
    return empty(x, (*x.shape[:2], *size), is_channels_last(x))


def _interpolate_backward_fake(dy: Tensor, size: Sequence[Any], *rest: Any) -> Tensor:
    return empty(dy, (*dy.shape[:2], *size), is_channels_last(dy))


def _interpolate_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, *ctx.rest = inputs
    ctx.size = x.shape[2:]
    ctx.channels_last = is_channels_last(x)


def _interpolate_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = _interpolate_backward(to_layout(dy, ctx.channels_last), ctx.size, *ctx.rest)
    return dx, None, None, None, None, None


def _interpolate_backward_gradient(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
    ddy = _interpolate(to_layout(ddx, ctx.channels_last), ctx.size, *ctx.rest)
    return ddy, None, None, None, None, None


# --- shards ---------------------------------------------------------------------------------------------------


def _nearest_rows(args: Sequence[Any], axis: int) -> tuple[int, Any]:
    x, scale, _ = args
    times = scale[axis - 2]

    def window(start: int, stop: int) -> Window:
        first = start // times
        return Window([(first, (stop - 1) // times + 1)], {}, start - first * times)

    return x.shape[axis] * times, window


def _nearest_backward_rows(args: Sequence[Any], axis: int) -> tuple[int, Any]:
    dy, scale, _ = args
    times = scale[axis - 2]
    return dy.shape[axis] // times, lambda start, stop: Window([(start * times, stop * times)], {})


def _axis_map(args: Sequence[Any], axis: int, back: bool) -> tuple[Any, ...]:
    """The arguments of ``axis_taps`` for one axis of ``interpolate``, or of its backward."""
    x, size, mode, align_corners, antialias, scale = args
    sizes = (x.shape[axis], size[axis - 2])
    return *(reversed(sizes) if back else sizes), float(scale[axis - 2]), mode, align_corners, antialias, back


def _interpolate_rows(args: Sequence[Any], axis: int, back: bool = False) -> tuple[int, Any]:
    table = axis_taps(*_axis_map(args, axis, back))

    def window(start: int, stop: int) -> Window:
        if table is None:
            return Window([(start, stop)], {})
        return Window([inside(int(table.start[start]), int(table.stop[stop - 1]), args[0].shape[axis])], {})

    return args[1][axis - 2], window


def _interpolate_part(args: Sequence[Any], whole: Sequence[Any], spans: Any, gather: Any, back: bool = False) -> Tensor:
    """``interpolate`` or its backward on windows: by those rows of the tables that count."""
    x, mode = args[0], args[2]
    copies = mode in _COPIES and not back
    maps = [(*_axis_map(whole, axis, back), spans.get(axis)) for axis in range(2, x.dim())]
    kernels = gpu_module(__package__ or "", "interpolate", x)
    if kernels:
        sizes = [spans[axis][1] - spans[axis][0] if axis in spans else n for axis, n in enumerate(whole[1], 2)]
        y: Tensor = kernels.resize(x, maps, sizes, copies)
        return y
    return reference.resize(x, [axis_taps(*m) for m in maps], copies)


_nearest: Op = define_op(
    "upsample_nearest(Tensor x, int[] scale, float gain) -> Tensor",
    reference=reference.upsample_nearest,
    fake=_nearest_fake,
    setup_context=_nearest_setup,
    backward=_nearest_gradient,
    jvp=linear(lambda *args: _nearest(*args), 0),
    vmap=into_batch(lambda *args: _nearest(*args), tensors=(0,)),
    sharding=Sharding((IMAGE,), (IMAGE,), rows=_nearest_rows),
)
_nearest_backward: Op = define_op(
    "upsample_nearest_backward(Tensor dy, int[] scale, float gain) -> Tensor",
    reference=reference.upsample_nearest_backward,
    fake=_nearest_backward_fake,
    setup_context=_nearest_setup,
    backward=_nearest_backward_gradient,
    jvp=linear(lambda *args: _nearest_backward(*args), 0),
    vmap=into_batch(lambda *args: _nearest_backward(*args), tensors=(0,)),
    sharding=Sharding((IMAGE,), (IMAGE,), rows=_nearest_backward_rows),
)
_interpolate: Op = define_op(
    "interpolate(Tensor x, SymInt[] size, int mode, bool align_corners, bool antialias, float[] scale) -> Tensor",
    reference=reference.interpolate,
    fake=_interpolate_fake,
    setup_context=_interpolate_setup,
    backward=_interpolate_gradient,
    jvp=linear(lambda *args: _interpolate(*args), 0),
    vmap=into_batch(lambda *args: _interpolate(*args), tensors=(0,)),
    sharding=Sharding((IMAGE,), (IMAGE,), rows=_interpolate_rows, run=_interpolate_part),
)
_interpolate_backward: Op = define_op(
    "interpolate_backward(Tensor dy, SymInt[] size, int mode, bool align_corners, bool antialias, float[] scale) "
    "-> Tensor",
    reference=reference.interpolate_backward,
    fake=_interpolate_backward_fake,
    setup_context=_interpolate_setup,
    backward=_interpolate_backward_gradient,
    jvp=linear(lambda *args: _interpolate_backward(*args), 0),
    vmap=into_batch(lambda *args: _interpolate_backward(*args), tensors=(0,)),
    sharding=Sharding(
        (IMAGE,),
        (IMAGE,),
        rows=functools.partial(_interpolate_rows, back=True),
        run=functools.partial(_interpolate_part, back=True),
    ),
)
