"""``torch_utils.ops.bias_act``: bias, activation, gain and clamp in one pass.

What pixfuse does better on purpose:

* The result has the dtype of ``x`` whatever that of the bias (float32 with half ``x`` gives half).
* One derivative on every device: that of the definition, from values that were not rounded where a sign does not tell
  all. A clamp masks the gradient for ``linear`` too, and a negative slope is right.
* A NaN stays NaN under a clamp. Any rank and layout works on GPUs. Integer ``x`` is refused.
* An unknown activation is a ValueError that lists the known ones.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import bias_act as _bias_act
from ...bias_act.reference import ACTIVATIONS
from ._impl import check_impl

__all__ = ["activation_funcs", "bias_act"]


class _Attributes(dict[str, Any]):
    """A dictionary whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


activation_funcs = {a.name: _Attributes(def_alpha=a.def_alpha, def_gain=a.def_gain) for a in ACTIVATIONS}


def bias_act(
    x: Tensor,
    b: Tensor | None = None,
    dim: int = 1,
    act: str = "linear",
    alpha: float | None = None,
    gain: float | None = None,
    clamp: float | None = None,
    impl: str = "cuda",
) -> Tensor:
    """See :func:`pixfuse.bias_act`."""
    check_impl("bias_act", impl)
    return _bias_act(x, b, dim, act, alpha, gain, clamp)
