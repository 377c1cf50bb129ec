"""The calls that the tests check: the factors of ``modulated_conv2d``, all in one tensor."""

from __future__ import annotations

from torch import Tensor

from .._shared.testing import Case
from .modulation import modulation
from .reference import EXACT, PLAIN


def modulated_weights(x: Tensor, weight: Tensor, dtype: int) -> Tensor:
    """The weights ``[N, O, C, kh, kw]`` of images whose styles are ``x``."""
    w, s, d = modulation(weight, x, dtype, False, False)
    w, s = (weight, x) if dtype == PLAIN else (w, s)
    return (w * s[:, None, :, None, None] * d[:, :, None, None, None]).to(x.dtype)


def _case(images: int, weight: tuple[int, ...], dtype: int, thorough: bool = False) -> Case:
    o, c, kh, kw = weight
    name = f"n{images}-o{o}-c{c}-{kh}x{kw}-{'plain' if dtype == PLAIN else 'normalised'}"
    return Case(name, {"x": (images, c), "weight": weight}, {"dtype": dtype}, thorough=thorough)


CASES = [
    _case(3, (2, 5, 3, 3), PLAIN, thorough=True),
    _case(2, (3, 4, 3, 3), EXACT, thorough=True),
    _case(1, (4, 3, 1, 1), PLAIN),
    _case(5, (1, 17, 1, 1), EXACT),
    _case(2, (3, 2, 2, 5), EXACT),
]
