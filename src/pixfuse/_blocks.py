"""The blocks of diffusers that :func:`pixfuse.patch` knows by name, without importing diffusers.

A block becomes a subclass of its own class with another forward. Before that its parts must be the usual ones, and
afterwards its result on a small random image must be that of its own forward: a release of diffusers that computes
something else is left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .group_norm import group_norm
from .upfirdn2d import upfirdn2d
from .upsample import interpolate, upsample_nearest


class _Block:
    """What the patched classes share; they can be copied and pickled."""

    _pixfuse_original: type[nn.Module]
    _pixfuse_check: Callable[..., str | None]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _blank, (self._pixfuse_original,), self.__dict__


def _blank(original: type[nn.Module]) -> nn.Module:
    """An object of the patched class of ``original``, without its state."""
    made = patched_class(original)
    empty: nn.Module = made.__new__(made)
    return empty


class _ResnetBlock2D(_Block):
    def forward(self, input_tensor: Tensor, temb: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        me: Any = self
        if args or kwargs:  # arguments of older releases
            return super().forward(input_tensor, temb, *args, **kwargs)  # type: ignore[misc]
        h = _normalise(input_tensor, me.norm1, "silu")
        for resize in (getattr(me, "upsample", None), getattr(me, "downsample", None)):
            if resize is not None:
                input_tensor, h = resize(input_tensor), resize(h)
                break
        h = me.conv1(h)
        if me.time_emb_proj is not None:
            if not getattr(me, "skip_time_act", False):
                temb = me.nonlinearity(temb)
            temb = me.time_emb_proj(temb)[:, :, None, None]
        use = getattr(me, "time_embedding_norm", "default")
        if use == "scale_shift":
            if temb is None:
                raise ValueError("ResnetBlock2D: temb must be a tensor for time_embedding_norm='scale_shift', got None")
            scale, shift = temb.chunk(2, dim=1)
            h = F.silu(_normalise(h, me.norm2, None) * (1 + scale) + shift)
        else:
            if temb is not None:
                h = h + temb
            h = _normalise(h, me.norm2, "silu")
        h = me.conv2(me.dropout(h))
        if me.conv_shortcut is not None:
            input_tensor = me.conv_shortcut(input_tensor)
        return (input_tensor + h) / getattr(me, "output_scale_factor", 1.0)

    @staticmethod
    def _pixfuse_check(block: Any) -> str | None:
        if not (type(block.norm1) is type(block.norm2) is nn.GroupNorm and type(block.nonlinearity) is nn.SiLU):
            return "its norms and activation are not GroupNorm and SiLU"
        if block.norm1 is block.norm2:
            return "its two norms are one"
        use = getattr(block, "time_embedding_norm", "default")
        if use not in ("default", "scale_shift"):
            return f"time_embedding_norm is {use!r}"
        return None

    @staticmethod
    def _pixfuse_inputs(block: Any) -> list[tuple[int, ...]]:
        proj = block.time_emb_proj
        return [(1, block.norm1.num_channels, 4, 4), *([(1, proj.in_features)] if proj is not None else [])]


class _Upsample2D(_Block):
    def forward(self, hidden_states: Tensor, output_size: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        me: Any = self
        if args or kwargs:
            return super().forward(hidden_states, output_size, *args, **kwargs)  # type: ignore[misc]
        x = hidden_states
        y = upsample_nearest(x, 2) if output_size is None else interpolate(x, size=output_size)
        return _convolution(me)(y) if me.use_conv else y

    @staticmethod
    def _pixfuse_check(block: Any) -> str | None:
        if getattr(block, "use_conv_transpose", False):
            return "a transposed convolution is all it does"
        if getattr(block, "norm", None) is not None or not getattr(block, "interpolate", True):
            return "it normalises, or does not upsample"
        return None

    @staticmethod
    def _pixfuse_inputs(block: Any) -> list[tuple[int, ...]]:
        return [(1, block.channels, 4, 4)]


class _Downsample2D(_Block):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        wide = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        return upfirdn2d(hidden_states, torch.full((2, 2), 0.25, dtype=wide, device=hidden_states.device), down=2)

    @staticmethod
    def _pixfuse_check(block: Any) -> str | None:
        if block.use_conv:
            return "a strided convolution is all it does"
        pool = block.conv
        if getattr(block, "norm", None) is not None or type(pool) is not nn.AvgPool2d:
            return "it normalises, or does not average"
        plain = (pool.kernel_size, pool.stride, pool.padding) in ((2, 2, 0), ((2, 2), (2, 2), (0, 0)))
        return None if plain and not pool.ceil_mode and pool.divisor_override is None else "it averages in another way"

    @staticmethod
    def _pixfuse_inputs(block: Any) -> list[tuple[int, ...]]:
        return [(1, block.channels, 5, 4)]


def _normalise(x: Tensor, norm: Any, act: str | None) -> Tensor:
    return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, act)


def _convolution(block: Any) -> Any:
    """The convolution of an Upsample2D, which older weights keep under another name."""
    return block.conv if getattr(block, "name", "conv") == "conv" else block.Conv2d_0


_KNOWN: dict[str, tuple[type, str]] = {
    "ResnetBlock2D": (_ResnetBlock2D, "GroupNorm with SiLU, fused"),
    "Upsample2D": (_Upsample2D, "upsample_nearest"),
    "Downsample2D": (_Downsample2D, "upfirdn2d"),
}


_made: dict[Any, Any] = {}


def patched_class(original: Any) -> Any:
    """The patched class of a block's class, under the same name."""
    if original not in _made:
        mixin, _ = _KNOWN[original.__name__]
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        _made[original] = type(original.__name__, (mixin, original), {"_pixfuse_original": original, **names})
    return _made[original]


def original_of(cls: type) -> type[nn.Module] | None:
    """The class that a patched class stands for, or None for any other class."""
    return getattr(cls, "_pixfuse_original", None)


def _patch(block: Any, mixin: Any, words: str) -> tuple[str | None, str]:
    """Patch a block. Returns why not, or None, and words for what it runs now."""
    original = type(block)
    try:
        reason = mixin._pixfuse_check(block)
        if reason is None:
            inputs = mixin._pixfuse_inputs(block)
            before = _try(block, inputs)
            block.__class__ = patched_class(original)
            after = _try(block, inputs)
    except Exception as error:  # parts of another kind than the known ones
        block.__class__ = original
        return f"not the known block ({type(error).__name__}: {error})", words
    if reason is None and not _close(after, before):
        block.__class__ = original
        reason = "its result would be another"
    return reason, words


def _try(block: nn.Module, shapes: list[tuple[int, ...]]) -> Tensor:
    """The result on a small random image; leaves the mode and every random state as they are."""
    weight = next(block.parameters(), torch.zeros(()))
    if weight.is_meta:
        raise ValueError("its weights are on the meta device")
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator).to(weight.device, weight.dtype) for s in shapes]
    modes = [(m, m.training) for m in block.modules()]
    try:
        for m, _ in modes:
            m.training = False
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            y: Tensor = block(*inputs)
            if not torch.isfinite(y).all():
                raise ValueError("its result on random numbers is not finite")
            return y
    finally:
        for m, mode in modes:
            m.training = mode


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    some = 8 if a.dtype.itemsize == 2 else 64  # roundings of the layers inside
    return torch.allclose(a, b, rtol=0, atol=some * torch.finfo(a.dtype).eps * float(b.abs().max()), equal_nan=True)


BLOCKS: dict[str, Callable[[nn.Module], tuple[str | None, str]]] = {
    name: functools.partial(_patch, mixin=mixin, words=words) for name, (mixin, words) in _KNOWN.items()
}
