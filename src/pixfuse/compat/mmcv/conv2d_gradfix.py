"""``mmcv.ops.conv2d_gradfix``: see :mod:`pixfuse.compat.nvlabs.conv2d_gradfix`; ``enabled`` is True at first here."""

from __future__ import annotations

from typing import Any

from ..._shared import conv
from ..nvlabs.conv2d_gradfix import conv2d, conv_transpose2d, no_weight_gradients

__all__ = ["conv2d", "conv_transpose2d", "enabled", "no_weight_gradients"]

enabled = True


def __getattr__(name: str) -> Any:
    if name == "weight_gradients_disabled":
        return conv.weight_gradients_disabled()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
