"""What the two PyTorch ports of StyleGAN2, rosinality's and BasicSR's, have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import bias_act, upfirdn2d
from .._shared import checks


def resample(x: Any, kernel: Any, up: Any, down: Any, padding: list[Any]) -> Tensor:
    """Upsample, pad, convolve with a 2-D kernel of the dtype of ``x``, downsample."""
    op = "upfirdn2d"
    checks.floating(op, "input", x)
    checks.floating(op, "kernel", kernel)
    if kernel.dim() != 2 or kernel.numel() == 0:
        checks.refuse(op, "kernel", "be 2-D ([kh, kw])", checks.words(f"shape {list(kernel.shape)}"))
    if kernel.dtype not in (x.dtype, torch.float32):
        checks.refuse(op, "kernel", f"have the dtype of input ({checks.dtype_name(x.dtype)}) or float32", kernel)
    checks.same_device(op, "kernel", kernel, x, "input")
    return upfirdn2d(x, kernel if kernel.dtype == torch.float64 else kernel.float(), up, down, padding)


def leaky_relu(op: str, x: Any, bias: Any, negative_slope: Any, scale: Any) -> Tensor:
    """Bias along axis 1, leaky ReLU, scale."""
    checks.floating(op, "input", x)
    if x.dim() < 2:
        checks.refuse(op, "input", "be at least 2-D ([N, C, ...])", checks.words(f"shape {list(x.shape)}"))
    if bias is not None:
        checks.vector(op, "bias", bias, x.shape[1], "the channels of input", x, "input")
    slope = checks.real(op, "negative_slope", negative_slope)
    return bias_act(x, bias, act="lrelu", alpha=slope, gain=checks.real(op, "scale", scale))


class LeakyReLU(nn.Module):
    """The module of :func:`leaky_relu`; state-dict key ``bias``."""

    def __init__(self, channels: int, bias: bool, negative_slope: float, scale: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.negative_slope = negative_slope
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """``input`` of shape ``[N, C, ...]``."""
        return leaky_relu(type(self).__name__, input, self.bias, self.negative_slope, self.scale)

    def extra_repr(self) -> str:
        """The arguments."""
        channels = None if self.bias is None else len(self.bias)
        return f"{channels}, negative_slope={self.negative_slope:g}, scale={self.scale:.4g}"
