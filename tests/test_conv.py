"""The shared convolutions: PyTorch's values and gradients to third order, and the switch for weight gradients."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pixfuse._shared import conv

FORWARD = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": (2, 3), "padding": (1, 2), "dilation": (1, 2)},
    {"padding": 1, "groups": 2},
    {"stride": 3, "groups": 2, "dilation": 2, "padding": 2},
]
BACKWARD = [
    {},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": (2, 3), "padding": (1, 2), "output_padding": (0, 2)},
    {"stride": 2, "groups": 2},
    {"stride": 1, "dilation": 2, "output_padding": 1},
]


def _tensors(transposed: bool, groups: int, dtype: torch.dtype = torch.float64, bias: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (4, 6 // groups, 3, 2) if transposed else (6, 4 // groups, 3, 2)
    shapes: list[tuple[int, ...]] = [(2, 4, 7, 8), shape, *([(6,)] if bias else [])]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def _orders(call: Any, tensors: list[Tensor], params: dict[str, Any]) -> list[Tensor]:
    """The value and all derivatives up to the third that are not zero."""
    y = call(*tensors, **params)
    found = [y]
    total = (y * y.detach().cos()).sum()
    for _ in range(3):
        grads = torch.autograd.grad(total, tensors, create_graph=True, allow_unused=True, materialize_grads=True)
        found += grads
        total = sum(((g * g.detach().sin()).sum() for g in grads), torch.zeros((), dtype=y.dtype))
        if not total.requires_grad:
            break
    return [t.detach() for t in found]


@pytest.mark.parametrize(
    ("name", "params"),
    [*(("conv2d", p) for p in FORWARD), *(("conv_transpose2d", p) for p in BACKWARD)],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_equals_torch_to_third_order(name: str, params: dict[str, Any], channels_last: bool) -> None:
    tensors = _tensors(name == "conv_transpose2d", params.get("groups", 1))
    if channels_last:
        tensors[0] = tensors[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    got = _orders(getattr(conv, name), tensors, params)
    want = _orders(getattr(F, name), tensors, params)
    assert len(got) == len(want) > 4
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-9)
    assert got[0].stride() == want[0].stride()


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_gradgradcheck(name: str) -> None:
    tensors = _tensors(name == "conv_transpose2d", 2)

    def call(*values: Tensor) -> Tensor:
        return getattr(conv, name)(*values, stride=2, padding=1, groups=2)

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def _with_product(name: str) -> Any:
    """The convolution of a product."""

    def call(x: Tensor, weight: Tensor, scale: Tensor, **params: Any) -> Tensor:
        return getattr(conv, name)(x * scale[:, :, None, None], weight, **params)

    return call


def _with_scale(name: str) -> Any:
    def call(x: Tensor, weight: Tensor, scale: Tensor, **params: Any) -> Tensor:
        return getattr(conv, name)(x, weight, scale=scale, **params)

    return call


@pytest.mark.parametrize(
    ("name", "params"), [("conv2d", p) for p in FORWARD] + [("conv_transpose2d", p) for p in BACKWARD]
)
def test_scale_to_third_order(name: str, params: dict[str, Any]) -> None:
    x, w = _tensors(name == "conv_transpose2d", params.get("groups", 1), bias=False)
    x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    scale = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    got = _orders(_with_scale(name), [x, w, scale], params)
    want = _orders(_with_product(name), [x, w, scale], params)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-9)
    assert got[1].stride() == x.stride()


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_scale_for_every_mask_and_transform(name: str) -> None:
    x, w = _tensors(name == "conv_transpose2d", 1, bias=False)
    full = [x, w, torch.full((2, 4), 0.5, dtype=torch.float64).requires_grad_()]
    ours, plain = _with_scale(name), _with_product(name)
    want = torch.autograd.grad(plain(*full).sin().sum(), full)
    for mask in range(1, 8):
        tensors = [t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(full)]
        ours(*tensors).sin().sum().backward()
        for i, t in enumerate(tensors):
            assert (t.grad is not None) == bool(mask >> i & 1)
            if t.grad is not None:
                torch.testing.assert_close(t.grad, want[i])
    with conv.no_weight_gradients():
        found = torch.autograd.grad(ours(*full).sin().sum(), full, allow_unused=True)
    assert found[1] is None
    torch.testing.assert_close([found[0], found[2]], [want[0], want[2]])
    values = [t.detach() for t in full]
    torch.testing.assert_close(torch.func.grad(lambda *t: ours(*t).sin().sum(), 2)(*values), want[2])
    with torch.autocast("cpu", torch.bfloat16):
        low = [t.float() for t in full]
        torch.testing.assert_close(ours(*low), plain(*low))


def test_scale_keeps_no_product() -> None:
    x, w = _tensors(False, 1, bias=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        conv.conv2d(x, w, scale=torch.ones(2, 4, dtype=torch.float64))
    assert len(kept) == 3
    assert {x.data_ptr(), w.data_ptr()} < set(kept)


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_no_weight_gradients(name: str) -> None:
    x, w, b = _tensors(name == "conv_transpose2d", 1)
    call = getattr(conv, name)
    with conv.no_weight_gradients():
        assert conv.weight_gradients_disabled()
        y = call(x, w, b, stride=2)
    assert not conv.weight_gradients_disabled()
    y.sum().backward()  # what counts is when backward runs
    assert w.grad is not None
    whole = [t.grad for t in (x, w, b)]
    for t in (x, w, b):
        t.grad = None
    y = call(x, w, b, stride=2)
    with conv.no_weight_gradients():
        y.sum().backward()
    assert w.grad is None
    torch.testing.assert_close([x.grad, b.grad], [whole[0], whole[2]])
    with conv.no_weight_gradients(False):
        call(x, w, b).sum().backward()
    assert w.grad is not None


def test_r1_penalty_with_and_without_weight_gradients() -> None:
    """The use it is made for: the first derivative inside the context, the second outside."""
    found = []
    for disable in (True, False):
        x, w, _ = _tensors(False, 1)
        y = conv.conv2d(conv.conv2d(x, w).sin(), torch.ones(2, 6, 3, 3, dtype=torch.float64), padding=1)
        with conv.no_weight_gradients(disable):
            (dx,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
        dx.square().sum().backward()
        assert w.grad is not None
        found.append(w.grad)
    torch.testing.assert_close(found[0], found[1])


def test_no_weight_gradients_survives_exceptions_nests_and_keeps_to_its_thread() -> None:
    with pytest.raises(KeyError), conv.no_weight_gradients():
        raise KeyError
    assert not conv.weight_gradients_disabled()
    seen = []
    with conv.no_weight_gradients():
        with conv.no_weight_gradients(False):
            assert conv.weight_gradients_disabled()
        assert conv.weight_gradients_disabled()
        thread = threading.Thread(target=lambda: seen.append(conv.weight_gradients_disabled()))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.parametrize("borrows", [False, True])
def test_blocks_outlive_a_storage_that_only_borrows(borrows, monkeypatch):
    """That of torch 2.10 and 2.11 takes no reference of what it keeps, and drops one when it lets go."""
    stash = torch._C._stash_obj_in_tls
    kept = []

    def borrowing(key, value):
        stash(key, value)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))

    def work():
        with conv.no_weight_gradients(), conv.no_weight_gradients(False):
            kept.append((conv.weight_gradients_disabled(), sys.getrefcount(conv._blocks())))
        kept.append((conv.weight_gradients_disabled(), sys.getrefcount(conv._blocks())))

    if borrows:
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", borrowing)
    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    inside, outside = kept[0][1], kept[1][1]
    assert kept == [(True, inside), (False, outside)] * 3
    assert inside == outside >= 2  # the storage's own, and the one that looks


def test_computes_only_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """autograd.grad for the input alone computes no weight gradient, with or without the context."""
    calls = []
    derivatives = conv._derivatives

    def counted(*args: Any) -> Any:
        calls.append(args[4:])
        return derivatives(*args)

    monkeypatch.setattr(conv, "_derivatives", counted)
    x, w, b = _tensors(False, 1)
    for graph in (False, True):
        torch.autograd.grad(conv.conv2d(x, w, b).sum(), [x], create_graph=graph)
        torch.autograd.grad(conv.conv2d(x * 1, w * 1, b).sum(), [x], create_graph=graph)
    conv.conv2d(x, w, b).sum().backward(inputs=[x])
    assert calls == [(True, False, False)] * 5
    del calls[:]
    torch.autograd.grad(conv.conv2d(x, w, b).sum(), [w])
    conv.conv2d(x, w * 1, b).sum().backward()
    assert calls == [(False, True, False), (True, True, True)]


def test_gradients_for_every_mask() -> None:
    full = _tensors(False, 1)
    want = torch.autograd.grad(conv.conv2d(*full, padding=1).sum(), full)
    for mask in range(1, 8):
        tensors = [t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(full)]
        conv.conv2d(*tensors, padding=1).sum().backward()
        for i, t in enumerate(tensors):
            assert (t.grad is not None) == bool(mask >> i & 1)
            if t.grad is not None:
                torch.testing.assert_close(t.grad, want[i])


def test_what_is_left_to_torch() -> None:
    x, w, b = _tensors(False, 1)
    torch.testing.assert_close(conv.conv2d(x[0], w, b), F.conv2d(x[0], w, b))
    grad = torch.func.grad(lambda t: conv.conv2d(t, w.detach()).sin().sum())(x.detach())
    torch.testing.assert_close(grad, torch.func.grad(lambda t: F.conv2d(t, w.detach()).sin().sum())(x.detach()))
    compiled = torch.compile(lambda t: conv.conv2d(t, w, b), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), F.conv2d(x, w, b))
    with pytest.raises(RuntimeError, match="channels"):
        conv.conv2d(x[:, :3], w)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("dilation", [1, (2, 3)])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_named_padding(padding: str, dilation: Any) -> None:
    tensors = _tensors(False, 1)
    got = _orders(conv.conv2d, tensors, {"padding": padding, "dilation": dilation})
    for a, b in zip(got, _orders(F.conv2d, tensors, {"padding": padding, "dilation": dilation}), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-9)
    with conv.no_weight_gradients():
        conv.conv2d(*tensors, padding=padding).sum().backward()
    assert tensors[1].grad is None
    with pytest.raises(RuntimeError, match="strided"):
        conv.conv2d(*tensors, padding="same", stride=2)
    with pytest.raises((RuntimeError, ValueError)):
        conv.conv2d(*tensors, padding="half")


def test_autocast_as_torch() -> None:
    x, w, b = _tensors(False, 1, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = conv.conv2d(x, w, b), F.conv2d(x, w, b)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
    for a, c in zip(torch.autograd.grad(got.sum(), (x, w, b)), torch.autograd.grad(want.sum(), (x, w, b)), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, c)


def test_empty_batch() -> None:
    x, w, b = _tensors(False, 1, torch.float32)
    y = conv.conv2d(x[:0], w, b)
    y.sum().backward()
    assert y.shape == (0, 6, 5, 7)
    assert w.grad is not None
    assert not w.grad.any()


def test_no_weight_gradient_beside_that_of_the_bias() -> None:
    x, w, b = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 3, 3).requires_grad_(), torch.zeros(3).requires_grad_()
    with conv.no_weight_gradients():
        conv.conv2d(x, w, b).sum().backward()
    assert w.grad is None
    assert b.grad is not None
    torch.testing.assert_close(b.grad, torch.full((3,), 32.0))


def test_one_context_object_serves_again_nested_in_threads_and_as_decorator() -> None:
    off, on = conv.no_weight_gradients(), conv.no_weight_gradients(False)
    with off, on, off:
        assert conv.weight_gradients_disabled()
    assert not conv.weight_gradients_disabled()
    assert off(conv.weight_gradients_disabled)()
    assert off(conv.weight_gradients_disabled)()
    inside, outside = threading.Barrier(4), []

    def work() -> None:
        for _ in range(20):
            with off:
                inside.wait(30)
                outside.append(not conv.weight_gradients_disabled())
            outside.append(conv.weight_gradients_disabled())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outside == [False] * 160
    compiled = torch.compile(off(torch.sin), backend="aot_eager")
    compiled(torch.ones(2))
    assert not conv.weight_gradients_disabled()


def test_what_is_no_weight_keeps_its_gradient() -> None:
    """Third order: the upstream gradient of a weight gradient is differentiable inside the context."""
    x, w, _ = _tensors(False, 1)
    (dw,) = torch.autograd.grad(conv.conv2d(x, w).square().sum(), [w], create_graph=True)
    v = torch.ones_like(dw).requires_grad_()
    (dx,) = torch.autograd.grad(dw, [x], v, create_graph=True)
    want = torch.autograd.grad(dx.square().sum(), [v], retain_graph=True)
    with conv.no_weight_gradients():
        found = torch.autograd.grad(dx.square().sum(), [v])
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_no_weight_gradients_of_an_image_without_batch(name: str) -> None:
    """What is left to PyTorch heeds the context too."""
    x, w, b = _tensors(name == "conv_transpose2d", 1)
    x = x.detach()[0].requires_grad_()
    want = torch.autograd.grad(getattr(F, name)(x, w, b).sin().sum(), [x, w, b])
    y = getattr(conv, name)(x, w, b).sin().sum()
    with conv.no_weight_gradients():
        found = torch.autograd.grad(y, [x, w, b], allow_unused=True, retain_graph=True)
    assert found[1] is None
    torch.testing.assert_close([found[0], found[2]], [want[0], want[2]])
    torch.testing.assert_close(torch.autograd.grad(y, [x, w, b]), want)
