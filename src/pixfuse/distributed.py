"""DTensor support: importing this module registers every op's sharding rule.

An op on a DTensor sharded along the batch runs on each rank without communication; parameters are replicated and
their gradients are partial sums. It is a module of its own because importing DTensor costs most of a second.

Example:
    >>> import pixfuse.distributed  # doctest: +SKIP
"""

from __future__ import annotations

from torch.distributed.tensor.experimental import register_sharding

from ._shared.library import OPS

__all__ = ["register"]


def register() -> None:
    """Register the sharding rule of every op with DTensor."""
    for op in OPS.values():
        register_sharding(op.overload)(op.sharding)


register()
