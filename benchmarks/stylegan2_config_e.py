"""The four training steps of StyleGAN2, configuration E at 1024x1024: ``python benchmarks/stylegan2_config_e.py``.

The networks and losses are those of ``examples/stylegan2``; what changes is the ops below them: plain PyTorch
compositions, ``torch.compile`` of those, pixfuse, ``torch.compile`` of pixfuse. One step is forward, backward and Adam
on a batch of 4 (2 for path length); an iteration is G + D + R1 / 16 + PL / 4. Prints a table in Markdown, and with
``--profile FILE`` writes there where the time of each step of pixfuse goes.

The environment variable DEADLINE is a number of seconds after which nothing new is begun.
"""

from __future__ import annotations

import argparse
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
        self.adam = {m: torch.optim.Adam(m.parameters(), lr=1e-5, betas=(0.0, 0.99)) for m in (self.g, self.d)}
        self.real = torch.randn(batch, 3, widths.resolution, widths.resolution, device=device)
        self.z = torch.randn(batch, size, device=device)
        self.mean = torch.zeros((), device=device)
        self.call_g, self.call_d = self.g, self.d
        if compiled:
            self.call_g, self.call_d = torch.compile(self.g), torch.compile(self.d)

    def step(self, name: str) -> torch.Tensor:
        """One step; returns its loss."""
        for m in (self.g, self.d):
            m.requires_grad_(m is (self.g if name in ("G", "PL") else self.d))
        g, d, half = self.call_g, self.call_d, max(1, len(self.z) // 2)
        loss = {
            "G": lambda: losses.generator_loss(g, d, self.z, mixing=0),
            "D": lambda: losses.discriminator_loss(g, d, self.z, self.real, mixing=0),
            "R1": lambda: losses.r1_penalty(d, self.real, 10.0),
            "PL": lambda: losses.path_length_penalty(g, self.z[:half], self.mean, mixing=0),
        }[name]()
        loss.backward()
        adam = self.adam[self.g if name in ("G", "PL") else self.d]
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.detach()


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], device: str, rounds: int, warm: int) -> float:
    """Median milliseconds."""
    for _ in range(warm):
        call()
    found = []
    for _ in range(rounds):
        sync(device)
        start = time.perf_counter()
        call()
        sync(device)
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def measure(ops: str, training: Training, device: str, log: Callable[[str], None]) -> tuple[dict[str, str], float]:
    """Milliseconds of each step in words, and the peak memory in GiB."""
    cells, peak = {}, 0
    for name in STEPS:
        if left() < (60 if ops.startswith("plain") and name in ("R1", "PL") else 15):
            cells[name] = "not run"
            continue
        once = ops == "plain" and name in ("R1", "PL") and device == "cuda"  # seconds each
        torch.backends.cudnn.benchmark = not once
        try:
            if not once:
                for _ in range(3):
                    training.step(name)
            sync(device)
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            ms = timed(lambda name=name: training.step(name), device, 1 if once else 9, 0)
            cells[name] = f"{ms:.1f}"
            if device == "cuda":
                peak = max(peak, torch.cuda.max_memory_allocated())
        except RuntimeError as error:
            cells[name] = "refused" if "double backward" in str(error) else f"{type(error).__name__}"
            log(f"  {ops} {name}: {str(error).splitlines()[0]}")
            training.adam[training.g].zero_grad()
            training.adam[training.d].zero_grad()
        log(f"  {ops} {name}: {cells[name]} ms, {left():.0f} s left")
    return cells, peak / 2**30


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
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def log(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

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
                cells, peak = measure(ops, training, args.device, log)
                rows.append([ops, precision, layout, *cells.values(), iteration(cells), f"{peak:.1f}"])
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
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout
    print(f"\n{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, commit {commit.strip() or 'unknown'}\n")
    print("| ops | precision | layout | G | D | R1 | PL | iteration | peak GiB |\n" + "|---" * 9 + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    for precision, target in TARGETS.items():
        print(f"| target | {precision} | | {' | '.join(map(str, target[:4]))} | | {target[4]} |")


if __name__ == "__main__":
    main()
