"""group_norm, plain and with SiLU, against PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.testing import as_channels_last
from .._shared.timing import BenchRow, rows_of
from .cases import BENCH, BENCH_GPU
from .op import group_norm


def rows(device: str) -> Iterator[BenchRow]:
    """Every case with and without SiLU, forward and backward, in both layouts."""
    gpu = device != "cpu"
    for shape, groups in BENCH_GPU if gpu else BENCH:
        for act in (None, "silu"):

            def ours(x: Tensor, w: Tensor, b: Tensor, groups: int = groups, act: str | None = act) -> Tensor:
                return group_norm(x, groups, w, b, act=act)

            def stock(x: Tensor, w: Tensor, b: Tensor, groups: int = groups, act: str | None = act) -> Tensor:
                y = F.group_norm(x, groups, w, b)
                return F.silu(y) if act else y

            for dtype in (torch.bfloat16,) if gpu else (torch.float32, torch.bfloat16):
                for layout in ("contiguous", "channels_last"):
                    x = torch.randn(shape, device=device).to(dtype)
                    x = as_channels_last(x) if layout == "channels_last" else x
                    w, b = (torch.rand(shape[1], device=device).to(dtype) + 0.5 for _ in range(2))
                    case = f"{'x'.join(map(str, shape))} g{groups}{' silu' if act else ''}"
                    yield from rows_of("group_norm", case, layout, [x, w, b], ours, stock)
