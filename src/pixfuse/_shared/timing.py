"""What the benches share: the row that a bench module yields, and how a row is checked and timed.

Every ``bench_<room>.py`` has ``rows(device) -> Iterable[BenchRow]``; ``pixfuse bench`` collects and runs them. A row
is timed only when its check passes. Ours and the peers run interleaved, a block of calls each and round after round,
so that what else the machine does hits all of them alike; a round's order alternates.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checks import dtype_name
from .testing import as_channels_last, assert_within

DIRECTIONS = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class BenchRow:
    """One line of a bench: the same work done by pixfuse and by its peers."""

    op: str
    case: str
    """Shape and arguments in a few words, for example ``"2x32x128x128 up2"``."""
    dtype: torch.dtype
    layout: str
    """``"contiguous"`` or ``"channels_last"``."""
    direction: str
    """One of :data:`DIRECTIONS`."""
    ours: Callable[[], Any]
    peers: dict[str, Callable[[], Any]]
    """By name: ``"eager"``, ``"compile"`` and others. One that raises is reported and left out."""
    bytes: int
    """The least traffic of the work: each input read once, each output written once."""
    check: Callable[[], None]
    """Raises when our result is wrong against float64."""

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"BenchRow: direction must be one of {', '.join(DIRECTIONS)}, got {self.direction!r}")

    @property
    def name(self) -> str:
        """The row as one line names it."""
        return f"{self.op} {self.direction} {self.case} {dtype_name(self.dtype)} {self.layout}"


# --- building rows --------------------------------------------------------------------------------------------


def backward_of(call: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> Callable[[], Any]:
    """The backward of ``call(*inputs)`` alone. The forward runs once, at the first call; no gradient is kept."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    saved: list[Tensor] = []

    def run() -> Any:
        if not saved:
            saved.append(call(*leaves))
        return torch.autograd.grad(saved[0], leaves, dy, retain_graph=True)

    return run


def forward_backward_of(call: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> Callable[[], Any]:
    """Forward and backward of ``call(*inputs)`` as a training step does them."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(call(*leaves), leaves, dy)


def rows_of(
    op: str,
    case: str,
    layout: str,
    inputs: Sequence[Tensor],
    ours: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    *,
    directions: Sequence[str] = ("forward", "backward"),
    peers: dict[str, Callable[..., Tensor]] | None = None,
    compiled: bool = True,
    saved: int | None = None,
) -> Iterator[BenchRow]:
    """The rows of one case: forward, backward and both, checked against ``eager`` in float64.

    Args:
        op: name of the op.
        case: see :class:`BenchRow`.
        layout: see :class:`BenchRow`.
        inputs: the floating tensors, the image first; all of them get gradients in the backward rows.
        ours: a function of ``inputs`` (and of nothing else that is a tensor of the case's dtype).
        eager: the stock PyTorch way of the same, also the truth when run in float64.
        directions: which rows to yield.
        peers: further functions of ``inputs`` by name.
        compiled: whether ``torch.compile(eager)`` is a peer too.
        saved: bytes of what backward must read besides ``dy``: by default those of the image, 0 for a linear op.
    """
    x = inputs[0]
    with torch.no_grad():
        y = eager(*inputs)
    dy = torch.rand(y.shape, device=y.device).sub_(0.5).to(y.dtype)
    if layout == "channels_last":
        dy = as_channels_last(dy)
    sizes = {
        "forward": nbytes(*inputs, y),
        "backward": nbytes(dy, *inputs) + (nbytes(x) if saved is None else saved),
    }
    sizes["forward+backward"] = sizes["forward"] + sizes["backward"]
    all_peers = {"eager": eager, **(peers or {})}
    if compiled:
        all_peers["compile"] = _compiled(eager)
    make: dict[str, Callable[[Callable[..., Tensor]], Callable[[], Any]]] = {
        "forward": lambda call: lambda: call(*inputs),
        "backward": lambda call: backward_of(call, inputs, dy),
        "forward+backward": lambda call: forward_backward_of(call, inputs, dy),
    }
    for direction in directions:

        def check(direction: str = direction) -> None:
            exact = [t.double() for t in inputs]
            runs = (ours, inputs, dy), (eager, inputs, dy), (eager, exact, dy.double())
            if direction == "forward":
                results = [(call(*tensors),) for call, tensors, _ in runs]
            else:
                results = [forward_backward_of(*run)() for run in runs]
            for number, (got, stock, truth) in enumerate(zip(*results, strict=True)):
                terms = x.numel() / max(got.numel(), 1)
                spread = math.sqrt(terms) if direction != "forward" and terms > 1.5 else 0.0
                assert_within(got, stock, truth, f"{direction} {number}", spread)

        yield BenchRow(
            op=op,
            case=case,
            dtype=x.dtype,
            layout=layout,
            direction=direction,
            ours=make[direction](ours),
            peers={name: make[direction](peer) for name, peer in all_peers.items()},
            bytes=sizes[direction],
            check=check,
        )


def _compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.compile(call)``, made at the first call."""
    made: list[Callable[..., Tensor]] = []

    def run(*inputs: Tensor) -> Tensor:
        if not made:
            made.append(torch.compile(call, dynamic=False))
        return made[0](*inputs)

    return run


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of all the tensors together."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# --- timing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median and the 20th and 80th percentile over the rounds."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The timing that ``samples`` (milliseconds) give."""
        ordered = sorted(samples)
        median, p20, p80 = (ordered[math.floor(q * len(ordered))] for q in (0.5, 0.2, 0.8))
        return cls(median, p20, p80)


def measure(
    calls: dict[str, Callable[[], Any]],
    device: torch.device | str = "cpu",
    rounds: int = 30,
    block_ms: float = 2.0,
) -> dict[str, Timing]:
    """Time ``calls`` interleaved.

    Args:
        calls: what to time, by name. Each is warmed up first (which compiles what compiles).
        device: where they run; on a GPU the time between two events is taken, on a CPU the clock.
        rounds: how many samples each gets.
        block_ms: a sample is the mean of as many calls as fill this time, at least one.
    """
    block = _cuda_block if torch.device(device).type == "cuda" else _clock_block
    counts = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        counts[name] = max(1, round(block_ms / max(min(block(call, 1) for _ in range(3)), 1e-4)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            samples[name].append(block(calls[name], counts[name]))
        order.reverse()
    return {name: Timing.of(s) for name, s in samples.items()}


def _clock_block(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) * 1e3 / count


def _cuda_block(call: Callable[[], Any], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` as the replay of a CUDA graph, which leaves out the launches' cost on the CPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_bandwidth(device: torch.device | str = "cpu") -> float:
    """GB/s (read plus written) that a large copy moves on this machine right now."""
    size = 2**30 if torch.device(device).type == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    timing = measure({"copy": lambda: target.copy_(source)}, device, rounds=15, block_ms=1)["copy"]
    return 2 * size / timing.median / 1e6


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """``count`` threads for PyTorch's CPU ops, and what it was before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def steady_allocator() -> None:
    """Keep large CPU blocks in the heap, so that page faults of fresh ones drown neither ours nor the peers."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: never mmap
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never give back


# --- a row's record -------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What one row gave; one JSON line."""

    op: str
    case: str
    dtype: str
    layout: str
    direction: str
    status: str
    """``"ok"``, ``"wrong"`` (the check failed) or ``"failed"`` (the op raised); only the first is timed."""
    message: str = ""
    threads: int = 1
    bytes: int = 0
    ours: Timing | None = None
    peers: dict[str, Timing] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Peers that raised, with why."""
    gbps: float | None = None
    percent_of_copy: float | None = None
    best_peer: str | None = None
    speedup: float | None = None
    """Median of the best peer over our median: above 1 we are faster."""
    machine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The record with plain values, for JSON."""
        return asdict(self)


def run_row(
    row: BenchRow,
    device: torch.device | str,
    copy_gbps: float,
    *,
    machine: dict[str, Any] | None = None,
    rounds: int = 30,
    compiled: bool = True,
    graph: bool = False,
) -> Record:
    """Check a row, and time it if it is right.

    Args:
        row: the row.
        device: where it runs.
        copy_gbps: what :func:`copy_bandwidth` measured in this run.
        machine: what :func:`environment` says.
        rounds: see :func:`measure`.
        compiled: whether to run the peers whose name begins with ``compile``.
        graph: on a GPU, time the replay of CUDA graphs.
    """
    record = Record(row.op, row.case, dtype_name(row.dtype), row.layout, row.direction, "ok", bytes=row.bytes)
    record.threads = torch.get_num_threads()
    record.machine = machine or {}
    try:
        row.check()
    except Exception as error:
        record.status = "wrong" if isinstance(error, AssertionError) else "failed"
        record.message = f"{type(error).__name__}: {error}"
        return record
    wrap = graphed if graph and torch.device(device).type == "cuda" else lambda call: call
    calls = {"ours": wrap(row.ours)}
    for name, peer in row.peers.items():
        if name.startswith("compile") and not compiled:
            continue
        try:
            peer()
            calls[name] = wrap(peer)
        except Exception as error:
            record.left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    timings = measure(calls, device, rounds)
    record.ours = timings.pop("ours")
    record.peers = timings
    record.gbps = row.bytes / record.ours.median / 1e6
    record.percent_of_copy = 100 * record.gbps / copy_gbps
    if timings:
        record.best_peer = min(timings, key=lambda name: timings[name].median)
        record.speedup = timings[record.best_peer].median / record.ours.median
    return record


def environment(device: torch.device | str) -> dict[str, Any]:
    """Device, versions and commit, as every record carries them."""
    from importlib.metadata import PackageNotFoundError, version

    import pixfuse

    found = {}
    for package in ("torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["pixfuse"] = pixfuse.__version__
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": str(device),
        "name": name,
        **found,
        "commit": _commit(),
        "cores": os.cpu_count(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "CPU"


def _commit() -> str:
    """The commit of the source tree that this package is imported from, ``+`` behind it when there are changes."""
    root = Path(__file__).parents[1]
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
        if commit.returncode:
            return "not a checkout"
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
        return commit.stdout.strip() + ("+" if status.stdout.strip() else "")
    except OSError:
        return "not a checkout"
