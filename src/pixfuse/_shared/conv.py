"""2-D convolutions that are cheap to differentiate twice, and a switch that leaves out weight gradients.

``conv2d`` and ``conv_transpose2d`` compute what PyTorch's own do. Their derivatives are three linear maps that are
each other's adjoints: the convolution, its transpose, and the weight gradient, every one of them a call of the
library routine made for it. (PyTorch's own second order writes the weight gradient as a convolution whose kernel is
an image, which libraries run slowly.) Nothing is computed that the engine did not ask for.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..upfirdn2d import upfirdn2d
from . import checks, library
from .sharding import IMAGE, WHOLE, Sharding, Window

_KEY = "pixfuse.weight_gradients_disabled"
_NAMED = ("same", "valid")
_PLAIN = (Tensor, torch.nn.Parameter)


class no_weight_gradients(contextlib.ContextDecorator):
    """Backward passes that run inside compute no weight gradients: weights get None, inputs and biases theirs.

    It counts when backward runs, not when forward did, and only for this thread (autograd's own threads follow the
    one that calls backward). An exception inside restores what was before. One object serves any number of ``with``
    blocks, nested and in several threads, and decorates functions.

    Args:
        disable: False for a context that does nothing.
    """

    def __init__(self, disable: bool = True) -> None:
        self.disable = disable

    def __enter__(self) -> None:
        if self.disable and not torch.compiler.is_compiling():
            _own_blocks().open += 1

    def __exit__(self, *error: object) -> None:
        if self.disable and not torch.compiler.is_compiling():
            _own_blocks().open -= 1


def weight_gradients_disabled() -> bool:
    """Whether this thread is inside :func:`no_weight_gradients`."""
    found = _blocks()
    return found is not None and found.open > 0


@dataclasses.dataclass
class _Blocks:
    """How many blocks of :func:`no_weight_gradients` are open in a thread."""

    thread: int
    open: int


def _blocks() -> _Blocks | None:
    # PyTorch hands this storage on to the threads of the autograd engine; Python's threading.local stays behind.
    found: _Blocks | None = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    return found


def _own_blocks() -> _Blocks:
    """Those that this thread may count in: a thread of the engine begins with the number of the one that called it."""
    found = _blocks()
    if found is None or found.thread != threading.get_ident():
        found = _Blocks(threading.get_ident(), 0 if found is None else found.open)
        count = sys.getrefcount(found)
        torch._C._stash_obj_in_tls(_KEY, found)
        if sys.getrefcount(found) == count:  # until torch 2.11 the storage gives up a reference that it never took
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
    return found


class _Gate(torch.autograd.Function):
    """A weight, whose gradient is None where weight gradients are disabled."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Tensor | None:
        return None if weight_gradients_disabled() else dw


def gated(weight: Tensor) -> bool:
    """Whether :func:`no_weight_gradients` counts for what is computed from ``weight`` here."""
    return on_shards(weight) or not _leave_to_torch(weight, weight, None)


def gate(weight: Tensor) -> Tensor:
    """``weight`` for whatever is computed from it: inside :func:`no_weight_gradients` it gets None from all of that."""
    return _Gate.apply(weight) if gated(weight) else weight


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    scale: Tensor | None = None,
    gated: bool = True,
    source: Tensor | None = None,
) -> Tensor:
    """:func:`torch.nn.functional.conv2d`, differentiable any number of times.

    With ``scale`` ``[N, C]`` (and no bias) of ``x`` times it, per image and channel. That product is not kept.
    ``gated`` is False where ``weight`` was made from a gated one and more, which needs its gradient. ``source`` is what
    ``weight`` was made from, where the same op made other tensors from more: no gradient is computed that it needs not.
    """
    if scale is not None and _makes_product(x, scale, weight):
        x, scale = scaled(x, scale), None
    refused = padding == "same" and _two(stride) != (1, 1)
    refused = refused or (isinstance(padding, str) and padding not in _NAMED)
    if refused or (scale is None and _leave_to_torch(x, weight, bias) and not on_shards(x)):
        result: Tensor = F.conv2d(x, gate(weight), bias, stride, padding, dilation, groups)
        return result
    if padding == "valid":
        padding = 0
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(_two(dilation), weight.shape[2:], strict=True)]
        if total[0] % 2 or total[1] % 2:
            x = upfirdn2d(x, None, padding=[0, total[1] % 2, 0, total[0] % 2])
        padding = [t // 2 for t in total]
    how = (_How if gated else _Ungated)(_two(stride), _two(padding), _two(dilation), False, (0, 0), groups)
    return _convolve(x, weight, bias, how, scale, source)


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    scale: Tensor | None = None,
    gated: bool = True,
    source: Tensor | None = None,
) -> Tensor:
    """:func:`torch.nn.functional.conv_transpose2d`, differentiable any number of times; the rest as in ``conv2d``."""
    if scale is not None and _makes_product(x, scale, weight):
        x, scale = scaled(x, scale), None
    if scale is None and _leave_to_torch(x, weight, bias) and not on_shards(x):
        result: Tensor = F.conv_transpose2d(
            x,
            gate(weight),
            bias,
            stride,
            padding,
            output_padding,
            groups,
            dilation,
        )
        return result
    how = (_How if gated else _Ungated)(_two(stride), _two(padding), _two(dilation), True, _two(output_padding), groups)
    return _convolve(x, weight, bias, how, scale, source)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """``x`` ``[N, C, H, W]`` times ``scale`` ``[N, C]``."""
    return split_as(x, split_as(x, x) * scale.reshape(*scale.shape, 1, 1))


class _How(NamedTuple):
    """The arguments of ``aten::convolution`` after the tensors."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    transposed: bool
    output_padding: tuple[int, int]
    groups: int


class _Ungated(_How):
    """The same, with weight gradients in any context."""


def _two(value: Any) -> tuple[int, int]:
    """An int for both axes, or one for each, as PyTorch's convolutions take them (height first)."""
    both = [int(v) for v in value] if isinstance(value, Sequence) else [int(value)]
    return both[0], both[-1]


def _leave_to_torch(x: Any, weight: Any, bias: Any) -> bool:
    """Whether there is nothing to differentiate here, or something that only PyTorch's own rules can."""
    differentiable = False
    for t in (x, weight, bias):  # a loop, since this runs twice a layer
        if t is None:
            continue
        if type(t) not in _PLAIN or not t.is_floating_point() or t.layout is not torch.strided:
            return True
        differentiable = differentiable or t.requires_grad
    return (
        not differentiable
        or not torch.is_grad_enabled()
        or x.dim() != 4
        or weight.dim() != 4
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _makes_product(x: Tensor, scale: Tensor, weight: Tensor) -> bool:
    """Whether an image times its scale is made by an operation of its own."""
    return _leave_to_torch(x, weight, scale) or torch.is_autocast_enabled(autocast_device(x))


def autocast_device(x: Tensor) -> str:
    """The device type whose autocast state counts for ``x``; meta tensors have none of their own."""
    return "cpu" if x.is_meta else x.device.type


def on_shards(x: Any) -> bool:
    """Whether x lies on several processes, as ``pixfuse.distributed`` takes it."""
    return library.for_shards is not None and isinstance(x, library.for_shards.tensor)


def as_x_is(op: str, x: Any, **others: Tensor) -> tuple[Any, ...]:
    """The others too as DTensors, whole on every process, where x is one."""
    if not on_shards(x):
        for name, t in others.items():
            if on_shards(t):
                checks.refuse(op, "x", f"be a DTensor as {name} is", x, TypeError)
        return tuple(others.values())
    from ..distributed import everywhere

    return tuple(everywhere(t, x.device_mesh) for t in others.values())


def split_as(y: Any, t: Tensor) -> Tensor:
    """``t``, which broadcasts to ``y``, as a DTensor that is split as y is, where y is one.

    PyTorch's own arithmetic gathers an axis of fewer samples than processes.
    """
    if not on_shards(y):
        return t
    from .. import distributed

    split: Tensor = distributed.split_as(y, t)
    return split


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: _How, scale: Tensor | None, source: Tensor | None
) -> Tensor:
    if scale is not None:
        return _ScaledConvolution.apply(x, scale, weight, weight if source is None else source, how)
    if on_shards(x):
        from ..distributed import anchored, placed

        _check(x, weight, bias, how)
        x, weight, bias = placed(_VALUE, (x, weight, bias))
        y: Tensor = anchored(_convolve_alike(x, weight, bias, how))
        return y
    return _convolve_alike(x, weight, bias, how)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> None:
    """Refuse on every process alike what a convolution of the whole image refuses."""
    name = "conv_transpose2d" if how.transposed else "conv2d"
    for argument in ("stride", "dilation"):
        if min(getattr(how, argument)) < 1:
            checks.refuse(name, argument, "be at least 1", getattr(how, argument))
    if any(extra >= max(s, d) for extra, s, d in zip(how.output_padding, how.stride, how.dilation, strict=True)):
        checks.refuse(name, "output_padding", "be smaller than stride or dilation", how.output_padding)
    forms = [None if t is None else torch.empty(t.shape, dtype=x.dtype, device="meta") for t in (x, weight, bias)]
    torch.ops.aten.convolution(*forms, *how)


def _convolve_alike(x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
    device = autocast_device(x)
    if not torch.is_autocast_enabled(device):
        return _Convolution.apply(x, weight, bias, how)
    dtype = torch.get_autocast_dtype(device)

    def cast(t: Tensor) -> Tensor:  # PyTorch's rule for convolutions
        return t if t.dtype == torch.float64 else t.to(dtype)

    with torch.autocast(device, enabled=False):
        return _Convolution.apply(cast(x), cast(weight), None if bias is None else cast(bias), how)


def wanted(ctx: Any, weight: int | None = None) -> list[bool]:
    """Which inputs of a node the running backward needs; ``needs_input_grad`` only knows which could need one.

    ``weight`` is the number of the one that :func:`no_weight_gradients` is about.
    """
    found = list(ctx.needs_input_grad)
    for i, (node, _) in enumerate(ctx.next_functions):  # one for each leading tensor
        if node is not None:
            try:
                found[i] = torch._C._will_engine_execute_node(node)
            except RuntimeError:  # what refuses the question is a leaf that autograd.grad was asked for
                found[i] = True
    if weight is not None and not isinstance(ctx.how, _Ungated) and weight_gradients_disabled():
        found[weight] = False
    return found


class _Convolution(torch.autograd.Function):
    """``y = convolution(x, weight) + bias``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.how, ctx.size = how, x.shape
        ctx.set_materialize_grads(False)
        return _convolution(x, weight, bias, how)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 4
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_db = wanted(ctx, 1)[:3]
        if x is not None and not torch.is_grad_enabled():  # nobody differentiates again: all in one call
            return *_derivatives(dy, x, weight, ctx.how, need_dx, need_dw, need_db), None
        dx = _Transposed.apply(dy, weight, _form(x), ctx.how, ctx.size) if need_dx else None
        dw = _WeightGradient.apply(x, dy, weight.detach(), ctx.how) if need_dw else None
        return dx, dw, dy.sum((0, 2, 3)) if need_db else None, None


class _ScaledConvolution(torch.autograd.Function):
    """``y = convolution(x * scale, weight)``. Keeps ``x``, which what made it often keeps too, and not the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, weight: Tensor, source: Tensor, how: _How) -> Tensor:
        ctx.save_for_backward(x, scale, weight)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return _convolution(scaled(x, scale), weight, None, how)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 5
        x, scale, weight = ctx.saved_tensors
        need_dx, need_dscale, need_dw, need_source = wanted(ctx, 2)[:4]
        need_dw = need_dw and need_source
        need_d = need_dx or need_dscale
        product = scaled(x, scale) if need_dw else x
        if not torch.is_grad_enabled():
            d, dw, _ = _derivatives(dy, product, weight, ctx.how, need_d, need_dw, False)
        else:
            d = _Transposed.apply(dy, weight, _form(product), ctx.how, x.shape) if need_d else None
            dw = _WeightGradient.apply(product, dy, weight.detach(), ctx.how) if need_dw else None
        dx = scaled(d, scale) if need_dx else None  # type: ignore[arg-type]
        return dx, (d * x).sum((2, 3)) if need_dscale else None, dw, None, None


class _Transposed(torch.autograd.Function):
    """The gradient of ``sum(dy * convolution(x, weight))`` by ``x``, of which only the ``size`` counts.

    ``x`` itself is only there to let the library choose as it does for a first derivative; it may be None.
    """

    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, weight: Tensor, x: Tensor | None, how: _How, size: Sequence[int]
    ) -> Tensor | None:
        ctx.save_for_backward(dy, weight)
        ctx.how = how
        ctx.set_materialize_grads(False)
        if x is not None:
            return _derivatives(dy, x, weight, how, True, False, False)[0]
        return _adjoint(dy, weight, how, size)

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Tensor | None, ...]:
        if v is None:
            return (None,) * 5
        dy, weight = ctx.saved_tensors
        need_ddy, need_dw = wanted(ctx, 1)[:2]
        ddy = _Convolution.apply(v, weight, None, ctx.how) if need_ddy else None
        dw = _WeightGradient.apply(v, dy, weight.detach(), ctx.how) if need_dw else None
        return ddy, dw, None, None, None


class _WeightGradient(torch.autograd.Function):
    """The gradient of ``sum(dy * convolution(x, weight))`` by ``weight``, of which only the form counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dy: Tensor, weight: Tensor, how: _How) -> Tensor | None:
        ctx.save_for_backward(x, dy)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return _derivatives(dy, x, weight, how, False, True, False)[1]

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Tensor | None, ...]:
        if v is None:
            return (None,) * 4
        x, dy = ctx.saved_tensors
        need_x, need_dy = wanted(ctx)[:2]
        how = _Ungated(*ctx.how)  # v is no weight
        dx = _Transposed.apply(dy, v, _form(x), how, x.shape) if need_x else None
        return dx, _Convolution.apply(x, v, None, how) if need_dy else None, None, None


def _adjoint(dy: Tensor, weight: Tensor, how: _How, size: Sequence[int]) -> Tensor:
    """The transpose of the convolution of images of ``size``, as a convolution."""
    if how.transposed:
        dx = _convolution(dy, weight, None, how._replace(transposed=False, output_padding=(0, 0)))
        # An output padding beyond the stride leaves rows that came from no input.
        return dx if dx.shape == size else dx[:, :, : size[2], : size[3]]
    lacking = [
        n - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
        for n, out, s, p, d, k in zip(
            size[2:], dy.shape[2:], how.stride, how.padding, how.dilation, weight.shape[2:], strict=True
        )
    ]
    return _convolution(dy, weight, None, how._replace(transposed=True, output_padding=(lacking[0], lacking[1])))


def _form(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _derivatives(
    dy: Tensor, x: Tensor, weight: Tensor, how: _How, need_dx: bool, need_dw: bool, need_db: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The wanted ones of dx, dw and db."""
    if on_shards(dy):
        dx = _adjoint(dy, weight, how, x.shape) if need_dx else None
        dw = _split(_WEIGHT, _weight_gradient, dy, x, weight, *how) if need_dw else None
        return dx, dw, dy.sum((0, 2, 3)) if need_db else None
    stride, padding, dilation, transposed, output_padding, groups = how
    mask = [need_dx, need_dw, need_db]
    sizes = [dy.shape[1]] if need_db else None
    dx, dw, db = torch.ops.aten.convolution_backward(
        dy, x, weight, sizes, stride, padding, dilation, transposed, output_padding, groups, mask
    )
    # oneDNN gives dw beside db unasked.
    return dx if need_dx else None, dw if need_dw else None, db if need_db else None


# --- shards: what pixfuse.distributed needs to know ------------------------------------------------------------


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
    if on_shards(x):
        return _split(_VALUE, torch.ops.aten.convolution, x, weight, bias, *how)
    return torch.ops.aten.convolution(x, weight, bias, *how)


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, *how: Any) -> Tensor | None:
    return _derivatives(dy, x, weight, _How(*how), False, True, False)[1]


def _split(rule: Sharding, op: Any, *args: Any) -> Any:
    from .. import distributed

    return distributed.on_shards(rule, op, distributed.placed(rule, args))


def _reach(start: int, stop: int, args: Sequence[Any], at: int) -> tuple[int, int]:
    """The rows of the larger grid that rows ``start`` up to ``stop`` of the smaller (strided) one lie over."""
    weight, stride, padding, dilation = args[:4]
    first = start * stride[at] - padding[at]
    return first, first + (stop - 1 - start) * stride[at] + dilation[at] * (weight.shape[2 + at] - 1) + 1


def _value_rows(args: Sequence[Any], axis: int) -> tuple[int, Any]:
    x, weight, _, stride, padding, dilation, transposed, output_padding, _ = args
    at, n = axis - 2, x.shape[axis]
    s, p, reach = stride[at], padding[at], dilation[at] * (weight.shape[axis] - 1)
    if not transposed:
        return (n + 2 * p - reach - 1) // s + 1, lambda start, stop: Window(
            [_reach(start, stop, (weight, stride, padding, dilation), at)], {(4, at): 0}
        )

    def window(start: int, stop: int) -> Window:
        # All rows that reach these, and as many more as it takes to cover them.
        first = min(-((reach - start - p) // s), (start + p) // s)
        last = max((stop - 1 + p) // s, -((reach - stop + 1 - p) // s))
        return Window([(first, last + 1)], {(4, at): 0, (7, at): 0}, start + p - first * s)

    return (n - 1) * s - 2 * p + reach + output_padding[at] + 1, window


def _seam(args: Sequence[Any], axis: int) -> int:
    _, weight, _, stride, padding, dilation, _, output_padding, _ = args
    at = axis - 2
    same = stride[at] == 1 and output_padding[at] == 0 and 2 * padding[at] == dilation[at] * (weight.shape[axis] - 1)
    return padding[at] if same else 0


def _weight_rows(args: Sequence[Any], axis: int) -> tuple[int, Any]:
    dy, x, weight, stride, padding, dilation, transposed, _, _ = args
    at = axis - 2
    size = (x if transposed else dy).shape[axis]

    def window(start: int, stop: int) -> Window:
        if start == stop:  # a row of zeros, since there is none
            start, stop = size, size + 1
        near, far = (start, stop), _reach(start, stop, (weight, stride, padding, dilation), at)
        return Window([far, near] if transposed else [near, far], {(4, at): 0, (7, at): 0})

    return size, window


_VALUE = Sharding((IMAGE, WHOLE, WHOLE), (IMAGE,), axes=(0,), rows=_value_rows, seam=_seam)
_WEIGHT = Sharding((IMAGE, IMAGE, WHOLE), (WHOLE,), axes=(0,), rows=_weight_rows)
