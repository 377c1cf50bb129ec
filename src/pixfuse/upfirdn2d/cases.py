"""The calls that the tests check."""

from __future__ import annotations

import torch

from .._shared.testing import Case
from .filters import setup_filter

_CLASSIC = setup_filter([1, 3, 3, 1])
_ODD = torch.tensor([[0.5, -1.0, 2.0, 0.25, 1.5], [1.0, 0.75, -0.5, 3.0, -2.0]])
_LONG = setup_filter([1, 2, -3, 5, 8, 13, 11, 7, 5, -3, 2, 1], separable=True)

CASES = [
    Case(
        "n2-c3-5x7-4x4-up2", {"x": (2, 3, 5, 7)}, {"up": 2, "padding": [2, 1, 2, 1], "gain": 4}, {"f": _CLASSIC}, True
    ),
    Case("n2-c3-8x7-4x4-down2", {"x": (2, 3, 8, 7)}, {"down": 2, "padding": 1}, {"f": _CLASSIC}),
    Case("n2-c3-5x7-4x4", {"x": (2, 3, 5, 7)}, {"padding": [2, 1, 2, 1], "flip_filter": True}, {"f": _CLASSIC}),
    Case("n2-c5-5x6-12taps-up2", {"x": (2, 5, 5, 6)}, {"up": 2, "padding": 6, "gain": 4}, {"f": _LONG}, True),
    Case(
        "n1-c3-6x5-5x2-mixed",
        {"x": (1, 3, 6, 5)},
        {"up": [3, 2], "down": [1, 2], "padding": [2, -1, -2, 3], "gain": -1.5},
        {"f": _ODD},
    ),
    Case("n2-c3-4x5-nofilter", {"x": (2, 3, 4, 5)}, {"f": None, "up": [1, 3], "down": [2, 1], "padding": [1, 0]}),
]
