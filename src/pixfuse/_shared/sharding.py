"""How an op may be split over several processes: one rule an op, for every axis. ``pixfuse.distributed`` applies it.

Every op of pixfuse, backward ones too, only gathers: a sample of its result is a function of some samples of its
images. So a shard of the result is the same op on the rows that it reads, wherever these lie. A rule says what kind of
thing every tensor is, and for a spatial axis which rows of the images a row of the result reads (``rows``).

``torch.distributed.tensor`` is imported when a rule is asked, since that import costs most of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

IMAGE = "image"  # [N, C, *spatial]: split as the result is
CHANNELS = "channels"  # [C]: split with the channels; as a result, elsewhere a sum over the shards
STATS = "stats"  # [N, G]: split with the batch and the channels
WHOLE = "whole"  # not split; as a result a sum over the shards

Span = tuple[int, int]  # rows from the first up to the second; outside the image they are zeros


class Window(NamedTuple):
    """What some rows of a result are computed from: the op on these rows of the images is the op on all of them."""

    reads: Sequence[Span]  # of every image
    changes: dict[Any, Any]  # arguments that differ, by position or by (position, index in a list)
    skip: int = 0  # rows that the op gives before the wanted ones


Rows = Callable[[Sequence[Any], int], tuple[int, Callable[[int, int], Window]]]


@dataclass(frozen=True)
class Sharding:
    """The rule of an op.

    Args:
        arguments: the kind of each leading argument that can be a tensor.
        results: the kind of each result.
        axes: the axes that the op can be split along with nothing but narrower tensors; None for all.
        rows: ``(arguments, axis)`` gives the size of the result along a spatial axis and the function from a range of
            its rows to its :class:`Window`. Sizes and arguments are those of the whole images.
        groups_at: the position of the number of groups of channels, which whole groups can be split along.
        dim_at: the position of the axis of the channels, where it is an argument.
        layout_at: the position of the flag channels_last, where it is an argument, not that of the first image.
        needed_at: the position of the flag that asks for each result, or None for one that always is there.
        run: ``(arguments, whole, spans, gather)`` computes a spatial or an empty shard where the op on its window
            does not: from the windows, the arguments of the whole, ``axis: (start, stop, first row read)`` and a
            function that stacks a tensor over the processes that hold the shards of an image.
        seam: ``(arguments, axis)`` gives how many rows at either end of a shard differ if the op is applied to the
            rows of the shard alone; 0 where more does. Then only these are made from windows, while the rest needs no
            copy of the shard with its neighbours' rows and does not wait for them.
        whole_backward: the op's gradient is derived from its reference, which takes images whole.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    axes: tuple[int, ...] | None = (0, 1)
    rows: Rows | None = None
    groups_at: int | None = None
    dim_at: int | None = None
    layout_at: int | None = None
    needed_at: tuple[int | None, ...] | None = None
    run: Callable[..., Any] | None = None
    seam: Callable[[Sequence[Any], int], int] | None = None
    whole_backward: bool = False

    def splits(self, args: Sequence[Any], axis: int, parts: int) -> bool:
        """Whether the op can be split in ``parts`` along ``axis``."""
        if self.axes is None or axis in self.axes:
            return True
        if axis == 1:
            if self.groups_at is None:
                return False
            channels = args[0].shape[1]
            size = max(channels // args[self.groups_at], 1)
            return channels > 0 and all(start % size == 0 for start, _ in chunks(channels, parts))
        return self.rows is not None

    def placement(self, kind: str, axis: int, args: Sequence[Any], result: bool) -> Any:
        """The placement of a tensor of this kind where the images are split along ``axis``."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        if kind == IMAGE or (kind == STATS and axis < 2):
            return Shard(axis)
        if kind == CHANNELS and axis == (1 if self.dim_at is None else args[self.dim_at]):
            return Shard(0)
        return Partial() if result and kind != STATS else Replicate()

    def __call__(self, *args: Any) -> list[tuple[list[Any], list[Any]]]:
        """The rule as ``torch.distributed.tensor.experimental.register_sharding`` takes it."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor._dtensor_spec import DTensorSpec

        given = [isinstance(a, DTensorSpec) for a in args]
        ways: list[tuple[list[Any], list[Any]]] = [
            ([Replicate()] * len(self.results), [Replicate() if tensor else None for tensor in given])
        ]
        for axis in range(args[0].ndim) if self.axes is None else self.axes:
            inputs: list[Any] = [None] * len(args)
            for i, kind in enumerate(self.arguments):
                inputs[i] = self.placement(kind, axis, args, result=False) if given[i] else None
            ways.append(([self.placement(kind, axis, args, result=True) for kind in self.results], inputs))
        return ways


def chunks(size: int, parts: int) -> list[Span]:
    """The ranges of the ``parts`` of an axis, as DTensor and ``torch.chunk`` split it; the last ones may be empty."""
    step = -(-size // parts)
    return [(min(step * i, size), min(step * (i + 1), size)) for i in range(parts)]


def fir_window(start: int, stop: int, size: int, up: int, down: int, pad: int, taps: int) -> tuple[Span, int]:
    """The samples that outputs ``start`` up to ``stop`` of an up-FIR-down step read, and the padding before these."""
    first, last = inside(-((pad - start * down) // up), ((stop - 1) * down + taps - 1 - pad) // up + 1, size)
    return (first, last), pad - start * down + first * up


def inside(first: int, last: int, size: int) -> Span:
    """The range cut to the image, but not to nothing."""
    first = min(max(first, 0), size - 1)
    return first, min(max(last, first + 1), size)
