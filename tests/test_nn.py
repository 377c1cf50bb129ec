"""pixfuse.nn: the twins' state dicts, pickling and copying, and that a module is its op."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pixfuse
import pixfuse.nn as pnn

MODULES = {
    "GroupNorm": lambda: pnn.GroupNorm(4, 8),
    "GroupNormSiLU": lambda: pnn.GroupNormSiLU(2, 8, eps=1e-3),
    "FusedLeakyReLU": lambda: pnn.FusedLeakyReLU(8, negative_slope=0.1),
    "Upsample": lambda: pnn.Upsample(scale_factor=2, mode="bilinear"),
    "Blur": lambda: pnn.Blur([1, 3, 3, 1], down=2),
    "FilteredLReLU": lambda: pnn.FilteredLReLU(8, [1, 2, 1], [1, 3, 3, 1], up=2, down=2, padding=3, clamp=1.0),
}


@pytest.fixture(params=MODULES)
def module(request):
    torch.manual_seed(0)
    made = MODULES[request.param]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


@pytest.fixture
def x():
    return torch.randn(2, 8, 12, 10, generator=torch.Generator().manual_seed(1))


def test_pickle_copy_and_state(module, x):
    y = module(x)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    others = [pickle.loads(pickle.dumps(module)), copy.deepcopy(module), torch.load(buffer, weights_only=False)]
    for other in others:
        assert type(other) is type(module)
        assert torch.equal(other(x), y)
        other.load_state_dict(module.state_dict())
        assert list(other.state_dict()) == list(module.state_dict())
        for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
            assert ours is not theirs


def test_repr_names_the_arguments(module):
    words = repr(module)
    assert words.startswith(f"{type(module).__name__}(")
    assert len(words) > len(f"{type(module).__name__}()")
    assert "\n" not in words


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_and_layout(module, x, channels_last):
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    x = x.requires_grad_()
    y = module(x)
    y.square().sum().backward()
    form = torch.channels_last if channels_last else torch.contiguous_format
    assert y.is_contiguous(memory_format=form)
    assert x.grad.is_contiguous(memory_format=form)
    for parameter in module.parameters():
        assert parameter.grad.abs().max() > 0


def test_moves_and_casts(module, x):
    y = module.double()(x.double())
    assert y.dtype == torch.float64
    for parameter in module.parameters():
        assert parameter.dtype == torch.float64
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    for buffer in module.buffers():  # filters stay as they were: the ops take them so
        assert buffer.dtype == torch.float32
    assert all(value.device.type == "meta" for value in module.to("meta").state_dict().values())


@pytest.mark.parametrize("affine", [True, False])
def test_groupnorm_loads_from_stock(x, affine):
    stock = nn.GroupNorm(4, 8, eps=1e-4, affine=affine)
    if affine:
        nn.init.normal_(stock.weight)
        nn.init.normal_(stock.bias)
    for ours, truth in ((pnn.GroupNorm, stock), (pnn.GroupNormSiLU, nn.Sequential(stock, nn.SiLU()))):
        twin = ours(4, 8, eps=1e-4, affine=affine)
        assert list(twin.state_dict()) == list(stock.state_dict())
        twin.load_state_dict(stock.state_dict())
        torch.testing.assert_close(twin(x), truth(x))
        assert isinstance(twin, nn.GroupNorm)


def test_fused_leaky_relu_is_the_composition(x):
    module = pnn.FusedLeakyReLU(8)
    module.load_state_dict({"bias": torch.arange(8.0) - 4})
    y = F.leaky_relu(x + module.bias[:, None, None], 0.2) * math.sqrt(2)
    torch.testing.assert_close(module(x), y)
    assert pnn.FusedLeakyReLU(8, bias=False).bias is None
    assert not pnn.FusedLeakyReLU(8, bias=False).state_dict()


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale_factor": 2},
        {"scale_factor": (2, 1.5), "mode": "nearest"},
        {"size": (7, 9), "mode": "bilinear", "align_corners": True},
        {"size": 9, "mode": "bicubic"},
        {"scale_factor": 1.7, "mode": "bilinear", "recompute_scale_factor": True},
    ],
    ids=str,
)
def test_upsample_is_stock_upsample(x, arguments):
    stock, ours = nn.Upsample(**arguments), pnn.Upsample(**arguments)
    ours.load_state_dict(stock.state_dict())
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-5)
    assert isinstance(ours, nn.Upsample)


def test_upsample_antialias_and_lanczos(x):
    y = pnn.Upsample(size=(5, 4), mode="bilinear", antialias=True)(x)
    torch.testing.assert_close(y, F.interpolate(x, (5, 4), mode="bilinear", antialias=True))
    assert pnn.Upsample(size=(5, 4), mode="lanczos", antialias=True)(x).shape == (2, 8, 5, 4)


def test_blur_keeps_its_place(x):
    taps = pixfuse.setup_filter([1, 3, 3, 1])
    torch.testing.assert_close(pnn.Blur()(x), pixfuse.filter2d(x, taps))
    torch.testing.assert_close(pnn.Blur(down=2)(x), pixfuse.downsample2d(x, taps))
    torch.testing.assert_close(pnn.Blur(up=2)(x), pixfuse.upsample2d(x, taps))
    assert pnn.Blur(torch.ones(3, 5))(x).shape == x.shape


def test_blur_as_the_stylegan2_ports_use_it(x):
    """A 2-D kernel buffer, padding (before, after) on both axes, and the factor of an upsampling before it."""
    module = pnn.Blur([1, 3, 3, 1], pad=(2, 1), upsample_factor=2)
    assert list(module.state_dict()) == ["kernel"]
    taps = torch.outer(torch.tensor([1.0, 3, 3, 1]), torch.tensor([1.0, 3, 3, 1])) / 64 * 4
    torch.testing.assert_close(module.kernel, taps)
    torch.testing.assert_close(module(x), pixfuse.upfirdn2d(x, taps, padding=[2, 1, 2, 1]))


def test_filtered_lrelu_is_the_function(x):
    module = MODULES["FilteredLReLU"]()
    assert list(module.state_dict()) == ["bias", "up_filter", "down_filter"]
    y = pixfuse.filtered_lrelu(
        x, pixfuse.setup_filter([1, 2, 1]), pixfuse.setup_filter([1, 3, 3, 1]), up=2, down=2, padding=3, clamp=1.0
    )
    torch.testing.assert_close(module(x), y)
    plain = pnn.FilteredLReLU(8, bias=False)
    assert not plain.state_dict()
    torch.testing.assert_close(plain(x), F.leaky_relu(x, 0.2) * math.sqrt(2))
