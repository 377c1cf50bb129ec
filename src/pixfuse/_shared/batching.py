"""vmap rules: an op on a stack of problems as the same op on one larger problem.

Every op here treats the images of a batch alike and the channels of an image alike, so a mapped dimension can be
folded into the batch (no copy) or, where channels have parameters of their own, into the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., tuple[Any, Any]]


def into_batch(call: Callable[..., Any], tensors: Sequence[int]) -> Rule:
    """The rule that folds the mapped dimension of the arguments at positions ``tensors`` into their first axis.

    ``call`` runs the op. If any other argument is mapped the problems are solved one by one.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        if any(d is not None and isinstance(args[i], Tensor) for i, d in enumerate(in_dims) if i not in tensors):
            return one_by_one(call)(info, in_dims, *args)
        size = info.batch_size
        folded = [
            to_front(a, d, size).flatten(0, 1) if i in tensors and isinstance(a, Tensor) else a
            for i, (a, d) in enumerate(zip(args, in_dims, strict=True))
        ]
        return outputs(call(*folded), lambda y: y.unflatten(0, (size, -1) if y.shape[0] else (size, 0)))

    return rule


def also_none(rule: Rule) -> Rule:
    """``rule`` for no problems at all too: as for one of zeros, of whose results nothing is taken."""

    def call(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        if info.batch_size:
            return rule(info, in_dims, *args)
        one = [
            torch.cat([a, a.new_zeros([*a.shape[:d], 1, *a.shape[d + 1 :]])], d)
            if d is not None and isinstance(a, Tensor)
            else a
            for a, d in zip(args, in_dims, strict=True)
        ]
        result, _ = rule(info._replace(batch_size=1), in_dims, *one)
        return outputs(result, lambda y: y[:0])

    return call


def one_by_one(call: Callable[..., Any]) -> Rule:
    """The rule that solves the mapped problems one after another: right for any op, fast for none."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        results = [
            call(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return rule


def to_front(x: Tensor, dim: int | None, size: int) -> Tensor:
    """``x`` with its mapped dimension first; expanded where it is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def outputs(result: Any, unfold: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """The unfolded result of an op and its mapped dimensions (always the first)."""
    if isinstance(result, Tensor):
        return unfold(result), 0
    return tuple(map(unfold, result)), (0,) * len(result)
