"""The operators behind the demodulation of ``modulated_conv2d``: its factors and their first derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._shared.batching import one_by_one
from .._shared.conv import autocast_device, gate, wanted, weight_gradients_disabled
from .._shared.layout import compute_dtype, empty, is_channels_last
from .._shared.library import Op, define_op, differentiate
from .._shared.sharding import IMAGE, WHOLE, Sharding
from . import reference
from .reference import PLAIN, ROUNDED

# --- rules of the value ---------------------------------------------------------------------------------------


def _value_fake(
    weight: Tensor, styles: Tensor, dtype: int, channels_last: bool, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    result = ROUNDED[dtype] or compute_dtype(weight)
    d = styles.new_empty((styles.shape[0], weight.shape[0]), dtype=result)
    if dtype == PLAIN:
        return weight.new_empty(0, dtype=result), styles.new_empty(0, dtype=result), d
    return empty(weight, weight.shape, channels_last, result), styles.new_empty(styles.shape, dtype=result), d


def _value_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weight, styles, ctx.dtype, _, ctx.gated = inputs
    ctx.save_for_backward(weight, styles)
    ctx.set_materialize_grads(False)


def _value_backward(ctx: Any, dw: Tensor | None, ds: Tensor | None, dd: Tensor | None) -> tuple[Tensor | None, ...]:
    weight, styles = ctx.saved_tensors
    need_dweight, need_dstyles = wanted(ctx)[:2]
    if ctx.gated:
        weight = gate(weight)  # for what a second derivative makes of it
        need_dweight = need_dweight and not weight_gradients_disabled()
    if ctx.dtype == PLAIN:
        dw = ds = None  # of nothing
    if (dw is None and ds is None and dd is None) or not (need_dweight or need_dstyles):
        return (None,) * 5
    dweight, dstyles = _first(weight, styles, dw, ds, dd, ctx.dtype, need_dweight, need_dstyles)
    return dweight if need_dweight else None, dstyles if need_dstyles else None, None, None, None


# --- rules of the first derivative ----------------------------------------------------------------------------


def _first_fake(
    weight: Tensor,
    styles: Tensor,
    dw: Tensor | None,
    ds: Tensor | None,
    dd: Tensor | None,
    dtype: int,
    need_dweight: bool,
    need_dstyles: bool,
) -> tuple[Tensor, Tensor]:
    dweight = empty(weight, weight.shape, is_channels_last(weight)) if need_dweight else weight.new_empty(0)
    return dweight, styles.new_empty(styles.shape if need_dstyles else 0)


_derived = differentiate(reference.modulation_backward)


def _first_backward(ctx: Any, ddweight: Tensor | None, ddstyles: Tensor | None) -> tuple[Tensor | None, ...]:
    """In plain PyTorch, which differentiates it further."""
    saved = iter(ctx.saved_tensors)
    weight, *given = [next(saved) if other is None else other[0] for other in ctx.others][:6]
    with torch.autocast(autocast_device(weight), enabled=False):
        found = reference.modulation_second(ddweight, ddstyles, weight, *given)
    return *(g if needed else None for g, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None, None


# Nothing is split: every factor needs a whole row of the weight or of the styles, and they are small.
modulation: Op = define_op(
    "modulation(Tensor weight, Tensor styles, int dtype, bool channels_last, bool gated) "
    "-> (Tensor w, Tensor s, Tensor demodulation)",
    reference=reference.modulation,
    fake=_value_fake,
    setup_context=_value_setup,
    backward=_value_backward,
    jvp=differentiate(reference.modulation)["jvp"],
    vmap=one_by_one(lambda *args: modulation(*args)),
    sharding=Sharding((IMAGE, WHOLE), (IMAGE, WHOLE, WHOLE), axes=(), layout_at=3),
)
_first: Op = define_op(
    "modulation_backward(Tensor weight, Tensor styles, Tensor? dw, Tensor? ds, Tensor? dd, int dtype, "
    "bool need_dweight, bool need_dstyles) -> (Tensor dweight, Tensor dstyles)",
    reference=reference.modulation_backward,
    fake=_first_fake,
    setup_context=_derived["setup_context"],
    backward=_first_backward,
    jvp=_derived["jvp"],
    vmap=one_by_one(lambda *args: _first(*args)),
    sharding=Sharding(
        (IMAGE, WHOLE, IMAGE, WHOLE, WHOLE), (IMAGE, WHOLE), axes=(), needed_at=(6, 7), whole_backward=True
    ),
)
