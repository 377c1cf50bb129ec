"""Generator and discriminator of StyleGAN2 on the ops of pixfuse, written from the papers.

Karras et al., "Analyzing and Improving the Image Quality of StyleGAN" (2020): modulated convolutions, a generator with
skips and a residual discriminator (figure 7), equalised learning rates. Karras et al., "Training Generative Adversarial
Networks with Limited Data" (2020), appendix D: 16 bits at the highest resolutions, with clamped activations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import pixfuse

FIR = (1, 3, 3, 1)


class Widths:
    """Channels and precision of each resolution; configuration E of the paper by default, F with ``base`` 32768.

    Args:
        resolution: side of the pictures, a power of 2, at least 8.
        base: channels times resolution.
        most: the most channels anywhere.
        half: how many of the highest resolutions compute in float16.
        channels_last: the layout of all activations.
    """

    def __init__(
        self, resolution: int, base: int = 16384, most: int = 512, half: int = 0, channels_last: bool = False
    ) -> None:
        if resolution < 8 or resolution & (resolution - 1):
            raise ValueError(f"resolution must be a power of 2 and at least 8, got {resolution}")
        self.resolution, self.base, self.most = resolution, base, most
        self.sides = [2**i for i in range(2, resolution.bit_length())]  # 4, 8, ... resolution
        self.halves = self.sides[1:][-half:] if half else []
        self.clamp = 256.0 if half else None
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def channels(self, side: int) -> int:
        """Channels at a resolution."""
        return max(1, min(self.base // side, self.most))

    def enter(self, x: Tensor, side: int) -> Tensor:
        """``x`` in the dtype and layout of a resolution."""
        dtype = torch.float16 if side in self.halves else torch.float32
        return x.to(dtype=dtype, memory_format=self.layout)


class Linear(nn.Module):
    """Fully connected layer with equalised learning rate; weights learn ``rate`` times as fast.

    ``scale`` is 1 for inputs that come times the default, so that layers which share them need not differentiate it.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        act: str = "linear",
        bias: float = 0.0,
        rate: float = 1.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / rate)
        self.bias = nn.Parameter(torch.full((outputs,), bias / rate))
        self.act, self.scale, self.rate = act, rate / math.sqrt(inputs) if scale is None else scale, rate

    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs]`` to ``[N, outputs]``."""
        weight = self.weight.view_as(self.weight)  # gives the gradient of one row the strides that DDP expects
        y = torch.addmm(self.bias, x, weight.mT, beta=self.rate, alpha=self.scale)
        return pixfuse.bias_act(y, act=self.act)


class Conv(nn.Module):
    """Convolution with equalised learning rate and optional downsampling."""

    filter: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int, down: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.register_buffer("filter", pixfuse.setup_filter(FIR), persistent=False)
        self.scale, self.down = 1 / math.sqrt(inputs * kernel**2), down

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """``gain`` scales the result."""
        w = (self.weight * (self.scale * gain)).to(x.dtype)
        return pixfuse.conv2d_resample(x, w, self.filter, down=self.down, padding=self.weight.shape[-1] // 2)


class ActiveConv(Conv):
    """The same with bias, leaky ReLU and clamp."""

    def __init__(self, inputs: int, outputs: int, kernel: int, down: int = 1, clamp: float | None = None) -> None:
        super().__init__(inputs, outputs, kernel, down)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.clamp = clamp

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """``gain`` scales the result."""
        clamp = None if self.clamp is None else self.clamp * gain
        return pixfuse.bias_act(super().forward(x), self.bias, act="lrelu", gain=math.sqrt(2) * gain, clamp=clamp)


# --- generator ------------------------------------------------------------------------------------------------


class Mapping(nn.Module):
    """``z`` to ``w``: 8 layers that learn slowly, and the running mean of ``w`` that truncation needs."""

    mean: Tensor

    def __init__(self, size: int, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Linear(size, size, "lrelu", rate=0.01) for _ in range(layers)))
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, z: Tensor) -> Tensor:
        """``[N, size]`` to ``[N, size]``."""
        w: Tensor = self.layers(z * (z.square().mean(1, keepdim=True) + 1e-8).rsqrt())
        if self.training and torch.is_grad_enabled():
            self.mean.lerp_(w.detach().mean(0), 0.002)
        return w


class StyledConv(nn.Module):
    """Modulated convolution, noise, bias and activation."""

    filter: Tensor
    fixed_noise: Tensor

    def __init__(self, inputs: int, outputs: int, size: int, side: int, up: int, clamp: float | None) -> None:
        super().__init__()
        self.affine = Linear(size, inputs, bias=1, scale=1)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.strength = nn.Parameter(torch.zeros(()))
        self.register_buffer("filter", pixfuse.setup_filter(FIR), persistent=False)
        self.register_buffer("fixed_noise", torch.randn(1, 1, side, side))
        self.side, self.up, self.clamp = side, up, clamp

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Fresh noise in training, always the same noise otherwise. ``w`` comes times ``1 / sqrt(size)``."""
        noise = self.fixed_noise
        if self.training:
            noise = torch.randn(x.shape[0], 1, self.side, self.side, device=x.device)
        x = pixfuse.modulated_conv2d(
            x,
            self.weight,
            self.affine(w),
            noise * self.strength,
            up=self.up,
            padding=1,
            resample_filter=self.filter,
            fused_modconv=not self.training,  # a shared convolution is the faster one to differentiate
        )
        return pixfuse.bias_act(x, self.bias, act="lrelu", clamp=self.clamp)


class ToRGB(nn.Module):
    """Modulated 1x1 convolution to a picture, without demodulation."""

    def __init__(self, inputs: int, size: int, clamp: float | None) -> None:
        super().__init__()
        self.affine = Linear(size, inputs, bias=1, scale=1)
        self.weight = nn.Parameter(torch.randn(3, inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(3))
        self.scale, self.clamp = 1 / math.sqrt(inputs), clamp

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` to ``[N, 3, H, W]``. ``w`` comes times ``1 / sqrt(size)``."""
        styles = self.affine(w) * self.scale
        x = pixfuse.modulated_conv2d(x, self.weight, styles, demodulate=False, fused_modconv=not self.training)
        return pixfuse.bias_act(x, self.bias, clamp=self.clamp)


class Synthesis(nn.Module):
    """Pictures from one ``w`` per layer: every resolution adds its own RGB to the upsampled one of those below."""

    filter: Tensor

    def __init__(self, widths: Widths, size: int) -> None:
        super().__init__()
        self.widths = widths
        self.start = nn.Parameter(torch.randn(widths.channels(4), 4, 4))
        self.convs, self.rgbs = nn.ModuleList(), nn.ModuleList()
        for side in widths.sides:
            inputs, outputs, clamp = widths.channels(max(side // 2, 4)), widths.channels(side), widths.clamp
            if side > 4:
                self.convs.append(StyledConv(inputs, outputs, size, side, 2, clamp))
            self.convs.append(StyledConv(outputs, outputs, size, side, 1, clamp))
            self.rgbs.append(ToRGB(outputs, size, clamp))
        self.register_buffer("filter", pixfuse.setup_filter(FIR), persistent=False)
        self.number = len(self.convs) + 1  # each RGB shares its w with the convolution after it

    def forward(self, ws: Tensor) -> Tensor:
        """``[N, number, size]`` to ``[N, 3, resolution, resolution]``."""
        x = self.start.expand(ws.shape[0], -1, -1, -1)
        each = (ws * (1 / math.sqrt(ws.shape[2]))).unbind(1)  # whose gradients are stacked once
        convs, picture = iter(enumerate(self.convs)), None
        for side, rgb in zip(self.widths.sides, self.rgbs, strict=True):
            x = self.widths.enter(x, side)
            for _ in range(1 if side == 4 else 2):
                i, conv = next(convs)
                x = conv(x, each[i])
            if picture is not None:
                picture = pixfuse.upsample2d(picture, self.filter)
            y = rgb(x, each[i + 1]).float()
            picture = y if picture is None else picture + y
        return picture


class Generator(nn.Module):
    """Mapping and synthesis."""

    def __init__(self, widths: Widths, size: int = 512) -> None:
        super().__init__()
        self.size = size
        self.mapping = Mapping(size)
        self.synthesis = Synthesis(widths, size)

    def forward(self, z: Tensor, mixing: float = 0.0, truncation: float = 1.0) -> tuple[Tensor, Tensor]:
        """Pictures ``[N, 3, H, W]`` and the ``w`` of each layer ``[N, layers, size]``.

        Args:
            z: ``[N, size]``, normal.
            mixing: probability that the layers from a random one on take their ``w`` from another ``z``.
            truncation: 1 for all the variety, less for pictures closer to the mean.
        """
        number = self.synthesis.number
        if mixing > 0:  # decided on the device: a CUDA graph draws anew at every replay
            ws, others = self.mapping(torch.cat([z, torch.randn_like(z)]))[:, None].chunk(2)
            cut = torch.randint(1, number, (), device=z.device)
            cut = torch.where(torch.rand((), device=z.device) < mixing, cut, number)
            ws = torch.where(torch.arange(number, device=z.device)[:, None] < cut, ws, others)
        else:
            ws = self.mapping(z)[:, None].expand(-1, number, -1)
        if truncation != 1:
            ws = self.mapping.mean.lerp(ws, truncation)
        return self.synthesis(ws), ws


# --- discriminator --------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions to half the resolution, and a linear short cut."""

    def __init__(self, inputs: int, outputs: int, clamp: float | None) -> None:
        super().__init__()
        self.first = ActiveConv(inputs, inputs, 3, clamp=clamp)
        self.second = ActiveConv(inputs, outputs, 3, 2, clamp)
        self.skip = Conv(inputs, outputs, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` to ``[N, outputs, H / 2, W / 2]``."""
        return self.second(self.first(x), math.sqrt(0.5)) + self.skip(x, math.sqrt(0.5))


class Discriminator(nn.Module):
    """Pictures to logits: residual blocks down to 4x4, deviation over the minibatch, two layers."""

    def __init__(self, widths: Widths, group: int = 4) -> None:
        super().__init__()
        self.widths, self.group = widths, group
        clamp, last = widths.clamp, widths.channels(4)
        self.enter = ActiveConv(3, widths.channels(widths.resolution), 1, clamp=clamp)
        self.blocks = nn.ModuleList(
            Residual(widths.channels(s), widths.channels(s // 2), clamp) for s in reversed(widths.sides[1:])
        )
        self.conv = ActiveConv(last + 1, last, 3, clamp=clamp)
        self.dense = Linear(last * 16, last, "lrelu")
        self.out = Linear(last, 1)

    def forward(self, picture: Tensor) -> Tensor:
        """``[N, 3, H, W]`` to ``[N, 1]``."""
        x = self.enter(self.widths.enter(picture, self.widths.resolution))
        for side, block in zip(reversed(self.widths.sides[1:]), self.blocks, strict=True):
            x = block(self.widths.enter(x, side))
        x = self.conv(with_deviation(self.widths.enter(x, 4), self.group))
        return self.out(self.dense(x.flatten(1)))


def with_deviation(x: Tensor, group: int) -> Tensor:
    """``x`` and one more channel: the mean deviation among each ``group`` pictures of the batch."""
    n, c, h, w = x.shape
    size = math.gcd(n, group)
    y = x.reshape(size, n // size, c, h, w)
    y = (y - y.mean(0)).square().mean(0)
    y = (y + 1e-8).sqrt().mean((1, 2, 3))
    y = y.repeat(size).reshape(n, 1, 1, 1).expand(n, 1, h, w)
    return torch.cat([x, y], 1)
