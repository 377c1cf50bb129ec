"""pixfuse.patch and the blocks of diffusers, written here as they are there."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_patch import X, agree, classes, counted, state
from torch import Tensor, nn

import pixfuse


class Upsample2D(nn.Module):
    def __init__(self, channels: int, use_conv: bool = False, use_conv_transpose: bool = False, name: str = "conv"):
        super().__init__()
        self.channels, self.out_channels, self.use_conv = channels, channels, use_conv
        self.use_conv_transpose, self.name, self.norm, self.interpolate = use_conv_transpose, name, None, True
        conv: nn.Module | None = nn.Conv2d(channels, channels, 3, padding=1) if use_conv else None
        if use_conv_transpose:
            conv = nn.ConvTranspose2d(channels, channels, 4, 2, 1)
        setattr(self, "conv" if name == "conv" else "Conv2d_0", conv)

    def forward(self, hidden_states: Tensor, output_size: Any = None) -> Tensor:
        if hidden_states.shape[1] != self.channels:  # an assert there; pytest would rewrite it
            raise AssertionError
        conv = self.conv if self.name == "conv" else self.Conv2d_0
        if self.use_conv_transpose:
            return conv(hidden_states)
        if output_size is None:
            hidden_states = F.interpolate(hidden_states, scale_factor=2.0, mode="nearest")
        else:
            hidden_states = F.interpolate(hidden_states, size=output_size, mode="nearest")
        return conv(hidden_states) if self.use_conv else hidden_states


class Downsample2D(nn.Module):
    def __init__(self, channels: int, use_conv: bool = False, padding: int = 1):
        super().__init__()
        self.channels, self.use_conv, self.padding, self.norm, self.name = channels, use_conv, padding, None, "conv"
        self.conv = nn.Conv2d(channels, channels, 3, 2, padding) if use_conv else nn.AvgPool2d(2, 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.use_conv and self.padding == 0:
            hidden_states = F.pad(hidden_states, (0, 1, 0, 1))
        return self.conv(hidden_states)


class ResnetBlock2D(nn.Module):
    def __init__(
        self, out: int = 8, temb: int | None = 6, use: str = "default", skip_time_act: bool = False, resize: Any = None
    ):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(4, out, eps=1e-6)
        self.conv1, self.conv2 = nn.Conv2d(8, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time_emb_proj = None if temb is None else nn.Linear(temb, 2 * out if use == "scale_shift" else out)
        self.nonlinearity, self.dropout = nn.SiLU(), nn.Dropout(0.0)
        self.upsample = resize if isinstance(resize, Upsample2D) else None
        self.downsample = resize if isinstance(resize, Downsample2D) else None
        self.conv_shortcut = nn.Conv2d(8, out, 1) if out != 8 else None
        self.time_embedding_norm, self.skip_time_act, self.output_scale_factor = use, skip_time_act, 2.0**0.5

    def forward(self, input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
        h = input_tensor
        h = self.norm1(h)
        h = self.nonlinearity(h)
        resize = self.upsample if self.upsample is not None else self.downsample
        if resize is not None:
            input_tensor, h = resize(input_tensor), resize(h)
        h = self.conv1(h)
        if self.time_emb_proj is not None:
            temb = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))[:, :, None, None]
        if self.time_embedding_norm == "default":
            if temb is not None:
                h = h + temb
            h = self.norm2(h)
        elif self.time_embedding_norm == "scale_shift":
            scale, shift = temb.chunk(2, dim=1)
            h = self.norm2(h)
            h = h * (1 + scale) + shift
        else:
            h = self.norm2(h)
        h = self.nonlinearity(h)
        h = self.dropout(h)
        h = self.conv2(h)
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        return (input_tensor + h) / self.output_scale_factor


TEMB = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("params", "inputs", "fused"),
    [
        ({}, (X, TEMB), 2),
        ({"out": 12, "use": "scale_shift"}, (X, TEMB), 1),
        ({"temb": None}, (X,), 2),
        ({"skip_time_act": True, "resize": "up"}, (X, TEMB), 2),
        ({"resize": "down"}, (X, TEMB), 2),
        ({"use": "another"}, (X, TEMB), 2),
    ],
)
@pytest.mark.parametrize("train", [True, False])
def test_resnet_block(params: dict[str, Any], inputs: Any, fused: int, train: bool) -> None:
    made = dict(params)
    if "resize" in made:
        made["resize"] = Upsample2D(8) if made["resize"] == "up" else Downsample2D(8)
    model = ResnetBlock2D(**made).double().train(train)
    inputs = [i.double() for i in inputs]
    report = agree(model, *inputs)
    expected = {
        "(the model)": "ResnetBlock2D: norm1, norm2 with SiLU in one pass",
        "norm1": "GroupNorm",
        "norm2": "GroupNorm",
    }
    if params.get("resize") == "up":
        expected["upsample"] = "Upsample2D: F.interpolate on pixfuse"
    elif "resize" in params:
        expected["downsample.conv"] = "AvgPool2d"
    assert report.replaced == expected
    assert report.left == {}
    pixfuse.patch(model)
    with counted() as calls:
        model(*inputs)
    assert sorted(map(str, calls)) == ["None"] * (2 - fused) + ["silu"] * fused
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) is not ResnetBlock2D
        assert torch.equal(other(*inputs), model(*inputs))
        pixfuse.unpatch(other)
        assert type(other) is ResnetBlock2D
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(*inputs), model(*inputs))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["conv", "Conv2d_0"])
@pytest.mark.parametrize("use_conv", [True, False])
def test_upsample_block(name: str, use_conv: bool) -> None:
    model = Upsample2D(8, use_conv, name=name)
    assert agree(model, X).replaced == {"(the model)": "Upsample2D: F.interpolate on pixfuse"}
    assert agree(model, X, (11, 13)).replaced
    pixfuse.patch(model)
    with pytest.raises(AssertionError):
        model(X[:, :3])


@pytest.mark.parametrize("shape", [(2, 8, 6, 5), (8, 7, 4), (1, 8, 2, 2)])
def test_downsample_block(shape: tuple[int, ...]) -> None:
    model = Downsample2D(8)
    model.Conv2d_0 = model.conv  # as older weights have it
    assert agree(model, torch.randn(shape)).replaced == {"conv": "AvgPool2d"}
    pixfuse.patch(model)
    with pytest.raises(RuntimeError, match="too small"):
        model(torch.randn(1, 8, 1, 1))
    assert torch.equal(model(torch.full((1, 4, 4), 4)), torch.full((1, 2, 2), 4))


def test_blocks_that_are_left() -> None:
    nothing = "nothing in it to replace"
    assert agree(Upsample2D(8, use_conv_transpose=True), X).left == {"(the model)": f"Upsample2D: {nothing}"}
    for padding in (0, 1):
        assert agree(Downsample2D(8, True, padding), X).left == {"(the model)": f"Downsample2D: {nothing}"}
    other = Downsample2D(8)
    other.conv = nn.AvgPool2d(3, 2)
    assert agree(other, X).left == {"(the model)": f"Downsample2D: {nothing}"}
    block = ResnetBlock2D()
    block.nonlinearity = nn.GELU()
    assert set(agree(block, X, TEMB).replaced) == {"norm1", "norm2"}
    block = ResnetBlock2D()
    block.norm1.register_forward_hook(lambda *a: None)
    report = agree(block, X, TEMB)
    assert report.replaced == {"(the model)": "ResnetBlock2D: norm2 with SiLU in one pass", "norm2": "GroupNorm"}
    assert report.left == {"norm1": "GroupNorm: it has hooks"}
    block = ResnetBlock2D()
    block.nonlinearity.register_forward_hook(lambda *a: None)
    assert agree(block, X, TEMB).left == {"nonlinearity": "SiLU: not fused: it has hooks"}
    for shared in (ResnetBlock2D(temb=None), Upsample2D(8)):
        report = agree(nn.Sequential(shared, shared), X)
        assert report.left["0"] == f"{type(shared).__name__}: shared by 0 and 1"
        assert report.replaced == {}


def test_a_block_of_another_formula_keeps_it() -> None:
    class Other(ResnetBlock2D):
        def forward(self, input_tensor: Tensor, temb: Tensor | None = None) -> Tensor:
            h = self.norm2(self.nonlinearity(self.norm1(input_tensor)))
            h = self.nonlinearity(h) * h + self.training
            return self.conv2(h)

    Other.__name__ = "ResnetBlock2D"
    for train in (True, False):
        model = Other().double().train(train)
        nn.init.zeros_(model.conv2.weight)
        report = agree(model, X.double(), TEMB.double())
        assert report.replaced["(the model)"] == "ResnetBlock2D: norm1 with SiLU in one pass"
        pixfuse.patch(model)
        nn.init.normal_(model.conv2.weight)
        patched = model(X.double())
        pixfuse.unpatch(model)
        torch.testing.assert_close(patched, model(X.double()))
    different = type("Upsample2D", (nn.Identity,), {})
    assert agree(different(), X).left == {"(the model)": "Upsample2D: nothing in it to replace"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_do_not_matter(value: float) -> None:
    model = ResnetBlock2D(temb=None)
    expected, random = ResnetBlock2D(temb=None), torch.get_rng_state()
    for p in model.parameters():
        p.data.fill_(value)
    before = {k: v for k, v in state(model).items() if "module" in k}
    assert pixfuse.patch(model).replaced == pixfuse.patch(expected).replaced
    assert {k: v for k, v in state(model).items() if "module" in k} == before
    assert torch.equal(torch.get_rng_state(), random)
    with torch.device("meta"):
        meta = ResnetBlock2D(temb=None)
    assert pixfuse.patch(meta).replaced == pixfuse.patch(ResnetBlock2D(temb=None)).replaced
    assert classes(meta).keys() == classes(model).keys()
