"""Convolutions with resampling, and the modulated convolution of StyleGAN2, whose factors are an op of their own."""

from .op import conv2d_resample, modulated_conv2d

__all__ = ["conv2d_resample", "modulated_conv2d"]
