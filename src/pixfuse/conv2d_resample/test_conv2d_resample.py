"""conv2d_resample and modulated_conv2d: the plain formulas, derivatives, 16 bits, bad input."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pixfuse._shared.timing import threads
from pixfuse.conv2d_resample import conv2d_resample, modulated_conv2d, reference
from pixfuse.upfirdn2d import setup_filter

HALVES = (torch.bfloat16, torch.float16)
FILTER = setup_filter([1, 3, 3, 1])
FORMS = (torch.contiguous_format, torch.channels_last)


@pytest.fixture(autouse=True)
def one_thread():
    """The images are tiny."""
    with threads(1):
        yield


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def all_padding(f, up, down, padding):
    """The padding ``(x0, x1, y0, y1)`` with the filters' own, from the table of upsample2d and downsample2d."""
    sizes = (1, 1) if f is None else (f.shape[-1], f.shape[0])
    x, y = [], []
    for axis, k, (p0, p1) in ((x, sizes[0], padding[:2]), (y, sizes[1], padding[2:])):
        if up > 1:
            p0, p1 = p0 + math.floor((k + up - 1) / 2), p1 + math.floor((k - up) / 2)
        if down > 1:
            p0, p1 = p0 + math.floor((k - down + 1) / 2), p1 + math.floor((k - down) / 2)
        axis += [p0, p1]
    return (*x, *y)


def formula(x, w, f, up, down, padding, groups=1, flip_weight=True, flip_filter=False):
    total = all_padding(f, up, down, padding)
    return reference.conv2d_resample(x, w, f, up, down, total, groups, flip_weight, flip_filter)


@settings(max_examples=400, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)) | st.just((1, 1)),
    taps=st.none() | st.tuples(st.integers(1, 6)) | st.tuples(st.integers(1, 4), st.integers(1, 5)),
    up=st.integers(1, 4),
    down=st.integers(1, 4),
    padding=st.lists(st.integers(-3, 5), min_size=4, max_size=4) | st.integers(0, 3).map(lambda p: [p] * 4),
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    groups=st.sampled_from([1, 2, 3]),
    flips=st.tuples(st.booleans(), st.booleans()),
    channels_last=st.booleans(),
)
def test_every_shortcut_is_the_formula(kernel, taps, up, down, padding, size, groups, flips, channels_last):
    padding = list(padding)
    for axis, k in ((0, kernel[1]), (1, kernel[0])):  # room for one output
        padding[2 * axis + 1] += max(0, k - 1 + down - size[1 - axis] * up - sum(padding[2 * axis : 2 * axis + 2]))
    x = randn(2, 2 * groups, *size).to(memory_format=FORMS[channels_last]).requires_grad_()
    w = randn(3 * groups, 2, *kernel, seed=1).requires_grad_()
    f = None if taps is None else randn(*taps, seed=2, dtype=torch.float32)
    expected = formula(x, w, f, up, down, padding, groups, *flips)
    got = conv2d_resample(x, w, f, up, down, padding, groups, *flips)
    assert got.shape == expected.shape
    assert list(got.shape[2:]) == [
        (n * up + p0 + p1 - k + 1) // down
        for n, (p0, p1), k in zip(size, (padding[2:], padding[:2]), kernel, strict=True)
    ]
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    dy = randn(*got.shape, seed=3)
    for a, e in zip(torch.autograd.grad(got, [x, w], dy), torch.autograd.grad(expected, [x, w], dy), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


def test_worked_numbers_of_compat():
    w = torch.arange(1.0, 10).reshape(1, 1, 3, 3)
    y = conv2d_resample(torch.tensor([[[[1.0, 2], [3, 4]]]]), w, FILTER, up=2, padding=1)
    torch.testing.assert_close(y[0, 0, 0], torch.tensor([37.9375, 59.0625, 66.5, 51.0625]))
    y = conv2d_resample(torch.arange(16.0).reshape(1, 1, 4, 4), w, FILTER, down=2, padding=1)
    torch.testing.assert_close(y[0, 0], torch.tensor([[183.921875, 206.46875], [264.359375, 268.53125]]))


@pytest.mark.parametrize(("up", "down", "k"), list(itertools.product((1, 2), (1, 2), (1, 3))))
def test_gradgradcheck(up, down, k):
    x, w = randn(1, 2, 3, 4).requires_grad_(), randn(2, 2, k, k, seed=1).requires_grad_()

    def f(x, w):
        return conv2d_resample(x, w, FILTER, up, down, k // 2)

    assert torch.autograd.gradcheck(f, (x, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (x, w), fast_mode=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("up", "down", "k"), list(itertools.product((1, 2), (1, 2), (1, 3))))
def test_sixteen_bits(dtype, up, down, k):
    x, w = randn(2, 8, 6, 5, dtype=dtype), randn(4, 8, k, k, seed=1, dtype=dtype)
    got = conv2d_resample(x, w, FILTER, up, down, k // 2)
    truth = formula(x.double(), w.double(), FILTER, up, down, (k // 2,) * 4)
    assert got.dtype == dtype
    assert (got - truth).abs().max() <= 4 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize(
    "shapes", [((0, 4, 5, 6), (3, 4, 3, 3)), ((2, 0, 5, 6), (3, 0, 3, 3)), ((2, 4, 5, 6), (0, 4, 3, 3))]
)
def test_empty(shapes):
    x, w = (torch.zeros(s, requires_grad=True) for s in shapes)
    y = conv2d_resample(x, w, FILTER, up=2, padding=1)
    assert y.shape == (shapes[0][0], shapes[1][0], 10, 12)
    assert not y.any()
    for g, t in zip(torch.autograd.grad(y.sum(), [x, w]), (x, w), strict=True):
        assert g.shape == t.shape
        assert not g.any()
    styles = torch.ones(shapes[0][:2])
    assert modulated_conv2d(x, w, styles, up=2, padding=1, resample_filter=FILTER).shape == y.shape


def test_compiles_and_takes_autocast():
    x, w = randn(1, 3, 6, 5, dtype=torch.float32), randn(4, 3, 3, 3, dtype=torch.float32)
    compiled = torch.compile(lambda x, w: conv2d_resample(x, w, FILTER, 2, 1, 1), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), conv2d_resample(x, w, FILTER, 2, 1, 1))
    with torch.autocast("cpu", torch.bfloat16):
        y = conv2d_resample(x.bfloat16(), w, FILTER, 2, 1, 1)
        styles = torch.ones(1, 3)
        z = modulated_conv2d(x, w, styles, up=2, padding=1, resample_filter=FILTER)
    assert y.dtype == z.dtype == torch.bfloat16


# --- modulated convolution ------------------------------------------------------------------------------------


def by_definition(x, weight, styles, noise, up, down, padding, f, demodulate, flip_weight):
    w = reference.modulated_weight(weight, styles, demodulate)
    y = torch.cat(
        [formula(a[None], b, f, up, down, (padding,) * 4, flip_weight=flip_weight) for a, b in zip(x, w, strict=True)]
    )
    return y if noise is None else y + noise


SETTINGS = list(itertools.product((1, 2), (1, 2), (1, 3), (True, False), (True, False), (True, False)))


@pytest.mark.parametrize(("up", "down", "k", "demodulate", "flip_weight", "fused"), SETTINGS)
def test_modulated_is_the_definition(up, down, k, demodulate, flip_weight, fused):
    x, weight, styles = randn(3, 4, 5, 6), randn(2, 4, k, k, seed=1), randn(3, 4, seed=2)
    leaves = [t.requires_grad_() for t in (x, weight, styles)]
    noise = randn(3, 1, 5 * up // down, 6 * up // down, seed=3).requires_grad_()
    got = modulated_conv2d(x, weight, styles, noise, up, down, k // 2, FILTER, demodulate, flip_weight, fused)
    expected = by_definition(x, weight, styles, noise, up, down, k // 2, FILTER, demodulate, flip_weight)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    dy = randn(*got.shape, seed=4)
    for a, e in zip(
        torch.autograd.grad(got, [*leaves, noise], dy), torch.autograd.grad(expected, [*leaves, noise], dy), strict=True
    ):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("demodulate", [True, False])
def test_modulated_gradgradcheck(fused, demodulate):
    x, weight, styles = randn(2, 2, 3, 3), randn(2, 2, 3, 3, seed=1), randn(2, 2, seed=2)

    def f(*leaves):
        return modulated_conv2d(*leaves, None, 2, 1, 1, FILTER, demodulate, True, fused)

    leaves = tuple(t.requires_grad_() for t in (x, weight, styles))
    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [1.0, 300.0, 3e4])
def test_modulated_sixteen_bits_do_not_overflow(dtype, fused, size):
    """Squares of these styles and weights, and their sums, are far beyond the largest float16."""
    x = randn(2, 64, 6, 5, dtype=dtype).requires_grad_()
    weight = (size * randn(8, 64, 3, 3, seed=1)).clamp(-6e4, 6e4).to(dtype).requires_grad_()
    styles = (size * randn(2, 64, seed=2)).clamp(-6e4, 6e4).to(dtype).requires_grad_()
    got = modulated_conv2d(x, weight, styles, padding=1, fused_modconv=fused)
    dy = randn(*got.shape, seed=3, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, styles)]
    truth = by_definition(*exact, None, 1, 1, 1, None, True, True)
    found = [got, *torch.autograd.grad(got, [x, weight, styles], dy)]
    wanted = [truth, *torch.autograd.grad(truth, exact, dy.double())]
    tiny = torch.finfo(dtype).tiny
    for a, e in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        assert (a - e).abs().max() <= 12 * torch.finfo(dtype).eps * e.abs().max() + tiny


def test_modulated_zero_style_gives_zero():
    x, weight = randn(2, 3, 4, 4, dtype=torch.float16), randn(2, 3, 3, 3, dtype=torch.float16)
    styles = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True)
    y = modulated_conv2d(x, weight, styles, padding=1)
    y.sum().backward()
    assert not y.any()
    assert styles.grad.isfinite().all()


# --- bad input ------------------------------------------------------------------------------------------------

X, W, S = torch.zeros(2, 4, 6, 5), torch.zeros(8, 4, 3, 3), torch.zeros(2, 4)
BAD = {
    "x not a tensor": (dict(x=1), TypeError, "x must be a tensor, got int"),
    "x 3-D": (dict(x=X[0]), ValueError, "x must be 4-D"),
    "w not a tensor": (dict(w=[1]), TypeError, "w must be a tensor, got list"),
    "w 3-D": (dict(w=W[0]), ValueError, r"w must be 4-D .* with at least one tap, got shape \[4, 3, 3\]"),
    "w without taps": (dict(w=W[:, :, :0]), ValueError, "w must be 4-D .* with at least one tap"),
    "w of another dtype": (
        dict(w=W.half()),
        ValueError,
        r"w must have the dtype of x \(float32\), got float16 of shape",
    ),
    "w of other channels": (
        dict(w=W[:, :3]),
        ValueError,
        r"w must have 4 / 1 input channels .* got shape \[8, 3, 3, 3\]",
    ),
    "w elsewhere": (dict(w=W.to("meta")), ValueError, r"w must be on the device of x \(cpu\), got meta"),
    "groups 0": (dict(groups=0), ValueError, "groups must be at least 1, got 0"),
    "groups uneven": (dict(w=W[:7, :2], groups=2), ValueError, "groups must divide the 7 output channels of w, got 2"),
    "f of ints": (dict(f=torch.ones(4).int()), TypeError, "f must be None or a float32 tensor"),
    "f needs grad": (dict(f=torch.ones(4).requires_grad_()), ValueError, "f must be a filter that requires no grad"),
    "up 0": (dict(up=0), ValueError, "up must be at least 1, got 0"),
    "up a pair": (dict(up=[2, 2]), TypeError, r"up must be an int, got \[2, 2\]"),
    "down 0": (dict(down=0), ValueError, "down must be at least 1, got 0"),
    "padding of three": (dict(padding=[1, 2, 3]), ValueError, "padding must be an int"),
    "padding of floats": (dict(padding=1.5), TypeError, "padding must be an int, got 1.5"),
    "too small": (
        dict(padding=-2),
        ValueError,
        r"padding must leave at least one output sample, got \[-2, -2, -2, -2\]",
    ),
    "flip_weight an int": (dict(flip_weight=1), TypeError, "flip_weight must be True or False, got 1"),
    "flip_filter None": (dict(flip_filter=None), TypeError, "flip_filter must be True or False, got None"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    arguments, error, match = BAD[name]
    with pytest.raises(error, match="conv2d_resample: " + match):
        conv2d_resample(**{"x": X, "w": W, **arguments})


BAD_MODULATED = {
    "weight of other channels": (dict(weight=W[:, :3]), ValueError, "weight must have 4 / 1 input channels"),
    "styles not a tensor": (dict(styles=None), TypeError, "styles must be a tensor, got NoneType"),
    "styles of another batch": (
        dict(styles=S[:1]),
        ValueError,
        r"styles must have shape \[2, 4\] .*, got shape \[1, 4\]",
    ),
    "styles elsewhere": (dict(styles=S.to("meta")), ValueError, r"styles must be on the device of x \(cpu\), got meta"),
    "noise too large": (dict(noise=torch.zeros(2, 1, 6, 5)), ValueError, r"noise must broadcast to .* \[2, 8, 4, 3\]"),
    "noise a number": (dict(noise=1.0), TypeError, "noise must be a tensor, got float"),
    "filter a list": (dict(resample_filter=[1.0]), TypeError, "resample_filter must be None or a float32 tensor"),
    "demodulate an int": (dict(demodulate=1), TypeError, "demodulate must be True or False, got 1"),
    "fused a string": (dict(fused_modconv="yes"), TypeError, "fused_modconv must be True or False, got 'yes'"),
}


@pytest.mark.parametrize("name", BAD_MODULATED)
def test_bad_modulated_input(name):
    arguments, error, match = BAD_MODULATED[name]
    with pytest.raises(error, match="modulated_conv2d: " + match):
        modulated_conv2d(**{"x": X, "weight": W, "styles": S, **arguments})


def test_reference_of_the_paper():
    """Demodulation makes every output's deviation 1 for inputs of deviation 1."""
    x, weight, styles = randn(4, 32, 16, 16), randn(8, 32, 3, 3, seed=1), 3 * randn(4, 32, seed=2)
    y = modulated_conv2d(x, weight, styles, padding=0)
    assert abs(y.std() - 1) < 0.05


@pytest.mark.parametrize("fused_modconv", [False, True])
@pytest.mark.parametrize("factors", [{}, {"up": 2}, {"down": 2}])
def test_modulated_conv2d_keeps_the_layout(fused_modconv: bool, factors: dict[str, int]) -> None:
    torch.manual_seed(0)
    x, weight, styles = torch.randn(2, 4, 6, 6), torch.randn(5, 4, 3, 3), torch.randn(2, 4)
    f = FILTER if factors else None
    call = functools.partial(modulated_conv2d, padding=1, resample_filter=f, fused_modconv=fused_modconv)
    image = x.to(memory_format=torch.channels_last).requires_grad_()
    y = call(image, weight, styles, **factors)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, call(x, weight, styles, **factors))
    y.square().sum().backward()
    assert image.grad is not None
    assert image.grad.is_contiguous(memory_format=torch.channels_last)
    assert call(x, weight, styles, **factors).is_contiguous()
