"""The checks that several rooms need, and the one wording of every error.

``op: argument must <requirement>, got <value>``. TypeError: the wrong kind of thing. ValueError: a wrong size, range
or pairing. Everything is checked before any work is done, by the public functions and by the fake kernels alike.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import SymFloat, SymInt, Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_LARGEST = 2**31 - 1  # of a factor, size or padding: what one of these multiplies fits in 64 bits
_LARGEST_RESULT = 2**59  # elements, so that bytes fit in 64 bits


def dtype_name(dtype: torch.dtype) -> str:
    """``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def describe(value: Any) -> str:
    """A value as an error message shows it; a tensor by its dtype and shape, never by its contents."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse(
    op: str, argument: str, requirement: str, value: Any, error: type[Exception] = ValueError, remedy: str = ""
) -> NoReturn:
    """Raise ``op: argument must <requirement>, got <value>``; a string that describes the value passes as it is."""
    got = value if isinstance(value, _Words) else describe(value)
    raise error(f"{op}: {argument} must {requirement}, got {got}{f'; {remedy}' if remedy else ''}")


class _Words(str):
    """Words for ``got …`` that are not a Python value."""


def words(text: str) -> str:
    """Mark ``text`` as the words after ``got``, to be printed without quotes."""
    return _Words(text)


def floating(op: str, argument: str, value: Any) -> None:
    """``value`` is a tensor of one of the four floating dtypes."""
    if not isinstance(value, Tensor):
        refuse(op, argument, "be a tensor", words(type(value).__name__), TypeError)
    if value.dtype not in FLOATS:
        refuse(op, argument, "be float64, float32, bfloat16 or float16", value, TypeError)
    strided(op, argument, value)


def strided(op: str, argument: str, value: Tensor) -> None:
    """``value`` is a dense tensor, not a sparse, nested or quantised one."""
    if value.layout is torch.strided and not value.is_nested and not value.is_quantized:
        return
    kind = "a nested tensor" if value.is_nested else "a quantised tensor" if value.is_quantized else str(value.layout)
    refuse(op, argument, "be a strided (dense) tensor", words(kind), TypeError)


def image(op: str, x: Any, ndim: Sequence[int]) -> None:
    """``x`` is a floating tensor ``[N, C, *spatial]`` of an allowed rank with no empty spatial axis."""
    floating(op, "x", x)
    if x.dim() not in ndim:
        ranks = " or ".join(f"{n}-D" for n in ndim)
        refuse(op, "x", f"be {ranks} ([N, C, *spatial])", words(f"{x.dim()}-D of shape {list(x.shape)}"))
    spatial(op, x)


def spatial(op: str, x: Tensor) -> None:
    """``x`` has no spatial axis of size 0 (an empty batch or no channels are fine)."""
    if torch.compiler.is_dynamo_compiling():
        return  # tracing cannot print symbolic sizes, so the fake kernel says it
    if x.numel() == 0 and 0 in x.shape[2:]:
        shape = [int(n) for n in x.shape]
        refuse(op, "x", "have no empty spatial axis", words(f"shape {shape}"))


def result_size(op: str, argument: str, shape: Sequence[Any], value: Any) -> None:
    """A result of ``shape``, which follows from ``argument``, has a size that can be counted."""
    if torch.compiler.is_compiling():  # not a rule to specialise symbolic sizes for
        return
    if math.prod(shape) > _LARGEST_RESULT:
        refuse(op, argument, f"give a result of at most {_LARGEST_RESULT} elements", value)


def same_device(op: str, argument: str, value: Tensor, x: Tensor, name: str = "x") -> None:
    """``value`` lies on the device of ``x``, the argument ``name``."""
    if value.device != x.device:
        refuse(op, argument, f"be on the device of {name} ({x.device})", words(str(value.device)))


def vector(op: str, argument: str, value: Any, length: Any, meaning: str, x: Tensor, name: str = "x") -> None:
    """``value`` is a floating 1-D tensor of ``length`` elements on the device of ``x``, the argument ``name``."""
    floating(op, argument, value)
    if value.dim() != 1 or value.shape[0] != length:
        refuse(op, argument, f"have shape [{length}] ({meaning})", words(f"shape {list(value.shape)}"))
    same_device(op, argument, value, x, name)


def integer(op: str, argument: str, value: Any, minimum: int | None = None) -> Any:
    """``value`` as an int (numpy integers too; bools are refused), at least ``minimum``."""
    if type(value) is int and (-_LARGEST if minimum is None else minimum) <= value <= _LARGEST:
        return value
    if isinstance(value, bool):
        refuse(op, argument, "be an int", value, TypeError)
    if isinstance(value, (int, SymInt)):
        number = value
    elif isinstance(value, numbers.Integral):  # numpy
        number = int(value)
    else:
        refuse(op, argument, "be an int", value, TypeError)
    if minimum is not None and number < minimum:
        refuse(op, argument, f"be at least {minimum}", number)
    if not -_LARGEST <= number <= _LARGEST:
        refuse(op, argument, f"be at most {_LARGEST} in magnitude", number)
    return number


def pair(op: str, argument: str, value: Any, minimum: int) -> tuple[Any, Any]:
    """An int for both axes or a sequence ``[x, y]`` of ints, as ``(x, y)``."""
    if type(value) is int and minimum <= value <= _LARGEST:
        return value, value
    if isinstance(value, (list, tuple)):
        if len(value) != 2:
            refuse(op, argument, "be an int or [x, y]", value)
        return integer(op, argument, value[0], minimum), integer(op, argument, value[1], minimum)
    both = integer(op, argument, value, minimum)
    return both, both


def real(op: str, argument: str, value: Any) -> Any:
    """``value`` as a Python float; accepts ints, floats and numpy numbers, refuses bools, NaN and tensors."""
    if type(value) is float and value == value:
        return value
    if type(value) is int and -_LARGEST <= value <= _LARGEST:
        return value * 1.0
    if isinstance(value, bool):
        refuse(op, argument, "be a number", value, TypeError)
    number: Any
    if isinstance(value, (int, float, SymInt, SymFloat)):
        number = value
    elif isinstance(value, numbers.Real):  # numpy
        number = float(value)
    else:
        refuse(op, argument, "be a number", value, TypeError)
    if number != number:  # math.isnan does not trace
        refuse(op, argument, "be a number", value)
    try:
        return number * 1.0
    except OverflowError:
        refuse(op, argument, "fit in a float", number)


def choice(op: str, argument: str, value: Any, known: Sequence[str]) -> int:
    """The position of ``value`` among the ``known`` names."""
    if not isinstance(value, str):
        refuse(op, argument, f"be one of {', '.join(known)}", value, TypeError)
    if value not in known:
        refuse(op, argument, f"be one of {', '.join(known)}", value)
    return known.index(value)


def flag(op: str, argument: str, value: Any) -> bool:
    """``value`` is True or False."""
    if not isinstance(value, bool):
        refuse(op, argument, "be True or False", value, TypeError)
    return value
