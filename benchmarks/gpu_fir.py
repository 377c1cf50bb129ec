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


def fir_arguments(kind, dtype, channels_last, device, n=16, c=32):
    side, up, down, pads, _ = FIR[kind]
    x = to_layout(torch.randn(n, c, side, side, device=device, dtype=dtype), channels_last)
    out = (side * up + sum(pads) - 4) // down + 1
    f = torch.tensor([1.0, 3, 3, 1], device=device) / 8
    return x, f[:, None] * f, up, up, down, down, pads[0], pads[0], out, out, True, float(up * up)


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
        make = (fir_arguments, kind, DTYPES[name], cl)
        label = f"upfirdn2d {kind} {name} {'channels_last' if cl else 'contiguous'}"
        yield label, "fir", make, {}, plugin
        size = 2 if name == "fp16" else 4
        if tune:
            down = FIR[kind][2]
            if cl:
                tiles = [(x, y, 16 // size // v, 32, t) for x, y, v, t in
                         [(2, 2, 1, 128), (2, 2, 2, 128), (4, 2, 2, 128), (2, 4, 2, 128), (1, 2, 1, 128), (1, 4, 1, 128),
                          (2, 2, 2, 256), (4, 4, 4, 128), (1, 4, 2, 128)] if FIR[kind][1] == 1 or (x > 1)]
            else:
                wide = 16 // size
                tiles = [(x, y, 1, tx, t) for x, y, tx, t in
                         [(wide, 2, 32, 128), (wide, 4, 32, 128), (wide, 8, 32, 128), (wide // 2, 4, 32, 128), (wide, 4, 128, 128),
                          (wide // 2, 8, 32, 128), (wide, 4, 32, 256), (wide // 2, 2, 32, 128), (wide // 2, 4, 64, 256)]
                         if x >= FIR[kind][1] and x * down <= 8]
            for tile in dict.fromkeys(tiles):
                yield f"{label} {tile}", "fir", make, {"_tile": tile}, plugin
    for kind, name, cl in itertools.product(LRELU, ("fp16", "fp32"), (False, True)):
        if name == "fp32" and (cl or kind != "276"):
            continue
        make = (lrelu_arguments, kind, DTYPES[name], cl)
        label = f"filtered_lrelu {kind} {name} {'channels_last' if cl else 'contiguous'}"
        yield label, "lrelu", make, {}, LRELU[kind][4]
        if name == "fp16":
            yield f"{label} backward", "lrelu_backward", make, {}, None
        if tune and name == "fp16" and not cl:
            for block, threads, busy in itertools.product((4, 8), (128,), (256, 768, 1536)):
                yield f"{label} {block} {threads} {busy}", "lrelu", make, {"block": block, "threads": threads, "busy": 132 * busy}, None


class patched:
    """The tuned functions replaced by constants."""

    def __init__(self, patches):
        self.patches = []
        if "_tile" in patches:
            self.patches.append(mock.patch.object(fir, "_tile", lambda *a: fir._Tile(*patches["_tile"])))
        if "block" in patches:
            self.patches.append(mock.patch.object(lrelu, "_block", lambda *a: patches["block"]))
            self.patches.append(mock.patch.object(lrelu, "_THREADS", patches["threads"]))
            self.patches.append(mock.patch.object(lrelu, "_BUSY", patches["busy"]))

    def __enter__(self):
        fir._polyphase.cache_clear()
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


def milliseconds(call, repeats=15):
    for _ in range(2):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for i in range(repeats):
        events[2 * i].record()
        call()
        events[2 * i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(events[2 * i].elapsed_time(events[2 * i + 1]) for i in range(repeats))


def check(op, reference, *args):
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    exact, model, got = reference(*wide), reference(*args), op(*args)
    allowed = 2 * (model.double() - exact).abs().max() + 2 * torch.finfo(got.dtype).eps * exact.abs().max()
    error = (got.double() - exact).abs().max()
    return bool(error <= allowed) and got.stride() == model.stride(), float(error), float(allowed)


def check_all():
    torch.backends.cudnn.allow_tf32 = False
    failures = []
    for (name, dtype), cl, flip in itertools.product(DTYPES.items(), (False, True), (True, False)):
        for shape, taps, axes in [((2, 8, 37, 64), (4, 4), (2, 2, 1, 1, 2, 2)), ((3, 8, 33, 40), (4, 4), (1, 1, 2, 2, 1, 1)),
                                  ((2, 3, 31, 47), (4, 4), (1, 1, 1, 1, 2, 1)), ((1, 6, 20, 24), (12,), (2, 2, 1, 1, 6, 5)),
                                  ((1, 6, 20, 24), (3, 5), (2, 1, 1, 3, 3, -1)), ((1, 2, 40, 50), (33,), (1, 1, 2, 2, 16, 16)),
                                  ((2, 3, 9, 7), (13, 17), (2, 2, 3, 1, 9, 7)), ((2, 3, 9, 7), (), (3, 2, 2, 1, 1, 0))]:
            x = to_layout(torch.randn(shape, device="cuda").to(dtype), cl)
            f = torch.randn(taps, device="cuda") if taps else None
            kx, ky = (1, 1) if f is None else (taps[-1], taps[0])
            out = ((shape[3] * axes[0] + axes[4] + 1 - kx) // axes[2] + 1, (shape[2] * axes[1] + axes[5] + 1 - ky) // axes[3] + 1)
            ok, *errors = check(fir.upfirdn2d, fir_reference.upfirdn2d, x, f, *axes, *out, flip, 1.5)
            if not ok:
                failures.append(("upfirdn2d", name, cl, flip, shape, taps, *errors))
            if f is not None and f.dim() == 2:
                dy = to_layout(torch.randn(*shape[:2], *out[::-1], device="cuda").to(dtype), cl)
                args = (x, dy, kx, ky, *axes, flip, 1.5)
                ok, *errors = check(fir.upfirdn2d_filter_backward, fir_reference.upfirdn2d_filter_backward, *args)
                if not ok:
                    failures.append(("filter_backward", name, cl, flip, shape, taps, *errors))
    for (name, dtype), cl in itertools.product(DTYPES.items(), (False, True)):
        for up, down, ku, kd, pad in [(2, 2, 12, 12, 11), (4, 2, 24, 12, 22)]:
            x = to_layout(torch.randn(2, 4, 40, 36, device="cuda").to(dtype), cl)
            fu, fd, b = torch.rand(ku, device="cuda") / ku, torch.rand(kd, device="cuda") / kd, torch.randn(4, device="cuda")
            w, h = (36 * up + 2 * pad - ku - kd + 2) // down, (40 * up + 2 * pad - ku - kd + 2) // down
            args = (x, fu, fd, b, up, down, pad, pad, w, h, False, 1.4142, 0.2, 1.0)
            v, dy = torch.randn_like(x), to_layout(torch.randn(2, 4, h, w, device="cuda").to(dtype), cl)
            for op, given in (("filtered_lrelu", args), ("filtered_lrelu_tangent", (v, *args)), ("filtered_lrelu_backward", (dy, *args))):
                ok, *errors = check(getattr(lrelu, op), getattr(lrelu_reference, op), *given)
                if not ok:
                    failures.append((op, name, cl, up, *errors))
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
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
        compiled = pool.map_async(precompile, slow_first, chunksize=1)
        deadline = 110
        while not compiled.ready() and time.time() - start < deadline:
            time.sleep(0.5)
        compiled = compiled.get() if compiled.ready() else []
        pool.terminate()
    bad = {label for label, _, error in compiled if error}
    print(f"compiled {len(compiled)} in {time.time() - start:.0f} s, slowest", sorted((round(t), l) for l, t, _ in compiled)[-3:])
    for label, _, error in compiled:
        if error:
            print("NO COMPILE", label, error)
    card = torch.cuda.get_device_name()
    failures = check_all()
    print(f"{card}, torch {torch.__version__}; {len(failures)} failures after {time.time() - start:.0f} s")
    for failure in failures[:20]:
        print("FAIL", *failure)
    a = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    b = torch.empty_like(a)
    copy = 2 * a.nbytes / milliseconds(lambda: b.copy_(a)) / 1e9
    del a, b
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
                ms = milliseconds(lambda: function(*args))
        except Exception as error:
            print("ERROR", label, repr(error)[:200])
            continue
        traffic = args[0].nbytes + y.nbytes + (args[1].nbytes if op == "lrelu_backward" else 0)
        rate = traffic / ms / 1e9
        record["rows"].append({"label": label, "ms": ms, "tbs": rate, "plugin_ms": plugin, "first_s": first})
        print(f"{label:64s} {ms:7.3f} ms {rate:5.2f} TB/s {100 * rate / copy:3.0f}%{f'  plugin {plugin} ms, x{plugin / ms:.1f}' if plugin else ''}{f'  first {first:.1f} s' if first > 1 else ''}", flush=True)
        del args, y
        Path(options.out, "gpu_fir.json").write_text(json.dumps(record, indent=1))
    x = torch.randn(1, 8, 8, 8, device="cuda")
    f = torch.ones(4, 4, device="cuda")
    for name, call in {
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
