"""The battery on a real GPU: values and gradients of every case, determinism, graphs, streams, devices, sizes.

CI has no GPU: there the kernels run in Triton's interpreter and are compiled ahead of time, room by room.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pixfuse
from pixfuse._shared import calls
from pixfuse._shared.layout import to_layout
from pixfuse._shared.library import by_definition
from pixfuse._shared.testing import (
    DTYPES,
    Case,
    assert_within,
    check_forward_mode,
    check_values_and_gradients,
    random_like,
)
from pixfuse.bias_act import cases as bias_act
from pixfuse.conv2d_resample import cases as conv2d_resample
from pixfuse.conv2d_resample.modulation import modulation
from pixfuse.conv2d_resample.reference import BFLOAT16, EXACT, FLOAT16, PLAIN
from pixfuse.filtered_lrelu import cases as filtered_lrelu
from pixfuse.group_norm import cases as group_norm
from pixfuse.upfirdn2d import cases as upfirdn2d
from pixfuse.upsample import cases as upsample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

CASES: list[tuple[Callable[..., Tensor], Case]] = [
    *((pixfuse.bias_act, case) for case in bias_act.CASES),
    *((pixfuse.upfirdn2d, case) for case in upfirdn2d.CASES),
    *((pixfuse.filtered_lrelu, case) for case in filtered_lrelu.CASES),
    *((pixfuse.group_norm, case) for case in group_norm.CASES),
    *((pixfuse.upsample_nearest, case) for case in upsample.NEAREST_CASES),
    *((pixfuse.interpolate, case) for case in upsample.INTERPOLATE_CASES),
    *((conv2d_resample.modulated_weights, case) for case in conv2d_resample.CASES),
]
every_case = pytest.mark.parametrize(
    ("function", "case"), [pytest.param(f, c, id=f"{f.__name__}-{c.id}") for f, c in CASES]
)
OPS = ("bias_act", "group_norm", "upfirdn2d", "upsample_nearest", "interpolate", "filtered_lrelu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [*OPS, "modulation"])
def test_the_fast_path_is_taken(op: str, dtype: torch.dtype) -> None:
    found = pixfuse.backend(op, torch.zeros(1, device="cuda", dtype=dtype))
    assert found == "triton", found.reason


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@every_case
def test_values_and_gradients(
    function: Callable[..., Tensor], case: Case, dtype: torch.dtype, channels_last: bool
) -> None:
    """In pieces, since each compiles kernels of its own: for filtered_lrelu that takes 10 seconds for each."""
    check_values_and_gradients(function, case, "cuda", [dtype], [channels_last])


@every_case
def test_forward_mode(function: Callable[..., Tensor], case: Case) -> None:
    check_forward_mode(function, case, "cuda")


def _everything(
    function: Callable[..., Tensor], case: Case, made: dict[str, Tensor], dy: Tensor | None = None
) -> list[Tensor]:
    y = case.run(function, made)
    return [y, *torch.autograd.grad(y, list(made.values()), random_like(y) if dy is None else dy)]


@every_case
def test_deterministic(function: Callable[..., Tensor], case: Case) -> None:
    """Bit-equal from run to run, with fresh memory full of NaN, and whatever batch a sample is in."""
    for channels_last in (False, True):
        made = case.tensors(torch.float16, channels_last, "cuda")
        first = _everything(function, case, made)
        torch.use_deterministic_algorithms(True)
        try:
            again = _everything(function, case, case.tensors(torch.float16, channels_last, "cuda"))
        finally:
            torch.use_deterministic_algorithms(False)
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)
        if case.params.get("dim", 1) == 0:
            continue
        with torch.no_grad():
            for i in range(made["x"].shape[0]):
                alone = case.run(function, {**made, "x": made["x"][i : i + 1]})
                assert torch.equal(alone, first[0][i : i + 1])


@every_case
def test_cuda_graph(function: Callable[..., Tensor], case: Case) -> None:
    """Forward and backward can be captured, and a replay sees new numbers."""
    made = case.tensors(torch.float32, False, "cuda")
    case = dataclasses.replace(case, fixed={k: f.cuda() for k, f in case.fixed.items()})
    dy = random_like(case.run(function, made))
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            _everything(function, case, made, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _everything(function, case, made, dy)
    with torch.no_grad():
        for t in made.values():
            t.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, _everything(function, case, made, dy), strict=True):
        assert torch.equal(a, b)


@every_case
def test_another_stream(function: Callable[..., Tensor], case: Case) -> None:
    made = case.tensors(torch.float32, False, "cuda")
    expected = _everything(function, case, made)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = _everything(function, case, made)
    side.synchronize()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_case
def test_another_device(function: Callable[..., Tensor], case: Case) -> None:
    """Field case 29: cuda:1 while device 0 is current."""
    expected = _everything(function, case, case.tensors(torch.float32, False, "cuda:0"))
    got = _everything(function, case, case.tensors(torch.float32, False, "cuda:1"))
    for a, b in zip(got, expected, strict=True):
        assert a.device.index == 1
        assert torch.equal(a.cpu(), b.cpu())


def _random_case(op: str, seed: int) -> Case:
    """A call with sizes and parameters that no list holds."""
    pick = random.Random(f"{op} {seed}")
    n, c, h, w = pick.randint(1, 3), pick.choice([1, 3, 8, 24, 65]), pick.randint(1, 70), pick.randint(1, 70)
    inputs: dict[str, tuple[int, ...]] = {"x": (n, c, h, w)}
    params: dict[str, Any] = {}
    fixed: dict[str, Tensor] = {}
    if op == "bias_act":
        params = {"act": pick.choice(["lrelu", "swish", "selu"]), "clamp": pick.choice([None, 0.7]), "gain": 1.3}
        inputs["b"] = (c,)
    elif op == "group_norm":
        divisors = [d for d in range(1, c + 1) if c % d == 0]
        params = {"num_groups": pick.choice(divisors), "act": pick.choice([None, "silu"])}
        inputs |= {"weight": (c,), "bias": (c,)}
    elif op == "upsample_nearest":
        params = {"scale": [pick.randint(1, 4), pick.randint(1, 4)]}
    elif op == "interpolate":
        params = {"mode": pick.choice(["bilinear", "bicubic"]), "size": (pick.randint(1, 90), pick.randint(1, 90))}
    else:
        k, up, down = pick.randint(1, 9), pick.randint(1, 3), pick.randint(1, 3)
        padding = [pick.randint(k, k + 4) for _ in range(4)]
        if op == "upfirdn2d":
            params = {"up": up, "down": down, "padding": padding, "flip_filter": pick.random() < 0.5}
            fixed = {"f": torch.rand(k) if pick.random() < 0.5 else torch.rand(k, pick.randint(1, k))}
        else:
            params = {"up": up, "down": down, "padding": padding, "clamp": pick.choice([None, 1.0])}
            fixed = {"fu": torch.rand(k) / k, "fd": torch.rand(pick.randint(1, k)) / k}
    return Case(f"seed{seed}-{n}x{c}x{h}x{w}", inputs, params, fixed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("op", OPS)
def test_random_calls(op: str, seed: int) -> None:
    """Fuzzing: values and gradients of calls that nobody thought of, and the same on views of any strides."""
    function, case = getattr(pixfuse, op), _random_case(op, seed)
    check_values_and_gradients(function, case, "cuda")
    made = {k: t.detach() for k, t in case.tensors(torch.float16, False, "cuda").items()}
    x = made["x"]
    n, c, h, w = x.shape
    padded = torch.zeros(n, c, h + 2, 2 * w + 1, device="cuda", dtype=x.dtype)
    padded[:, :, 1:-1, 1::2] = x
    expected = case.run(function, made)
    recorded = {k: t.clone().requires_grad_() for k, t in made.items()}
    assert torch.equal(case.run(function, recorded), expected)
    for view in (padded[:, :, 1:-1, 1::2], x.mT.contiguous().mT, x.flip(0).contiguous().flip(0)):
        assert torch.equal(case.run(function, {**made, "x": view}), expected)


WIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "bias_act": lambda x: pixfuse.bias_act(x, act="lrelu", clamp=1.0),
    "group_norm": lambda x: pixfuse.group_norm(x, 1),
    "upfirdn2d": lambda x: pixfuse.upfirdn2d(x, None, up=2, padding=[1, 0, 1, 0]),
    "upsample_nearest": lambda x: pixfuse.upsample_nearest(x, 2),
    "interpolate": lambda x: pixfuse.interpolate(x, scale_factor=2, mode="bilinear"),
    "filtered_lrelu": lambda x: pixfuse.filtered_lrelu(x, None, None, up=2, down=2),
}


@pytest.mark.parametrize("shape", [(600000, 1, 4, 4), (70000, 3, 2, 2)])
@pytest.mark.parametrize("op", list(WIDE))
def test_more_images_than_a_grid_axis(op: str, shape: tuple[int, ...]) -> None:
    """Field case 28: N * C beyond 65535."""
    x = torch.randn(shape, device="cuda").requires_grad_()
    y = WIDE[op](x)
    y.sum().backward()
    for part in (slice(0, 2), slice(-2, None)):
        piece = x.detach()[part].clone().requires_grad_()
        expected = WIDE[op](piece)
        expected.sum().backward()
        assert torch.equal(y[part], expected)
        assert torch.equal(x.grad[part], piece.grad)


@pytest.mark.parametrize("op", list(WIDE))
def test_calls_that_were_made_before(op: str) -> None:
    """What a known call launches is what the long way does, for tensors that only a guard tells apart."""
    call, x = WIDE[op], torch.randn(2, 4, 6, 6, device="cuda")
    others = [x, x.to(memory_format=torch.channels_last), x.half(), x.mT.contiguous().mT, torch._neg_view(-x), x[:1]]
    for other in [*others, x.clone().requires_grad_()]:
        got = [call(other) for _ in range(3)]
        with calls.nothing_known():
            expected = call(other)
        for y in got:
            assert torch.equal(y, expected)
            assert y.stride() == expected.stride()
            assert y.requires_grad == expected.requires_grad
    assert torch.equal(call(torch._neg_view(-x)), call(x))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("op", list(WIDE))
def test_more_than_2_31_elements(op: str, channels_last: bool) -> None:
    """Field case 28: right to the last element."""
    x = torch.randn(9, 256, 512, 512, device="cuda", dtype=torch.bfloat16)
    if op in ("bias_act", "group_norm", "filtered_lrelu"):
        x = torch.cat([x] * 4)  # the result has the size of x
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    y = WIDE[op](x)
    assert y.numel() > 2**31
    for i in (0, x.shape[0] - 1):
        assert torch.equal(y[i : i + 1], WIDE[op](x[i : i + 1]))


@pytest.mark.parametrize("dtype", [PLAIN, BFLOAT16, FLOAT16, EXACT])
@pytest.mark.parametrize("shape", [(512, 512, 3, 3), (16, 32, 3, 3), (3, 2000, 3, 3), (40, 24, 7, 7)])
def test_factors_of_a_layer(shape: tuple[int, ...], dtype: int) -> None:
    """``modulation`` at the sizes of layers: right, equal from run to run, and an image for itself to the last bit."""
    channels_last = dtype in (BFLOAT16, FLOAT16)

    def everything(weight: Tensor, styles: Tensor, images: slice = slice(None)) -> list[Tensor]:
        leaves = [weight.detach().requires_grad_(), styles[images].detach().requires_grad_()]
        found = [t for t in modulation(*leaves, dtype, channels_last, False) if t.numel()]
        upstream = [random_like(t.new_empty(4, t.shape[1]))[images] if t.dim() == 2 else random_like(t) for t in found]
        return [*(t.detach() for t in found), *torch.autograd.grad(found, leaves, upstream)]

    generator = torch.Generator().manual_seed(0)
    weight, styles = (torch.randn(s, generator=generator).cuda() for s in (shape, (4, shape[1])))
    got = everything(weight, styles)
    for a, b in zip(got, everything(weight, styles), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(got, everything(to_layout(weight, True), styles), strict=True):
        torch.testing.assert_close(a, b)
    with by_definition():
        plain, truth = everything(weight, styles), everything(weight.double(), styles.double())
    for i, (g, p, t) in enumerate(zip(got, plain, truth, strict=True)):
        assert g.dtype == p.dtype
        assert_within(g, p, t.double(), f"result {i}")
    for i in range(4):
        for together, alone in zip(got, everything(weight, styles, slice(i, i + 1)), strict=True):
            if alone.dim() == 2:  # s, demodulation, dstyles
                assert torch.equal(together[i : i + 1], alone)


def test_cases_are_whole() -> None:
    """Every public op has cases here."""
    names: set[Any] = {f.__name__ for f, _ in CASES}
    assert names == {*OPS, "modulated_weights"}
    assert all(dataclasses.is_dataclass(case) for _, case in CASES)
