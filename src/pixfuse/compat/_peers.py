"""Where every peer keeps its ops, and what of ours goes there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        path: import path of the package of its ops.
        modules: its modules there: a module of ours by name, or names of ours that make up one.
        exports: what the package itself exports, over modules of the same name.
        nested: whether its modules are packages around a module of their own name.
    """

    path: str
    modules: dict[str, str | tuple[str, ...]]
    exports: tuple[str, ...] = field(default=())
    nested: bool = False


_CONVOLUTIONS = ("conv2d_gradfix", "conv2d_resample")
PEERS = {
    "nvlabs": Peer(
        "torch_utils.ops",
        {
            name: name
            for name in ("upfirdn2d", "bias_act", "filtered_lrelu", *_CONVOLUTIONS, "fma", "grid_sample_gradfix")
        },
    ),
    "rosinality": Peer(
        "op",
        {
            "upfirdn2d": ("upfirdn2d",),
            "fused_act": ("FusedLeakyReLU", "fused_leaky_relu"),
            "conv2d_gradfix": "conv2d_gradfix",
        },
        ("FusedLeakyReLU", "fused_leaky_relu", "upfirdn2d"),
    ),
    "basicsr": Peer(
        "basicsr.ops",
        {"upfirdn2d": ("upfirdn2d",), "fused_act": ("FusedLeakyReLU", "fused_leaky_relu")},
        nested=True,
    ),
    "mmcv": Peer(
        "mmcv.ops",
        {
            "upfirdn2d": ("upfirdn2d", "filter2d", "upsample2d", "downsample2d"),
            "bias_act": ("bias_act",),
            "filtered_lrelu": ("filtered_lrelu",),
            "fused_bias_leakyrelu": ("FusedBiasLeakyReLU", "fused_bias_leakyrelu"),
            "conv2d_gradfix": "conv2d_gradfix",
        },
        (
            "FusedBiasLeakyReLU",
            "bias_act",
            "conv2d",
            "conv_transpose2d",
            "filter2d",
            "filtered_lrelu",
            "fused_bias_leakyrelu",
            "upfirdn2d",
            "upsample2d",
        ),
    ),
}


def contents(name: str, path: str) -> tuple[dict[str, ModuleType], dict[str, Any]]:
    """The modules that go under ``path``, and what the package exports."""
    ours = importlib.import_module(f"pixfuse.compat.{name}")
    modules = {}
    for key, source in PEERS[name].modules.items():
        if isinstance(source, str):
            modules[key] = importlib.import_module(f"pixfuse.compat.{name}.{source}")
            continue
        modules[key] = module = ModuleType(f"{path}.{key}", f"Part of pixfuse.compat.{name}.")
        module.__all__ = list(source)  # type: ignore[attr-defined]
        vars(module).update({n: getattr(ours, n) for n in source})
    if PEERS[name].nested:
        modules |= {f"{key}.{key}": module for key, module in modules.items()}
    return modules, {n: getattr(ours, n) for n in PEERS[name].exports}
