"""``op.conv2d_gradfix``: see :mod:`pixfuse.compat.nvlabs.conv2d_gradfix`; ``enabled`` is True at first here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..._shared import conv
from ..nvlabs.conv2d_gradfix import conv2d, conv_transpose2d

__all__ = ["conv2d", "conv_transpose2d", "enabled", "no_weight_gradients"]

enabled = True


def __getattr__(name: str) -> Any:
    if name == "weight_gradients_disabled":
        return conv.weight_gradients_disabled()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def no_weight_gradients() -> AbstractContextManager[None]:
    """A context in which backward passes leave the gradients of convolution weights None."""
    return conv.no_weight_gradients()
