"""A stand-in for somebody's project written for NVlabs' ``torch_utils.ops``. Nothing in it knows of pixfuse."""

import torch
from torch_utils.ops import bias_act, conv2d_resample, upfirdn2d


class Block(torch.nn.Module):
    """Two convolutions to half the resolution, and a short cut."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(inputs, inputs, 3, 3) / (3 * inputs**0.5))
        self.second = torch.nn.Parameter(torch.randn(outputs, inputs, 3, 3) / (3 * inputs**0.5))
        self.skip = torch.nn.Parameter(torch.randn(outputs, inputs, 1, 1) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(outputs))
        self.register_buffer("resample_filter", upfirdn2d.setup_filter([1, 3, 3, 1]))

    def forward(self, x):
        """``[N, inputs, H, W]`` to ``[N, outputs, H / 2, W / 2]``."""
        f = self.resample_filter
        y = conv2d_resample.conv2d_resample(x=x, w=self.skip, f=f, down=2)
        x = bias_act.bias_act(conv2d_resample.conv2d_resample(x=x, w=self.first, padding=1), act="lrelu")
        x = conv2d_resample.conv2d_resample(x=x, w=self.second, f=f, down=2, padding=1)
        return y.add_(bias_act.bias_act(x, self.bias, act="lrelu", clamp=256))


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    y = Block(8, 16)(x)
    (slope,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
    slope.square().sum().backward()
    print(f"discriminator block: {tuple(y.shape)}, mean {y.mean():.6f}, R1 {slope.square().sum():.3f}")
