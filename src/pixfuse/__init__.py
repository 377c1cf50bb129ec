"""Fused, deterministic image-network ops for PyTorch, on CPU and GPU, without a toolchain at run time."""

from ._shared.library import backend, load_kernels
from .bias_act import bias_act

__version__ = "0.1.0"
__all__ = ["backend", "bias_act"]

load_kernels()
del load_kernels
