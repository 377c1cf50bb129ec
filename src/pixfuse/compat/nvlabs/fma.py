"""``torch_utils.ops.fma``: ``a * b + c`` with broadcasting, differentiable any number of times.

What pixfuse does better on purpose: a 0-dimensional tensor gets its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._shared import checks

__all__ = ["fma"]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` for three tensors that broadcast; dtypes promote as in :func:`torch.addcmul`."""
    for name, value in (("a", a), ("b", b), ("c", c)):
        if not isinstance(value, Tensor):
            checks.refuse("fma", name, "be a tensor", checks.words(type(value).__name__), TypeError)
    try:
        torch.broadcast_shapes(a.shape, b.shape, c.shape)
    except RuntimeError:
        got = checks.words(f"{list(a.shape)}, {list(b.shape)} and {list(c.shape)}")
        checks.refuse("fma", "shapes of a, b and c", "broadcast", got)
    return torch.addcmul(c, a, b)
