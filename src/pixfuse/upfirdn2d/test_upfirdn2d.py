from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pixfuse
from pixfuse import downsample2d, filter2d, setup_filter, upfirdn2d, upsample2d
from pixfuse._shared.layout import is_channels_last, to_layout
from pixfuse._shared.testing import GOLDEN, battery, check_golden, golden, golden_cases
from pixfuse.upfirdn2d import reference
from pixfuse.upfirdn2d.cases import CASES

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "channels_last")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def laid_out(x: Tensor, layout: str) -> Tensor:
    return to_layout(x, layout == "channels_last")


# --- golden numbers and the battery ---------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "dtype", "channels_last"), golden("upfirdn2d"))
def test_golden(case: dict[str, Any], dtype: torch.dtype, channels_last: bool) -> None:
    check_golden(lambda x, f=None, **params: upfirdn2d(x, f, **params), case, dtype, channels_last)


@pytest.mark.parametrize("case", golden_cases("setup_filter"), ids=lambda case: case["id"])
def test_golden_setup_filter(case: dict[str, Any]) -> None:
    with np.load(GOLDEN / case["file"]) as z:
        tensors: dict[str, Any] = {k: torch.from_numpy(z[array]) for k, array in case["inputs"].items()}
        before = {k: t.clone() for k, t in tensors.items()}
        y = setup_filter(**tensors, **case["params"])
        truth = torch.from_numpy(z[case["output"]])
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), truth, rtol=case["tol"]["float32"], atol=0)
    for k, t in tensors.items():
        assert torch.equal(t, before[k])


@pytest.mark.parametrize(("check", "case"), battery(CASES))
def test_battery(check: Any, case: Any) -> None:
    check(upfirdn2d, case)


# --- numbers worked out by hand -------------------------------------------------------------------------------

ROW, TAPS = [[1, 2, 3]], [[1, 2, 4]]
WORKED = [
    (ROW, TAPS, {}, [[11]]),
    (ROW, TAPS, {"flip_filter": True}, [[17]]),
    (ROW, TAPS, {"padding": [2, 2, 0, 0]}, [[1, 4, 11, 14, 12]]),
    (ROW, TAPS, {"padding": [2, 0]}, [[1, 4, 11, 14, 12]]),
    (ROW, TAPS, {"padding": [2, 2, 0, 0], "flip_filter": True}, [[4, 10, 17, 8, 3]]),
    (ROW, None, {"up": [2, 1]}, [[1, 0, 2, 0, 3, 0]]),
    (ROW, None, {"up": [2, 1], "padding": [-1, 1, 0, 0]}, [[0, 2, 0, 3, 0, 0]]),
    (ROW, TAPS, {"up": [2, 1], "padding": [2, 2, 0, 0]}, [[1, 2, 6, 4, 11, 6, 12, 0]]),
    (ROW, TAPS, {"down": [2, 1], "padding": [2, 2, 0, 0]}, [[1, 11, 12]]),
    (ROW, TAPS, {"up": [3, 1], "down": [2, 1], "padding": [1, 1, 0, 0]}, [[2, 2, 8, 6, 0]]),
    ([[1, 2], [3, 4]], [1, 2], {"padding": 1, "gain": 4}, [[4, 16, 16], [20, 72, 64], [24, 80, 64]]),
    (ROW, [3], {}, [[9, 18, 27]]),  # separable: one tap acts twice
    (ROW, [3], {"gain": -1}, [[-9, -18, -27]]),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(("x", "f", "arguments", "truth"), WORKED)
def test_worked(x: Any, f: Any, arguments: Any, truth: Any, dtype: torch.dtype, layout: str) -> None:
    image = laid_out(torch.tensor(x, dtype=dtype).expand(2, 3, -1, -1).clone(), layout)
    taps = None if f is None else torch.tensor(f, dtype=torch.float32)
    y = upfirdn2d(image, taps, **arguments)
    assert torch.equal(y, torch.tensor(truth, dtype=dtype).expand_as(y))


@pytest.mark.parametrize("separable", [False, True])
def test_worked_helpers(separable: bool) -> None:
    f = setup_filter([1, 3, 3, 1], separable=separable)
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    up = [
        [0.5625, 0.9375, 1.3125, 1.125],
        [1.125, 1.75, 2.25, 1.875],
        [1.875, 2.75, 3.25, 2.625],
        [1.6875, 2.4375, 2.8125, 2.25],
    ]
    assert upsample2d(x, f).tolist() == [[up]]
    assert upfirdn2d(x, f, up=2, padding=[2, 1, 2, 1]).mul(4).tolist() == [[up]]
    assert filter2d(x, f).tolist() == [[[[0.4375, 0.75], [0.84375, 1.40625]]]]
    ramp = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert downsample2d(ramp, f).tolist() == [[[[2.734375, 3.9375], [7.546875, 8.75]]]]


def test_helpers_without_filter() -> None:
    x = torch.ones(1, 1, 2, 2)
    assert upsample2d(x, None).tolist() == [[[[0, 0, 0, 0], [0, 4, 0, 4], [0, 0, 0, 0], [0, 4, 0, 4]]]]
    ramp = torch.arange(25.0).reshape(1, 1, 5, 5)
    assert torch.equal(downsample2d(ramp, None), ramp[:, :, :4:2, :4:2])
    assert torch.equal(filter2d(ramp, None), ramp)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("padding", [0, [1, -1, 2, 0]])
def test_helpers_sizes(k: int, padding: Any) -> None:
    f, x = torch.ones(k, k + 1), torch.ones(1, 1, 9, 11)
    x0, x1, y0, y1 = padding or [0, 0, 0, 0]
    assert filter2d(x, f, padding=padding).shape[2:] == (9 + y0 + y1, 11 + x0 + x1)
    assert upsample2d(x, f, [2, 3], padding=padding).shape[2:] == (9 * 3 + y0 + y1, 11 * 2 + x0 + x1)
    assert downsample2d(x, f, [2, 3], padding=padding).shape[2:] == ((9 + y0 + y1) // 3, (11 + x0 + x1) // 2)


# --- against a direct loop ------------------------------------------------------------------------------------


def direct(x: Any, f: Any, up: Any, down: Any, pad: Any, flip: bool, gain: float) -> Any:
    """The definition, output by output and tap by tap."""
    n, c, height, width = x.shape
    fh, fw = f.shape
    out_h = (height * up[1] + pad[2] + pad[3] - fh) // down[1] + 1
    out_w = (width * up[0] + pad[0] + pad[1] - fw) // down[0] + 1
    y = np.zeros((n, c, out_h, out_w))
    for i, j, a, b in itertools.product(range(out_h), range(out_w), range(fh), range(fw)):
        r = i * down[1] + (a if flip else fh - 1 - a) - pad[2]
        s = j * down[0] + (b if flip else fw - 1 - b) - pad[0]
        if r % up[1] == 0 and s % up[0] == 0 and 0 <= r < height * up[1] and 0 <= s < width * up[0]:
            y[:, :, i, j] += gain * f[a, b] * x[:, :, r // up[1], s // up[0]]
    return y


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    def axis() -> tuple[int, int, int, int, int, int]:
        size, k = draw(st.integers(1, 9)), draw(st.integers(1, 6))
        up, down = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        before = draw(st.integers(-6, 8))
        least = k - size * up - before  # so that one output is left
        after = draw(st.integers(max(least, -6), max(least, -6) + 9))
        return size, k, up, down, before, after

    width, fw, up_x, down_x, x0, x1 = axis()
    height, fh, up_y, down_y, y0, y1 = axis()
    kind = draw(st.sampled_from(["none", "separable", "full"]))
    if kind == "none":
        y1, x1 = y1 + fh, x1 + fw
    if kind == "separable":
        fh, x1, y1 = fw, x1 + fw, y1 + fw
    return {
        "shape": (draw(st.integers(1, 2)), draw(st.integers(1, 3)), height, width),
        "filter": {"none": None, "separable": (fw,), "full": (fh, fw)}[kind],
        "up": [up_x, up_y],
        "down": [down_x, down_y],
        "padding": [x0, x1, y0, y1],
        "flip_filter": draw(st.booleans()),
        "gain": draw(st.sampled_from([1, -1.5, 0.25])),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@given(p=problems())
@settings(deadline=None, max_examples=80)
def test_direct_loop(p: dict[str, Any], layout: str) -> None:
    rng = torch.Generator().manual_seed(p["seed"])
    x = torch.randint(-8, 8, p["shape"], generator=rng, dtype=torch.float64)
    f = None if p["filter"] is None else torch.randint(-4, 5, p["filter"], generator=rng).float()
    full = torch.ones(1, 1) if f is None else f if f.dim() == 2 else f[:, None] * f
    scalars = (p["flip_filter"], p["gain"])
    truth = torch.from_numpy(direct(x.numpy(), full.numpy(), p["up"], p["down"], p["padding"], *scalars))
    for dtype in (torch.float64, torch.float32):
        image = laid_out(x.to(dtype), layout).requires_grad_()
        y = upfirdn2d(image, f, p["up"], p["down"], p["padding"], *scalars)
        assert torch.equal(y.double(), truth)
        dy = torch.randint(-4, 5, y.shape, generator=rng).to(dtype)
        (dx,) = torch.autograd.grad(y, image, dy)
        # <A x, dy> = <x, A' dy> for all x and dy, exactly in these small numbers
        assert (truth * dy.double()).sum() == (x * dx.double()).sum()


# --- derivatives ----------------------------------------------------------------------------------------------

GEOMETRIES = [
    {"up": 2, "padding": [2, 1, 2, 1], "gain": 4},
    {"down": 2, "padding": 1},
    {"padding": [2, 1, 2, 1], "flip_filter": True},
    {"up": [3, 2], "down": [1, 2], "padding": [2, -1, -2, 3], "gain": -1.5},
]
FILTERS = [None, (4,), (2, 5)]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward-mode rules
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", FILTERS)
@pytest.mark.parametrize("arguments", GEOMETRIES)
def test_gradcheck(arguments: Any, shape: Any, layout: str) -> None:
    torch.manual_seed(0)
    x = laid_out(torch.randn(1, 2, 4, 5, dtype=torch.float64), layout).requires_grad_()
    f = None if shape is None else torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = (x,) if f is None else (x, f)

    def call(x: Tensor, f: Tensor | None = None) -> Tensor:
        return upfirdn2d(x, f, **arguments)

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def test_third_order() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    f = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def first(x: Tensor, f: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(upfirdn2d(x, f, 2, padding=1).pow(3).sum(), (x, f), create_graph=True)

    assert torch.autograd.gradgradcheck(first, (x, f), fast_mode=True)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=2))[1:])
def test_only_the_gradients_asked_for(wanted: tuple[bool, bool]) -> None:
    x = torch.randn(2, 3, 6, 5, requires_grad=wanted[0])
    f = torch.randn(3, 2, requires_grad=wanted[1])
    upfirdn2d(x, f, 2).sum().backward()
    assert (x.grad is not None, f.grad is not None) == wanted
    assert not upfirdn2d(x.detach(), f.detach()).requires_grad


@pytest.mark.parametrize("shape", [(4,), (3, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_filter_gradient(dtype: torch.dtype, shape: Any) -> None:
    torch.manual_seed(0)
    x, f = torch.randn(2, 3, 20, 17).to(dtype), torch.randn(shape)
    taps = f.clone().requires_grad_()
    y = upfirdn2d(x, taps, 2, padding=2)
    dy = torch.randn_like(y)
    (df,) = torch.autograd.grad(y, taps, dy)
    assert df.dtype == torch.float32
    exact = f.double().requires_grad_()
    (truth,) = torch.autograd.grad(upfirdn2d(x.double(), exact, 2, padding=2), exact, dy.double())
    torch.testing.assert_close(df.double(), truth, rtol=1e-5, atol=1e-3)


# --- layouts and strides --------------------------------------------------------------------------------------

VIEWS = {
    "sliced": lambda x: x[:, ::3],
    "permuted": lambda x: x.permute(0, 1, 3, 2),
    "flipped": lambda x: x.flip(3),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "stepped": lambda x: x[:, :, 1::2, ::3],
    "odd": lambda x: x[:, 1:, 1:, 1:],
    "all-expanded": lambda x: x[:1, :1, :1, :1].expand(2, 3, 7, 9),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", FILTERS)
def test_strides(shape: Any, dtype: torch.dtype, view: str, layout: str) -> None:
    torch.manual_seed(0)
    base = laid_out(torch.randn(2, 7, 12, 13), layout).to(dtype)
    before = base.clone()
    x = VIEWS[view](base)
    f = None if shape is None else torch.randn(shape)
    dense = laid_out(x.clone(memory_format=torch.contiguous_format), "contiguous")
    truth = upfirdn2d(dense, f, [2, 1], [1, 2], [2, 1, 3, 3])
    y = upfirdn2d(x, f, [2, 1], [1, 2], [2, 1, 3, 3])
    assert is_channels_last(y) == is_channels_last(x)
    torch.testing.assert_close(y, truth)
    assert torch.equal(base, before)


def test_layout_survives_views_and_any_upstream_gradient() -> None:
    batch = torch.randn(2, 6, 20, 20).to(memory_format=torch.channels_last)
    f = setup_filter([1, 3, 3, 1])
    for x in (batch, batch[1:2], batch[0].unsqueeze(0)):
        x = x.detach().requires_grad_()
        y = upsample2d(x, f)
        assert is_channels_last(y)
        dense = torch.randn(y.shape)
        truth = torch.autograd.grad(upsample2d(x.contiguous(), f), x, dense)[0]
        for dy in (dense, dense.to(memory_format=torch.channels_last)):
            (dx,) = torch.autograd.grad(upsample2d(x, f), x, dy)
            assert is_channels_last(dx)
            torch.testing.assert_close(dx, truth)
        (dx,) = torch.autograd.grad(upsample2d(x, f), x, torch.ones(()).expand(y.shape))
        assert is_channels_last(dx)


def test_six_layouts() -> None:
    values = torch.randn(2, 5, 7, 9)
    f = torch.randn(3, 3)
    truth = upfirdn2d(values, f, 2, padding=2)
    for order in [(0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2), (3, 2, 1, 0), (1, 0, 2, 3), (2, 3, 0, 1)]:
        back = [order.index(d) for d in range(4)]
        x = values.permute(order).contiguous().permute(back)
        torch.testing.assert_close(upfirdn2d(x, f, 2, padding=2), truth)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", FILTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_a_sample_does_not_depend_on_batch_or_threads(dtype: torch.dtype, shape: Any, layout: str) -> None:
    torch.manual_seed(0)
    x = laid_out(torch.randn(3, 20, 33, 29), layout).to(dtype)
    f = None if shape is None else torch.randn(shape)
    threads = torch.get_num_threads()
    for up, down in ((2, 1), (1, 2), (1, 1)):
        whole = upfirdn2d(x, f, up, down, 3)
        for i in range(len(x)):
            assert torch.equal(upfirdn2d(x[i : i + 1], f, up, down, 3), whole[i : i + 1])
        try:
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                assert torch.equal(upfirdn2d(x, f, up, down, 3), whole)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.skipif(
    pixfuse.backend("upfirdn2d_filter_backward", torch.ones(1)) != "cpu", reason="PyTorch's own sums depend on it"
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_filter_gradient_does_not_depend_on_threads(layout: str) -> None:
    torch.manual_seed(0)
    x = laid_out(torch.randn(5, 24, 33, 29), layout)
    f = torch.randn(4, 3, requires_grad=True)
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 1):
            torch.set_num_threads(n)
            y = upfirdn2d(x, f, 2, padding=1)
            found.append(torch.autograd.grad(y, f, torch.ones_like(y) * y.detach())[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(df, found[0]) for df in found)


# --- sizes at the edge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (2, 0, 4, 4), (0, 0, 4, 4)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("taps", FILTERS)
def test_empty(taps: Any, layout: str, shape: Any) -> None:
    x = laid_out(torch.empty(shape), layout).requires_grad_()
    f = None if taps is None else torch.ones(taps, requires_grad=True)
    y = upfirdn2d(x, f, 2, padding=2)
    fw, fh = (1, 1) if f is None else (f.shape[-1], f.shape[0])
    assert y.shape == (*shape[:2], 2 * shape[2] + 5 - fh, 2 * shape[3] + 5 - fw)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert f is None or (f.grad is not None and not f.grad.any())


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_tiny_images(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.full((1, 1, *size), 3.0, dtype=dtype)
    f = setup_filter([1, 1])
    assert torch.equal(upsample2d(x, f), torch.full((1, 1, 2 * size[0], 2 * size[1]), 3.0, dtype=dtype))
    assert torch.equal(upfirdn2d(x, setup_filter([1, 3, 3, 1]), padding=3)[0, 0, 0, :1], x[0, 0, 0, :1] / 64)


def test_padding_beyond_the_filter_and_a_crop_of_everything() -> None:
    x = torch.ones(1, 1, 3, 3)
    y = upfirdn2d(x, torch.ones(2, 2), padding=[9, 1, 0, 8])
    assert y.shape == (1, 1, 10, 12)
    assert y.sum() == 4 * 9 - 2 * 3  # the first row of x is seen by one row of the filter only
    assert not upfirdn2d(x, None, padding=[-3, 1, 0, 0]).any()
    assert not upfirdn2d(x, None, padding=[-9, 9, 0, 0]).any()


def test_non_finite_values_propagate() -> None:
    x = torch.zeros(1, 1, 3, 3)
    x[0, 0, 1, 1] = float("inf")
    y = upfirdn2d(x, torch.tensor([[1.0, -1.0]]), padding=[1, 0, 0, 0])
    assert y[0, 0, 1].tolist() == [0.0, float("inf"), -float("inf")]
    x[0, 0, 1, 1] = float("nan")
    assert upfirdn2d(x, torch.ones(3), padding=1).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("separable", [False, True])
def test_sums_are_kept_in_float32(separable: bool, layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = laid_out(torch.randn(1, 3, 40, 41).to(dtype), layout)
    f = setup_filter(torch.rand(12), separable=separable)
    y, truth = upfirdn2d(x, f, padding=6), upfirdn2d(x.double(), f, padding=6)
    assert ((y.double() - truth).abs() <= 0.51 * torch.finfo(dtype).eps * truth.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("gain", [1.0, 0.7, 2.0**-12, 3e4])
@pytest.mark.parametrize("width", [256, 251])
def test_every_16_bit_number_is_read_and_rounded_right(width: int, gain: float, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[: 255 * width]
    x = x.reshape(1, 1, 255, width)
    for layout in LAYOUTS:
        image = laid_out(x.expand(1, 3, -1, -1).clone(), layout)
        y = upfirdn2d(image, None, gain=gain)
        truth = (x.float() * gain).to(dtype)
        torch.testing.assert_close(y, truth.expand_as(y), rtol=0, atol=0, equal_nan=True)


# --- arguments ------------------------------------------------------------------------------------------------

X, F = torch.ones(1, 2, 4, 5), torch.ones(3, 3)
BAD_TENSORS = [
    (1.0, F, TypeError, r"x must be a tensor, got float"),
    (X.int(), F, TypeError, r"x must be float64, float32, bfloat16 or float16, got int32 of shape \[1, 2, 4, 5\]"),
    (X.to(torch.complex64), F, TypeError, r"x must be float64, .* got complex64"),
    (X.to_sparse(), F, TypeError, r"x must be a strided \(dense\) tensor, got torch.sparse_coo"),
    (X[0], F, ValueError, r"x must be 4-D \(\[N, C, \*spatial\]\), got 3-D of shape \[2, 4, 5\]"),
    (X[:, :, :0], F, ValueError, r"x must have no empty spatial axis, got shape \[1, 2, 0, 5\]"),
    (X, [[1.0]], TypeError, r"f must be None or a float32 tensor of shape \[kh, kw\] or \[k\], got list; call setup"),
    (X, F.half(), TypeError, r"f must be None or a float32 tensor .*, got float16 of shape .*; call setup_filter"),
    (X, F.double(), TypeError, r"f must be None or a float32 tensor .*, got float64 of shape .*; call setup_filter"),
    (X.half(), F.int(), TypeError, r"f must be None or a float32 tensor .*, got int32 of shape \[3, 3\]"),
    (X, F[None], ValueError, r"f must be None or a float32 tensor .*, got float32 of shape \[1, 3, 3\]"),
    (X, F[0, 0], ValueError, r"f must be None or a float32 tensor .*, got float32 of shape \[\]"),
    (X, F[:0], ValueError, r"f must be None or a float32 tensor .*, got float32 of shape \[0, 3\]"),
    (X, F.to("meta"), ValueError, r"f must be on the device of x \(cpu\), got meta"),
]  # fmt: skip
BAD_ARGUMENTS = [
    ("up", 1.5, TypeError, "up must be an int, got 1.5"),
    ("up", True, TypeError, "up must be an int, got True"),
    ("up", torch.tensor(2), TypeError, "up must be an int, got int64 of shape"),
    ("up", 0, ValueError, "up must be at least 1, got 0"),
    ("up", [1, 2, 3], ValueError, r"up must be an int or \[x, y\], got \[1, 2, 3\]"),
    ("down", [2, -1], ValueError, "down must be at least 1, got -1"),
    ("down", None, TypeError, "down must be an int, got None"),
    ("padding", 0.5, TypeError, "padding must be an int, got 0.5"),
    ("padding", [1, 2, 3], ValueError, r"padding must be an int, \[x, y\] or \[x0, x1, y0, y1\], got \[1, 2, 3\]"),
    ("padding", [1, "2"], TypeError, "padding must be an int, got '2'"),
    ("padding", -1, ValueError, "padding must leave an upsampled image no smaller than the filter of height 3 and "
     "width 3, got height 2 and width 3"),
    ("padding", [-9, 1, 0, 0], ValueError, "got height 4 and width -3"),
    ("flip_filter", 1, TypeError, "flip_filter must be True or False, got 1"),
    ("gain", "2", TypeError, "gain must be a number, got '2'"),
    ("gain", torch.tensor(2.0), TypeError, "gain must be a number, got float32 of shape"),
    ("gain", float("nan"), ValueError, "gain must be a number, got nan"),
]  # fmt: skip
CALLS: list[Any] = [upfirdn2d, filter2d, upsample2d, downsample2d]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("x", "f", "error", "message"), BAD_TENSORS)
def test_bad_tensors(x: Any, f: Any, error: Any, message: str, call: Any) -> None:
    with pytest.raises(error, match=f"^{call.__name__}: {message}"):
        call(x, f)


@pytest.mark.parametrize(("argument", "value", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments(argument: str, value: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^upfirdn2d: .*{message}"):
        upfirdn2d(X, F, **{argument: value})


@pytest.mark.parametrize("call", CALLS[1:])
def test_bad_arguments_of_helpers_name_the_helper(call: Any) -> None:
    for argument, value in (("padding", [1]), ("gain", None), ("flip_filter", 0), ("padding", -9)):
        with pytest.raises((TypeError, ValueError), match=f"^{call.__name__}: {argument} must"):
            call(X, F, **{argument: value})


def test_checks_of_the_fake_say_the_same() -> None:
    op = torch.ops.pixfuse.upfirdn2d
    meta = X.to("meta")
    with pytest.raises(ValueError, match=r"^upfirdn2d: x must have no empty spatial axis, got shape \[1, 2, 0, 5\]"):
        op(meta[:, :, :0], None, 1, 1, 1, 1, 0, 0, 5, 1, False, 1.0)
    with pytest.raises(ValueError, match=r"^upfirdn2d: f must be on the device of x \(meta\), got cpu"):
        op(meta, F, 1, 1, 1, 1, 0, 0, 3, 2, False, 1.0)


def test_numpy_integers_and_tuples_are_fine() -> None:
    y = upfirdn2d(X, F, (np.int64(2), 1), np.int32(1), (1, 1, np.int64(0), 0), gain=np.float32(2))
    assert torch.equal(y, upfirdn2d(X, F, [2, 1], 1, [1, 1, 0, 0], gain=2))


BAD_FILTERS = [
    ({"f": "a"}, TypeError, "f must be None, a real number, or an array of them, got 'a'"),
    ({"f": [[1], [1, 2]]}, TypeError, "f must be None, a real number, or an array of them"),
    ({"f": torch.ones(2, dtype=torch.complex64)}, TypeError, "f must be None, a real number, or an array of them"),
    ({"f": []}, ValueError, r"f must have shape \[kh, kw\], \[k\] or \[\] and at least one element, got shape \[0\]"),
    ({"f": torch.ones(1, 1, 1)}, ValueError, r"f must have shape .* got shape \[1, 1, 1\]"),
    ({"f": [[1.0]], "separable": True}, ValueError, "separable must be None or False for a 2-D filter, got True"),
    ({"f": [1.0], "separable": 1}, TypeError, "separable must be True or False, got 1"),
    ({"f": [1.0], "normalize": None}, TypeError, "normalize must be True or False, got None"),
    ({"f": [1.0], "flip_filter": 0}, TypeError, "flip_filter must be True or False, got 0"),
    ({"f": [1.0], "gain": "1"}, TypeError, "gain must be a number, got '1'"),
    ({"f": [1.0], "gain": -1, "separable": True}, ValueError, "gain must be at least 0 for a separable filter, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_FILTERS)
def test_bad_filters(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^setup_filter: {message}"):
        setup_filter(**arguments)


@pytest.mark.parametrize("f", [np.ones((2, 2), np.float32), np.ones(9, np.float32), torch.ones(2, 2), torch.ones(9)])
def test_setup_filter_leaves_its_argument_alone(f: Any) -> None:
    made = setup_filter(f)
    assert (f == 1).all()
    made.zero_()
    assert (f == 1).all()
    assert setup_filter(f, normalize=False).data_ptr() != torch.as_tensor(f).data_ptr()


def test_setup_filter_forms() -> None:
    assert setup_filter([1] * 7).shape == (7, 7)
    assert setup_filter([1] * 8).shape == (8,)
    assert setup_filter(3, normalize=False).tolist() == [[9]]
    assert setup_filter(3, normalize=False, separable=True).tolist() == [3]
    assert setup_filter([1, 1], gain=-4).tolist() == [[-1, -1], [-1, -1]]
    assert setup_filter([1, 1], gain=4, separable=True).tolist() == [1, 1]
    leaf = torch.ones(2, 2, requires_grad=True)
    assert setup_filter(leaf).requires_grad


# --- composition ----------------------------------------------------------------------------------------------


def test_backend_knows_the_helpers() -> None:
    for call in CALLS:
        assert pixfuse.backend(call, X) == pixfuse.backend("upfirdn2d", X)
    assert pixfuse.backend("upsample2d", X.to("meta")) == "reference"


def test_vmap_over_images_filters_and_both() -> None:
    torch.manual_seed(0)
    x, f = torch.randn(3, 2, 4, 6, 5), torch.randn(3, 2, 3)

    def call(x: Tensor, f: Tensor) -> Tensor:
        return upfirdn2d(x, f, 2, padding=1)

    each = [[call(x[i], f[j]) for j in range(3)] for i in range(3)]
    assert torch.equal(torch.vmap(call, (0, None))(x, f[0]), torch.stack([row[0] for row in each]))
    assert torch.equal(torch.vmap(call, (2, None))(x.movedim(0, 2), f[0]), torch.stack([row[0] for row in each]))
    assert torch.equal(torch.vmap(call, (None, 0))(x[0], f), torch.stack(each[0]))
    assert torch.equal(torch.vmap(call)(x, f), torch.stack([each[i][i] for i in range(3)]))


def test_per_sample_gradients_of_the_filter() -> None:
    torch.manual_seed(0)
    x, f = torch.randn(3, 1, 2, 6, 5), torch.randn(2, 3)

    def loss(f: Tensor, x: Tensor) -> Tensor:
        return upfirdn2d(x, f, 2, padding=1).square().sum()

    found = torch.vmap(torch.func.grad(loss), (None, 0))(f, x)
    for i in range(3):
        leaf = f.clone().requires_grad_()
        loss(leaf, x[i]).backward()
        torch.testing.assert_close(found[i], leaf.grad)


def test_opcheck() -> None:
    x = torch.randn(2, 3, 5, 6, requires_grad=True)
    for shape in FILTERS:
        f = None if shape is None else torch.randn(shape, requires_grad=True)
        fw, fh = (1, 1) if f is None else (f.shape[-1], f.shape[0])
        size = (6 * 2 + 3 + 3 - fw + 1, 5 + 3 + 3 - fh + 1)
        torch.library.opcheck(torch.ops.pixfuse.upfirdn2d.default, (x, f, 2, 1, 1, 1, 3, 3, *size, False, 1.5))
    dy = torch.randn(2, 3, 4, 9, requires_grad=True)
    torch.library.opcheck(
        torch.ops.pixfuse.upfirdn2d_filter_backward.default, (x, dy, 5, 2, 2, 1, 1, 1, 1, 0, False, 1.5)
    )


def test_autocast_leaves_the_dtypes_alone() -> None:
    f = setup_filter([1, 3, 3, 1], separable=True)
    for dtype in DTYPES:
        x = torch.randn(1, 2, 6, 6, dtype=dtype, requires_grad=True)
        truth = upsample2d(x, f)
        with torch.autocast("cpu", torch.bfloat16):
            y = upsample2d(x, f)
            y.sum().backward()
        assert torch.equal(y, truth)
        assert x.grad is not None
        assert x.grad.dtype == dtype


def test_r1_penalty_through_upfirdn2d_and_bias_act() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    f, w = setup_filter([1, 3, 3, 1]), torch.randn(3, 3, 3, 3, dtype=torch.float64)

    def penalty(w: Tensor, resample: Any) -> Tensor:
        image = x.clone().requires_grad_()
        h = resample(torch.conv2d(image, w, padding=1))
        h = resample(pixfuse.bias_act(h, None, act="swish"))
        (g,) = torch.autograd.grad(h.square().sum(), image, create_graph=True)
        return g.square().sum()

    def plain(h: Tensor) -> Tensor:
        h = torch.nn.functional.pad(h, (1, 1, 1, 1))
        return torch.conv2d(h, f.double().expand(3, 1, 4, 4), stride=2, groups=3)

    leaves = [w.clone().requires_grad_() for _ in range(2)]
    penalty(leaves[0], lambda h: downsample2d(h, f)).backward()
    penalty(leaves[1], plain).backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


def test_reference_agrees_with_the_kernel() -> None:
    torch.manual_seed(0)
    x, f = torch.randn(2, 3, 9, 8), torch.randn(3, 4)
    args = (2, 1, 1, 3, 5, 0, 18, 4, False, 2.0)
    op = torch.ops.pixfuse
    torch.testing.assert_close(op.upfirdn2d(x, f, *args), reference.upfirdn2d(x, f, *args))
    dy = torch.randn(2, 3, 4, 18)
    args = (4, 3, 2, 1, 1, 3, 5, 0, False, 2.0)
    torch.testing.assert_close(
        op.upfirdn2d_filter_backward(x, dy, *args), reference.upfirdn2d_filter_backward(x, dy, *args)
    )


@pytest.mark.parametrize("direction", ["down", "up", "none"])
@pytest.mark.parametrize(("channels", "taps"), [(323, 12), (67, 16), (33, 24), (19, 24), (200, 12), (1, 24), (7, 24)])
def test_channels_last_blocks_with_few_channels_left(channels: int, taps: int, direction: str) -> None:
    """A filter that is no product, and a last block of 1 to 7 channels: this once wrote beyond its rows."""
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(2, channels, 9, 8, generator=generator).to(memory_format=torch.channels_last).requires_grad_()
    f = torch.rand(taps, taps, generator=generator)
    factors = {"down": {"down": 2}, "up": {"up": 2}, "none": {}}[direction]
    results = []
    for t in (x, x.detach().contiguous().requires_grad_()):
        y = upfirdn2d(t, f, padding=taps // 2, **factors)
        results.append((y, torch.autograd.grad(y, t, torch.ones_like(y))[0]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_step_beyond_the_image_costs_nothing() -> None:
    x = torch.randn(1, 1, 8, 8, requires_grad=True)
    y = upfirdn2d(x, torch.ones(4, 4), down=2**31 - 1)
    y.backward()
    torch.testing.assert_close(y, upfirdn2d(x, torch.ones(4, 4), down=64)[..., :1, :1])
    with pytest.raises(ValueError, match="padding must be at most 2147483647 in magnitude, got 2147483648"):
        upfirdn2d(x, None, padding=2**31)
    with pytest.raises(ValueError, match="down must be at most 2147483647 in magnitude, got 9223372036854775807"):
        upfirdn2d(x, torch.ones(4, 4), down=2**63 - 1)


def test_setup_filter_keeps_extreme_taps_in_range_and_reads_any_array() -> None:
    for scale in (1e20, 1e-30):
        torch.testing.assert_close(setup_filter([scale, scale]), torch.full((2, 2), 0.25))
    torch.testing.assert_close(setup_filter(np.array([1.0, 2.0, 1.0])[::-1]), setup_filter([1, 2, 1]))
    with pytest.raises(TypeError, match=r"setup_filter: f must be a strided \(dense\) tensor"):
        setup_filter(torch.ones(3).to_sparse())
