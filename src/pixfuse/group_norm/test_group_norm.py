"""group_norm: golden vectors, the battery, field cases and every refusal."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pixfuse
from pixfuse._shared.layout import is_channels_last, to_layout
from pixfuse._shared.testing import as_channels_last, battery, check_golden, golden
from pixfuse.group_norm.cases import CASES

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("case", "dtype", "channels_last"), golden("group_norm"))
def test_golden(case: dict[str, Any], dtype: torch.dtype, channels_last: bool) -> None:
    check_golden(pixfuse.group_norm, case, dtype, channels_last)


@pytest.mark.parametrize(("check", "case"), battery(CASES))
def test_battery(check: Any, case: Any) -> None:
    check(pixfuse.group_norm, case)


def truth(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, act: Any = None) -> Tensor:
    """The formula in float64."""
    t = x.double().reshape(x.shape[0], groups, -1)
    variance, mean = torch.var_mean(t, -1, correction=0, keepdim=True)
    y = ((t - mean) / (variance + eps).sqrt()).reshape(x.shape).movedim(1, -1)
    y = y if weight is None else y * weight.double()
    y = (y if bias is None else y + bias.double()).movedim(-1, 1)
    return F.silu(y) if act == "silu" else y


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, dy: Tensor, function: Any = pixfuse.group_norm, **params: Any
) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(leaves[0], groups, leaves[1], leaves[2], **params)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


# --- statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("mean", [500.0, -1e4])
@pytest.mark.parametrize(
    "shape", [(2, 16, 40, 40), (2, 16, 400), (1, 8, 70, 70), (2, 4, 3, 5), (3, 64), (2, 128, 9, 9)]
)
def test_large_mean(shape: tuple[int, ...], mean: float, act: str | None) -> None:
    """Field case 4: the variance survives a mean of 500 and of 10,000 deviations, and so do the gradients."""
    x, weight, bias, dy = (
        normal(*shape) + mean,
        normal(shape[1], seed=1),
        normal(shape[1], seed=2),
        normal(*shape, seed=3),
    )
    expected = gradients(x.double(), 4, weight.double(), bias.double(), dy, truth, act=act)
    for channels_last in {False, len(shape) > 2}:
        got = gradients(to_layout(x, channels_last), 4, weight, bias, dy, act=act)
        for a, b in zip(got, expected, strict=True):
            scale = max(1.0, float(b.abs().max()))
            assert float((a - b).abs().max()) < 2e-5 * scale


@pytest.mark.parametrize("channels_last", [False, True])
def test_first_element_far_out(channels_last: bool) -> None:
    """The element that the sums are taken around may be any outlier."""
    for shape, groups in (((2, 16, 24, 24), 4), ((1, 8, 64, 64), 2), ((2, 96, 50, 50), 8)):
        x = normal(*shape) + 1000
        x[:, :, 0, 0] = 0
        weight, bias, dy = normal(shape[1], seed=1), normal(shape[1], seed=2), normal(*shape, seed=3)
        expected = gradients(x.double(), groups, weight.double(), bias.double(), dy, truth)
        got = gradients(to_layout(x, channels_last), groups, weight, bias, dy)
        for a, b in zip(got, expected, strict=True):
            assert float((a - b).abs().max()) < 3e-5 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("channels_last", [False, True])
def test_pieces_of_different_levels(channels_last: bool) -> None:
    """Flat regions far apart: what one region's sums are taken around does not suit the next."""
    x = normal(2, 32, 96, 64) * 1e-3
    x[:, :, 30:60] += 100
    x[:, 16:] -= 50
    got = pixfuse.group_norm(to_layout(x, channels_last), 8)
    assert float((got - truth(x, 8)).abs().max()) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 24, 19, 19), (2, 24, 64, 40), (2, 24, 2, 2), (2, 24)])
@pytest.mark.parametrize("groups", [24, 3, 1])
def test_constant_gives_exactly_beta(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> None:
    """Field case 5."""
    for value, channels_last in itertools.product((0.3, -1e4 / 3, 3e30), (False, True)):
        x = torch.full(shape, value, dtype=torch.float64).to(dtype)
        if not x.isfinite().all():
            continue
        weight, bias = normal(24), normal(24, seed=1).to(dtype)
        y = pixfuse.group_norm(to_layout(x, channels_last and x.dim() > 2), groups, weight, bias)
        assert torch.equal(y, bias.reshape(1, -1, *[1] * (x.dim() - 2)).expand(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [3e29, 1e-25])
def test_far_from_one(scale: float, dtype: torch.dtype) -> None:
    """Field case 6: squares that overflow (or, with eps 0, vanish) do not matter, forward and backward."""
    for shape, groups in (((1, 4, 6, 6), 1), ((2, 8, 50, 60), 4)):
        x = (normal(*shape) * scale).to(dtype)
        weight, bias, dy = normal(shape[1], seed=1), normal(shape[1], seed=2), normal(*shape, seed=3).to(dtype)
        eps = 0.0 if scale < 1 else 1e-5
        expected = gradients(x.double(), groups, weight.double(), bias.double(), dy, truth, eps=eps)
        for channels_last in (False, True):
            got = gradients(to_layout(x, channels_last), groups, weight, bias, dy, eps=eps)
            for a, b in zip(got, expected, strict=True):
                assert a.isfinite().all()
                size = float(b.abs().max())
                assert float((a - b).abs().max()) <= size * (2e-5 if a.dtype == torch.float32 else 1e-2)
    x = (normal(1, 4, 6, 6).double() * 1e200).requires_grad_()
    y = pixfuse.group_norm(x, 2)
    torch.testing.assert_close(y, pixfuse.group_norm(x / 1e200, 2, eps=0.0))


def test_not_finite_spoils_its_group_only() -> None:
    for bad, channels_last in itertools.product((math.nan, math.inf), (False, True)):
        x = normal(2, 8, 12, 12)
        x[1, 5, 3, 3] = bad
        y = pixfuse.group_norm(to_layout(x, channels_last), 4)
        assert y[1, 4:6].isnan().all()
        keep = torch.ones(2, 8, dtype=torch.bool)
        keep[1, 4:6] = False
        torch.testing.assert_close(y[keep].double(), truth(x, 4)[keep], rtol=1e-5, atol=1e-5)


def test_one_element_groups() -> None:
    x = normal(3, 5, 1, 1).requires_grad_()
    bias = normal(5, seed=1)
    y = pixfuse.group_norm(x, 5, None, bias)
    assert torch.equal(y, bias.reshape(1, 5, 1, 1).expand(y.shape))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert not dx.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_far_from_zero(dtype: torch.dtype) -> None:
    bias = torch.tensor([-1e30, -300.0, -95.0, -60.0, -20.0, 0.0, 20.0, 95.0, 300.0, 1e30])
    x, dy = normal(2, 10, 3, 3).to(dtype), normal(2, 10, 3, 3, seed=1).to(dtype)
    weight = torch.ones(10)
    expected = gradients(x.double(), 5, weight.double(), bias.double(), dy, truth, act="silu")
    got = gradients(x, 5, weight, bias, dy, act="silu")
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got[0].double(), expected[0], rtol=1e-5 + eps, atol=1e-16)
    for a, b in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5 + eps, atol=1e-5 + eps)


# --- determinism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(6, 96, 48, 48), (3, 16, 160, 128), (70, 24, 3, 3)])
def test_independent_of_batch_and_threads(shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype) -> None:
    """Field cases 7 and 21, forward and backward."""
    x, dy = (to_layout(normal(*shape, seed=s).to(dtype), channels_last) for s in (0, 1))
    weight, bias = normal(shape[1], seed=2), normal(shape[1], seed=3)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(gradients(x, 8, weight, bias, dy, act="silu"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    for n in (0, 1, shape[0] - 1):
        y, dx = gradients(x[n : n + 1], 8, weight, bias, dy[n : n + 1], act="silu")[:2]
        assert torch.equal(y, results[0][0][n : n + 1])
        assert torch.equal(dx, results[0][1][n : n + 1])


# --- layouts and strides --------------------------------------------------------------------------------------


def test_layout_of_results() -> None:
    """Field case 8."""
    whole = as_channels_last(normal(2, 6, 20, 20))
    for x in (whole, whole[1:2], whole[0].unsqueeze(0)):
        for dy in (torch.ones(x.shape), as_channels_last(normal(*x.shape, seed=1)), torch.ones(()).expand(x.shape)):
            leaf = x.detach().requires_grad_()
            y = pixfuse.group_norm(leaf, 3)
            (dx,) = torch.autograd.grad(y, leaf, dy)
            assert is_channels_last(y)
            assert is_channels_last(dx)
            exact = x.double().contiguous().requires_grad_()
            expected = truth(exact, 3)
            torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
            (expected,) = torch.autograd.grad(expected, exact, dy.double())
            torch.testing.assert_close(dx.double(), expected, rtol=1e-4, atol=1e-5)


def test_any_strides() -> None:
    """Field cases 9 and 22: six layouts, steps, an expanded image; nothing is written outside."""
    x = normal(2, 5, 7, 9)
    expected = pixfuse.group_norm(x, 5, act="silu")
    for order in itertools.permutations(range(4)):
        back = [order.index(d) for d in range(4)]
        torch.testing.assert_close(
            pixfuse.group_norm(x.permute(order).contiguous().permute(back), 5, act="silu"), expected
        )
    base = normal(2, 15, 7, 18)
    before = base.clone()
    view = base[:, ::3, :, 1::2]
    torch.testing.assert_close(pixfuse.group_norm(view, 5), pixfuse.group_norm(view.contiguous(), 5))
    assert torch.equal(base, before)
    flat = x[:, :1, :1].expand(2, 5, 7, 9)
    torch.testing.assert_close(pixfuse.group_norm(flat, 5), pixfuse.group_norm(flat.contiguous(), 5))
    weight = normal(10)[::2]
    torch.testing.assert_close(pixfuse.group_norm(x, 5, weight), pixfuse.group_norm(x, 5, weight.contiguous()))


# --- dtypes and masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_parameters_of_another_dtype(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Field cases 12 and 14: read as what they are; gradients in their own dtype, to one rounding."""
    for bias_dtype in DTYPES:
        x, dy = (normal(2, 6, 40, 32, seed=s).to(x_dtype) for s in (0, 1))
        weight, bias = normal(6, seed=2).to(weight_dtype), normal(6, seed=3).to(bias_dtype)
        got = gradients(x, 3, weight, bias, dy, act="silu")
        expected = gradients(x.double(), 3, weight.double(), bias.double(), dy, truth, act="silu")
        for a, b, dtype in zip(got, expected, (x_dtype, x_dtype, weight_dtype, bias_dtype), strict=True):
            assert a.dtype == dtype
            eps = max(torch.finfo(dtype).eps, 1e-5 if x_dtype != torch.float64 else 1e-11)
            torch.testing.assert_close(a.double(), b, rtol=eps, atol=eps)


def test_sums_over_many_elements() -> None:
    """Field case 12: parameter gradients over 1e5 16-bit elements are right to one rounding."""
    x = as_channels_last(normal(1, 4, 250, 400).half())
    dy = (normal(*x.shape, seed=1) + 0.5).half()
    for image in (x, x.contiguous()):
        got = gradients(image, 2, torch.ones(4), torch.zeros(4), dy)
        expected = gradients(x.double(), 2, torch.ones(4).double(), torch.zeros(4).double(), dy, truth)
        for a, b in zip(got[2:], expected[2:], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 5, 5), (2, 8, 80, 60)])
def test_exactly_the_gradients_asked(shape: tuple[int, ...], channels_last: bool) -> None:
    """Field case 16."""
    x, weight, bias, dy = normal(*shape), normal(8, seed=1), normal(8, seed=2), normal(*shape, seed=3)
    full = gradients(to_layout(x, channels_last), 2, weight, bias, dy, act="silu")[1:]
    for mask in itertools.product((False, True), repeat=3):
        leaves = [
            t.detach().requires_grad_(m) for t, m in zip((to_layout(x, channels_last), weight, bias), mask, strict=True)
        ]
        y = pixfuse.group_norm(leaves[0], 2, leaves[1], leaves[2], act="silu")
        assert y.requires_grad == any(mask)
        if any(mask):
            y.backward(dy)
        for leaf, wanted, gradient in zip(leaves, mask, full, strict=True):
            assert (leaf.grad is not None) == wanted
            if wanted:
                torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=0)


def test_only_what_is_needed_is_computed() -> None:
    x, stats = normal(2, 4, 3, 3), torch.ones(2, 2)
    call = torch.ops.pixfuse.group_norm_backward
    for needs in itertools.product((False, True), repeat=3):
        sizes = [t.numel() for t in call(x, x, stats, stats, None, None, 2, 0, False, *needs)]
        assert sizes == [x.numel() * needs[0], 4 * needs[1], 4 * needs[2]]


def test_third_order() -> None:
    """Field case 15, one order further."""
    x, weight, bias = (t.double() for t in (normal(2, 4, 3, 2), normal(4, seed=1), normal(4, seed=2)))

    def third(function: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        value = function(leaf, 2, weight, bias, act="silu")
        for power in (3, 2, 2):
            (value,) = torch.autograd.grad((value**power).sum(), leaf, create_graph=True)
        return value

    torch.testing.assert_close(third(pixfuse.group_norm), third(truth))


# --- shapes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 7, 24, 100, 384, 1000])
@pytest.mark.parametrize("channels_last", [False, True])
def test_any_channels_and_groups(channels: int, channels_last: bool) -> None:
    """Field case 23."""
    divisors = [g for g in range(1, channels + 1) if channels % g == 0]
    for groups in {1, channels, divisors[len(divisors) // 2]}:
        for size in ((1, 1), (3, 5), (37, 2)):
            x, dy = normal(2, channels, *size), normal(2, channels, *size, seed=3)
            weight, bias = normal(channels, seed=1), normal(channels, seed=2)
            got = gradients(to_layout(x, channels_last), groups, weight, bias, dy, act="silu", eps=1e-2)
            expected = gradients(x.double(), groups, weight.double(), bias.double(), dy, truth, act="silu", eps=1e-2)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 3),
    per_group=st.integers(1, 9),
    groups=st.integers(1, 9),
    spatial=st.lists(st.integers(1, 12), max_size=3),
    act=st.sampled_from([None, "silu"]),
    affine=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from(DTYPES),
    channels_last=st.booleans(),
    eps=st.sampled_from([1e-2, 0.5]),
)
def test_any_shape(
    batch: int,
    per_group: int,
    groups: int,
    spatial: list[int],
    act: str | None,
    affine: tuple[bool, bool],
    dtype: torch.dtype,
    channels_last: bool,
    eps: float,
) -> None:
    channels = per_group * groups
    x, dy = (normal(batch, channels, *spatial, seed=s).to(dtype) for s in (0, 1))
    x = as_channels_last(x) if channels_last else x
    weight, bias = (normal(channels, seed=2 + i) if given else None for i, given in enumerate(affine))
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    named = dict(
        zip([n for n, t in (("x", x), ("weight", weight), ("bias", bias)) if t is not None], leaves, strict=True)
    )
    y = pixfuse.group_norm(num_groups=groups, eps=eps, act=act, **named)  # type: ignore[arg-type]
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    exact = {k: t.detach().double().requires_grad_() for k, t in named.items()}
    y = truth(groups=groups, eps=eps, act=act, **exact)
    expected = [y, *torch.autograd.grad(y, list(exact.values()), dy.double())]
    for a, b in zip(found, expected, strict=True):
        tol = 2 * max(torch.finfo(a.dtype).eps, 1e-12 if dtype == torch.float64 else 1e-5)
        torch.testing.assert_close(a.detach().double(), b.detach(), rtol=tol, atol=tol * 5)
    assert is_channels_last(found[0]) == is_channels_last(x)


def test_no_elements() -> None:
    """Field case 25: an empty batch and no channels give empty results and zero gradients."""
    for shape in ((0, 3, 5, 4), (2, 0, 4, 4), (0, 6), (2, 0)):
        x, weight = torch.randn(shape, requires_grad=True), torch.ones(shape[1], requires_grad=True)
        y = pixfuse.group_norm(x, 3, weight, act="silu")
        assert y.shape == shape
        y.sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert x.grad.shape == shape
        assert weight.grad.shape == weight.shape
        assert not weight.grad.any()


# --- the pair -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("channels_last", [False, True])
def test_round_before_act_equals_the_pair(channels_last: bool, dtype: torch.dtype) -> None:
    """Field case 34: with the switch the fused op rounds where the pair does; without it, it does not."""
    for shape in ((2, 16, 24, 24), (1, 32, 60, 64)):
        x = to_layout((normal(*shape) * 3).to(dtype), channels_last)
        weight, bias = normal(shape[1], seed=1) * 2, normal(shape[1], seed=2)
        pair = F.silu(pixfuse.group_norm(x, 4, weight, bias))
        fused = pixfuse.group_norm(x, 4, weight, bias, act="silu", round_before_act=True)
        plain = pixfuse.group_norm(x, 4, weight, bias, act="silu")
        exact = truth(x, 4, weight, bias, act="silu")
        # The exponentials differ in the last bit of float32, which now and then decides a rounding.
        assert float((pair == fused).double().mean()) > (0.99 if dtype != torch.float32 else 0.3)
        torch.testing.assert_close(fused, pair, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        if dtype != torch.float32:
            assert float((plain == pair).double().mean()) < 0.95
            assert float((plain - exact).square().mean()) < float((pair - exact).square().mean())


def test_round_before_act_gradient() -> None:
    x, dy = normal(2, 8, 12, 12).bfloat16(), normal(2, 8, 12, 12, seed=1).bfloat16()
    weight, bias = normal(8, seed=2), normal(8, seed=3)
    got = gradients(x, 2, weight, bias, dy, act="silu", round_before_act=True)
    expected = gradients(x.double(), 2, weight.double(), bias.double(), dy, truth, act="silu")
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.03, atol=0.02)


# --- refusals -------------------------------------------------------------------------------------------------

X = torch.zeros(2, 6, 4, 4)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, "group_norm: x must be a tensor, got list"),
    ({"x": X.int()}, TypeError, "x must be float64, float32, bfloat16 or float16, got int32 of"),
    ({"x": X.to(torch.complex64)}, TypeError, "x must be float64"),
    ({"x": X.to_sparse()}, TypeError, r"x must be a strided \(dense\) tensor"),
    ({"x": torch.zeros(6)}, ValueError, r"x must be 2-D or 3-D or 4-D or 5-D .*, got 1-D of shape \[6\]"),
    ({"x": torch.zeros(1, 6, 1, 1, 1, 1)}, ValueError, "x must be 2-D .*, got 6-D"),
    ({"x": torch.zeros(2, 6, 0, 4)}, ValueError, r"x must have no empty spatial axis, got shape \[2, 6, 0, 4\]"),
    ({"num_groups": 0}, ValueError, "num_groups must be at least 1, got 0"),
    ({"num_groups": -2}, ValueError, "num_groups must be at least 1, got -2"),
    ({"num_groups": 4}, ValueError, "num_groups must divide the 6 channels of x, got 4"),
    ({"num_groups": 2.0}, TypeError, "num_groups must be an int, got 2.0"),
    ({"num_groups": True}, TypeError, "num_groups must be an int, got True"),
    ({"weight": 1.0}, TypeError, "weight must be a tensor, got float"),
    ({"weight": torch.zeros(6, dtype=torch.long)}, TypeError, "weight must be float64"),
    ({"weight": torch.zeros(2)}, ValueError, r"weight must have shape \[6\] \(the channels of x\), got shape \[2\]"),
    ({"bias": torch.zeros(6, 1)}, ValueError, r"bias must have shape \[6\]"),
    ({"bias": torch.zeros(6, device="meta")}, ValueError, r"bias must be on the device of x \(cpu\), got meta"),
    ({"eps": -1e-5}, ValueError, "eps must be a finite number of at least 0, got -1e-05"),
    ({"eps": math.inf}, ValueError, "eps must be a finite number"),
    ({"eps": math.nan}, ValueError, "eps must be a number, got nan"),
    ({"eps": "1"}, TypeError, "eps must be a number, got '1'"),
    ({"act": "relu"}, ValueError, "act must be None or 'silu', got 'relu'"),
    ({"act": 1}, TypeError, "act must be None or 'silu', got 1"),
    ({"round_before_act": 1}, TypeError, "round_before_act must be True or False, got 1"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pixfuse.group_norm(**{"x": X, "num_groups": 3, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"), [(a, m) for a, _, m in REFUSED if isinstance(a.get("x", X), Tensor) and "eps" not in a]
)
def test_refusals_compiled(arguments: dict[str, Any], message: str) -> None:
    """Field case 25: the same words under compile."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda: pixfuse.group_norm(**{"x": X, "num_groups": 3, **arguments}), backend="aot_eager")
    with pytest.raises(Exception, match=message):
        compiled()


def test_refusals_of_the_bare_operator_under_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        x = mode.from_tensor(X)
        with pytest.raises(ValueError, match="num_groups must divide the 6 channels of x, got 4"):
            torch.ops.pixfuse.group_norm(x, None, None, 4, 1e-5, 0, False)


def test_numpy_numbers_are_numbers() -> None:
    got = pixfuse.group_norm(normal(2, 6, 4, 4), np.int64(3), eps=np.float32(0.5))
    assert torch.equal(got, pixfuse.group_norm(normal(2, 6, 4, 4), 3, eps=0.5))


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda f, w, xs: torch.vmap(f)(w, xs),
    "vmap of w": lambda f, w, xs: torch.vmap(f, (0, None))(w, xs[0]),
    "vmap of x": lambda f, w, xs: torch.vmap(f, (None, 0))(w[0], xs),
    "vmap of grad": lambda f, w, xs: torch.vmap(torch.func.grad(lambda w, x: f(w, x).square().sum()))(w, xs),
    "grad of vmap": lambda f, w, xs: torch.func.grad(lambda w: torch.vmap(f)(w, xs).square().sum())(w),
    "vmap of jvp": lambda f, w, xs: torch.vmap(lambda w, x: torch.func.jvp(lambda x: f(w, x), (x,), (x,))[1])(w, xs),
    "vmap of vmap": lambda f, w, xs: torch.vmap(torch.vmap(f, (0, None)), (None, 0))(w, xs),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_what_is_recorded(transform: str) -> None:
    """The tensors inside torch.func's transforms require gradients of the ordinary kind too."""
    w = normal(3, 6).double().requires_grad_()
    xs = torch.stack([normal(2, 6, 3, 3).double()] * 3).requires_grad_()

    def results(f: Any) -> list[Tensor]:
        y = TRANSFORMS[transform](f, w, xs)
        return [y, *torch.autograd.grad(y.square().sum(), [w, xs])]

    got = results(lambda w, x: pixfuse.group_norm(x, 3, w, act="silu"))
    torch.testing.assert_close(got, results(lambda w, x: F.silu(F.group_norm(x, 3, w))))
