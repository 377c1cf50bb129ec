"""The rows of the H200 table: ``python benchmarks/h200_table.py [--compile] [--only WORD ...] [--seconds 120]``.

Times every row's kernel beside PyTorch's own way (and ``torch.compile`` of it) in one run and prints a Markdown table
with the share of a copy and the target. Rows of less than 256 MiB are the replay of a CUDA graph. Kernels are
compiled first, in worker processes. The tests (``make gpu``) come before this.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.nn.functional as F

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}


@dataclass
class Row:
    work: str
    channels_last: bool
    ours: Callable[[], Any]
    bytes: int  # the least traffic
    target: float  # ms; 0 for none
    stock: Callable[..., Any] | None = None  # of ``inputs``; its backward if ``backward``
    inputs: tuple[torch.Tensor, ...] = ()
    backward: bool = False


def gpu(room: str) -> Any:
    return importlib.import_module(f"pixfuse.{room}.gpu")


def image(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool, device: str) -> torch.Tensor:
    x = torch.empty(shape, dtype=dtype, device=device)
    x = x if device == "meta" else x.normal_()
    return x.to(memory_format=torch.channels_last) if channels_last else x


def rows(device: str) -> Iterator[Row]:
    for kind, side, up, down, pads in (("up 2", 512, 2, 1, 2), ("down 2", 1024, 1, 2, 1), ("blur", 1024, 1, 1, 2)):
        rates = {"up 2": (3.4, 3.6, 3.6, 3.9), "down 2": (3.2, 3.4, 3.6, 3.6), "blur": (3.0, 3.0, 3.4, 3.4)}[kind]
        for i, (dtype, cl) in enumerate((d, c) for d in (FP16, FP32) for c in (False, True)):
            x = image((16, 32, side, side), dtype, cl, device)
            f = torch.tensor([1.0, 3.0, 3.0, 1.0], device=device)
            out = side * up // down
            taps = f[:, None] * f / 64
            args = (x, taps, up, up, down, down, pads, pads, out, out, False, float(up * up))
            n = (x.numel() + 512 * out * out) * dtype.itemsize
            what = f"upfirdn2d 4x4 {kind} {NAMES[dtype]} [16,32,{side},{side}]"
            yield Row(what, cl, lambda args=args: gpu("upfirdn2d").upfirdn2d(*args), n, n / rates[i] / 1e9)
    x = image((16, 32, 1024, 1024), FP16, False, device)
    for cl in (False, True):
        x = image((16, 32, 1024, 1024), FP16, cl, device)
        b = image((32,), FP16, False, device)
        n = 2 * x.numel() * 2
        yield Row(
            "bias_act lrelu + clamp fp16 [16,32,1024,1024]", cl,
            lambda x=x, b=b: gpu("bias_act").bias_act(x, b, 1, 2, 0.2, math.sqrt(2), 256.0), n, n / 4.0 / 1e9,
            lambda x, b: (F.leaky_relu(x + b[:, None, None], 0.2) * math.sqrt(2)).clamp(-256, 256), (x, b),
        )  # fmt: skip
    for shape, up, taps, target in (
        ((8, 128, 276, 276), 2, 12, 0.60), ((8, 128, 148, 148), 4, 24, 0.55), ((8, 512, 84, 84), 2, 12, 0.27),
    ):  # fmt: skip
        for cl in (False, True):
            out = shape[2] * up // 2
            x, dy = image(shape, FP16, cl, device), image((*shape[:2], out, out), FP16, cl, device)
            b = image(shape[1:2], FP16, False, device)
            fu, fd = (torch.full((k,), 1 / k, device=device) for k in (taps, 12))
            pad = taps - 2 + (up == 2)
            args = (x, fu, fd, b, up, 2, pad, pad, out, out, False, math.sqrt(2), 0.2, 256.0)
            n = (x.numel() + dy.numel()) * 2
            what = f"filtered_lrelu up {up} down 2, {taps}+12 taps, fp16 {list(shape)}"
            yield Row(what, cl, lambda args=args: gpu("filtered_lrelu").filtered_lrelu(*args), n, 0 if cl else target)
            back = (dy, *args)
            n += x.numel() * 2
            yield Row(
                f"{what} backward", cl, lambda back=back: gpu("filtered_lrelu").filtered_lrelu_backward(*back), n, 0
            )
    for shape, cl, forward, backward in (
        ((8, 128, 512, 512), True, 0.40, 0.70), ((8, 128, 512, 512), False, 0.40, 0.70),
        ((8, 512, 64, 64), True, 0.040, 0.065), ((2, 320, 64, 64), True, 0.016, 0.022),
        ((1, 512, 128, 128), True, 0.025, 0.040),
    ):  # fmt: skip
        x, dy = image(shape, BF16, cl, device), image(shape, BF16, cl, device)
        w, b = (image(shape[1:2], BF16, False, device) for _ in range(2))
        m, r = (torch.full((shape[0], 32), float(v), device=device) for v in (0, 1))
        n = 2 * x.numel() * 2
        norm = gpu("group_norm")

        def stock(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return F.silu(F.group_norm(x, 32, w, b))

        what, given = f"GroupNorm(32)+SiLU bf16 {list(shape)}", (x, w, b)
        yield Row(
            what, cl, lambda g=given, norm=norm: norm.group_norm(*g, 32, 1e-5, 1, False), n, forward, stock, given
        )
        args = (dy, x, m, r, w, b, 32, 1, False, True, True, True)
        yield Row(
            f"{what} backward", cl, lambda args=args, norm=norm: norm.group_norm_backward(*args), 3 * x.numel() * 2,
            backward, stock, given, True,
        )  # fmt: skip
    small, large = (16, 64, 256, 256), (16, 64, 512, 512)
    for mode, targets in (("nearest", (0.19, 0.19)), ("bilinear", (0.22, 0.25)), ("bicubic", (0.30, 0.35))):
        for cl in (False, True):
            x, dy = image(small, BF16, cl, device), image(large, BF16, cl, device)
            n = (x.numel() + dy.numel()) * 2
            up = gpu("upsample")
            rest = ({"bilinear": 2, "bicubic": 3}.get(mode, 0), False, False, (2.0, 2.0))
            whole = mode == "nearest"

            def stock(x: torch.Tensor, mode: str = mode) -> torch.Tensor:
                return F.interpolate(x, scale_factor=2, mode=mode)

            def value(x: torch.Tensor = x, rest: Any = rest, whole: bool = whole, up: Any = up) -> torch.Tensor:
                return up.upsample_nearest(x, (2, 2), 1.0) if whole else up.interpolate(x, (512, 512), *rest)

            def gradient(dy: torch.Tensor = dy, rest: Any = rest, whole: bool = whole, up: Any = up) -> torch.Tensor:
                if whole:
                    return up.upsample_nearest_backward(dy, (2, 2), 1.0)
                return up.interpolate_backward(dy, (256, 256), *rest)

            what = f"{mode} x2 bf16 {list(small)}"
            yield Row(what, cl, value, n, targets[0], stock, (x,))
            yield Row(f"{what} backward", cl, gradient, n, targets[1], stock, (x,), True)


def compile_row(index: int) -> None:
    from pixfuse._shared.gpu_testing import compile_for, launches

    row = next(r for i, r in enumerate(rows("meta")) if i == index)
    for launch, tensors in launches(row.ours):
        compile_for("sm_90", launch, tensors)


def milliseconds(call: Callable[[], Any], count: int = 12) -> float:
    call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def copy_rate() -> float:
    """TB/s of a copy of 1 GiB."""
    source, target = (torch.empty(2**29, dtype=BF16, device="cuda").normal_() for _ in range(2))
    return 4 * 2**29 / milliseconds(lambda: target.copy_(source)) / 1e9


def replayed(call: Callable[[], Any], repeats: int = 20) -> float:
    from pixfuse._shared.timing import graphed

    def several() -> None:
        for _ in range(repeats):
            call()

    return milliseconds(graphed(several)) / repeats


def peer(row: Row, call: Callable[..., Any]) -> float:
    if not row.backward:
        with torch.no_grad():
            return milliseconds(lambda: call(*row.inputs), 6)
    leaves = [x.detach().requires_grad_() for x in row.inputs]
    y = call(*leaves)
    dy = torch.ones_like(y)
    return milliseconds(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="time torch.compile of the stock way too")
    parser.add_argument("--only", nargs="+", default=[""], help="rows with one of these words")
    parser.add_argument("--seconds", type=float, default=600, help="no further peers after so long")
    options = parser.parse_args()
    begin = time.time()
    wanted = [i for i, row in enumerate(rows("meta")) if any(word in row.work for word in options.only)]
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.map(compile_row, wanted, chunksize=1)
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy:.2f} TB/s")
    print("\n| work | layout | ms | TB/s | % of copy | target, ms | | eager, ms | compile, ms |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for i, row in enumerate(rows("cuda")):
        if i not in wanted:
            continue
        ms = (replayed if row.bytes < 2**28 else milliseconds)(row.ours)
        eager = compiled = "–"
        if row.stock is not None and time.time() - begin < options.seconds:
            eager = f"{peer(row, row.stock):.3f}"
            if options.compile and time.time() - begin < options.seconds:
                compiled = f"{peer(row, torch.compile(row.stock, dynamic=False)):.3f}"
        rate = row.bytes / ms / 1e9
        verdict = "" if not row.target else "met" if ms <= row.target else f"{ms / row.target - 1:.1%} over"
        target = f"{row.target:.3f}" if row.target else ""
        layout = "CL" if row.channels_last else "NCHW"
        cells = [row.work, layout, f"{ms:.4f}", f"{rate:.2f}", f"{rate / copy:.0%}", target, verdict, eager, compiled]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
