"""``pixfuse bench``: every room's bench rows, checked and then timed side by side, as table, JSON and HTML."""

from __future__ import annotations

import base64
import html
import importlib
import importlib.util
import io
import json
import math
import pkgutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import pixfuse

from .._shared.checks import dtype_name
from .._shared.timing import BenchRow, Record, copy_bandwidth, environment, run_row, steady_allocator, threads


def benches() -> dict[str, Any]:
    """The bench module of every room that has one, by the room's name."""
    found = {}
    for room in pkgutil.iter_modules(pixfuse.__path__):
        name = f"pixfuse.{room.name}.bench_{room.name}"
        if room.ispkg and not room.name.startswith("_") and importlib.util.find_spec(name):
            found[room.name] = importlib.import_module(name)
    return found


def rows(device: str, wanted: Sequence[str]) -> Iterator[BenchRow]:
    """The rows of the ops (or rooms) ``wanted``, of all when empty."""
    for room, module in benches().items():
        for row in module.rows(device):
            if not wanted or row.op in wanted or room in wanted:
                yield row


def run(
    *,
    ops: list[str],
    device: str,
    html_path: Path | None,
    json_path: Path | None,
    thread_counts: list[int],
    rounds: int,
    compiled: bool,
    graph: bool,
    layouts: list[str] | None = None,
    directions: list[str] | None = None,
    dtypes: list[str] | None = None,
) -> int:
    """Run the command. Returns its exit status: 1 when a check failed."""
    errors = Console(stderr=True)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        errors.print(f"pixfuse bench: the device {device!r} can't be used: {error}", style="red", markup=False)
        return 2
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(torch.zeros(0, device=device).device)  # "cuda" alone has no number
    steady_allocator()
    machine = environment(device)
    records: list[Record] = []
    copies: dict[int, float] = {}
    began = time.perf_counter()
    columns = (TextColumn("{task.completed} rows"), BarColumn(bar_width=16), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=errors, transient=True) as progress:
        task = progress.add_task("measuring a copy", total=None)
        for count in thread_counts if torch.device(device).type == "cpu" else thread_counts[:1]:
            with threads(count):
                copies[count] = copy_bandwidth(device)
                for row in rows(device, ops):
                    asked = ((layouts, row.layout), (directions, row.direction), (dtypes, dtype_name(row.dtype)))
                    if any(wanted and value not in wanted for wanted, value in asked):
                        continue
                    progress.update(task, description=row.name)
                    records.append(
                        run_row(
                            row,
                            device,
                            copies[count],
                            machine={**machine, "copy_gbps": round(copies[count], 2)},
                            rounds=rounds,
                            compiled=compiled,
                            graph=graph,
                        )
                    )
                    progress.advance(task)
                    torch.compiler.reset()
    if not records:
        errors.print(
            f"pixfuse bench: nothing to time for {', '.join(ops) or 'this selection'}; rooms with benches: "
            f"{', '.join(benches()) or 'none'}",
            style="red",
            markup=False,
        )
        return 2
    console = Console() if Console().is_terminal else Console(width=170)
    _print(console, records, machine, copies, time.perf_counter() - began)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text("".join(json.dumps(record.as_dict()) + "\n" for record in records))
        console.print(f"{len(records)} JSON lines in {json_path}", markup=False)
    if html_path is not None:
        html_path.parent.mkdir(parents=True, exist_ok=True)
        html_path.write_text(report(records, machine, copies))
        console.print(f"Report in {html_path}", markup=False)
    return int(any(record.status != "ok" for record in records))


# --- the table ------------------------------------------------------------------------------------------------


def milliseconds(value: float) -> str:
    """A time in three figures with its unit."""
    return f"{1e3 * value:.3g} µs" if value < 1 else f"{value:.3g} ms"


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(records: Sequence[Record]) -> list[tuple[str, str, str, int, float, float]]:
    """Per op, direction and layout: rows, geometric mean of the speed-ups, and the least."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        if record.speedup:
            groups.setdefault((record.op, record.direction, record.layout), []).append(record.speedup)
    return [(*key, len(values), geometric_mean(values), min(values)) for key, values in groups.items()]


def _print(
    console: Console, records: Sequence[Record], machine: dict[str, Any], copies: dict[int, float], seconds: float
) -> None:
    copied = ", ".join(
        f"{gbps:.1f} GB/s" + (f" with {count} threads" if machine["device"] == "cpu" else "")
        for count, gbps in copies.items()
    )
    console.print(
        f"{machine['name']} ({machine['device']}), torch {machine['torch']}, triton {machine['triton']}, "
        f"pixfuse {machine['pixfuse']} at {machine['commit']}; a copy moves {copied}",
        markup=False,
        highlight=False,
    )
    table = Table()
    for name in ("op", "direction", "case", "dtype", "layout"):
        table.add_column(name, no_wrap=name != "case")
    if len(copies) > 1:
        table.add_column("threads", justify="right")
    for name in ("median", "p20", "p80", "GB/s", "of copy", "best peer", "its median", "faster"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        cells = [record.op, record.direction, record.case, record.dtype, record.layout]
        if len(copies) > 1:
            cells.append(str(record.threads))
        if record.ours is None:
            table.add_row(*cells, f"[bold red]{record.status}[/]")
            continue
        cells += [milliseconds(t) for t in (record.ours.median, record.ours.p20, record.ours.p80)]
        cells += [f"{record.gbps:.3g}", f"{record.percent_of_copy:.0f}%"]
        if record.best_peer is not None and record.speedup is not None:
            colour = "green" if record.speedup >= 1 else "red"
            peer = record.peers[record.best_peer]
            cells += [record.best_peer, milliseconds(peer.median), f"[{colour}]{record.speedup:.2f}x[/]"]
        table.add_row(*cells)
    console.print(table)
    table = Table(title="Geometric means against the fastest peer", title_justify="left")
    for name, side in (("op", "left"), ("direction", "left"), ("layout", "left"), ("rows", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    table.add_column("faster", justify="right")
    table.add_column("least", justify="right")
    for op, direction, layout, count, mean, least in summary(records):
        colour = "green" if least >= 1 else "red"
        table.add_row(op, direction, layout, str(count), f"{mean:.2f}x", f"[{colour}]{least:.2f}x[/]")
    console.print(table)
    bad = [record for record in records if record.status != "ok"]
    for record in bad:
        console.print(
            f"NOT TIMED: {record.op} {record.direction} {record.case} {record.dtype} {record.layout}: {record.message}",
            style="red",
            markup=False,
        )
    left_out = {(name, why) for record in records for name, why in record.left_out.items()}
    for name, why in sorted(left_out):
        console.print(f"peer {name} left out where it raised: {why}", style="yellow", markup=False)
    console.print(f"{len(records) - len(bad)} rows timed, {len(bad)} not, in {seconds:.0f} s.")


# --- the report -----------------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:nth-child(-n+5), td:nth-child(-n+5) { text-align: left; }
thead th { position: sticky; top: 0; background: #fff; border-bottom: 2px solid #888; }
.good { color: #137a3a; } .bad { color: #b3261e; font-weight: 600; } img { max-width: 100%; }
.wide { overflow-x: auto; }
"""


def report(records: Sequence[Record], machine: dict[str, Any], copies: dict[int, float]) -> str:
    """One HTML file with everything in it."""
    e = html.escape
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>pixfuse bench</title>"
        f"<style>{_STYLE}</style></head><body><h1>pixfuse bench</h1>",
        f"<p>{e(str(machine['name']))} ({e(machine['device'])}), torch {e(machine['torch'])}, triton "
        f"{e(machine['triton'])}, pixfuse {e(machine['pixfuse'])} at commit {e(machine['commit'])}. A copy moves "
        + ", ".join(f"{gbps:.1f} GB/s ({count} threads)" for count, gbps in copies.items())
        + ". All rows of a line were timed interleaved in one run; rates count the least traffic of the work.</p>",
        "<h2>Geometric means against the fastest peer</h2>",
        _rows(
            ("op", "direction", "layout", "rows", "faster", "least"),
            [
                [op, direction, layout, str(count), f"{mean:.2f}x", _ratio(least)]
                for op, direction, layout, count, mean, least in summary(records)
            ],
        ),
    ]
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record.op, record.direction, record.threads), []).append(record)
    for (op, direction, count), group in groups.items():
        title = f"{op}, {direction}" + (f", {count} threads" if machine["device"] == "cpu" else "")
        parts.append(f"<h2>{e(title)}</h2>")
        timed = [record for record in group if record.ours]
        if timed:
            parts.append(f"<img alt='{e(title)}' src='data:image/png;base64,{_plot(timed)}'>")
        peers = list(dict.fromkeys(name for record in group for name in record.peers))
        header = ("case", "dtype", "layout", "median", "p20", "p80", "GB/s", "of copy", *peers, "faster")
        lines = []
        for record in group:
            if record.ours is None:
                lines.append([record.case, record.dtype, record.layout, f"<span class=bad>{e(record.message)}</span>"])
                continue
            ours = record.ours
            others = [milliseconds(record.peers[p].median) if p in record.peers else "" for p in peers]
            lines.append(
                [record.case, record.dtype, record.layout]
                + [milliseconds(t) for t in (ours.median, ours.p20, ours.p80)]
                + [f"{record.gbps:.3g}", f"{record.percent_of_copy:.0f}%", *others]
                + ([_ratio(record.speedup)] if record.speedup else [""])
            )
        parts.append(_rows(header, lines))
    parts.append("</body></html>")
    return "\n".join(parts)


def _ratio(value: float) -> str:
    return f"<span class={'good' if value >= 1 else 'bad'}>{value:.2f}x</span>"


def _rows(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _plot(records: Sequence[Record]) -> str:
    """Bars of GB/s, ours and the peers', as a PNG in base64."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = ["ours", *dict.fromkeys(name for record in records for name in record.peers)]
    thick = 0.8 / len(names)
    figure = Figure(figsize=(10, 0.9 + 0.2 * len(records) * (1 + 0.35 * len(names))), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, name in enumerate(names):
        timings = [record.ours if name == "ours" else record.peers.get(name) for record in records]
        rates = [r.bytes / t.median / 1e6 if t else 0.0 for r, t in zip(records, timings, strict=True)]
        places = [k + (i - (len(names) - 1) / 2) * thick for k in range(len(records))]
        axes.barh(places, rates, height=thick, label="pixfuse" if name == "ours" else name, color=f"C{i}")
    axes.axvline(records[0].machine["copy_gbps"], color="black", linestyle=":", label="a large copy")
    axes.set_yticks(range(len(records)), [f"{r.case} {r.dtype} {r.layout}" for r in records], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s of the least traffic (longer is better)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return base64.b64encode(buffer.getvalue()).decode()
