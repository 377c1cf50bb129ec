"""Check, tune and time the FIR kernels on a GPU: ``python benchmarks/gpu_fir.py [--tune] [--out DIR]``.

First every case against float64, then the rows of docs/measurements/h200-fir.md; with ``--tune`` for several tiles
each. Kernels are compiled ahead of time in worker processes. Prints a table and writes ``gpu_fir.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch

from pixfuse._shared.gpu_testing import compile_for, launches
from pixfuse._shared.layout import to_layout
from pixfuse.filtered_lrelu import gpu as lrelu
from pixfuse.filtered_lrelu import reference as lrelu_reference
from pixfuse.upfirdn2d import gpu as fir
from pixfuse.upfirdn2d import reference as fir_reference

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FIR = {  # side, up, down, pads, ms of the CUDA plugin: fp16 contiguous, channels_last, fp32 contiguous, channels_last
    "up2": (512, 2, 1, (2, 1), (2.06, 1.87, 2.02, 1.84)),
    "down2": (1024, 1, 2, (1, 1), (1.98, 1.85, 2.07, 1.99)),
    "blur": (1024, 1, 1, (2, 1), (2.95, 2.93, 3.04, 3.11)),
}
LRELU = {  # shape, up, taps, output side, ms of the CUDA plugin
    "276": ((8, 128, 276, 276), 2, 12, 276, 0.956),
    "148": ((8, 128, 148, 148), 4, 24, 296, 0.867),
    "84": ((8, 512, 84, 84), 2, 12, 84, 0.423),
}


TILES = {  # what to try, by kind, dtype and channels_last
    ("up2", "fp16", True): [(2, 4, 8, 32, 128), (4, 4, 8, 32, 128)],
    ("up2", "fp16", False): [(8, 6, 1, 128, 128), (8, 4, 1, 256, 256)],
    ("blur", "fp16", True): [
        (4, 6, 4, 32, 128),
        (2, 8, 4, 64, 128),
        (2, 8, 4, 32, 64),
        (2, 12, 4, 32, 128),
        (4, 4, 4, 16, 128),
    ],
    ("blur", "fp32", True): [(4, 2, 4, 32, 128), (4, 4, 4, 32, 128), (2, 4, 4, 64, 128)],
    ("up2", "fp32", True): [(4, 2, 4, 32, 128)],
    ("down2", "fp32", True): [(4, 2, 4, 32, 128)],
}


def fir_arguments(kind, dtype, channels_last, taps, device, n=16, c=32):
    side, up, down, pads, _ = FIR[kind]
    x = to_layout(torch.randn(n, c, side, side, device=device, dtype=dtype), channels_last)
    pad = pads[0] + (taps - 4) // 2
    out = side * up // down
    f = torch.rand(taps, device=device)
    return x, f[:, None] * f if taps == 4 else f, up, up, down, down, pad, pad, out, out, True, float(up * up)


def lrelu_arguments(kind, dtype, channels_last, device):
    shape, up, taps, out, _ = LRELU[kind]
    x = to_layout(torch.randn(shape, device=device, dtype=dtype), channels_last)
    fu, fd = (torch.hann_window(k + 2, device=device)[1:-1] for k in (taps, 12))
    fu, fd = fu / (taps / 2), fd / 6
    pad = taps - 2 + (up == 2)
    b = torch.randn(shape[1], device=device, dtype=dtype)
    return x, fu, fd, b, up, 2, pad, pad, out, out, True, 1.4142, 0.2, 256.0


def jobs(tune):
    """Every measurement: label, op, maker of its arguments, patches of the tuned functions, plugin's ms."""
    for kind, name, cl in itertools.product(FIR, ("fp16", "fp32"), (False, True)):
        plugin = FIR[kind][4][2 * (name == "fp32") + cl]
        make = (fir_arguments, kind, DTYPES[name], cl, 4)
        label = f"upfirdn2d {kind} {name} {'channels_last' if cl else 'contiguous'}"
        yield label, "fir", make, {}, plugin
        for tile in TILES.get((kind, name, cl), ()) if tune else ():
            yield f"{label} {tile}", "fir", make, {"_tile": tile}, plugin
    for kind, k in (("up2", 12), ("down2", 12), ("blur", 12), ("blur", 32)):
        for cl in (False, True):
            make = (fir_arguments, kind, torch.float16, cl, k)
            yield f"upfirdn2d {kind} {k} taps fp16 {'channels_last' if cl else 'contiguous'}", "fir", make, {}, None
    for kind, name, cl in itertools.product(LRELU, ("fp16", "fp32"), (False, True)):
        if name == "fp32" and (cl or kind != "276"):
            continue
        make = (lrelu_arguments, kind, DTYPES[name], cl)
        label = f"filtered_lrelu {kind} {name} {'channels_last' if cl else 'contiguous'}"
        yield label, "lrelu", make, {}, LRELU[kind][4]
        if name == "fp16":
            yield f"{label} backward", "lrelu_backward", make, {}, None
        if tune and name == "fp16":
            for segments in (2, 3, 4, 6, 8):
                yield f"{label} {segments} segments", "lrelu", make, {"segments": segments}, None
        if tune and name == "fp16" and not cl and kind == "148":
            for segments in (2, 4, 6):
                yield (
                    f"{label} 4 {segments} segments",
                    "lrelu",
                    make,
                    {"block": 4, "threads": 32, "segments": segments},
                    None,
                )


class patched:
    """The tuned functions replaced by constants."""

    def __init__(self, patches):
        self.patches = []
        if "_tile" in patches:
            self.patches.append(mock.patch.object(fir, "_tile", return_value=fir._Tile(*patches["_tile"])))
        if "block" in patches:
            self.patches.append(mock.patch.object(lrelu, "_block", return_value=patches["block"]))
            self.patches.append(mock.patch.object(lrelu, "_THREADS", patches["threads"]))
        if "segments" in patches:
            self.patches.append(mock.patch.object(lrelu, "_segments", return_value=patches["segments"]))
        if "fused" in patches:
            self.patches.append(mock.patch.object(fir, "_FUSED_PRODUCTS", patches["fused"]))
            self.patches.append(mock.patch.object(fir, "_UNROLLED_PRODUCTS", 2000))

    def __enter__(self):
        fir._plan.cache_clear()
        lrelu._plan.cache_clear()
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def op_and_arguments(op, make, device):
    function, *rest = make
    args = function(*rest, device)
    if op == "fir":
        return fir.upfirdn2d, args
    if op == "lrelu":
        return lrelu.filtered_lrelu, args
    x = args[0]
    dy = to_layout(torch.randn(*x.shape[:2], args[8], args[9], device=device, dtype=x.dtype), x.stride(1) == 1)
    return lrelu.filtered_lrelu_backward, (dy, *args)


def precompile(job):
    label, op, make, patches, _ = job
    start = time.time()
    try:
        with patched(patches):
            function, args = op_and_arguments(op, make, "meta")
            for launch, tensors in launches(function, *args):
                compile_for("sm_90", launch, tensors)
        return label, time.time() - start, ""
    except Exception as error:
        return label, time.time() - start, repr(error)[:300]


def milliseconds(call, *args, repeats=15):
    for _ in range(2):
        call(*args)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for i in range(repeats):
        events[2 * i].record()
        call(*args)
        events[2 * i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(events[2 * i].elapsed_time(events[2 * i + 1]) for i in range(repeats))


def precompile_any(job):
    return precompile_check(job) if isinstance(job, int) else precompile(job)


def check(op, reference, *args):
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    exact, model, got = reference(*wide), reference(*args), op(*args)
    allowed = 2 * (model.double() - exact).abs().max() + 2 * torch.finfo(got.dtype).eps * exact.abs().max()
    error = (got.double() - exact).abs().max()
    return bool(error <= allowed) and got.stride() == model.stride(), float(error), float(allowed)


def checks(device):
    """Name, op, reference and arguments of every comparison."""
    for (name, dtype), cl, flip in itertools.product(DTYPES.items(), (False, True), (True, False)):
        for shape, taps, axes in [
            ((2, 8, 37, 64), (4, 4), (2, 2, 1, 1, 2, 2)),
            ((3, 8, 33, 40), (4, 4), (1, 1, 2, 2, 1, 1)),
            ((2, 3, 31, 47), (4, 4), (1, 1, 1, 1, 2, 1)),
            ((1, 8, 20, 24), (12,), (2, 2, 1, 1, 6, 5)),
            ((1, 6, 20, 24), (3, 5), (2, 1, 1, 3, 3, -1)),
            ((1, 2, 40, 50), (33,), (1, 1, 2, 2, 16, 16)),
            ((2, 3, 9, 7), (13, 17), (2, 2, 3, 1, 9, 7)),
            ((2, 3, 9, 7), (), (3, 2, 2, 1, 1, 0)),
        ]:
            x = to_layout(torch.randn(shape, device=device).to(dtype), cl)
            f = torch.randn(taps, device=device) if taps else None
            kx, ky = (1, 1) if f is None else (taps[-1], taps[0])
            out = (
                (shape[3] * axes[0] + axes[4] + 1 - kx) // axes[2] + 1,
                (shape[2] * axes[1] + axes[5] + 1 - ky) // axes[3] + 1,
            )
            label = (name, cl, flip, shape, taps)
            yield ("upfirdn2d", *label), fir.upfirdn2d, fir_reference.upfirdn2d, (x, f, *axes, *out, flip, 1.5)
            if f is not None and f.dim() == 2 and flip:
                dy = to_layout(torch.randn(*shape[:2], *out[::-1], device=device).to(dtype), cl)
                args = (x, dy, kx, ky, *axes, flip, 1.5)
                yield ("df", *label), fir.upfirdn2d_filter_backward, fir_reference.upfirdn2d_filter_backward, args
    for (name, dtype), cl in itertools.product(DTYPES.items(), (False, True)):
        for up, down, ku, kd, pad in [(2, 2, 12, 12, 11), (4, 2, 24, 12, 22)]:
            x = to_layout(torch.randn(2, 4, 40, 36, device=device).to(dtype), cl)
            fu, fd, b = (
                torch.rand(ku, device=device) / ku,
                torch.rand(kd, device=device) / kd,
                torch.randn(4, device=device),
            )
            w, h = (36 * up + 2 * pad - ku - kd + 2) // down, (40 * up + 2 * pad - ku - kd + 2) // down
            args = (x, fu, fd, b, up, down, pad, pad, w, h, False, 1.4142, 0.2, 1.0)
            v, dy = torch.randn_like(x), to_layout(torch.randn(2, 4, h, w, device=device).to(dtype), cl)
            for op, given in (
                ("filtered_lrelu", args),
                ("filtered_lrelu_tangent", (v, *args)),
                ("filtered_lrelu_backward", (dy, *args)),
            ):
                if up == 2 or op == "filtered_lrelu" or (name == "fp16" and not cl):
                    yield (op, name, cl, up), getattr(lrelu, op), getattr(lrelu_reference, op), given


def precompile_check(index):
    _, op, _, args = next(itertools.islice(checks("meta"), index, None))
    start = time.time()
    try:
        for launch, tensors in launches(op, *args):
            compile_for("sm_90", launch, tensors)
    except Exception as error:
        return f"check {index}", time.time() - start, repr(error)[:300]
    return f"check {index}", time.time() - start, ""


def check_all(deadline):
    torch.backends.cudnn.allow_tf32 = False
    failures = []
    fir._plan.cache_clear()
    lrelu._plan.cache_clear()
    for done, (label, op, reference, args) in enumerate(checks("cuda")):
        if time.time() > deadline:
            print(f"only {done} checks done")
            break
        ok, *errors = check(op, reference, *args)
        if not ok:
            failures.append((*label, *errors))
    return failures


def large_ones():
    """More than 2^31 elements, and more planes than a grid axis takes: the last image is right."""
    f = torch.rand(4, 4, device="cuda")
    for shape, cl in (((17, 256, 512, 512), False), ((20, 256, 512, 512), True), ((600000, 1, 4, 4), False)):
        x = torch.empty(
            shape, device="cuda", dtype=torch.bfloat16, memory_format=[torch.contiguous_format, torch.channels_last][cl]
        )
        x.normal_()
        args = (f, 2, 2, 1, 1, 2, 2, 2 * shape[3], 2 * shape[2], True, 4.0)
        y = fir.upfirdn2d(x, *args)
        right = torch.equal(y[-1:], fir.upfirdn2d(x[-1:], *args)) and torch.equal(y[:1], fir.upfirdn2d(x[:1], *args))
        print("large", shape, "channels_last" if cl else "contiguous", "right" if right else "WRONG")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--only", default="")
    parser.add_argument("--check", action="store_true", help="only the comparisons, as under compute-sanitizer")
    options = parser.parse_args()
    if options.check:
        print(check_all(time.time() + 60) or "all right")
        return
    start, record = time.time(), {}
    work = [job for job in jobs(options.tune) if options.only in job[0]]
    kernels = {}
    for job in work:  # one job for each kernel, the slow ones first
        with patched(job[3]):
            function, args = op_and_arguments(job[1], job[2], "meta")
            for launch, _ in launches(function, *args):
                kernels.setdefault((launch.kernel.__name__, launch.arguments[-23:], job[2][2]), job)
    slow_first = sorted(kernels.values(), key=lambda job: ("backward" not in job[1], "lrelu" not in job[1]))
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        compiled = pool.map_async(precompile_any, [*slow_first, *range(sum(1 for _ in checks("meta")))], chunksize=1)
        deadline = 60
        while not compiled.ready() and time.time() - start < deadline:
            time.sleep(0.5)
        compiled = compiled.get() if compiled.ready() else []
        pool.terminate()
    bad = {label for label, _, error in compiled if error}
    print(
        f"compiled {len(compiled)} in {time.time() - start:.0f} s, slowest",
        sorted((round(t), l) for l, t, _ in compiled)[-3:],
    )
    for label, _, error in compiled:
        if error:
            print("NO COMPILE", label, error)
    card = torch.cuda.get_device_name()
    failures = check_all(start + 75)
    print(f"{card}, torch {torch.__version__}; {len(failures)} failures after {time.time() - start:.0f} s")
    for failure in failures[:20]:
        print("FAIL", *failure)
    a = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    b = torch.empty_like(a)
    copy = 2 * a.nbytes / milliseconds(b.copy_, a) / 1e9
    print(f"copy {copy:.2f} TB/s")
    record = {"card": card, "torch": torch.__version__, "copy": copy, "failures": failures, "rows": []}
    for label, op, make, patches, plugin in work:
        if label in bad:
            continue
        try:
            with patched(patches):
                function, args = op_and_arguments(op, make, "cuda")
                first = time.time()
                y = function(*args)
                torch.cuda.synchronize()
                first = time.time() - first
                ms = milliseconds(function, *args)
        except Exception as error:
            print("ERROR", label, repr(error)[:200])
            continue
        traffic = args[0].nbytes + y.nbytes + (args[1].nbytes if op == "lrelu_backward" else 0)
        rate = traffic / ms / 1e9
        record["rows"].append({"label": label, "ms": ms, "tbs": rate, "plugin_ms": plugin, "first_s": first})
        beside = f"  plugin {plugin} ms, x{plugin / ms:.1f}" if plugin else ""
        slow = f"  first {first:.1f} s" if first > 1 else ""
        print(f"{label:64s} {ms:7.3f} ms {rate:5.2f} TB/s {100 * rate / copy:3.0f}%{beside}{slow}", flush=True)
        Path(options.out, "gpu_fir.json").write_text(json.dumps(record, indent=1))
    large_ones()
    x = torch.randn(1, 8, 8, 8, device="cuda")
    f = torch.ones(4, 4, device="cuda")
    f1 = torch.ones(12, device="cuda")
    for name, call in {
        "filtered_lrelu gpu.py": lambda: lrelu.filtered_lrelu(
            x, f1, f1, None, 2, 2, 11, 11, 8, 8, True, 1.4, 0.2, 256.0
        ),
        "upfirdn2d torch.ops": lambda: torch.ops.pixfuse.upfirdn2d(x, f, 2, 2, 1, 1, 2, 2, 16, 16, True, 1.0),
        "upfirdn2d gpu.py": lambda: fir.upfirdn2d(x, f, 2, 2, 1, 1, 2, 2, 16, 16, True, 1.0),
    }.items():
        call()
        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(500):
                call()
            times.append((time.perf_counter() - begin) / 500 * 1e6)
            torch.cuda.synchronize()
        print(f"{name}: {min(times):.1f} us a call")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    y.zero_()
    graph.replay()
    print("graph replay right:", torch.equal(y, call()))
    print(f"{time.time() - start:.0f} s in all")


if __name__ == "__main__":
    main()
