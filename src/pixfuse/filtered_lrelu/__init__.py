"""Bias, upsampling FIR, leaky ReLU, clamp and downsampling FIR in one pass."""

from .op import filtered_lrelu

__all__ = ["filtered_lrelu"]
