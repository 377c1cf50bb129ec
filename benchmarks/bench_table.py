"""The tables of docs/measurements/cpu.md and h200-bench.md, from ``pixfuse bench --json FILE``, the only argument."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

LAYOUTS = ("contiguous", "channels_last")
TINY = "1x8x8x8 "


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def work(row: dict[str, Any]) -> str:
    """The case without its shape (and filtered_lrelu's without its numbers of taps)."""
    words = row["case"].split(" ")[1:]
    return " ".join(w for w in words if not w[0].isdigit() or "x" not in w)


def cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    ratios, shares = [r["speedup"] for r in rows], [r["percent_of_copy"] for r in rows]
    least = f" ({min(ratios):.2f})" if len(rows) > 1 else ""
    return f"{mean(ratios):.2f}{least}, {mean(shares):.0f}%"


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    rows = [r for r in rows if r["direction"] != "forward+backward" and r["speedup"]]
    tiny, large = ([r for r in rows if r["case"].startswith(TINY) == small] for small in (True, False))
    tiny = [r for r in tiny if r["dtype"] == "float32" and r["layout"] == "contiguous"]
    print("| op | work | direction | dtype | NCHW | channels_last |\n|---|---|---|---|---|---|")
    for key in dict.fromkeys((r["op"], work(r), r["direction"], r["dtype"]) for r in large):
        same = [r for r in large if (r["op"], work(r), r["direction"], r["dtype"]) == key]
        cells = [cell([r for r in same if r["layout"] == layout]) for layout in LAYOUTS]
        print(f"| {' | '.join([*key, *cells])} |")
    print("\n## Calls on [1,8,8,8], µs\n")
    print("| op | work | direction | dtype | layout | pixfuse | best other |\n|---|---|---|---|---|---|---|")
    for r in tiny:
        other = f"{r['peers'][r['best_peer']]['median'] * 1e3:.1f} ({r['best_peer']})"
        ours = f"{r['ours']['median'] * 1e3:.1f}"
        print(f"| {' | '.join([r['op'], work(r), r['direction'], r['dtype'], r['layout'], ours, other])} |")
    below = sorted((r for r in large if r["speedup"] < 1), key=lambda r: r["speedup"])
    print(f"\n## Rows below 1.0: {len(below)} of {len(large)}\n")
    print("| op | case | direction | dtype | layout | ratio |\n|---|---|---|---|---|---|")
    for r in below:
        print(f"| {' | '.join([r['op'], r['case'], r['direction'], r['dtype'], r['layout']])} | {r['speedup']:.2f} |")


if __name__ == "__main__":
    main()
