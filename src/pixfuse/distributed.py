"""DTensors: the ops of pixfuse on images that lie on several processes, split along any axis.

After ``import pixfuse.distributed`` every public op takes DTensors. An image may be split along the batch, the
channels (``group_norm``: at whole groups) or a spatial axis, evenly or not, so that a picture too large for one GPU
runs on several::

    mesh = init_device_mesh("cuda", (2,))
    x = distribute_tensor(picture, mesh, [Shard(2)])  # the upper half of the rows, and the lower
    y = pixfuse.group_norm(pixfuse.upfirdn2d(x, f, up=2), 32, weight, bias)

* A result is split as ``x`` is, and the values and gradients are those of one process (see ``Sharding``: a shard is the
  op on the rows that it reads; those of other processes are fetched, forward and backward, in one ``all_to_all``).
* The statistics of ``group_norm`` are pooled over the shards of an image.
* Parameters, filters and biases may be plain tensors, the same on every process, or DTensors. Their gradients are
  summed over the processes, once, in backward.
* A process outside the mesh makes the same calls, as for PyTorch's own ops: it has the sizes and no data.
* What cannot be split as asked (a group of channels, a tensor of partial sums) is gathered first.
* Under ``torch.compile`` shards of the batch stay split, for most ops of the channels too; the rest is gathered.

PyTorch's own convolution (2.13) gives wrong results for split rows. :func:`conv2d` and :func:`conv_transpose2d` are
right, and :func:`patch_convolutions` puts the ``nn.Conv2d`` of a model on them.

Shapes, dtypes and errors are those of the public functions, for the sizes of the whole image. Besides, a ValueError
says that a shard does not have the rows that ``torch.chunk`` gives it, or that DTensors lie on different meshes. All
processes must make the same calls in the same order, as for every collective.

It is a module of its own because importing DTensor costs most of a second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from torch.distributed.tensor.experimental import register_sharding

from ._shared import checks, conv, library
from ._shared.layout import dense_strides, empty, is_channels_last, to_layout
from ._shared.library import OPS, Op
from ._shared.sharding import CHANNELS, IMAGE, STATS, WHOLE, Sharding, Span, Window, chunks

__all__ = ["Conv2d", "conv2d", "conv_transpose2d", "patch_convolutions", "register"]


def register() -> None:
    """Let every op take DTensors, and register its sharding rule for ``torch.compile``."""
    for op in OPS.values():
        register_sharding(op.overload)(op.sharding)
    register_sharding(torch.ops.aten.flip.default)(
        _flip
    )  # conv2d_resample flips weights; torch 2.11 has no rule for it
    library.for_shards = library.ForShards(DTensor, _call, _alike)


def _flip(x: Any, dims: Sequence[int]) -> list[tuple[list[Any], list[Any]]]:
    flipped = {d % x.ndim for d in dims}
    whole = [Replicate(), *(Shard(d) for d in range(x.ndim) if d not in flipped)]
    return [([placement], [placement, None]) for placement in whole]


# --- from DTensors to shards and back -------------------------------------------------------------------------


def _call(op: Op, args: Sequence[Any]) -> Any:
    """The op on DTensors, with the op's own rules for its gradients."""
    if not isinstance(args[0], DTensor):
        names = [a.name for a in op.overload._schema.arguments]
        other = next(name for name, a in zip(names, args, strict=True) if isinstance(a, DTensor))
        checks.refuse(op.name, names[0], f"be a DTensor as {other} is", args[0], TypeError)
    return anchored(_function(op).apply(*placed(op.sharding, args)))


def _alike(args: Sequence[Any]) -> list[Any]:
    """``args`` with all tensors as DTensors on the mesh of the first one."""
    mesh: DeviceMesh = args[0].device_mesh
    return [replicated(a, mesh) if isinstance(a, Tensor) else a for a in args]


@functools.cache
def _function(op: Op) -> type[torch.autograd.Function]:
    rule: Sharding = op.sharding

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        op.transformed.setup_context(ctx, inputs, output)
        if isinstance(output, DTensor):
            where: dict[str, Any] = {"device_mesh": output.device_mesh, "placements": output.placements}
            ctx.zeros = functools.partial(zeros, output.shape, dtype=output.dtype, **where)

    def backward(ctx: Any, *grads: Any) -> Any:
        if rule.whole_backward:
            return _backward_of_whole(op, ctx, *grads)
        if len(grads) == 1 and grads[0] is None:  # it counts as zeros, as on plain tensors
            grads = (ctx.zeros(),)
        return op.transformed.backward(ctx, *grads)

    rules = {
        "forward": lambda *args: on_shards(rule, op, args),
        "setup_context": setup_context,
        "backward": backward,
    }
    return type(
        f"{op.name}_on_shards",
        (torch.autograd.Function,),
        {name: staticmethod(call) for name, call in rules.items()},
    )


def _backward_of_whole(op: Op, ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """The rule of an op that is derived from its reference, on whole images."""
    saved = ctx.saved_tensors
    whole = SimpleNamespace(**vars(ctx), needs_input_grad=ctx.needs_input_grad)
    whole.saved_tensors = [_whole(t) for t in saved]
    found = list(op.transformed.backward(whole, *(None if g is None else _whole(g) for g in grads)))
    tensors = iter(saved)
    for i, other in enumerate(ctx.others):
        like = next(tensors) if other is None else None
        if found[i] is not None and like is not None:
            found[i] = _Placed.apply(replicated(found[i], like.device_mesh), like.placements)
    return tuple(found)


def _whole(t: DTensor) -> Tensor:
    """All of a DTensor; zeros outside its mesh."""
    return t.to_local().new_zeros(t.shape) if t.device_mesh.get_coordinate() is None else t.full_tensor()


def replicated(t: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that every process has, as a DTensor. Outside the mesh its gradient is one of zeros."""
    if isinstance(t, DTensor):
        return t
    local = t.reshape(-1)[:0] if mesh.get_coordinate() is None else t
    where = [Replicate()] * mesh.ndim
    return DTensor.from_local(local, mesh, where, run_check=False, shape=t.shape, stride=t.stride())


def placed(rule: Sharding, args: Sequence[Any]) -> list[Any]:
    """``args`` as DTensors: the images split alike, as the rule allows, all else where it belongs."""
    mesh: DeviceMesh = args[0].device_mesh
    args = _alike(args)
    for a in args:
        if isinstance(a, DTensor) and a.device_mesh != mesh:
            raise ValueError(f"pixfuse.distributed: DTensors must lie on one mesh, got {mesh} and {a.device_mesh}")
    images = [args[i] for i, kind in enumerate(rule.arguments) if kind == IMAGE and args[i] is not None]
    split = next((a for a in images if any(p.is_shard() for p in a.placements)), images[0])
    axes: list[int | None] = []
    for parts, p in zip(mesh.shape, split.placements, strict=True):
        axis = p.dim if type(p) is Shard and p.dim not in axes and rule.splits(args, p.dim, parts) else None
        axes.append(axis)
    for i, kind in enumerate(rule.arguments):
        if args[i] is not None:
            kind = WHOLE if kind == CHANNELS else kind  # on_shards cuts them to size
            where = [Replicate() if a is None else rule.placement(kind, a, args, result=False) for a in axes]
            if kind == WHOLE or list(args[i].placements) != where:
                args[i] = _Placed.apply(args[i], where)
    return args


class _Placed(torch.autograd.Function):
    """A DTensor with other placements, or its own. Its gradient is split as it was, and partial sums are added up.

    PyTorch's own ``redistribute`` differentiates twice only, and fails where a gradient is not there.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: Sequence[Any]) -> Tensor:
        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        ctx.set_materialize_grads(False)
        if x.placements == tuple(placements):
            return x.view_as(x)
        return x.redistribute(x.device_mesh, placements)

    @staticmethod
    def backward(ctx: Any, dx: DTensor | None) -> tuple[Tensor | None, None]:
        return None if dx is None else _Placed.apply(dx, ctx.placements), None


def anchored(result: Any) -> Any:
    """A DTensor or several as they are; their gradients are split as they are."""
    if isinstance(result, tuple):
        return tuple(map(anchored, result))
    if not isinstance(result, DTensor) or not result.requires_grad or not torch.is_grad_enabled():
        return result
    return _Placed.apply(result, result.placements)


def everywhere(t: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor, split or not, as a DTensor that every process has whole."""
    whole: DTensor = _Placed.apply(replicated(t, mesh), [Replicate()] * mesh.ndim)
    return whole


def split_as(y: DTensor, t: Tensor) -> DTensor:
    """``t``, which broadcasts to ``y``, split as y is."""

    def where(p: Any) -> Any:
        axis = p.dim - y.dim() + t.dim() if isinstance(p, Shard) else -1
        return Shard(axis) if axis >= 0 and t.shape[axis] == y.shape[p.dim] else Replicate()

    split: DTensor = _Placed.apply(replicated(t, y.device_mesh), [where(p) for p in y.placements])
    return split


def on_shards(rule: Sharding, op: Callable[..., Any], whole: Sequence[Any]) -> Any:
    """The results of ``op`` as DTensors; its arguments ``whole`` come from ``placed``."""
    x = whole[0]
    mesh: DeviceMesh = x.device_mesh
    channels_last = is_channels_last(x) if rule.layout_at is None else whole[rule.layout_at]
    if mesh.get_coordinate() is None:
        return _elsewhere(rule, op, whole)
    args = [a.to_local() if isinstance(a, DTensor) else a for a in whole]
    images = [i for i, kind in enumerate(rule.arguments) if kind == IMAGE and whole[i] is not None]
    for i in images:
        args[i] = to_layout(args[i], channels_last)
    axes = [p.dim if isinstance(p, Shard) else None for p in x.placements]
    spatial = [m for m, axis in enumerate(axes) if axis is not None and axis >= 2 and rule.rows is not None]
    sizes = {axis: x.shape[axis] for axis in axes if axis is not None}  # of the result
    spans: dict[int, tuple[int, int, int]] = {}
    crops: dict[int, Span] = {}
    seams: list[tuple[int, Span, Window, _Rows]] = []

    def gather(t: Tensor) -> Tensor:
        t = t[None].contiguous()
        for m in spatial:
            every = [torch.empty_like(t) for _ in range(mesh.shape[m])]
            dist.all_gather(every, t, group=mesh.get_group(m))
            t = torch.cat(every)
        return t

    for m, axis in enumerate(axes):
        if axis is None:
            continue
        parts, me = mesh.shape[m], mesh.get_local_rank(m)
        if m not in spatial or rule.rows is None:
            _cut(rule, args, whole, axis, chunks(x.shape[axis], parts)[me])
            continue
        sizes[axis], window = rule.rows(whole, axis)
        wanted = chunks(sizes[axis], parts)
        first, last = wanted[me]
        held = [_Rows(args[i], axis, whole[i].shape[axis], mesh, m, channels_last) for i in images]
        reach = rule.seam(whole, axis) if rule.seam is not None and len(spatial) == 1 else 0
        if reach and all(b - a >= 2 * reach for a, b in wanted):
            held[0].fetch([(max(a - reach, 0), min(b + reach, sizes[axis])) for a, b in wanted])
            spans_of_seams = [(first, first + reach)] * (me > 0) + [(last - reach, last)] * (me < parts - 1)
            seams = [(axis, (a - first, reach), window(a, b), held[0]) for a, b in spans_of_seams]
            continue
        # No kernel makes an empty image: where the result is one, make a row and drop it.
        only_images = all(kind == IMAGE for kind in rule.results)
        given = [(a - 1, a) if a == b and only_images else (a, b) for a, b in wanted]
        windows = [window(*span) for span in given]
        for k, i in enumerate(images):
            held[k].fetch([w.reads[k] for w in windows])
            args[i] = held[k].window(*windows[me].reads[k])
        args = _changed(args, windows[me].changes)
        spans[axis] = (*given[me], windows[me].reads[0][0])
        crops[axis] = (windows[me].skip, last - first)

    def run(args: Sequence[Any]) -> Any:
        if rule.run is not None and (spatial or args[0].numel() == 0):
            return rule.run(args, whole, spans, gather)
        return op(*args)

    results = run(args)
    for axis, (at, reach), seam, rows in seams:
        strip = _changed(args, seam.changes)
        strip[0] = rows.window(*seam.reads[0])
        results.narrow(axis, at, reach).copy_(run(strip).narrow(axis, seam.skip, reach))

    def wrapped(kind: str, y: Tensor) -> Tensor:
        where = _where(rule, kind, whole)
        if kind == IMAGE:
            for spatial_axis, crop in crops.items():
                y = y.narrow(spatial_axis, *crop)
            y = to_layout(y, channels_last)
        shape = list(y.shape)
        for p, axis in zip(where, axes, strict=True):
            if isinstance(p, Shard) and axis is not None:
                groups = kind == STATS and axis == 1
                shape[p.dim] = whole[rule.groups_at or 0] if groups else sizes[axis]
        strides = dense_strides(shape, channels_last and kind == IMAGE)
        return DTensor.from_local(y, mesh, where, run_check=False, shape=torch.Size(shape), stride=strides)

    return _each(rule, whole, results, wrapped)


def _elsewhere(rule: Sharding, op: Callable[..., Any], whole: Sequence[Any]) -> Any:
    """What a process that holds no shard has of the results: their sizes."""
    mesh: DeviceMesh = whole[0].device_mesh
    forms = [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, DTensor) else a
        for a in whole
    ]

    def wrapped(kind: str, y: Tensor) -> Tensor:
        nothing = whole[0].to_local().new_empty(0, dtype=y.dtype)
        where = _where(rule, kind, whole)
        return DTensor.from_local(nothing, mesh, where, run_check=False, shape=y.shape, stride=y.stride())

    return _each(rule, whole, op(*forms), wrapped)


def _each(rule: Sharding, whole: Sequence[Any], results: Any, wrapped: Callable[[str, Tensor], Tensor]) -> Any:
    """The results ``wrapped``, and None for those that nobody needs."""
    if isinstance(results, Tensor):
        return wrapped(rule.results[0], results)
    needed_at = rule.needed_at or (None,) * len(results)
    return tuple(
        wrapped(kind, y) if at is None or whole[at] else None
        for kind, y, at in zip(rule.results, results, needed_at, strict=True)
    )


def _where(rule: Sharding, kind: str, whole: Sequence[Any]) -> list[Any]:
    """The placements of a result."""
    axes = [p.dim if isinstance(p, Shard) else None for p in whole[0].placements]
    return [Replicate() if a is None else rule.placement(kind, a, whole, result=True) for a in axes]


def _cut(rule: Sharding, args: list[Any], whole: Sequence[Any], axis: int, span: Span) -> None:
    """Cut what goes with the channels, in place, where an image is split along ``axis`` without a window."""
    for i, kind in enumerate(rule.arguments):
        if kind == CHANNELS and whole[i] is not None and rule.placement(kind, axis, whole, result=False).is_shard():
            args[i] = args[i][slice(*span)]
    if axis == 1 and rule.groups_at is not None:
        args[rule.groups_at] = (span[1] - span[0]) // (whole[0].shape[1] // whole[rule.groups_at])


def _changed(args: Sequence[Any], changes: dict[Any, Any]) -> list[Any]:
    args = list(args)
    for at, value in changes.items():
        if isinstance(at, tuple):
            args[at[0]] = [*args[at[0]][: at[1]], value, *args[at[0]][at[1] + 1 :]]
        else:
            args[at] = value
    return args


class _Rows:
    """An image split along an axis: the rows that this process holds, and those that it fetches from others."""

    def __init__(self, x: Tensor, axis: int, size: int, mesh: DeviceMesh, m: int, channels_last: bool) -> None:
        self.axis, self.size, self.channels_last = axis, size, channels_last
        self.group, self.me = mesh.get_group(m), mesh.get_local_rank(m)
        self.own = chunks(size, mesh.shape[m])
        first, last = self.own[self.me]
        if x.shape[axis] != last - first:
            raise ValueError(
                f"pixfuse.distributed: the shard of process {self.me} must have {last - first} of the {size} rows of "
                f"axis {axis}, as torch.chunk splits them, got {x.shape[axis]}"
            )
        self.pieces = [(first, last, x)]
        self.pending: Any = None

    def fetch(self, reads: Sequence[Span]) -> None:
        """Begin to fetch what this process reads; ``reads`` has the range of rows that each of them reads."""
        first, last, x = self.pieces[0]
        if all(a <= low and high <= b for (low, high), (a, b) in zip(reads, self.own, strict=True)):
            return
        gets = [(0, 0) if q == self.me else _common(o, reads[self.me]) for q, o in enumerate(self.own)]
        sends = [(0, 0) if q == self.me else _common((first, last), r) for q, r in enumerate(reads)]
        row = math.prod(n for d, n in enumerate(x.shape) if d != self.axis)
        sent = [self._flat(x.narrow(self.axis, a - first, b - a)) for a, b in sends if a < b]
        send = torch.cat(sent) if sent else x.new_empty(0)
        received = x.new_empty(sum(b - a for a, b in gets) * row)
        out_sizes, in_sizes = ([(b - a) * row * x.itemsize for a, b in spans] for spans in (gets, sends))
        packed = received.view(torch.uint8), send.view(torch.uint8)  # any dtype can travel as bytes
        work = dist.all_to_all_single(*packed, out_sizes, in_sizes, group=self.group, async_op=True)
        self.pending = work, packed
        for a, b in gets:
            if a < b:
                shape = [b - a if d == self.axis else n for d, n in enumerate(x.shape)]
                flat, received = received[: (b - a) * row], received[(b - a) * row :]
                self.pieces.append((a, b, flat.as_strided(shape, dense_strides(shape, self.channels_last))))

    def window(self, start: int, stop: int) -> Tensor:
        """The rows from ``start`` up to ``stop``, of which those beyond the image are zeros."""
        if self.pending is not None:
            self.pending[0].wait()
            self.pending = None
        first, last, x = self.pieces[0]
        if first <= start and stop <= last:
            return x if (start, stop) == (first, last) else x.narrow(self.axis, start - first, stop - start)
        shape = [stop - start if d == self.axis else n for d, n in enumerate(x.shape)]
        result = empty(x, shape, self.channels_last)
        for a, b, piece in self.pieces:
            low, high = _common((a, b), (start, stop))
            if low < high:
                part = piece.narrow(self.axis, low - a, high - low)
                result.narrow(self.axis, low - start, high - low).copy_(part)
        for low, high in (_common((start, 0), (start, stop)), _common((self.size, stop), (start, stop))):
            if low < high:
                result.narrow(self.axis, low - start, high - low).zero_()
        return result

    def _flat(self, x: Tensor) -> Tensor:
        """The elements in the order of the layout, which is that of every process."""
        return (x.movedim(1, -1) if self.channels_last else x).reshape(-1)


def _common(a: Span, b: Span) -> Span:
    first = max(a[0], b[0])
    return first, max(min(a[1], b[1]), first)


# --- convolutions ---------------------------------------------------------------------------------------------


# Of torch.nn.functional, with their arguments; for images split along the batch or a spatial axis too.
conv2d = conv.conv2d
conv_transpose2d = conv.conv_transpose2d


class Conv2d(nn.Conv2d):
    """``torch.nn.Conv2d`` that takes split images, by :func:`conv2d`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode != "zeros":
            return super()._conv_forward(input, weight, bias)
        return conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


def patch_convolutions(model: nn.Module) -> nn.Module:
    """Give every ``nn.Conv2d`` of a model the class :class:`Conv2d`, in place; parameters and state dict stay.

    Args:
        model: any module. Convolutions whose ``padding_mode`` is not ``"zeros"`` still take whole images only.

    Returns:
        the same module. It takes plain tensors as before, and images ``[N, C, H, W]`` that are split.

    Example:
        >>> import torch, pixfuse.distributed  # doctest: +SKIP
        >>> model = pixfuse.distributed.patch_convolutions(torch.nn.Conv2d(3, 8, 3, padding=1))  # doctest: +SKIP
    """
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Conv2d
    return model


register()
