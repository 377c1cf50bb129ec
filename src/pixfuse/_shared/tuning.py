"""Constants of the Triton kernels that suit one GPU better than another, and the search for them.

A room's ``gpu.py`` names its constants with what they may be (:func:`tuned`); the first is the default, the fastest
on an H200. ``pixfuse tune`` tries the others on the GPU at hand and writes what it finds to :func:`table_path`, from
where the rooms take it when they are imported. Nothing is ever tuned unasked.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import calls

CANDIDATES: dict[str, dict[str, Sequence[Any]]] = {}  # room: constant: what it may be


def tuned(room: str, **candidates: Sequence[Any]) -> tuple[Any, ...]:
    """The constants of a ``room`` for this machine's GPU, in the order in which they are named.

    Args:
        room: the name of the room's module ``gpu``, as in ``__name__``.
        candidates: for each constant what it may be, the default first.
    """
    name = room.split(".")[-2]
    CANDIDATES[name] = candidates
    chosen = _table().get(architecture() or "", {}).get(name, {})
    chosen = {c: tuple(v) if isinstance(v, list) else v for c, v in chosen.items()}  # JSON has no tuples
    return tuple(chosen[c] if chosen.get(c) in values else values[0] for c, values in candidates.items())


@functools.cache
def architecture() -> str | None:
    """The first GPU's architecture, for example ``"sm_90"`` or ``"gfx942"``; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def table_path() -> Path:
    """Where ``pixfuse tune`` keeps what it found."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pixfuse" / "tuning.json"


def _table() -> dict[str, dict[str, dict[str, Any]]]:
    path = table_path()
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
        return {gpu: {room: dict(constants) for room, constants in rooms.items()} for gpu, rooms in table.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"pixfuse: {path} must be a table that 'pixfuse tune' wrote, got {error}; delete it"
        ) from error


class Trial(NamedTuple):
    """One measurement of a search."""

    constant: str
    value: Any
    time: float  # the geometric mean over the room's rows, of any unit
    best: bool  # so far


def search(module: Any, candidates: dict[str, Sequence[Any]], measure: Callable[[], float]) -> Iterator[Trial]:
    """Set the constants of a ``module`` one after another to what ``measure`` finds fastest, and say each trial.

    A value is kept if it is 2% faster, which is more than the noise. One that ``measure`` raises for is passed over.
    The module is left with what was best.
    """
    fastest = _measured(module, measure)
    for constant, values in candidates.items():
        kept = getattr(module, constant)
        for value in values:
            if value == kept:
                continue
            setattr(module, constant, value)
            time = _measured(module, measure)
            better = time < 0.98 * fastest
            yield Trial(constant, value, time, better)
            if better:
                kept, fastest = value, time
        setattr(module, constant, kept)
    _forget(module)


def _measured(module: Any, measure: Callable[[], float]) -> float:
    _forget(module)
    try:
        return measure()
    except Exception:  # too many registers, too much shared memory: whatever a compiler says
        return float("inf")


def _forget(module: Any) -> None:
    """Drop the plans that were made with other constants."""
    calls.forget()
    for plan in vars(module).values():
        if hasattr(plan, "cache_clear"):
            plan.cache_clear()


def save(found: dict[str, dict[str, Any]]) -> Path:
    """Add ``{room: {constant: value}}`` for this machine's GPU to the table; where it lies."""
    table = _table()
    gpu = architecture()
    if gpu is None:
        raise RuntimeError("pixfuse: tuning needs a GPU, got none")
    table.setdefault(gpu, {}).update(found)
    path = table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    return path
