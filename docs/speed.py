"""The chart of the speed page, from the table that it is about."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

ROW = re.compile(r"^\| (\w+) \| ([^|]+) \| (forward|backward) \| float32 \| ([\d.]+)[^|]*\| ([\d.]+)?", re.M)


def make(table: Path, picture: Path) -> None:
    """Draw how many times as fast as the fastest way in PyTorch every float32 row of ``table`` is."""
    rows = [(f"{op} {work.strip()}, {way}", nchw, last) for op, work, way, nchw, last in ROW.findall(table.read_text())]
    if len(rows) < 10:
        raise ValueError(f"{table} has no table of the form that the chart reads")
    with mpl.rc_context({"font.size": 8, "svg.hashsalt": "pixfuse"}):
        figure = Figure((8.5, 0.24 * len(rows) + 0.9), layout="constrained")
        axes = figure.subplots()
        y = range(len(rows))
        axes.barh([i - 0.2 for i in y], [float(nchw) for _, nchw, _ in rows], 0.38, label="NCHW", color="#3c6fb0")
        axes.barh(
            [i + 0.2 for i in y], [float(cl or 0) for *_, cl in rows], 0.38, label="channels_last", color="#e09f3e"
        )
        axes.set_yticks(list(y), [name for name, *_ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xscale("log")
        ticks = [0.5, 1, 2, 5, 10, 20, 50]
        axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
        axes.minorticks_off()
        axes.axvline(1, color="black", linewidth=0.8)
        axes.grid(axis="x", linewidth=0.3)
        axes.set_xlabel("times as fast as the fastest way in PyTorch (float32, one thread)")
        axes.legend(loc="lower right")
        figure.savefig(picture, metadata={"Date": None})
