"""Bias, activation, gain and clamp in one pass."""

from .op import bias_act, inlined

__all__ = ["bias_act", "inlined"]
