"""What a patched model runs: layers on pixfuse's ops, and GroupNorm with the SiLU after it as one call.

A layer computes what its own class computes, whoever calls it and from wherever. Only the code that runs one layer
after the other runs both as one, and looks at every call whether it may. So nothing depends on who else uses a layer.

A module is patched by giving the very same object another class, made here: a subclass of its own class under the
same name. Its name, parameters, hooks and mode stay, and so do all that refers to it; ``isinstance``, ``repr``,
``torch.fx`` (which knows PyTorch's layers by the module of their class) and wrappers that subclass once more
(parametrizations, FSDP2) see what they know; nothing is left to restore but the class. A forward in the object itself
would have to hold the object, and would run the original's weights from every shallow copy, as ``DataParallel`` makes.
"""

# Without "from __future__ import annotations": torch.fx puts annotations of forward, as they are, into its graphs.

import abc
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _rewrite
from .group_norm import group_norm
from .upfirdn2d import upfirdn2d
from .upsample import interpolate, upsample_nearest

_silu, _interpolate, _group_norm = (_rewrite.OWN[name] for name in ("silu", "interpolate", "group_norm"))


class Patched:
    """What the patched classes share."""

    _pixfuse_made_of: tuple[type[nn.Module], tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep from the original class that it has one more subclass."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(max(protocol, 2))
        if not isinstance(made, tuple) or all(part is not type(self) for part in (made[0], *made[1])):
            return made
        made_of = self._pixfuse_made_of
        maker, *args = (made_of[0] if part is type(self) else part for part in (made[0], *made[1]))
        return (_remade, (made_of, maker, tuple(args)), *made[2:])

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"torch.jit.script: {type(self).__name__} is patched by pixfuse and cannot be scripted; "
            "call pixfuse.unpatch(model) first, or use torch.jit.trace or torch.export"
        )


class _GroupNorm(Patched):
    def forward(self, input: Tensor) -> Tensor:
        me: Any = self
        return normalise(input, me.num_groups, me.weight, me.bias, me.eps, None)


class _Upsample(Patched):
    def forward(self, input: Tensor) -> Tensor:
        me: Any = self
        if F.interpolate is not _interpolate:
            return super().forward(input)  # type: ignore[misc]
        return resize(input, me.size, me.scale_factor, me.mode, me.align_corners, me.recompute_scale_factor)


class _AvgPool2d(Patched):
    def forward(self, input: Tensor) -> Tensor:
        image = input.is_floating_point() and input.dim() in (3, 4) and input.shape[-1] > 1 < input.shape[-2]
        if image and pools_by_two(self) and F.avg_pool2d is _rewrite.OWN["avg_pool2d"]:
            return halve(input)
        return super().forward(input)  # type: ignore[misc]


class _Sequential(Patched):
    def forward(self, input: Any) -> Any:
        norm: Any = None  # a layer whose turn has come
        for layer in self:  # type: ignore[attr-defined]
            if norm is not None:
                if _is_silu(layer):
                    input, norm = _both(norm, input), None
                    continue
                input = norm(input)
            norm = layer if _is_norm(layer) else None
            if norm is None:
                input = layer(input)
        return input if norm is None else norm(input)


LAYERS: dict[Any, type[Patched]] = {nn.GroupNorm: _GroupNorm, nn.Upsample: _Upsample, nn.AvgPool2d: _AvgPool2d}


def is_sequential(cls: type) -> bool:
    """Whether a class runs its layers one after the other, and does nothing else."""
    same = (getattr(cls, name, None) is getattr(nn.Sequential, name) for name in ("forward", "__iter__"))
    return all(same) and replaced(nn.Sequential) is None


_FUNCTIONS: dict[Any, str] = {
    nn.GroupNorm: "group_norm",
    nn.Upsample: "interpolate",
    nn.AvgPool2d: "avg_pool2d",
    nn.SiLU: "silu",
}
_FORWARDS: dict[Any, Any] = {kind: kind.forward for kind in [*_FUNCTIONS, nn.Sequential]}


def replaced(cls: Any) -> str | None:
    """What a class of PyTorch no longer has of what it came with."""
    forward, name = _FORWARDS[cls], _FUNCTIONS.get(cls)
    ours = getattr(forward, "__globals__", None) is vars(sys.modules[cls.__module__])
    if cls.forward is not forward or not ours or cls.__call__ is not nn.Module.__call__:
        return "the forward of its class was replaced"
    return f"F.{name} was replaced" if name and getattr(F, name) is not _rewrite.OWN[name] else None


def pools_by_two(pool: Any) -> bool:
    """Whether an AvgPool2d takes the mean of blocks of 2 by 2."""
    plain = (pool.kernel_size, pool.stride, pool.padding) in ((2, 2, 0), ((2, 2), (2, 2), (0, 0)))
    return plain and not pool.ceil_mode and pool.divisor_override is None


# --- classes --------------------------------------------------------------------------------------------------

_made: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def patched_class(original: Any, acts: tuple[str, ...] = ()) -> Any:
    """The class that takes the place of ``original``, or None if there is nothing to change.

    ``acts`` are the attributes that are SiLU.
    """
    key = (original, acts)
    made = _made.get(key)
    if made is None:
        base, names = LAYERS.get(original), {}
        if base is None and is_sequential(original):
            base = _Sequential
        if base is None:
            rewritten = _rewrite.rewrite(original, acts, _CALLS)
            if not rewritten.methods:
                return None
            base, names = Patched, {**rewritten.methods, "_pixfuse_rewritten": rewritten}
        names |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        meta = type(original)
        maker = abc.ABCMeta if issubclass(meta, abc.ABCMeta) else type  # not a metaclass that keeps a register
        made = maker.__new__(meta, original.__name__, (base, original), {**names, "_pixfuse_made_of": key})
        _made[key] = made
    return made


def original_of(cls: type) -> type[nn.Module] | None:
    """The class that a patched class takes the place of, or None for any other class."""
    return vars(cls)["_pixfuse_made_of"][0] if "_pixfuse_made_of" in vars(cls) else None


def _remade(made_of: Any, maker: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """An object without its state, of the original class where its source has not come along."""
    made, cls = maker(*args), patched_class(*made_of)
    if cls is not None and type(made) is made_of[0]:
        object.__setattr__(made, "__class__", cls)
    return made


# --- calls ----------------------------------------------------------------------------------------------------


def watched(module: Any) -> bool:
    """Whether a call of a module does more than run the forward of its class."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
    )


def _is_norm(f: Any) -> bool:
    return _runs(f, _GroupNorm.forward) and not nn.modules.module._has_any_global_hook()


def _is_silu(f: Any) -> bool:
    return f is _silu or (type(f) is nn.SiLU and F.silu is _silu and _runs(f, _silu_forward))


def _runs(f: Any, forward: Any) -> bool:
    """Whether a call of a module runs a forward, and nothing else."""
    kind: Any = type(f)
    mine = getattr(kind, "forward", None) is forward and kind.__call__ is nn.Module.__call__
    return mine and not watched(f)


_silu_forward = _FORWARDS[nn.SiLU]


def _both(norm: Any, x: Tensor) -> Tensor:
    return normalise(x, norm.num_groups, norm.weight, norm.bias, norm.eps, "silu")


def fused(act: Any, norm: Any, x: Any, **options: Any) -> Any:
    """``act(norm(x), **options)``; the options can be ``inplace`` only."""
    if _is_norm(norm) and _is_silu(act):
        return _both(norm, x)
    return act(norm(x), **options)


def fused_later(norm: Any, x: Any, act: Callable[[], Any], **options: Any) -> Any:
    """``h = norm(x)``, then ``act()(h, **options)``: what the act is may depend on what norm did."""
    if not _is_norm(norm):
        h = norm(x)
        return act()(h, **options)
    f = act()
    return _both(norm, x) if _is_silu(f) else f(norm(x), **options)


def resized(f: Any, *args: Any, **kwargs: Any) -> Any:
    """``f(*args, **kwargs)``."""
    return resize(*args, **kwargs) if f is _interpolate else f(*args, **kwargs)


_CALLS = _rewrite.Calls(fused, fused_later, resized)


def normalise(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: str | None
) -> Tensor:
    """``torch.nn.functional.group_norm``, and SiLU if asked for."""
    known = F.group_norm is _group_norm
    if x.dim() > 5 or x.numel() <= num_groups or not known:  # PyTorch refuses one value a group, the op six dimensions
        y = F.group_norm(x, num_groups, weight, bias, eps)
        return y if act is None else _silu(y)
    return group_norm(x, num_groups, weight, bias, eps, act)


def resize(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``torch.nn.functional.interpolate``."""
    whole = type(scale_factor) is float and scale_factor.is_integer() and scale_factor >= 1
    if whole and mode == "nearest" and size is None and align_corners is None and not antialias:
        return upsample_nearest(input, int(scale_factor))
    return interpolate(input, size, scale_factor, mode, align_corners, antialias, recompute_scale_factor)


def halve(x: Tensor) -> Tensor:
    """The means of blocks of 2 by 2 of ``[N, C, H, W]`` or ``[C, H, W]``."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    box = torch.full((2, 2), 0.25, dtype=wide, device=x.device)
    return upfirdn2d(x, box, down=2) if x.dim() == 4 else upfirdn2d(x[None], box, down=2)[0]


for _name in ("normalise", "resize", "halve"):
    torch.fx.wrap(_name)  # nodes of the graphs of torch.fx
