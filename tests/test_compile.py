"""torch.compile over more than one op: modules, a patched U-Net, Inductor, sizes that change, and transforms.

That every op compiles with fullgraph, forward and backward, bit for bit, is in the battery (``check_compile``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad

import pixfuse
import pixfuse.nn as pnn
from pixfuse._shared.testing import DEVICE

FILTER = pixfuse.setup_filter([1, 3, 3, 1], device=DEVICE)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # Inductor
SIZES = ((10, 12), (12, 10), (18, 20))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def image(height: int, width: int, channels: int = 8) -> Tensor:
    x = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(height))
    return x.to(DEVICE).requires_grad_()


def results(call: Callable[[Tensor], Tensor], x: Tensor, parameters: tuple[Tensor, ...] = ()) -> list[Tensor]:
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *parameters))]


B = torch.linspace(-1, 1, 8, device=DEVICE)
W = torch.linspace(-1, 1, 8 * 8 * 9, device=DEVICE).reshape(8, 8, 3, 3)
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "bias_act": lambda x: pixfuse.bias_act(x, B, act="swish"),
    "upfirdn2d": lambda x: pixfuse.upfirdn2d(x, FILTER, up=2, down=3, padding=2),
    "downsample2d": lambda x: pixfuse.downsample2d(x, FILTER),
    "filtered_lrelu": lambda x: pixfuse.filtered_lrelu(x, FILTER, FILTER, B, up=2, down=2, padding=3, clamp=1),
    "group_norm": lambda x: pixfuse.group_norm(x, 4, B, B, act="silu"),
    "conv2d_resample": lambda x: pixfuse.conv2d_resample(x, W, FILTER, up=2, padding=1),
    "modulated_conv2d": lambda x: pixfuse.modulated_conv2d(x, W, B.expand(2, 8), padding=1),
    "upsample_nearest": lambda x: pixfuse.upsample_nearest(x, 2),
    "interpolate": lambda x: pixfuse.interpolate(x, scale_factor=0.5, mode="bicubic", antialias=True),
}


@pytest.mark.parametrize("op", OPS)
def test_sizes_do_not_compile_again(op: str) -> None:
    """As a user calls it: the first size compiles, the second one compiles for all sizes."""
    call = OPS[op]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for size in SIZES:
        for got, wanted in zip(results(compiled, image(*size)), results(call, image(*size)), strict=True):
            assert torch.equal(got, wanted), size
    assert counter.frame_count == 2


def modules() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        pnn.GroupNorm(4, 8),
        pnn.FusedLeakyReLU(8),
        pnn.Blur(up=2),
        pnn.FilteredLReLU(8, [1, 3, 3, 1], [1, 3, 3, 1], up=2, down=2, padding=3),
        pnn.GroupNormSiLU(2, 8),
        pnn.Upsample(scale_factor=1.5, mode="bicubic"),
        pnn.Blur(down=2),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.to(DEVICE)


class StockUNet(nn.Module):
    """Of stock layers only; ``pixfuse.patch`` replaces its norms, activations and upsampling."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def block(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())

        self.enter, self.down, self.inner = block(8, 8), nn.AvgPool2d(2), block(8, 16)
        self.up, self.leave = nn.Upsample(scale_factor=2, mode="bilinear"), block(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.enter(x)
        return self.leave(torch.cat([skip, self.up(self.inner(self.down(skip)))], 1))


def patched_unet() -> nn.Module:
    model = StockUNet()
    report = pixfuse.patch(model)
    assert len(report.replaced) >= 7, report
    return model.to(DEVICE)


@pytest.mark.parametrize("make", [modules, patched_unet])
def test_a_network_has_no_graph_break(make: Callable[[], nn.Module]) -> None:
    model = make()
    explained = torch._dynamo.explain(model)(image(8, 12))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    parameters = tuple(model.parameters())
    for size in SIZES:
        wanted = results(model, image(*size), parameters)
        for got, want in zip(results(compiled, image(*size), parameters), wanted, strict=True):
            assert torch.equal(got, want), size
    assert counter.frame_count == 2


def test_inductor_equals_eager_bit_for_bit() -> None:
    """Nothing of an op is traced into: Inductor calls the same kernels."""
    model = modules()
    parameters = tuple(model.parameters())
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for size in SIZES[:2]:
        for channels_last in (False, True):
            x = image(*size).detach()
            if channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            wanted = results(model, x.clone().requires_grad_(), parameters)
            for got, want in zip(results(compiled, x.clone().requires_grad_(), parameters), wanted, strict=True):
                assert torch.equal(got, want)
                assert got.stride() == want.stride()


# --- transforms inside of what is compiled ------------------------------------------------------------------------

Call = Callable[[Tensor], Tensor]


def _jvp(op: Call) -> Callable[..., Any]:
    return lambda x, v: torch.func.jvp(op, (x,), (v,))


def _dual(op: Call) -> Callable[..., Any]:
    def call(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            primal, tangent = forward_ad.unpack_dual(op(forward_ad.make_dual(x, v)))
            return primal, tangent

    return call


def _vmap_jvp(op: Call) -> Callable[..., Any]:
    def call(x: Tensor, v: Tensor) -> Any:
        return torch.vmap(_jvp(op), (None, 0))(x, torch.stack([v, 2 * v]))

    return call


def _grad(op: Call) -> Callable[..., Any]:
    return lambda x, v: torch.func.grad(lambda x: (op(x) ** 2).sum())(x + v)


def _hessian_product(op: Call) -> Callable[..., Any]:
    gradient = torch.func.grad(lambda x: (op(x) ** 2).sum())
    return lambda x, v: torch.func.jvp(gradient, (x,), (v,))


TRANSFORMS = {"jvp": _jvp, "dual": _dual, "vmap_jvp": _vmap_jvp, "grad": _grad, "hessian_product": _hessian_product}


EACH = [(op, transform) for op in OPS for transform in ("jvp", "grad")]
MORE = [(op, transform) for op in ("group_norm", "filtered_lrelu") for transform in TRANSFORMS]


@pytest.mark.parametrize(("op", "transform"), dict.fromkeys([*EACH, *MORE]))
def test_transforms_are_those_of_eager_calls(op: str, transform: str) -> None:
    """By the op's own rules, and the graph that is left has the kernels."""
    ops = set()

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        ops.update(str(node.target) for node in graph.graph.nodes)
        return graph

    call = TRANSFORMS[transform](OPS[op])
    x, v = (image(*size).detach() for size in SIZES[:2])
    v = v.mT.contiguous()
    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    torch.testing.assert_close(compiled(x, v), call(x, v))
    assert any(name.startswith("pixfuse.") for name in ops) or op == "modulated_conv2d"  # plain PyTorch on a CPU


def test_jacobians() -> None:
    x = image(2, 3).detach()[:1]
    for transform in (torch.func.jacfwd, torch.func.jacrev):
        call = transform(lambda x: pixfuse.group_norm(x, 2, B, B, act="silu"))
        torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(x), call(x))


def test_tangents_of_changing_sizes() -> None:
    call = _jvp(OPS["downsample2d"])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for size in SIZES:
        x = image(*size).detach()
        torch.testing.assert_close(compiled(x, x.flip(3)), call(x, x.flip(3)))
    assert counter.frame_count == 2


def test_gradients_of_tangents() -> None:
    x, v = image(10, 12), image(12, 10).detach().mT.contiguous()

    def call(x: Tensor) -> Tensor:
        tangent: Tensor = _jvp(OPS["filtered_lrelu"])(x, v)[1] + _jvp(OPS["group_norm"])(x, v)[1].mean()
        return tangent

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(results(compiled, x), results(call, x), strict=True):
        torch.testing.assert_close(got, wanted)


def test_tangents_of_a_patched_model() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1)).to(DEVICE)
    pixfuse.patch(model)
    x, v = image(10, 12).detach(), image(12, 10).detach().mT.contiguous()

    def call(x: Tensor, v: Tensor) -> Any:
        parameters = dict(model.named_parameters())
        return torch.func.jvp(lambda x: torch.func.functional_call(model, parameters, (x,)), (x,), (v,))

    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(x, v), call(x, v))


@functools.cache
def _exports_tangents() -> bool:
    """Whether this PyTorch exports a jvp of its own operators; 2.11 does not."""

    class Tangent(nn.Module):
        def forward(self, x: Tensor, v: Tensor) -> Any:
            return torch.func.jvp(torch.sin, (x,), (v,))

    x = torch.ones(2)
    try:
        torch.export.export(Tangent(), (x, x), strict=False)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("op", OPS)
def test_export_of_tangents(op: str) -> None:
    """By the definition: such a program is made of PyTorch's own operators, which its transforms know."""
    if not _exports_tangents():
        pytest.skip(f"torch {torch.__version__} exports no tangents")

    class Tangent(nn.Module):
        def forward(self, x: Tensor, v: Tensor) -> Any:
            return _jvp(OPS[op])(x, v)

    x, v = image(10, 12).detach(), image(12, 10).detach().mT.contiguous()
    program = torch.export.export(Tangent(), (x, v), strict=False)
    torch.testing.assert_close(program.module()(x, v), Tangent()(x, v))
    assert forward_ad._current_level < 0


# --- the sizes of filters and weights -----------------------------------------------------------------------------

TAPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "upfirdn2d": lambda x, f, w: pixfuse.upfirdn2d(x, f, padding=2),
    "filter2d": lambda x, f, w: pixfuse.filter2d(x, f),
    "upsample2d": lambda x, f, w: pixfuse.upsample2d(x, f),
    "downsample2d": lambda x, f, w: pixfuse.downsample2d(x, f),
    "filtered_lrelu": lambda x, f, w: pixfuse.filtered_lrelu(x, f, f, up=2, down=2, padding=3),
    "conv2d_resample down": lambda x, f, w: pixfuse.conv2d_resample(x, w, f, down=2, padding=1),
    "conv2d_resample up": lambda x, f, w: pixfuse.conv2d_resample(x, w, f, up=2, padding=1),
    "modulated_conv2d": lambda x, f, w: pixfuse.modulated_conv2d(
        x, w, x.mean((2, 3)), None, 2, 1, 1, f, fused_modconv=False
    ),
}


@pytest.mark.parametrize("op", TAPS)
def test_filters_have_constant_sizes(op: str) -> None:
    """Inductor cannot compile what is as large as symbolic filters make it."""
    shapes = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        shapes.append([str(list(v.shape)) for v in values if isinstance(v, Tensor)])
        return graph

    x = image(10, 12).requires_grad_()
    compiled = torch.compile(TAPS[op], backend=keep, fullgraph=True, dynamic=True)
    for f in (FILTER, pixfuse.setup_filter([1, 2, 1], separable=True, device=DEVICE)):
        assert torch.equal(compiled(x, f, W), TAPS[op](x, f, W))
        assert str(list(f.shape)) in shapes[-1]
        assert "s" in "".join(shapes[-1])  # those of x are symbolic
        if op in ("conv2d_resample up", "modulated_conv2d"):  # PyTorch's own transposed convolution cannot either
            assert str(list(W.shape)) in shapes[-1]
    assert len(shapes) == 2


def test_inductor_takes_filters_as_arguments() -> None:
    compiled = torch.compile(TAPS["filtered_lrelu"], fullgraph=True, dynamic=True)
    for size in SIZES[:2]:
        x = image(*size)
        wanted = results(lambda x: TAPS["filtered_lrelu"](x, FILTER, W), x)
        for got, truth in zip(results(lambda x: compiled(x, FILTER, W), x), wanted, strict=True):
            assert torch.equal(got, truth)


# --- inlined ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("act", ["lrelu", "swish"])
def test_inlined_bias_act_is_fused_and_the_same_up_to_rounding(act: str, channels_last: bool) -> None:
    x, b = image(10, 12).detach(), B.clone().requires_grad_()
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    x.requires_grad_()
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def call(x: Tensor) -> Tensor:
        return pixfuse.bias_act(2 * x, b, act=act, clamp=1) + 1

    compiled = torch.compile(call, backend=keep, fullgraph=True)
    expected = results(call, x, (b,))
    block = pixfuse.inlined()
    with block:
        inside = results(compiled, x, (b,))
        with block:
            assert torch.equal(call(x), expected[0])  # eager calls are as ever
        assert torch.equal(compiled(x), inside[0])
    outside = results(compiled, x, (b,))
    ops = [{str(node.target) for node in graph.graph.nodes if "pixfuse" in str(node.target)} for graph in graphs]
    assert ops == [set(), {"pixfuse.bias_act.default"}]
    for got, truth in zip(inside, expected, strict=True):
        torch.testing.assert_close(got, truth)
        assert got.stride() == truth.stride()
    for got, truth in zip(outside, expected, strict=True):
        assert torch.equal(got, truth)


def test_inlined_inside_of_what_is_compiled() -> None:
    def call(x: Tensor) -> Tensor:
        with pixfuse.inlined():
            return pixfuse.bias_act(2 * x, B, act="swish") + 1

    x = image(5, 7)
    for got, truth in zip(
        results(torch.compile(call, backend="aot_eager", fullgraph=True), x), results(call, x), strict=True
    ):
        torch.testing.assert_close(got, truth)
    assert not pixfuse.bias_act.__globals__["_inlining"]
