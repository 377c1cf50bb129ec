"""Fused, deterministic image-network ops for PyTorch, on CPU and GPU, without a toolchain at run time."""

from ._shared.library import backend, load_kernels
from .bias_act import bias_act
from .group_norm import group_norm
from .upsample import interpolate, upsample_nearest

__version__ = "0.1.0"
__all__ = ["backend", "bias_act", "group_norm", "interpolate", "upsample_nearest"]

load_kernels()
del load_kernels
