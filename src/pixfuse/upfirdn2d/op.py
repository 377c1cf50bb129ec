"""The public function ``upfirdn2d``, its operator and the operator of the filter's gradient."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared import checks
from .._shared.batching import into_batch, one_by_one
from .._shared.calls import remembered
from .._shared.layout import compute_dtype, empty, is_channels_last, to_layout
from .._shared.library import Op, define_op, linear
from .._shared.sharding import IMAGE, WHOLE, Sharding, Window, fir_window
from . import reference

Quad = tuple[Any, Any, Any, Any]

_MANY_PHASES = 64


@remembered()
def upfirdn2d(
    x: Tensor,
    f: Tensor | None,
    up: int | Sequence[int] = 1,
    down: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    flip_filter: bool = False,
    gain: float = 1,
) -> Tensor:
    """Upsample, pad, filter and downsample every channel of every image.

    1. insert ``up - 1`` zeros after every sample (after the last one too)
    2. pad with zeros, or crop where ``padding`` is negative
    3. convolve with ``f`` (correlate if ``flip_filter``), only where all of ``f`` fits, and multiply by ``gain``
    4. keep every ``down``-th row and column, beginning with the first

    Sums are kept in float32 (float64 for float64) and rounded once. No step has an image of its own in memory.

    Args:
        x: floating tensor ``[N, C, H, W]``.
        f: float32 filter ``[fh, fw]``, or ``[k]`` for ``f[a] * f[b]`` (see ``setup_filter``), or None for one tap of
            1. float64 is fine for float64 ``x``. It gets a gradient if it requires one.
        up: factor, or ``[x, y]`` (x is the width).
        down: factor, or ``[x, y]``.
        padding: for all four sides, or ``[x, y]`` (each for both sides of its axis), or ``[x0, x1, y0, y1]``;
            counted in upsampled positions.
        flip_filter: correlate instead of convolve.
        gain: factor of the whole result, applied once for a separable filter too.

    Returns:
        ``[N, C, (H * up + y0 + y1 - fh) // down + 1, (W * up + x0 + x1 - fw) // down + 1]`` in the dtype and layout
        of ``x``.

    Raises:
        TypeError: an argument is of the wrong kind, or a tensor has the wrong dtype.
        ValueError: a size, range or device does not fit, or the filter is larger than the padded image.

    Source: Karras et al., "Analyzing and Improving the Image Quality of StyleGAN" (2020); scipy.signal.upfirdn.

    Example:
        >>> import torch, pixfuse
        >>> x = torch.tensor([[[[1.0, 2.0, 3.0]]]])
        >>> pixfuse.upfirdn2d(x, torch.tensor([[1.0, 2.0, 4.0]]), padding=[2, 2, 0, 0])
        tensor([[[[ 1.,  4., 11., 14., 12.]]]])
    """
    check_tensors("upfirdn2d", x, f)
    factors = (*parse_factors("upfirdn2d", up, down), parse_padding("upfirdn2d", padding))
    return resample("upfirdn2d", x, f, *factors, flip_filter, checks.real("upfirdn2d", "gain", gain))


def resample(
    op: str,
    x: Tensor,
    f: Tensor | None,
    up: tuple[int, int],
    down: tuple[int, int],
    padding: Quad,
    flip_filter: bool,
    gain: float,
) -> Tensor:
    """The operator on checked tensors and parsed arguments; refuses an empty result in the name of ``op``."""
    checks.flag(op, "flip_filter", flip_filter)
    fw, fh = filter_size(f)
    x0, x1, y0, y1 = padding
    n, c, height, width = x.shape
    height, width = height * up[1] + y0 + y1, width * up[0] + x0 + x1
    if height < fh or width < fw:
        checks.refuse(
            op,
            "padding",
            f"leave an upsampled image no smaller than the filter of height {fh} and width {fw}",
            checks.words(f"height {height} and width {width}"),
        )
    out_h, out_w = (height - fh) // down[1] + 1, (width - fw) // down[0] + 1
    checks.result_size(op, "up or padding", (n, c, out_h, out_w), (up, padding))
    if max(down) > _MANY_PHASES:
        down = (effective_step(down[0], out_w), effective_step(down[1], out_h))
    y: Tensor = _value(x, f, *up, *down, x0, y0, out_w, out_h, flip_filter, gain)
    return y


def effective_step(down: Any, *outputs: Any) -> Any:
    """``down``, or 1 if it is large and no axis has a second output: a kernel has a phase for each of its samples."""
    return 1 if down > _MANY_PHASES and all(n == 1 for n in outputs) else down


def check_tensors(op: str, x: Any, f: Any) -> None:
    """``x`` is an image and ``f`` a filter for it."""
    checks.image(op, x, (4,))
    check_filter(op, "f", f, x)


def check_filter(op: str, argument: str, f: Any, x: Tensor) -> None:
    """``f`` is None or a filter for ``x``."""
    if f is None:
        return
    kind = "be None or a float32 tensor of shape [kh, kw] or [k]"
    if not isinstance(f, Tensor):
        got = checks.words(type(f).__name__)
        checks.refuse(op, argument, kind, got, TypeError, remedy="call setup_filter")
    if f.dtype != torch.float32 and (f.dtype != torch.float64 or x.dtype != torch.float64):
        checks.refuse(op, argument, kind, f, TypeError, remedy="call setup_filter")
    checks.strided(op, argument, f)
    if f.dim() not in (1, 2) or f.numel() == 0:
        checks.refuse(op, argument, kind, f, remedy="call setup_filter")
    checks.same_device(op, argument, f, x)


def check_fixed_filter(op: str, argument: str, f: Any, x: Tensor) -> None:
    """``f`` is None or a filter for ``x`` that asks for no gradient, which ``op`` does not have."""
    check_filter(op, argument, f, x)
    if f is not None and f.requires_grad:
        got = checks.words("one that does")
        checks.refuse(op, argument, "be a filter that requires no grad", got, remedy="pass it detached")


def filter_size(f: Tensor | None) -> tuple[int, int]:
    """Width and height of a filter."""
    if f is None:
        return 1, 1
    shape = f.shape
    if torch.compiler.is_compiling():  # makes it a constant: a compiled program is for filters of one size
        return operator.index(shape[-1]), operator.index(shape[0])
    return shape[-1], shape[0]


def parse_factors(op: str, up: Any, down: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """``up`` and ``down`` as pairs (x, y)."""
    return checks.pair(op, "up", up, 1), checks.pair(op, "down", down, 1)


def parse_padding(op: str, padding: Any) -> Quad:
    """``padding`` as (x0, x1, y0, y1)."""
    if not isinstance(padding, (list, tuple)):
        padding = [padding] * 4
    elif len(padding) == 2:
        padding = [padding[0], padding[0], padding[1], padding[1]]
    elif len(padding) != 4:
        checks.refuse(op, "padding", "be an int, [x, y] or [x0, x1, y0, y1]", padding)
    x0, x1, y0, y1 = (checks.integer(op, "padding", p) for p in padding)
    return x0, x1, y0, y1


# --- rules of the value ---------------------------------------------------------------------------------------


def _value_fake(x: Tensor, f: Tensor | None, *scalars: Any) -> Tensor:
    check_tensors("upfirdn2d", x, f)
    out_w, out_h = scalars[6:8]
    return empty(x, (x.shape[0], x.shape[1], out_h, out_w), is_channels_last(x))


def _value_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, f, *scalars = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, f)
    ctx.height, ctx.width = x.shape[2:]
    ctx.channels_last = is_channels_last(x)
    ctx.scalars = scalars


def _value_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, f = ctx.saved_tensors
    up_x, up_y, down_x, down_y, pad_x, pad_y, _, _, flip, gain = ctx.scalars
    dy = to_layout(dy, ctx.channels_last)
    dx = df = None
    if ctx.needs_input_grad[0]:
        dx = _transposed(dy, f, ctx.scalars, ctx.width, ctx.height)
    if ctx.needs_input_grad[1]:
        fw, fh = filter_size(f)
        df = _filter(x, dy, fw, fh, up_x, up_y, down_x, down_y, pad_x, pad_y, flip, gain)
        if f.dim() == 1:  # F[a, b] = f[a] * f[b]
            df = ((df + df.mT) * f).sum(1)
        df = df.to(f.dtype)
    return dx, df, *[None] * 10


def _value_jvp(tangents: Sequence[Tensor | None], args: list[Any], outputs: Any) -> Tensor | None:
    df = tangents[1]
    if df is not None and df.dim() == 1:  # F[a, b] = f[a] * f[b]
        df = torch.outer(df, args[1])
        df = df + df.mT
    return linear(_value, 0, 1)((tangents[0], df), args, outputs)


def _transposed(dy: Tensor, f: Tensor | None, scalars: Sequence[Any], width: Any, height: Any) -> Tensor:
    """The transpose of the op with these ``scalars``, applied to ``dy``: the op itself, taken the other way."""
    up_x, up_y, down_x, down_y, pad_x, pad_y, _, _, flip, gain = scalars
    fw, fh = filter_size(f)
    pads = (fw - 1 - pad_x, fh - 1 - pad_y)
    y: Tensor = _value(dy, f, down_x, down_y, up_x, up_y, *pads, width, height, not flip, gain)
    return y


# --- rules of the filter's gradient ---------------------------------------------------------------------------


def _filter_fake(x: Tensor, dy: Tensor, fw: int, fh: int, *scalars: Any) -> Tensor:
    return x.new_empty((fh, fw), dtype=compute_dtype(x))


def _filter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, dy, _, _, *scalars = inputs
    ctx.save_for_backward(x, dy)
    ctx.channels_last = is_channels_last(x)
    ctx.scalars = scalars


def _filter_backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
    x, dy = ctx.saved_tensors
    *geometry, flip, gain = ctx.scalars
    scalars = (*geometry, dy.shape[3], dy.shape[2], flip, gain)
    dx = ddy = None
    if ctx.needs_input_grad[0]:
        dx = _transposed(to_layout(dy, ctx.channels_last), v, scalars, x.shape[3], x.shape[2])
    if ctx.needs_input_grad[1]:
        ddy = to_layout(_value(x, v, *scalars), is_channels_last(dy))
    return dx, ddy, *[None] * 10


# --- shards ---------------------------------------------------------------------------------------------------


def _value_rows(args: Sequence[Any], axis: int) -> tuple[int, Any]:
    x, f = args[:2]
    at = 3 - axis  # scalars come in the order (x, y)
    up, down, pad, size = args[2 + at], args[4 + at], args[6 + at], args[8 + at]

    def window(start: int, stop: int) -> Window:
        reads, before = fir_window(start, stop, x.shape[axis], up, down, pad, filter_size(f)[at])
        return Window([reads], {6 + at: before, 8 + at: stop - start})

    return size, window


def _filter_rows(args: Sequence[Any], axis: int) -> tuple[int, Any]:
    x, dy = args[:2]
    at = 3 - axis
    taps, up, down, pad = args[2 + at], args[4 + at], args[6 + at], args[8 + at]
    size = dy.shape[axis]

    def window(start: int, stop: int) -> Window:
        if start == stop:  # a row of zeros, since there is none
            start, stop = size, size + 1
        reads, before = fir_window(start, stop, x.shape[axis], up, down, pad, taps)
        return Window([reads, (start, stop)], {8 + at: before})

    return size, window


# --- registration ---------------------------------------------------------------------------------------------


_value: Op = define_op(
    "upfirdn2d(Tensor x, Tensor? f, int up_x, int up_y, int down_x, int down_y, SymInt pad_x, SymInt pad_y, "
    "SymInt out_w, SymInt out_h, bool flip, float gain) -> Tensor",
    reference=reference.upfirdn2d,
    fake=_value_fake,
    setup_context=_value_setup,
    backward=_value_backward,
    jvp=_value_jvp,
    vmap=into_batch(lambda *args: _value(*args), tensors=(0,)),
    sharding=Sharding((IMAGE, WHOLE), (IMAGE,), rows=_value_rows),
)
_filter: Op = define_op(
    "upfirdn2d_filter_backward(Tensor x, Tensor dy, int fw, int fh, int up_x, int up_y, int down_x, int down_y, "
    "SymInt pad_x, SymInt pad_y, bool flip, float gain) -> Tensor",
    reference=reference.upfirdn2d_filter_backward,
    fake=_filter_fake,
    setup_context=_filter_setup,
    backward=_filter_backward,
    jvp=linear(lambda *args: _filter(*args), 0, 1),
    vmap=one_by_one(lambda *args: _filter(*args)),
    sharding=Sharding((IMAGE, IMAGE), (WHOLE,), rows=_filter_rows),
)
