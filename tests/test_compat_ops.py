"""The drop-ins under their peers' names: golden vectors in the peer's spelling, signatures, conventions, refusals."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pixfuse
from pixfuse import compat
from pixfuse._shared.testing import GOLDEN, check_golden, golden, golden_cases

ROOTS = {"torch_utils": "nvlabs", "op": "rosinality", "basicsr": "basicsr", "mmcv": "mmcv"}
OPS = ("upfirdn2d", "bias_act", "filtered_lrelu")
# The names of our arguments in the other spellings.
NAMES = {
    "rosinality": {"x": "input", "f": "kernel", "b": "bias"},
    "basicsr": {"x": "input", "f": "kernel", "b": "bias"},
    "mmcv": {"x": "input", "f": "filter", "fu": "filter_up", "fd": "filter_down", "b": "bias"},
}


def peer_function(path: str) -> tuple[str, Callable[..., Any]]:
    """The peer and the function that its client gets from the import path."""
    module, _, function = path.removesuffix(" (its reference path)").rpartition(".")
    peer = ROOTS[module.partition(".")[0]]
    with compat.installed(peer):
        return peer, getattr(importlib.import_module(module), function)


def in_peers_words(case: dict[str, Any]) -> Callable[..., Tensor]:
    """The call of a golden case as the peer spells it, from our arguments."""
    peer, function = peer_function(case["peer"]["function"])
    names = NAMES.get(peer, {})
    own = case["peer"].get("arguments")
    own = None if own is None else {k: tuple(v) if isinstance(v, list) else v for k, v in own.items()}

    def call(**arguments: Any) -> Tensor:
        if own is not None:
            arguments = {k: v for k, v in arguments.items() if isinstance(v, Tensor)} | own
        if case["op"] == "upfirdn2d":
            arguments.setdefault("f", None)
        if peer in ("rosinality", "basicsr") and "f" in arguments:
            arguments["f"] = arguments["f"].to(arguments["x"].dtype)
        if "impl" in case["peer"]:
            arguments["impl"] = case["peer"]["impl"]
        return function(**{names.get(k, k): v for k, v in arguments.items()})

    return call


PEER_CASES = [p for op in OPS for p in golden(op) if not p.values[2]]


@pytest.mark.parametrize(("case", "dtype", "channels_last"), PEER_CASES)
def test_golden(case: dict[str, Any], dtype: torch.dtype, channels_last: bool) -> None:
    check_golden(in_peers_words(case), case, dtype, channels_last)


def test_golden_covers_every_peer() -> None:
    names = {p.values[0]["peer"]["name"] for p in PEER_CASES}
    assert names == {"NVlabs/stylegan3", "rosinality/stylegan2-pytorch", "XPixelGroup/BasicSR", "open-mmlab/mmcv"}


@pytest.mark.parametrize("case", golden_cases("setup_filter"), ids=lambda case: case["id"])
def test_golden_setup_filter(case: dict[str, Any]) -> None:
    _, function = peer_function(case["peer"]["function"])
    with np.load(GOLDEN / case["file"]) as z:
        tensors: dict[str, Any] = {k: torch.from_numpy(z[array]) for k, array in case["inputs"].items()}
        before = {k: t.clone() for k, t in tensors.items()}
        y = function(**tensors, **case["params"])
        truth = torch.from_numpy(z[case["output"]])
    torch.testing.assert_close(y.double(), truth, rtol=case["tol"]["float32"], atol=0)
    assert all(torch.equal(t, before[k]) for k, t in tensors.items())


# --- signatures -----------------------------------------------------------------------------------------------

SIGNATURES = {
    "torch_utils.ops.upfirdn2d": [
        "setup_filter(f, device=torch.device('cpu'), normalize=True, flip_filter=False, gain=1, separable=None)",
        "upfirdn2d(x, f, up=1, down=1, padding=0, flip_filter=False, gain=1, impl='cuda')",
        "filter2d(x, f, padding=0, flip_filter=False, gain=1, impl='cuda')",
        "upsample2d(x, f, up=2, padding=0, flip_filter=False, gain=1, impl='cuda')",
        "downsample2d(x, f, down=2, padding=0, flip_filter=False, gain=1, impl='cuda')",
    ],
    "torch_utils.ops.bias_act": [
        "bias_act(x, b=None, dim=1, act='linear', alpha=None, gain=None, clamp=None, impl='cuda')"
    ],
    "torch_utils.ops.filtered_lrelu": [
        "filtered_lrelu(x, fu=None, fd=None, b=None, up=1, down=1, padding=0, gain=np.sqrt(2), slope=0.2, clamp=None, "
        "flip_filter=False, impl='cuda')"
    ],
    "torch_utils.ops.conv2d_resample": [
        "conv2d_resample(x, w, f=None, up=1, down=1, padding=0, groups=1, flip_weight=True, flip_filter=False)"
    ],
    "torch_utils.ops.conv2d_gradfix": [
        "conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)",
        "conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)",
        "no_weight_gradients(disable=True)",
    ],
    "torch_utils.ops.fma": ["fma(a, b, c)"],
    "torch_utils.ops.grid_sample_gradfix": ["grid_sample(input, grid)"],
    "op": [
        "upfirdn2d(input, kernel, up=1, down=1, pad=(0, 0))",
        "fused_leaky_relu(input, bias=None, negative_slope=0.2, scale=2**0.5)",
        "FusedLeakyReLU(channel, bias=True, negative_slope=0.2, scale=2**0.5)",
    ],
    "op.conv2d_gradfix": [
        "conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)",
        "conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)",
        "no_weight_gradients()",
    ],
    "basicsr.ops.upfirdn2d": ["upfirdn2d(input, kernel, up=1, down=1, pad=(0, 0))"],
    "basicsr.ops.fused_act": [
        "fused_leaky_relu(input, bias, negative_slope=0.2, scale=2**0.5)",
        "FusedLeakyReLU(channel, negative_slope=0.2, scale=2**0.5)",
    ],
    "mmcv.ops": [
        "upfirdn2d(input, filter, up=1, down=1, padding=0, flip_filter=False, gain=1, use_custom_op=True)",
        "filter2d(input, filter, padding=0, flip_filter=False, gain=1, use_custom_op=True)",
        "upsample2d(input, filter, up=2, padding=0, flip_filter=False, gain=1, use_custom_op=True)",
        "bias_act(input, bias=None, dim=1, act='linear', alpha=None, gain=None, clamp=None, use_custom_op=True)",
        "filtered_lrelu(input, filter_up=None, filter_down=None, bias=None, up=1, down=1, padding=0, gain=np.sqrt(2), "
        "slope=0.2, clamp=None, flip_filter=False, use_custom_op=True)",
        "fused_bias_leakyrelu(input, bias, negative_slope=0.2, scale=2**0.5)",
        "FusedBiasLeakyReLU(num_channels, negative_slope=0.2, scale=2**0.5)",
        "conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)",
        "conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)",
    ],
    "mmcv.ops.upfirdn2d": [
        "downsample2d(input, filter, down=2, padding=0, flip_filter=False, gain=1, use_custom_op=True)"
    ],
}


@pytest.mark.parametrize(("module", "line"), [(m, line) for m, lines in SIGNATURES.items() for line in lines])
def test_signatures(module: str, line: str) -> None:
    name, arguments = re.fullmatch(r"(\w+)\((.*)\)", line).groups()  # type: ignore[union-attr]
    _, function = peer_function(f"{module}.{name}")
    names: dict[str, Any] = {"torch": torch, "np": np}
    exec(f"def expected({arguments}): pass", names)
    expected = inspect.signature(names["expected"]).parameters
    got = inspect.signature(function).parameters
    assert [(p.name, p.kind, p.default) for p in got.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


def test_names_of_the_modules() -> None:
    from pixfuse.compat import mmcv, nvlabs, rosinality

    assert nvlabs.bias_act.activation_funcs["lrelu"].def_gain == np.sqrt(2)
    assert nvlabs.bias_act.activation_funcs["lrelu"]["def_alpha"] == 0.2
    assert set(nvlabs.bias_act.activation_funcs) == set(
        ["linear", "relu", "lrelu", "tanh", "sigmoid", "elu", "selu", "softplus", "swish"]
    )
    with pytest.raises(AttributeError, match="def_beta"):
        _ = nvlabs.bias_act.activation_funcs["lrelu"].def_beta
    assert (nvlabs.conv2d_gradfix.enabled, nvlabs.grid_sample_gradfix.enabled) == (False, False)
    assert (rosinality.conv2d_gradfix.enabled, mmcv.conv2d_gradfix.enabled) == (True, True)
    for module in (nvlabs.conv2d_gradfix, rosinality.conv2d_gradfix, mmcv.conv2d_gradfix):
        assert module.weight_gradients_disabled is False
        with module.no_weight_gradients():
            assert module.weight_gradients_disabled is True
        with pytest.raises(AttributeError, match="nothing"):
            _ = module.nothing


# --- conventions ----------------------------------------------------------------------------------------------

RAMP = torch.arange(12.0, dtype=torch.float64).reshape(1, 1, 3, 4)
TAPS = torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, 3.0]])


def test_two_values_of_padding_differ_between_the_peers() -> None:
    from pixfuse.compat import basicsr, mmcv, nvlabs, rosinality

    def expected(*padding: int) -> Tensor:
        return nvlabs.upfirdn2d.upfirdn2d(RAMP, TAPS, padding=list(padding))

    kernel = TAPS.double()
    torch.testing.assert_close(nvlabs.upfirdn2d.upfirdn2d(RAMP, TAPS, padding=[2, 1]), expected(2, 2, 1, 1))
    torch.testing.assert_close(mmcv.upfirdn2d(RAMP, TAPS, padding=[2, 1]), expected(2, 2, 1, 1))
    torch.testing.assert_close(rosinality.upfirdn2d(RAMP, kernel, pad=(2, 1)), expected(2, 1, 2, 1))
    torch.testing.assert_close(basicsr.upfirdn2d(RAMP, kernel, pad=(2, 1)), expected(2, 1, 2, 1))
    torch.testing.assert_close(rosinality.upfirdn2d(RAMP, kernel, pad=(2, 1, 0, 3)), expected(2, 1, 0, 3))
    torch.testing.assert_close(basicsr.upfirdn2d(RAMP, kernel, pad=(2, 1, 0, 3)), expected(2, 1, 2, 1))
    torch.testing.assert_close(rosinality.upfirdn2d(RAMP, kernel, pad=(-1, 2)), expected(-1, 2, -1, 2))
    torch.testing.assert_close(nvlabs.upfirdn2d.upfirdn2d(RAMP, TAPS, padding=2), expected(2, 2, 2, 2))


def test_worked_numbers_of_compat() -> None:
    from pixfuse.compat import nvlabs, rosinality

    setup_filter, upsample2d = nvlabs.upfirdn2d.setup_filter, nvlabs.upfirdn2d.upsample2d
    f = setup_filter([1, 3, 3, 1])
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    y = upsample2d(x, f)
    torch.testing.assert_close(y[0, 0, 0], torch.tensor([0.5625, 0.9375, 1.3125, 1.125]))
    torch.testing.assert_close(rosinality.upfirdn2d(x, f, up=2, pad=(2, 1)), y / 4)
    torch.testing.assert_close(
        nvlabs.upfirdn2d.filter2d(x, f)[0, 0], torch.tensor([[0.4375, 0.75], [0.84375, 1.40625]])
    )
    big = torch.arange(16.0).reshape(1, 1, 4, 4)
    small = nvlabs.upfirdn2d.downsample2d(big, f)
    torch.testing.assert_close(small[0, 0], torch.tensor([[2.734375, 3.9375], [7.546875, 8.75]]))
    w = torch.arange(1.0, 10).reshape(1, 1, 3, 3)
    resample = nvlabs.conv2d_resample.conv2d_resample
    torch.testing.assert_close(
        resample(x, w, f, up=2, padding=1)[0, 0, 0], torch.tensor([37.9375, 59.0625, 66.5, 51.0625])
    )
    torch.testing.assert_close(
        resample(big, w, f, down=2, padding=1)[0, 0],
        torch.tensor([[183.921875, 206.46875], [264.359375, 268.53125]]),
    )
    x = torch.tensor([[[[1.0, -2.0], [-3.0, 4.0]]]])
    y = nvlabs.filtered_lrelu.filtered_lrelu(x, f, f, up=2, down=2, padding=3, gain=1, slope=0.5)
    torch.testing.assert_close(y[0, 0], torch.tensor([[0.046875, -0.064453125], [-0.251953125, 1.076171875]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ports_of_stylegan2(dtype: torch.dtype) -> None:
    """Kernels of the image's dtype, per-axis factors, kernel gradients, slopes that count."""
    from pixfuse.compat import basicsr, mmcv, nvlabs, rosinality

    x, kernel = RAMP.to(dtype), TAPS.to(dtype).detach().requires_grad_()
    y = rosinality.upfirdn2d(x, kernel, up=(2, 3), down=np.array([1, 2]), pad=(2, 1))
    expected = nvlabs.upfirdn2d.upfirdn2d(x, TAPS, up=[2, 3], down=[1, 2], padding=[2, 1, 2, 1])
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert kernel.grad is not None
    assert kernel.grad.dtype == dtype
    torch.testing.assert_close(basicsr.upfirdn2d(x, TAPS, up=2, pad=(1, 1)), basicsr.upfirdn2d(x, kernel, 2, 1, (1, 1)))
    x, bias = torch.randn(2, 3, 4, dtype=dtype), torch.randn(3, dtype=dtype)
    truth = F.leaky_relu(x.double() + bias.double()[:, None], 0.01) * 2**0.5
    for function in (rosinality.fused_leaky_relu, basicsr.fused_leaky_relu, mmcv.fused_bias_leakyrelu):
        torch.testing.assert_close(function(x, bias, 0.01), truth.to(dtype))
    for module in (
        rosinality.FusedLeakyReLU(3, True, 0.01),
        basicsr.FusedLeakyReLU(3, 0.01),
        mmcv.FusedBiasLeakyReLU(3, 0.01),
    ):
        assert list(module.state_dict()) == ["bias"]
        module.load_state_dict({"bias": bias})
        torch.testing.assert_close(module.to(dtype)(x), truth.to(dtype))
        assert "negative_slope=0.01" in repr(module)
    plain = rosinality.FusedLeakyReLU(3, bias=False)
    assert plain.bias is None
    torch.testing.assert_close(plain(x), (F.leaky_relu(x.double(), 0.2) * 2**0.5).to(dtype))


@pytest.mark.parametrize("size", [2, np.int64(2), (2,), [2, 1], (np.int64(1), 2), torch.Size([2, 2])])
def test_sizes_of_the_convolutions(size: Any) -> None:
    """Ints of any kind, one or two, with and without gradients."""
    from pixfuse.compat.nvlabs import conv2d_gradfix

    x, w = torch.randn(1, 4, 9, 9), torch.randn(4, 4, 3, 3)
    for ours, torchs in ((conv2d_gradfix.conv2d, F.conv2d), (conv2d_gradfix.conv_transpose2d, F.conv_transpose2d)):
        for argument in ("stride", "padding", "dilation"):
            expected = torchs(x, w, **{argument: size})
            for needs in (False, True):
                got = ours(x, w.clone().requires_grad_(needs), **{argument: size})
                torch.testing.assert_close(got.detach(), expected)


def test_fma() -> None:
    from pixfuse.compat.nvlabs.fma import fma

    shapes: list[tuple[int, ...]] = [(2, 1, 4), (3, 1), ()]
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    torch.testing.assert_close(fma(*tensors), tensors[0] * tensors[1] + tensors[2])
    assert torch.autograd.gradcheck(fma, tensors)
    assert torch.autograd.gradgradcheck(fma, tensors)
    with pytest.raises(TypeError, match="fma: c must be a tensor, got float"):
        fma(tensors[0], tensors[1], 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fma: shapes of a, b and c must broadcast, got \[2\], \[3\] and \[\]"):
        fma(torch.zeros(2), torch.zeros(3), torch.zeros(()))


def test_grid_sample() -> None:
    from pixfuse.compat.nvlabs.grid_sample_gradfix import grid_sample

    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    grid = (torch.rand(2, 3, 3, 2, dtype=torch.float64) * 2.4 - 1.2).requires_grad_()
    expected = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    torch.testing.assert_close(grid_sample(x, grid), expected)
    assert torch.autograd.gradcheck(grid_sample, (x, grid))
    assert torch.autograd.gradgradcheck(grid_sample, (x, grid))
    first = torch.autograd.grad(grid_sample(x, grid).square().sum(), [x, grid], create_graph=True)
    plain = torch.autograd.grad(grid_sample(x, grid).square().sum(), [x, grid])
    for a, b in zip(first, plain, strict=True):  # in differentiable steps, and PyTorch's own
        torch.testing.assert_close(a, b)
    total = first[0].square().sum() + first[1].square().sum()
    second = torch.autograd.grad(total, [x, grid], create_graph=True)
    assert all(bool(g.any()) for g in second)
    assert all(bool(g.any()) for g in torch.autograd.grad(second[0].square().sum() + second[1].sum(), [x, grid]))
    for only in (0, 1):
        tensors = [t.detach().requires_grad_(i == only) for i, t in enumerate((x, grid))]
        (g,) = torch.autograd.grad(grid_sample(*tensors).square().sum(), [tensors[only]], create_graph=True)
        torch.testing.assert_close(g, plain[only])
        grid_sample(*tensors).square().sum().backward()
        torch.testing.assert_close(tensors[only].grad, plain[only])
    half = grid_sample(x.half(), grid.half())
    assert half.dtype == torch.float16
    (g,) = torch.autograd.grad(half.float().sum(), [x], create_graph=True)
    assert g.dtype == torch.float64
    torch.testing.assert_close(
        torch.func.grad(lambda t: grid_sample(t, grid).sum())(x),
        torch.func.grad(lambda t: F.grid_sample(t, grid, align_corners=False).sum())(x),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grid_sample(x.float(), grid.double()).dtype == torch.float64
    for wrong, error, match in (
        ((x[0], grid), ValueError, r"input must be 4-D \(\[N, C, H, W\]\), got shape \[3, 5, 4\]"),
        ((x, grid[:1]), ValueError, r"grid must have shape \[2, H', W', 2\], got shape \[1, 3, 3, 2\]"),
        ((x, grid.float()), ValueError, r"grid must have the dtype of input \(float64\), got float32"),
        ((x, 3), TypeError, "grid must be a tensor, got int"),
        ((x.int(), grid), TypeError, "input must be float64"),
    ):
        with pytest.raises(error, match=f"grid_sample: {match}"):
            grid_sample(*wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grid_sample_in_16_bits(dtype: torch.dtype) -> None:
    """Values, first and second derivatives are those of float64 up to one rounding of the result."""
    from pixfuse.compat.nvlabs.grid_sample_gradfix import grid_sample

    g = torch.Generator().manual_seed(0)
    x, grid = torch.randn(2, 3, 40, 50, generator=g), torch.rand(2, 9, 8, 2, generator=g) * 2.2 - 1.1
    low = [t.to(dtype).requires_grad_() for t in (x, grid)]
    high = [t.detach().double().requires_grad_() for t in low]
    found = []
    for tensors in (low, high):
        y = grid_sample(*tensors)
        plain = torch.autograd.grad(y, tensors, torch.ones_like(y), retain_graph=True)
        first = torch.autograd.grad(y, tensors, torch.ones_like(y), create_graph=True)
        second = torch.autograd.grad(first[1], tensors, torch.ones_like(first[1]))
        found.append([t.detach() for t in (y, *plain, *first, *second)])
    for a, b in zip(*found, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= 4 * torch.finfo(dtype).eps * b.abs().max()


def test_grid_sample_where_the_grid_is_not_finite() -> None:
    """No pixel hears of it, and the gradient is PyTorch's, whether it is to be differentiated or not."""
    from pixfuse.compat.nvlabs.grid_sample_gradfix import grid_sample

    x = torch.ones(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e300, -7.0, 0.1], dtype=torch.float64)
    grid = torch.cartesian_prod(values, values)[None, None].requires_grad_()
    y = grid_sample(x, grid)
    plain = torch.autograd.grad(y.sum(), [x, grid], retain_graph=True)
    first = torch.autograd.grad(y.sum(), [x, grid], create_graph=True)
    assert first[0].isfinite().all()
    for a, b in zip(first, plain, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    (ddx,) = torch.autograd.grad(first[0].square().sum(), [x], allow_unused=True, materialize_grads=True)
    assert not ddx.any()


def test_no_weight_gradients_reaches_conv2d_resample() -> None:
    from pixfuse.compat import nvlabs

    gradfix = nvlabs.conv2d_gradfix
    f = nvlabs.upfirdn2d.setup_filter([1, 3, 3, 1])
    for params in ({"up": 2, "padding": 1}, {"down": 2, "padding": 1}, {"padding": 1}):
        x = torch.randn(1, 2, 8, 8, dtype=torch.float64, requires_grad=True)
        w = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
        y = nvlabs.conv2d_resample.conv2d_resample(x, w, f, **params)
        with gradfix.no_weight_gradients():
            y.square().sum().backward(retain_graph=True)
        assert w.grad is None
        assert x.grad is not None
        with gradfix.no_weight_gradients():
            (dx,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
        dx.square().sum().backward()
        assert w.grad is not None


@pytest.mark.parametrize("demodulate", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_no_weight_gradients_in_modulated_conv2d(fused: bool, channels_last: bool, demodulate: bool) -> None:
    """None for the weight, though demodulation and styles make more of it than a weight; the styles get all theirs."""
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    w, styles = torch.randn(4, 3, 3, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (x, w, styles)]

    def call(up: int = 1) -> Tensor:
        return pixfuse.modulated_conv2d(*tensors, up=up, padding=1, demodulate=demodulate, fused_modconv=fused).square()

    for up in (1, 2):
        want = torch.autograd.grad(call(up).sum(), tensors)
        y = call(up)
        with compat.nvlabs.conv2d_gradfix.no_weight_gradients():
            found = torch.autograd.grad(y.sum(), tensors, allow_unused=True)
        assert found[1] is None
        torch.testing.assert_close([found[0], found[2]], [want[0], want[2]])
    want = torch.autograd.grad(torch.autograd.grad(call().sum(), styles, create_graph=True)[0].square().sum(), w)
    with compat.nvlabs.conv2d_gradfix.no_weight_gradients():
        (slope,) = torch.autograd.grad(call().sum(), styles, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(slope.square().sum(), w), want)  # path length, outside again
    w.grad = None
    with compat.nvlabs.conv2d_gradfix.no_weight_gradients():
        pixfuse.modulated_conv2d(x[:0], w, styles[:0], fused_modconv=fused).sum().backward()
    assert w.grad is None


# --- refusals -------------------------------------------------------------------------------------------------

NV, X = "torch_utils.ops", torch.zeros(1, 3, 8, 8)
K, W = torch.ones(2, 2), torch.zeros(3, 3, 3, 3, requires_grad=True)
META, META_GRID = torch.zeros(3, device="meta"), torch.zeros(1, 2, 2, 2, device="meta")
REFUSALS: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (f"{NV}.upfirdn2d.upfirdn2d", (X, K), {"impl": "slow"}, ValueError, "impl must be one of cuda, ref, got 'slow'"),
    (f"{NV}.upfirdn2d.filter2d", (X, K), {"impl": None}, TypeError, "filter2d: impl must be one of"),
    (f"{NV}.upfirdn2d.upsample2d", (X, K), {"impl": ""}, ValueError, "upsample2d: impl must be one of"),
    (f"{NV}.upfirdn2d.downsample2d", (X, K), {"impl": ""}, ValueError, "downsample2d: impl must be one of"),
    (f"{NV}.bias_act.bias_act", (X,), {"impl": "x"}, ValueError, "bias_act: impl must be one of"),
    (f"{NV}.bias_act.bias_act", (X,), {"act": "gelu"}, ValueError, "bias_act: act must be one of linear, relu"),
    (f"{NV}.bias_act.bias_act", (X,), {"clamp": -1}, ValueError, "clamp must be None or at least 0, got -1"),
    (f"{NV}.filtered_lrelu.filtered_lrelu", (X,), {"impl": "x"}, ValueError, "filtered_lrelu: impl must be one of"),
    (f"{NV}.filtered_lrelu.filtered_lrelu", (X,), {"gain": 0}, ValueError, "filtered_lrelu: gain must be above 0"),
    (f"{NV}.conv2d_gradfix.no_weight_gradients", (1,), {}, TypeError, "disable must be True or False, got 1"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, None), {}, TypeError, "conv2d: weight must be a tensor, got NoneType"),
    (f"{NV}.conv2d_gradfix.conv2d", (None, W), {}, TypeError, "conv2d: input must be a tensor, got NoneType"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W, 1), {}, TypeError, "conv2d: bias must be a tensor, got int"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W.double()), {}, ValueError, r"weight must have the dtype of input \(float32"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W, META), {}, ValueError, r"bias must be on the device of input \(cpu\)"),
    (f"{NV}.conv2d_gradfix.conv2d", (X[0, 0], W), {}, ValueError, "conv2d: input must be 4-D"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W[0]), {}, ValueError, "conv2d: weight must be 4-D"),
    (f"{NV}.conv2d_gradfix.conv2d", (X[:, :2], W), {}, ValueError, "conv2d: input must have 3 channels"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W), {"groups": 2}, ValueError, r"groups must divide .* \(3\), got 2"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W, X[0, 0, 0]), {}, ValueError, r"bias must have shape \[3\] .* \[8\]"),
    ("op.conv2d_gradfix.conv_transpose2d", (X[:, :2], W), {}, ValueError, "input must have 3 channels"),
    (f"{NV}.grid_sample_gradfix.grid_sample", (X, META_GRID), {}, ValueError, r"be on the device of input \(cpu\)"),
    ("op.fused_leaky_relu", (X, META), {}, ValueError, r"bias must be on the device of input \(cpu\)"),
    ("op.upfirdn2d", (X, K.to("meta")), {}, ValueError, r"kernel must be on the device of input \(cpu\)"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W), {"stride": 1.5}, TypeError, "conv2d: stride must be an int, got 1.5"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W), {"stride": "2"}, TypeError, "conv2d: stride must be an int, got '2'"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W), {"stride": (1, 2, 3)}, ValueError, "stride must be an int or two ints"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W), {"padding": (1, 1.0)}, TypeError, "padding must be an int, got 1.0"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W), {"padding": -1}, ValueError, "padding must be at least 0, got -1"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W), {"padding": "half"}, ValueError, "two ints, 'same' or 'valid', got 'half'"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W), {"dilation": 0}, ValueError, "dilation must be at least 1, got 0"),
    (f"{NV}.conv2d_gradfix.conv2d", (X, W), {"groups": True}, TypeError, "groups must be an int, got True"),
    ("op.conv2d_gradfix.conv_transpose2d", (X, W), {"stride": ()}, ValueError, "stride must be an int or two ints"),
    ("mmcv.ops.conv_transpose2d", (X, W), {"output_padding": True}, TypeError, "output_padding must be an int"),
    ("mmcv.ops.conv_transpose2d", (X, W), {"padding": "same"}, TypeError, "padding must be an int, got 'same'"),
    ("mmcv.ops.conv_transpose2d", (X, W), {"groups": None}, TypeError, "groups must be an int, got None"),
    ("op.upfirdn2d", (X, None), {}, TypeError, "upfirdn2d: kernel must be a tensor, got NoneType"),
    ("op.upfirdn2d", (X, torch.ones(4)), {}, ValueError, r"upfirdn2d: kernel must be 2-D .* got shape \[4\]"),
    ("op.upfirdn2d", (X, K.double()), {}, ValueError, r"kernel must have the dtype of input \(float32\) or float32"),
    ("op.upfirdn2d", (X, K), {"pad": 1}, TypeError, "upfirdn2d: pad must be a sequence of 2 or 4 ints, got 1"),
    ("op.upfirdn2d", (X, K), {"pad": (1, 2, 3)}, ValueError, r"pad must be \(before, after\) or \(x0, x1, y0, y1\)"),
    ("op.upfirdn2d", (X, K), {"up": 1.5}, TypeError, "upfirdn2d: up must be an int, got 1.5"),
    ("op.upfirdn2d", (X, torch.ones(9, 9)), {}, ValueError, "upfirdn2d: padding must leave"),
    ("op.fused_leaky_relu", (X, torch.zeros(4)), {}, ValueError, r"fused_leaky_relu: bias must have shape \[3\]"),
    ("op.fused_leaky_relu", (X[0, 0, 0],), {}, ValueError, "fused_leaky_relu: input must be at least 2-D"),
    ("op.fused_leaky_relu", (X,), {"negative_slope": "0.2"}, TypeError, "negative_slope must be a number"),
    ("op.FusedLeakyReLU", (3, 0.2), {}, TypeError, "FusedLeakyReLU: bias must be True or False, got 0.2"),
    ("basicsr.ops.upfirdn2d.upfirdn2d", (X, K), {"up": (2, 1)}, TypeError, r"up must be an int, got \(2, 1\)"),
    ("basicsr.ops.upfirdn2d.upfirdn2d", (X, K), {"pad": 1}, TypeError, "upfirdn2d: pad must be a sequence"),
    ("basicsr.ops.upfirdn2d.upfirdn2d", (X, K), {"pad": (1,)}, ValueError, r"pad must be \(before, after\)"),
    ("basicsr.ops.fused_act.fused_leaky_relu", (X, None), {}, TypeError, "fused_leaky_relu: bias must be a tensor"),
    ("mmcv.ops.upfirdn2d", (X, K), {"use_custom_op": 1}, TypeError, "use_custom_op must be True or False"),
    ("mmcv.ops.bias_act", (X,), {"use_custom_op": "ref"}, TypeError, "use_custom_op must be True or False"),
    ("mmcv.ops.fused_bias_leakyrelu", (X, None), {}, TypeError, "fused_bias_leakyrelu: bias must be a tensor"),
]


@pytest.mark.parametrize(("path", "args", "kwargs", "error", "match"), REFUSALS)
def test_refusals(path: str, args: Any, kwargs: Any, error: type[Exception], match: str) -> None:
    _, function = peer_function(path)
    with pytest.raises(error, match=match):
        function(*args, **kwargs)
