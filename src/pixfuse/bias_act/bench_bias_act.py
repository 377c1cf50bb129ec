"""bias_act against the composition of PyTorch ops that it replaces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.timing import BenchRow, rows_of
from .op import bias_act

_CPU = [(4, 32, 128, 128), (1, 8, 8, 8)]  # 8 MiB of float32; a tiny one shows the overhead of a call
_GPU = [(16, 32, 1024, 1024), (1, 8, 8, 8)]
GAIN = 2**0.5
CLAMP = 1.75 * GAIN


def lrelu_clamp(x: Tensor, b: Tensor) -> Tensor:
    """Bias, leaky ReLU, gain and clamp as a StyleGAN layer has them."""
    return (F.leaky_relu(x + b.reshape(1, -1, 1, 1), 0.2) * GAIN).clamp(-CLAMP, CLAMP)


def swish(x: Tensor, b: Tensor) -> Tensor:
    """An activation with curvature, which keeps its input."""
    return F.silu(x + b.reshape(1, -1, 1, 1)) * GAIN


def _values(*shape: int, device: str) -> Tensor:
    """The same multiples of 1/16 in every run.

    With 1/32 more for x none of millions of sums is so near 0 or the clamp's edge that a rounding would decide.
    """
    values = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0))
    return values.mul_(16).round_().div_(16)


def rows(device: str) -> Iterator[BenchRow]:
    """Two activations, forward and backward, in float32 and bfloat16 (float16 on a GPU) and both layouts."""
    gpu = device != "cpu"
    for shape in _GPU if gpu else _CPU:
        for dtype in (torch.float32, torch.float16 if gpu else torch.bfloat16):
            for layout in ("contiguous", "channels_last"):
                x = _values(*shape, device=device).add_(1 / 32).to(dtype)
                if layout == "channels_last":
                    x = x.to(memory_format=torch.channels_last)
                b = _values(shape[1], device=device).to(dtype)
                size = "x".join(map(str, shape))
                yield from rows_of(
                    "bias_act",
                    f"{size} lrelu clamp",
                    layout,
                    [x, b],
                    lambda x, b: bias_act(x, b, act="lrelu", clamp=CLAMP),
                    lrelu_clamp,
                )
                yield from rows_of(
                    "bias_act", f"{size} swish", layout, [x, b], lambda x, b: bias_act(x, b, act="swish"), swish
                )
