"""A stand-in for a face restorer written for BasicSR's ``basicsr.ops``. Nothing in it knows of pixfuse."""

import torch
from basicsr.ops.fused_act import FusedLeakyReLU, fused_leaky_relu
from basicsr.ops.upfirdn2d import upfirdn2d
from torch import nn


class Smooth(nn.Module):
    """FIR filter over an upsampled image."""

    def __init__(self, taps):
        super().__init__()
        taps = torch.tensor(taps, dtype=torch.float32)
        self.register_buffer("kernel", torch.outer(taps, taps) * 4 / taps.sum() ** 2)

    def forward(self, x):
        """Twice the size of ``x``."""
        return upfirdn2d(x, self.kernel, up=2, down=1, pad=(2, 1))


class Restorer(nn.Module):
    """Upsampling, a convolution with a fused activation, and one on a vector."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            FusedLeakyReLU(channels),
            Smooth((1, 3, 3, 1)),
            nn.Conv2d(channels, 3, 3, padding=1),
        )
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        """A picture of twice the size, and a code."""
        y = self.body(x)
        return y, fused_leaky_relu(y.mean((2, 3)), self.bias)


if __name__ == "__main__":
    torch.manual_seed(0)
    y, code = Restorer(8)(torch.rand(2, 3, 12, 10))
    (y.square().mean() + code.square().mean()).backward()
    print(f"restorer: {tuple(y.shape)}, mean {y.mean():.6f}, code {code.abs().mean():.6f}")
