"""pixfuse run: client scripts as they are, their arguments, exit status, tracebacks and child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pixfuse import compat

pytest.importorskip("typer")


def python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    here = os.pathsep.join([str(Path(compat.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=os.environ
        | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "PYTHONPATH": here, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        input="typed\n",
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
    )


def pixfuse(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "pixfuse._cli.main", *args, cwd=cwd)


CLIENT = """
import sys
import torch
from torch_utils import misc
from torch_utils.ops import upfirdn2d, bias_act
from networks import layer

if __name__ == "__main__":
    print(sys.argv, misc.here, layer(torch.zeros(1, 2, 4, 4)).shape, __file__)
    print(upfirdn2d.__name__)
    sys.exit(3)
"""

SPAWNING = """
import torch.multiprocessing as mp
from op import upfirdn2d

def work(rank):
    print("child", upfirdn2d.__module__, flush=True)

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
    for method in ("forkserver", "fork"):
        process = mp.get_context(method).Process(target=work, args=(0,))
        process.start()
        process.join()
"""

# What a script may do, to be the same under python and under pixfuse run.
SCRIPTS = {
    "names": """
'''Words.'''
import dataclasses, inspect, pickle, sys, typing, __main__
import near
@dataclasses.dataclass
class A:
    x: int = near.here
print(sys.argv, sys.path[0], __name__, __file__, __doc__, __package__, __spec__ and __spec__.name)
print(sys.modules["__main__"].A is A, __main__.__file__, pickle.loads(pickle.dumps(A())), inspect.getsource(A))
print(typing.get_type_hints(A), sys.stdin.read(), "__annotations__" in globals())
""",
    "afterwards": """
import atexit, threading, time, __main__
atexit.register(lambda: print("end", __main__.x))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", __main__.x))).start()
x = 5
""",
    "status": "import sys; sys.exit(300)",
    "words": "import sys; sys.exit('words')",
    "at once": "import os; os._exit(7)",
    "error": """
def f():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise KeyError(1) from error
f()
""",
    "end of input": "input(); input()",  # these the command line would take for its own
    "broken pipe": "raise BrokenPipeError(32, 'Broken pipe')",
    "click": "import click\nraise click.ClickException('hey')",
    "exit of click": "import click\nraise click.exceptions.Exit(4)",
    "options": "import argparse\np = argparse.ArgumentParser(prog='p')\np.add_argument('n', type=int)\np.parse_args()",
    "syntax": "def f(:\n    pass",
    "no module": "import nothing_of_that_name",
    "interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "own hook": "import sys\nsys.excepthook = lambda kind, error, tb: print('hook', error)\n1 / 0",
    "encoding": "# coding: latin-1\nprint(len('\xe9'))",
    "annotations": "def f(x: 1 + 1): pass\nprint(f.__annotations__)",
}


# Runs pixfuse for each of many calls: torch is imported once, then one process is forked after the other.
RUNS = """
import contextlib, gc, json, os, sys
import pixfuse._cli.main as cli

with contextlib.suppress(SystemExit):
    cli.app(["--version"])  # what it imports is shared too
gc.freeze()
found = []
for call in json.load(open("calls.json")):
    names = ("in", "out", "err")
    open("in", "w").write("typed\\n")
    process = os.fork()
    if not process:
        for i, name in enumerate(names):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if i else 0)), i)
        sys.argv = ["pixfuse", "run", "--compat", "nvlabs", *call]
        break
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    found.append([status, open("out").read(), open("err").read()])
else:
    json.dump(found, open("found.json", "w"))
    sys.exit()
cli.main()
"""


OF_MODULES = ("names", "afterwards", "words", "error", "interrupt")


def test_a_client_as_it_is(tmp_path: Path) -> None:
    client = tmp_path / "client"
    (client / "torch_utils/ops").mkdir(parents=True)
    (client / "torch_utils/misc.py").write_text("here = True\n")
    (client / "torch_utils/ops/upfirdn2d.py").write_text("raise RuntimeError('compiles')\n")
    (client / "networks.py").write_text(
        "from torch_utils.ops import bias_act\n\ndef layer(x):\n    return bias_act.bias_act(x, act='lrelu')\n"
    )
    (client / "train.py").write_text(CLIENT)
    done = pixfuse("run", "--compat", "nvlabs", "client/train.py", "--gpus=1", "--help", "-x", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("['client/train.py', '--gpus=1', '--help', '-x'] True torch.Size([1, 2, 4, 4])")
    assert second == "pixfuse.compat.nvlabs.upfirdn2d"


def test_spawned_processes_too(tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)
    done = pixfuse("run", "--compat", "rosinality", "--compat", "mmcv", "spawning.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "child pixfuse.compat.rosinality\n" * 3


@pytest.mark.parametrize("module", [False, True])
def test_the_same_as_python(tmp_path: Path, module: bool) -> None:
    """Arguments, names, output, tracebacks and exit statuses."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    ((tmp_path if module else folder) / "near.py").write_text("here = 3\n")
    calls = []
    scripts = {name: text for name, text in SCRIPTS.items() if not module or name in OF_MODULES}
    for i, (name, text) in enumerate(scripts.items()):
        (folder / f"script{i}.py").write_text(text, encoding="latin-1" if name == "encoding" else "utf-8")
        calls.append(["-m", f"package.script{i}"] if module else [f"package/script{i}.py"])
    calls[0] += ["--help", "-m", "--", "--compat", "a b", "", "é", "-x=1"]
    calls.append(["-m", "package.missing"] if module else [str(folder / "script0.py")])

    (tmp_path / "runs.py").write_text(RUNS)
    (tmp_path / "calls.json").write_text(json.dumps(calls))
    done = python("runs.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    for call, (status, out, err) in zip(calls, found, strict=True):
        want = python(*call, cwd=tmp_path)
        assert (status, out, err) == (want.returncode, want.stdout, want.stderr), call


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--compat", "stylegan", "x.py"], "'stylegan' is not one of 'nvlabs', 'rosinality', 'basicsr', 'mmcv'"),
        (["--compat", "nvlabs", "missing.py"], "'missing.py' does not exist"),
        (["--compat", "nvlabs", "folder"], "'folder' is a folder"),
        (["--compat", "nvlabs", "--other", "x.py"], "No such option: --other"),
        (["--compat", "rosinality", "folder/y.py"], "path must lead through packages, got op, but op is the module"),
        (["x.py"], "Missing option '--compat'"),
        (["--compat", "nvlabs"], "Missing argument 'SCRIPT'"),
        (["--compat", "nvlabs", "-m"], "Missing argument 'SCRIPT'"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: str) -> None:
    from typer.testing import CliRunner

    from pixfuse._cli.main import app

    (tmp_path / "x.py").write_text("")
    (tmp_path / "folder").mkdir()
    for name in ("y.py", "op.py"):
        (tmp_path / "folder" / name).write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    done = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["run", *args])
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())
