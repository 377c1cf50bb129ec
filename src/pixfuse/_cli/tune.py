"""``pixfuse tune``: the constants of the Triton kernels, searched for on the GPU at hand."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .._shared import tuning
from .._shared.timing import BenchRow, measure
from .bench import benches, geometric_mean

_SMALL = 2**20  # bytes of a row below which its time is the launch's


def run(rooms: Sequence[str]) -> int:
    """Tune the ``rooms`` (all if none is named) and save the result; exit status 1 without a GPU."""
    console = Console()
    modules = benches()
    for room in rooms:
        if room not in modules:
            console.print(f"pixfuse tune: --op must be one of {', '.join(modules)}, got {room!r}", style="red")
            return 2
    if tuning.architecture() is None:
        console.print("pixfuse tune: there is no GPU here; the kernels of the CPU need no tuning")
        return 1
    found = {}
    for room in rooms or modules:
        gpu = importlib.import_module(f"pixfuse.{room}.gpu")
        candidates = tuning.CANDIDATES[room]
        found[room] = tune(console, room, gpu, candidates, rows_of(modules[room]))
        path = tuning.save(found)  # after each room: they take minutes
        console.print(f"{room}: {found[room] or 'the defaults are the fastest'}")
    console.print(f"Kept in {path} for {tuning.architecture()}; new processes take it from there.")
    return 0


def rows_of(bench: Any) -> list[BenchRow]:
    """The bench's large 16-bit rows."""
    rows = [row for row in bench.rows("cuda") if row.dtype.itemsize == 2 and row.bytes >= _SMALL]
    return [row for row in rows if row.direction != "forward+backward"]


def tune(
    console: Console, room: str, gpu: Any, candidates: dict[str, Sequence[Any]], rows: Sequence[BenchRow]
) -> dict[str, Any]:
    """The constants of a room that are faster than what it has, by name."""

    def time() -> float:
        return geometric_mean([measure({"ours": row.ours}, "cuda", rounds=5)["ours"].median for row in rows])

    before = {name: getattr(gpu, name) for name in candidates}
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    trials = sum(len(values) - 1 for values in candidates.values())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{room}, {len(rows)} rows", total=trials)
        for trial in tuning.search(gpu, candidates, time):
            mark = "  fastest so far" if trial.best else ""
            progress.console.print(f"  {trial.constant} {trial.value}: {trial.time:.4f} ms{mark}")
            progress.advance(task)
    for row in rows:
        row.check()  # whatever was chosen is right
    after = {name: getattr(gpu, name) for name in candidates}
    return {name: value for name, value in after.items() if value != before[name]}
