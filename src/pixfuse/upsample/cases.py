"""The calls that the tests check."""

from __future__ import annotations

from typing import Any

from .._shared.testing import Case


def _nearest(label: str, shape: tuple[int, ...], scale: Any, gain: float = 1.0, thorough: bool = False) -> Case:
    return Case(label, {"x": shape}, {"scale": scale, "gain": gain}, thorough=thorough)


def _interpolate(label: str, shape: tuple[int, ...], thorough: bool = False, **params: Any) -> Case:
    return Case(label, {"x": shape}, params, thorough=thorough)


NEAREST_CASES = [
    _nearest("n2-c3-5x7-x2", (2, 3, 5, 7), 2),
    _nearest("n2-c17-3x4-x2x3-gain", (2, 17, 3, 4), [2, 3], -0.75, thorough=True),
    _nearest("n2-c3-11-x3", (2, 3, 11), 3),
    _nearest("n2-c2-2x3x4-x1x3x2-gain", (2, 2, 2, 3, 4), [1, 3, 2], 0.5),
]

INTERPOLATE_CASES = [
    _interpolate("n2-c3-5x7-nearest-x1.7", (2, 3, 5, 7), scale_factor=1.7, thorough=True),
    _interpolate("n2-c3-9x7-nearest-exact-x0.5x0.6", (2, 3, 9, 7), scale_factor=[0.5, 0.6], mode="nearest-exact"),
    _interpolate("n2-c3-11-linear-x2", (2, 3, 11), scale_factor=2, mode="linear"),
    _interpolate("n2-c17-5x7-bilinear-x2", (2, 17, 5, 7), scale_factor=2, mode="bilinear", thorough=True),
    _interpolate("n3-c2-6x5-bilinear-11x4-align", (3, 2, 6, 5), size=(11, 4), mode="bilinear", align_corners=True),
    _interpolate("n2-c2-2x3x4-trilinear-x1.5x2x1", (2, 2, 2, 3, 4), scale_factor=[1.5, 2, 1], mode="trilinear"),
    _interpolate("n2-c3-5x6-bicubic-x2", (2, 3, 5, 6), scale_factor=2, mode="bicubic"),
    _interpolate(
        "n1-c2-9x8-bicubic-antialias-x0.4x1.3", (1, 2, 9, 8), scale_factor=[0.4, 1.3], mode="bicubic", antialias=True
    ),
    _interpolate("n2-c3-9x8-area-4x11", (2, 3, 9, 8), size=(4, 11), mode="area"),
    _interpolate("n2-c2-13x12-lanczos-6x5", (2, 2, 13, 12), size=(6, 5), mode="lanczos", antialias=True),
]
