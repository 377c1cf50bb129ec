"""group_norm of an image in several parts, each on a process of its own: what happens between its two sweeps.

Forward, a part's statistics are pooled with those of the others; backward, its sums are added to theirs. Both are a few
numbers a group, collected from all parts and combined in their order, so every process computes the same. The sweeps
are Triton's where there are kernels, else plain PyTorch. Statistics are pairs (mean, root mean square deviation) in
float64, pooled without cancellation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared.layout import compute_dtype, is_channels_last, to_layout
from .._shared.library import gpu_module
from . import reference

Gather = Callable[[Tensor], Tensor]  # [...] to [parts, ...]


def group_norm(args: Sequence[Any], whole: Sequence[Any], spans: Any, gather: Gather) -> tuple[Tensor, Tensor, Tensor]:
    """The operator ``group_norm`` on the part of x in ``args``, with a mean in float64."""
    x, weight, bias, num_groups, eps, act, round_before_act = args
    if x.shape[0] == 0 or x.shape[1] == 0:
        # No part of an image, but of a batch whose other parts may be whole images: the op's own statistics.
        stats = x.new_zeros((x.shape[0], num_groups), dtype=compute_dtype(x))
        return x.clone(), stats.to(torch.float64) if spans else stats, stats.clone()
    kernels = gpu_module(__package__ or "", "group_norm", x)
    first = x.new_zeros((x.shape[0], num_groups), dtype=torch.float64)
    mean, rms = first, first
    if x.numel():
        corner = (slice(None), slice(None, None, x.shape[1] // num_groups), *(0,) * (x.dim() - 2))
        first = x[corner].to(torch.float64)
        mean, rms = (kernels.statistics if kernels else _statistics)(x, num_groups).to(torch.float64)
        mean = mean + first
    count = torch.full_like(mean, x.shape[2:].numel())
    mean, rms = _pool(*gather(torch.stack([count, mean, rms])).unbind(1))
    rstd = torch.hypot(rms, torch.full_like(rms, eps).sqrt()).reciprocal()
    dtype = compute_dtype(x)
    stats = mean, rstd.to(dtype)
    if x.numel() == 0:
        return x.clone(), *stats
    if kernels:
        deviations = torch.stack([mean - first, rms]).to(dtype)
        return kernels.normalise(x, deviations, weight, bias, num_groups, eps, act, round_before_act), *stats
    xhat = _deviations(x, mean) * _spread(stats[1], x)
    z = reference.affine(xhat, weight, bias)
    if act == reference.SILU:
        z = torch.nn.functional.silu(z.to(x.dtype).to(dtype) if round_before_act else z)
    return to_layout(z.to(x.dtype), is_channels_last(x)), *stats


def group_norm_backward(
    args: Sequence[Any], whole: Sequence[Any], spans: Any, gather: Gather
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The operator ``group_norm_backward`` on the parts of dy and x in ``args``; None for what is not needed."""
    dy, x, mean, rstd, weight, bias, num_groups, act, round_before_act, *needs = args
    dtype = compute_dtype(x)
    kernels = gpu_module(__package__ or "", "group_norm_backward", x)
    pixels = whole[1].shape[2:].numel()
    sums = x.new_zeros((2, x.shape[0], num_groups), dtype=dtype)
    dweight = dbias = x.new_zeros(x.shape[1], dtype=dtype)
    given = (dy, x, mean, rstd, weight, bias, num_groups, act, round_before_act)
    if x.numel() and kernels:
        sums, dweight, dbias = kernels.sums(*given)
    elif x.numel():
        xhat = _deviations(x, mean) * _spread(rstd, x)
        dz = reference.through_act(dy.to(dtype), xhat, weight, bias, act, x.dtype if round_before_act else dtype)
        axes = [d for d in range(x.dim()) if d != 1]
        dweight, dbias = (dz * xhat).sum(axes), dz.sum(axes)
        dz = reference.affine(dz, weight, None)
        sums = torch.stack([(dz * xhat), dz]).reshape(2, x.shape[0], num_groups, -1).sum(-1)
    dx = None
    if needs[0]:
        if x.shape[0] and x.shape[1]:
            sums = gather(sums).sum(0) / (x.shape[1] // num_groups * pixels)
        if x.numel() == 0:
            dx = x.clone()
        elif kernels:
            dx = kernels.gradient(*given, sums)
        else:
            dx = (dz - _spread(sums[1], x) - xhat * _spread(sums[0], x)) * _spread(rstd, x)
            dx = to_layout(dx.to(x.dtype), is_channels_last(x))
    return dx, dweight if needs[1] else None, dbias if needs[2] else None


def _statistics(x: Tensor, num_groups: int) -> Tensor:
    """``[2, N, num_groups]``: the mean of the deviations from a group's first element, and their rms from that."""
    centred, _, mean, scale = reference._centre(x, num_groups, 0.0)
    return torch.cat([mean, centred.square().mean(-1, keepdim=True).sqrt()], -1).movedim(-1, 0) / scale.movedim(-1, 0)


def _pool(count: Tensor, mean: Tensor, rms: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and rms deviation of all from those of the parts ``[parts, N, G]``; a part of no elements says nothing."""
    share = count / count.sum(0)
    there = count > 0
    away = torch.where(there, mean - mean[0], 0)  # the first part is never empty; equal means give just that
    from_first = (share * away).sum(0)
    away = torch.where(there, away - from_first, 0)
    size = torch.maximum(away.abs(), rms).amax(0)
    unit = torch.where(size > 0, size, 1)
    return mean[0] + from_first, size * (share * ((away / unit).square() + (rms / unit).square())).sum(0).sqrt()


def _deviations(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean`` in the compute dtype. The mean is float64, since its rounding shows where it is large."""
    near = mean.to(compute_dtype(x))
    return x.to(near.dtype) - _spread(near, x) - _spread((mean - near).to(near.dtype), x)


def _spread(stats: Tensor, x: Tensor) -> Tensor:
    """Values of groups ``[N, G]`` as values of channels, to broadcast over x."""
    wide = stats.repeat_interleave(x.shape[1] // stats.shape[1], 1)
    return wide.reshape(*wide.shape, *[1] * (x.dim() - 2))
