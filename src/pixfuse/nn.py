"""Modules on the ops of pixfuse. Thin: parameters and buffers under the names of their stock twins, no maths.

A state dict of the twin loads as it is: ``GroupNorm`` and ``GroupNormSiLU`` from ``torch.nn.GroupNorm``,
``Upsample`` from ``torch.nn.Upsample`` (it has none), ``FusedLeakyReLU`` (key ``bias``) and ``Blur`` (key ``kernel``)
from the StyleGAN2 ports, ``FilteredLReLU`` (keys ``bias``, ``up_filter``, ``down_filter``) from a StyleGAN3 layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Self

from . import bias_act, filtered_lrelu, group_norm, interpolate, setup_filter, upfirdn2d

__all__ = ["Blur", "FilteredLReLU", "FusedLeakyReLU", "GroupNorm", "GroupNormSiLU", "Upsample"]

for _op in ("bias_act", "filtered_lrelu", "group_norm", "interpolate", "upfirdn2d"):
    torch.fx.wrap(_op)

Filter = Tensor | Sequence[float] | None


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` on :func:`pixfuse.group_norm`: its arguments, its state dict.

    Example:
        >>> import torch, pixfuse.nn
        >>> pixfuse.nn.GroupNorm(4, 8)(torch.zeros(1, 8, 2, 2)).shape
        torch.Size([1, 8, 2, 2])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ``[N, C, *spatial]``."""
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class GroupNormSiLU(GroupNorm):
    """GroupNorm and SiLU in one pass; takes the place of ``torch.nn.GroupNorm`` followed by ``torch.nn.SiLU``.

    Example:
        >>> import torch, pixfuse.nn
        >>> pixfuse.nn.GroupNormSiLU(4, 8)(torch.zeros(1, 8, 2, 2)).abs().max()
        tensor(0., grad_fn=<MaxBackward1>)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ``[N, C, *spatial]`` and apply SiLU."""
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps, act="silu")


class FusedLeakyReLU(nn.Module):
    """Bias, leaky ReLU and scale in one pass: ``scale * leaky_relu(x + bias, negative_slope)``.

    Args:
        channel: channels of the input, on axis 1.
        bias: whether there is a bias (zeros at first).
        negative_slope: slope below zero.
        scale: factor of the result.

    Example:
        >>> import torch, pixfuse.nn
        >>> pixfuse.nn.FusedLeakyReLU(2, bias=False, scale=1)(torch.tensor([[-1.0, 1.0]]))
        tensor([[-0.2000,  1.0000]])
    """

    def __init__(
        self, channel: int, bias: bool = True, negative_slope: float = 0.2, scale: float = math.sqrt(2)
    ) -> None:
        super().__init__()
        self.channel = channel
        self.negative_slope = negative_slope
        self.scale = scale
        self.bias = nn.Parameter(torch.zeros(channel)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape ``[N, C, ...]``."""
        return bias_act(x, self.bias, act="lrelu", alpha=self.negative_slope, gain=self.scale)

    def extra_repr(self) -> str:
        """The arguments."""
        return (
            f"{self.channel}, bias={self.bias is not None}, negative_slope={self.negative_slope:g}, "
            f"scale={self.scale:.4g}"
        )


class Upsample(nn.Upsample):
    """``torch.nn.Upsample`` on :func:`pixfuse.interpolate`, with its arguments and two more choices.

    Args:
        size: size of the result, or None.
        scale_factor: factor of the sizes, or None.
        mode: as :func:`pixfuse.interpolate`, ``"lanczos"`` too.
        align_corners: as there.
        recompute_scale_factor: as there.
        antialias: as there.

    Example:
        >>> import torch, pixfuse.nn
        >>> pixfuse.nn.Upsample(scale_factor=2)(torch.tensor([[[[1.0, 2.0]]]]))
        tensor([[[[1., 1., 2., 2.],
                  [1., 1., 2., 2.]]]])
    """

    def __init__(
        self,
        size: int | tuple[int, ...] | None = None,
        scale_factor: float | tuple[float, ...] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        antialias: bool = False,
    ) -> None:
        super().__init__(size, scale_factor, mode, align_corners, recompute_scale_factor)
        self.antialias = antialias

    def forward(self, x: Tensor) -> Tensor:
        """Resize ``x`` ``[N, C, *spatial]``."""
        return interpolate(
            x,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            antialias=self.antialias,
            recompute_scale_factor=self.recompute_scale_factor,
        )


class _Filters(nn.Module):
    """A module whose filters stay float32 whatever it is cast to, since the ops take them so."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, taps in self._buffers.items():
            if taps is not None and taps.dtype != torch.float32:
                self._buffers[name] = before[name].to(taps.device)  # type: ignore[union-attr]
        return self


class Blur(_Filters):
    """A FIR filter, with resampling if asked for.

    Args:
        kernel: taps, 1-D (for both axes) or 2-D; normalised to sum 1.
        pad: ``(before, after)`` for both axes, counted at the upsampled size; the default keeps the picture where it
            is and its size a multiple (``up``) or a fraction (``down``) of the input's.
        upsample_factor: the filter follows an upsampling by zeros of this factor; multiplies it by the square.
        up: upsample first, in the same pass (which multiplies by the square too).
        down: keep every ``down``-th sample.

    Example:
        >>> import torch, pixfuse.nn
        >>> pixfuse.nn.Blur([1, 2, 1])(torch.eye(3)[None, None])
        tensor([[[[0.3125, 0.2500, 0.0625],
                  [0.2500, 0.3750, 0.2500],
                  [0.0625, 0.2500, 0.3125]]]])
    """

    kernel: Tensor

    def __init__(
        self,
        kernel: Tensor | Sequence[float] = (1, 3, 3, 1),
        pad: tuple[int, int] | None = None,
        upsample_factor: int = 1,
        up: int = 1,
        down: int = 1,
    ) -> None:
        super().__init__()
        taps = setup_filter(kernel, separable=False) * upsample_factor**2
        height, width = taps.shape
        if pad is None:
            x, y = (((k + up - down) // 2, (k - up - down + 1) // 2) for k in (width, height))
        else:
            x = y = (int(pad[0]), int(pad[1]))
        self.padding = [*x, *y]
        self.up = up
        self.down = down
        self.register_buffer("kernel", taps)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape ``[N, C, H, W]``."""
        return upfirdn2d(x, self.kernel, up=self.up, down=self.down, padding=self.padding, gain=self.up**2)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"kernel={list(self.kernel.shape)}, padding={self.padding}, up={self.up}, down={self.down}"


class FilteredLReLU(_Filters):
    """Bias, upsampling, leaky ReLU, clamp and downsampling in one fused op, without aliasing.

    Args:
        channels: channels of the input.
        up_filter: taps of the first filter (1-D or 2-D), or None.
        down_filter: taps of the second one, or None.
        up: factor of the upsampling.
        down: factor of the downsampling.
        padding: int, ``[x, y]`` or ``[x0, x1, y0, y1]`` at the upsampled size.
        gain: factor before the clamp.
        slope: slope below zero.
        clamp: largest magnitude before the second filter, or None.
        flip_filter: whether to correlate instead of convolve.
        bias: whether there is a bias (zeros at first).

    Example:
        >>> import torch, pixfuse.nn
        >>> layer = pixfuse.nn.FilteredLReLU(3, [1, 3, 3, 1], [1, 3, 3, 1], up=2, down=2, padding=3)
        >>> layer(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 3, 8, 8])
    """

    up_filter: Tensor | None
    down_filter: Tensor | None

    def __init__(
        self,
        channels: int,
        up_filter: Filter = None,
        down_filter: Filter = None,
        up: int = 1,
        down: int = 1,
        padding: int | Sequence[int] = 0,
        gain: float = math.sqrt(2),
        slope: float = 0.2,
        clamp: float | None = None,
        flip_filter: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.up = up
        self.down = down
        self.padding = padding
        self.gain = gain
        self.slope = slope
        self.clamp = clamp
        self.flip_filter = flip_filter
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.register_buffer("up_filter", None if up_filter is None else setup_filter(up_filter))
        self.register_buffer("down_filter", None if down_filter is None else setup_filter(down_filter))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape ``[N, C, H, W]``."""
        return filtered_lrelu(
            x,
            self.up_filter,
            self.down_filter,
            self.bias,
            up=self.up,
            down=self.down,
            padding=self.padding,
            gain=self.gain,
            slope=self.slope,
            clamp=self.clamp,
            flip_filter=self.flip_filter,
        )

    def extra_repr(self) -> str:
        """The arguments."""
        return (
            f"{self.channels}, up={self.up}, down={self.down}, padding={self.padding}, gain={self.gain:.4g}, "
            f"slope={self.slope:g}, clamp={self.clamp}, bias={self.bias is not None}"
        )
