"""bias_act: golden vectors, the battery, worked numbers, field cases and every refusal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pixfuse
from pixfuse._shared.testing import battery, check_golden, golden
from pixfuse.bias_act.cases import CASES
from pixfuse.bias_act.reference import ACTIVATIONS

NAMES = [a.name for a in ACTIVATIONS]


@pytest.mark.parametrize(("case", "dtype", "channels_last"), golden("bias_act"))
def test_golden(case: dict[str, Any], dtype: torch.dtype, channels_last: bool) -> None:
    check_golden(pixfuse.bias_act, case, dtype, channels_last)


@pytest.mark.parametrize(("check", "case"), battery(CASES))
def test_battery(check: Any, case: Any) -> None:
    check(pixfuse.bias_act, case)


WORKED = {
    "linear": (-2, -0.5, 0.5, 2),
    "relu": (0, 0, 0.707107, 2.828427),
    "lrelu": (-0.565685, -0.141421, 0.707107, 2.828427),
    "tanh": (-0.964028, -0.462117, 0.462117, 0.964028),
    "sigmoid": (0.119203, 0.377541, 0.622459, 0.880797),
    "elu": (-0.864665, -0.393469, 0.5, 2),
    "selu": (-1.520166, -0.691758, 0.52535, 2.101402),
    "softplus": (0.126928, 0.474077, 0.974077, 2.126928),
    "swish": (-0.337157, -0.266962, 0.440145, 2.49127),
}


@pytest.mark.parametrize("act", NAMES)
def test_worked_numbers_of_compat(act: str) -> None:
    y = pixfuse.bias_act(torch.tensor([[-2, -0.5, 0.5, 2]]), act=act)
    torch.testing.assert_close(y, torch.tensor([WORKED[act]]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("act", NAMES)
def test_far_from_zero(act: str, dtype: torch.dtype) -> None:
    """Saturated values stay finite and right, and non-finite ones propagate as in the definition."""
    t = torch.tensor([-1e30, -300.0, -90.0, -30.0, -1e-6, 1e-6, 30.0, 80.0], dtype=dtype)
    truth = ACTIVATIONS[NAMES.index(act)].value(t.double(), 0.2)
    got = pixfuse.bias_act(t, act=act, gain=1).double()
    torch.testing.assert_close(got, truth, rtol=1e-6, atol=1e-37)
    assert pixfuse.bias_act(torch.tensor([math.nan], dtype=dtype), act=act, clamp=1).isnan().all()
    assert pixfuse.bias_act(torch.tensor([math.inf], dtype=dtype), act=act, clamp=1, gain=1) == 1


def test_derivatives_at_the_kinks() -> None:
    expected = {"relu": 0.0, "lrelu": 0.2, "elu": 1.0, "selu": 1.0507009873554805 * 1.6732632423543773}
    for act, slope in expected.items():
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        pixfuse.bias_act(x, act=act, gain=1).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, slope))
    x = torch.tensor([0.5, 0.75, 1.0], requires_grad=True)
    pixfuse.bias_act(x, act="relu", gain=1, clamp=0.75).sum().backward()
    assert x.grad.tolist() == [1, 0, 0]


def test_nothing_to_do_returns_x_itself() -> None:
    x = torch.randn(2, 3)
    assert pixfuse.bias_act(x, clamp=math.inf) is x


def test_never_changes_its_input() -> None:
    x, b = torch.randn(2, 3, 4, 4), torch.randn(3)
    before = x.clone(), b.clone()
    pixfuse.bias_act(x, b, act="lrelu", clamp=0.5)
    assert torch.equal(x, before[0])
    assert torch.equal(b, before[1])


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("b_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bias_of_another_dtype(x_dtype: torch.dtype, b_dtype: torch.dtype) -> None:
    """Field case 14: read as what it is; each gradient has the dtype of its tensor."""
    x = torch.linspace(-2, 2, 24).reshape(2, 3, 4).to(x_dtype).requires_grad_()
    b = torch.tensor([0.25, -1.5, 3.0]).to(b_dtype).requires_grad_()
    y = pixfuse.bias_act(x, b, act="swish")
    truth = pixfuse.bias_act(x.detach().double(), b.detach().double(), act="swish")
    assert y.dtype == x_dtype
    eps = torch.finfo(x_dtype).eps
    torch.testing.assert_close(y.double(), truth, rtol=eps, atol=eps)
    y.sum().backward()
    assert x.grad.dtype == x_dtype
    assert b.grad.dtype == b_dtype


@pytest.mark.parametrize("channels_last", [False, True])
def test_bias_gradient_over_many_elements(channels_last: bool) -> None:
    """Field case 12: a sum of 1e5 16-bit terms is right to one rounding."""
    x = torch.zeros(1, 2, 250, 400, dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    b = torch.zeros(2, requires_grad=True)
    dy = (torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) + 0.5).half()
    pixfuse.bias_act(x, b).backward(dy)
    torch.testing.assert_close(b.grad.double(), dy.double().sum((0, 2, 3)), rtol=1e-6, atol=0)


def test_many_shapes_of_zero_elements() -> None:
    for shape, size in (((0, 3, 5, 4), 3), ((2, 0, 4, 4), 0), ((2, 3, 0, 4), 3)):
        x, b = torch.randn(shape, requires_grad=True), torch.randn(size, requires_grad=True)
        y = pixfuse.bias_act(x, b, act="swish")
        assert y.shape == shape
        y.sum().backward()
        assert x.grad.shape == shape
        assert b.grad.shape == (size,)
        assert not b.grad.any()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    data=st.data(),
    act=st.sampled_from(NAMES),
    gain=st.sampled_from([None, 0.0, -1.5, 2.0]),
    clamp=st.sampled_from([None, 0, 0.5]),
    channels_last=st.booleans(),
)
def test_any_shape_and_axis(shape: list[int], data: Any, act: str, gain: Any, clamp: Any, channels_last: bool) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last and x.dim() > 2 else x
    b = torch.linspace(-1, 1, shape[dim])
    y = pixfuse.bias_act(x, b, dim=dim, act=act, gain=gain, clamp=clamp)
    a = ACTIVATIONS[NAMES.index(act)]
    t = x.double() + b.double().reshape([-1 if d == dim else 1 for d in range(x.dim())])
    v = a.value(t, a.def_alpha) * (a.def_gain if gain is None else gain)
    v = v if clamp is None else v.clamp(-clamp, clamp)
    torch.testing.assert_close(y.double(), v, rtol=2e-6, atol=2e-6)
    assert y.stride() == x.stride()


X = torch.zeros(2, 3, 4, 4)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, "bias_act: x must be a tensor, got list"),
    (
        {"x": torch.zeros(2, 3, dtype=torch.int32)},
        TypeError,
        r"x must be float64, float32, bfloat16 or float16, got int32 of",
    ),
    ({"x": torch.zeros(2, 3, dtype=torch.complex64)}, TypeError, "x must be float64"),
    ({"x": torch.zeros(2, 3).to_sparse()}, TypeError, r"x must be a strided \(dense\) tensor"),
    ({"b": 3.0}, TypeError, "b must be a tensor, got float"),
    ({"b": torch.zeros(3, dtype=torch.long)}, TypeError, "b must be float64"),
    ({"b": torch.zeros(4)}, ValueError, r"b must have shape \[3\] \(the size of x along dim\), got shape \[4\]"),
    ({"b": torch.zeros(3, 1)}, ValueError, r"b must have shape \[3\]"),
    ({"b": torch.zeros(3, device="meta")}, ValueError, r"b must be on the device of x \(cpu\), got meta"),
    ({"b": torch.zeros(3), "dim": -1}, ValueError, r"dim must be from 0 to 3 \(x is 4-D\), got -1"),
    ({"b": torch.zeros(3), "dim": 4}, ValueError, "dim must be from 0 to 3"),
    ({"b": torch.zeros(3), "dim": 1.0}, TypeError, "dim must be an int, got 1.0"),
    ({"b": torch.zeros(3), "dim": True}, TypeError, "dim must be an int, got True"),
    ({"dim": "q"}, TypeError, "dim must be an int, got 'q'"),
    ({"dim": 10**30}, ValueError, "dim must be at most 2147483647 in magnitude"),
    ({"gain": 10**400}, ValueError, "gain must fit in a float"),
    ({"x": torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)}, TypeError, "got a nested tensor"),
    ({"act": "gelu"}, ValueError, "act must be one of linear, relu, .*, got 'gelu'"),
    ({"act": None}, TypeError, "act must be one of linear"),
    ({"alpha": "0.2"}, TypeError, "alpha must be a number, got '0.2'"),
    ({"gain": math.nan}, ValueError, "gain must be a number, got nan"),
    ({"gain": torch.ones(())}, TypeError, "gain must be a number"),
    ({"clamp": -1}, ValueError, "clamp must be None or at least 0, got -1"),
    ({"clamp": math.nan}, ValueError, "clamp must be a number, got nan"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"x": X, **arguments}
    with pytest.raises(error, match=message):
        pixfuse.bias_act(**call)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(a, m) for a, _, m in REFUSED if isinstance(a.get("x", X), torch.Tensor) and "gain" not in a],
)
def test_refusals_compiled(arguments: dict[str, Any], message: str) -> None:
    """Field case 25: the same words under compile."""
    call = {"x": X, **arguments}
    torch._dynamo.reset()
    compiled = torch.compile(lambda: pixfuse.bias_act(**call), backend="aot_eager")
    with pytest.raises(Exception, match=message):
        compiled()


def test_refusals_of_the_bare_operator_under_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        x, b = mode.from_tensor(X), mode.from_tensor(torch.zeros(5))
        with pytest.raises(ValueError, match=r"b must have shape \[3\]"):
            torch.ops.pixfuse.bias_act(x, b, 1, 0, 0.0, 1.0, -1.0)


def test_numpy_numbers_are_numbers() -> None:
    y = pixfuse.bias_act(X + 1, torch.ones(3), dim=np.int64(1), act="lrelu", gain=np.float32(0.5), clamp=np.int32(2))
    assert torch.equal(y, torch.ones_like(X))
