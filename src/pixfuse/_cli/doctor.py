"""``pixfuse doctor``: what this machine has, what each op takes on it, and whether the results are right."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import pixfuse

from .._shared.checks import FLOATS, dtype_name
from .._shared.layout import is_channels_last, to_layout
from .._shared.library import OPS, by_definition
from .._shared.testing import assert_within
from .._shared.timing import environment

LAYOUTS = ("contiguous", "channels_last")
_SHOWN = 20
_FIR = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8


@dataclass(frozen=True)
class Case:
    """A call of a public function: the shapes of its floating arguments (x first) and the call on them."""

    function: str
    label: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Tensor]
    step: float = 0.0
    """Round the inputs to multiples of this: values on both sides of a clamp, none within a rounding of it."""


def _cases() -> list[Case]:
    image, bias = (2, 24, 17, 22), (24,)
    p: Any = pixfuse
    cases = [
        Case("bias_act", act, (image, bias), lambda x, b, act=act: p.bias_act(x, b, act=act))
        for act in ("linear", "relu", "lrelu", "tanh", "sigmoid", "elu", "selu", "softplus", "swish")
    ]
    cases += [
        Case(
            "bias_act",
            f"{act} clamp",
            (image, bias),
            lambda x, b, act=act: p.bias_act(x, b, act=act, gain=1, clamp=1.6),
            0.25,
        )
        for act in ("linear", "relu", "lrelu")
    ]
    for label, up, down in (("up 2", 2, 1), ("down 2", 1, 2), ("filter", 1, 1)):
        cases.append(
            Case(
                "upfirdn2d",
                label,
                (image,),
                lambda x, up=up, down=down: p.upfirdn2d(
                    x, _FIR.to(x.device), up=up, down=down, padding=[2, 1, 2, 1], gain=up * up
                ),
            )
        )
    for up, down in ((2, 2), (4, 2), (1, 1)):
        taps = {n: torch.hann_window(6 * n + 2, periodic=False)[1:-1] for n in (up, down)}
        taps = {n: t / t.sum() for n, t in taps.items()}
        cases.append(
            Case(
                "filtered_lrelu",
                f"up {up} down {down}",
                (image, bias),
                lambda x, b, up=up, down=down, taps=taps: p.filtered_lrelu(
                    x, taps[up].to(x.device), taps[down].to(x.device), b, up=up, down=down, padding=8, clamp=0.8
                ),
            )
        )
    cases += [
        Case(
            "group_norm",
            f"act {act}",
            (image, bias, bias),
            lambda x, w, b, act=act: p.group_norm(x, 4, w, b, act=act),
        )
        for act in (None, "silu")
    ]
    cases.append(Case("upsample_nearest", "x2", (image,), lambda x: p.upsample_nearest(x, 2)))
    for mode, aligned, antialias in (
        ("nearest", None, False),
        ("nearest-exact", None, False),
        ("bilinear", False, False),
        ("bilinear", True, False),
        ("bilinear", False, True),
        ("bicubic", False, False),
        ("bicubic", False, True),
        ("lanczos", False, True),
        ("area", None, False),
    ):
        cases.append(
            Case(
                "interpolate",
                f"{mode}{' aligned' if aligned else ''}{' antialias' if antialias else ''}",
                (image,),
                lambda x, mode=mode, aligned=aligned, antialias=antialias: p.interpolate(
                    x, size=(29, 13), mode=mode, align_corners=aligned, antialias=antialias
                ),
            )
        )
    return [case for case in cases if hasattr(p, case.function)]


@dataclass
class Row:
    """All cases of one function in one dtype on one device."""

    function: str
    device: str
    dtype: str
    backend: str
    reason: str
    checks: dict[str, int] = field(default_factory=dict)
    """Cases checked, by layout."""
    wrong: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether all its cases are."""
        return not self.wrong


def _results(case: Case, inputs: list[Tensor], layout: str) -> list[Tensor]:
    """The result and the gradients of a case."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = case.call(*leaves)
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
    dy = to_layout(dy.to(y.device, y.dtype), layout == "channels_last")
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check(case: Case, dtype: torch.dtype, layout: str, device: str) -> None:
    """Raise unless value, gradients, layout and repeatability of a case are right."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in case.shapes]
    if case.step:
        inputs = [(t / case.step).round() * case.step for t in inputs]
    inputs = [t.to(dtype) for t in inputs]
    inputs[0] = to_layout(inputs[0], layout == "channels_last")
    here = [t.to(device) for t in inputs]
    got = _results(case, here, layout)
    again = _results(case, here, layout)
    with by_definition():
        truth = _results(case, [t.double() for t in inputs], layout)
        rounded = _results(case, inputs, layout)
    names = ("result", "gradient of x", "gradient of argument 2", "gradient of argument 3")
    for name, g, a, r, t in zip(names, got, again, rounded, truth, strict=False):
        terms = got[1].numel() / g.numel()
        assert_within(g.cpu(), r, t, name, terms**0.5 if terms > 1.5 and name != "result" else 0.0)
        if not torch.equal(g, a):
            raise AssertionError(f"{name}: differs from run to run")
    for name, g in zip(names[:2], got, strict=False):
        if is_channels_last(g) != (layout == "channels_last"):
            raise AssertionError(f"{name}: its layout is not that of x")


def _compiled(index: int, dtype: torch.dtype, layout: str, device: str) -> None:
    with contextlib.suppress(Exception):  # the check proper will say it
        check(_cases()[index], dtype, layout, device)


def compile_kernels(device: str, progress: Callable[[str], None]) -> None:
    """Fill Triton's cache on disk on all cores: some 200 kernels, of a second and more each where none is there yet."""
    dtypes = [
        dtype for dtype in FLOATS if pixfuse.backend("bias_act", torch.zeros(1, dtype=dtype, device=device)) == "triton"
    ]
    jobs = [(i, dtype, layout) for i in range(len(_cases())) for dtype in dtypes for layout in LAYOUTS]
    workers = min(8, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for i, done in enumerate([pool.submit(_compiled, *job, device) for job in jobs]):
            progress(f"compiling kernels for {device}: {i} of {len(jobs)}")
            done.result()


def devices_here() -> list[str]:
    """The CPU and every GPU that PyTorch sees."""
    found = ["cpu"]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found += [f"{kind}:{i}" for i in range(module.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def examine(devices: list[str], progress: Callable[[str, int], None]) -> list[Row]:
    """Check every case. ``progress`` is called with words for what comes next and how many checks begin with it."""
    cases = _cases()
    rows, compiled = [], set()
    for device in devices:
        name = environment(device)["name"]
        if device.split(":")[0] in ("cuda", "xpu") and name not in compiled:  # cards of one name share their kernels
            compile_kernels(device, lambda words: progress(words, 0))
            compiled.add(name)
        for function in dict.fromkeys(case.function for case in cases):
            for dtype in FLOATS:
                try:
                    sample = torch.zeros(1, dtype=dtype, device=device)
                except (RuntimeError, TypeError):  # for example float64 on mps
                    continue
                taken = pixfuse.backend(function, sample)
                row = Row(function, device, dtype_name(dtype), str(taken), taken.reason)
                rows.append(row)
                for layout in LAYOUTS:
                    for case in cases:
                        if case.function != function:
                            continue
                        progress(f"{function} {dtype_name(dtype)} {layout} on {device}", 1)
                        row.checks[layout] = row.checks.get(layout, 0) + 1
                        try:
                            check(case, dtype, layout, device)
                        except Exception as error:  # whatever an op does wrong is the finding
                            row.wrong.append(f"{case.label}, {layout}: {type(error).__name__}: {error}")
    return rows


def backends(devices: list[str]) -> list[dict[str, Any]]:
    """Which implementation the registered ops take, and why: one entry for all ops and dtypes that agree."""
    found = []
    for device in devices:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for name in OPS:
            dtypes: dict[tuple[str, str], list[str]] = {}
            for dtype in FLOATS:
                try:
                    taken = pixfuse.backend(name, torch.zeros(1, dtype=dtype, device=device))
                except (RuntimeError, TypeError):
                    continue
                dtypes.setdefault((str(taken), taken.reason), []).append(dtype_name(dtype))
            for (backend, reason), names in dtypes.items():
                words = "all" if len(dtypes) == 1 else ", ".join(names)
                # An op's own name in the reason would keep equal ops apart.
                groups.setdefault((words, backend, reason.replace(name, "the op")), []).append(name)
        for (words, backend, reason), names in groups.items():
            found.append({"device": device, "ops": names, "dtypes": words, "backend": backend, "reason": reason})
    return found


def facts(devices: list[str]) -> dict[str, Any]:
    """Versions and devices."""
    machine = environment("cpu")
    triton = machine["triton"] if importlib.util.find_spec("triton") else "not installed (only needed for GPUs)"
    return {
        "pixfuse": pixfuse.__version__,
        "commit": machine["commit"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "devices": {d: environment(d)["name"] for d in devices},
    }


def run(*, as_json: bool, devices: list[str] | None) -> int:
    """Run the command. Returns its exit status."""
    console = Console()
    here = devices_here()
    wanted = devices or here
    for device in wanted:
        if device not in here and f"{device}:0" not in here:
            Console(stderr=True).print(
                f"pixfuse doctor: there is no device {device!r} here, only {', '.join(here)}", style="red", markup=False
            )
            return 2
    found = facts(wanted)
    total = sum(len(_cases()) * len(FLOATS) * len(LAYOUTS) for _ in wanted)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("checking", total=total)

        def step(words: str, checks: int) -> None:
            progress.update(task, advance=checks, description=words)

        rows = examine(wanted, step)
    wrong = sum(not row.right for row in rows)
    if as_json:
        report = {
            **found,
            "backends": backends(wanted),
            "checks": [{**vars(row), "right": row.right} for row in rows],
            "right": not wrong,
        }
        print(json.dumps(report, indent=2))
        return int(wrong > 0)
    _print(console, found, rows, backends(wanted))
    return int(wrong > 0)


def _print(console: Console, found: dict[str, Any], rows: list[Row], taken: list[dict[str, str]]) -> None:
    heading = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key in ("pixfuse", "python", "torch", "triton"):
        heading.add_row(key, str(found[key]))
    for device, name in found["devices"].items():
        extra = f", {found['threads']} threads, {found['vectors']}" if device == "cpu" else ""
        heading.add_row(device, f"{name}{extra}")
    console.print(heading)

    table = Table(title="What each op takes here", title_justify="left", show_lines=True)
    for name in ("device", "backend", "dtypes", "ops", "why"):
        table.add_column(name, overflow="fold")
    for entry in taken:
        colour = "yellow" if entry["backend"] == "reference" else "green"
        backend = f"[{colour}]{entry['backend']}[/]"
        table.add_row(entry["device"], backend, entry["dtypes"], ", ".join(entry["ops"]), escape(entry["reason"]))
    console.print()
    console.print(table)

    table = Table(title="Self-check against the float64 definition", title_justify="left")
    for name in ("function", "device", "dtype", "backend", *LAYOUTS):
        table.add_column(name, no_wrap=name == "function")
    for row in rows:
        cells = []
        for layout in LAYOUTS:
            bad = sum(f", {layout}: " in words for words in row.wrong)
            number = row.checks.get(layout, 0)
            cells.append(f"[red]{bad} of {number} wrong[/]" if bad else f"[green]{number} right[/]")
        table.add_row(row.function, row.device, row.dtype, row.backend, *cells)
    console.print()
    console.print(table)
    console.print("A check is: result and gradients near the definition, in x's layout, equal from run to run.")
    wrong = [(row, words) for row in rows for words in row.wrong]
    for row, words in wrong[:_SHOWN]:
        console.print(
            f"WRONG: {row.function} {row.dtype} on {row.device} ({row.backend}): {words}", style="red", markup=False
        )
    if len(wrong) > _SHOWN:
        console.print(f"... and {len(wrong) - _SHOWN} more; --json lists all of them.", style="red")
    checked = sum(sum(row.checks.values()) for row in rows)
    if wrong:
        console.print(f"{len(wrong)} of {checked} checks are wrong.", style="bold red")
    else:
        console.print(f"All {checked} checks are right.", style="bold green")
    if any(entry["backend"] == "reference" and entry["device"] == "cpu" for entry in taken):
        console.print(
            "Some ops run as plain PyTorch here (backend 'reference'): right, but slow; 'why' says the cause."
        )
