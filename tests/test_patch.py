"""pixfuse.patch: same results, everything kept, what is left and why, and back bit for bit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pixfuse
from pixfuse import _layers

HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that patch must keep and unpatch must give back."""
    found: dict[str, Any] = {"keys": list(model.state_dict())}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (id(t), t.data_ptr(), t.stride(), t.dtype, t.device, t.requires_grad, t.clone())
    for name, m in model.named_modules():
        hooks = {k: dict(v) for k, v in vars(m).items() if "hooks" in k}
        found[f"module {name}"] = (id(m), m.training, hooks, {k: id(v) for k, v in vars(m).items()})
    return found


def same(a: dict[str, Any], b: dict[str, Any], pointers: bool = True) -> None:
    assert a.keys() == b.keys()
    for key in a:
        x, y = a[key], b[key]
        if isinstance(x, tuple) and isinstance(x[-1], Tensor):
            assert torch.equal(x[-1], y[-1])
            x, y = x[:-1], y[:-1]
            if not pointers:
                x, y = (x[0], *x[2:]), (y[0], *y[2:])
        assert x == y, key


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(m) for name, m in model.named_modules()}


@contextlib.contextmanager
def counted() -> Any:
    """Lists what runs of GroupNorm: "silu" for each call that does both, None for each that does not."""
    calls: list[str | None] = []
    run = _layers.normalise

    def normalise(*args: Any) -> Tensor:
        calls.append(args[-1])
        return run(*args)

    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(_layers, "normalise", normalise)
        yield calls


def agree(model: nn.Module, *inputs: Any, channels_last: bool | None = None) -> pixfuse.patching.Report:
    """Patch and unpatch a model: values, gradients, state."""
    before, kinds = state(model), classes(model)

    def results() -> list[Tensor]:
        x = inputs[0].clone().requires_grad_()
        y = model(x, *inputs[1:])
        parameters = [p for p in model.parameters() if p.requires_grad]
        loss = y.sum() + y.square().sum()
        return [y, *torch.autograd.grad(loss, [x, *parameters], allow_unused=True, materialize_grads=True)]

    expected = results()
    report = pixfuse.patch(model, channels_last=channels_last)
    if channels_last is None:
        same(state(model), before)
    for got, want in zip(results(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    changed = [k for k, v in classes(model).items() if v is not kinds[k]]
    assert sorted(changed) == sorted(k.replace("(the model)", "") for k in report.replaced)
    again = pixfuse.patch(model)
    assert not again.replaced
    assert sorted(k.replace("(the model)", "") for k in pixfuse.unpatch(model)) == sorted(changed)
    assert classes(model) == kinds
    same(state(model), before, pointers=channels_last is None)
    for got, want in zip(results(), expected, strict=True):
        assert torch.equal(got, want)
    assert pixfuse.unpatch(model) == []
    return report


X = torch.randn(2, 8, 6, 5, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Sequential(nn.GroupNorm(4, 8, affine=False), nn.Upsample(scale_factor=2), nn.GroupNorm(8, 8)),
        nn.ReLU(),
        nn.Upsample(size=(9, 8), mode="bilinear", align_corners=True),
    )


# --- what is replaced -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [None, True, False])
def test_a_sequential(channels_last: bool | None) -> None:
    report = agree(net(), X, channels_last=channels_last)
    assert report.replaced == {
        "(the model)": "Sequential: 1 with SiLU in one pass",
        "1": "GroupNorm",
        "3.0": "GroupNorm",
        "3.1": "Upsample (nearest)",
        "3.2": "GroupNorm",
        "5": "Upsample (bilinear)",
    }
    assert report.left == {}


def test_report_in_words() -> None:
    model = net()
    model[1].register_forward_hook(lambda *a: None)
    assert str(pixfuse.patch(model, channels_last=True)) == (
        "pixfuse.patch: 4 modules of Sequential replaced, weights channels_last\n"
        "  3.0  GroupNorm\n"
        "  3.1  Upsample (nearest)\n"
        "  3.2  GroupNorm\n"
        "  5    Upsample (bilinear)\n"
        "left as they are:\n"
        "  1    GroupNorm: it has hooks"
    )
    assert repr(model) == repr(net())


def test_nothing_to_replace() -> None:
    report = agree(nn.Sequential(nn.Conv2d(8, 8, 3), nn.SiLU()), X)
    assert str(report) == "pixfuse.patch: nothing to replace in Sequential"


@pytest.mark.parametrize(
    "module",
    [nn.GroupNorm(2, 8), nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=(1.5, 2), mode="bicubic")],
)
def test_the_model_itself(module: nn.Module) -> None:
    report = agree(copy.deepcopy(module), X)
    assert list(report.replaced) == ["(the model)"]


def test_channels_last_flows_and_comes_back() -> None:
    model = net()
    strides = model[0].weight.stride()
    pixfuse.patch(model, channels_last=True)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model(X).is_contiguous(memory_format=torch.channels_last)
    pixfuse.patch(model, channels_last=False)
    assert model[0].weight.is_contiguous()
    pixfuse.patch(model, channels_last=True)
    pixfuse.unpatch(model)
    assert model[0].weight.stride() == strides
    assert "_pixfuse_strides" not in vars(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_and_modes(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2)).to(dtype)
    model[0].eval()
    before = state(model)
    expected = model(X.to(dtype))
    pixfuse.patch(model)
    same(state(model), before)
    assert not model[0].training
    assert model[1].training
    assert model(X.to(dtype)).dtype == dtype
    torch.testing.assert_close(model(X.to(dtype)), expected)
    many = nn.GroupNorm(2, 8)
    pixfuse.patch(many)
    six = torch.randn(1, 8, 2, 2, 2, 2)
    torch.testing.assert_close(many(six), F.group_norm(six, 2, many.weight, many.bias))


def test_copies_pickles_and_parts() -> None:
    model = net()
    expected = model(X)
    pixfuse.patch(model, channels_last=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert classes(other) == classes(model)
        pixfuse.unpatch(other)
        assert classes(other) == classes(net())
        assert torch.equal(other(X), expected)
    assert pixfuse.unpatch(model[3]) == ["0", "1", "2"]
    assert isinstance(model[1], nn.GroupNorm)
    assert type(model[1]) is not nn.GroupNorm
    model.load_state_dict(net().state_dict())
    net().load_state_dict(model.state_dict())


def test_compiles() -> None:
    model = net()
    expected = model(X)
    pixfuse.patch(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(X), expected)
    torch._dynamo.reset()


# --- a layer is what it was, however it is reached ------------------------------------------------------------


class Kept(nn.Sequential):
    """The forward of Sequential, and a method besides."""

    def encode(self, x: Tensor) -> Tensor:
        return self[0](x)


class Skipping(nn.Sequential):
    """Another forward."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(0, len(self), 2):
            x = self[i](x)
        return x


class Reversed(nn.Sequential):
    """The forward of Sequential in another order."""

    def __iter__(self) -> Any:
        return reversed(self._modules.values())


class Parts(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.norm, self.act, self.conv = nn.GroupNorm(2, 8), nn.SiLU(inplace), nn.Conv2d(8, 8, 1)
        self.seq, self.kept, self.skipping, self.reversed = (
            kind(nn.GroupNorm(4, 8), nn.SiLU(inplace), nn.Conv2d(8, 8, 1))
            for kind in (nn.Sequential, Kept, Skipping, Reversed)
        )
        self.list = nn.ModuleList([nn.Sequential(nn.GroupNorm(2, 8), self.act), self.seq])
        self.named = nn.ModuleDict({"a": nn.Sequential(nn.GroupNorm(8, 8), nn.SiLU(), nn.SiLU())})
        self.add_module("strange name", nn.Sequential(nn.GroupNorm(1, 8), nn.SiLU(inplace)))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.act(self.norm(x)))

    @property
    def before(self) -> nn.Module:
        return self.norm

    def encode(self, x: Tensor) -> Tensor:
        return self.norm(x)


def each(layers: Any, x: Tensor) -> Tensor:
    """What every layer gives; copies, since an act may be in place."""
    seen = []
    for layer in layers:
        x = layer(x.clone())
        seen.append(x.clone())
    return torch.stack(seen).sum(0)


WAYS: dict[str, Any] = {
    "whole": lambda m, x: m(x),
    "seq": lambda m, x: m.seq(x),
    "seq[0]": lambda m, x: m.seq[0](x),
    "seq[:1]": lambda m, x: m.seq[:1](x),
    "seq[:2]": lambda m, x: m.seq[:2](x),
    "seq layers": lambda m, x: each(m.seq, x),
    "kept": lambda m, x: m.kept(x) + m.kept.encode(x) + m.kept[:1](x),
    "skipping": lambda m, x: m.skipping(x),
    "reversed": lambda m, x: m.reversed(x),
    "list": lambda m, x: each(m.list, x) + m.list[0][0](x),
    "list first": lambda m, x: [b[0](x) for b in m.list][-1],
    "dict": lambda m, x: m.named["a"][:1](x) + m.named["a"](x),
    "getattr": lambda m, x: getattr(m, "strange name")(x) + getattr(m, "strange name")[0](x),
    "property": lambda m, x: m.before(x),
    "method": lambda m, x: m.encode(x),
    "children": lambda m, x: next(m.children())(x),
    "act alone": lambda m, x: m.act(x.clone()) + m.seq[1](x.clone()),
    "by name": lambda m, x: m.get_submodule("seq.0")(x),
    "checkpoint": lambda m, x: torch.utils.checkpoint.checkpoint(m.seq, x, use_reentrant=False),
    "functional_call": lambda m, x: torch.func.functional_call(m.seq, {"0.bias": m.norm.bias}, (x,)),
    "vmap": lambda m, x: torch.func.vmap(m.seq)(x.contiguous()[None])[0],
}


class Outer(nn.Module):
    """Reaches what is inside from two levels up."""

    def __init__(self, ways: list[str], inplace: bool) -> None:
        super().__init__()
        self.mid = nn.Sequential(Parts(inplace))
        self.ways = ways

    def forward(self, x: Tensor) -> Tensor:
        for way in self.ways:
            x = x + WAYS[way](self.mid[0], x)
        return x


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_layer(way: str) -> None:
    agree(Outer([way], inplace=False).double(), X.double())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(list(WAYS)), min_size=2, max_size=5), st.booleans(), st.booleans(), st.booleans())
def test_ways_together(ways: list[str], inplace: bool, train: bool, channels_last: bool) -> None:
    torch.manual_seed(0)
    form = torch.channels_last if channels_last else torch.contiguous_format
    agree(Outer(ways, inplace).double().train(train), X.double().contiguous(memory_format=form))


@pytest.mark.parametrize("wrapper", ["DataParallel", "AveragedModel", "replica", "shallow", "Sequential"])
def test_wrapped(wrapper: str) -> None:
    """What holds a model, or copies it without its weights, runs the same forward."""
    model: Any = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
    expected = model(X)
    if wrapper == "DataParallel":
        model = nn.DataParallel(model)
    elif wrapper == "AveragedModel":
        model = torch.optim.swa_utils.AveragedModel(model)
    elif wrapper == "Sequential":
        model = nn.Sequential(model)
    report = pixfuse.patch(model)
    assert len(report.replaced) == 2
    if wrapper in ("replica", "shallow"):
        other = model._replicate_for_data_parallel() if wrapper == "replica" else copy.copy(model)
        norm = other._modules["0"]._replicate_for_data_parallel()
        norm.weight, norm.bias = 2 * model[0].weight.detach(), model[0].bias.detach()
        other._modules = {**other._modules, "0": norm}
        expected, model = F.silu(2 * model[0](X)), other
    with counted() as calls:
        torch.testing.assert_close(model(X), expected)
    assert calls == ["silu"]


# --- one call where it may be, looked at every time -----------------------------------------------------------


def test_one_call() -> None:
    model = net()
    pixfuse.patch(model)
    with counted() as calls:
        model(X)
        model[1](X)
        model[:2](X)
        model[:3](X)
    assert calls == ["silu", None, None, None, None, "silu"]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("register", HOOKS)
def test_a_later_hook_sees_what_it_would(register: str, index: int) -> None:
    def sees(patched: bool) -> list[Any]:
        torch.manual_seed(0)
        model, seen = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1)).double(), []
        if patched:
            pixfuse.patch(model)
        handle = getattr(model[index], register)(lambda module, *a: seen.append((repr(module), a)))
        model(X.double().requires_grad_()).sum().backward()
        handle.remove()
        with counted() as calls:
            model(X.double())
        assert calls == ["silu"] * patched
        return seen

    (got,), (want,) = sees(True), sees(False)
    assert got[0] == want[0]
    torch.testing.assert_close(got[1], want[1])


def test_a_later_hook_on_all_modules() -> None:
    model, seen = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), []
    pixfuse.patch(model)
    handle = nn.modules.module.register_module_forward_hook(lambda m, *a: seen.append(type(m).__name__))
    try:
        model(X)
    finally:
        handle.remove()
    assert seen == ["GroupNorm", "SiLU", "Sequential"]


def test_later_changes() -> None:
    """Another layer, another forward, a parametrization, a compiled layer: what is there when it is called counts."""

    def double(x: Tensor) -> Tensor:
        return 2 * x

    changes: dict[str, Any] = {
        "another act": lambda m: m.__setitem__(1, nn.GELU()),
        "another norm": lambda m: m.__setitem__(0, nn.GroupNorm(4, 8)),
        "no act": lambda m: m.__delitem__(1),
        "one more": lambda m: m.insert(1, nn.ReLU()),
        "forward of norm": lambda m: setattr(m[0], "forward", double),
        "forward of act": lambda m: setattr(m[1], "forward", double),
        "compiled": lambda m: m[1].compile(backend="eager"),
        "weights": lambda m: m[0].load_state_dict({"weight": torch.arange(8.0), "bias": torch.ones(8)}),
        "no weights": lambda m: [setattr(m[0], name, None) for name in ("weight", "bias")],
        "parametrised": lambda m: nn.utils.parametrize.register_parametrization(m[0], "weight", nn.Tanh()),
        "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m[0]),
    }
    for name, change in changes.items():
        models = [nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        pixfuse.patch(models[1])
        for model in models:
            change(model)
        torch.testing.assert_close(models[1](X), models[0](X), msg=lambda m, name=name: f"{name}: {m}")


def test_shared_by_two_sequentials_later() -> None:
    first, second = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), nn.Sequential()
    pixfuse.patch(first)
    second.append(first[0])
    torch.testing.assert_close(second(X), F.group_norm(X, 2))


# --- the rest of PyTorch --------------------------------------------------------------------------------------


def test_tracers() -> None:
    model, x = (
        nn.Sequential(Parts(False), nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2)).double(),
        X.double(),
    )
    expected = model(x)
    pixfuse.patch(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    traced = torch.fx.symbolic_trace(model)
    assert sum(n.target is _layers.normalise for n in traced.graph.nodes) == 2
    for made in (traced, pickle.loads(pickle.dumps(traced)), copy.deepcopy(traced)):
        torch.testing.assert_close(made(x), expected)
    with pytest.warns(torch.jit.TracerWarning), pytest.warns(DeprecationWarning, match="trace"):
        torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)
    before = classes(model)
    with (
        pytest.warns(DeprecationWarning, match="script"),
        pytest.raises(RuntimeError, match=r"call pixfuse\.unpatch\(model\) first"),
    ):
        torch.jit.script(model)
    assert classes(model) == before
    pixfuse.unpatch(model)
    with pytest.warns(DeprecationWarning, match="script"):
        torch.jit.script(nn.Sequential(*model[1:]))


def test_a_class_on_top_must_go_before_unpatch() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
    pixfuse.patch(model)
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    before = classes(model)
    with pytest.raises(ValueError, match="unpatch: model must have no class on top of a patched one, got Param"):
        pixfuse.unpatch(model)
    assert classes(model) == before
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert pixfuse.unpatch(model) == ["(the model)", "0"]


def test_a_group_norm_refuses_what_pytorch_refuses() -> None:
    model = nn.Sequential(nn.GroupNorm(8, 8), nn.SiLU())
    pixfuse.patch(model)
    for layer in (model, model[0]):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            layer(torch.randn(1, 8, 1, 1))
        assert layer(torch.randn(0, 8, 3, 3)).shape == (0, 8, 3, 3)
        assert layer(torch.randn(1, 8, 1, 1, 1, 2)).shape == (1, 8, 1, 1, 1, 2)


def test_a_cycle() -> None:
    model: Any = nn.Module()
    model.child = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
    model.child.parent = model
    assert pixfuse.patch(model).replaced == {"child.0": "GroupNorm", "child": "Sequential: 0 with SiLU in one pass"}
    assert pixfuse.unpatch(model) == ["child", "child.0"]


def test_weights_that_are_not_there_yet() -> None:
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3))
    report = pixfuse.patch(model, channels_last=True)
    assert report.replaced == {"1": "GroupNorm"}
    assert report.left == dict.fromkeys(["0.weight", "0.bias"], "not there yet; call the model once, then patch it")
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last)
    model(X)
    pixfuse.patch(model, channels_last=True)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    before, kinds = state(model), classes(model)
    is_lazy = pixfuse.patching.is_lazy

    def fails(tensor: Tensor) -> bool:
        if tensor.shape == (8,) and model[0].weight.stride() != before["0.weight"][2]:
            raise MemoryError
        return is_lazy(tensor)

    monkeypatch.setattr(pixfuse.patching, "is_lazy", fails)
    with pytest.raises(MemoryError):
        pixfuse.patch(model, channels_last=True)
    assert classes(model) == kinds
    same(state(model), before, pointers=False)


# --- what is left ---------------------------------------------------------------------------------------------


def test_hooks_stay_and_see_what_they_saw() -> None:
    for register in HOOKS:
        for index, words in (1, "GroupNorm: it has hooks"), (2, "SiLU: not fused: it has hooks"):
            model, seen = net(), []
            getattr(model[index], register)(lambda *a, seen=seen: seen.append(1))
            report = agree(model, X)
            assert seen
            assert report.left == {str(index): words}
            assert "(the model)" not in report.replaced


def test_shared_modules() -> None:
    norm, act = nn.GroupNorm(2, 8), nn.SiLU()
    model = nn.Sequential(norm, act, nn.Sequential(norm, nn.SiLU()), nn.GroupNorm(4, 8), act)
    report = agree(model, X)
    assert report.replaced == {"(the model)": "Sequential: 3 with SiLU in one pass", "3": "GroupNorm"}
    assert report.left == {"0": "GroupNorm: shared by 0 and 2.0"}  # a SiLU is not touched, so it may be shared
    inner = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
    report = agree(nn.Sequential(inner, inner), X)
    assert report.replaced == {}
    assert report.left["0.0"] == "GroupNorm: shared by 0.0 and 1.0"


def test_compiled_and_scripted() -> None:
    compiled = torch.compile(nn.Sequential(nn.GroupNorm(2, 8)), backend="eager")
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()))
    in_place = nn.Sequential(nn.GroupNorm(2, 8))
    in_place.compile(backend="eager")
    model = nn.Sequential(compiled, scripted, in_place, nn.GroupNorm(2, 8), torch.jit.script(nn.SiLU()))
    kinds = classes(model)
    report = pixfuse.patch(model)
    assert report.replaced == {"3": "GroupNorm"}
    assert report.left == {
        "0": "OptimizedModule: compiled; patch before compiling",
        "1": "RecursiveScriptModule: scripted; patch before scripting",
        "2": "Sequential: compiled; patch before compiling",
    }
    pixfuse.unpatch(model)
    assert classes(model) == kinds
    assert list(pixfuse.patch(compiled).left) == ["(the model)"]
    act = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
    act[1].compile(backend="eager")
    assert pixfuse.patch(act).left == {"1": "SiLU: not fused: compiled; patch before compiling"}


def test_quantised_subclasses_and_replaced_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    class GroupNorm32(nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).type(x.dtype)

    quantised = torch.ao.nn.quantized.GroupNorm(2, 8, nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), 1.0, 0)
    wrapped = nn.GroupNorm(2, 8)
    wrapped.forward = lambda x, f=wrapped.forward: f(x)  # type: ignore[method-assign]
    monkeypatch.setattr(nn.Upsample, "forward", GroupNorm32.forward)
    model = nn.ModuleList([GroupNorm32(2, 8), quantised, wrapped, nn.Upsample(scale_factor=2)])
    kinds = classes(model)
    report = pixfuse.patch(model)
    assert report.replaced == {}
    assert "a class of its own (" in report.left["0"]
    assert report.left["1"] == "GroupNorm: quantised"
    assert report.left["2"] == "GroupNorm: its forward was replaced"
    assert report.left["3"] == "Upsample: the forward of its class was replaced"
    assert classes(model) == kinds


@pytest.mark.parametrize(
    ("owner", "name", "left"),
    [
        (nn.GroupNorm, "forward", {"0": "GroupNorm: the forward of its class was replaced"}),
        (nn.GroupNorm, "__call__", {"0": "GroupNorm: the forward of its class was replaced"}),
        (F, "group_norm", {"0": "GroupNorm: F.group_norm was replaced"}),
        (nn.SiLU, "forward", {"1": "SiLU: not fused: the forward of its class was replaced"}),
        (F, "silu", {"1": "SiLU: not fused: F.silu was replaced"}),
        (F, "interpolate", {"2": "Upsample: F.interpolate was replaced"}),
    ],
)
def test_what_was_replaced_in_pytorch(
    owner: Any, name: str, left: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = getattr(owner, name)
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Upsample(scale_factor=2))
    later = copy.deepcopy(model)
    pixfuse.patch(later)
    with monkeypatch.context() as patcher:
        patcher.setattr(owner, name, functools.wraps(old)(lambda *args, **kwargs: old(*args, **kwargs) * 2))
        assert agree(model, X).left == left
        if owner is not nn.GroupNorm:  # whose forward a patched layer has replaced
            torch.testing.assert_close(later(X), model(X))


@pytest.mark.parametrize("name", ["forward", "__call__"])
def test_a_class_on_top(name: str) -> None:
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
    pixfuse.patch(model)
    kind: Any = type(model[0])
    loud = type("Loud", (kind,), {name: lambda self, x: getattr(kind, name)(self, x) * 0})
    object.__setattr__(model[0], "__class__", loud)
    assert not model(X).any()


def tied(model: Any) -> Any:
    model[1].weight.data = model[0].weight.data
    return model[1].weight


def flat(model: Any) -> Any:
    vector = torch.cat([p.detach().flatten() for p in model.parameters()])
    nn.utils.vector_to_parameters(vector, model.parameters())
    return vector


def held(model: Any) -> Any:
    model.view = model[0].weight.detach()[1:]
    return model.view


def expanded(model: Any) -> Any:
    model[0].weight.data = torch.ones(1, 1, 1, 1).expand(8, 8, 3, 3)
    return model[0].weight


SHARING = {tied: 2, flat: 2, held: 1, expanded: 1, lambda m: m.share_memory()[0].weight: 2}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("share", SHARING)
def test_memory_that_is_shared(share: Any, when: str) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
    if when == "after":
        pixfuse.patch(model, channels_last=True)
    other, shared = share(model), model[0].weight.is_shared()
    if when == "before":
        report = pixfuse.patch(model, channels_last=True)
        assert list(report.left.values()) == ["keeps its layout: its memory is shared"] * SHARING[share]
    pixfuse.unpatch(model)
    assert model[0].weight.is_shared() == shared
    model[0].weight.data[-1:, -1:, -1:, -1:] = 7
    assert 7 in other
    assert type(model[2]) is nn.GroupNorm


def test_another_weight_since() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
    pixfuse.patch(model, channels_last=True)
    model[0].weight = nn.Parameter(torch.randn(8, 16, 3, 3))
    before = model[0].weight.clone()
    pixfuse.unpatch(model)
    assert torch.equal(model[0].weight, before)


def test_unpatch_is_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    pixfuse.patch(model, channels_last=True)
    before, kinds = state(model), classes(model)
    restride = pixfuse.patching._restride

    def fails(tensor: Tensor, stride: Any) -> None:
        if tensor is model[1].weight and stride != before["1.weight"][2]:
            raise MemoryError
        restride(tensor, stride)

    with monkeypatch.context() as patcher:
        patcher.setattr(pixfuse.patching, "_restride", fails)
        with pytest.raises(MemoryError):
            pixfuse.unpatch(model)
    assert classes(model) == kinds
    same(state(model), before, pointers=False)
    assert pixfuse.unpatch(model) == ["(the model)", "2"]


def test_what_a_model_says_of_itself() -> None:
    class Talking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())

        def __getattr__(self, name: str) -> Any:
            return vars(self)["_modules"].get(name, lambda *args: self)

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            yield "", self

        modules = children = named_parameters = get_submodule = named_modules

    model = nn.Sequential(Talking())
    assert list(pixfuse.patch(model).replaced) == ["0.layers", "0.layers.0"]
    assert pixfuse.unpatch(model) == ["0.layers", "0.layers.0"]


def test_threads() -> None:
    def both(model: nn.Module) -> None:
        for _ in range(10):
            pixfuse.patch(model, channels_last=True)
            pixfuse.unpatch(model)

    model = net()
    kinds = classes(model)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(both, [model] * 4))
    assert classes(model) == kinds


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_ddp_keeps_its_strides(inside: bool, channels_last: bool, one_process: None) -> None:
    """Its buckets hold gradients in the layout that the weights had: in others they would come out wrong."""
    model = net()
    wrapper = nn.Sequential(nn.parallel.DistributedDataParallel(model))
    target = model[:3] if inside else wrapper
    before, kinds = state(model), classes(model)
    words = "patch: channels_last must be None for a model inside DistributedDataParallel (patch it before), got "
    with pytest.raises(ValueError, match=re.escape(f"{words}{channels_last}") + "$"):
        pixfuse.patch(target, channels_last=channels_last)
    same(state(model), before)
    assert classes(model) == kinds
    assert pixfuse.patch(target).replaced
    assert pixfuse.unpatch(target)
    assert pixfuse.patch(net(), channels_last=True).layout  # of no wrapper
    del wrapper, target
    assert pixfuse.patch(model, channels_last=channels_last).replaced


def test_ddp_of_a_patched_model(one_process: None) -> None:
    model = net()
    pixfuse.patch(model, channels_last=True)
    before, kinds = state(model), classes(model)
    wrapper = nn.parallel.DistributedDataParallel(model)
    words = "unpatch: model must not change the layout of weights inside DistributedDataParallel, got "
    for target in (model, wrapper):
        with pytest.raises(ValueError, match=f"{words}{type(target).__name__}; delete the wrapper first"):
            pixfuse.unpatch(target)
        same(state(model), before)
        assert classes(model) == kinds
    del wrapper, target
    assert pixfuse.unpatch(model)


@pytest.mark.filterwarnings("ignore:FSDP:UserWarning")
@pytest.mark.parametrize("kind", ["FSDP", "FSDP, original parameters", "FSDP2"])
def test_fsdp_keeps_its_strides(kind: str, one_process: None) -> None:
    from torch.distributed import fsdp

    model: Any = net()
    if kind == "FSDP2":
        fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    else:
        own = "original" in kind
        model = fsdp.FullyShardedDataParallel(model, use_orig_params=own, device_id=torch.device("cpu"))
    kinds = classes(model)
    words = "channels_last must be None or False for a model inside FSDP, whose weights are contiguous, got True"
    with pytest.raises(ValueError, match=f"patch: {words}"):
        pixfuse.patch(model, channels_last=True)
    assert classes(model) == kinds
    assert pixfuse.patch(model, channels_last=False).replaced
    model(X).sum().backward()


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"patch: model must be a torch\.nn\.Module, got int"):
        pixfuse.patch(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unpatch: model must be a torch\.nn\.Module, got list"):
        pixfuse.unpatch([])  # type: ignore[arg-type]
    model = net()
    before, kinds = state(model), classes(model)
    with pytest.raises(TypeError, match="patch: channels_last must be True or False, got 1"):
        pixfuse.patch(model, channels_last=1)  # type: ignore[arg-type]
    same(state(model), before)
    assert classes(model) == kinds
