"""pixfuse.patch and the code of models: methods that run GroupNorm and SiLU."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import linecache
import pickle
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_patch import X, agree, counted
from torch import Tensor, nn

import pixfuse
from pixfuse import _layers


class Parts(nn.Module):
    """Without a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm1, self.norm2, self.norm3 = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8), nn.GroupNorm(8, 8)
        self.act, self.inplace, self.function = nn.SiLU(), nn.SiLU(inplace=True), F.silu
        self.norms = nn.ModuleList([nn.GroupNorm(1, 8), nn.GroupNorm(2, 8)])
        self.conv, self.relu = nn.Conv2d(8, 8, 1), nn.ReLU()
        self.register_buffer("scale", torch.ones(8, 1, 1))
        self.__hidden = nn.GroupNorm(2, 8)


class Nested(Parts):
    def forward(self, x: Tensor, shift: Any = 0.5, *, twice: Any = 1) -> Tensor:
        h = F.silu(self.norm1(x)) * self.scale + shift
        h = torch.nn.functional.silu(self.norm2(h), inplace=True)
        h = self.conv(self.act(self.norm3(self.inplace(self.norm1(h)))))
        return x + self.function(self.norm2(h * twice)) - self.norm1(h)


class Statements(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        h = self.act(h)
        y = self.norm2(h)
        z = self.conv(F.silu(y))
        with contextlib.nullcontext(), torch.autocast("cpu", enabled=False):
            z = self.norm3(z)
            z = self.inplace(z)
        for norm in self.norms:
            z = F.silu(norm(z))
        z = self.norm1(z)
        return self.act(z)


class Methods(Parts):
    def encode(self, x: Tensor) -> Tensor:
        return self.act(self.norm1(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.encode(x)) + self.norm1(x)

    def tail(self, h: Tensor) -> Tensor:
        if self.training:
            h = self.norm2(h)
        else:
            h = h + 1
            h = self.norm3(h)
        return self.act(h)


class Inherited(Methods):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.__class__.__name__.count("e")


class Mangled(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.__mine = nn.GroupNorm(4, 8)

    def __twice(self, x: Tensor) -> Tensor:
        return self.act(self.__mine(x))

    def forward(self, x: Tensor) -> Tensor:
        return (lambda y: F.silu(self.__mine(y)))(self.__twice(x))


class Decorated(Parts):
    @torch.autocast("cpu", enabled=False)
    @torch.enable_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Says something."""
        return self.act(self.norm1(x))


class Counting(Parts):
    """Changes with every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.scale += 1
        self.calls += 1
        self.last = x
        return self.act(self.norm1(x)) * self.scale


class Unused(Parts):
    """Nothing here is silu(norm(x)), and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        y = self.act(h) + h
        h = self.norm2(y)
        h += 1
        y = self.act(h)
        h = self.norm3(y)
        try:
            h = self.norm1(h)
            h = self.act(h)
        finally:
            y = h
        with contextlib.suppress(ZeroDivisionError):
            h = self.norm1(h)
            h = self.act(h)
        h = self.norm2(h)
        y = y + h
        h = self.norm2(x)
        for _ in range(2):
            y = y + self.act(h)
        return self.relu(self.norm1(y)) + self.act(self.conv(x))


class Captured(Parts):
    def forward(self, x: Tensor) -> Tensor:
        def later() -> Tensor:
            return h

        h = self.norm1(x)
        y = self.act(h)
        return y + later()


CASES: list[tuple[Any, str | None, int]] = [
    (Nested, "norm1, norm2, norm3 with SiLU in one pass", 5),
    (Statements, "norm, norm1, norm2, norm3 with SiLU in one pass", 6),
    (Methods, "norm1, norm2, norm3 with SiLU in one pass", 2),
    (Inherited, "norm1, norm2, norm3 with SiLU in one pass", 2),
    (Mangled, "__mine with SiLU in one pass", 2),
    (Decorated, "norm1 with SiLU in one pass", 1),
    (Unused, None, 0),
    (Captured, None, 0),
]


@pytest.mark.parametrize(("make", "words", "number"), CASES)
def test_methods(make: Any, words: str | None, number: int) -> None:
    for train in (True, False):
        model = make().double().train(train)
        report = agree(model, X.double())
        assert report.replaced.get("(the model)") == (words and f"{make.__name__}: {words}")
        assert {"norm1", "norm2", "norm3"} <= set(report.replaced)
        assert report.left == {}
        expected = model(X.double())
        pixfuse.patch(model)
        with counted() as calls:
            torch.testing.assert_close(model(X.double()), expected)
        assert calls.count("silu") == number
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
            assert type(other) is type(model)
            assert torch.equal(other(X.double()), model(X.double()))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(X.double()), expected)
    torch._dynamo.reset()


def test_a_method_is_what_it_was() -> None:
    model = Nested().double()
    expected = model(X.double(), 2.0, twice=3)
    pixfuse.patch(model)
    forward = type(model).forward
    assert (forward.__name__, forward.__qualname__) == ("forward", "Nested.forward")
    assert forward.__kwdefaults__ == {"twice": 1}
    assert forward.__annotations__ == Nested.forward.__annotations__
    torch.testing.assert_close(model(X.double(), 2.0, twice=3), expected)
    with pytest.raises(TypeError, match=r"Nested\.forward\(\) got an unexpected keyword argument 'bad'"):
        model(X, bad=1)
    model = Decorated()
    pixfuse.patch(model)
    assert model.forward.__doc__ == "Says something."


def test_nothing_of_the_model_runs_and_what_changes_counts() -> None:
    model = Counting()
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    pixfuse.patch(model)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    first = model(X)
    assert (model.calls, model.scale[0].item(), model.last is X) == (1, 2, True)
    torch.testing.assert_close(model(X), first * 1.5)
    model.scale.fill_(9)
    torch.testing.assert_close(model(X), first * 5)
    model.act = nn.GELU()
    torch.testing.assert_close(model(X), F.gelu(model.norm1(X)) * 11)


def test_a_function_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Nested()
    pixfuse.patch(model)
    with monkeypatch.context() as patcher:
        patcher.setattr(F, "silu", lambda x, inplace=False: x * 0)
        with counted() as calls:
            model(X)
    assert calls.count("silu") == 1  # the one by an attribute; nn.SiLU runs what is there


def run(source: str, name: str = "<from a string>", keep: bool = True) -> Any:
    """The class Model of a source, which inspect and tracebacks can see if it is kept."""
    scope: dict[str, Any] = {**globals(), "__name__": "somewhere"}
    linecache.cache.pop(name, None)
    if keep:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec", dont_inherit=True), scope)
    return scope["Model"]


SOURCE = """
class Model(Parts):
    def forward(self, x):
        return F.silu(self.norm1(x))
"""


def test_without_the_source_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = run(SOURCE, keep=False)()
    left = {"(the model)": "Model: as before in forward: decorated, or its source is not at hand"}
    assert agree(model, X).left == left
    kind = run(SOURCE, "<edited>")
    linecache.cache["<edited>"] = (9, None, SOURCE.replace("norm1", "norm2").splitlines(keepends=True), "<edited>")
    assert agree(kind(), X).left == left
    model = run(SOURCE, "<lost>")()
    model.__class__.__module__ = __name__
    monkeypatch.setitem(globals(), "Model", type(model))
    pixfuse.patch(model)
    expected, saved = model(X), pickle.dumps(model)
    monkeypatch.setattr(_layers, "_made", {})
    linecache.cache.pop("<lost>")
    restored = pickle.loads(saved)  # as in a process that has the class without its source
    assert type(restored) is Model  # noqa: F821
    torch.testing.assert_close(restored(X), expected)

    class Wrapper:
        def __init__(self, f: Any) -> None:
            functools.update_wrapper(self, f)

        def __get__(self, instance: Any, owner: Any) -> Any:
            return functools.partial(self.__wrapped__, instance)  # type: ignore[attr-defined]

    class Wrapped(Parts):
        forward = Wrapper(Nested.forward)

    assert agree(Wrapped(), X).left == {}


def test_a_forward_of_the_object() -> None:
    model = Nested()
    model.forward = functools.partial(Statements.forward, model)  # type: ignore[method-assign]
    expected = model(X)
    assert pixfuse.patch(model).left == {"(the model)": "Nested: its forward was replaced"}
    torch.testing.assert_close(model(X), expected)


@pytest.mark.parametrize("meta", [type, abc.ABCMeta])
def test_the_original_class_learns_nothing(meta: Any) -> None:
    seen = []

    class Register(meta):
        def __new__(cls, *args: Any) -> Any:
            seen.append(args)
            return super().__new__(cls, *args)

    class Registered(Parts, metaclass=Register):
        def __init_subclass__(cls) -> None:
            seen.append(cls)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.norm1(x))

    seen.clear()
    assert agree(Registered(), X).replaced["(the model)"] == "Registered: norm1 with SiLU in one pass"
    assert seen == []
    model = Registered()
    pixfuse.patch(model)
    assert isinstance(model, Registered)
    assert not isinstance(Parts(), Registered)


def test_decorators() -> None:
    def count(f: Any) -> Any:
        @functools.wraps(f)
        def wrapper(self: Any, *args: Any) -> Any:
            wrapper.calls += 1
            return f(self, *args)

        wrapper.calls = 0
        return wrapper

    def through_default(f: Any) -> Any:
        @functools.wraps(f)
        def wrapper(self: Any, x: Any, f: Any = f) -> Any:
            return f(self, x)

        return wrapper

    sizes = {}

    def look_up(f: Any) -> Any:
        sizes[f] = 2.0

        @functools.wraps(f)
        def wrapper(*args: Any) -> Any:
            return f(*args) * sizes[f]

        return wrapper

    class Counted(Parts):
        @count
        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.norm1(x))

        silu = functools.wraps(torch.relu)(lambda self, x: F.silu(x))

    class Default(Parts):
        forward = through_default(Counted.forward)

    class LookedUp(Parts):
        @look_up
        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.norm1(x))

    model = Counted()
    pixfuse.patch(model)
    for calls in range(1, 3):
        with counted() as runs:
            model(X)
        assert runs == ["silu"]
        assert model.forward.calls == Counted.forward.calls == calls
    for kind in (Default, LookedUp):
        left = {"(the model)": f"{kind.__name__}: as before in forward: decorated, or its source is not at hand"}
        assert agree(kind(), X).left == left


def test_classes_that_say_how_to_make_them() -> None:
    for method, value in ("__getnewargs__", ()), ("__getnewargs_ex__", ((), {})):
        model = Nested()
        kind = type("Nested", (Nested,), {method: lambda self, value=value: value, "__module__": __name__})
        object.__setattr__(model, "__class__", kind)
        pixfuse.patch(model)
        for other in (copy.copy(model), copy.deepcopy(model)):
            assert type(other) is type(model)
            assert torch.equal(other(X), model(X))


class Remade(Nested):
    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls)

    def __getnewargs__(self) -> tuple[int]:
        return (8,)


class Reduced(Nested):
    def __reduce__(self) -> Any:
        return self.__class__, (), vars(self)


class Copied(Nested):
    def __deepcopy__(self, memo: Any) -> Any:
        cls = self.__class__
        other = cls.__new__(cls)
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other


class Rebuilt(Nested):
    def __reduce__(self) -> Any:
        return build, (3, type(self)), vars(self)


def build(number: int, cls: Any) -> Any:
    assert cls is Rebuilt
    return cls()


@pytest.mark.parametrize("make", [Remade, Reduced, Rebuilt, Copied])
def test_classes_that_say_how_to_pickle_them(make: Any) -> None:
    model = make()
    assert "(the model)" in pixfuse.patch(model).replaced
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(other(X), model(X))


ASKING = [  # (what counts the calls, whether that sees another class)
    ("type(self).calls += 1", True),
    ("self.__class__.calls = self.calls + 1", True),
    ("setattr(type(self), 'calls', self.calls + 1)", True),
    ("kind = type(self)\nkind.calls += 1", True),
    ("super(self.__class__, self).count()", True),
    ("super(type(self), self).count()", True),
    ("if type(self) is Model: Model.calls += 1", True),
    ("self.bump()", True),
    ("type(self).__bases__[0].count(self)", True),
    ("super().count()", False),
    ("Model.calls += len(type(self).one) * len(self.__class__.one)", False),
    ("x = type(self)().calls\nModel.calls += type(x) is int", False),
]


@pytest.mark.parametrize(("line", "asks"), ASKING)
def test_code_that_would_see_another_class(line: str, asks: bool) -> None:
    source = f"""
class Base(Parts):
    calls, one = 0, "1"
    def count(self):
        Model.calls += 1

class Model(Base):
    def count(self):
{textwrap.indent(line, " " * 8)}
    def forward(self, x):
        self.count()
        return F.silu(self.norm1(x))
"""
    if "bump" in line:
        source += "    @classmethod\n    def bump(cls): cls.calls += 1\n"
    kind = run(source)
    report = agree(kind(), X)
    name = "bump" if "bump" in line else "count"
    left = {"(the model)": f"Model: as before: {name} would see another type(self)"} if asks else {}
    assert report.left == left
    kind.calls, model = 0, kind()
    pixfuse.patch(model)
    model(X)
    assert kind.calls == model.calls == 1


def test_what_decorators_and_closures_hold() -> None:
    class Model(Parts):
        @functools.wraps(nn.Conv2d)
        def silu(self, *args: Any) -> Any:
            return F.silu(*args)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm1(x)) * later

        async def co(self, x: Tensor) -> Tensor:
            h = self.norm1(x)
            h = self.act(h)
            return h

    model = Model()
    pixfuse.patch(model)
    later = 2
    with counted() as calls:
        expected = 2 * F.silu(model.norm1(X))
        torch.testing.assert_close(model(X), expected)
        with pytest.raises(StopIteration) as result:
            model.co(X).send(None)
        torch.testing.assert_close(2 * result.value.value, expected)
    assert calls == [None, "silu", "silu"]


def test_what_looks_like_a_layer() -> None:
    class Proxy:
        __class__ = nn.GroupNorm  # type: ignore[assignment]

        def __init__(self, layer: Any) -> None:
            self.layer = layer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.layer, name)

        def __call__(self, x: Tensor) -> Tensor:
            return self.layer(x) * 2

    class Model(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(Proxy(self.norm1)(x))

    agree(Model(), X)


def test_a_graph_of_fx() -> None:
    model = torch.fx.symbolic_trace(Inherited())
    report = agree(model, X)
    assert report.left == {"(the model)": f"{type(model).__name__}: SiLU not fused; patch before tracing"}


# --- any method -----------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["x", "h", "y", "z"])
LAYER = st.sampled_from(
    ["self.norm1", "self.norm2", "self.act", "F.silu", "self.inplace", "self.relu", "self.norms[0]"]
)
EXPRESSIONS = st.recursive(
    NAMES,
    lambda inner: st.one_of(
        st.builds("{}({})".format, LAYER, inner),
        st.builds("{}({})".format, LAYER, inner),
        st.builds("F.silu({}, inplace=True)".format, st.builds("{}({})".format, LAYER, inner)),
        st.builds("({} + {})".format, inner, inner),
    ),
    max_leaves=3,
)
PAIR = st.builds(
    "{1} = self.norm1({0})\n{3} = {2}({1})".format,
    NAMES,
    NAMES,
    st.sampled_from(["self.act", "F.silu", "self.inplace"]),
    NAMES,
)


def indented(head: str) -> Any:
    return lambda body: f"{head}\n{textwrap.indent(body, '    ')}"


def blocks(inner: Any) -> Any:
    body = st.lists(inner, min_size=1, max_size=3).map("\n".join)
    heads = ("if self.odd():", "for _ in range(2):", "with contextlib.nullcontext():", "while self.odd():")
    return st.one_of(
        *(body.map(indented(head)) for head in heads),
        st.builds(lambda a, b: indented("if self.odd():")(a) + "\n" + indented("else:")(b), body, body),
        st.builds(lambda a, b: indented("try:")(a) + "\n" + indented("finally:")(b), body, body),
    )


STATEMENTS = st.recursive(
    st.one_of(
        PAIR,
        PAIR,
        st.builds("{} = {}".format, NAMES, EXPRESSIONS),
        st.builds("{} += {}".format, NAMES, EXPRESSIONS),
        st.builds("return {}".format, EXPRESSIONS),
        st.just("self.seen = lambda: h"),
    ),
    blocks,
    max_leaves=8,
)


class Odd(Parts):
    calls = 0

    def odd(self) -> bool:
        self.calls += 1
        return self.calls % 2 == 1 and self.calls < 20


def check(statements: list[str]) -> None:
    """A forward of these statements gives the same, changes the same and runs as often."""
    body = textwrap.indent(
        "\n".join(["h, y, z = x + 1, x - 1, x + 2", *statements, "return x + 2 * h + 3 * y"]), " " * 8
    )
    source = f"class Model(Odd):\n    def forward(self, x):\n{body}\n"
    model = run(source)().double()

    def results() -> list[Any]:
        model.calls, x = 0, X.double()[:1].clone()
        y = model(x)
        return [y, x, model.calls, model.seen() if "seen" in vars(model) else y]

    with torch.no_grad():
        expected = results()
        pixfuse.patch(model)
        torch.testing.assert_close(results(), expected, msg=lambda words: f"{source}\n{words}")


@settings(max_examples=150, deadline=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=6))
def test_any_method(statements: list[str]) -> None:
    check(statements)


@pytest.mark.parametrize(
    "body",
    [
        "for _ in range(2):\n  if self.odd():\n    z = self.norm1(x)\n  y = self.act(z)",
        "if self.odd():\n  z = self.norm1(x)\nz = self.conv(self.act(z))\nh = z",
        "h = self.norm1(x)\nreturn torch.add(self.act(h), h)",
        "z = self.norm1(x)\ny = self.act(z)\nz += 1",
        "self.seen = lambda: h\nh = self.norm1(x)\nreturn self.act(h)",
        "h = self.norm1(x)\ny = locals()['h'] + self.act(h)",
        "h = self.norm1(x)\ny = self.act(h)\ny = y + eval('h')",
        "try:\n  h = self.norm1(x)\n  return self.act(h)\nfinally:\n  self.seen = functools.partial(torch.clone, h)",
        "h = self.norm1(x)\nself.act = self.relu\nh = self.act(h)",
        "act = F.silu\nF_ = self\nh = act(self.norm1(x)) + F_.act(F_.norm2(x))",
        "h = self.act(*[self.norm1(x)]) + self.act(input=self.norm1(x)) + self.act(self.norm1(input=x))",
        "h = self.act(self.norm1(y := x * 2))",
        "h = [self.act(self.norm1(v)) for v in (x, y)][0] + (lambda self: self.act(self.norm2(x)))(self)",
        "h = y = self.norm1(x)\nh = self.act(h)",
        "h: Tensor = self.norm1(x)\nh = self.act(h)",
        "y = (h,) = self.norm1(x),\nh = self.act(h)\ny = y[0]",
        "self = self.train()\nh = self.norm1(x)\nh = self.act(h)",
    ],
)
def test_a_method(body: str) -> None:
    check([body])
