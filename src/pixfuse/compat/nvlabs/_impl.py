"""The argument ``impl`` that most functions of the peer end with."""

from typing import Any

from ..._shared import checks


def check_impl(op: str, impl: Any) -> None:
    """``impl`` is one of the two names that the peer knows."""
    checks.choice(op, "impl", impl, ("cuda", "ref"))
