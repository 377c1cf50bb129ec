"""The calls that the tests check and the benches time."""

from __future__ import annotations

from .._shared.testing import Case
from .reference import ACTIVATIONS

CASES = [
    Case(
        f"n2-c3-5x7-{a.name}{'-clamp' if clamp else ''}",
        {"x": (2, 3, 5, 7), "b": (3,)},
        {"act": a.name, "clamp": clamp},
        thorough=a.name == "swish" or (a.name == "lrelu" and clamp is not None),
    )
    for a in ACTIVATIONS
    for clamp in (None, 1.1)
]
CASES += [
    Case("c5-swish-dim0", {"x": (5,), "b": (5,)}, {"act": "swish", "dim": 0}, thorough=True),
    Case("n3-c5-lrelu", {"x": (3, 5), "b": (5,)}, {"act": "lrelu"}),
    Case("n2-c3-11-swish-dim2", {"x": (2, 3, 11), "b": (11,)}, {"act": "swish", "dim": 2, "gain": -0.7}),
    Case("n2-c3-5x2x3-tanh-dim0", {"x": (2, 3, 5, 2, 3), "b": (2,)}, {"act": "tanh", "dim": 0}, thorough=True),
    Case("n2-c3-5x7-relu-nobias", {"x": (2, 3, 5, 7)}, {"act": "relu", "gain": 0.5}),
    Case("n2-c1-5x7-lrelu-alpha-negative", {"x": (2, 1, 5, 7), "b": (1,)}, {"act": "lrelu", "alpha": -0.3, "clamp": 2}),
]
