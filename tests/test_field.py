"""What goes wrong in the field with an install: no tools, several processes, forks, threads, a missing or bad library.

The numbers are those of field-cases: 1, 2 and 3.
"""

import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import pixfuse

PACKAGE = Path(pixfuse.__file__).parent

# Every op, forward and backward, on the same input; prints a hash of all results.
EVERY_OP = """
import hashlib, torch, pixfuse

def every_op(seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 8, 12, 10, generator=g).requires_grad_()
    b, f = torch.randn(8, generator=g), pixfuse.setup_filter([1, 3, 3, 1])
    results = [
        pixfuse.bias_act(x, b, act="lrelu", clamp=1),
        pixfuse.bias_act(x, b, act="swish"),
        pixfuse.upfirdn2d(x, f, up=2, padding=2),
        pixfuse.downsample2d(x, f),
        pixfuse.filtered_lrelu(x, f, f, b, up=2, down=2, padding=3),
        pixfuse.group_norm(x, 4, b, b, act="silu"),
        pixfuse.upsample_nearest(x, 2),
        *(pixfuse.interpolate(x, size=(7, 23), mode=m) for m in ("nearest", "bilinear", "bicubic", "area")),
        pixfuse.interpolate(x, size=(7, 23), mode="lanczos", antialias=True),
    ]
    results += [torch.autograd.grad(y.square().sum(), x)[0] for y in list(results)]
    return hashlib.sha256(b"".join(y.detach().numpy().tobytes() for y in results)).hexdigest()
"""
exec(EVERY_OP)


def python(code, *options, folder=None, **environment):
    """Run ``code`` in a fresh process that imports this very package, or the one in ``folder``."""
    if folder:  # an editable install's finder would come before the path
        code = f"import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Redirect' not in repr(f)]\n{code}"
    paths = {"PYTHONPATH": str(folder or PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        env={**paths, **environment},
        timeout=300,
    )


def test_1_no_tools_no_home_no_child(tmp_path):
    """No compiler, writable home or environment variable is needed; nothing is started, nothing written."""
    guard = """
import sys, time, os, resource
events = []
def watch(name, arguments):
    started = name in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
    writes = name == "open" and arguments[1] and set("wax+") & set(arguments[1]) and arguments[0] != os.devnull
    if started or writes or name in ("os.mkdir", "os.rename"):
        events.append((name, arguments[0]))
import torch
sys.addaudithook(watch)
start = time.process_time()
import pixfuse
seconds = time.process_time() - start
"""
    check = """
every_op()
with torch.no_grad():
    every_op_without_grad = pixfuse.group_norm(torch.ones(1, 4, 2, 2), 2)
assert events == [], events
assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss == 0, "there was a child process"
assert seconds < 2, f"the import took {seconds} s more than torch's"
print("fine")
"""
    (tmp_path / "tools").mkdir()
    done = python(
        guard + EVERY_OP + check,
        "-B",  # no byte code of Python's own
        "-W",
        "error",
        PATH=str(tmp_path / "tools"),
        HOME="/proc/1/none",  # not writable, not even for root
        TMPDIR="/proc/1/none",
    )
    assert done.stderr == ""
    assert done.stdout == "fine\n"


def test_2_four_start_together_and_one_is_killed(tmp_path):
    code = EVERY_OP + "\nimport sys; print('ready', flush=True); sys.stdin.readline(); print(every_op())"
    caches = {name: str(tmp_path) for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    environment = {**os.environ, **caches, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    workers[0].send_signal(signal.SIGKILL)
    found = [worker.communicate(timeout=120)[0].strip() for worker in workers]
    assert workers[0].returncode == -signal.SIGKILL
    assert {worker.returncode for worker in workers[1:]} == {0}
    after = python(EVERY_OP + "print(every_op())", **caches)
    assert after.returncode == 0, after.stderr
    assert {*found[1:], after.stdout.strip()} == {every_op()}  # noqa: F821


class Pictures(torch.utils.data.Dataset):
    """Pictures that are resized and normalised by the workers of a DataLoader."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(index))
        y = pixfuse.interpolate(pixfuse.group_norm(x, 2, act="silu"), scale_factor=2, mode="bicubic")
        return pixfuse.upfirdn2d(y, pixfuse.setup_filter([1, 2, 1]), padding=1)[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method, monkeypatch):
    every_op()  # noqa: F821  (the parent has used all ops, and their threads, before it forks)
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGE.parent}{os.pathsep}{Path(__file__).parent}")
    pictures = Pictures()
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import warnings; warnings.simplefilter("ignore")
import torch, test_field
if __name__ == "__main__":
    test_field.every_op()
    loader = torch.utils.data.DataLoader(test_field.Pictures(), 2, num_workers=2, multiprocessing_context={method!r})
    found = torch.cat(list(loader))
    print(test_field.hashlib.sha256(found.numpy().tobytes()).hexdigest())
"""
    script = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert script.returncode == 0, script.stderr
    wanted = torch.stack([pictures[i] for i in range(4)])
    assert script.stdout.strip() == hashlib.sha256(wanted.numpy().tobytes()).hexdigest()


def test_threads():
    """Eight threads that call all ops at once get what one gets."""
    wanted = [every_op(seed) for seed in range(8)]  # noqa: F821
    found = [None] * 8
    start = threading.Barrier(8)

    def work(seed):
        start.wait()
        for _ in range(3):
            found[seed] = every_op(seed)  # noqa: F821

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted


@pytest.fixture
def copied(tmp_path):
    """A copy of the package without its library."""
    shutil.copytree(PACKAGE, tmp_path / "pixfuse", ignore=shutil.ignore_patterns("*.so", "*.cpp", "__pycache__"))
    return tmp_path


def test_3_without_the_library(copied):
    code = """
every_op()
from pixfuse._shared.library import OPS
for name in OPS:
    found = pixfuse.backend(name, torch.zeros(1))
    assert found == "reference", name
    assert found.reason.startswith("this install was built without the CPU kernels ("), found.reason
print(pixfuse.__file__)
"""
    done = python(EVERY_OP + code, "-W", "error", folder=copied)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(copied / "pixfuse/__init__.py")
    assert done.stderr == ""


def test_library_that_is_no_library(copied):
    (copied / "pixfuse/_kernels.so").write_bytes(b"\x7fELF and then nothing")
    done = python("import pixfuse", folder=copied)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ImportError: pixfuse: {copied}/pixfuse/_kernels.so does not load with torch {torch.__version__}"
    )
    assert "it needs torch 2.10 or newer" in last


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_library_of_another_torch(copied):
    """The error names the symbol that this torch does not have."""
    source = "void aoti_torch_of_the_future(void); void call(void) { aoti_torch_of_the_future(); }"
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(copied / "pixfuse/_kernels.so")]
    subprocess.run(compiler, input=source, text=True, check=True)
    done = python("import pixfuse", folder=copied)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: pixfuse: ")
    assert "undefined symbol: aoti_torch_of_the_future" in last


def test_start_methods_are_those_tested():
    """A new one would need a test of its own."""
    assert set(multiprocessing.get_all_start_methods()) == {"fork", "spawn", "forkserver"}
