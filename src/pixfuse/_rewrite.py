"""Methods whose source runs SiLU on the result of something else, rewritten to run both as one call.

``f(g(x))`` becomes ``fused(f, g, x)``: all is evaluated in the same order, and ``fused`` is ``f(g(x))`` for whatever
``f`` and ``g`` are when it is called. So a method may branch, use buffers, change its module or hand it around:
nothing of that has to be known, and nothing is run to find it out. Three more steps bring source to that form:

1. ``h = g(x)`` and a next statement that starts with ``f(h)``, the last use of ``h``, become
   ``h = fused_later(g, x, lambda: f)`` and that statement with ``h``.
2. A statement that starts with ``f(h)`` after an ``if`` that ends in ``h = g(x)`` moves into its branches.
3. ``F.interpolate(...)`` becomes ``resized(F.interpolate, ...)`` in the classes of ``RESIZING``.

The source counts only where it compiles to the very code of the method.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dis
import functools
import inspect
import itertools
import linecache
import warnings
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

RESIZING = ("Upsample2D",)  # of diffusers
_PASSING = (  # contexts that let every exception through
    contextlib.nullcontext,
    torch.no_grad,
    torch.enable_grad,
    torch.set_grad_enabled,
    torch.inference_mode,
    torch.autocast,
)


def _own(name: str) -> Any:
    """A function of PyTorch, whatever F has later; what nothing is if it was replaced already."""
    function = getattr(F, name)
    return function if getattr(function, "__globals__", vars(F)) is vars(F) else object()


OWN = {name: _own(name) for name in ("silu", "group_norm", "interpolate", "avg_pool2d")}


_OF_A_CLASS = ("__base__", "__bases__", "__mro__", "mro", "__dict__")
_COPYING = ("__reduce", "__copy__", "__deepcopy__")  # methods that name a class to make another object
_Def = ast.FunctionDef | ast.AsyncFunctionDef


class Calls(NamedTuple):
    """The functions that rewritten methods call."""

    fused: Callable[..., Any]
    fused_later: Callable[..., Any]
    resized: Callable[..., Any]


class Rewritten(NamedTuple):
    """What became of a class: the methods that change, what SiLU is run with in them, and whether they resize.

    Of ``norms`` the key is the source, the value the path from the module where it is an attribute.
    """

    methods: dict[str, FunctionType]
    norms: dict[str, list[str] | None]
    resizes: bool


def rewrite(cls: type, acts: tuple[str, ...], calls: Calls) -> Rewritten:
    """Rewrite the methods of a class; ``acts`` are the attributes that are SiLU."""
    found: dict[str, FunctionType] = {}
    norms: dict[str, list[str] | None] = {}
    resizes = False
    for name, method in _candidates(cls, acts):
        layers, read = _layers(method), _source(method)
        if read is None:
            continue
        tree, node = read
        fuse = _Fuse(layers[-1], node, acts, cls.__name__ in RESIZING)
        fuse.run()
        if fuse.norms or fuse.resizes:
            found[name] = _around(layers, _compiled(layers[-1], tree, node, calls))
            norms |= fuse.norms
            resizes = resizes or fuse.resizes
    return Rewritten(found, dict(sorted(norms.items())), resizes)


def unreadable(cls: type, acts: tuple[str, ...]) -> list[str]:
    """The methods that seem to use SiLU and whose source is not at hand."""
    return [name for name, method in _candidates(cls, acts) if _source(method) is None]


def _candidates(cls: type, acts: tuple[str, ...]) -> Iterator[tuple[str, FunctionType]]:
    """The methods of a class that name SiLU, or what resizes, without PyTorch's own."""
    seen: set[str] = set()
    resizing = cls.__name__ in RESIZING
    words = {"silu", *acts} | ({"interpolate"} if resizing else set())
    for owner in itertools.takewhile(lambda c: c is not nn.Module, cls.__mro__):
        if owner.__module__.partition(".")[0] == "torch" or issubclass(owner, fx.GraphModule):
            continue
        for name, method in vars(owner).items():
            if name in seen or name.startswith("__"):
                continue
            seen.add(name)
            if not inspect.isfunction(method):
                continue
            inner = _layers(method)[-1]
            names = {n for code in _codes(inner.__code__) for n in (*code.co_names, *code.co_freevars)}
            if names & words or any(inner.__globals__.get(n) is OWN["silu"] for n in names):
                yield name, method


def asking(cls: type) -> list[str]:
    """The methods that would see, or change, that an object has another class.

    They set what is of ``type(self)``, or do with it what is neither to read an attribute of it nor to call it.
    """
    owners = itertools.takewhile(lambda c: c is not nn.Module, cls.__mro__)
    mine = [vars(c).items() for c in owners if c.__module__.partition(".")[0] not in ("torch", "builtins")]
    methods = [(name, method) for name, method in itertools.chain(*mine) if not name.startswith(_COPYING)]
    return sorted({name for name, method in methods if any(map(_asks, _functions(method)))})


def _functions(method: Any) -> Iterator[tuple[FunctionType, bool]]:
    """The functions of what a class has under a name, and whether their first argument is the class."""
    parts = [method]
    if isinstance(method, (classmethod, staticmethod, property, functools.cached_property)):
        parts = [getattr(method, name, None) for name in ("__func__", "fget", "fset", "fdel", "func")]
    for part in parts:
        if inspect.isfunction(part):
            for function in _layers(part):
                yield function, isinstance(method, classmethod)


def _asks(method: tuple[FunctionType, bool]) -> bool:
    function, of_class = method
    code = function.__code__
    names = {n for c in _codes(code) for n in c.co_names}
    sets = of_class and any(i.opname in ("STORE_ATTR", "DELETE_ATTR") for c in _codes(code) for i in dis.Bytecode(c))
    read = (
        _parsed(function) if code.co_argcount and (sets or (not of_class and names & {"type", "__class__"})) else None
    )
    if read is None:
        return False
    me, nodes, fine = code.co_varnames[0], list(ast.walk(read[1])), set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr not in _OF_A_CLASS:
            fine.add(node.value)
        elif isinstance(node, ast.Call):
            fine.add(node.func)
    if of_class:
        changed = (n.value for n in nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load))
        return any(isinstance(n, ast.Name) and n.id == me for n in changed)
    kinds = (f"{me}.__class__", f"type({me})")
    found = (n for n in nodes if isinstance(n, (ast.Attribute, ast.Call)) and n not in fine)
    return any(ast.unparse(n) in kinds for n in found)


# --- source ---------------------------------------------------------------------------------------------------


def _source(function: FunctionType) -> tuple[ast.Module, _Def] | None:
    """A fresh syntax tree of a file and a function in it, within its decorators, if that is what runs."""
    *outer, function = _layers(function)
    return None if "__wrapped__" in vars(function) or not all(map(_only_calls, outer)) else _parsed(function)


def _parsed(function: FunctionType) -> tuple[ast.Module, _Def] | None:
    """A fresh syntax tree of a file and a function in it, if it compiles to the very code."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    if code not in _codes_of(text):
        return None
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _Def) and node.name == code.co_name and _line(node) == code.co_firstlineno:
            return tree, node
    return None


def _line(node: _Def) -> int:
    """Where a function starts, as its code counts."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


@functools.lru_cache(maxsize=64)
def _codes_of(text: str) -> frozenset[CodeType]:
    """All code of a file."""
    try:
        return frozenset(_codes(_compile(ast.parse(text))))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()


def _compile(tree: ast.Module, name: str = "") -> CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the user's source, a second time
        return compile(tree, name, "exec", dont_inherit=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A piece of code and all that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _compiled(function: FunctionType, tree: ast.Module, node: _Def, calls: Calls) -> FunctionType:
    """The function of a changed node of a tree, in the place of ``function``."""
    cells = {f"_pixfuse_{name}": CellType(value) for name, value in calls._asdict().items()}
    scope = ast.parse(f"def _pixfuse_scope({', '.join(cells)}): pass").body[0]  # so that the names are free in it
    assert isinstance(scope, ast.FunctionDef)
    scope.body = [node]
    _Swap(node, scope).visit(tree)
    ast.fix_missing_locations(tree)
    line, old = function.__code__.co_firstlineno, function.__code__
    name = old.co_filename
    code = next(c for c in _codes(_compile(tree, name)) if (c.co_name, c.co_firstlineno) == (old.co_name, line))
    return _like(function, code, cells | _cells(function))


def _like(function: FunctionType, code: CodeType, cells: dict[str, CellType]) -> FunctionType:
    """A function with other code, and with the cells that it needs."""
    closure = tuple(cells[name] for name in code.co_freevars)
    new = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(new, function).__dict__ = function.__dict__  # one for both, as it may change
    return new


def _cells(function: FunctionType) -> dict[str, CellType]:
    """The variables of a function that other functions hold."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _values(function: FunctionType) -> dict[str, Any]:
    """The values of these variables, but of those that are not set."""
    return {name: cell.cell_contents for name, cell in _cells(function).items() if cell != CellType()}


# --- decorators -----------------------------------------------------------------------------------------------


def _layers(function: FunctionType) -> list[FunctionType]:
    """A function, the function that it wraps, and so on."""
    found = [function]
    while inspect.isfunction(inner := vars(found[-1]).get("__wrapped__")) and inner not in found:
        found.append(inner)
    return found


def _holds(function: FunctionType) -> list[str]:
    """The variables in which a decorator's function holds what it wraps."""
    return [name for name, value in _values(function).items() if value is vars(function)["__wrapped__"]]


def _only_calls(function: FunctionType) -> bool:
    """Whether a decorator's function calls what it wraps, and does nothing else with it."""
    names = _holds(function)
    read = _parsed(function) if names else None
    nodes = [n for statement in read[1].body for n in ast.walk(statement)] if read else []
    called = [n.func for n in nodes if isinstance(n, ast.Call)]
    return bool(read) and all(n in called for n in nodes if isinstance(n, ast.Name) and n.id in names)


def _around(layers: list[FunctionType], new: FunctionType) -> FunctionType:
    """Decorators as they are, around another function."""
    for outer in reversed(layers[:-1]):
        new = _like(outer, outer.__code__, _cells(outer) | dict.fromkeys(_holds(outer), CellType(new)))
    return new


class _Swap(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


# --- rewriting ------------------------------------------------------------------------------------------------


class _Fuse(ast.NodeTransformer):
    """Rewrites one function, in place."""

    def __init__(self, function: FunctionType, node: _Def, acts: tuple[str, ...], resizing: bool) -> None:
        code = function.__code__
        self.node, self.acts, self.resizing = node, acts, resizing
        self.me = code.co_varnames[0] if code.co_argcount else None
        self.known = ChainMap(_values(function), function.__globals__)
        self.local = {*code.co_varnames, *code.co_cellvars}
        looks = {"locals", "vars", "eval", "exec", "_getframe"} & {n for c in _codes(code) for n in c.co_names}
        self.private = set() if looks else self.local - {*code.co_cellvars}
        self.uses = _uses(node)
        self.norms: dict[str, list[str] | None] = {}
        self.resizes = False

    def run(self) -> None:
        self.node.body = [self.visit(s) for s in self.block(self.node.body)]

    def value(self, node: ast.expr) -> Any:
        """What a dotted name stands for, if that is known without running anything."""
        root, *path = _dotted(node) or ("",)
        if root == self.me and path and path[0] in self.acts:
            return OWN["silu"] if len(path) == 1 else None
        found = None if root in self.local else self.known.get(root)
        for name in path:
            found = vars(found).get(name) if isinstance(found, ModuleType) else None
        return found

    def is_silu(self, node: ast.expr | None) -> bool:
        """Whether a node calls SiLU on one argument."""
        if not isinstance(node, ast.Call) or not _one(node, ("inplace",)):
            return False
        return self.value(node.func) is OWN["silu"]

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        inner = node.args[0] if self.is_silu(node) else None
        if isinstance(inner, ast.Call) and _one(inner) and not self.is_silu(inner):
            self.note(inner)
            return _call("fused", node, node.func, inner.func, inner.args[0])
        if self.resizing and self.value(node.func) is OWN["interpolate"]:
            self.resizes = True
            return _call("resized", node, node.func, *node.args)
        return node

    def note(self, norm: ast.Call) -> None:
        path = _dotted(norm.func) or [""]
        mine = path[0] == self.me and len(path) > 1
        self.norms[".".join(path[1:]) if mine else ast.unparse(norm.func)] = path[1:] if mine else None

    # Statements

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Steps 1 and 2 for a list of statements and those in it; not where h may be seen after an exception."""
        done: list[ast.stmt] = []
        for statement in body:
            act, over = self.first(statement)
            before: Any = done[-1] if done else None
            ready = act is not None and self.ends(before, act.args[0].id)
            if ready and isinstance(before, ast.If):
                if over:  # else h could be read again, around a loop
                    before.body.append(statement)
                    before.orelse.append(copy.deepcopy(statement))
                    continue
            elif ready:
                norm = before.value
                self.note(norm)
                later = ast.Lambda(ast.arguments([], [], None, [], [], None, []), act.func)
                before.value = _call("fused_later", act, norm.func, norm.args[0], later)
                _Swap(act, act.args[0]).visit(statement)
            done.append(statement)
        for statement in done:
            if isinstance(statement, (ast.If, ast.For, ast.While)):
                statement.body, statement.orelse = self.block(statement.body), self.block(statement.orelse)
            elif isinstance(statement, ast.With) and all(self.passes(item.context_expr) for item in statement.items):
                statement.body = self.block(statement.body)
        return done

    def passes(self, context: ast.expr) -> bool:
        """Whether a context is one that lets every exception through."""
        return isinstance(context, ast.Call) and any(self.value(context.func) is known for known in _PASSING)

    def ends(self, statement: ast.stmt | None, name: str) -> bool:
        """Whether the last thing that a statement may do is ``name = g(x)``."""
        if isinstance(statement, ast.If):
            return any(self.ends(body[-1], name) for body in (statement.body, statement.orelse) if body)
        if not isinstance(statement, ast.Assign) or not _is_name(statement.targets, name):
            return False
        value = statement.value
        return isinstance(value, ast.Call) and _one(value) and not self.is_silu(value)

    def first(self, statement: Any) -> tuple[Any, bool]:
        """The call ``f(h)`` of SiLU that is the first thing a statement does, if h has no other use.

        And whether h ends with the statement: it is set anew, or the function returns.
        """
        node = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
        while isinstance(node, ast.Call) and node.args and _dotted(node.func):
            if self.is_silu(node) and isinstance(node.args[0], ast.Name):
                name = node.args[0].id
                over = isinstance(statement, ast.Return) or _is_name(statement.targets, name)
                alone = _uses(statement)[name] == 1 and (over or self.uses[name] == 1)
                return (node if alone and name in self.private else None), over
            node = node.args[0]
        return None, False


def _one(call: ast.Call, keywords: tuple[str, ...] = ()) -> bool:
    """Whether a call has one argument, and besides only constants for some keywords."""
    plain = all(k.arg in keywords and isinstance(k.value, ast.Constant) for k in call.keywords)
    return plain and len(call.args) == 1 and not isinstance(call.args[0], ast.Starred)


def _call(name: str, old: ast.Call, *args: ast.expr) -> ast.Call:
    """A call of ours in the place of another, with its keywords."""
    return ast.copy_location(ast.Call(ast.Name(f"_pixfuse_{name}", ast.Load()), list(args), old.keywords), old)


def _dotted(node: ast.expr) -> list[str] | None:
    """The parts of ``a.b.c``."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def _is_name(targets: list[ast.expr], name: str) -> bool:
    """Whether one name is all that is set."""
    return [t.id if isinstance(t, ast.Name) else None for t in targets] == [name]


def _uses(node: ast.AST) -> Counter[str]:
    """How often each name is read."""
    reads = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    changed = [n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)]
    return Counter(n.id for n in (*reads, *changed))
