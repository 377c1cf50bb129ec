"""The public function ``group_norm`` and the two operators behind it: value and first derivative.

Higher derivatives come from the reference of the first one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._shared import checks
from .._shared.batching import Rule, outputs, to_front
from .._shared.calls import remembered
from .._shared.layout import cast, compute_dtype, empty, is_channels_last, to_layout
from .._shared.library import Op, define_op, differentiate
from .._shared.sharding import CHANNELS, IMAGE, STATS, Sharding, Window
from . import parts, reference

_ACTS = {None: 0, "silu": reference.SILU}
_RANKS = (2, 3, 4, 5)


@remembered("[0]")
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    act: str | None = None,
    round_before_act: bool = False,
) -> Tensor:
    """Normalise groups of channels, scale, shift and optionally apply SiLU, in one op.

    1. ``xhat = (x - mean) / sqrt(variance + eps)`` over each group of ``C / num_groups`` channels of each image
    2. ``z = weight * xhat + bias``, per channel
    3. ``y = z``, or ``z * sigmoid(z)`` with ``act="silu"``

    All three are computed in float32 (float64 for float64) and rounded once. The statistics keep their accuracy for
    any mean, a constant image gives exactly ``bias``, and an image's result does not depend on its batch.

    Args:
        x: floating tensor ``[N, C, *spatial]`` of 2 to 5 dimensions, any layout.
        num_groups: number of groups, a divisor of C.
        weight: ``[C]`` of any floating dtype, or None for ones. Its gradient has its dtype.
        bias: ``[C]`` of any floating dtype, or None for zeros. Its gradient has its dtype.
        eps: added to the variance, ``>= 0``.
        act: None or ``"silu"``.
        round_before_act: also round ``z`` to the dtype of ``x``, as the pair ``silu(group_norm(x))`` does. For pictures
            that must not move when a 16-bit model goes from the pair to the fused op; else less accurate.

    Returns:
        a tensor of the shape, dtype and layout of ``x``.

    Raises:
        TypeError: an argument is of the wrong kind, or a tensor is not floating.
        ValueError: a size, range, name or device does not fit.

    Source: Wu and He, "Group Normalization" (2018).

    Example:
        >>> import torch, pixfuse
        >>> pixfuse.group_norm(torch.tensor([[1.0, 3.0, -5.0, -5.0]]), num_groups=2, eps=0.25, bias=torch.ones(4))
        tensor([[0.1056, 1.8944, 1.0000, 1.0000]])
    """
    if act is not None and not isinstance(act, str):
        checks.refuse("group_norm", "act", "be None or 'silu'", act, TypeError)
    if act not in _ACTS:
        checks.refuse("group_norm", "act", "be None or 'silu'", act)
    checks.flag("group_norm", "round_before_act", round_before_act)
    num_groups, eps = _check(x, weight, bias, num_groups, eps)
    y: Tensor = _value(x, weight, bias, num_groups, eps, _ACTS[act], round_before_act)[0]
    return y


def _check(x: Any, weight: Any, bias: Any, num_groups: Any, eps: Any) -> tuple[int, float]:
    checks.image("group_norm", x, _RANKS)
    number: int = checks.integer("group_norm", "num_groups", num_groups, minimum=1)
    channels = x.shape[1]
    if channels % number != 0:
        checks.refuse("group_norm", "num_groups", f"divide the {channels} channels of x", number)
    small = checks.real("group_norm", "eps", eps)
    if not 0 <= small < math.inf:
        checks.refuse("group_norm", "eps", "be a finite number of at least 0", eps)
    if weight is not None:
        checks.vector("group_norm", "weight", weight, channels, "the channels of x", x)
    if bias is not None:
        checks.vector("group_norm", "bias", bias, channels, "the channels of x", x)
    return number, small


# --- rules of the value ---------------------------------------------------------------------------------------


def _value_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, bias, num_groups, eps)
    y = empty(x, x.shape, is_channels_last(x))
    mean = x.new_empty((x.shape[0], num_groups), dtype=compute_dtype(x))
    return y, mean, torch.empty_like(mean)


def _value_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, num_groups, _, act, round_before_act = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, mean, rstd, weight, bias if act == reference.SILU else None)
    ctx.scalars = (num_groups, act, round_before_act)
    ctx.dtypes = None if weight is None else weight.dtype, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _value_backward(ctx: Any, dy: Tensor | None, dmean: Any, drstd: Any) -> tuple[Tensor | None, ...]:
    """The statistics are no results of the public function, so their gradients are never there."""
    needs = ctx.needs_input_grad[:3]
    if dy is None or not any(needs):
        return (None,) * 7
    dx, dweight, dbias = _first(dy, *ctx.saved_tensors, *ctx.scalars, *needs)
    return (
        dx if needs[0] else None,
        cast(dweight, ctx.dtypes[0]) if needs[1] else None,
        cast(dbias, ctx.dtypes[1]) if needs[2] else None,
        *(None,) * 4,
    )


def _value_jvp(tangents: Sequence[Tensor | None], args: list[Any], outputs: Any) -> tuple[Tensor | None, None, None]:
    """The normalisation's derivative is symmetric, so its backward op gives the tangent of ``xhat``."""
    x, weight, bias, num_groups, eps, act, round_before_act = args
    v, dweight, dbias = tangents[:3]
    _, mean, rstd = outputs
    dtype, shape = compute_dtype(x), [-1 if d == 1 else 1 for d in range(x.dim())]

    def spread(t: Tensor) -> Tensor:
        return t.to(dtype).reshape(shape)

    def affine(w: Tensor | None, b: Tensor | None) -> Tensor:
        y: Tensor = _value(x, w, b, num_groups, eps, 0, False)[0].to(dtype)
        return y

    terms = []
    if v is not None:
        flags = (num_groups, 0, False, True, False, False)
        dxhat = _first(to_layout(v, is_channels_last(x)), x, mean, rstd, None, None, *flags)[0].to(dtype)
        terms.append(dxhat if weight is None else dxhat * spread(weight))
    if dweight is not None:
        terms.append(affine(None, None) * spread(dweight))
    if dbias is not None:
        terms.append(spread(dbias).expand(x.shape))
    if not terms:
        return None, None, None
    dz = functools.reduce(torch.add, terms)
    if act == reference.SILU:
        z = affine(weight, bias)
        z = z.to(x.dtype).to(dtype) if round_before_act else z
        s = z.sigmoid()
        dz = dz * (s * (1 + z * (1 - s)))
    return to_layout(dz.to(x.dtype), is_channels_last(x)), None, None


# --- rules of the first derivative ----------------------------------------------------------------------------


def _first_fake(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    act: int,
    round_before_act: bool,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = empty(x, x.shape, is_channels_last(x)) if need_dx else x.new_empty(0)
    dweight = mean.new_empty(x.shape[1] if need_dweight else 0)
    return dx, dweight, mean.new_empty(x.shape[1] if need_dbias else 0)


_first_derived = differentiate(reference.group_norm_backward)


def _first_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _first_derived["setup_context"](ctx, inputs, output)
    ctx.layouts = tuple(map(is_channels_last, inputs[:2]))


def _first_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    found = list(_first_derived["backward"](ctx, *grads))
    for i, channels_last in enumerate(ctx.layouts):
        if found[i] is not None:
            found[i] = to_layout(found[i], channels_last)
    return (*found[:2], None, None, *found[4:])


# --- vmap -----------------------------------------------------------------------------------------------------


def _vmap(call: Any, images: tuple[int, ...], parameters: tuple[int, ...], groups_at: int, sums: slice) -> Rule:
    """The rule that folds the mapped dimension into the batch, or into the channels as more groups.

    The latter where the problems have parameters of their own, or want sums over the batch (the flags ``sums``).
    ``images`` and ``parameters`` are the positions of the tensors with and without a batch axis.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size, folded = info.batch_size, list(args)
        apart = any(in_dims[i] is not None for i in parameters) or any(args[sums])
        at = 1 if apart else 0  # the axis that takes the mapped dimension
        for i in images:
            folded[i] = to_front(args[i], in_dims[i], size).movedim(0, at).flatten(at, at + 1)
        if apart:
            folded[groups_at] = args[groups_at] * size
            for i in parameters:
                if args[i] is not None:
                    folded[i] = to_front(args[i], in_dims[i], size).flatten()

        def unfold(y: Tensor) -> Tensor:
            if y.dim() == 1:  # the gradient of a parameter, or [0]
                return y.unflatten(0, (size, -1)) if y.numel() else y.new_empty(size, 0)
            return y.unflatten(at, (size, y.shape[at] // size)).movedim(at, 0)

        return outputs(call(*folded), unfold)

    return rule


# --- shards ---------------------------------------------------------------------------------------------------


def _rows(args: Any, axis: int, images: int = 1) -> tuple[int, Any]:
    """A row needs no other row, only the statistics of all; see parts.py."""
    return args[0].shape[axis], lambda start, stop: Window([(start, stop)] * images, {})


_value: Op = define_op(
    "group_norm(Tensor x, Tensor? weight, Tensor? bias, int num_groups, float eps, int act, bool round_before_act) "
    "-> (Tensor y, Tensor mean, Tensor rstd)",
    reference=reference.group_norm,
    fake=_value_fake,
    setup_context=_value_setup,
    backward=_value_backward,
    jvp=_value_jvp,
    hidden=2,
    vmap=_vmap(lambda *args: _value.whole(*args), images=(0,), parameters=(1, 2), groups_at=3, sums=slice(0, 0)),
    sharding=Sharding(
        (IMAGE, CHANNELS, CHANNELS), (IMAGE, STATS, STATS), axes=(0,), rows=_rows, groups_at=3, run=parts.group_norm
    ),
)
_first: Op = define_op(
    "group_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, int num_groups, "
    "int act, bool round_before_act, bool need_dx, bool need_dweight, bool need_dbias) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)",
    reference=reference.group_norm_backward,
    fake=_first_fake,
    setup_context=_first_setup,
    backward=_first_backward,
    jvp=_first_derived["jvp"],
    vmap=_vmap(lambda *args: _first(*args), images=(0, 1, 2, 3), parameters=(4, 5), groups_at=6, sums=slice(10, 12)),
    sharding=Sharding(
        (IMAGE, IMAGE, STATS, STATS, CHANNELS, CHANNELS),
        (IMAGE, CHANNELS, CHANNELS),
        axes=(0,),
        rows=functools.partial(_rows, images=2),
        groups_at=6,
        needed_at=(9, 10, 11),
        run=parts.group_norm_backward,
        whole_backward=True,
    ),
)
