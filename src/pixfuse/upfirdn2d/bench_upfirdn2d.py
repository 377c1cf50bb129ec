"""upfirdn2d against the ways of doing it with PyTorch's own ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.timing import BenchRow, rows_of
from .filters import setup_filter
from .op import upfirdn2d

# name: up, down, padding, gain, and the input of the CPU rows (outputs under 16 MiB) and of the GPU rows
_WORK = {
    "up2": (2, 1, [2, 1, 2, 1], 4.0, (1, 32, 128, 128), (16, 32, 512, 512)),
    "down2": (1, 2, [1, 1, 1, 1], 1.0, (4, 32, 128, 128), (16, 32, 1024, 1024)),
    "blur": (1, 1, [2, 1, 2, 1], 1.0, (4, 32, 128, 128), (16, 32, 1024, 1024)),
}
_TINY = (1, 8, 8, 8)


def depthwise(f: Tensor, up: int, down: int, padding: list[int], gain: float) -> Callable[[Tensor], Tensor]:
    """One grouped convolution over all channels, after padding; transposed for up."""
    return lambda x: _convolve(x, f, up, down, padding, gain, x.shape[1])


def per_plane(f: Tensor, up: int, down: int, padding: list[int], gain: float) -> Callable[[Tensor], Tensor]:
    """One convolution of single-channel images, one for each channel of each image."""

    def call(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = _convolve(x.reshape(n * c, 1, h, w), f, up, down, padding, gain, 1)
        return y.reshape(n, c, *y.shape[2:]).to(
            memory_format=torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else None
        )

    return call


def two_passes(f: Tensor, up: int, down: int, padding: list[int], gain: float) -> Callable[[Tensor], Tensor]:
    """A grouped convolution along each axis; for filters that are a product of two."""
    row, column = f.sum(0) * gain / f.sum(), f.sum(1)

    def call(x: Tensor) -> Tensor:
        x0, x1, y0, y1 = padding
        y = _convolve(x, row[None, :], (1, up), (1, down), [x0, x1, 0, 0], 1.0, x.shape[1])
        return _convolve(y, column[:, None], (up, 1), (down, 1), [0, 0, y0, y1], 1.0, x.shape[1])

    return call


def _convolve(
    x: Tensor,
    f: Tensor,
    up: int | tuple[int, int],
    down: int | tuple[int, int],
    padding: list[int],
    gain: float,
    groups: int,
) -> Tensor:
    taps = (f.flip([0, 1]) * gain).to(x.dtype)
    up_y, up_x = (up, up) if isinstance(up, int) else up
    fh, fw = f.shape
    x0, x1, y0, y1 = padding
    if up_x == up_y == 1:
        weight = taps.expand(groups, 1, fh, fw)
        if x0 == x1 and y0 == y1:
            return F.conv2d(x, weight, stride=down, padding=(y0, x0), groups=groups)
        return F.conv2d(F.pad(x, padding), weight, stride=down, groups=groups)
    # The transposed convolution gives the full result; the rest of the zeros are cut off or added.
    weight = taps.flip([0, 1]).expand(groups, 1, fh, fw)
    y = F.conv_transpose2d(x, weight, stride=(up_y, up_x), groups=groups)
    crop_y = (fh - 1 - y0, y.shape[2] - (fh - 1 - y0) - (x.shape[2] * up_y + y0 + y1 - fh + 1))
    crop_x = (fw - 1 - x0, y.shape[3] - (fw - 1 - x0) - (x.shape[3] * up_x + x0 + x1 - fw + 1))
    return F.pad(y, [-crop_x[0], -crop_x[1], -crop_y[0], -crop_y[1]])


def rows(device: str) -> Iterator[BenchRow]:
    """A 4x4 filter with up 2, down 2 and neither, forward and backward, in two dtypes and both layouts."""
    gpu = device != "cpu"
    f = setup_filter([1, 3, 3, 1], device=device)
    for name, (up, down, padding, gain, cpu_shape, gpu_shape) in _WORK.items():
        for shape in (gpu_shape if gpu else cpu_shape, _TINY):
            for dtype in (torch.float32, torch.float16 if gpu else torch.bfloat16):
                for layout in ("contiguous", "channels_last"):
                    x = torch.randn(shape, device=device).to(dtype)
                    if layout == "channels_last":
                        x = x.to(memory_format=torch.channels_last)
                    settings = (f, up, down, padding, gain)
                    yield from rows_of(
                        "upfirdn2d",
                        f"{'x'.join(map(str, shape))} 4x4 {name}",
                        layout,
                        [x],
                        lambda x, up=up, down=down, padding=padding, gain=gain: upfirdn2d(
                            x, f, up, down, padding, gain=gain
                        ),
                        depthwise(*settings),
                        peers={"per plane": per_plane(*settings), "two passes": two_passes(*settings)},
                        saved=0,  # the op is linear: backward reads dy only
                    )
