"""ONNX: a model with ops of pixfuse as standard ONNX operators, which any runtime loads.

An op leaves the program as a composition of PyTorch's own operators, written for runtimes: filters are convolutions,
resizes gather with tables that follow from the sizes (and become constants where the sizes are fixed). They compute
what the op does, up to the rounding of their sums; an exact half in an integer picture may fall either way. Which
samples a resize takes, and how many it makes, is computed in float64 there too. Other numbers among the arguments are
float32 in ONNX, and onnxruntime has no float64 convolution: export models of float32 or less. ``export`` needs
``pip install 'pixfuse[onnx]'``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._shared.layout import compute_dtype
from ._shared.library import OPS
from .filtered_lrelu.reference import biased
from .group_norm.reference import SILU, affine
from .upfirdn2d.op import filter_size
from .upsample.taps import AREA, CUBIC, LANCZOS, LINEAR, NEAREST, NEAREST_EXACT, SNAP

__all__ = ["decompositions", "export"]


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    f: Any = None,
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> Any:
    """Export a model to standard ONNX operators: :func:`torch.onnx.export` for models with ops of pixfuse.

    Args:
        model: a module, or what ``torch.export.export`` made of one.
        args: example inputs of the module, whose sizes the file is for.
        f: the file to write, or None.
        kwargs: example keyword inputs.
        dynamic_shapes: as in ``torch.export.export``: the axes of the inputs that may have other sizes. For the ops
            these may be the batch, the height and the width.
        options: passed on to ``torch.onnx.export``: ``input_names``, ``opset_version``, ``external_data`` ...

    Returns:
        the ``torch.onnx.ONNXProgram``.

    Example:
        >>> import torch, pixfuse.nn, pixfuse.onnx
        >>> program = pixfuse.onnx.export(pixfuse.nn.Blur(), (torch.zeros(1, 3, 8, 8),), verbose=False)
        >>> [node.op_type for node in program.model_proto.graph.node]
        ['Reshape', 'Conv', 'Reshape']
    """
    if not isinstance(model, torch.export.ExportedProgram):
        model = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    options["custom_translation_table"] = _exact_sizes() | (options.get("custom_translation_table") or {})
    return torch.onnx.export(model.run_decompositions(decompositions()), f=f, dynamo=True, **options)


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The table for ``ExportedProgram.run_decompositions`` that leaves PyTorch's own operators only.

    For any consumer of ``torch.export`` that knows no custom operators.

    Example:
        >>> import torch, pixfuse.nn, pixfuse.onnx
        >>> program = torch.export.export(pixfuse.nn.GroupNorm(2, 4), (torch.zeros(1, 4, 8, 8),))
        >>> "pixfuse" in str(program.run_decompositions(pixfuse.onnx.decompositions()).graph)
        False
    """
    return {op.overload: _PORTABLE.get(name, op.reference) for name, op in OPS.items()}


def _exact_sizes() -> dict[Any, Callable[..., Any]]:
    """Translations to ONNX of what a program computes with its dynamic sizes.

    PyTorch's own are in float32, where 100 rows times 0.29 are 29: in Python they are 28. These compute in float64, and
    round to the float32 that PyTorch declares only what is no size again.
    """
    from onnxscript import ir, opset18

    op: Any = opset18
    exact: dict[Any, Any] = {}  # float64 values, by those in float32 that came of them

    def wide(value: Any) -> Any:
        if not isinstance(value, ir.Value):
            return op.Constant(value=ir.tensor(float(value), ir.DataType.DOUBLE))
        return exact[value] if value in exact else op.Cast(value, to=ir.DataType.DOUBLE)

    def rounded(value: Any) -> Any:
        narrow = op.Cast(value, to=ir.DataType.FLOAT)
        exact[narrow] = value
        return narrow

    def arithmetic(name: str) -> Callable[..., Any]:
        def translate(a: Any, b: Any) -> Any:
            real = name == "Div" or any(isinstance(v, float) or v in exact for v in (a, b))
            return rounded(getattr(op, name)(wide(a), wide(b))) if real else getattr(op, name)(a, b)

        return translate

    return {
        torch.sym_float: lambda n: rounded(wide(n)),
        **{getattr(operator, k.lower()): arithmetic(k) for k in ("Add", "Sub", "Mul")},
        operator.truediv: arithmetic("Div"),
        math.trunc: lambda a: op.Cast(wide(a), to=ir.DataType.INT64),
        math.floor: lambda a: op.Cast(op.Floor(wide(a)), to=ir.DataType.INT64),
        math.ceil: lambda a: op.Cast(op.Ceil(wide(a)), to=ir.DataType.INT64),
    }


# --- filters --------------------------------------------------------------------------------------------------


def _upfirdn2d(
    x: Tensor,
    f: Tensor | None,
    up_x: int,
    up_y: int,
    down_x: int,
    down_y: int,
    pad_x: int,
    pad_y: int,
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
) -> Tensor:
    n, c, h, w = x.shape
    t = x.to(compute_dtype(x)).reshape(n * c, 1, h, w)
    taps = t.new_ones(1, 1) if f is None else f.to(t.dtype)
    if not flip and f is not None:
        taps = taps.flip([*range(taps.dim())])
    if up_x > 1 or up_y > 1:
        t = F.pad(t.reshape(n * c, 1, h, 1, w, 1), (0, up_x - 1, 0, 0, 0, up_y - 1)).reshape(
            n * c, 1, h * up_y, w * up_x
        )
    fw, fh = filter_size(f)
    after_x = (out_w - 1) * down_x + fw - w * up_x - pad_x
    after_y = (out_h - 1) * down_y + fh - h * up_y - pad_y
    t = F.pad(t, (pad_x, after_x, pad_y, after_y))
    if taps.dim() == 2:
        t = F.conv2d(t, taps[None, None] * gain, stride=(down_y, down_x))
    else:
        t = F.conv2d(t, taps[None, None, None] * gain, stride=(1, down_x))
        t = F.conv2d(t, taps[None, None, :, None], stride=(down_y, 1))
    return t.reshape(n, c, out_h, out_w).to(x.dtype)


def _filtered_lrelu(
    x: Tensor,
    fu: Tensor | None,
    fd: Tensor | None,
    b: Tensor | None,
    up: int,
    down: int,
    pad_x: int,
    pad_y: int,
    out_w: int,
    out_h: int,
    flip: bool,
    gain: float,
    slope: float,
    clamp: float,
) -> Tensor:
    kw, kh = filter_size(fd)
    size = ((out_w - 1) * down + kw, (out_h - 1) * down + kh)
    v = _upfirdn2d(biased(x, b), fu, up, up, 1, 1, pad_x, pad_y, *size, flip, float(up * up))
    w = F.leaky_relu(v, slope) * gain
    w = w if clamp < 0 else w.clamp(-clamp, clamp)
    return _upfirdn2d(w, fd, 1, 1, down, down, 0, 0, out_w, out_h, flip, 1.0).to(x.dtype)


# --- normalisation --------------------------------------------------------------------------------------------


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    eps: float,
    act: int,
    round_before_act: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    t = x.to(compute_dtype(x)).reshape(x.shape[0], num_groups, -1)
    mean = t.mean(-1, keepdim=True)
    t = t - mean
    rest = t.mean(-1, keepdim=True)  # the rounding of the mean
    t = t - rest
    rstd = (t.square().mean(-1, keepdim=True) + eps).rsqrt()
    z = affine((t * rstd).reshape(x.shape), weight, bias)
    if act == SILU:
        z = z.to(x.dtype).to(z.dtype) if round_before_act else z
        z = z * z.sigmoid()
    return z.to(x.dtype), (mean + rest).squeeze(-1), rstd.squeeze(-1)


# --- resizing -------------------------------------------------------------------------------------------------


def _interpolate(
    x: Tensor, size: Sequence[int], mode: int, align_corners: bool, antialias: bool, scale: Sequence[float]
) -> Tensor:
    y = x if mode in (NEAREST, NEAREST_EXACT) else x.to(compute_dtype(x))
    for d, (out, factor) in enumerate(zip(size, scale, strict=True), 2):
        n = x.shape[d]
        if isinstance(n, int) and isinstance(out, int) and n == out:
            continue
        index, weights = _table(n, out, factor, mode, align_corners, antialias, x.device)
        y = y.index_select(d, index.flatten())
        if weights is not None:
            y = y.reshape(*y.shape[:d], *index.shape, *y.shape[d + 1 :])
            along = [1] * d + [*index.shape] + [1] * (x.dim() - d - 1)
            y = (y * weights.to(y.dtype).reshape(along)).sum(d + 1)
    return (y.round().clamp(0, 255) if x.dtype == torch.uint8 and y.dtype != x.dtype else y).to(x.dtype)


def _table(
    n: int, out: int, scale: float, mode: int, align_corners: bool, antialias: bool, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """``upsample/taps.py`` in operators, for sizes that a program knows when it runs.

    Output ``o`` is the sum over ``k`` of ``weights[o, k] * x[index[o, k]]``; ``weights`` None stands for ones.
    """

    def number(value: Any) -> Tensor:
        return _number(value, device)

    def up_to(count: Any) -> Tensor:
        return torch.arange(count, device=device)

    i = torch.arange(out, dtype=torch.float64, device=device)
    ratio = (n + out - 1) // out  # rounded up
    if mode == AREA:
        start, stop = up_to(out) * n // out, ((up_to(out) + 1) * n + out - 1) // out
        j = start[:, None] + up_to(ratio + 1)
        return _normalised(j, start, stop, torch.ones_like(j, dtype=torch.float64))
    if align_corners:
        step = number(n - 1) / number(out - 1).clamp(min=1)
    elif scale > 0:
        step = torch.where(number(n) == number(out), number(1), number(1 / scale))
    else:
        step = number(n) / number(out)
    if mode in (NEAREST, NEAREST_EXACT):
        offset = 0.5 if mode == NEAREST_EXACT else 0.0
        source = (i + offset) * step
        source = source + source * (SNAP - 1)  # as optimisers of ONNX leave out what multiplies by nearly 1
        return source.floor().long().clamp(max=n - 1), None
    if antialias:
        radius = {LINEAR: 1, CUBIC: 2, LANCZOS: 3}[mode]
        stretch, centre = step.clamp(min=1), step * (i + 0.5)
        widest = 2 * radius * (math.ceil(max(1 / scale, 1)) if scale > 0 else ratio)
        start = (centre - radius * stretch + 0.5).long().clamp(min=0)
        stop = (centre + radius * stretch + 0.5).long().clamp(max=n)
        j = start[:, None] + up_to(widest + 1)
        return _normalised(j, start, stop, _kernel(((j - centre[:, None] + 0.5) / stretch).abs(), mode))
    source = step * i if align_corners else step * (i + 0.5) - 0.5
    source = source.clamp(min=0) if mode == LINEAR else source
    base = source.floor().clamp(max=n - 1)
    around = up_to(2) if mode == LINEAR else up_to(4) - 1
    distance = ((source - base).clamp(0, 1)[:, None] - around).abs()
    weights = 1 - distance if mode == LINEAR else _cubic(distance, -0.75)
    nearest = base.long()[:, None]
    return torch.where(weights == 0, nearest, nearest + around).clamp(0, n - 1), weights


def _number(value: Any, device: torch.device) -> Tensor:
    """A float64 scalar; of a float an integer times a power of two, as ONNX gets integers in 64 bits, floats in 32."""
    if not isinstance(value, float):
        return torch.full((), value, dtype=torch.float64, device=device)
    mantissa, exponent = math.frexp(value)
    return _number(int(mantissa * 2**53), device) * 2.0 ** (exponent - 53)


def _normalised(j: Tensor, start: Tensor, stop: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of sum 1 for the samples ``j`` below ``stop``; what lies beyond counts as ``start``, with weight 0."""
    inside = j < stop[:, None]
    weights = torch.where(inside, weights, 0.0)
    return torch.where(inside, j, start[:, None]), weights / weights.sum(1, keepdim=True)


def _kernel(d: Tensor, mode: int) -> Tensor:
    if mode == LINEAR:
        return (1 - d).clamp(min=0)
    if mode == CUBIC:
        return _cubic(d, -0.5)
    a = d * _number(math.pi, d.device)
    safe = torch.where(d == 0, 1.0, a)
    lanczos = safe.sin() / safe * ((safe / 3).sin() / (safe / 3))
    return torch.where(d == 0, 1.0, torch.where(d < 3, lanczos, 0.0))


def _cubic(d: Tensor, a: float) -> Tensor:
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * a * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, 0.0))


_PORTABLE: dict[str, Callable[..., Any]] = {
    "upfirdn2d": _upfirdn2d,
    "filtered_lrelu": _filtered_lrelu,
    "group_norm": _group_norm,
    "interpolate": _interpolate,
}
