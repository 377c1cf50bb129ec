"""``torch_utils.ops.grid_sample_gradfix``: bilinear sampling that can be differentiated twice, by both arguments.

What pixfuse does better on purpose: nothing of the second order is lost, that through ``grid`` neither. ``enabled``
may be set as before; nothing depends on it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._shared import checks

__all__ = ["enabled", "grid_sample"]

enabled = False


def grid_sample(input: Tensor, grid: Tensor) -> Tensor:
    """Sample ``input`` ``[N, C, H, W]`` at ``grid`` ``[N, H', W', 2]`` of (x, y) from -1 to 1, zero outside.

    The pixel at ``x`` is ``((x + 1) * W - 1) / 2``: the values of :func:`torch.nn.functional.grid_sample` without
    aligned corners.
    """
    op = "grid_sample"
    checks.floating(op, "input", input)
    checks.floating(op, "grid", grid)
    if input.dim() != 4:
        checks.refuse(op, "input", "be 4-D ([N, C, H, W])", checks.words(f"shape {list(input.shape)}"))
    if grid.dim() != 4 or grid.shape[-1] != 2 or grid.shape[0] != input.shape[0]:
        wanted = f"have shape [{input.shape[0]}, H', W', 2]"
        checks.refuse(op, "grid", wanted, checks.words(f"shape {list(grid.shape)}"))
    checks.same_device(op, input, grid=grid)
    if torch.is_autocast_enabled(input.device.type):  # to the wider dtype, as on GPUs
        dtype = torch.promote_types(input.dtype, grid.dtype)
        input, grid = input.to(dtype), grid.to(dtype)
    if grid.dtype != input.dtype:
        checks.refuse(op, "grid", f"have the dtype of input ({checks.dtype_name(input.dtype)})", grid)
    return F.grid_sample(input, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
