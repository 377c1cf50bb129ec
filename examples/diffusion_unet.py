"""A diffusion U-Net of stock PyTorch layers, put on pixfuse by one call and timed before and after.

    python diffusion_unet.py                                          # on the CPU, or a GPU if there is one
    python diffusion_unet.py --device cuda --width 192 --size 64 --dtype bfloat16 --layout channels_last

Prints what ``pixfuse.patch`` replaced, how far the results are from the stock ones, and the times of both.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import pixfuse


class ResBlock(nn.Module):
    """GroupNorm, SiLU, convolution, twice, with the time step added in between."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.norm1, self.act1 = nn.GroupNorm(8, inputs), nn.SiLU()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(times, outputs))
        self.norm2, self.act2 = nn.GroupNorm(8, outputs), nn.SiLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.short = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """``[N, inputs, H, W]`` to ``[N, outputs, H, W]``."""
        h = self.conv1(self.act1(self.norm1(x)))
        h = h + self.time(t)[:, :, None, None]
        return self.short(x) + self.conv2(self.act2(self.norm2(h)))


class Attention(nn.Module):
    """Self-attention between all pixels."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        n, c, height, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, 3, self.heads, c // self.heads, height * width).mT.unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).mT.reshape(n, c, height, width)
        return x + self.out(y)


class UNet(nn.Module):
    """Predicts the noise in pictures ``[N, 3, H, W]`` (sides multiples of 4) at times ``[N]``."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths, times = (width, 2 * width, 2 * width), 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for a, b in zip((width, *widths), widths, strict=False):
            self.down.append(ResBlock(a, b, times))
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, stride=2, padding=1) for w in widths[:-1])
        self.middle = nn.ModuleList([ResBlock(widths[-1], widths[-1], times), Attention(widths[-1])])
        for a, b in zip(reversed(widths), (*reversed(widths[:-1]), width), strict=True):
            self.up.append(ResBlock(2 * a, b, times))
        self.grow = nn.ModuleList(nn.Upsample(scale_factor=2, mode="nearest") for _ in widths[:-1])
        self.leave = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The noise."""
        rates = torch.exp(-math.log(10_000) * torch.arange(self.width // 2, device=t.device) / (self.width // 2))
        angles = t[:, None] * rates
        t = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        x = self.enter(x)
        skips = []
        for i, block in enumerate(self.down):
            x = block(x, t)
            skips.append(x)
            if i < len(self.shrink):
                x = self.shrink[i](x)
        block, attention = self.middle
        x = attention(block(x, t))
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, skips.pop()], 1), t)
            if i < len(self.grow):
                x = self.grow[i](x)
        return self.leave(x)


def train(net: UNet, x: Tensor, t: Tensor) -> Tensor:
    """One step of training without the optimizer's; returns the gradient that is farthest from the loss."""
    net.zero_grad()
    net(x, t).float().square().mean().backward()
    found = net.enter.weight.grad
    assert found is not None
    return found


def sample(net: UNet, x: Tensor, t: Tensor) -> Tensor:
    """One step of sampling."""
    with torch.no_grad():
        return net(x, t)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run it. Returns how far the results and the gradients of both are apart, relative to their norm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=64, help="channels at full resolution, a multiple of 8")
    parser.add_argument("--size", type=int, default=32, help="side of the pictures, a multiple of 4")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--layout", default="channels_last", choices=("contiguous", "channels_last"))
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each kind")
    args = parser.parse_args(arguments)
    for name, unit in (("width", 8), ("size", 4), ("batch", 1), ("rounds", 1)):
        if getattr(args, name) < 1 or getattr(args, name) % unit:
            parser.error(f"--{name} must be a positive multiple of {unit}, got {getattr(args, name)}")
    try:
        device = torch.device(args.device)
        torch.ones(1, device=device).item()
    except Exception:  # each kind of device has its own
        parser.error(f"--device must be a device of this machine, got {args.device!r}")
    console, dtype = Console(), getattr(torch, args.dtype)
    layout = torch.channels_last if args.layout == "channels_last" else torch.contiguous_format

    torch.manual_seed(0)
    stock = UNet(args.width).to(device, dtype).to(memory_format=layout)
    patched = copy.deepcopy(stock)
    console.print(str(pixfuse.patch(patched)), markup=False, highlight=False)
    x = torch.randn(args.batch, 3, args.size, args.size).to(device, dtype).contiguous(memory_format=layout)
    t = torch.linspace(0, 1000, args.batch, device=device)

    apart = {}
    for step in (sample, train):
        before, after = (step(net, x, t).double() for net in (stock, patched))
        apart[step.__name__] = float((after - before).norm() / before.norm())

    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in track(range(args.rounds + 2), "timing", console=console, transient=True):
        for step in (sample, train):  # in turns, so that what else the machine does hits both alike
            for name, net in (("stock", stock), ("pixfuse", patched)):
                if device.type == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                step(net, x, t)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.setdefault((step.__name__, name), []).append(time.perf_counter() - start)

    table = Table(title=f"U-Net, {list(x.shape)}, {args.dtype}, {args.layout}, {args.device}", title_justify="left")
    for column in ("step", "stock", "pixfuse", "ratio", "relative difference"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for step, difference in apart.items():
        a, b = (1e3 * median(seconds[step, name][2:]) for name in ("stock", "pixfuse"))
        table.add_row(step, f"{a:.1f} ms", f"{b:.1f} ms", f"{a / b:.2f}", f"{difference:.1e}")
    console.print(table)
    return apart


if __name__ == "__main__":
    main()
