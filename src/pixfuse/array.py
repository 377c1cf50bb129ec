"""The ops on arrays of other libraries: NumPy, CuPy, JAX and whatever else has DLPack and the array API's namespace.

Arrays go in and the result comes out without a copy, on the device where they are: memory is shared and nothing moves
between devices. The result is memory of its own. An array that can't be shared as it is (a mask, a reversed axis, bytes
swapped, a device that torch doesn't know) is refused. Nothing is differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import pixfuse

__all__ = [
    "bias_act",
    "conv2d_resample",
    "downsample2d",
    "filter2d",
    "filtered_lrelu",
    "group_norm",
    "interpolate",
    "modulated_conv2d",
    "on_arrays",
    "upfirdn2d",
    "upsample2d",
    "upsample_nearest",
]


def on_arrays(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function of tensors as one of arrays: it returns the kind of array that its first argument is.

    Example:
        >>> import numpy, pixfuse.array
        >>> pixfuse.array.interpolate(numpy.array([[[0.0, 4.0]]]), size=4, mode="linear")
        array([[[0., 1., 3., 4.]]])
    """

    def tensor(value: Any) -> Any:
        if isinstance(value, Tensor) or not hasattr(value, "__dlpack__"):
            return value
        if any(step < 0 for step in getattr(value, "strides", None) or ()):  # torch would end the process
            raise ValueError(f"{function.__name__}: arrays must have no reversed axis, got strides {value.strides}")
        if np.ma.isMaskedArray(value):  # DLPack would drop the mask
            raise TypeError(f"{function.__name__}: arrays must have no mask, got a masked array")
        try:
            return torch.utils.dlpack.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            got = f"{getattr(value, 'dtype', type(value).__name__)} ({error})"
            words = f"{function.__name__}: arrays must be such that DLPack can share them, got {got}"
            raise TypeError(words) from error

    @functools.wraps(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(x, "__array_namespace__"):
            name = f"{type(x).__module__}.{type(x).__name__}"
            raise TypeError(f"{function.__name__}: x must be an array with a namespace (array API), got {name}")
        image = tensor(x)
        with torch.no_grad():
            y = function(image, *map(tensor, args), **{k: tensor(v) for k, v in kwargs.items()})
        return x.__array_namespace__().from_dlpack(y.clone() if y is image else y)  # x may be memory to read only

    return call


bias_act = on_arrays(pixfuse.bias_act)
conv2d_resample = on_arrays(pixfuse.conv2d_resample)
downsample2d = on_arrays(pixfuse.downsample2d)
filter2d = on_arrays(pixfuse.filter2d)
filtered_lrelu = on_arrays(pixfuse.filtered_lrelu)
group_norm = on_arrays(pixfuse.group_norm)
interpolate = on_arrays(pixfuse.interpolate)
modulated_conv2d = on_arrays(pixfuse.modulated_conv2d)
upfirdn2d = on_arrays(pixfuse.upfirdn2d)
upsample2d = on_arrays(pixfuse.upsample2d)
upsample_nearest = on_arrays(pixfuse.upsample_nearest)
