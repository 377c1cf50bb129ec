"""Which DTensor placements an op accepts without communication. ``pixfuse.distributed`` registers them.

A rule takes the op's arguments and returns a list of ``(placements of the outputs, placements of the inputs)``;
``torch.distributed.tensor`` is imported when a rule is asked, since that import costs most of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Rule = Callable[..., list[tuple[list[Any], list[Any]]]]


def by_batch(images: Sequence[int], results: Sequence[str], axes: Sequence[int] = (0,)) -> Rule:
    """The rule of an op that treats every image of the batch alike.

    Args:
        images: the positions of the arguments whose first axis is the batch; other tensors are replicated.
        results: for each output ``"image"`` (sharded like the batch) or ``"sum"`` (a sum over the batch).
        axes: the axes that can be split: ``(0, 1)`` if the op treats every channel alike too.
    """

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        given = [isinstance(a, DTensorSpec) for a in args]
        whole = [Replicate() if tensor else None for tensor in given]
        ways: list[tuple[list[Any], list[Any]]] = [([Replicate()] * len(results), whole)]
        for axis in axes:
            split = [Shard(axis) if tensor and i in images else whole[i] for i, tensor in enumerate(given)]
            ways.append(([Shard(axis) if result == "image" else Partial() for result in results], split))
        return ways

    return rule
