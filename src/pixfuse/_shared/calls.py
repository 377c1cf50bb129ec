"""Calls that were made before: their checks need not be made again, and what they run is known.

A call is described by the shape of its first tensor, its options with their types (``True == 1 == 1.0`` are three
calls) and the grad mode. For one that comes again :data:`TABLE` keeps what passed the checks: a guard of PyTorch's own,
which compares type, dtype, device, shape, strides, dispatch keys and ``requires_grad`` of all tensors in a fifth of a
microsecond, and the function that then computes the result. Anything else, the least difference, takes the long way:
the checks, and :class:`~pixfuse._shared.library.Op`, which finds the implementation and leaves it in :data:`notes`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils._device import DeviceContext

F = TypeVar("F", bound=Callable[..., Any])

_LARGEST, _ALIKE = 4096, 8  # descriptions, and calls of one description that differ in their tensors

TENSOR, OPTIONAL_TENSOR, NUMBERS, OPTION = range(4)  # kinds of parameters; numbers are a number or a sequence of them
_NONE = object()
# Stand for None; a guard wants no tensor twice.
_ABSENT = [torch.empty(0, dtype=torch.float32, device="cpu") for _ in range(6)]


class Parameter(NamedTuple):
    """A parameter of a function."""

    name: str
    kind: int
    default: Any = _NONE


class Known(NamedTuple):
    """A call that passed its checks."""

    check: Callable[..., bool]  # of all tensors
    run: Callable[..., Any]  # of the op's arguments
    options: tuple[Any, ...]  # the op's arguments after its tensors


TABLE: dict[Hashable, tuple[Known, ...]] = {}
_unknown: set[object] = set()  # not empty: no call counts as known


class Notes(threading.local):
    """What the ops of this thread did during a call that is to be remembered; else None."""

    calls: list[tuple[Sequence[Any], Callable[..., Any], Sequence[Any], Any]] | None = None


notes = Notes()


@contextlib.contextmanager
def nothing_known() -> Iterator[None]:
    """Let every call, of any thread, go the long way in this context."""
    token = object()
    _unknown.add(token)
    try:
        yield
    finally:
        _unknown.discard(token)


def forget() -> None:
    """Forget every call, as after a change of what they would run."""
    TABLE.clear()


_PLAIN = frozenset((int, float, bool, str, type(None)))


def described(value: Any) -> Hashable:
    """A number or a sequence of numbers with the types of its elements; TypeError for what may equal anything."""
    kind = value.__class__
    if kind is list or kind is tuple:
        kinds = [v.__class__ for v in value]
        if not _PLAIN.issuperset(kinds):
            raise TypeError
        return (*map(repr, value), *kinds) if float in kinds else (*value, *kinds)
    if kind is float and value == 0:
        return repr(value)  # -0.0 == 0.0
    if kind in _PLAIN or kind is torch.Size:
        return cast(Hashable, value)
    raise TypeError


def _function_modes() -> bool:
    """Whether a mode watches functions; those that only say where new tensors go do not count."""
    return any(
        type(torch._C._get_function_stack_at(i)) is not DeviceContext
        for i in range(torch._C._len_torch_function_stack())
    )


def watched() -> bool:
    """Whether a mode or the profiler asks to see every operator."""
    return bool(
        torch._C._len_torch_dispatch_stack() > 0 or _function_modes() or torch.autograd.profiler._is_profiler_enabled
    )


def remembering(
    function: Callable[..., Any], name: str, parameters: Sequence[Parameter], result: str = "", before: str = ""
) -> Callable[..., Any]:
    """``function``, which checks its arguments and calls one op, as one that takes a microsecond for known calls.

    It is written out, as ``namedtuple`` is: a loop over the arguments would take longer than all the rest.

    Args:
        function: calls the op with its own tensors, in their order.
        name: what profilers and tracebacks call it.
        parameters: its parameters.
        result: ``"[0]"`` where it returns the first of the op's results.
        before: ``"self, "`` for a method.
    """
    first = parameters[0].name
    names, tensors, checked, key = [], [], [], [f"{first}.shape", "grad()"]
    for p in parameters:
        names.append(p.name)
        if p.kind == TENSOR:
            tensors.append(p.name)
            checked.append(p.name)
        elif p.kind == OPTIONAL_TENSOR:
            checked.append(f"absent_{len(tensors)} if {p.name} is None else {p.name}")
            tensors.append(p.name)
            key.append(f"{p.name} is None")
        else:
            kind = f"{p.name}.__class__"
            plain = f"{kind} is int" if p.kind == NUMBERS else f"{kind} in plain and ({p.name} or {kind} is not float)"
            key += [f"{p.name} if {plain} else described({p.name})", kind]
    everything = ", ".join(names)
    source = f"""
def make(function, learn, compiling, plain, described, grad, modes, function_modes, watched, unknown, profiler,
         forward_ad, notes, table, defaults, absent):
    {"".join(f"default_{p.name} = defaults[{i}]; " for i, p in enumerate(parameters))}
    {"".join(f"absent_{i} = absent[{i}]; " for i in range(len(_ABSENT)))}
    def {name}({before}{", ".join(p.name if p.default is _NONE else f"{p.name}=default_{p.name}" for p in parameters)}):
        if compiling():
            return function({everything})
        try:
            key = (function, {", ".join(key)})
            found = table.get(key)
        except Exception:
            key = None
        if key is None:
            return function({everything})
        if found is not None:
            for check, run, options in found:
                if (
                    check({", ".join(checked)})
                    and not (modes() or unknown or profiler._is_profiler_enabled or (function_modes() and watched()))
                    and forward_ad._current_level < 0
                    and notes.calls is None
                ):
                    return run({", ".join(tensors)}, *options){result}
        return learn(key, ({", ".join(tensors)},), function, ({everything},), {bool(result)})
    return {name}
"""
    made: dict[str, Any] = {}
    file = f"<pixfuse {name} of {function.__module__}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # what tracebacks show
    # It belongs to the function's module, where doctest looks for it.
    exec(compile(source, file, "exec"), function.__globals__, made)
    call = made["make"](
        function=function,
        learn=_learn,
        compiling=torch.compiler.is_dynamo_compiling,
        plain=_PLAIN,
        described=described,
        grad=torch.is_grad_enabled,
        modes=torch._C._len_torch_dispatch_stack,
        function_modes=torch._C._len_torch_function_stack,
        watched=watched,
        unknown=_unknown,
        profiler=torch.autograd.profiler,
        forward_ad=torch.autograd.forward_ad,
        notes=notes,
        table=TABLE,
        defaults=[p.default for p in parameters],
        absent=_ABSENT,
    )
    return functools.wraps(function)(call)


def remembered(result: str = "") -> Callable[[F], F]:
    """Decorate a public function: :func:`remembering` with its own signature."""

    def decorate(function: F) -> F:
        kinds = {"Tensor": TENSOR, "Tensor | None": OPTIONAL_TENSOR}
        parameters = [
            Parameter(
                p.name,
                kinds.get(p.annotation, NUMBERS if "Sequence" in p.annotation else OPTION),
                _NONE if p.default is p.empty else p.default,
            )
            for p in inspect.signature(function).parameters.values()
        ]
        return cast(F, remembering(function, function.__name__, parameters, result))

    return decorate


def _learn(
    key: Hashable, tensors: Sequence[Any], function: Callable[..., Any], args: Sequence[Any], first: bool
) -> Any:
    """The call the long way; if it is not the first with this ``key``, and one op on ``tensors``, it is remembered."""
    if torch.compiler.is_dynamo_compiling():  # after a graph break it looks into every function that is called
        return function(*args)
    if key not in TABLE or not _GUARDED:  # a guard takes 20 us to make, too long for a call that never comes again
        if len(TABLE) >= _LARGEST:
            TABLE.clear()
        TABLE[key] = ()
        return function(*args)
    outer, notes.calls = notes.calls, []
    try:
        result = function(*args)
        calls = notes.calls
    finally:
        notes.calls = outer
    if outer is not None:
        outer += calls[:2]  # more than one is as good as many
    if len(calls) == 1:
        its, run, options, output = calls[0]
        same = len(its) == len(tensors) and all(a is b for a, b in zip(its, tensors, strict=True))
        if same and result is (output[0] if first else output):
            _remember(key, tensors, getattr(run, "first", run) if first else run, options)
    return result


def _remember(key: Hashable, tensors: Sequence[Any], run: Callable[..., Any], options: Sequence[Any]) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    given = [absent if t is None else t for t, absent in zip(tensors, _ABSENT, strict=False)]
    known = TABLE.get(key, ())
    if any(k.check(*given) for k in known):
        return
    fixed = tuple(tuple(o) if o.__class__ is list else o for o in options)  # every graph's node refers to them
    TABLE[key] = (*known, Known(_guard(given), run, fixed))[-_ALIKE:]


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether other tensors are like these."""
    at = {id(t): i for i, t in reversed([*enumerate(tensors)])}  # where each is first
    different = [tensors[i] for i in sorted(at.values())]
    sizes, strides = [list(t.shape) for t in different], [list(t.stride()) for t in different]
    guard: Any = torch._C._dynamo.guards.TensorGuards
    check: Callable[..., bool] = guard(*different, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(different) == len(tensors):
        return check
    places, twice = sorted(at.values()), [(i, at[id(t)]) for i, t in enumerate(tensors)]
    return lambda *others: all(others[i] is others[j] for i, j in twice) and check(*[others[i] for i in places])


def _guards_work() -> bool:
    """Whether this PyTorch has such guards: they are not part of its public interface. Without, no call is known."""
    a, b, c = (torch.empty(n, dtype=torch.float32, device="cpu") for n in ((2, 3), (3,), (3, 2)))
    try:
        check = _guard([a, b])
        return check(a, b) and not check(c.t(), b) and not check(a, b.double())
    except Exception:
        return False


_GUARDED = _guards_work()
