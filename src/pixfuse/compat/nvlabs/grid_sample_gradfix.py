"""``torch_utils.ops.grid_sample_gradfix``: bilinear sampling that can be differentiated twice, by both arguments.

What pixfuse does better on purpose: nothing of the second order is lost, that through ``grid`` neither, on every
PyTorch (that of 2.11 has no second order at all), and 16-bit images and grids are sampled in float32, where positions
of a pixel or more would be rounded away. ``enabled`` may be set as before; nothing depends on it. Inside
``torch.compile`` and ``torch.func`` it is PyTorch's own.
"""

from __future__ import annotations

from typing import Any

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
    checks.same_device(op, "grid", grid, input, "input")
    if torch.is_autocast_enabled(input.device.type):  # to the wider dtype, as on GPUs
        dtype = torch.promote_types(input.dtype, grid.dtype)
        input, grid = input.to(dtype), grid.to(dtype)
    if grid.dtype != input.dtype:
        checks.refuse(op, "grid", f"have the dtype of input ({checks.dtype_name(input.dtype)})", grid)
    if input.dtype.itemsize == 2:
        return grid_sample(input.float(), grid.float()).to(input.dtype)
    if (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or not (torch.is_grad_enabled() and (input.requires_grad or grid.requires_grad))
    ):
        return _sample(input, grid)
    return _GridSample.apply(input, grid)


def _sample(x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


class _GridSample(torch.autograd.Function):
    """PyTorch's value and first derivative; where that is differentiated again, the same in differentiable steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Tensor) -> Tensor:
        ctx.save_for_backward(x, grid)
        return _sample(x, grid)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, grid = ctx.saved_tensors
        needed = list(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            return _derivatives(dy, x, grid, *needed)
        if not needed[1]:
            return torch.ops.aten.grid_sampler_2d_backward(dy, x, grid, 0, 0, False, [True, False])[0], None
        dx, dgrid = torch.ops.aten.grid_sampler_2d_backward(dy, x, grid, 0, 0, False, [needed[0], True])
        return dx if needed[0] else None, dgrid


def _derivatives(dy: Tensor, x: Tensor, grid: Tensor, need_dx: bool, need_dgrid: bool) -> tuple[Tensor | None, ...]:
    """``dx`` and ``dgrid`` of ``y = sum of the four pixels around (i, j), each times its two distances``."""
    n, c, h, w = x.shape
    j = ((grid[..., 0] + 1) * w - 1).flatten(1) / 2  # [N, H' * W']
    i = ((grid[..., 1] + 1) * h - 1).flatten(1) / 2
    j0, i0 = (t.detach().floor().nan_to_num(-2).clamp(-2, max(h, w) + 1) for t in (j, i))
    right, below = (j - j0)[:, None], (i - i0)[:, None]
    dy, pixels = dy.flatten(2), x.flatten(2)  # [N, C, ...]
    dx = torch.zeros_like(pixels)
    dj = di = torch.zeros_like(right)
    for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        row, column = i0 + a, j0 + b
        outside = ((row < 0) | (row >= h) | (column < 0) | (column >= w))[:, None]
        at = (row.clamp(0, h - 1).long() * w + column.clamp(0, w - 1).long())[:, None].expand(n, c, -1)
        near_i, near_j = (below if a else 1 - below), (right if b else 1 - right)
        if need_dx:
            # Filled, not multiplied: a sample that is not finite changes no pixel.
            dx = dx.scatter_add(2, at, dy * (near_i * near_j).masked_fill(outside, 0))
        if need_dgrid:
            value = (pixels.gather(2, at) * dy).sum(1, keepdim=True).masked_fill(outside, 0)
            dj, di = dj + value * near_i * (2 * b - 1), di + value * near_j * (2 * a - 1)
    dgrid = torch.stack([dj[:, 0] * (w / 2), di[:, 0] * (h / 2)], -1).reshape(grid.shape)
    return dx.reshape(x.shape) if need_dx else None, dgrid if need_dgrid else None
