"""Registration: one call gives an operator its schema and every rule that PyTorch may ask it for.

Data flows one way: public function -> checks -> :class:`Op` -> one kernel -> out. The kernel is, per device,

* ``cpu``: C++, from ``src/pixfuse/*/cpu.cpp`` by way of the library ``_kernels`` (the build may leave it out);
* ``triton``: the function of the op's name in the room's ``gpu.py``, for the dtypes listed there;
* ``reference``: the definition in the room's ``reference.py``, for everything else, slow and right.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import calls
from .batching import also_none
from .checks import FLOATS, dtype_name
from .sharding import Sharding

_LIBRARY = torch.library.Library("pixfuse", "DEF")
_KERNELS = Path(__file__).parents[1] / "_kernels.so"
_log = logging.getLogger("pixfuse")

OPS: dict[str, Op] = {}
_GPUS = ("cuda", "xpu")
_TAKE_INTEGERS = ("interpolate", "upsample_nearest")
ALIASES: dict[str, str] = {}  # public functions whose work another op does


class Op:
    """A registered operator. Calling it takes the right one of its implementations."""

    def __init__(
        self,
        name: str,
        overload: torch._ops.OpOverload,
        reference: Callable[..., Any],
        transformed: type[torch.autograd.Function],
        in_graph: Callable[..., Any],
        recorded: type[torch.autograd.Function],
        sharding: Sharding,
        room: str,
    ) -> None:
        self.name = name  # without its namespace
        parameters = [calls.Parameter(a.name, _kind(str(a.type))) for a in overload._schema.arguments]
        self.tensors = sum(p.kind in (calls.TENSOR, calls.OPTIONAL_TENSOR) for p in parameters)  # they come first
        self.overload = overload
        self._call = overload._op  # the same without Python of its own
        self.reference = reference
        self.transformed = transformed
        self.in_graph = in_graph
        self.recorded = recorded
        # Function.apply without Python of its own, which is for functorch.
        self._record = torch._C._FunctionBase.__dict__["apply"].__get__(None, recorded)
        self.sharding = sharding
        self.room = room
        type(self).__call__ = calls.remembering(self._call_first, name, parameters, before="self, ")  # type: ignore[method-assign]

    def __call__(self, *args: Any) -> Any:
        """The op's results for its arguments by position."""
        raise NotImplementedError

    def whole(self, *args: Any) -> Any:
        """The results, also those that a recorded call keeps to itself; for the rules of transforms."""
        eager = _peek_interpreter_stack() is None and torch.is_grad_enabled() and not _by_definition
        plain = all(x is None or type(x) in _PLAIN for x in args[: self.tensors])
        return self.overload(*args) if eager and plain else self(*args)

    def _call_first(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            if _pixfuse_differentiating():
                return self.in_graph(*args)
            if for_shards is not None and isinstance(args[0], for_shards.tensor):
                return self.overload(*for_shards.alike(args))
            return self.overload(*args)
        if _by_definition:
            return self.reference(*args)
        if _forward_ad._current_level >= 0 or _peek_interpreter_stack() is not None:
            return self.transformed.apply(*args)
        record = False
        tensors = args[: self.tensors]
        for x in tensors:
            if x is not None:
                if type(x) not in _PLAIN:
                    if for_shards is not None and isinstance(x, for_shards.tensor):
                        return for_shards.call(self, args)
                    return self.overload(*args)
                record = record or x.requires_grad
        if _watched():
            return self.overload(*args)
        options: Any = args[self.tensors :]
        run = self._directly(args) or self._below_autograd
        if record and torch.is_grad_enabled():
            run, options = self._record, (*options, run)
        output = run(*tensors, *options)
        if calls.notes.calls is not None:
            calls.notes.calls.append((tensors, run, options, output))
        return output

    def _below_autograd(self, *args: Any) -> Any:
        """The kernel by way of the dispatcher; nothing is recorded."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._call(*args)

    def _directly(self, args: Sequence[Any]) -> Callable[..., Any] | None:
        """The kernel for calls like this one, past the dispatcher, if that has nothing else to see to."""
        device = args[0].device
        keys = _ORDINARY.get(device.type, 0)
        if any(t is not None and torch._C._dispatch_keys(t).raw_repr() & ~keys for t in args[: self.tensors]):
            return None  # a negative view, or what a transform has left behind
        if device.type == "cpu":
            return functools.partial(self.overload._handle.redispatch_boxed, _CPU)
        kernel, _ = gpu_kernel(self.room, self.name, args[0].dtype, device)
        if kernel is None:
            return self.reference
        plan = getattr(kernel, "plan", None)
        return kernel if plan is None else plan(*args)


def _kind(of: str) -> int:
    """The kind of a parameter of a schema's type, for ``calls``."""
    if of == "Tensor":
        return calls.TENSOR
    if "Tensor" in of:
        return calls.OPTIONAL_TENSOR
    return calls.NUMBERS if of.startswith("List") else calls.OPTION


def _ordinary(backend: str) -> int:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    for key in (backend, f"Autograd{backend}", f"Autocast{backend}"):
        keys = keys.add(getattr(torch._C.DispatchKey, key))
    return keys.raw_repr()


_PLAIN = (Tensor, torch.nn.Parameter)
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ORDINARY = {"cpu": _ordinary("CPU"), "cuda": _ordinary("CUDA")}  # what calls past the dispatcher need not look at
_forward_ad = torch.autograd.forward_ad
_peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack


def _watched() -> bool:
    """Whether a mode, the profiler or the tracer asks to see every operator: then calls go by the dispatcher."""
    return calls.watched() or torch._C._get_tracing_state() is not None


def _pixfuse_differentiating() -> bool:
    """Whether a transform that is open here differentiates what is traced."""
    differentiates = _forward_ad._current_level >= 0 or any(
        interpreter.key() in _DIFFERENTIATE for interpreter in torch._C._functorch.get_interpreter_stack() or ()
    )
    if differentiates:  # not before: it imports much
        for op in OPS.values():
            torch.compiler.allow_in_graph(op.in_graph)
    return differentiates


_DIFFERENTIATE = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
# As torch.compiler.assume_constant_result does, without its imports. Tracing opens the transforms of what it traces
# and guards on them; of the answer it keeps a global variable beside the traced function, hence the long name.
_pixfuse_differentiating._dynamo_marked_constant = True  # type: ignore[attr-defined]


_by_definition = False


class ForShards(NamedTuple):
    """What distributed.py puts here: a class of tensors that live on several processes."""

    tensor: type
    call: Callable[[Op, Sequence[Any]], Any]  # an op on them
    alike: Callable[[Sequence[Any]], Sequence[Any]]  # an op's arguments, plain tensors too, as such tensors


for_shards: ForShards | None = None


@contextlib.contextmanager
def by_definition() -> Iterator[None]:
    """Let every op compute by its reference, differentiated by PyTorch's own autograd: the truth of the tests."""
    global _by_definition
    before, _by_definition = _by_definition, True
    try:
        with calls.nothing_known():
            yield
    finally:
        _by_definition = before


def define_op(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    jvp: Callable[..., Any],
    vmap: Callable[..., Any],
    sharding: Sharding,
    hidden: int = 0,
) -> Op:
    """Register ``pixfuse::<schema>`` with all its rules.

    Args:
        schema: the op's schema without namespace, for example ``"f(Tensor x, float gain) -> Tensor"``. Arguments
            are tensors, ints, floats, bools and lists of ints: strings leak in torch's stable ABI.
        reference: the definition in differentiable plain PyTorch; runs wherever no kernel does.
        fake: shape, dtype and strides of the result, from the same checks as the public function.
        setup_context: ``(ctx, inputs, output)``; keeps what backward needs.
        backward: ``(ctx, *grads)``; calls other ops, so that it can be differentiated again.
        jvp: ``(tangents, args, outputs)`` gives the tangents of the outputs, from those of the arguments (None where
            there is none, here too), by other ops.
        vmap: ``(info, in_dims, *args)`` gives ``(output, out_dims)``; see ``batching.py``.
        sharding: how the op may be split over several processes; see ``sharding.py``.
        hidden: how many of its results, the last ones, only setup_context looks at. Where an eager call is recorded
            they are None for everyone else, which autograd handles faster.
    """
    name = schema[: schema.index("(")]
    reference = _without_autocast(reference)
    room = reference.__module__.rpartition(".")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    overload = getattr(torch.ops.pixfuse, name).default
    vmap = also_none(vmap)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    launch = _triton_or_reference(room, name, reference)
    for kind in _GPUS:
        _LIBRARY.impl(name, launch, kind.upper())
    qualified = f"pixfuse::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    torch.library.register_vmap(qualified, vmap, lib=_LIBRARY)

    def record(ctx: Any, *args: Any) -> Any:
        args, run = args[:-1], args[-1]
        output = run(*args)
        setup_context(ctx, args, output)
        return (*output[:-hidden], *(None,) * hidden) if hidden else output

    def backward_of_recorded(ctx: Any, *grads: Any) -> Any:
        return *backward(ctx, *grads), None  # of run

    def setup_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)
        outputs = (output,) if isinstance(output, Tensor) else output
        ctx.save_for_forward(*(a if isinstance(a, Tensor) else None for a in inputs), *outputs)
        ctx.arguments = tuple(None if isinstance(a, Tensor) else a for a in inputs)

    def backward_if_any(ctx: Any, *grads: Any) -> Any:
        return backward(ctx, *grads) if any(g is not None for g in grads) else (None,) * len(ctx.needs_input_grad)

    def forward_mode(ctx: Any, *tangents: Tensor | None) -> Any:
        # PyTorch switches forward mode off in here, which would lose the tangents of an outer transform without a
        # word: it is switched on again, for arguments without the tangents of this one.
        with _forward_ad._set_fwd_grad_enabled(True):
            # The level is named, since compiled programs open it without a word to forward_ad; there is no other.
            tensors = [None if t is None else _forward_ad.unpack_dual(t, level=0).primal for t in ctx.saved_tensors]
            args = [t if t is not None else a for t, a in zip(tensors, ctx.arguments, strict=False)]
            outputs: list[Any] = tensors[len(args) :]
            found = jvp(tangents, args, outputs)
        if len(outputs) == 1:
            return torch.zeros_like(outputs[0]) if found is None else found
        return tuple(torch.zeros_like(y) if t is None else t for t, y in zip(found, outputs, strict=True))

    def function(**rules: Callable[..., Any]) -> type[torch.autograd.Function]:
        return type(name, (torch.autograd.Function,), {rule: staticmethod(call) for rule, call in rules.items()})

    # torch.func refuses ops with register_autograd, so its transforms get the same rules as a Function, and eager
    # autograd gets them as one in the older form, which costs half as much to call.
    transformed = function(
        forward=lambda *args: overload(*args),
        setup_context=setup_both,
        backward=backward_if_any,
        jvp=forward_mode,
        vmap=vmap,
    )
    recorded = function(forward=record, backward=backward_of_recorded)

    def in_graph(*args: Any) -> Any:
        """The op where torch.compile meets a transform: one node, which is traced with that, and into its kernels."""
        # An exported program keeps the transforms themselves, which know the operators of PyTorch only.
        return reference(*args) if torch.compiler.is_exporting() else transformed.apply(*args)

    # A class of its own, since calling looks for __call__ there: so self.call needs no function around it.
    OPS[name] = op = type(name, (Op,), {})(name, overload, reference, transformed, in_graph, recorded, sharding, room)
    return op


def linear(call: Callable[..., Tensor], *positions: int) -> Callable[..., Any]:
    """The rule ``jvp`` of an op with one result that is linear in each of the arguments at ``positions``."""

    def jvp(tangents: tuple[Tensor | None, ...], args: list[Any], outputs: Any) -> Tensor | None:
        terms = [call(*args[:i], tangents[i], *args[i + 1 :]) for i in positions if tangents[i] is not None]
        return functools.reduce(torch.add, terms) if terms else None

    return jvp


def differentiate(reference: Callable[..., Any]) -> dict[str, Any]:
    """The rules ``setup_context``, ``backward`` and ``jvp`` of an op, derived from its reference.

    For ops that are themselves second derivatives: right to any order, at the speed of plain PyTorch.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)))
        ctx.others = [None if isinstance(a, Tensor) else (a,) for a in inputs]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if other is None else other[0] for other in ctx.others]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
        given = [i for i, g in enumerate(grads) if g is not None]
        if not wanted or not given:
            return (None,) * len(inputs)

        outputs = _outputs(reference, inputs, wanted, given)
        eager = _peek_interpreter_stack() is None and _forward_ad._current_level < 0
        pull = _pulled_back if eager else _pulled_back_by_func
        values = pull(outputs, [inputs[i] for i in wanted], [g for g in grads if g is not None])
        found = dict(zip(wanted, values, strict=True))
        return tuple(found.get(i) for i in range(len(inputs)))

    def jvp(tangents: tuple[Tensor | None, ...], args: list[Any], outputs: list[Tensor]) -> Any:
        moved = [i for i, t in enumerate(tangents) if t is not None]
        function = _outputs(reference, args, moved, range(len(outputs)))
        vjp = torch.func.vjp(function, *(args[i] for i in moved))[1]
        # The vjp is linear, and its transpose is the jvp: torch.func.jvp doesn't work inside a dual level.
        zeros = tuple(map(torch.zeros_like, outputs))
        found = torch.func.vjp(lambda *u: vjp(u), *zeros)[1](tuple(tangents[i] for i in moved))
        return found if len(outputs) > 1 else found[0]

    return {"setup_context": setup_context, "backward": backward, "jvp": jvp}


def _outputs(
    reference: Callable[..., Any], args: Sequence[Any], wanted: Sequence[int], given: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]]:
    """``reference`` as a function of its arguments ``wanted``, with its outputs ``given``."""

    def outputs(*primals: Tensor) -> tuple[Tensor, ...]:
        full = list(args)
        for i, primal in zip(wanted, primals, strict=True):
            full[i] = primal
        result = reference(*full)
        result = (result,) if isinstance(result, Tensor) else result
        return tuple(result[i] for i in given)

    return outputs


_Outputs = Callable[..., tuple[Tensor, ...]]


def _pulled_back(function: _Outputs, args: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """The vjp of ``function`` at ``args``, which may itself be recorded."""
    with torch.enable_grad():
        leaves = [a.view_as(a) if a.requires_grad else a.detach().requires_grad_() for a in args]
        pairs = [(y, g) for y, g in zip(function(*leaves), grads, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(a) for a in args]
    ys, gs = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, leaves, gs, create_graph=torch.is_grad_enabled(), materialize_grads=True)
    return found


def _pulled_back_by_func(function: _Outputs, args: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same inside of transforms and dual levels, where saved-tensor hooks are not."""
    found: Sequence[Tensor] = torch.func.vjp(function, *args)[1](tuple(grads))
    return found


def _without_autocast(reference: Callable[..., Any]) -> Callable[..., Any]:
    """``reference`` computing in the dtype it chose, also in an autocast region (which would cast its convolutions)."""

    @functools.wraps(reference)
    def call(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return reference(*args)

    return call


def _triton_or_reference(room: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The GPU implementation of an op. It imports Triton at the first call only."""

    def launch(*args: Any) -> Any:
        x = args[0]
        kernel, _ = gpu_kernel(room, name, x.dtype, x.device)
        return (kernel or reference)(*args)

    return launch


@functools.cache
def gpu_kernel(room: str, name: str, dtype: torch.dtype, device: torch.device) -> tuple[Callable[..., Any] | None, str]:
    """The Triton launcher of an op for tensors of ``dtype`` on ``device`` or None, and why."""
    broken = _why_no_triton(device)
    if broken is not None:
        return None, broken
    if not importlib.util.find_spec(f"{room}.gpu"):
        return None, f"there is no Triton kernel for {name}"
    gpu = importlib.import_module(f"{room}.gpu")
    kernel = getattr(gpu, name, None)
    if kernel is None:
        return None, f"there is no Triton kernel for {name}"
    if dtype not in gpu.DTYPES:
        return None, f"the Triton kernel takes {', '.join(map(dtype_name, gpu.DTYPES))}, not {dtype_name(dtype)}"
    return kernel, "Triton kernel"


def gpu_module(room: str, name: str, x: Tensor) -> Any:
    """The room's module ``gpu`` if its kernels take ``x`` for the op ``name``, else None."""
    if x.device.type not in _GPUS or gpu_kernel(room, name, x.dtype, x.device)[0] is None:
        return None
    return importlib.import_module(f"{room}.gpu")


@functools.cache
def _why_no_triton(device: torch.device) -> str | None:
    """None where Triton works, else the reason, which is logged once: the reference is slow."""
    if importlib.util.find_spec("triton") is None:
        reason: str | None = "Triton is not installed (pip install triton)"
    else:
        reason = importlib.import_module("pixfuse._shared.gpu").why_unusable(device)
    if reason is not None:
        _log.warning("pixfuse: tensors on %s take the slow reference: %s", device, reason)
    return reason


def load_kernels() -> None:
    """Load the C++ kernels, if this install has them. A library that is there but does not load is an error."""
    if not _KERNELS.exists():
        return
    try:
        torch.ops.load_library(str(_KERNELS))
    except OSError as error:
        raise ImportError(
            f"pixfuse: {_KERNELS} does not load with torch {torch.__version__} (it needs torch 2.10 or newer): "
            f"{error.__cause__ or error}"
        ) from error


class Backend(str):
    """The name of an implementation, ``"cpu"``, ``"triton"`` or ``"reference"``, with the reason beside it."""

    reason: str

    def __new__(cls, name: str, reason: str) -> Backend:
        """A backend called ``name``, taken because of ``reason``."""
        self = super().__new__(cls, name)
        self.reason = reason
        return self

    def __repr__(self) -> str:
        return f"Backend({str(self)!r}, reason={self.reason!r})"


def backend(op: str | Callable[..., Any], x: Tensor) -> Backend:
    """Which implementation a call of ``op`` on ``x`` takes, and why.

    Args:
        op: a public function of pixfuse or its name, for example ``"group_norm"``.
        x: the tensor that would be passed.

    Returns:
        a string, ``"cpu"`` (C++), ``"triton"`` or ``"reference"`` (plain PyTorch), with the attribute ``reason``.

    Raises:
        TypeError: x is not a tensor, or of a dtype that the op refuses.
        ValueError: pixfuse has no such op.

    Example:
        >>> import torch, pixfuse
        >>> pixfuse.backend("bias_act", torch.zeros(1, 8, 4, 4)) in ("cpu", "reference")
        True
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"backend: x must be a tensor, got {type(x).__name__}")
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in OPS and name not in ALIASES:
        raise ValueError(f"backend: op must be one of {', '.join(sorted([*OPS, *ALIASES]))}, got {name!r}")
    name = ALIASES.get(name, name)
    if x.is_complex() or (x.dtype not in FLOATS and name not in _TAKE_INTEGERS):
        raise TypeError(f"backend: x must have a dtype that {name} takes, got {dtype_name(x.dtype)}")
    kind = x.device.type
    if kind == "cpu":
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"pixfuse::{name}", "CPU"):
            return Backend("cpu", f"C++ kernel from {_KERNELS.name}")
        if _KERNELS.exists():
            return Backend("reference", f"{_KERNELS.name} has no kernel for {name}")
        return Backend("reference", f"this install was built without the CPU kernels ({_KERNELS} is missing)")
    if kind not in _GPUS:
        return Backend("reference", f"pixfuse has no kernels for device type {kind}")
    kernel, reason = gpu_kernel(OPS[name].room, name, x.dtype, x.device)
    return Backend("triton" if kernel else "reference", reason)
