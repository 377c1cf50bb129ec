"""filtered_lrelu against compositions of PyTorch's convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.testing import as_channels_last
from .._shared.timing import BenchRow, forward_backward_of, rows_of
from .cases import low_pass
from .op import filtered_lrelu

_GAIN, _SLOPE, _CLAMP = math.sqrt(2), 0.2, 256.0
# Shape, up, down, taps up, taps down; the layers of StyleGAN3.
_CPU = [
    ((4, 32, 128, 128), 2, 2, 12, 12),
    ((1, 32, 74, 74), 4, 2, 24, 12),
    ((2, 32, 36, 36), 2, 2, 12, 12),
    ((1, 3, 256, 256), 2, 2, 12, 12),
    ((1, 8, 8, 8), 2, 2, 12, 12),
]
_GPU = [
    ((8, 128, 276, 276), 2, 2, 12, 12),
    ((8, 128, 148, 148), 4, 2, 24, 12),
    ((8, 512, 84, 84), 2, 2, 12, 12),
]


def rows(device: str) -> Iterator[BenchRow]:
    """Forward and backward in float32 and bfloat16 (float16 on a GPU) and both layouts."""
    gpu = device != "cpu"
    for shape, up, down, ku, kd in _GPU if gpu else _CPU:
        fu, fd = low_pass(ku).to(device), low_pass(kd).to(device)
        total = ku + kd - 1 - down  # the result has up / down times the size
        pad = (total - total // 2, total // 2)

        def ours(x: Tensor, b: Tensor, c: tuple = (fu, fd, up, down, pad)) -> Tensor:
            fu, fd, up, down, pad = c
            return filtered_lrelu(x, fu, fd, b, up, down, (*pad, *pad), _GAIN, _SLOPE, _CLAMP)

        def eager(x: Tensor, b: Tensor, c: tuple = (fu, fd, up, down, pad)) -> Tensor:
            return composition(x, b, *c, transposed=False)

        def transposed(x: Tensor, b: Tensor, c: tuple = (fu, fd, up, down, pad)) -> Tensor:
            return composition(x, b, *c, transposed=True)

        for dtype in (torch.float32, torch.float16 if gpu else torch.bfloat16):
            for layout in ("contiguous", "channels_last"):
                x = torch.randn(shape, device=device).to(dtype)
                if layout == "channels_last":
                    x = as_channels_last(x)
                b = torch.randn(shape[1], device=device).to(dtype)
                case = f"{'x'.join(map(str, shape))} up{up} down{down} {ku}+{kd} taps"
                peers: dict[str, Callable[..., Tensor]] = {"transposed": transposed}
                for row in rows_of("filtered_lrelu", case, layout, [x, b], ours, eager, peers=peers):
                    yield row if row.direction == "forward" else replace(row, check=_near(ours, eager, x, b))


def composition(
    x: Tensor, b: Tensor, fu: Tensor, fd: Tensor, up: int, down: int, pad: tuple[int, int], transposed: bool
) -> Tensor:
    """The same by depthwise convolutions: on the image with zeros inserted, or transposed ones that insert them."""
    n, c, h, w = x.shape
    x = x + b.reshape(1, -1, 1, 1)
    ku = len(fu)
    f = (fu * up).to(x.dtype)
    if transposed:
        row, column = f.reshape(1, 1, 1, ku).expand(c, 1, 1, ku), f.reshape(1, 1, ku, 1).expand(c, 1, ku, 1)
        x = F.conv_transpose2d(x, row, stride=(1, up), groups=c)
        x = F.conv_transpose2d(x, column, stride=(up, 1), groups=c)
        # It inserts no zeros after the last sample and pads by ku - 1.
        before, after = pad[0] - (ku - 1), pad[1] - (ku - 1) + up - 1
        x = F.pad(x, (before, after, before, after))
    else:
        row, column = _taps(f, c)
        wide = x.new_zeros(n, h * up, w * up, c).permute(0, 3, 1, 2) if not x.is_contiguous() else None
        wide = x.new_zeros(n, c, h * up, w * up) if wide is None else wide
        wide[:, :, ::up, ::up] = x
        x = F.conv2d(F.conv2d(F.pad(wide, (*pad, *pad)), row, groups=c), column, groups=c)
    x = (F.leaky_relu(x, _SLOPE) * _GAIN).clamp(-_CLAMP, _CLAMP)
    row, column = _taps(fd.to(x.dtype), c)
    return F.conv2d(F.conv2d(x, row, stride=(1, down), groups=c), column, stride=(down, 1), groups=c)


def _taps(f: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Weights ``[C, 1, 1, k]`` and ``[C, 1, k, 1]`` that convolve with ``f``."""
    f = f.flip(0)
    return f.reshape(1, 1, 1, -1).expand(channels, -1, -1, -1), f.reshape(1, 1, -1, 1).expand(channels, -1, -1, -1)


def _near(ours: Callable[..., Tensor], eager: Callable[..., Tensor], x: Tensor, b: Tensor) -> Callable[[], None]:
    """A check of the gradients by norm: rounding puts a few of a million samples on the other side of a kink."""

    def check() -> None:
        dy = torch.randn_like(ours(x, b))
        got = forward_backward_of(ours, [x, b], dy)()
        truth = forward_backward_of(eager, [x.double(), b.double()], dy.double())()
        for a, e in zip(got, truth, strict=True):
            error = float((a.double() - e).norm() / e.norm())
            limit = 1e-3 if a.dtype == torch.float32 else 0.05
            if not error <= limit:
                raise AssertionError(f"error {error:.3g} of the norm against float64, where {limit} is allowed")

    return check
