"""Drop-ins for the ops of four other projects, under their names or under their import paths.

* ``pixfuse.compat.nvlabs``, ``.rosinality``, ``.basicsr``, ``.mmcv``: to import from, with the peer's names,
  argument order and padding conventions;
* :func:`install`, :func:`uninstall`, :func:`installed`: to run code that imports the peers' own;
* ``pixfuse run --compat NAME SCRIPT ARGS``: the same for a script that is not to be changed.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._install import Installation, install, installed, uninstall
from ._peers import PEERS

__all__ = ["Installation", "install", "installed", "uninstall"]


def __getattr__(name: str) -> Any:
    if name in PEERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *PEERS])
