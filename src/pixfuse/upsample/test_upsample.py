"""Both public functions: golden vectors, the battery, PyTorch and Pillow as oracles, field cases, refusals."""

from __future__ import annotations

import itertools
import math
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pixfuse
from pixfuse._shared.layout import is_channels_last
from pixfuse._shared.library import by_definition
from pixfuse._shared.testing import as_channels_last, battery, check_golden, golden, random_like
from pixfuse.upsample.cases import INTERPOLATE_CASES, NEAREST_CASES
from pixfuse.upsample.taps import taps

MODES = {  # by rank
    3: ("nearest", "nearest-exact", "area", "linear"),
    4: ("nearest", "nearest-exact", "area", "bilinear", "bicubic", "lanczos"),
    5: ("nearest", "nearest-exact", "area", "trilinear"),
}
SMOOTH = ("linear", "bilinear", "bicubic", "trilinear")
ALL_2D: list[dict[str, Any]] = [  # every way to resize a 4-D image
    *({"mode": m} for m in ("nearest", "nearest-exact", "area")),
    *({"mode": m, "align_corners": a} for m in ("bilinear", "bicubic") for a in (False, True)),
    *({"mode": m, "antialias": True} for m in ("bilinear", "bicubic", "lanczos")),
]
IDS = ["-".join(str(v) for v in p.values()) for p in ALL_2D]


@pytest.mark.parametrize(("case", "dtype", "channels_last"), golden("upsample_nearest"))
def test_golden_upsample_nearest(case: dict[str, Any], dtype: torch.dtype, channels_last: bool) -> None:
    check_golden(pixfuse.upsample_nearest, case, dtype, channels_last)


@pytest.mark.parametrize(("case", "dtype", "channels_last"), golden("interpolate"))
def test_golden_interpolate(case: dict[str, Any], dtype: torch.dtype, channels_last: bool) -> None:
    check_golden(pixfuse.interpolate, case, dtype, channels_last)


@pytest.mark.parametrize(("check", "case"), battery(NEAREST_CASES))
def test_battery_upsample_nearest(check: Any, case: Any) -> None:
    check(pixfuse.upsample_nearest, case)


@pytest.mark.parametrize(("check", "case"), battery(INTERPOLATE_CASES))
def test_battery_interpolate(check: Any, case: Any) -> None:
    check(pixfuse.interpolate, case)


# --- oracles --------------------------------------------------------------------------------------------------


@st.composite
def resizes(draw: Any) -> tuple[list[int], dict[str, Any]]:
    rank = draw(st.sampled_from([3, 4, 4, 5]))
    largest_in, largest_out = {3: (60, 130), 4: (20, 40), 5: (8, 12)}[rank]
    spatial = [draw(st.integers(1, largest_in)) for _ in range(rank - 2)]
    params: dict[str, Any] = {"mode": draw(st.sampled_from(MODES[rank]))}
    if draw(st.booleans()):
        params["size"] = [draw(st.integers(1, largest_out)) for _ in spatial]
    else:
        factors = st.sampled_from([0.3, 0.5, 0.7, 1 / 3, 1.01, 1.2, 1.45, 1.7, 2.0, 2.6, 3]) | st.floats(0.1, 4)
        params["scale_factor"] = [max(draw(factors), 1 / n) for n in spatial]
        params["recompute_scale_factor"] = draw(st.sampled_from([None, True, False]))
    if params["mode"] in SMOOTH:
        params["align_corners"] = draw(st.sampled_from([None, True, False]))
    params["antialias"] = params["mode"] == "lanczos" or (
        params["mode"] in ("bilinear", "bicubic") and draw(st.booleans())
    )
    return spatial, params


def faults_of_torch(spatial: list[int], size: list[int], params: dict[str, Any]) -> set[str]:
    """What PyTorch 2.13 is known to get wrong of this call: its ``"value"``, its ``"gradient"``, or nothing."""
    faults: set[str] = set()
    factors = params.get("scale_factor", [])
    scaled = bool(factors) and not params["recompute_scale_factor"] and params["mode"] != "area"
    if params["antialias"] and size[-1] == 1:
        faults |= {"value"}  # reads a one-column image in the other layout
    if params["mode"].startswith("nearest"):
        faults |= {"gradient"}  # its index is computed in float32, the value's is not
        if scaled and any(out == 2 * n for n, out in zip(spatial, size, strict=True)):
            faults |= {"value"}  # doubles an axis of doubled size whatever the scale
    if scaled and any(out == n and s != 1 for n, out, s in zip(spatial, size, factors, strict=True)):
        faults |= {"value", "gradient"}  # field case 19: resamples an axis whose size does not change
    return faults


@settings(max_examples=150, deadline=None)
@given(resize=resizes(), seed=st.integers(0, 9))
def test_agrees_with_torch(resize: tuple[list[int], dict[str, Any]], seed: int) -> None:
    spatial, params = resize
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2, *spatial, dtype=torch.float64, generator=generator, requires_grad=True)
    y, stock = pixfuse.interpolate(x, **params), F.interpolate(x, **params)
    assert y.shape == stock.shape
    faults = faults_of_torch(spatial, list(y.shape[2:]), params)
    if "value" not in faults:
        torch.testing.assert_close(y, stock, rtol=1e-11, atol=1e-11)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    (dx,) = torch.autograd.grad(y, x, dy)
    if "gradient" not in faults:
        torch.testing.assert_close(dx, torch.autograd.grad(stock, x, dy)[0], rtol=1e-11, atol=1e-11)
    v = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    adjoint = (dx * v).sum(), (dy * pixfuse.interpolate(v, **params)).sum()  # the backward is the transpose, always
    torch.testing.assert_close(*adjoint, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(13, 18), (60, 11), (37, 40), (5, 1)], ids=str)
def test_agrees_with_pillow(filter: str, size: tuple[int, int]) -> None:
    Image = pytest.importorskip("PIL.Image")
    picture = np.random.default_rng(0).random((37, 21), dtype=np.float32)
    resample = getattr(Image.Resampling, filter.upper())
    theirs = torch.from_numpy(np.array(Image.fromarray(picture).resize(size[::-1], resample)))
    ours = pixfuse.interpolate(torch.from_numpy(picture)[None, None], size=size, mode=filter, antialias=True)[0, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    pixels = (picture * 128 + 64).astype(np.uint8)  # far from the ends: Pillow saturates between its two passes
    theirs = torch.from_numpy(np.array(Image.fromarray(pixels).resize(size[::-1], resample)))
    ours = pixfuse.interpolate(torch.from_numpy(pixels)[None, None], size=size, mode=filter, antialias=True)[0, 0]
    assert (ours.int() - theirs.int()).abs().max() <= 1  # and rounds there


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 70), out=st.integers(1, 70), mode=st.integers(0, 5), align=st.booleans(), antialias=st.booleans()
)
def test_tables(n: int, out: int, mode: int, align: bool, antialias: bool) -> None:
    """Weights sum to one, nothing lies outside, and the transposed table is the transposed matrix."""
    table = taps(n, out, 0.0, mode, align and mode in (2, 3), mode == 5 or (antialias and mode in (2, 3)))
    if table is None:
        assert n == out
        return

    def matrix(of: Any, columns: int) -> np.ndarray:
        dense = np.zeros((len(of.start), columns))
        for o, (start, stop) in enumerate(zip(of.start, of.stop, strict=True)):
            dense[o, start:stop] = of.weights[o, : stop - start]
        return dense

    assert (table.start >= 0).all()
    assert (table.start < table.stop).all()
    assert (table.stop <= n).all()
    np.testing.assert_allclose(table.weights.sum(1), 1, rtol=1e-12)
    np.testing.assert_array_equal(matrix(table.transposed(n), out), matrix(table, n).T)


@settings(max_examples=150, deadline=None)
@given(
    resize=resizes(),
    channels=st.sampled_from([1, 2, 3, 8, 33, 64]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    channels_last=st.booleans(),
)
def test_kernels_agree_with_the_definition(
    resize: tuple[list[int], dict[str, Any]], channels: int, dtype: torch.dtype, channels_last: bool
) -> None:
    spatial, params = resize
    x = torch.randn(2, channels, *spatial, generator=torch.Generator().manual_seed(0)).to(dtype)
    _check_against_definition(as_channels_last(x) if channels_last else x, params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(
    ("shape", "channels_last", "params"),
    [
        ((1, 1, 2, 20000), False, {"size": (3, 40000), "mode": "bilinear"}),  # longer than a piece
        ((1, 1, 2, 20000), False, {"size": (2, 9999), "mode": "bicubic"}),
        ((1, 2, 70001), False, {"size": 3, "mode": "area"}),  # a single output's taps fill more than a piece
        ((1, 2, 70000), False, {"size": 140000, "mode": "linear"}),
        ((1, 600, 3, 40), True, {"size": (6, 80), "mode": "bilinear"}),  # more channels than a piece
        ((1, 600, 3, 40), True, {"size": (2, 1), "mode": "area"}),
        ((1, 300, 3, 300), True, {"size": (3, 2), "mode": "area"}),
        ((1, 7, 3, 3000), True, {"size": (4, 1111), "mode": "bicubic", "antialias": True}),
        ((1, 700, 3, 5), True, {"size": (3, 5), "mode": "bilinear"}),
        ((1, 3, 700, 500), False, {"size": (1400, 1000), "mode": "bilinear"}),  # written past the caches
        ((1, 3, 700, 500), False, {"size": (1399, 999), "mode": "bilinear"}),
        ((3, 5, 401, 300), True, {"size": (803, 401), "mode": "bilinear"}),
        ((2, 40, 150, 150), True, {"size": (300, 300), "mode": "bicubic"}),
        ((1, 3, 700, 500), False, {"size": (1400, 1001), "mode": "nearest"}),
        ((1, 3, 700, 333), False, {"size": (2100, 999), "mode": "nearest"}),
        ((3, 40, 101, 100), True, {"size": (303, 200), "mode": "nearest"}),
        ((1, 700, 3, 5), True, {"size": (7, 5), "mode": "bilinear"}),
    ],
    ids=str,
)
def test_large_axes(shape: tuple[int, ...], channels_last: bool, params: dict[str, Any], dtype: torch.dtype) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).mul(255).to(dtype)
    _check_against_definition(as_channels_last(x) if channels_last else x, params)


def _check_against_definition(x: Tensor, params: dict[str, Any]) -> None:
    exact = x.double().requires_grad_()
    floating = x.is_floating_point()
    leaf = x.requires_grad_(floating)
    y = pixfuse.interpolate(leaf, **params)
    with by_definition():  # which takes an age for a mean of many samples
        truth = (F if params["mode"] == "area" else pixfuse).interpolate(exact, **params)
    if not floating:
        assert (y.double() - truth.clamp(0, 255)).abs().max() <= 0.5 + 1e-3
        return
    ulp = torch.finfo(x.dtype).eps
    tolerance = 8 * torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps + 0.51 * ulp
    sums = float(exact.detach().abs().max()) * 4
    assert (y.double() - truth).abs().max() <= tolerance * sums
    dy = random_like(y)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    (truth,) = torch.autograd.grad(truth, exact, dy.double())
    assert (dx.double() - truth).abs().max() <= tolerance * 4 * max(1, y.numel() / x.numel()) * float(dy.abs().max())


@pytest.mark.parametrize("shape", [(2, 3, 7), (1, 2, 3, 4), (2, 2, 2, 3, 2)], ids=str)
def test_upsample_nearest_is_interpolate_nearest(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for scale in (1, 2, 3):
        assert torch.equal(pixfuse.upsample_nearest(x, scale), pixfuse.interpolate(x, scale_factor=scale))
        assert torch.equal(pixfuse.upsample_nearest(x, scale), F.interpolate(x, scale_factor=scale))


# --- the field cases ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [*ALL_2D, {"scale": [2, 3]}], ids=[*IDS, "upsample_nearest"])
def test_any_order_of_the_axes(params: dict[str, Any]) -> None:
    """Field cases 8 and 9: whatever the strides, the same values; the result dense, as the fake says."""
    x = torch.randn(2, 5, 7, 9)

    def call(x: Tensor) -> Tensor:
        return pixfuse.upsample_nearest(x, **params) if "scale" in params else pixfuse.interpolate(x, (11, 6), **params)

    expected = call(x)
    for order in itertools.permutations(range(4)):
        back = sorted(range(4), key=lambda d: order[d])
        same = x.permute(order).contiguous().permute(back)
        y = call(same)
        torch.testing.assert_close(y, expected, rtol=2e-6, atol=2e-6)
        assert is_channels_last(y) == is_channels_last(same)
        assert y.is_contiguous() or y.is_contiguous(memory_format=torch.channels_last)
        with torch._subclasses.FakeTensorMode() as mode:
            assert call(mode.from_tensor(same)).stride() == y.stride()
    for single in (as_channels_last(x)[1:], as_channels_last(x)[0].unsqueeze(0)):
        leaf = single.detach().requires_grad_()
        y = call(leaf)
        for dy in (torch.randn(y.shape), as_channels_last(torch.randn(y.shape)), torch.ones(()).expand(y.shape)):
            (dx,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
            assert y.movedim(1, -1).is_contiguous()
            assert dx.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", ALL_2D, ids=IDS)
def test_constant_16_bit_images_stay_constant(params: dict[str, Any], dtype: torch.dtype) -> None:
    """Field case 10."""
    for value in (200.0, 255.0, 1 / 3):
        for channels_last in (False, True):
            x = torch.full((1, 2, 23, 31), value, dtype=dtype)
            x = as_channels_last(x) if channels_last else x
            y = pixfuse.interpolate(x, size=(57, 71), **params)
            assert torch.equal(y, torch.full_like(y, x[0, 0, 0, 0].item()))


def test_indices_are_not_16_bit() -> None:
    """Field case 11."""
    x = torch.randn(1, 4, 600, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    params: dict[str, Any] = {"scale_factor": 2, "mode": "bilinear", "align_corners": True}
    truth = F.interpolate(x.double(), **params)
    y = pixfuse.interpolate(x, **params).double()
    assert ((y - truth).abs() <= truth.abs() * 2.0**-8 * 1.001 + 1e-6).all()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area"])
def test_gradients_are_not_summed_in_16_bit(mode: str, channels_last: bool) -> None:
    """Field case 12."""
    x = torch.zeros(2, 3, 64, 64, dtype=torch.float16)
    x = (as_channels_last(x) if channels_last else x).requires_grad_()
    dy = (torch.rand(2, 3, 512, 512, generator=torch.Generator().manual_seed(0)) + 0.5).half()
    exact = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.interpolate(exact, scale_factor=8, mode=mode), exact, dy.double())
    for y in (
        pixfuse.interpolate(x, scale_factor=8, mode=mode),
        *([pixfuse.upsample_nearest(x, 8)] if mode == "nearest" else []),
    ):
        (dx,) = torch.autograd.grad(y, x, dy)
        assert dx.dtype == torch.float16
        assert ((dx.double() - truth).abs() <= truth.abs() * 2.0**-11 * 1.01).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_integer_images_nearest(dtype: torch.dtype, channels_last: bool) -> None:
    """Field case 13: exact, also where float32 would not be."""
    x = torch.randint(-(2**62), 2**62, (2, 3, 7, 5)).to(dtype)
    x = as_channels_last(x) if channels_last else x
    rows, columns = torch.arange(14) // 2, torch.arange(15) // 3
    expected = x[:, :, rows][..., columns]
    for y in (
        pixfuse.upsample_nearest(x, [2, 3]),
        pixfuse.interpolate(x, scale_factor=[2, 3]),
        pixfuse.interpolate(x, size=(14, 15), mode="nearest-exact"),
    ):
        assert y.dtype == dtype
        assert torch.equal(y, expected)
        assert is_channels_last(y) == channels_last


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("params", ALL_2D, ids=IDS)
def test_bytes_are_rounded_and_saturated(params: dict[str, Any], channels_last: bool) -> None:
    """Field case 13: a checkerboard overshoots under bicubic and lanczos."""
    x = ((torch.arange(9)[:, None] + torch.arange(12)) % 2 * 255).to(torch.uint8).expand(2, 3, 9, 12).contiguous()
    x = as_channels_last(x) if channels_last else x
    for size in ((18, 24), (7, 31), (20, 5)):
        truth = pixfuse.interpolate(x.double(), size=size, **params).clamp(0, 255)
        y = pixfuse.interpolate(x, size=size, **params)
        assert y.dtype == torch.uint8
        assert (y.double() - truth).abs().max() <= 0.5 + 1e-4
        assert is_channels_last(y) == channels_last


@pytest.mark.parametrize("params", ALL_2D, ids=IDS)
@pytest.mark.parametrize(
    ("shape", "to"),
    [
        ((3, 2, 6, 5), {"size": (11, 4)}),
        ((2, 2, 7, 9), {"scale_factor": 0.5}),
        ((2, 2, 7, 9), {"scale_factor": 0.3}),
        ((2, 1, 37, 21), {"size": (13, 18)}),
    ],
    ids=str,
)
def test_gradient_of_every_element(params: dict[str, Any], shape: tuple[int, ...], to: dict[str, Any]) -> None:
    """Field case 17: every batch element, every pixel, against the matrix that the values themselves show."""
    columns, rows = shape[-1], shape[-2]
    basis = torch.eye(rows * columns, dtype=torch.float64).reshape(-1, 1, rows, columns)
    matrix = pixfuse.interpolate(basis, **to, **params).flatten(1)  # [in, out]
    for dtype in (torch.float64, torch.float32):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        y = pixfuse.interpolate(x, **to, **params)
        dy = random_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        expected = (dy.flatten(2).double() @ matrix.T).reshape(shape)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(dx.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own, at its import
@pytest.mark.parametrize("scale", [1.2, 1.45, 1.7, 2.6])
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")),
    ],
)
def test_compiled_equals_eager_at_fractional_scales(scale: float, backend: str) -> None:
    """Field case 18: one rule for forward, backward and compiled, which is PyTorch's eager one."""
    torch._dynamo.reset()

    def call(x: Tensor) -> Tensor:
        return torch.cat([pixfuse.interpolate(x, scale_factor=scale, mode=m).flatten() for m in MODES[4][:2]])

    results = []
    for run in (call, torch.compile(call, backend=backend, fullgraph=True)):
        x = torch.arange(15.0).reshape(1, 1, 3, 5).requires_grad_()
        y = run(x)
        results.append((y, *torch.autograd.grad(y, x, torch.arange(float(y.numel())))))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    x = torch.arange(15.0, dtype=torch.float64).reshape(1, 1, 3, 5)
    stock = torch.cat([F.interpolate(x, scale_factor=scale, mode=m).flatten() for m in MODES[4][:2]])
    assert torch.equal(results[0][0].double(), stock)


@pytest.mark.parametrize(
    "params", [*ALL_2D[:3], *ALL_2D[3::2], ALL_2D[5]], ids=lambda p: "-".join(map(str, p.values()))
)
def test_an_axis_of_the_same_size_is_copied(params: dict[str, Any]) -> None:
    """Field case 19."""
    x = torch.randn(1, 2, 5, 9, requires_grad=True)
    y = pixfuse.interpolate(x, scale_factor=1.01, **params)
    assert torch.equal(y, x)
    assert y is not x
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.ones_like(x))
    wide = pixfuse.interpolate(x.detach(), size=(5, 12), **params)
    assert torch.equal(wide[:, :, 3:4], pixfuse.interpolate(x[:, :, 3:4].detach(), size=(1, 12), **params))


@pytest.mark.parametrize(("size", "scale", "expected"), [(50, 0.9999, 49), (120, 88 / 120, 88), (33, 1.8, 59)])
def test_output_size(size: int, scale: float, expected: int) -> None:
    """Field case 20: the floor of the product in float64, as in eager PyTorch."""
    x = torch.zeros(1, 1, size)
    assert F.interpolate(x, scale_factor=scale).shape[2] == expected
    for mode in MODES[3]:
        assert pixfuse.interpolate(x, scale_factor=scale, mode=mode).shape == (1, 1, expected)


def test_output_size_of_every_scale() -> None:
    """Field case 20: PyTorch's eager rule over many sizes and scales."""
    for size in range(1, 40):
        for scale in (0.1, 0.3, 1 / 3, 0.7, 0.99, 1.1, 1.9, 2.3, 7 / 3):
            if size * scale >= 1:
                x = torch.empty(1, 1, size)
                assert pixfuse.interpolate(x, scale_factor=scale).shape == F.interpolate(x, scale_factor=scale).shape


@pytest.mark.parametrize("params", ALL_2D, ids=IDS)
def test_gradients_are_deterministic(params: dict[str, Any]) -> None:
    """Field case 21: ten runs with poisoned memory, bit for bit."""
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.randn(2, 3, 9, 8, requires_grad=True)
        dy = torch.randn(2, 3, 13, 6)
        runs = [torch.autograd.grad(pixfuse.interpolate(x, (13, 6), **params), x, dy)[0] for _ in range(10)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert not runs[0].isnan().any()
    for run in runs[1:]:
        assert torch.equal(run, runs[0])


@pytest.mark.parametrize(
    ("params", "compiled"),
    [*((p, False) for p in ALL_2D), *((p, True) for p in ALL_2D[::4])],
    ids=[*IDS, *(f"compiled-{i}" for i in IDS[::4])],
)
def test_empty_images(params: dict[str, Any], compiled: bool) -> None:
    """Field case 25."""
    torch._dynamo.reset()

    def call(x: Tensor) -> Tensor:
        return pixfuse.interpolate(x, scale_factor=2, **params) + pixfuse.upsample_nearest(x, 2)

    run = torch.compile(call, backend="aot_eager") if compiled else call
    for shape in ((0, 3, 5, 4), (2, 0, 4, 4)):
        x = torch.zeros(shape, requires_grad=True)
        y = run(x)
        assert y.shape == (*shape[:2], 2 * shape[2], 2 * shape[3])
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape
    with pytest.raises(Exception, match=r"x must have no empty spatial axis, got shape \[2, 3, 0, 4\]"):
        run(torch.zeros(2, 3, 0, 4))


@pytest.mark.parametrize("params", ALL_2D, ids=IDS)
@pytest.mark.parametrize("side", [1, 2])
def test_tiny_images(params: dict[str, Any], side: int) -> None:
    """Field case 26."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.full((1, 1, side, side), 0.75, dtype=dtype, requires_grad=True)
        for size in ((4, 4), (1, 1), (2, 3)):
            y = pixfuse.interpolate(x, size=size, **params)
            tolerance = 0 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(y, torch.full_like(y, 0.75), rtol=0, atol=tolerance)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert dx.isfinite().all()
            torch.testing.assert_close(dx.double().sum(), torch.tensor(float(y.numel())).double(), rtol=1e-2, atol=0)


def test_infinite_and_missing_values_stay_local() -> None:
    """A value reaches the outputs whose taps hold it and no other."""
    x = torch.zeros(1, 1, 8, 8)
    x[0, 0, 4, 4] = math.inf
    x[0, 0, 1, 1] = math.nan
    for mode, reached in (("nearest", 4), ("bilinear", 16), ("area", 4)):
        for layout in (x, as_channels_last(x.expand(1, 2, 8, 8))):
            y = pixfuse.interpolate(layout, scale_factor=2, mode=mode)
            assert int(y.isnan().sum()) == int(y.isinf().sum()) == reached * layout.shape[1]


def test_never_changes_its_input() -> None:
    x = torch.randn(1, 2, 4, 5)
    before = x.clone()
    for y in (pixfuse.interpolate(x, scale_factor=1), pixfuse.upsample_nearest(x, 1)):
        y.zero_()
    assert torch.equal(x, before)


def test_one_graph_serves_every_size() -> None:
    """Compiled with dynamic sizes, a second size does not compile again."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x: pixfuse.interpolate(x, scale_factor=1.5, mode="bilinear"),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for size in (7, 10, 13):
        x = torch.randn(2, 3, size, size + 1)
        assert torch.equal(compiled(x), pixfuse.interpolate(x, scale_factor=1.5, mode="bilinear"))
    assert counter.frame_count == 1


# --- refusals -------------------------------------------------------------------------------------------------

X = torch.zeros(1, 2, 4, 5)
REFUSED_INTERPOLATE = [
    ({"x": [1.0]}, TypeError, "interpolate: x must be a tensor, got list"),
    (
        {"x": torch.zeros(1, 2, 3, dtype=torch.complex64)},
        TypeError,
        r"x must be floating \(.*integer, got complex64 of",
    ),
    ({"x": torch.zeros(1, 2, 3, 3).to_sparse()}, TypeError, r"x must be a strided \(dense\) tensor"),
    ({"x": torch.zeros(2, 3)}, ValueError, r"x must be 3-D or 4-D or 5-D \(\[N, C, \*spatial\]\), got 2-D of shape"),
    ({"x": torch.zeros(1, 2, 0, 3)}, ValueError, r"x must have no empty spatial axis, got shape \[1, 2, 0, 3\]"),
    ({"mode": "cubic"}, ValueError, "mode must be one of nearest, nearest-exact, linear, .*, got 'cubic'"),
    ({"mode": 2}, TypeError, "mode must be one of nearest, .*, got 2"),
    ({"mode": "linear"}, ValueError, r"x must be 3-D for mode 'linear', got 4-D of shape \[1, 2, 4, 5\]"),
    ({"mode": "trilinear"}, ValueError, "x must be 5-D for mode 'trilinear'"),
    ({"x": X[0], "mode": "bilinear", "size": 3}, ValueError, "x must be 4-D for mode 'bilinear', got 3-D"),
    ({"size": None}, ValueError, "size or scale_factor must be given, one of the two, got neither"),
    ({"scale_factor": 2}, ValueError, "size or scale_factor must be given, one of the two, got both"),
    ({"size": (3,)}, ValueError, r"size must be one number or one for each of the 2 spatial axes, got \(3,\)"),
    ({"size": 2.0}, TypeError, "size must be an int, got 2.0"),
    ({"size": (True, 3)}, TypeError, "size must be an int, got True"),
    ({"size": torch.tensor(3)}, TypeError, "size must be an int, got int64 of shape"),
    ({"size": (3, 0)}, ValueError, "size must be at least 1, got 0"),
    ({"size": None, "scale_factor": (2, 2, 2)}, ValueError, "scale_factor must be one number or one for each of the 2"),
    ({"size": None, "scale_factor": "2"}, TypeError, "scale_factor must be a number, got '2'"),
    ({"size": None, "scale_factor": -1}, ValueError, "scale_factor must be positive and finite, got -1"),
    ({"size": None, "scale_factor": math.inf}, ValueError, "scale_factor must be positive and finite, got inf"),
    ({"size": None, "scale_factor": math.nan}, ValueError, "scale_factor must be a number, got nan"),
    (
        {"size": None, "scale_factor": 0.2},
        ValueError,
        "scale_factor must give at least one sample from an axis of 4, got 0.2",
    ),
    ({"align_corners": True}, ValueError, "align_corners must be None for mode 'nearest', got True"),
    ({"align_corners": 1, "mode": "bilinear"}, TypeError, "align_corners must be True or False, got 1"),
    ({"align_corners": True, "mode": "lanczos", "antialias": True}, ValueError, "align_corners must be None or False"),
    ({"antialias": True}, ValueError, "antialias must be False for modes other than bilinear, bicubic and lanczos"),
    ({"antialias": 1}, TypeError, "antialias must be True or False, got 1"),
    ({"mode": "lanczos"}, ValueError, "antialias must be True for mode 'lanczos', got False"),
    (
        {"recompute_scale_factor": True},
        ValueError,
        "recompute_scale_factor must be None or False with an explicit size",
    ),
    ({"recompute_scale_factor": 1}, TypeError, "recompute_scale_factor must be True or False, got 1"),
    (
        {"x": X.int(), "mode": "bilinear"},
        TypeError,
        "x must be floating or uint8 for modes other than nearest and .*int32",
    ),
    ({"x": X.bool(), "mode": "area"}, TypeError, "x must be floating or uint8 for modes other than nearest and .*bool"),
]
REFUSED_NEAREST = [
    ({"x": 1}, TypeError, "upsample_nearest: x must be a tensor, got int"),
    ({"x": X.to(torch.complex64)}, TypeError, "x must be floating"),
    ({"x": X[0, 0]}, ValueError, "x must be 3-D or 4-D or 5-D"),
    ({"x": X[:, :, :0]}, ValueError, "x must have no empty spatial axis"),
    ({"scale": 0}, ValueError, "upsample_nearest: scale must be at least 1, got 0"),
    ({"scale": 1.5}, TypeError, "scale must be an int, got 1.5"),
    ({"scale": True}, TypeError, "scale must be an int, got True"),
    ({"scale": [2, 2, 2]}, ValueError, "scale must be one number or one for each of the 2 spatial axes"),
    ({"gain": "1"}, TypeError, "gain must be a number, got '1'"),
    ({"gain": math.nan}, ValueError, "gain must be a number, got nan"),
    ({"x": X.int(), "gain": 2.0}, ValueError, "gain must be 1 for bool and integer images, got 2.0"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED_INTERPOLATE)
def test_refusals_of_interpolate(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pixfuse.interpolate(**{"x": X, "size": 3, **arguments})


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED_NEAREST)
def test_refusals_of_upsample_nearest(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pixfuse.upsample_nearest(**{"x": X, "scale": 2, **arguments})


def test_refusals_of_the_bare_operators_under_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        x = mode.from_tensor(X)
        with pytest.raises(ValueError, match="size must be at least 1, got 0"):
            torch.ops.pixfuse.interpolate(x, [0, 3], 0, False, False, [0.0, 0.0])
        with pytest.raises(ValueError, match="size must have 2 entries, one for each spatial axis"):
            torch.ops.pixfuse.interpolate(x, [3], 0, False, False, [0.0])
        with pytest.raises(ValueError, match="mode must be from 0 to 5, got 6"):
            torch.ops.pixfuse.interpolate(x, [3, 3], 6, False, False, [0.0, 0.0])
        with pytest.raises(ValueError, match="scale must be at least 1, got 0"):
            torch.ops.pixfuse.upsample_nearest(x, [0, 2], 1.0)


def test_numpy_numbers_are_numbers() -> None:
    x = torch.randn(1, 2, 4, 5)
    assert pixfuse.interpolate(x, size=np.int64(8)).shape == (1, 2, 8, 8)
    assert pixfuse.interpolate(x, scale_factor=np.float32(1.5)).shape == (1, 2, 6, 7)
    assert pixfuse.upsample_nearest(x, np.int32(2), np.float64(0.5)).shape == (1, 2, 8, 10)


def test_results_that_cannot_be_counted_are_refused() -> None:
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="upsample_nearest: scale must be at most 2147483647"):
        pixfuse.upsample_nearest(x, 2**62)
    with pytest.raises(ValueError, match="upsample_nearest: scale must give a result of at most"):
        pixfuse.upsample_nearest(x, 2**31 - 1)
    with pytest.raises(ValueError, match="interpolate: size must give a result of at most"):
        pixfuse.interpolate(x, size=2**31 - 1)
    with pytest.raises(ValueError, match="interpolate: scale_factor must give a result of at most"):
        pixfuse.interpolate(x, scale_factor=2.0**62, mode="bilinear")
