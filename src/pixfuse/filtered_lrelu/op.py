"""The public function ``filtered_lrelu`` and the three operators behind it: value, tangent and adjoint."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._shared import checks
from .._shared.batching import into_batch, one_by_one, outputs, to_front
from .._shared.calls import remembered
from .._shared.layout import cast, empty, is_channels_last, to_layout
from .._shared.library import Op, define_op, linear
from .._shared.sharding import CHANNELS, IMAGE, WHOLE, Sharding, Window, fir_window, inside
from ..bias_act.op import channel_sums
from ..upfirdn2d.op import check_fixed_filter, effective_step, filter_size, parse_padding
from . import reference


@remembered()
def filtered_lrelu(
    x: Tensor,
    fu: Tensor | None = None,
    fd: Tensor | None = None,
    b: Tensor | None = None,
    up: int = 1,
    down: int = 1,
    padding: int | Sequence[int] = 0,
    gain: float = math.sqrt(2),
    slope: float = 0.2,
    clamp: float | None = None,
    flip_filter: bool = False,
) -> Tensor:
    """Leaky ReLU at a higher resolution: bias, upsample, activate, clamp and downsample in one pass.

    1. ``t = x + b``, per channel
    2. ``v = upfirdn2d(t, fu, up=up, padding=padding, gain=up**2)``
    3. ``w = gain * (v if v > 0 else slope * v)``
    4. ``w = min(max(w, -clamp), clamp)``
    5. ``y = upfirdn2d(w, fd, down=down)``

    All is computed in float32 (float64 for float64) and rounded once; the upsampled image never reaches memory.
    Padding and inserted samples are 0, not the bias. Differentiable any number of times with respect to ``x`` and
    ``b``; what depends on the place of the kinks is zero. The filters are not differentiable.

    Args:
        x: floating tensor ``[N, C, H, W]`` in any layout.
        fu: upsampling filter, ``[kh, kw]`` or ``[k]`` (separable), float32 (or float64 where x is); None is one tap 1.
        fd: downsampling filter, the same.
        b: bias ``[C]`` of any floating dtype, or None. Its gradient has its dtype.
        up: upsampling factor of both axes, at least 1.
        down: downsampling factor of both axes, at least 1.
        padding: added to the upsampled image: one int, ``[x, y]`` or ``[x0, x1, y0, y1]``; negative numbers crop.
        gain: scale of the activation, above 0.
        slope: slope of the activation below zero, at least 0.
        clamp: largest magnitude after the gain, at least 0; None for no limit.
        flip_filter: False convolves with both filters, True correlates.

    Returns:
        a tensor ``[N, C, H', W']`` of the dtype and layout of ``x``, where
        ``H' = (H * up + y0 + y1 - (kh_up - 1) - (kh_down - 1) + down - 1) // down`` and ``W'`` likewise.

    Raises:
        TypeError: an argument is of the wrong kind, or a tensor is not floating.
        ValueError: a size, range, dtype or device does not fit, or the result would be empty.

    Source: Karras et al., "Alias-Free Generative Adversarial Networks" (2021), section 3.

    Example:
        >>> import torch, pixfuse
        >>> pixfuse.filtered_lrelu(torch.tensor([[[[1.0, -1.0]]]]), gain=1)
        tensor([[[[ 1.0000, -0.2000]]]])
    """
    op = "filtered_lrelu"
    up = checks.integer(op, "up", up, 1)
    down = checks.integer(op, "down", down, 1)
    x0, x1, y0, y1 = parse_padding(op, padding)
    gain = checks.real(op, "gain", gain)
    if not 0 < gain < math.inf:
        checks.refuse(op, "gain", "be above 0 and finite", gain)
    slope = checks.real(op, "slope", slope)
    if not 0 <= slope < math.inf:
        checks.refuse(op, "slope", "be at least 0 and finite", slope)
    limit = -1.0
    if clamp is not None:
        limit = checks.real(op, "clamp", clamp)
        if limit < 0:
            checks.refuse(op, "clamp", "be None or at least 0", clamp)
        limit = -1.0 if limit == math.inf else limit
    flip = checks.flag(op, "flip_filter", flip_filter)
    _check_tensors(op, x, fu, fd, b)
    (up_w, up_h), (down_w, down_h) = filter_size(fu), filter_size(fd)
    out_w = _output_size(op, "width", x.shape[3], up, down, x0, x1, up_w, down_w)
    out_h = _output_size(op, "height", x.shape[2], up, down, y0, y1, up_h, down_h)
    checks.result_size(op, "up or padding", (*x.shape[:2], out_h, out_w), (up, padding))
    down = effective_step(down, out_w, out_h)
    result: Tensor = _value(x, fu, fd, b, up, down, x0, y0, out_w, out_h, flip, gain, slope, limit)
    return result


def _output_size(op: str, axis: str, n: Any, up: Any, down: Any, p0: Any, p1: Any, ku: int, kd: int) -> Any:
    size = (n * up + p0 + p1 - (ku - 1) - (kd - 1) + down - 1) // down
    if size < 1:
        need = checks.words(f"{n} * {up} + {p0} + {p1} of it for filters of {ku} and {kd} taps")
        checks.refuse(op, "x", f"have enough {axis} for one output sample", need, remedy="pad more")
    return size


def _check_tensors(op: str, x: Any, fu: Any, fd: Any, b: Any) -> None:
    checks.image(op, x, (4,))
    check_fixed_filter(op, "fu", fu, x)
    check_fixed_filter(op, "fd", fd, x)
    if b is not None:
        checks.vector(op, "b", b, x.shape[1], "the channels of x", x)


# --- rules of the value ---------------------------------------------------------------------------------------


def _value_fake(x: Tensor, fu: Tensor | None, fd: Tensor | None, b: Tensor | None, *scalars: Any) -> Tensor:
    _check_tensors("filtered_lrelu", x, fu, fd, b)
    return _empty_y(x, *scalars)


def _empty_y(x: Tensor, *scalars: Any) -> Tensor:
    out_w, out_h = scalars[4:6]
    return empty(x, (*x.shape[:2], out_h, out_w), is_channels_last(x))


def _value_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.scalars = inputs[4:]


def _value_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    need_dx, need_db = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    saved = ctx.saved_tensors  # asked for once: a checkpoint gives them once
    dx = db = None
    if need_dx or need_db:
        dx = _adjoint(dy, *saved, *ctx.scalars)
        if need_db:
            db = cast(channel_sums(dx), saved[3].dtype)
    return dx if need_dx else None, None, None, db, *(None,) * 10


def _value_jvp(tangents: Sequence[Tensor | None], args: list[Any], outputs: Any) -> Tensor | None:
    v, fu, fd, b = tangents[:4]
    for name, filter_tangent in (("fu", fu), ("fd", fd)):
        if filter_tangent is not None:
            checks.refuse("filtered_lrelu", name, "be a filter without a tangent", checks.words("one that has one"))
    if b is not None:
        b = b.to(args[0].dtype).reshape(-1, 1, 1)
        v = b.expand_as(args[0]) if v is None else v + b
    return None if v is None else _tangent(v, *args)


# --- rules of the tangent and the adjoint: each is the other's gradient ---------------------------------------


def _tangent_fake(v: Tensor, x: Tensor, fu: Tensor | None, fd: Tensor | None, b: Tensor | None, *rest: Any) -> Tensor:
    _check_tensors("filtered_lrelu_tangent", x, fu, fd, b)
    return _empty_y(x, *rest)


def _adjoint_fake(dy: Tensor, x: Tensor, fu: Tensor | None, fd: Tensor | None, b: Tensor | None, *rest: Any) -> Tensor:
    _check_tensors("filtered_lrelu_backward", x, fu, fd, b)
    return empty(x, x.shape, is_channels_last(x))


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:5])
    ctx.scalars = inputs[5:]
    ctx.channels_last = is_channels_last(inputs[0])


def _tangent_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dv = None
    if ctx.needs_input_grad[0]:
        dv = to_layout(_adjoint(dy, *ctx.saved_tensors, *ctx.scalars), ctx.channels_last)
    return dv, *(None,) * 14


def _adjoint_backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
    ddy = None
    if ctx.needs_input_grad[0]:
        ddy = to_layout(_tangent(ddx, *ctx.saved_tensors, *ctx.scalars), ctx.channels_last)
    return ddy, *(None,) * 14


# --- vmap and sharding ----------------------------------------------------------------------------------------


def _vmap(call: Any, images: int) -> Any:
    """The mapped dimension becomes part of the batch, or of the channels where each problem has its own bias.

    The first ``images`` arguments are images; then come the two filters and the bias.
    """
    bias = images + 2
    to_batch = into_batch(call, range(images))
    separately = one_by_one(call)

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        if in_dims[bias] is None:
            return to_batch(info, in_dims, *args)
        if any(in_dims[i] is not None for i in (images, images + 1)):
            return separately(info, in_dims, *args)
        size, folded = info.batch_size, list(args)
        for i in range(images):
            folded[i] = to_front(args[i], in_dims[i], size).movedim(0, 1).flatten(1, 2)
        folded[bias] = to_front(args[bias], in_dims[bias], size).flatten()
        channels = folded[bias].shape[0] // size
        return outputs(call(*folded), lambda y: y.unflatten(1, (size, channels)).movedim(1, 0))

    return rule


def _rows(args: Sequence[Any], axis: int, images: int = 1) -> tuple[int, Any]:
    """Of the value and, with two images, of the tangent."""
    (fu, fd), rest = args[images : images + 2], images + 3
    at = 3 - axis  # scalars come in the order (x, y)
    taps = filter_size(fu)[at] + filter_size(fd)[at] - 1
    up, down, pad, size = args[rest], args[rest + 1], args[rest + 2 + at], args[rest + 4 + at]

    def window(start: int, stop: int) -> Window:
        reads, before = fir_window(start, stop, args[0].shape[axis], up, down, pad, taps)
        return Window([reads] * images, {rest + 2 + at: before, rest + 4 + at: stop - start})

    return size, window


def _adjoint_rows(args: Sequence[Any], axis: int) -> tuple[int, Any]:
    dy, x, fu, fd = args[:4]
    at = 3 - axis
    up_taps, down_taps = filter_size(fu)[at], filter_size(fd)[at]
    up, down, pad, size = args[5], args[6], args[7 + at], x.shape[axis]

    def window(start: int, stop: int) -> Window:
        # The upsampled samples of these rows, the rows of x that make them and those of dy that they are read by.
        low, high = start * up + pad - (up_taps - 1), (stop - 1) * up + pad
        x0, x1 = inside(-((pad - low) // up), (high + up_taps - 1 - pad) // up + 1, size)
        y0, y1 = inside(-((down_taps - 1 - low) // down), high // down + 1, dy.shape[axis])
        return Window([(y0, y1), (x0, x1)], {7 + at: pad - y0 * down + x0 * up, 9 + at: y1 - y0}, start - x0)

    return size, window


_TENSORS = (IMAGE, WHOLE, WHOLE, CHANNELS)
_SCALARS = (
    "Tensor? fu, Tensor? fd, Tensor? b, int up, int down, SymInt pad_x, SymInt pad_y, SymInt out_w, SymInt out_h, "
    "bool flip, float gain, float slope, float clamp) -> Tensor"
)
_value: Op = define_op(
    f"filtered_lrelu(Tensor x, {_SCALARS}",
    reference=reference.filtered_lrelu,
    fake=_value_fake,
    setup_context=_value_setup,
    backward=_value_backward,
    jvp=_value_jvp,
    vmap=_vmap(lambda *args: _value(*args), images=1),
    sharding=Sharding(_TENSORS, (IMAGE,), rows=_rows),
)
_tangent: Op = define_op(
    f"filtered_lrelu_tangent(Tensor v, Tensor x, {_SCALARS}",
    reference=reference.filtered_lrelu_tangent,
    fake=_tangent_fake,
    setup_context=_linear_setup,
    backward=_tangent_backward,
    jvp=linear(lambda *args: _tangent(*args), 0),
    vmap=_vmap(lambda *args: _tangent(*args), images=2),
    sharding=Sharding((IMAGE, *_TENSORS), (IMAGE,), rows=functools.partial(_rows, images=2)),
)
_adjoint: Op = define_op(
    f"filtered_lrelu_backward(Tensor dy, Tensor x, {_SCALARS}",
    reference=reference.filtered_lrelu_backward,
    fake=_adjoint_fake,
    setup_context=_linear_setup,
    backward=_adjoint_backward,
    jvp=linear(lambda *args: _adjoint(*args), 0),
    vmap=_vmap(lambda *args: _adjoint(*args), images=2),
    sharding=Sharding((IMAGE, *_TENSORS), (IMAGE,), rows=_adjoint_rows),
)
