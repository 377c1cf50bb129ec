"""The four training steps of StyleGAN2, configuration E at 1024x1024: ``python benchmarks/stylegan2_config_e.py``.

The networks and losses are those of ``examples/stylegan2``; what changes is the ops below them: plain PyTorch
compositions, ``torch.compile`` of those, pixfuse, ``torch.compile`` of pixfuse. One step is forward, backward and Adam
on a batch of 4 (2 for path length); an iteration is G + D + R1 / 16 + PL / 4. Prints a table in Markdown; a step is
timed as it is and replayed as a CUDA graph, which shows what of it is the GPU's. The plain second-order steps take
seconds each: they are timed once.

The environment variable DEADLINE is a number of seconds after which nothing new is begun.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "stylegan2"))

import losses
import networks
import torch
import torch.nn.functional as F
from networks import Discriminator, Generator, Widths

import pixfuse

OPS = ("plain", "plain compiled", "pixfuse", "pixfuse compiled")
STEPS = ("G", "D", "R1", "PL")
TARGETS = {"fp32": (80, 90, 300, 250, 10.0), "mixed": (45, 55, 220, 200, 2.9)}  # ms, GiB
BEGAN = time.monotonic()


def left() -> float:
    """Seconds until the deadline."""
    return float(os.environ.get("DEADLINE", "inf")) - (time.monotonic() - BEGAN)


# --- the ops in plain PyTorch ---------------------------------------------------------------------------------


def plain_bias_act(x, b=None, act="linear", gain=None, clamp=None):
    if b is not None:
        x = x + b.to(x.dtype).reshape(1, -1, *([1] * (x.dim() - 2)))
    if act == "lrelu":
        x = F.leaky_relu(x, 0.2)
        gain = math.sqrt(2) if gain is None else gain
    if gain not in (None, 1):
        x = x * gain
    return x if clamp is None else x.clamp(-clamp, clamp)


def plain_upfirdn2d(x, f, up=1, down=1, pads=(0, 0), gain=1.0):
    """Zeros by reshaping, padding, and a depthwise convolution."""
    n, c, h, w = x.shape
    if up > 1:
        x = F.pad(x.reshape(n, c, h, 1, w, 1), (0, up - 1, 0, 0, 0, up - 1)).reshape(n, c, h * up, w * up)
    x = F.pad(x, (*pads, *pads))
    weight = (f * gain).flip(0, 1).to(x.dtype).expand(c, 1, -1, -1)
    return F.conv2d(x, weight, stride=down, groups=c)


def plain_conv2d_resample(x, w, f=None, down=1, padding=0):
    if down == 1:
        return F.conv2d(x, w, padding=padding)
    pads = (padding + 1, padding + 1)  # 4 taps
    if w.shape[-1] == 1:
        return F.conv2d(plain_upfirdn2d(x, f, 1, down, pads), w)
    return F.conv2d(plain_upfirdn2d(x, f, 1, 1, pads), w, stride=down)


def plain_modulated_conv2d(
    x, weight, styles, noise=None, up=1, padding=0, resample_filter=None, demodulate=True, fused_modconv=False
):
    w, s = weight, styles
    if demodulate and x.dtype == torch.float16:  # no overflow
        w, s = (
            w / w.abs().amax((1, 2, 3), keepdim=True) / math.sqrt(w[0].numel()),
            s / s.abs().amax(1, keepdim=True),
        )
    y = x * s.to(x.dtype)[:, :, None, None]
    kernel = w.to(x.dtype)
    if up == 1:
        y = F.conv2d(y, kernel, padding=padding)
    else:
        y = F.conv_transpose2d(y, kernel.flip(2, 3).transpose(0, 1), stride=up)
        y = plain_upfirdn2d(y, resample_filter, 1, 1, (1, 1), up**2)
    if demodulate:
        d = (s.square() @ w.square().sum((2, 3)).mT + 1e-8).rsqrt()
        y = y * d.to(y.dtype)[:, :, None, None]
    return y if noise is None else y + noise.to(y.dtype)


PLAIN = SimpleNamespace(
    setup_filter=pixfuse.setup_filter,
    bias_act=plain_bias_act,
    upsample2d=lambda x, f: plain_upfirdn2d(x, f, 2, 1, (2, 1), 4),
    conv2d_resample=plain_conv2d_resample,
    modulated_conv2d=plain_modulated_conv2d,
)


# --- the steps ------------------------------------------------------------------------------------------------


class Training:
    """Networks, optimizers, one batch, and the four steps on them."""

    def __init__(self, device: str, widths: Widths, size: int, batch: int, compiled: bool) -> None:
        torch.manual_seed(0)
        self.g, self.d = Generator(widths, size).to(device), Discriminator(widths).to(device)
        for _, p in self.g.named_parameters():
            if p.dim() == 0:  # noise that is there
                torch.nn.init.constant_(p, 0.1)
        self.adam = {
            m: torch.optim.Adam(m.parameters(), lr=1e-5, betas=(0.0, 0.99), fused=True, capturable=device == "cuda")
            for m in (self.g, self.d)
        }
        self.real = torch.randn(batch, 3, widths.resolution, widths.resolution, device=device)
        self.z = torch.randn(batch, size, device=device)
        self.mean = torch.zeros((), device=device)
        self.call_g, self.call_d = self.g, self.d
        if compiled:
            self.call_g, self.call_d = torch.compile(self.g), torch.compile(self.d)

    def forget(self) -> None:
        """Drop all gradients."""
        for adam in self.adam.values():
            adam.zero_grad()

    def step(self, name: str) -> torch.Tensor:
        """One step; returns its loss."""
        for m in (self.g, self.d):
            m.requires_grad_(m is (self.g if name in ("G", "PL") else self.d))
        # torch.compile cannot differentiate twice, so that R1 and PL take the networks as they are.
        g, d = (self.call_g, self.call_d) if name in ("G", "D") else (self.g, self.d)
        half = max(1, len(self.z) // 2)
        parts = {
            "G": lambda: [losses.generator_loss(g, d, self.z, mixing=0)],
            "D": lambda: losses.discriminator_losses(g, d, self.z, self.real, mixing=0),
            "R1": lambda: [losses.r1_penalty(d, self.real, 10.0)],
            "PL": lambda: [losses.path_length_penalty(g, self.z[:half], self.mean, mixing=0)],
        }[name]()
        total = torch.zeros((), device=self.z.device)
        for loss in parts:
            loss.backward()
            total += loss.detach()
            del loss
        self.adam[self.g if name in ("G", "PL") else self.d].step()
        self.forget()
        return total


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    ops: str, training: Training, device: str, autotune: bool, log: Callable[[str], None]
) -> tuple[list[str], ...]:
    """Milliseconds of each step in words, and the peak memory in GiB: eager, and replayed as a CUDA graph."""
    eager, graph, peaks = {}, {}, [0, 0]
    for name in STEPS:
        slow = ops.startswith("plain") and name in ("R1", "PL") and device == "cuda"  # seconds each
        eager[name] = graph[name] = "not run"
        if left() < (40 if slow else 10):
            continue
        torch.backends.cudnn.benchmark = autotune and not slow
        call, cells = functools.partial(training.step, name), eager
        try:
            eager[name], peaks[0] = timed(call, device, 1 if slow else 7, 0 if slow else 3, peaks[0])
            if device == "cuda" and not slow:
                cells = graph
                torch.cuda.reset_peak_memory_stats()
                replay = captured(call)
                peaks[1] = max(peaks[1], torch.cuda.max_memory_allocated())
                graph[name], _ = timed(replay, device, 7, 1, 0)
                del replay
        except RuntimeError as error:
            cells[name] = type(error).__name__
            log(f"  {ops} {name}: {str(error).splitlines()[0]}")
            training.forget()
        log(f"  {ops} {name}: {eager[name]} ms, graph {graph[name]} ms, {left():.0f} s left")
    found = []
    for cells, peak in zip((eager, graph), peaks, strict=True):
        found.append([*cells.values(), iteration(cells), f"{peak / 2**30:.1f}"])
    return tuple(found)


def timed(call: Callable[[], object], device: str, rounds: int, warm: int, peak: int) -> tuple[str, int]:
    """Median milliseconds, and the larger of ``peak`` and the peak memory in bytes."""
    for _ in range(warm):
        call()
    sync(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        sync(device)
        found.append(1e3 * (time.perf_counter() - start))
    if device == "cuda":
        peak = max(peak, torch.cuda.max_memory_allocated())
    return f"{statistics.median(found):.1f}", peak


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """``call`` as a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()
    torch.cuda.empty_cache()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def profile(training: Training, device: str, title: str) -> None:
    """Print where the time of each step goes: kernels, and ops with their shapes."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    for name in STEPS:
        training.step(name)
        sync(device)
        with torch.profiler.profile(activities=activities, record_shapes=True) as p:
            training.step(name)
            sync(device)
        print(f"\n## {title}, {name}")
        events = [e for e in p.key_averages() if e.self_device_time_total > 0 and str(e.device_type).endswith("CUDA")]
        events = [e for e in events if not e.key.startswith("Optimizer.")]  # a range, not a kernel
        total = sum(e.self_device_time_total for e in events)
        print(f"{total / 1e3:.1f} ms in kernels")
        for e in sorted(events, key=lambda e: -e.self_device_time_total)[:14]:
            print(f"{e.self_device_time_total / 1e3:8.2f} ms {e.count:5d}x {e.key[:150]}")
        ops = [e for e in p.key_averages(group_by_input_shape=True) if not str(e.device_type).endswith("CUDA")]
        key = "self_device_time_total" if order.startswith("self_cuda") else "self_cpu_time_total"
        for e in sorted(ops, key=lambda e: -getattr(e, key))[:24]:
            shapes = str([s for s in e.input_shapes if s])[:120]
            print(f"{getattr(e, key) / 1e3:8.2f} ms {e.count:5d}x {e.key} {shapes}")


def iteration(cells: dict[str, str]) -> str:
    """Milliseconds of an iteration."""
    try:
        g, d, r1, pl = (float(cells[s]) for s in STEPS)
    except ValueError:
        return "-"
    return f"{g + d + r1 / 16 + pl / 4:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--base", type=int, default=16384, help="channels times resolution")
    parser.add_argument("--most", type=int, default=512, help="most channels")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--precision", nargs="+", choices=tuple(TARGETS), default=tuple(TARGETS))
    parser.add_argument("--layout", nargs="+", default=("contiguous", "channels_last"))
    parser.add_argument("--autotune", action="store_true", help="cudnn.benchmark, which takes a minute each")
    parser.add_argument("--profile", type=Path, help="append where the time of pixfuse's steps goes to this file")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def log(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    torch.backends.cudnn.benchmark_limit = 5
    rows = []
    for ops in args.ops:
        for precision in args.precision:
            for layout in args.layout:
                if left() < 20:
                    continue
                log(f"{ops}, {precision}, {layout}: {left():.0f} s left")
                networks.pixfuse = PLAIN if ops.startswith("plain") else pixfuse
                half = 4 if precision == "mixed" else 0
                widths = Widths(args.resolution, args.base, args.most, half, layout == "channels_last")
                training = Training(args.device, widths, args.most, args.batch, ops.endswith("compiled"))
                found = measure(ops, training, args.device, args.autotune, log)
                for title, cells in zip((ops, f"{ops}, CUDA graph"), found, strict=True):
                    if any(c[0].isdigit() for c in cells[:4]):
                        rows.append([title, precision, layout, *cells])
                        print("| " + " | ".join(rows[-1]) + " |", flush=True)
                if args.profile and ops == "pixfuse" and left() > 15:
                    with args.profile.open("a") as file, redirect_stdout(file):
                        profile(training, args.device, f"{precision}, {layout}")
                del training
                torch._dynamo.reset()
                gc.collect()
                if args.device == "cuda":
                    torch.cuda.empty_cache()

    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout
    print(f"\n{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, commit {commit.strip() or 'unknown'}\n")
    print("| ops | precision | layout | G | D | R1 | PL | iteration | peak GiB |\n" + "|---" * 9 + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    for precision, target in TARGETS.items():
        print(f"| target | {precision} | | {' | '.join(map(str, target[:4]))} | | {target[4]} |")


if __name__ == "__main__":
    main()
