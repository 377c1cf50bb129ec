"""Bias, activation, gain, clamp: the definition.

``t = x + b``, ``v = gain * act(t)``, ``y = min(max(v, -clamp), clamp)``. Everything is computed in float32 (float64
for float64) and rounded once. A negative clamp stands for none.

The derivative at a kink: relu'(0) = 0, lrelu'(0) = alpha, selu'(0) is the negative branch's, and a value exactly at
the clamp (rounded to the dtype of x) passes no gradient, so that the rounded output tells as much as the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.layout import compute_dtype, is_channels_last, to_layout

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543773


@dataclass(frozen=True)
class Activation:
    """One activation: its value, first and second derivative as functions of ``(t, alpha)``, and its defaults."""

    name: str
    value: Callable[[Tensor, float], Tensor]
    slope: Callable[[Tensor, float], Tensor]
    curvature: Callable[[Tensor, float], Tensor] | None  # None: zero everywhere
    def_alpha: float
    def_gain: float


def _elu_slope(t: Tensor, alpha: float) -> Tensor:
    return torch.where(t > 0, torch.ones_like(t), t.clamp(max=0).exp())


def _elu_curvature(t: Tensor, alpha: float) -> Tensor:
    return torch.where(t > 0, torch.zeros_like(t), t.clamp(max=0).exp())


def _swish_slope(t: Tensor, alpha: float) -> Tensor:
    s = t.sigmoid()
    return s * (1 + t * (1 - s))


def _swish_curvature(t: Tensor, alpha: float) -> Tensor:
    s = t.sigmoid()
    return s * (1 - s) * (2 + t * (1 - 2 * s))


def _sigmoid_slope(t: Tensor, alpha: float) -> Tensor:
    return t.sigmoid() * (-t).sigmoid()


ACTIVATIONS = (
    Activation("linear", lambda t, a: t, lambda t, a: torch.ones_like(t), None, 0.0, 1.0),
    Activation("relu", lambda t, a: t.relu(), lambda t, a: (t > 0).to(t.dtype), None, 0.0, math.sqrt(2)),
    Activation(
        "lrelu",
        lambda t, a: torch.where(t > 0, t, t * a),
        lambda t, a: torch.where(t > 0, torch.ones_like(t), a),
        None,
        0.2,
        math.sqrt(2),
    ),
    Activation(
        "tanh",
        lambda t, a: t.tanh(),
        lambda t, a: 1 - t.tanh().square(),
        lambda t, a: -2 * t.tanh() * (1 - t.tanh().square()),
        0.0,
        1.0,
    ),
    Activation(
        "sigmoid",
        lambda t, a: t.sigmoid(),
        _sigmoid_slope,
        lambda t, a: _sigmoid_slope(t, a) * (1 - 2 * t.sigmoid()),
        0.0,
        1.0,
    ),
    Activation("elu", lambda t, a: F.elu(t), _elu_slope, _elu_curvature, 0.0, 1.0),
    Activation(
        "selu",
        lambda t, a: F.selu(t),
        lambda t, a: _SELU_SCALE * torch.where(t > 0, torch.ones_like(t), _SELU_ALPHA * _elu_slope(t, a)),
        lambda t, a: _SELU_SCALE * _SELU_ALPHA * _elu_curvature(t, a),
        0.0,
        1.0,
    ),
    Activation(
        "softplus",
        lambda t, a: F.softplus(t, threshold=40.0),  # t itself from where the rest is below half an ulp of float64
        lambda t, a: t.sigmoid(),
        _sigmoid_slope,
        0.0,
        1.0,
    ),
    Activation("swish", lambda t, a: F.silu(t), _swish_slope, _swish_curvature, 0.0, math.sqrt(2)),
)


def bias_act(x: Tensor, b: Tensor | None, dim: int, act: int, alpha: float, gain: float, clamp: float) -> Tensor:
    """``y`` of the shape, dtype and layout of ``x``."""
    v = gain * ACTIVATIONS[act].value(_biased(x, b, dim), alpha)
    y = F.hardtanh(v, -clamp, clamp) if clamp >= 0 else v
    return to_layout(y.to(x.dtype), is_channels_last(x))


def bias_act_backward(
    dy: Tensor,
    x: Tensor | None,
    b: Tensor | None,
    y: Tensor | None,
    dim: int,
    act: int,
    alpha: float,
    gain: float,
    clamp: float,
    channels_last: bool,
    need_db: bool,
) -> tuple[Tensor, Tensor]:
    """``dx`` in the dtype of ``dy``, and ``db`` (its sum over all axes but ``dim``) in the compute dtype.

    Where the derivative follows from the output's sign alone ``y`` is given, else ``x`` and ``b``; for a plain linear
    function neither. ``db`` is empty unless ``need_db``.
    """
    dx = dy.to(compute_dtype(dy)) * gain
    known = x if y is None else y
    if known is not None:
        t = known.to(dx.dtype) if y is not None else _biased(known, b, dim)
        v = t if y is not None else gain * ACTIVATIONS[act].value(t, alpha)
        dx = dx * ACTIVATIONS[act].slope(t, alpha)
        if clamp >= 0:
            limit = (
                torch.tensor(clamp, dtype=dy.dtype).to(v) if y is not None else clamp
            )  # y was rounded, so was its limit
            dx = torch.where(v.abs() < limit, dx, 0)
    db = sum_per_channel(dx, dim) if need_db else dx.new_empty(0)
    return to_layout(dx.to(dy.dtype), channels_last), db


def bias_act_second(
    v: Tensor,
    dy: Tensor,
    x: Tensor,
    b: Tensor | None,
    dim: int,
    act: int,
    alpha: float,
    gain: float,
    clamp: float,
) -> Tensor:
    """``v * dy * gain * act''(t)`` where not clamped: the gradient of ``sum(v * dx)`` with respect to ``x``."""
    t = _biased(x, b, dim)
    curvature = ACTIVATIONS[act].curvature
    if curvature is None:
        return to_layout(torch.zeros_like(x), is_channels_last(x))
    ddx = v.to(t.dtype) * dy.to(t.dtype) * (gain * curvature(t, alpha))
    if clamp >= 0:
        ddx = torch.where((gain * ACTIVATIONS[act].value(t, alpha)).abs() < clamp, ddx, 0)
    return to_layout(ddx.to(x.dtype), is_channels_last(x))


def sum_per_channel(t: Tensor, dim: int) -> Tensor:
    """The sum over all axes but ``dim``, in the compute dtype."""
    axes = [d for d in range(t.dim()) if d != dim]
    t = t.to(compute_dtype(t))
    return t.sum(axes) if axes else t  # sum([]) means all axes


def _biased(x: Tensor, b: Tensor | None, dim: int) -> Tensor:
    t = x.to(compute_dtype(x))
    if b is None:
        return t
    return t + b.to(t.dtype).reshape([-1 if d == dim else 1 for d in range(x.dim())])
