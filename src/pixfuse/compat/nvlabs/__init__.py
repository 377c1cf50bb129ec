"""The ops of NVlabs' StyleGAN repositories (``torch_utils.ops``) on pixfuse: same modules, names and arguments.

``impl`` is checked and otherwise without effect: both names take the kernel that :func:`pixfuse.backend` reports.
Every difference on purpose is in the docstring of the module that has it.
"""

from . import (
    bias_act,
    conv2d_gradfix,
    conv2d_resample,
    filtered_lrelu,
    fma,
    grid_sample_gradfix,
    upfirdn2d,
)

__all__ = [
    "bias_act",
    "conv2d_gradfix",
    "conv2d_resample",
    "filtered_lrelu",
    "fma",
    "grid_sample_gradfix",
    "upfirdn2d",
]
