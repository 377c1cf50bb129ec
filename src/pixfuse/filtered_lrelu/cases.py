"""The calls that the tests check and the benches time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._shared.testing import Case


def low_pass(taps: int) -> Tensor:
    """A windowed-sinc low-pass filter of unit sum, as StyleGAN3 uses them: 6 taps per resampling factor."""
    t = torch.arange(taps, dtype=torch.float64) - (taps - 1) / 2
    f = torch.sinc(t * 6 / taps) * torch.hann_window(taps + 2, periodic=False, dtype=torch.float64)[1:-1]
    return (f / f.sum()).float()


def disc(taps: int) -> Tensor:
    """A filter ``[taps, taps]`` that is not separable."""
    t = torch.arange(taps, dtype=torch.float64) - (taps - 1) / 2
    r = (t[:, None].square() + t.square()).sqrt()
    f = torch.sinc(r * 6 / taps) * (r * math.pi / taps).cos().clamp(min=0) + 0.003 * t
    return (f / f.sum()).float()


def _case(name: str, shape: tuple[int, ...], bias: bool, fu: Tensor | None, fd: Tensor | None, **params: Any) -> Case:
    inputs = {"x": shape, **({"b": (shape[1],)} if bias else {})}
    fixed = {k: f for k, f in (("fu", fu), ("fd", fd)) if f is not None}
    return Case(name, inputs, params, fixed, thorough=name in _THOROUGH)


_THOROUGH = ("n2-c3-7x6-up2-down2", "n2-c2-6x7-radial")
CASES = [
    _case("n2-c3-7x6-up2-down2", (2, 3, 7, 6), True, low_pass(12), low_pass(12), up=2, down=2, padding=(9, 8, 10, 7)),
    _case(
        "n1-c2-5x7-up4-down2-clamp",
        (1, 2, 5, 7),
        True,
        low_pass(24),
        low_pass(12),
        up=4,
        down=2,
        padding=(16, 13, 15, 14),
        clamp=0.9,
    ),
    _case(
        "n2-c2-9x8-up2-down4-flip",
        (2, 2, 9, 8),
        True,
        low_pass(12),
        low_pass(24),
        up=2,
        down=4,
        padding=15,
        flip_filter=True,
    ),
    _case("n2-c2-6x7-radial", (2, 2, 6, 7), True, low_pass(12), disc(12), up=2, down=2, padding=(8, 9), slope=0.1),
    _case(
        "n3-c1-5x4-up3-down1-crop",
        (3, 1, 5, 4),
        False,
        disc(5)[:, :4].contiguous(),
        None,
        up=3,
        padding=(-1, 4, 3, -2),
        gain=0.7,
    ),
    _case("n2-c5-5x4-nofilter", (2, 5, 5, 4), True, None, None, gain=1.0, slope=1.0),
]
