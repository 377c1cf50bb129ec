"""pixfuse run: client scripts as they are, their arguments, exit status and child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")


def pixfuse(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", "pixfuse._cli.main", *args]
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=120)


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
"""


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
    assert done.stdout == "child pixfuse.compat.rosinality\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--compat", "stylegan", "x.py"], "'stylegan' is not one of 'nvlabs', 'rosinality', 'basicsr', 'mmcv'"),
        (["--compat", "nvlabs", "missing.py"], "'missing.py' does not exist"),
        (["x.py"], "Missing option '--compat'"),
        (["--compat", "nvlabs"], "Missing argument 'SCRIPT'"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: str) -> None:
    from typer.testing import CliRunner

    from pixfuse._cli.main import app

    (tmp_path / "x.py").write_text("")
    monkeypatch.chdir(tmp_path)
    done = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["run", *args])
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())
