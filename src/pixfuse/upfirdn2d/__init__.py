"""Resampling with FIR filters: insert zeros, pad or crop, filter, keep every n-th sample."""

from .filters import downsample2d, filter2d, setup_filter, upsample2d
from .op import upfirdn2d

__all__ = ["downsample2d", "filter2d", "setup_filter", "upfirdn2d", "upsample2d"]
