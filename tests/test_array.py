"""pixfuse.array: arrays go in and come out as they are, without copies; JAX and CuPy are stood for by a class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pixfuse
import pixfuse.array

X = np.random.default_rng(0).standard_normal((2, 4, 6, 7)).astype(np.float32)
F, B = np.array([0.25, 0.5, 0.25], np.float32), np.linspace(-1, 1, 4, dtype=np.float32)
W = np.linspace(-1, 1, 4 * 4 * 9, dtype=np.float32).reshape(4, 4, 3, 3)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "bias_act": ((X, B), {"act": "swish"}),
    "conv2d_resample": ((X, W, F), {"up": 2, "padding": 1}),
    "downsample2d": ((X, F), {}),
    "filter2d": ((X, F), {}),
    "filtered_lrelu": ((X, F, F), {"b": B, "up": 2, "down": 2, "padding": 3}),
    "group_norm": ((X, 2), {"weight": B, "bias": B, "act": "silu"}),
    "interpolate": ((X,), {"scale_factor": 1.5, "mode": "bicubic"}),
    "modulated_conv2d": ((X, W, X.mean((2, 3))), {"padding": 1}),
    "upfirdn2d": ((X, F), {"up": 2, "padding": 1}),
    "upsample2d": ((X, F), {}),
    "upsample_nearest": ((X, [2, 3]), {}),
}


class Array:
    """An array of another library on top of NumPy's: DLPack out and in, and no more."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda y: Array(np.from_dlpack(y)))


def test_every_op_is_there() -> None:
    assert set(CALLS) | {"on_arrays"} == set(pixfuse.array.__all__)
    others = {"backend", "compat", "inlined", "patch", "setup_filter", "unpatch"}
    assert set(CALLS) >= {name for name in pixfuse.__all__ if name not in others and name.islower()} - others


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("kind", [np.asarray, Array])
def test_arrays_in_and_out(op: str, kind: Any) -> None:
    args, kwargs = CALLS[op]

    def convert(make: Any) -> tuple[list[Any], dict[str, Any]]:
        one = lambda v: make(v) if isinstance(v, np.ndarray) else v  # noqa: E731
        return [one(v) for v in args], {k: one(v) for k, v in kwargs.items()}

    made, named = convert(torch.from_numpy)
    wanted = getattr(pixfuse, op)(*made, **named).numpy()
    made, named = convert(kind)
    got = getattr(pixfuse.array, op)(*made, **named)
    assert type(got) is (np.ndarray if kind is np.asarray else Array)
    np.testing.assert_array_equal(got if kind is np.asarray else got.values, wanted)


def test_nothing_is_copied() -> None:
    seen = []

    def plus_one(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        seen.extend((x.data_ptr(), y.data_ptr()))
        return y

    x = X.copy()
    y = pixfuse.array.on_arrays(plus_one)(x)
    assert seen == [a.__array_interface__["data"][0] for a in (x, y)]


def test_layout_and_dtype_are_kept() -> None:
    last = np.ascontiguousarray(X.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    for x in (last, last.astype(np.float64), (last * 50 + 100).astype(np.uint8)):
        y = pixfuse.array.interpolate(x, scale_factor=2, mode="bilinear")
        assert y.dtype == x.dtype
        assert y.transpose(0, 2, 3, 1).flags.c_contiguous


def test_refusals() -> None:
    with pytest.raises(
        TypeError, match=r"filter2d: x must be an array with a namespace \(array API\), got builtins.list"
    ):
        pixfuse.array.filter2d([[1.0]], F)
    with pytest.raises(TypeError, match="filter2d: f must be None or a float32 tensor"):
        pixfuse.array.filter2d(X, F.astype(np.float64))
    with pytest.raises(ValueError, match="filter2d: arrays must have no reversed axis, got strides"):
        pixfuse.array.filter2d(X[:, :, ::-1], F)
    with pytest.raises(TypeError, match=r"filter2d: x must be an array with a namespace .*, got torch.Tensor"):
        pixfuse.array.filter2d(torch.from_numpy(X), F)


def test_a_result_is_never_the_memory_of_x() -> None:
    """bias_act with nothing to do gives a tensor back as it is; an array may be a file that is mapped to be read."""
    x = np.zeros((2, 2), np.float32)
    x.flags.writeable = False
    y = pixfuse.array.bias_act(x)
    assert not np.shares_memory(x, y)
    assert np.array_equal(x, y)


def test_arrays_that_dlpack_cannot_share() -> None:
    with pytest.raises(TypeError, match="bias_act: arrays must have no mask, got a masked array"):
        pixfuse.array.bias_act(np.ma.masked_array(np.zeros((2, 2), np.float32), mask=np.eye(2)))
    for array in (np.zeros((2, 2), ">f4"), np.zeros((2, 2), object)):
        with pytest.raises(TypeError, match="bias_act: arrays must be such that DLPack can share them, got"):
            pixfuse.array.bias_act(array)
