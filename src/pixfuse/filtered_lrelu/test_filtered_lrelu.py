"""filtered_lrelu: golden numbers, an independent oracle of dense matrices, derivatives, layouts, bad input."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pixfuse
from pixfuse._shared.library import by_definition
from pixfuse._shared.testing import as_channels_last, battery, check_golden, golden
from pixfuse._shared.timing import threads
from pixfuse.filtered_lrelu import filtered_lrelu, reference
from pixfuse.filtered_lrelu.cases import CASES

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SG3 = {"up": 2, "down": 2, "padding": [9, 8, 10, 7], "clamp": 0.9}


@pytest.fixture(autouse=True)
def one_thread():
    """The images are tiny: a second thread costs more than it brings, on a busy machine a hundred times more."""
    with threads(1):
        yield


def taps(k, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(k)).float() / np.max(k)


def image(*shape, seed=0, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


# --- an oracle that shares nothing with the package: every stage a dense matrix -----------------------------------


def stage(h, w, f, up, down, pads, flip, gain):
    """The matrix [Ho * Wo, h * w] of one resampling stage, entry by entry from the formula of the definition."""
    f = np.ones((1, 1)) if f is None else np.asarray(f, dtype=np.float64)
    f = np.outer(f, f) if f.ndim == 1 else f
    kh, kw = f.shape
    x0, x1, y0, y1 = pads
    ho, wo = (h * up + y0 + y1 - kh) // down + 1, (w * up + x0 + x1 - kw) // down + 1
    matrix = np.zeros((ho, wo, h, w))
    for i, j, a, c in itertools.product(range(ho), range(wo), range(kh), range(kw)):
        r = i * down + (a if flip else kh - 1 - a) - y0
        s = j * down + (c if flip else kw - 1 - c) - x0
        if r % up == 0 and s % up == 0 and 0 <= r // up < h and 0 <= s // up < w:
            matrix[i, j, r // up, s // up] += gain * f[a, c]
    return matrix.reshape(ho * wo, h * w), ho, wo


def oracle(x, fu, fd, b, up, down, pads, gain, slope, clamp, flip, dy=None):
    """Value, and with ``dy`` the gradients of x and b."""
    n, c, h, w = x.shape
    to_mid, mh, mw = stage(h, w, fu, up, 1, pads, flip, up**2)
    to_y, ho, wo = stage(mh, mw, fd, 1, down, (0, 0, 0, 0), flip, 1)
    t = x if b is None else x + b[None, :, None, None]
    v = t.reshape(n, c, h * w) @ to_mid.T
    factor = gain * np.where(v > 0, 1.0, slope)
    middle = factor * v
    if clamp is not None:
        factor[np.abs(middle) > clamp] = 0
        middle = np.clip(middle, -clamp, clamp)
    y = (middle @ to_y.T).reshape(n, c, ho, wo)
    if dy is None:
        return y
    dx = ((dy.reshape(n, c, -1) @ to_y) * factor @ to_mid).reshape(x.shape)
    return y, dx, dx.sum((0, 2, 3))


sizes = st.integers(1, 7)


@st.composite
def problems(draw):
    filters = []
    for _ in range(2):
        shape = draw(st.one_of(st.none(), st.tuples(sizes), st.tuples(st.integers(1, 4), st.integers(1, 4))))
        filters.append(None if shape is None else shape)
    up, down = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    h, w = draw(sizes), draw(sizes)
    pads = [draw(st.integers(-3, 9)) for _ in range(4)]
    ks = [(1, 1) if f is None else (f[-1], f[0]) for f in filters]
    for axis, n in enumerate((w, h)):  # make room for one output at least
        lacking = ks[0][axis] + ks[1][axis] - 1 - n * up - pads[2 * axis] - pads[2 * axis + 1]
        pads[2 * axis + 1] += max(0, lacking)
    return {
        "shape": (draw(st.integers(1, 2)), draw(st.integers(1, 3)), h, w),
        "filters": filters,
        "up": up,
        "down": down,
        "pads": pads,
        "bias": draw(st.booleans()),
        "gain": draw(st.sampled_from([1.0, math.sqrt(2), 0.3])),
        "slope": draw(st.sampled_from([0.0, 0.2, 1.0, 1.5])),
        "clamp": draw(st.sampled_from([None, 0.0, 0.4, 3.0])),
        "flip": draw(st.booleans()),
        "channels_last": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=120, deadline=None)
@given(problems())
def test_matches_dense_matrices(p):
    rng = np.random.default_rng(p["seed"])
    x = rng.standard_normal(p["shape"])
    b = rng.standard_normal(p["shape"][1]) if p["bias"] else None
    fu, fd = (None if s is None else rng.standard_normal(s).astype(np.float32) for s in p["filters"])
    scalars = [p[k] for k in ("up", "down", "pads", "gain", "slope", "clamp", "flip")]
    y = oracle(x, fu, fd, b, *scalars)
    dy = rng.standard_normal(y.shape)
    expected = oracle(x, fu, fd, b, *scalars, dy=dy)
    tensors = [None if a is None else torch.from_numpy(a) for a in (x, fu, fd, b)]
    layout = torch.channels_last if p["channels_last"] else torch.contiguous_format
    tensors[0] = tensors[0].to(memory_format=layout).requires_grad_()
    inputs = [t for t in (tensors[0], tensors[3]) if t is not None]
    for t in inputs:
        t.requires_grad_()
    got = filtered_lrelu(*tensors, *scalars)
    gradients = torch.autograd.grad(got, inputs, torch.from_numpy(dy))
    for a, e in zip((got, *gradients), expected, strict=False):
        np.testing.assert_allclose(a.detach().numpy(), e, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("up", [1, 2, 3, 4, 5, 7])
def test_rows_of_every_width(up, channels_last):
    """Kernels write rows in whole groups, and no sample beyond the room that there is for them."""
    f = torch.tensor([0.7, -0.4])
    for down in (1, 2, 3):
        for width in range(1, 26):
            for pad in (0, 1, 2):
                x = torch.linspace(-1, 1, 2 * 3 * width, dtype=torch.float64).reshape(1, 2, 3, width)
                x = as_channels_last(x) if channels_last else x
                x.requires_grad_()
                args = (x, f, f, None, up, down, [2 + pad, 0, 2, 0])
                y = filtered_lrelu(*args)
                dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
                (dx,) = torch.autograd.grad(y, x, dy)
                with by_definition():
                    exact = filtered_lrelu(*args)
                    (dexact,) = torch.autograd.grad(exact, x, dy)
                torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(dx, dexact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("case", "dtype", "channels_last"), golden("filtered_lrelu"))
def test_golden(case, dtype, channels_last):
    check_golden(filtered_lrelu, case, dtype, channels_last)


@pytest.mark.parametrize(("check", "case"), battery(CASES))
def test_battery(check, case):
    check(filtered_lrelu, case)


def test_worked_number():
    f = torch.tensor([1.0, 3.0, 3.0, 1.0])
    f = f.outer(f) / 64
    x = torch.tensor([[[[1.0, -2.0], [-3.0, 4.0]]]])
    y = filtered_lrelu(x, f, f, up=2, down=2, padding=3, gain=1, slope=0.5)
    expected = [[0.046875, -0.064453125], [-0.251953125, 1.076171875]]
    torch.testing.assert_close(y, torch.tensor(expected)[None, None], rtol=0, atol=1e-7)


def test_defaults_are_scaled_leaky_relu():
    x = image(2, 3, 5, 4)
    expected = math.sqrt(2) * torch.nn.functional.leaky_relu(x, 0.2)
    torch.testing.assert_close(filtered_lrelu(x), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("clamp", [1.0, None])
def test_kinks_take_the_branch_of_the_definition(clamp):
    x = torch.tensor([0.0, 1.0, -5.0, 1.25], dtype=torch.float64).reshape(1, 1, 1, 4).requires_grad_()
    y = filtered_lrelu(x, gain=1.0, slope=0.2, clamp=clamp)
    (dx,) = torch.autograd.grad(y.sum(), x)
    expected = [0.2, 1.0, 0.2, 0.0 if clamp else 1.0]  # at 0 the slope; exactly at the clamp it passes
    torch.testing.assert_close(dx.flatten(), torch.tensor(expected, dtype=torch.float64))


# --- layouts, strides, batches ---------------------------------------------------------------------------------


def in_layouts(x):
    n, c, h, w = x.shape
    base = torch.zeros(n + 1, 2 * c, 3 * h, w + 3, dtype=x.dtype)
    base[1:, ::2, ::3, 2:-1] = x
    yield "channels_last", x.to(memory_format=torch.channels_last)
    yield "strided", base[1:, ::2, ::3, 2:-1]
    yield "permuted", x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    yield "slice of channels_last", torch.cat([x, x]).to(memory_format=torch.channels_last)[n : 2 * n]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layout_is_kept_and_does_not_change_the_numbers(dtype):
    x, b = image(1, 3, 9, 7, dtype=dtype), image(3, dtype=dtype)
    y = filtered_lrelu(x, taps(12), taps(8), b, **SG3)
    dy = image(*y.shape, seed=1, dtype=dtype)
    dx = reference_gradient(x, b, dy)
    for name, other in in_layouts(x):
        last = "channels_last" in name
        for upstream in (dy, dy.to(memory_format=torch.channels_last), dy.flip(3).flip(3).mT.contiguous().mT):
            leaf = other.detach().requires_grad_()
            got = filtered_lrelu(leaf, taps(12), taps(8), b, **SG3)
            (grad,) = torch.autograd.grad(got, leaf, upstream)
            for a in (got, grad):
                form = torch.channels_last if last else torch.contiguous_format
                assert a.is_contiguous(memory_format=form), name
            torch.testing.assert_close(got, y, msg=name)
            torch.testing.assert_close(grad, dx, msg=name)
    expanded = torch.ones((), dtype=dtype).expand_as(y)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(filtered_lrelu(leaf, taps(12), taps(8), b, **SG3), leaf, expanded)
    torch.testing.assert_close(grad, reference_gradient(x, b, expanded.contiguous()))


def reference_gradient(x, b, dy):
    leaf = x.detach().clone().requires_grad_()
    y = filtered_lrelu(leaf, taps(12), taps(8), b, **SG3)
    return torch.autograd.grad(y, leaf, dy)[0]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bit_equal_for_any_batch_and_threads(form, dtype):
    x = image(5, 19, 33, 21, dtype=dtype).to(memory_format=form).requires_grad_()

    def run(x):
        y = filtered_lrelu(x, taps(12), taps(12, 1), **SG3)
        (dx,) = torch.autograd.grad(y, x, y.detach())
        return y.detach(), dx

    threads = torch.get_num_threads()
    whole = run(x)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(a, e) for a, e in zip(run(x), whole, strict=True))
    finally:
        torch.set_num_threads(threads)
    for i in range(5):
        assert all(torch.equal(a, e[i : i + 1]) for a, e in zip(run(x[i : i + 1]), whole, strict=True))


@pytest.mark.parametrize("channels", [1, 3])
def test_bias_gradient_does_not_depend_on_threads(channels):
    """PyTorch's own sum does, where it has one result: a single channel."""
    x, dy = (image(2, channels, 301, 500, seed=s, dtype=torch.float32) for s in (0, 1))
    b = torch.zeros(channels, requires_grad=True)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = filtered_lrelu(x, taps(4), taps(4), b, up=2, down=2, padding=3)
            found += torch.autograd.grad(y, b, dy)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (2, 0, 4, 4)])
def test_empty_batch_or_channels(shape):
    x, b = torch.zeros(shape, requires_grad=True), torch.zeros(shape[1], requires_grad=True)
    y = filtered_lrelu(x, taps(4), taps(4), b, up=2, down=2, padding=3)
    assert y.shape == (*shape[:2], *shape[2:])
    dx, db = torch.autograd.grad(y.sum(), [x, b])
    assert dx.shape == shape
    assert db.shape == b.shape
    assert not db.any()


# --- derivatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [(6, 4), ((3, 2), 4), (None, (2, 3)), (5, None)], ids=str)
@pytest.mark.parametrize("clamp", [None, 0.8])
def test_gradcheck_to_second_order(filters, clamp):
    fu, fd = (None if k is None else taps(k) * 4 for k in filters)
    x, b = image(1, 2, 3, 2).requires_grad_(), image(2, seed=1).requires_grad_()

    def f(x, b):
        return filtered_lrelu(x, fu, fd, b, 2, 2, [4, 3, 5, 2], 1.3, 0.2, clamp)

    assert torch.autograd.gradcheck(f, (x, b), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, (x, b), check_fwd_over_rev=True)


def test_third_order_is_the_tangent_again():
    x = image(1, 1, 5, 4).requires_grad_()
    y = filtered_lrelu(x, taps(6), taps(6), **SG3)
    dy = image(*y.shape, seed=1).requires_grad_()
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    v = image(*x.shape, seed=2).requires_grad_()
    (tangent,) = torch.autograd.grad(dx, dy, v, create_graph=True)
    u = image(*y.shape, seed=3)
    (third,) = torch.autograd.grad(tangent, v, u)
    torch.testing.assert_close(third, torch.autograd.grad(y, x, u)[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias_dtype", FLOATS, ids=str)
def test_bias_of_another_dtype(dtype, bias_dtype):
    x, b = image(2, 3, 6, 5, dtype=dtype).requires_grad_(), image(3, dtype=bias_dtype).requires_grad_()
    y = filtered_lrelu(x, taps(6), taps(6), b, **SG3)
    dx, db = torch.autograd.grad(y.sum(), [x, b])
    assert (y.dtype, dx.dtype, db.dtype) == (dtype, dtype, bias_dtype)
    wide = filtered_lrelu(x.double(), taps(6), taps(6), b.double(), **SG3)
    tolerance = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * 4 if dtype == torch.float32 else 0)
    torch.testing.assert_close(y.double(), wide, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mapped", [(0, None), (1, None), (3, 0), (None, 1), (4, 1)], ids=str)
@pytest.mark.parametrize("order", [0, 1])
def test_vmap(mapped, order):
    shapes = ((2, 3, 6, 5), (3,))
    args = [image(*s) if d is None else image(2, *s).movedim(0, d) for s, d in zip(shapes, mapped, strict=True)]

    def f(x, b):
        return filtered_lrelu(x, taps(6), taps(6), b, **SG3)

    if order:
        value, f = f, lambda x, b: torch.func.grad(lambda x, b: value(x, b).square().sum(), (0, 1))(x, b)
    got = torch.vmap(f, mapped)(*args)
    one_by_one = [f(*(a if d is None else a.select(d, i) for a, d in zip(args, mapped, strict=True))) for i in (0, 1)]
    if order:
        torch.testing.assert_close(got, tuple(map(torch.stack, zip(*one_by_one, strict=True))))
    else:
        torch.testing.assert_close(got, torch.stack(one_by_one))


def test_vmap_over_filters():
    x, filters = image(2, 1, 2, 6, 5), torch.stack([taps(6), taps(6, 1)])
    got = torch.vmap(lambda x, f: filtered_lrelu(x, f, f, up=2, padding=6))(x, filters)
    expected = [filtered_lrelu(a, f, f, up=2, padding=6) for a, f in zip(x, filters, strict=True)]
    torch.testing.assert_close(got, torch.stack(expected))


def test_func_transforms_agree():
    x = image(1, 1, 4, 3)

    def f(x):
        return filtered_lrelu(x, taps(6), taps(4), **SG3)

    forward, reverse = torch.func.jacfwd(f)(x), torch.func.jacrev(f)(x)
    torch.testing.assert_close(forward, reverse)
    assert not torch.func.hessian(lambda x: f(x).sum())(x).any()


# --- bad input ------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3, 6, 5)
F4 = torch.ones(4)
BAD = {
    "x not a tensor": (dict(x=[1.0]), TypeError, r"x must be a tensor, got list"),
    "x of ints": (dict(x=X.int()), TypeError, r"x must be float64, .*, got int32 of shape \[2, 3, 6, 5\]"),
    "x complex": (dict(x=X.cfloat()), TypeError, r"x must be float64, .*, got complex64"),
    "x sparse": (dict(x=X.to_sparse()), TypeError, r"x must be a strided"),
    "x 3-D": (dict(x=X[0]), ValueError, r"x must be 4-D .*, got 3-D of shape \[3, 6, 5\]"),
    "x empty axis": (dict(x=X[:, :, :0]), ValueError, r"x must have no empty spatial axis, got shape \[2, 3, 0, 5\]"),
    "fu a list": (
        dict(fu=[1.0]),
        TypeError,
        r"fu must be None or a float32 tensor of shape .*, got list",
    ),
    "fu float16": (dict(fu=F4.half()), TypeError, r"fu must be None or a float32 .*, got float16 of shape \[4\]"),
    "fu float64": (
        dict(fu=F4.double()),
        TypeError,
        r"fu must be None or a float32 .*got float64 of shape \[4\]",
    ),
    "fd 3-D": (dict(fd=torch.ones(3, 3, 3)), ValueError, r"fd must be .*, got float32 of shape \[3, 3, 3\]"),
    "fd 0-D": (dict(fd=torch.ones(())), ValueError, r"fd must be .*, got float32 of shape \[\]"),
    "fd empty": (dict(fd=torch.ones(0)), ValueError, r"fd must be .*, got float32 of shape \[0\]"),
    "fu needs grad": (dict(fu=F4.clone().requires_grad_()), ValueError, r"fu must be a filter that requires no grad"),
    "fd needs grad": (dict(fd=F4.clone().requires_grad_()), ValueError, r"fd must be a filter that requires no grad"),
    "b of wrong length": (dict(b=torch.zeros(2)), ValueError, r"b must have shape \[3\] .*, got shape \[2\]"),
    "b 2-D": (dict(b=torch.zeros(3, 1)), ValueError, r"b must have shape \[3\]"),
    "b of ints": (dict(b=torch.zeros(3).int()), TypeError, r"b must be float64, "),
    "b elsewhere": (
        dict(b=torch.zeros(3, device="meta")),
        ValueError,
        r"b must be on the device of x \(cpu\), got meta",
    ),
    "fu elsewhere": (dict(fu=F4.to("meta")), ValueError, r"fu must be on the device of x \(cpu\), got meta"),
    "up 0": (dict(up=0), ValueError, r"up must be at least 1, got 0"),
    "up a pair": (dict(up=[2, 2]), TypeError, r"up must be an int, got \[2, 2\]"),
    "up a float": (dict(up=2.0), TypeError, r"up must be an int, got 2.0"),
    "up a bool": (dict(up=True), TypeError, r"up must be an int, got True"),
    "down -1": (dict(down=-1), ValueError, r"down must be at least 1, got -1"),
    "padding of three": (
        dict(padding=[1, 2, 3]),
        ValueError,
        r"padding must be an int, \[x, y\] or \[x0, x1, y0, y1\]",
    ),
    "padding of floats": (dict(padding=[1.0, 2]), TypeError, r"padding must be an int, got 1.0"),
    "padding a string": (dict(padding="same"), TypeError, r"padding must be an int, got 'same'"),
    "gain 0": (dict(gain=0), ValueError, r"gain must be above 0 and finite, got 0"),
    "gain nan": (dict(gain=math.nan), ValueError, r"gain must be a number, got nan"),
    "gain inf": (dict(gain=math.inf), ValueError, r"gain must be above 0 and finite, got inf"),
    "gain a tensor": (dict(gain=torch.ones(())), TypeError, r"gain must be a number"),
    "slope < 0": (dict(slope=-0.1), ValueError, r"slope must be at least 0 and finite, got -0.1"),
    "clamp < 0": (dict(clamp=-1), ValueError, r"clamp must be None or at least 0, got -1"),
    "clamp nan": (dict(clamp=math.nan), ValueError, r"clamp must be a number, got nan"),
    "flip an int": (dict(flip_filter=1), TypeError, r"flip_filter must be True or False, got 1"),
    "filters too wide": (dict(fu=F4, fd=F4), ValueError, r"x must have enough width for one output sample"),
    "filters too high": (dict(fu=torch.ones(9, 1)), ValueError, r"x must have enough height for one output sample"),
    "all cropped": (dict(padding=[-3, -3, 0, 0]), ValueError, r"x must have enough width for one output sample"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    arguments, error, match = BAD[name]
    with pytest.raises(error, match="filtered_lrelu: " + match):
        filtered_lrelu(**{"x": X, **arguments})


@pytest.mark.parametrize("name", ["fu float16", "b of wrong length", "x 3-D"])
def test_the_fake_says_the_same(name):
    arguments, error, match = BAD[name]
    given = {"x": X, "fu": None, "fd": None, "b": None, **arguments}
    given = {k: v if v is None else v.to("meta") for k, v in given.items()}
    with pytest.raises(error, match="filtered_lrelu: " + match):
        torch.ops.pixfuse.filtered_lrelu(*given.values(), 1, 1, 0, 0, 5, 6, False, 1.0, 0.2, -1.0)


def test_good_input_of_unusual_kinds():
    y = filtered_lrelu(X, padding=np.int64(1), up=np.int32(2), gain=np.float32(1), clamp=math.inf)
    assert y.shape == (2, 3, 14, 12)
    assert filtered_lrelu(X.double(), F4.double(), padding=3).dtype == torch.float64


def test_nonfinite_values_propagate():
    x = X.clone()
    x[0, 0, 2, 2], x[0, 1, 2, 2] = math.nan, math.inf
    for clamp in (None, 1.0):
        y = filtered_lrelu(x, taps(4), taps(4), padding=3, clamp=clamp)
        assert y[0, 0].isnan().any()
        assert torch.equal(y.isnan(), reference_value(x, clamp).isnan())


def reference_value(x, clamp):
    args = (x, taps(4), taps(4), None, 1, 1, 3, 3, 5, 6, False, math.sqrt(2), 0.2)
    return reference.filtered_lrelu(*args, -1.0 if clamp is None else clamp)


def test_backend_names_an_implementation():
    assert pixfuse.backend("filtered_lrelu", X) in ("cpu", "reference")
