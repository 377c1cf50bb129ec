"""Calls that were made before: nothing but the time tells them from the first."""

from __future__ import annotations

import gc
import inspect
import math
import numbers
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pixfuse
from pixfuse._shared import calls, library, tuning

F = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "bias_act": lambda x: pixfuse.bias_act(x, torch.linspace(-1, 1, 4), act="lrelu", clamp=1.0),
    "bias_act without": lambda x: pixfuse.bias_act(x, act="swish"),
    "group_norm": lambda x: pixfuse.group_norm(x, 2, torch.ones(4), None, act="silu"),
    "upsample_nearest": lambda x: pixfuse.upsample_nearest(x, [2, 3]),
    "nearest": lambda x: pixfuse.interpolate(x, scale_factor=2),
    "bilinear": lambda x: pixfuse.interpolate(x, size=(9, 4), mode="bilinear"),
    "upfirdn2d": lambda x: pixfuse.upfirdn2d(x, F, up=2, padding=[2, 1, 2, 1], gain=4),
    "upfirdn2d without": lambda x: pixfuse.upfirdn2d(x, None, down=2),
    "filtered_lrelu": lambda x: pixfuse.filtered_lrelu(x, F, F, torch.ones(4), up=2, down=2, padding=3),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))


@pytest.fixture(autouse=True)
def _from_scratch() -> Iterator[None]:
    calls.forget()
    yield
    calls.forget()


def _image(**options: Any) -> Tensor:
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0), **options)


def test_this_pytorch_has_the_guards() -> None:
    """Else every call would take the long way, right and slow, without anyone noticing."""
    assert calls._GUARDED


@every_call
def test_known_calls_skip_the_checks_and_say_the_same(
    call: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = _image()
    expected = call(x)
    assert not any(calls.TABLE.values())  # the first may be the last
    call(x)
    known = len(calls.TABLE)
    assert any(calls.TABLE.values())
    with monkeypatch.context() as without:
        without.setattr(library.Op, "_call_first", None)  # whoever comes here fails
        assert torch.equal(call(x), expected)
        other = torch.randn(2, 4, 6, 6)
        got = call(other)
    assert len(calls.TABLE) == known
    calls.forget()
    assert torch.equal(got, call(other))


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_known_calls(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = _image().to(dtype).requires_grad_()
    found = []
    for _ in range(4):
        y = call(x)
        dy = torch.ones_like(y).requires_grad_()
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        found.append((y, dx, *torch.autograd.grad(dx.square().sum(), (x, dy), allow_unused=True)))
        with torch.no_grad():
            assert not call(x).requires_grad
        assert not call(x.detach()).requires_grad
    with calls.nothing_known():
        y = call(x)
        dx = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    for again in found[1:]:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found[0], again, strict=True))
    assert torch.equal(found[0][0], y)
    assert torch.equal(found[0][1], dx)


@every_call
def test_other_tensors_are_other_calls(call: Callable[[Tensor], Tensor]) -> None:
    """Layout, dtype, gaps, class, inference: of the shape of a known call, each as if it came first."""
    x = _image()
    call(x)
    call(x)
    wide = torch.zeros(2, 4, 6, 12)
    wide[..., ::2] = x
    with torch.inference_mode():
        inference = x.clone()
    others = [
        x.to(memory_format=torch.channels_last),
        x.double(),
        x.bfloat16(),
        wide[..., ::2],
        x.mT.contiguous().mT,
        torch.nn.Parameter(x),
        inference,
        torch._neg_view(-x),
        x[:1].expand(2, 4, 6, 6),
    ]
    for other in others:
        got = [call(other) for _ in range(4)]
        with calls.nothing_known():
            expected = call(other)
        for y in got:
            assert torch.equal(y, expected)
            assert y.dtype == expected.dtype
            assert y.stride() == expected.stride()
            assert y.requires_grad == expected.requires_grad


REFUSED: dict[str, tuple[Callable[..., Tensor], dict[str, Any], dict[str, Any], type[Exception]]] = {
    "bool as float": (pixfuse.bias_act, {"act": "relu", "gain": 1.0}, {"gain": True}, TypeError),
    "bool as int": (pixfuse.bias_act, {"act": "relu", "dim": 1}, {"dim": True}, TypeError),
    "float as int": (pixfuse.upfirdn2d, {"f": None, "up": 2}, {"up": 2.0}, TypeError),
    "bool in a list": (pixfuse.upfirdn2d, {"f": F, "padding": [2, 1, 2, 1]}, {"padding": [2, True, 2, 1]}, TypeError),
    "float in a tuple": (pixfuse.upfirdn2d, {"f": F, "padding": (2, 1)}, {"padding": (2, 1.0)}, TypeError),
    "int as flag": (pixfuse.upfirdn2d, {"f": F, "flip_filter": False}, {"flip_filter": 0}, TypeError),
    "bool as scale": (pixfuse.upsample_nearest, {"scale": 1, "gain": 2}, {"scale": True}, TypeError),
    "float as group": (pixfuse.group_norm, {"num_groups": 1}, {"num_groups": 1.0}, TypeError),
    "bool as size": (pixfuse.interpolate, {"size": (1, 1)}, {"size": (True, True)}, TypeError),
    "tensor as number": (pixfuse.bias_act, {"act": "relu", "gain": 1.0}, {"gain": torch.tensor(1.0)}, TypeError),
    "NaN": (pixfuse.bias_act, {"act": "relu", "gain": 1.0}, {"gain": math.nan}, ValueError),
    "long bias": (pixfuse.bias_act, {"b": torch.ones(4)}, {"b": torch.ones(5)}, ValueError),
    "matrix as bias": (pixfuse.bias_act, {"b": torch.ones(4)}, {"b": torch.ones(4, 1)}, ValueError),
    "int bias": (pixfuse.bias_act, {"b": torch.ones(4)}, {"b": torch.ones(4).int()}, TypeError),
    "bias elsewhere": (pixfuse.bias_act, {"b": torch.ones(4)}, {"b": torch.ones(4, device="meta")}, ValueError),
    "array as bias": (pixfuse.bias_act, {"b": torch.ones(4)}, {"b": np.ones(4)}, TypeError),
    "array as x": (pixfuse.bias_act, {"act": "relu"}, {"x": np.ones((2, 4, 6, 6))}, TypeError),
    "int x": (pixfuse.bias_act, {"act": "relu"}, {"x": torch.ones(2, 4, 6, 6).int()}, TypeError),
    "x of no kind": (pixfuse.bias_act, {"act": "relu"}, {"x": None}, TypeError),
    "list as act": (pixfuse.bias_act, {"act": "relu"}, {"act": ["relu"]}, TypeError),
    "filter of float64": (pixfuse.upfirdn2d, {"f": F}, {"f": F.double()}, TypeError),
    "filter with grad": (pixfuse.filtered_lrelu, {"fu": F}, {"fu": F.clone().requires_grad_()}, ValueError),
}


@pytest.mark.parametrize(("function", "good", "bad", "error"), REFUSED.values(), ids=list(REFUSED))
def test_what_only_resembles_a_known_call_is_refused(
    function: Callable[..., Tensor], good: dict[str, Any], bad: dict[str, Any], error: type[Exception]
) -> None:
    good = {"x": _image(), **good}
    with pytest.raises(error) as first:
        function(**(good | bad))
    for _ in range(3):
        function(**good)
    assert any(calls.TABLE.values())
    with pytest.raises(error) as again:
        function(**(good | bad))
    assert str(again.value) == str(first.value)


def test_one_tensor_twice() -> None:
    """A guard wants all tensors different."""
    x, f, g = _image(), F.clone(), F.clone()
    expected = pixfuse.filtered_lrelu(x, f, g, up=2, down=2, padding=3)
    for _ in range(3):
        assert torch.equal(pixfuse.filtered_lrelu(x, f, f, up=2, down=2, padding=3), expected)
        assert torch.equal(pixfuse.filtered_lrelu(x, f, g, up=2, down=2, padding=3), expected)
    assert {len(v) for k, v in calls.TABLE.items()} == {2}


class _Seen(TorchDispatchMode):
    names: ClassVar[list[str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _SeenFunctions(TorchFunctionMode):
    names: ClassVar[list[str]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@every_call
def test_modes_and_transforms_see_known_calls(call: Callable[[Tensor], Tensor]) -> None:
    x = _image()
    expected = call(x)
    call(x)
    for mode in (_Seen, _SeenFunctions):
        mode.names.clear()
        with mode():
            call(x)
        assert any("pixfuse" in name for name in mode.names)
    with torch.profiler.profile() as profile:
        call(x)
    assert any(event.name.startswith("pixfuse::") for event in profile.events())
    graph = torch.fx.experimental.proxy_tensor.make_fx(call)(x).graph
    assert any("pixfuse" in str(node.target) for node in graph.nodes)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(call(mode.from_tensor(x))).__name__ == "FakeTensor"
        assert type(call(x)).__name__ == "FakeTensor"
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.func.vmap(call)(torch.stack([x, -x]))[0], expected, **tolerance)
    value, tangent = torch.func.jvp(call, (x,), (torch.ones_like(x),))
    assert torch.equal(value, expected)
    assert tangent.shape == expected.shape
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(x).shape, x.shape)
    with torch.autograd.forward_ad.dual_level():
        dual = call(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.autograd.forward_ad.unpack_dual(dual).tangent is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call(x), expected)
        assert torch.equal(call(x), expected)
    with torch.inference_mode():
        assert torch.equal(call(x), expected)
        assert call(x).is_inference()
    with library.by_definition():
        assert "pixfuse" not in str(call(x.clone().requires_grad_()).grad_fn)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    assert torch.equal(call(x), expected)


def test_no_call_keeps_a_tensor() -> None:
    for call in CALLS.values():
        x = _image().requires_grad_()
        for _ in range(4):
            call(x).sum().backward()
            call(x.detach())
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_LARGEST", 6)
    for n in range(1, 30):
        x = torch.randn(1, 2, n, 3)
        assert torch.equal(pixfuse.upsample_nearest(x, 1), x)
        assert len(calls.TABLE) <= 6
    for k in range(1, 9):  # one description, many strides
        pixfuse.upsample_nearest(torch.randn(1, 2, 3, 3 * k)[..., ::k], 1)
    assert max(map(len, calls.TABLE.values())) <= calls._ALIKE


def test_threads() -> None:
    """Every thread gets its own results, while they all add to the table."""
    failed: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(60):
            x = torch.randn(1, 4, 1 + (seed + i) % 7, 5, generator=generator)
            with torch.set_grad_enabled(i % 2 == 0):
                y = pixfuse.bias_act(x, act="relu", gain=2.0)
            if not torch.equal(y, x.relu() * 2):
                failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_tuning_forgets() -> None:
    pixfuse.bias_act(_image(), act="relu")
    assert calls.TABLE
    tuning._forget(tuning)
    assert not calls.TABLE


def test_a_remembered_function_looks_like_itself() -> None:
    assert str(inspect.signature(pixfuse.bias_act)).startswith("(x: 'Tensor', b: 'Tensor | None' = None, dim:")
    assert pixfuse.bias_act.__module__ == "pixfuse.bias_act.op"
    assert pixfuse.bias_act.__globals__ is vars(inspect.getmodule(pixfuse.bias_act))  # doctest asks
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        pixfuse.bias_act()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'slope'"):
        pixfuse.bias_act(_image(), slope=1)  # type: ignore[call-arg]


# --- what a fresh tester found ------------------------------------------------------------------------------------


def test_zeros_of_both_signs() -> None:
    x = torch.ones(1, 1, 1, 2)
    for function in (
        lambda g: pixfuse.bias_act(x, act="relu", gain=g),
        lambda g: pixfuse.upfirdn2d(x, None, gain=g),
        lambda g: pixfuse.upsample_nearest(x, 2, gain=g),
    ):
        for _ in range(3):
            assert not torch.signbit(function(0.0)).any()
        for _ in range(3):
            assert torch.signbit(function(-0.0)).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: pixfuse.bias_act(None),
        lambda: pixfuse.bias_act(torch.ones(1, 1), act=["relu"]),
        lambda: pixfuse.upsample_nearest(torch.ones(1, 1, 2), True),
        lambda: pixfuse.upfirdn2d(torch.ones(1, 1, 2, 2), None, padding=range(4)),
    ],
)
def test_errors_are_no_consequence_of_others(call: Callable[[], Tensor]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert caught.value.__context__ is None


def test_a_default_device_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 2, 3)
    with torch.device("cpu"):
        for _ in range(3):
            pixfuse.upsample_nearest(x, 2)
        monkeypatch.setattr(library.OPS["upsample_nearest"], "_call_first", None)
        monkeypatch.setattr(calls, "_learn", None)
        assert pixfuse.upsample_nearest(x, 2).shape == (1, 2, 6)


def test_options_of_other_classes_are_never_known() -> None:
    class Knob:
        value = 2.0

        def __float__(self) -> float:
            return self.value

    numbers.Real.register(Knob)
    x, gain = torch.ones(1, 1, 1, 2), Knob()
    for gain.value in (2.0, 2.0, 2.0, 5.0):
        assert pixfuse.bias_act(x, act="relu", gain=gain).max() == gain.value  # type: ignore[arg-type]


def test_nodes_of_the_graph_share_nothing_that_changes() -> None:
    x = torch.ones(1, 1, 2, 2, requires_grad=True)
    for _ in range(3):
        y = pixfuse.upsample_nearest(x, [2, 3])
    assert isinstance(y.grad_fn.scale, tuple)  # type: ignore[union-attr]


def test_profilers_tell_the_functions_apart() -> None:
    codes = {inspect.unwrap(f, stop=lambda g: "<pixfuse" in g.__code__.co_filename).__code__ for f in PUBLIC}
    assert {(code.co_name, code.co_filename) for code in codes} == {
        (f.__name__, f"<pixfuse {f.__name__} of {f.__module__}>") for f in PUBLIC
    }


PUBLIC = (pixfuse.bias_act, pixfuse.group_norm, pixfuse.upfirdn2d, pixfuse.interpolate, pixfuse.filtered_lrelu)


@pytest.mark.parametrize("reentrant", [False, True])
@every_call
def test_second_order_below_saved_tensor_hooks(call: Callable[[Tensor], Tensor], reentrant: bool) -> None:
    """Where a derivative is the reference's, it is computed by autograd, which hooks and checkpoints see into."""

    def curvature(run: Callable[[Tensor], Tensor]) -> Tensor:
        x = _image(dtype=torch.float64).requires_grad_()
        (dx,) = torch.autograd.grad(run(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    if reentrant:
        with torch.autograd.graph.save_on_cpu():
            got = curvature(call)
    else:
        got = curvature(lambda x: torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False))
    torch.testing.assert_close(got, curvature(call))
