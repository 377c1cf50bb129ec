"""What resizing costs against PyTorch's own; ``pixfuse bench`` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import pixfuse
from pixfuse._shared.testing import as_channels_last
from pixfuse._shared.timing import BenchRow, rows_of

MODES: dict[str, dict[str, Any]] = {
    "nearest x2": {"scale_factor": 2, "mode": "nearest"},
    "bilinear x2": {"scale_factor": 2, "mode": "bilinear"},
    "bicubic x2": {"scale_factor": 2, "mode": "bicubic"},
    "bilinear x1.7": {"scale_factor": 1.7, "mode": "bilinear"},
    "bilinear antialias x0.4": {"scale_factor": 0.4, "mode": "bilinear", "antialias": True},
}


def rows(device: str = "cpu") -> Iterator[BenchRow]:
    on_cpu = torch.device(device).type == "cpu"
    large = (4, 32, 128, 128) if on_cpu else (16, 64, 256, 256)
    for shape in (large, (1, 8, 8, 8)):
        modes = MODES if shape == large else {k: MODES[k] for k in ("nearest x2", "bilinear x2")}
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.rand(shape, device=device).to(dtype)
            for name, params in modes.items():
                if on_cpu and dtype == torch.bfloat16 and "antialias" in params:
                    continue  # PyTorch has no kernel for it
                case = f"{'x'.join(map(str, shape))} {name}"
                for layout in ("contiguous", "channels_last"):
                    image = as_channels_last(x) if layout == "channels_last" else x

                    def eager(x: torch.Tensor, params: dict[str, Any] = params) -> torch.Tensor:
                        return F.interpolate(x, **params)

                    def ours(x: torch.Tensor, params: dict[str, Any] = params) -> torch.Tensor:
                        return pixfuse.interpolate(x, **params)

                    # A resize's backward reads dy alone.
                    yield from rows_of("interpolate", case, layout, [image], ours, eager, saved=0)
                if name == "nearest x2":

                    def repeat(x: torch.Tensor) -> torch.Tensor:
                        return pixfuse.upsample_nearest(x, 2)

                    def stock(x: torch.Tensor) -> torch.Tensor:
                        return F.interpolate(x, scale_factor=2)

                    yield from rows_of("upsample_nearest", case, "contiguous", [x], repeat, stock, saved=0)
