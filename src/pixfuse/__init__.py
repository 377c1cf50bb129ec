"""Fused, deterministic image-network ops for PyTorch, on CPU and GPU, without a toolchain at run time."""

from torch import fx

from . import compat
from ._shared.library import ALIASES, OPS, backend, load_kernels
from .bias_act import bias_act, inlined
from .conv2d_resample import conv2d_resample, modulated_conv2d
from .filtered_lrelu import filtered_lrelu
from .group_norm import group_norm
from .patching import patch, unpatch
from .upfirdn2d import downsample2d, filter2d, setup_filter, upfirdn2d, upsample2d
from .upsample import interpolate, upsample_nearest

__version__ = "0.1.0"
__all__ = [
    "backend",
    "bias_act",
    "compat",
    "conv2d_resample",
    "downsample2d",
    "filter2d",
    "filtered_lrelu",
    "group_norm",
    "inlined",
    "interpolate",
    "modulated_conv2d",
    "patch",
    "setup_filter",
    "unpatch",
    "upfirdn2d",
    "upsample2d",
    "upsample_nearest",
]


load_kernels()
for _op in {*OPS, *ALIASES} & {*__all__}:
    fx.wrap(_op)  # a node in the graphs of torch.fx, which has no tensors to check
del ALIASES, OPS, load_kernels
