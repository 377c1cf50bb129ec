"""Which input samples make an output sample, and with what weights: the one rule of every resize.

A resize is a linear map along each axis in turn. Output sample ``o`` is the sum over ``k < stop[o] - start[o]`` of
``weights[o, k] * x[start[o] + k]``. Starts and stops never decrease with ``o``, so the transposed map, the
gradient's, is a table of the same kind: forward and backward read one rule and both only gather.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NEAREST, NEAREST_EXACT, LINEAR, CUBIC, AREA, LANCZOS = range(6)

# (i + h) * step has up to 1.5 roundings of 2^-53, its step one more: a coordinate that close below an integer is it.
SNAP = 1 + 2.0**-50


class Taps(NamedTuple):
    """The map along one axis. The arrays are read-only; weights past an output's stop are zero."""

    start: np.ndarray  # int64 [out]
    stop: np.ndarray  # int64 [out]
    weights: np.ndarray  # float64 [out, max(stop - start)]

    def part(self, start: int, stop: int, first: int) -> Taps:
        """The map to the outputs from ``start`` up to ``stop``, from the inputs from ``first`` on."""
        rows = slice(start, stop)
        return Taps(self.start[rows] - first, self.stop[rows] - first, self.weights[rows])

    def transposed(self, in_size: int) -> Taps:
        """The map from the outputs back to the ``in_size`` inputs, with the same weights."""
        i = np.arange(in_size)
        start, stop = np.searchsorted(self.stop, i, side="right"), np.searchsorted(self.start, i, side="right")
        stop = np.maximum(start, stop)  # equal for an input that no output uses

        def weight(o: np.ndarray) -> np.ndarray:
            o = np.minimum(o, len(self.start) - 1)
            k = np.clip(i[:, None] - self.start[o], 0, self.weights.shape[1] - 1)
            return self.weights[o, k]

        return _table(start, stop, weight)


@functools.lru_cache(maxsize=256)
def taps(in_size: int, out_size: int, scale: float, mode: int, align_corners: bool, antialias: bool) -> Taps | None:
    """The map of an axis from ``in_size`` to ``out_size`` samples; None where it is the identity.

    An axis whose size does not change is copied, whatever the scale. Otherwise the source step is, in float64,
    ``(in - 1) / (out - 1)`` with aligned corners (0 for one output), else ``1 / scale``, and ``in / out`` where
    ``scale`` is 0; output ``i`` lies at ``step * (i + 1/2)`` in units where input ``j`` covers ``[j, j + 1]``.

    * nearest: input ``floor(step * i)``; nearest-exact: input ``floor(step * (i + 1/2))``; a coordinate within
      4 float64 roundings below an integer counts as that integer, so that 13 / 2.6 is 5.
    * linear, cubic (a = -3/4): weights of the 2 or 4 samples around ``step * (i + 1/2) - 1/2`` (``step * i`` with
      aligned corners); beyond the border the outermost sample is repeated.
    * area: the mean of inputs ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)``, in integers.
    * antialias (linear, cubic with a = -1/2, Lanczos3): the kernel is stretched by ``max(step, 1)``, cut at the
      border, and its weights are divided by their sum.
    """
    if in_size == out_size:
        return None
    i = np.arange(out_size)
    if mode == AREA:
        start, stop = i * in_size // out_size, -(-(i + 1) * in_size // out_size)
        return _table(start, stop, lambda j: np.ones(j.shape), normalise=True)
    if align_corners:
        step = (in_size - 1) / (out_size - 1) if out_size > 1 else 0.0
    else:
        step = 1 / scale if scale > 0 else in_size / out_size
    if mode in (NEAREST, NEAREST_EXACT):
        offset = 0.5 if mode == NEAREST_EXACT else 0.0
        start = np.minimum(np.floor((i + offset) * step * SNAP).astype(np.int64), in_size - 1)
        return _table(start, start + 1, lambda j: np.ones(j.shape))
    if antialias:
        return _antialiased(in_size, step * (i + 0.5), max(step, 1.0), mode)
    source = step * i if align_corners else step * (i + 0.5) - 0.5
    before = source < 0
    if mode == LINEAR:
        source = np.maximum(source, 0)
    base = np.minimum(np.floor(source), in_size - 1)
    t = np.clip(source - base, 0, 1)[:, None]
    around = [1 - t, t] if mode == LINEAR else [_cubic(t + 1), _cubic(t), _cubic(1 - t), _cubic(2 - t)]
    first = base.astype(np.int64) - (0 if mode == LINEAR else 1)
    reach = np.clip(first[:, None] + np.arange(len(around)), 0, in_size - 1)
    start, stop = reach[:, 0], reach[:, -1] + 1
    if mode == LINEAR:
        stop = np.where(before, 1, stop)  # the second sample has no weight: not even its NaN may pass
    # Samples beyond the border fall on the outermost one, which gets the sum of their weights.
    return _table(start, stop, lambda j: sum(w * (j == reach[:, k : k + 1]) for k, w in enumerate(around)))


@functools.lru_cache(maxsize=256)
def axis_taps(
    in_size: int,
    out_size: int,
    scale: float,
    mode: int,
    align_corners: bool,
    antialias: bool,
    transposed: bool,
    piece: tuple[int, int, int] | None = None,
) -> Taps | None:
    """The map of :func:`taps` or its transpose; of it the ``piece`` (see :meth:`Taps.part`), if that is not all."""
    table = taps(in_size, out_size, scale, mode, align_corners, antialias)
    if table is None:
        return None
    table = table.transposed(in_size) if transposed else table
    return table if piece is None else table.part(*piece)


def _antialiased(in_size: int, center: np.ndarray, stretch: float, mode: int) -> Taps:
    kernel, radius = {LINEAR: (_triangle, 1), CUBIC: (_catmull_rom, 2), LANCZOS: (_lanczos3, 3)}[mode]
    start = np.maximum((center - radius * stretch + 0.5).astype(np.int64), 0)
    stop = np.minimum((center + radius * stretch + 0.5).astype(np.int64), in_size)
    return _table(start, stop, lambda j: kernel(np.abs((j - center[:, None] + 0.5) / stretch)), normalise=True)


def _table(
    start: np.ndarray, stop: np.ndarray, weight: Callable[[np.ndarray], np.ndarray], normalise: bool = False
) -> Taps:
    """The table of the samples from ``start`` up to ``stop``; ``weight`` takes sample numbers ``[out, k]``."""
    j = start[:, None] + np.arange(max(int((stop - start).max()), 1))
    weights = np.where(j < stop[:, None], weight(j), 0.0)
    if normalise:
        weights /= weights.sum(1, keepdims=True)
    for array in (start, stop, weights):
        array.flags.writeable = False
    return Taps(start, stop, weights)


def _cubic(d: np.ndarray, a: float = -0.75) -> np.ndarray:
    """Keys' cubic convolution kernel at distance ``d >= 0``."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * a * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _catmull_rom(d: np.ndarray) -> np.ndarray:
    return _cubic(d, -0.5)


def _triangle(d: np.ndarray) -> np.ndarray:
    return np.maximum(1 - d, 0)


def _lanczos3(d: np.ndarray) -> np.ndarray:
    return np.where(d < 3, np.sinc(d) * np.sinc(d / 3), 0.0)
