"""The pictures of the gallery, each made by the ops that it is about."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import pixfuse

Panels = list[tuple[str, Tensor]]


def photograph(name: str, top: int, left: int, height: int, width: int) -> Tensor:
    """A part of a photograph of scikit-image, ``[1, 3, H, W]`` in [0, 1]."""
    found = importlib.util.find_spec("skimage").submodule_search_locations
    with Image.open(Path(found[0], "data", name)) as picture:
        pixels = np.asarray(picture.convert("RGB"), np.float32)[top : top + height, left : left + width]
    return torch.from_numpy(pixels / 255).permute(2, 0, 1)[None].contiguous()


def low_pass(factor: int, taps: int = 6) -> Tensor:
    """A windowed sinc that keeps what ``1 / factor`` of the samples can hold."""
    t = torch.arange(taps * factor) - (taps * factor - 1) / 2
    return pixfuse.setup_filter(torch.sinc(t / factor) * torch.hann_window(taps * factor + 2)[1:-1], separable=True)


def shrink() -> Panels:
    """A quarter of the size: what a filter without antialias leaves, and what one with it does."""
    x = photograph("astronaut.png", 210, 130, 300, 300)
    return [
        ("nearest", pixfuse.interpolate(x, scale_factor=1 / 4)),
        ("bilinear", pixfuse.interpolate(x, scale_factor=1 / 4, mode="bilinear")),
        ("bilinear, antialias", pixfuse.interpolate(x, scale_factor=1 / 4, mode="bilinear", antialias=True)),
        ("lanczos", pixfuse.interpolate(x, scale_factor=1 / 4, mode="lanczos", antialias=True)),
    ]


def enlarge() -> Panels:
    """Six times the size."""
    x = photograph("chelsea.png", 85, 125, 40, 40)
    return [
        ("nearest", pixfuse.interpolate(x, scale_factor=6)),
        ("bilinear", pixfuse.interpolate(x, scale_factor=6, mode="bilinear")),
        ("bicubic", pixfuse.interpolate(x, scale_factor=6, mode="bicubic")),
        ("lanczos", pixfuse.interpolate(x, scale_factor=6, mode="lanczos", antialias=True)),
    ]


def blur() -> Panels:
    """Binomial filters, and one that no box knows: upfirdn2d takes any taps."""
    x = photograph("coffee.png", 60, 220, 200, 200)
    streak = torch.diag(torch.ones(15))
    return [
        ("as it is", x),
        ("[1, 3, 3, 1]", pixfuse.filter2d(x, pixfuse.setup_filter([1, 3, 3, 1]))),
        ("binomial, 15 taps", pixfuse.filter2d(x, pixfuse.setup_filter(np.poly1d([1, 1]) ** 14))),
        ("a streak", pixfuse.filter2d(x, pixfuse.setup_filter(streak))),
    ]


def rings(size: int = 256) -> Tensor:
    """Circles that are finer the further out: what can't be kept at half the size shows up as other circles."""
    t = torch.arange(size) - size / 2
    return (0.5 + 0.5 * torch.cos((t[:, None].square() + t.square()) * torch.pi / size))[None, None]


def downsample() -> Panels:
    """Every second sample: without a filter, with a short one, with a long one."""
    x = rings()
    return [
        ("x[..., ::2, ::2]", x[..., ::2, ::2]),
        ("2x2 mean", F.avg_pool2d(x, 2)),
        ("downsample2d, [1, 3, 3, 1]", pixfuse.downsample2d(x, pixfuse.setup_filter([1, 3, 3, 1]))),
        ("downsample2d, 12 taps", pixfuse.downsample2d(x, low_pass(2))),
    ]


def upsample() -> Panels:
    """Four times the samples, by zeros and a filter."""
    x = photograph("coins.png", 20, 20, 40, 40)
    return [
        ("upsample_nearest", pixfuse.upsample_nearest(x, 4)),
        ("upsample2d, no filter: zeros", pixfuse.upsample2d(x, None, up=4, gain=1 / 16)),
        ("upsample2d, linear", pixfuse.upsample2d(x, pixfuse.setup_filter([1, 2, 3, 4, 3, 2, 1]), up=4)),
        ("upsample2d, 24 taps", pixfuse.upsample2d(x, low_pass(4), up=4)),
    ]


def aliasing() -> Panels:
    """Half a pixel's shift before or after the activation: the difference is what the activation aliased."""
    noise = torch.randn(1, 1, 96, 96, generator=torch.Generator().manual_seed(3))
    x = pixfuse.upsample2d(noise, low_pass(2, 12))  # smooth: nothing finer than half of what its samples can hold

    def shifted(x: Tensor) -> Tensor:
        taps = torch.sinc(torch.arange(24) - 11.5) * torch.hann_window(26)[1:-1]
        return pixfuse.upfirdn2d(x, pixfuse.setup_filter(taps, separable=True), padding=[12, 11, 12, 11])

    def lrelu(x: Tensor) -> Tensor:
        return pixfuse.bias_act(x, act="lrelu")

    def filtered(x: Tensor) -> Tensor:
        return pixfuse.filtered_lrelu(x, low_pass(4), low_pass(4), up=4, down=4, padding=[23, 23, 23, 23])

    def difference(act: Callable[[Tensor], Tensor]) -> Tensor:
        return (shifted(act(x)) - act(shifted(x)))[..., 20:-20, 20:-20]

    errors = [difference(lrelu), difference(filtered)]
    decibels = [10 * float(torch.log10(lrelu(x).square().mean() / e.square().mean())) for e in errors]
    return [
        ("the input", 0.5 + x[..., 20:-20, 20:-20] / 6),
        ("after lrelu", 0.5 + lrelu(x)[..., 20:-20, 20:-20] / 6),
        (f"aliased by lrelu, {-decibels[0]:.0f} dB", 0.5 + errors[0]),
        (f"aliased by filtered_lrelu, {-decibels[1]:.0f} dB", 0.5 + errors[1]),
    ]


def make(folder: Path) -> None:
    """Write every picture of the gallery to ``folder``."""
    for panels in (shrink, enlarge, blur, downsample, upsample, aliasing):
        with mpl.rc_context({"font.size": 8, "svg.fonttype": "path"}):
            figure = Figure((9.6, 2.7), layout="constrained")
            for axes, (title, x) in zip(figure.subplots(1, 4), panels(), strict=True):
                axes.imshow(x[0].clamp(0, 1).permute(1, 2, 0).squeeze(-1), cmap="gray", vmin=0, vmax=1)
                axes.set_title(title, fontsize=8)
                axes.set_axis_off()
            figure.savefig(folder / f"{panels.__name__}.png", dpi=160)
