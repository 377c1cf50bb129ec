"""The two memory layouts of pixfuse, and which of them a tensor has.

A tensor ``[N, C, *spatial]`` is *channels_last* when its channels are its innermost axis, and *contiguous*
otherwise. Every op writes its result, and every backward its gradient, densely in the layout of ``x``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def is_channels_last(x: Tensor) -> bool:
    """Whether ``x`` (3-D to 5-D) is stored with its channels innermost.

    The batch axis is not asked, so a batch of one, a slice and an unsqueezed image of a channels_last tensor are
    channels_last too. Where the two layouts coincide (one channel or one pixel) the strides' label decides, as in
    PyTorch.
    """
    if type(x) is Tensor and not torch.compiler.is_dynamo_compiling():
        try:
            return _looked_up(x.shape, x.stride())
        except TypeError:  # symbolic sizes
            pass
    return _channels_last(x.shape, x.stride())


def _channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if not 3 <= len(shape) <= 5 or strides[1] == 0:
        return False
    reach = 0
    for d in (1, *range(len(shape) - 1, 1, -1)):  # channels_last order, innermost first
        size, stride = shape[d], strides[d]
        if size == 0 or stride < reach:
            return False
        reach = stride * size
    return bool(reach != strides[1])  # one channel and one pixel: nothing says channels_last


_looked_up = functools.lru_cache(maxsize=4096)(_channels_last)


def empty(like: Tensor, shape: Sequence[int], channels_last: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A dense uninitialised tensor of ``shape`` in the given layout, on the device of ``like``."""
    dtype = like.dtype if dtype is None else dtype
    return torch.empty_strided(tuple(shape), dense_strides(shape, channels_last), dtype=dtype, device=like.device)


def dense_strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """Strides of a dense tensor of ``shape`` in the given layout."""
    order = [*range(len(shape))]
    if channels_last:
        order.append(order.pop(1))
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step = step * max(shape[d], 1)
    return tuple(strides)


def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def to_layout(x: Tensor, channels_last: bool) -> Tensor:
    """``x`` dense in the given layout: itself where it is so already, else a copy. Differentiable."""
    if not channels_last:
        return x.contiguous()
    if x.dim() == 4 and not _transformed() and x.is_contiguous(memory_format=torch.channels_last):
        return x  # as below, ten microseconds sooner; inside vmap a tensor cannot say
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``; where that is nothing, a microsecond sooner."""
    return t if t.dtype == dtype else t.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that ops on ``x`` accumulate in: float64 for float64, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
