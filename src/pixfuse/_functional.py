"""Modules that call ``F.silu`` on the result of a GroupNorm of theirs: their forward without that call.

The other forward is the code of the ``torch.fx`` graph of their own. A graph keeps what tracing found once, so it is
taken only where it is all of forward: every call there is a node of it, and forward names nothing but its arguments,
layers that it calls, parameters, and functions of torch.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.fx
from torch import nn

Graph = Callable[[nn.Module], tuple[torch.fx.Graph | None, str | None]]


def calls_silu(module: nn.Module) -> bool:
    """Whether a module's forward names the function, and a GroupNorm is one of its layers."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "silu" in code.co_names and any(type(m) is nn.GroupNorm for m in module.children())


def fusible(module: nn.Module, graph: torch.fx.Graph) -> list[str]:
    """The GroupNorms whose every result goes to ``F.silu`` and nowhere else."""
    found = _silu_nodes(module, graph)
    return [n for n, calls in found.items() if calls is not None and type(module.get_submodule(n)) is nn.GroupNorm]


def obstacle(module: nn.Module, graph: torch.fx.Graph) -> str | None:
    """Why the graph is not all of forward, if it is not."""
    forward = inspect.unwrap(type(module).forward)
    code = forward.__code__
    if code.co_freevars or any(isinstance(c, CodeType) for c in code.co_consts):
        return "forward holds other functions, or is held by one"
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return "forward takes any number of arguments"
    me, steps = code.co_varnames[0], list(dis.get_instructions(code))
    for step, after in itertools.pairwise(steps):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # two locals at once
        if step.opname.startswith(("LOAD_FAST", "STORE_FAST")) and me in names:
            called = after.opname == "LOAD_METHOD" or "NULL" in after.argrepr
            parameter = after.argval in module._parameters  # a buffer's value would stay in the graph
            taken = "STORE" in step.opname or me in names[:-1]
            if taken or not (parameter or (called and after.argval in module._modules)):
                return f"forward uses {me}.{after.argval}" if "ATTR" in after.opname else f"forward uses {me}"
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = forward.__globals__.get(step.argval)
            origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if not (callable(value) or isinstance(value, ModuleType)) or str(origin).partition(".")[0] != "torch":
                return f"forward uses {step.argval}"
    calls = sum(s.opname.startswith("CALL") and "INTRINSIC" not in s.opname for s in steps)
    if calls != sum(map(_is_call, graph.nodes)):
        return "torch.fx does not see all that forward calls"
    if any(node.op == "get_attr" and node.target not in module._parameters for node in graph.nodes):
        return "forward computes with tensors that are not parameters"
    return None


def rewrite(module: nn.Module, norms: list[str], graph: torch.fx.Graph, graph_of: Graph) -> None:
    """Give a module the forward without the calls of ``F.silu`` on ``norms``."""
    nodes = _silu_nodes(module, graph)
    for name in norms:
        for node in nodes[name] or ():
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, f"<pixfuse.patch of {type(module).__qualname__}>", "exec"), scope)
    original = type(module)
    own = {"__module__": original.__module__, "__qualname__": original.__qualname__, "forward": scope["forward"]}
    own |= {"_pixfuse_original": original, "_pixfuse_again": (norms, graph_of)}
    module.__class__ = type(original.__name__, (_Rewritten, original), own)


class _Rewritten:
    """What such modules share; they can be copied and pickled."""

    _pixfuse_original: type[nn.Module]
    _pixfuse_again: tuple[list[str], Graph]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _again, (self._pixfuse_original, self.__dict__, *self._pixfuse_again)


def _again(original: type[nn.Module], state: dict[str, Any], norms: list[str], graph_of: Graph) -> nn.Module:
    module = original.__new__(original)
    module.__setstate__(state)
    graph, reason = graph_of(module)
    if graph is None:
        raise RuntimeError(f"patch: the patched {original.__name__} cannot be restored: {reason}")
    rewrite(module, norms, graph, graph_of)
    return module


def _silu_nodes(module: nn.Module, graph: torch.fx.Graph) -> dict[str, list[torch.fx.Node] | None]:
    """For each layer that a graph calls: the calls of ``F.silu`` that take its results, None if others do too."""
    found: dict[str, list[torch.fx.Node] | None] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            name, users = str(node.target), list(node.users)
            before = found.setdefault(name, [])
            if len(users) == 1 and users[0].target is torch.nn.functional.silu and users[0].args == (node,):
                found[name] = None if before is None else [*before, users[0]]
            else:
                found[name] = None
    return found


def _is_call(node: torch.fx.Node) -> bool:
    """Whether a node is a call in the code, not an operator or an attribute."""
    if node.op == "call_function":
        return getattr(node.target, "__module__", None) not in ("_operator", "builtins")
    return node.op in ("call_module", "call_method")
