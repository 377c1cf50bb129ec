"""``torch_utils.ops.conv2d_gradfix``: convolutions to any order, and gradients without those of the weights.

What pixfuse does better on purpose:

* ``no_weight_gradients`` works: on every PyTorch and device, in ``conv2d_resample`` and ``modulated_conv2d`` too (there
  the weight gets None, and the styles theirs). It keeps to its thread, an exception inside does not leave it on, and
  one object serves any number of blocks.
* The second order is cheap on every PyTorch. ``enabled`` may be set as before; nothing depends on it.
* ``padding="same"`` and ``"valid"`` are supported.

Inside ``torch.compile`` and ``torch.func`` the convolutions are PyTorch's own, which compute the gradients asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..._shared import checks, conv

__all__ = ["conv2d", "conv_transpose2d", "enabled", "no_weight_gradients"]

enabled = False


def __getattr__(name: str) -> Any:
    if name == "weight_gradients_disabled":
        return conv.weight_gradients_disabled()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def no_weight_gradients(disable: bool = True) -> AbstractContextManager[None]:
    """A context in which backward passes leave the gradients of convolution weights None."""
    return conv.no_weight_gradients(checks.flag("no_weight_gradients", "disable", disable))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """The values of :func:`torch.nn.functional.conv2d`."""
    op = "conv2d"
    groups = checks.integer(op, "groups", groups, 1)
    _check_tensors(op, input, weight, bias, groups, transposed=False)
    if not isinstance(padding, str):
        padding = _sizes(op, "padding", padding, 0)
    elif padding not in ("same", "valid"):
        checks.refuse(op, "padding", "be an int, two ints, 'same' or 'valid'", padding)
    stride, dilation = _sizes(op, "stride", stride, 1), _sizes(op, "dilation", dilation, 1)
    return conv.conv2d(input, weight, bias, stride, padding, dilation, groups)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """The values of :func:`torch.nn.functional.conv_transpose2d`."""
    op = "conv_transpose2d"
    groups = checks.integer(op, "groups", groups, 1)
    _check_tensors(op, input, weight, bias, groups, transposed=True)
    stride, dilation = _sizes(op, "stride", stride, 1), _sizes(op, "dilation", dilation, 1)
    padding, output_padding = _sizes(op, "padding", padding, 0), _sizes(op, "output_padding", output_padding, 0)
    return conv.conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)


def _check_tensors(op: str, input: Any, weight: Any, bias: Any, groups: int, transposed: bool) -> None:
    """Kinds, dtypes, devices and channels."""
    tensors = {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            checks.refuse(op, name, "be a tensor", checks.words(type(value).__name__), TypeError)
        checks.same_device(op, name, value, input, "input")
        if value.dtype != input.dtype and not torch.is_autocast_enabled(conv.autocast_device(input)):
            checks.refuse(op, name, f"have the dtype of input ({checks.dtype_name(input.dtype)})", value)
    if input.dim() not in (3, 4):
        checks.refuse(op, "input", "be 4-D ([N, C, H, W]) or 3-D ([C, H, W])", _shape(input))
    if weight.dim() != 4:
        checks.refuse(op, "weight", "be 4-D ([out, in, kh, kw], transposed [in, out, kh, kw])", _shape(weight))
    split, whole = weight.shape[0], weight.shape[1] * groups
    if split % groups:
        checks.refuse(op, "groups", f"divide the first axis of weight ({split})", groups)
    channels, results = (split, whole) if transposed else (whole, split)
    if input.shape[-3] != channels:
        checks.refuse(op, "input", f"have {channels} channels (of weight and groups)", _shape(input))
    if bias is not None and tuple(bias.shape) != (results,):
        checks.refuse(op, "bias", f"have shape [{results}] (the channels of the result)", _shape(bias))


def _shape(value: Tensor) -> str:
    return checks.words(f"shape {list(value.shape)}")


def _sizes(op: str, argument: str, value: Any, minimum: int) -> int | list[int]:
    """An int, or one for height and width."""
    if not isinstance(value, (list, tuple)):
        return checks.integer(op, argument, value, minimum)
    if len(value) not in (1, 2):
        checks.refuse(op, argument, "be an int or two ints (height, width)", value)
    return [checks.integer(op, argument, v, minimum) for v in value]
