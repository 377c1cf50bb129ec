"""The factors of modulated_conv2d: the battery, roundings and layouts, what is computed for whom, weight gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pixfuse
from pixfuse._shared.conv import no_weight_gradients
from pixfuse._shared.layout import is_channels_last, to_layout
from pixfuse._shared.library import by_definition
from pixfuse._shared.testing import DEVICE, assert_within, battery
from pixfuse.conv2d_resample import op
from pixfuse.conv2d_resample.cases import CASES, modulated_weights
from pixfuse.conv2d_resample.modulation import modulation
from pixfuse.conv2d_resample.reference import BFLOAT16, EXACT, FLOAT16, PLAIN, ROUNDED

DTYPES = pytest.mark.parametrize("dtype", [PLAIN, BFLOAT16, FLOAT16, EXACT], ids=["plain", "bf16", "fp16", "exact"])
LAYOUTS = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
# Of the weight, and images: a layer, one of one channel, one whose rows go by in parts on a GPU, and 7x7 taps.
SHAPES = [((64, 96, 3, 3), 4), ((3, 1, 3, 3), 2), ((2, 1100, 3, 3), 3), ((5, 40, 7, 7), 2)]


def parameters(shape: tuple[int, ...], images: int, given: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[1])
    weight, styles = torch.randn(shape, generator=generator), 2 * torch.randn(images, shape[1], generator=generator) + 1
    return weight.to(DEVICE, given), styles.to(DEVICE, given)


@pytest.fixture(params=[False, True], ids=["definition", "op"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, then as on a GPU."""
    monkeypatch.setattr(op, "_by_definition", lambda x: not request.param)


@pytest.mark.parametrize(("check", "case"), battery(CASES))
def test_battery(check: Any, case: Any) -> None:
    check(modulated_weights, case)


@LAYOUTS
@DTYPES
@pytest.mark.parametrize(("shape", "images"), SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], images: int, dtype: int, channels_last: bool) -> None:
    """Every result and both gradients as autograd has them from the definition in float64."""
    if dtype == PLAIN and channels_last:
        return

    def everything(weight: Tensor, styles: Tensor) -> list[Tensor]:
        leaves = [to_layout(weight, channels_last).detach().requires_grad_(), styles.detach().requires_grad_()]
        found = [t for t in modulation(*leaves, dtype, channels_last, False) if t.numel()]
        upstream = [torch.randn(t.shape, generator=torch.Generator().manual_seed(3)).to(t) for t in found]
        return [*(t.detach() for t in found), *torch.autograd.grad(found, leaves, upstream)]

    weight, styles = parameters(shape, images)
    got = everything(weight, styles)
    with by_definition():
        plain, truth = everything(weight, styles), everything(weight.double(), styles.double())
    names = (
        ["demodulation", "dweight", "dstyles"] if dtype == PLAIN else ["w", "s", "demodulation", "dweight", "dstyles"]
    )
    for name, g, p, t in zip(names, got, plain, truth, strict=True):
        assert g.dtype == (torch.float32 if name in ("dweight", "dstyles") else ROUNDED[dtype] or torch.float32)
        assert_within(g, p, t.double(), name)
        if g.dim() == 4 and shape[1] > 1:
            assert is_channels_last(g) == channels_last, name


@LAYOUTS
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_16_bits_are_rounded_once(dtype: int, channels_last: bool) -> None:
    weight, styles = parameters((6, 5, 3, 3), 3)
    exact = modulation(weight, styles, EXACT, channels_last, False)
    for got, wanted in zip(modulation(weight, styles, dtype, channels_last, False), exact, strict=True):
        assert torch.equal(got, wanted.to(ROUNDED[dtype]))
        assert got.stride() == wanted.stride()


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_have_the_dtype_and_layout_of_the_parameters(given: torch.dtype) -> None:
    weight, styles = parameters((4, 3, 3, 3), 2, given)
    turned = weight.transpose(0, 1).contiguous().transpose(0, 1)
    found = []
    for w in (weight, to_layout(weight, True), turned):
        leaves = [w.detach().requires_grad_(), styles.detach().float().requires_grad_()]
        factors = modulation(*leaves, EXACT, False, False)
        dweight, dstyles = torch.autograd.grad(factors, leaves, [torch.ones_like(t) for t in factors])
        assert (dweight.dtype, dstyles.dtype) == (given, torch.float32)
        assert is_channels_last(dweight) == is_channels_last(w)
        found.append((dweight, dstyles))
    for pair in found[1:]:
        torch.testing.assert_close(pair, found[0])


@DTYPES
def test_an_image_knows_nothing_of_the_others(dtype: int) -> None:
    weight, styles = parameters((24, 40, 3, 3), 5)

    def everything(styles: Tensor) -> list[Tensor]:
        styles = styles.detach().requires_grad_()
        _, s, d = modulation(weight, styles, dtype, False, False)
        return [s, d, *torch.autograd.grad(s.sum() + d.sum(), styles)]

    together = everything(styles)
    for i in range(len(styles)):
        one = slice(i, i + 1)
        for whole, alone in zip(together, everything(styles[one]), strict=True):
            assert torch.equal(whole[one] if whole.dim() == 2 else whole, alone)  # PLAIN has no s


class Calls(TorchDispatchMode):
    """The arguments of the operators of pixfuse and of the gradients of convolutions that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace == "pixfuse" or name == "convolution_backward":
            self.seen.append((name, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("x_dtype", "fused", "channels_last", "autocast", "wanted"),
    [
        (torch.float32, False, True, False, (PLAIN, False)),
        (torch.float32, True, False, False, (PLAIN, False)),
        (torch.float16, False, True, False, (FLOAT16, True)),
        (torch.bfloat16, True, True, False, (BFLOAT16, True)),  # groups would cost the layout
        (torch.bfloat16, False, False, False, (BFLOAT16, False)),
        (torch.float16, True, False, False, (EXACT, False)),
        (torch.float16, False, False, True, (EXACT, False)),
    ],
)
def test_what_modulated_conv2d_asks_for(
    x_dtype: torch.dtype, fused: bool, channels_last: bool, autocast: bool, wanted: tuple[int, bool]
) -> None:
    weight, styles = (t.to("meta") for t in parameters((4, 8, 3, 3), 2))
    x = to_layout(torch.ones(2, 8, 5, 5, device="meta", dtype=x_dtype), channels_last)
    with Calls() as calls, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pixfuse.modulated_conv2d(x, weight, styles, padding=1, fused_modconv=fused)
        pixfuse.modulated_conv2d(x, weight, styles, padding=1, fused_modconv=fused, demodulate=False)
    assert [(name, args[2:4]) for name, args in calls.seen] == [("modulation", wanted)]


@pytest.mark.parametrize("up", [1, 2])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16])
def test_only_what_is_asked_for_is_computed(x_dtype: torch.dtype, up: int) -> None:
    """Above all no convolution for the gradient of a weight that only the styles' gradient goes past."""
    weight, styles = (t.to("meta").requires_grad_() for t in parameters((4, 3, 3, 3), 2))
    x = torch.ones(2, 3, 5, 5, device="meta", dtype=x_dtype).requires_grad_()
    frozen = weight.detach()
    for w, inputs, needs, convolved in (
        (weight, [x, weight], [(True, False)], (True, True)),
        (weight, [x, styles], [(False, True)], (True, False)),
        (weight, [styles], [(False, True)], (True, False)),
        (frozen, [x, styles], [(False, True)], (True, False)),
        (weight, [x], [], (True, False)),
        (weight, [x, weight, styles], [(True, True)], (True, True)),
    ):
        y = pixfuse.modulated_conv2d(x, w, styles, up=up, padding=1, fused_modconv=False)
        with Calls() as calls:
            torch.autograd.grad(y.sum(), inputs)
        assert [args[-2:] for name, args in calls.seen if name == "modulation_backward"] == needs
        masks = [tuple(args[-1][:2]) for name, args in calls.seen if name == "convolution_backward"]
        assert masks == [convolved]


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("both_ways")
def test_no_weight_gradients_to_third_order(fused: bool, x_dtype: torch.dtype) -> None:
    """None for the weight inside the context, whatever order of derivative runs there; all others get theirs."""
    weight, styles = (t.requires_grad_() for t in parameters((4, 3, 3, 3), 2))
    x = torch.linspace(-1, 1, 150, device=DEVICE).reshape(2, 3, 5, 5).to(x_dtype).requires_grad_()

    def slope(order: int) -> Tensor:
        y = pixfuse.modulated_conv2d(x, weight, styles, padding=1, fused_modconv=fused).float()
        for _ in range(order):
            (y,) = torch.autograd.grad(y.square().sum(), styles, create_graph=True)
        return y.square().sum()

    for order in range(3):
        outside = torch.autograd.grad(slope(order), [weight, styles])
        result = slope(order)
        with no_weight_gradients():
            dweight, dstyles = torch.autograd.grad(result, [weight, styles], allow_unused=True)
        assert dweight is None
        torch.testing.assert_close(dstyles, outside[1])
        with no_weight_gradients():
            result = slope(order)
        torch.testing.assert_close(torch.autograd.grad(result, [weight, styles]), outside)


@pytest.mark.usefixtures("both_ways")
def test_transforms_and_compiled_calls_know_no_weight_gradients_as_ever() -> None:
    """The context is for eager autograd: elsewhere the weight gets all of its gradient, not a part."""
    weight, styles = parameters((4, 3, 3, 3), 2)
    x = torch.ones(2, 3, 5, 5, device=DEVICE)

    def loss(weight: Tensor) -> Tensor:
        return pixfuse.modulated_conv2d(x, weight, styles, fused_modconv=False).square().sum()

    leaf = weight.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    with no_weight_gradients():
        torch.testing.assert_close(torch.func.grad(loss)(weight), wanted)
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaf), (wanted,))
