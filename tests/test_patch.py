"""pixfuse.patch: same results, everything kept, what is left and why, and back bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pixfuse
from pixfuse import patching


def state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that patch must keep and unpatch must give back."""
    found: dict[str, Any] = {"keys": list(model.state_dict())}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (id(t), t.data_ptr(), t.stride(), t.dtype, t.device, t.requires_grad, t.clone())
    for name, m in model.named_modules(remove_duplicate=False):
        hooks = {k: dict(v) for k, v in vars(m).items() if "hooks" in k}
        found[f"module {name}"] = (id(m), m.training, hooks)
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
    return {name: type(m) for name, m in model.named_modules(remove_duplicate=False)}


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
        "1": "GroupNorm with SiLU, fused",
        "2": "SiLU, computed by 1",
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
        "  1    GroupNorm: it has hooks\n"
        "  2    SiLU: not fused, because of 1"
    )
    assert "PatchedGroupNorm(4, 8" in repr(model)


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
    assert type(model[1]) is patching.PatchedGroupNormSiLU
    model.load_state_dict(net().state_dict())
    net().load_state_dict(model.state_dict())


def test_compiles() -> None:
    model = net()
    expected = model(X)
    pixfuse.patch(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(X), expected)
    torch._dynamo.reset()


# --- fused only where it is proven ----------------------------------------------------------------------------


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8), nn.GroupNorm(8, 8)
        self.act = nn.SiLU()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.act(self.norm1(x)))
        return self.norm3(x + self.tail(h))

    def tail(self, h: Tensor) -> Tensor:
        return self.act(self.norm2(h))


class Elsewhere(Straight):
    def tail(self, h: Tensor) -> Tensor:
        return self.act(h) + self.norm2(h)


class Reused(Straight):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        return self.act(h) + self.norm2(h) + self.norm3(h)


class Twice(Straight):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm1(x)) + self.norm1(self.norm2(self.norm3(x)))


class Branching(Straight):
    def tail(self, h: Tensor) -> Tensor:
        if self.training:
            return self.norm2(h)
        return self.act(self.norm2(h))


class Encoding(Straight):
    def encode(self, x: Tensor) -> Tensor:
        return self.norm2(x)


class Functional(Straight):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm1(x)) + self.norm2(x) + self.norm3(x)


class Untraceable(Straight):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm1(x)) + self.norm2(x) * self.norm3(x)[: len(x)]


@pytest.mark.parametrize(
    ("model", "fused", "left"),
    [
        (Straight, ["norm1", "norm2", "act"], {}),
        (Elsewhere, [], {}),
        (Reused, [], {}),
        (Twice, [], {}),
        (Branching, [], {"act": "SiLU: not fused: forward branches, so its graph proves nothing"}),
        (Encoding, [], {"act": "SiLU: not fused: a method besides forward uses it or the norm before it"}),
        (Functional, ["norm1"], {}),
        (Untraceable, [], {"act": "SiLU: not fused: torch.fx cannot trace forward"}),
    ],
)
def test_torch_fx_proves_it(model: Callable[[], nn.Module], fused: list[str], left: dict[str, str]) -> None:
    report = agree(model(), X)
    assert [k for k, v in report.replaced.items() if "SiLU" in v] == fused
    assert {"norm1", "norm2", "norm3"} <= set(report.replaced)
    assert report.left == left


class Block(nn.Module):
    """As people write it: functions, an argument with a default, operators, a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8), nn.GroupNorm(2, 8)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor, shift: Any = 0.5, *, twice: Any = 1) -> Tensor:
        h = F.silu(self.norm1(x)) * self.scale + shift
        h = torch.nn.functional.silu(self.norm2(h), inplace=True)
        return x + F.silu(h * twice) - self.norm3(h.mean((2, 3), keepdim=True))


def test_the_function_silu() -> None:
    model, x = Block().double(), X.double()
    report = agree(model, x)
    assert report.replaced == {
        "norm1": "GroupNorm with SiLU, fused",
        "norm2": "GroupNorm with SiLU, fused",
        "(the model)": "F.silu, computed by norm1 and norm2",
        "norm3": "GroupNorm",
    }
    assert report.left == {}
    expected = model(x, 2.0, twice=3)
    pixfuse.patch(model)
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for made in copies:
        assert type(made).__name__ == "Block"
        torch.testing.assert_close(made(x, 2.0, twice=3), expected)
        assert torch.compile(made, backend="eager", fullgraph=True)(x).shape == x.shape
    assert pixfuse.patch(model).replaced == {}
    for made in copies:
        assert pixfuse.unpatch(made) == ["(the model)", "norm1", "norm2", "norm3"]
        assert type(made) is Block
        assert torch.equal(made(x, 2.0, twice=3), expected)


SCALE = 2.0


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: F.dropout(F.silu(self.norm1(x)), 0.1, self.training), "forward uses self.training"),
        (lambda self, x: F.silu(self.norm1(x)) * SCALE, "forward uses SCALE"),
        (lambda self, x: F.silu(self.norm1(x)) * self.norm2.eps, "forward uses self.norm2"),
        (lambda self, x: F.silu(self.norm1(x)) + self.norms[1], "forward uses self.norms"),
        (lambda self, x: F.silu(self.norm1(x)) * torch.rand(()), "torch.fx does not see all that forward calls"),
        (
            lambda self, x: F.silu(self.norm1(x)) if self.training else x,
            "forward branches, so its graph proves nothing",
        ),
        (lambda self, x, *more: F.silu(self.norm1(x)), "forward takes any number of arguments"),
        (lambda self, x: F.silu(self.norm1(x)) + (lambda: x)(), "forward holds other functions, or is held by one"),
        (lambda self, x: F.silu(self.norm1(x)) + vars(self)["_modules"]["norm2"](x), "forward uses vars"),
    ],
)
def test_a_function_that_is_not_fused(forward: Any, reason: str) -> None:
    class Model(Straight):
        norms = (1, 2)

    Model.forward = forward
    model = Model()
    random = "rand" in forward.__code__.co_names or "dropout" in forward.__code__.co_names
    expected = None if random else model(X)
    report = pixfuse.patch(model)
    assert report.replaced == {"norm1": "GroupNorm", "norm2": "GroupNorm", "norm3": "GroupNorm"}
    assert report.left["F.silu"] == f"not fused: {reason}"
    if expected is not None:
        torch.testing.assert_close(model(X), expected)


def test_a_function_after_what_others_see() -> None:
    class Seen(Straight):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm1(x)
            return F.silu(h) + h + F.silu(self.norm2(x)) + self.norm2(x) + F.silu(self.norm3(x))

    class Encoding(Block):
        def encode(self, x: Tensor) -> Tensor:
            return self.norm2(x)

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block.norm1(self.block(x))

    fused = [k for k, v in agree(Seen(), X).replaced.items() if v == "GroupNorm with SiLU, fused"]
    assert fused == ["norm3"]
    report = agree(Encoding().double(), X.double())
    assert report.left == {"F.silu": "not fused: a method besides forward uses the norm before it"}
    report = agree(Owner().double(), X.double())
    assert report.left == {"block.F.silu": "not fused: Owner takes block apart"}


def test_a_sequential_with_another_forward() -> None:
    class Skipping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for i in range(0, len(self), 2):
                x = self[i](x)
            return x

    assert agree(Skipping(nn.GroupNorm(2, 8), nn.SiLU()), X).replaced == {"0": "GroupNorm"}


@pytest.mark.parametrize(
    ("use", "apart"),
    [
        (lambda self, x: self.net(x) + self.net(x + 1), False),
        (lambda self, x: self.net[0](x), True),
        (lambda self, x: [x := layer(x) for layer in self.net][-1], True),
        (lambda self, x: (lambda: self.net[1](x))(), True),
        (lambda self, x: torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False), True),
    ],
)
def test_a_sequential_that_its_owner_takes_apart(use: Any, apart: bool) -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
            self.first = self.net[0].num_groups

        forward = use

    report = agree(Owner(), X)
    if apart:
        assert report.left == {"net.1": "SiLU: not fused: Owner takes net apart"}
    else:
        assert report.replaced["net.0"] == "GroupNorm with SiLU, fused"
        assert report.left == {}


# --- what is left ---------------------------------------------------------------------------------------------


def test_hooks_stay_and_see_what_they_saw() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        for index in (1, 2):
            model, seen = net(), []
            getattr(model[index], register)(lambda *a, seen=seen: seen.append(1))
            report = agree(model, X)
            assert seen
            assert report.left[str(index)].endswith(": it has hooks")
            assert "2" in report.left
            assert report.replaced.get("1", "GroupNorm") == "GroupNorm"


def test_shared_modules() -> None:
    norm, act = nn.GroupNorm(2, 8), nn.SiLU()
    model = nn.Sequential(norm, act, nn.Sequential(norm, nn.SiLU()), nn.GroupNorm(4, 8), act)
    report = agree(model, X)
    assert report.replaced == {"3": "GroupNorm"}
    assert report.left["0"] == "GroupNorm: shared by 0 and 2.0"
    assert report.left["1"] == "SiLU: shared by 1 and 4"
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


def test_quantised_subclasses_and_replaced_forwards() -> None:
    class GroupNorm32(nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).type(x.dtype)

    quantised = torch.ao.nn.quantized.GroupNorm(2, 8, nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8)), 1.0, 0)
    wrapped = nn.GroupNorm(2, 8)
    wrapped.forward = lambda x, f=wrapped.forward: f(x)  # type: ignore[method-assign]
    model = nn.ModuleList([GroupNorm32(2, 8), quantised, wrapped])
    kinds = classes(model)
    report = pixfuse.patch(model)
    assert report.replaced == {}
    assert "a class of its own (" in report.left["0"]
    assert report.left["1"] == "GroupNorm: quantised"
    assert report.left["2"] == "GroupNorm: its forward was replaced"
    assert classes(model) == kinds


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


# --- blocks of diffusers, by the attributes that its documentation names --------------------------------------


class Upsample2D(nn.Module):
    def __init__(self, channels: int, use_conv: bool = False, use_conv_transpose: bool = False, name: str = "conv"):
        super().__init__()
        self.channels, self.out_channels, self.use_conv = channels, channels, use_conv
        self.use_conv_transpose, self.name, self.norm, self.interpolate = use_conv_transpose, name, None, True
        conv: nn.Module | None = nn.Conv2d(channels, channels, 3, padding=1) if use_conv else None
        if use_conv_transpose:
            conv = nn.ConvTranspose2d(channels, channels, 4, 2, 1)
        setattr(self, "conv" if name == "conv" else "Conv2d_0", conv)

    def forward(self, hidden_states: Tensor, output_size: Any = None) -> Tensor:
        conv = self.conv if self.name == "conv" else self.Conv2d_0
        if self.use_conv_transpose:
            return conv(hidden_states)
        if output_size is None:
            hidden_states = F.interpolate(hidden_states, scale_factor=2.0, mode="nearest")
        else:
            hidden_states = F.interpolate(hidden_states, size=output_size, mode="nearest")
        return conv(hidden_states) if self.use_conv else hidden_states


class Downsample2D(nn.Module):
    def __init__(self, channels: int, use_conv: bool = False, padding: int = 1):
        super().__init__()
        self.channels, self.use_conv, self.padding, self.norm, self.name = channels, use_conv, padding, None, "conv"
        self.conv = nn.Conv2d(channels, channels, 3, 2, padding) if use_conv else nn.AvgPool2d(2, 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.use_conv and self.padding == 0:
            hidden_states = F.pad(hidden_states, (0, 1, 0, 1))
        return self.conv(hidden_states)


class ResnetBlock2D(nn.Module):
    def __init__(
        self, out: int = 8, temb: int | None = 6, use: str = "default", skip_time_act: bool = False, resize: Any = None
    ):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(4, out, eps=1e-6)
        self.conv1, self.conv2 = nn.Conv2d(8, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time_emb_proj = None if temb is None else nn.Linear(temb, 2 * out if use == "scale_shift" else out)
        self.nonlinearity, self.dropout = nn.SiLU(), nn.Dropout(0.0)
        self.upsample = resize if isinstance(resize, Upsample2D) else None
        self.downsample = resize if isinstance(resize, Downsample2D) else None
        self.conv_shortcut = nn.Conv2d(8, out, 1) if out != 8 else None
        self.time_embedding_norm, self.skip_time_act, self.output_scale_factor = use, skip_time_act, 2.0**0.5

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
        h = self.nonlinearity(self.norm1(input_tensor))
        resize = self.upsample if self.upsample is not None else self.downsample
        if resize is not None:
            input_tensor, h = resize(input_tensor), resize(h)
        h = self.conv1(h)
        if self.time_emb_proj is not None:
            temb = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))[:, :, None, None]
        if self.time_embedding_norm == "scale_shift":
            scale, shift = temb.chunk(2, dim=1)
            h = self.norm2(h) * (1 + scale) + shift
        else:
            h = self.norm2(h if temb is None else h + temb)
        h = self.conv2(self.dropout(self.nonlinearity(h)))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        return (input_tensor + h) / self.output_scale_factor


TEMB = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("params", "inputs"),
    [
        ({}, (X, TEMB)),
        ({"out": 12, "use": "scale_shift"}, (X, TEMB)),
        ({"temb": None}, (X,)),
        ({"skip_time_act": True, "resize": "up"}, (X, TEMB)),
        ({"resize": "down"}, (X, TEMB)),
    ],
)
def test_resnet_block(params: dict[str, Any], inputs: Any) -> None:
    made = dict(params)
    if "resize" in made:
        made["resize"] = Upsample2D(8) if made["resize"] == "up" else Downsample2D(8)
    model = ResnetBlock2D(**made)
    report = agree(model, *inputs)
    expected = {"(the model)": "ResnetBlock2D: GroupNorm with SiLU, fused"}
    if params.get("resize") == "up":
        expected["upsample"] = "Upsample2D: upsample_nearest"
    elif "resize" in params:
        expected["downsample"] = "Downsample2D: upfirdn2d"
    assert report.replaced == expected
    assert report.left == {}
    pixfuse.patch(model)
    assert isinstance(model, ResnetBlock2D)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) is not ResnetBlock2D
        assert torch.equal(other(*inputs), model(*inputs))
        pixfuse.unpatch(other)
        assert type(other) is ResnetBlock2D
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(*inputs), model(*inputs))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["conv", "Conv2d_0"])
@pytest.mark.parametrize("use_conv", [True, False])
def test_upsample_block(name: str, use_conv: bool) -> None:
    model = Upsample2D(8, use_conv, name=name)
    assert agree(model, X).replaced == {"(the model)": "Upsample2D: upsample_nearest"}
    assert agree(model, X, (11, 13)).replaced


def test_blocks_that_are_left() -> None:
    assert agree(Upsample2D(8, use_conv_transpose=True), X).left == {
        "(the model)": "Upsample2D: a transposed convolution is all it does"
    }
    for padding in (0, 1):
        assert agree(Downsample2D(8, True, padding), X).left == {
            "(the model)": "Downsample2D: a strided convolution is all it does"
        }
    other = Downsample2D(8)
    other.conv = nn.AvgPool2d(3, 2)
    assert agree(other, X).left == {"(the model)": "Downsample2D: it averages in another way"}
    block = ResnetBlock2D(use="spatial")
    report = agree(block, X, TEMB)
    assert report.left["(the model)"] == "ResnetBlock2D: time_embedding_norm is 'spatial'"
    assert set(report.replaced) == {"norm1", "norm2"}
    block = ResnetBlock2D()
    block.nonlinearity = nn.GELU()
    assert "its norms and activation are not GroupNorm and SiLU" in agree(block, X, TEMB).left["(the model)"]
    block = ResnetBlock2D()
    block.conv2.register_forward_hook(lambda *a: None)
    report = agree(block, X, TEMB)
    assert "something in it has hooks" in report.left["(the model)"]
    shared = ResnetBlock2D(temb=None)
    assert agree(nn.Sequential(shared, shared), X).left["0"] == "ResnetBlock2D: shared by 0 and 1"


def test_a_block_that_computes_something_else_is_found_out() -> None:
    other = type(
        "ResnetBlock2D", (ResnetBlock2D,), {"forward": lambda self, x, t=None: ResnetBlock2D.forward(self, x, t) * 2}
    )
    report = agree(other(), X, TEMB)
    assert report.left["(the model)"] == "ResnetBlock2D: its result would be another"
    different = type("Upsample2D", (nn.Identity,), {})
    assert "not the known block (AttributeError: " in agree(different(), X).left["(the model)"]


def test_the_trial_of_a_block_leaves_no_trace() -> None:
    block = ResnetBlock2D().train()
    block.dropout.p = 0.5
    block.norm2.eval()
    before, random = state(block), torch.get_rng_state()
    pixfuse.patch(block)
    same(state(block), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert "ResnetBlock2D(" in repr(block)


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.register_buffer("b", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x)) * (self.b + 1)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 4), nn.SiLU()
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        self.last = x
        return self.act(self.norm(x))


def test_a_buffer_stays_what_it_is_at_every_call() -> None:
    model, x = WithBuffer(), torch.randn(1, 4, 3, 3)
    assert "norm" in pixfuse.patch(model).replaced
    model.b.fill_(5)
    torch.testing.assert_close(model(x), F.silu(model.norm(x)) * 6)


def test_patching_runs_no_forward_on_the_model() -> None:
    model = Counting()
    before = set(vars(model))
    pixfuse.patch(model)
    assert model.calls == 0
    assert model.seen.item() == 0
    assert set(vars(model)) == before


def test_a_block_without_finite_results_is_left() -> None:
    block = ResnetBlock2D()
    with torch.no_grad():
        for p in block.parameters():
            p.fill_(float("nan"))
    kind = type(block)
    report = pixfuse.patch(block)
    assert type(block) is kind
    assert "not finite" in str(report)
