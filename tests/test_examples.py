"""The examples run, at small size: training StyleGAN2, patching a diffusion U-Net, switching existing projects."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import pixfuse
from pixfuse._shared.timing import threads

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--resolution", "16", "--batch", "4", "--base", "128", "--most", "16", "--device", "cpu"]


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


@pytest.fixture
def stylegan2(monkeypatch):
    """A function that imports a module of examples/stylegan2."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "stylegan2"))
    names = ("data", "losses", "networks", "train")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def environment():
    path = os.pathsep.join([str(Path(pixfuse.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def assert_same(a, b):
    """Checkpoints are equal to the last bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


@pytest.mark.parametrize("half", ["0", "1"])
def test_resumed_training_is_that_without_a_stop(stylegan2, tmp_path, monkeypatch, half):
    train = stylegan2("train")
    monkeypatch.setattr(train, "R1_EVERY", 2)
    monkeypatch.setattr(train, "PL_EVERY", 3)
    run = [*SMALL, "--half", half, "--every", "2"]
    whole = train.main([*run, "--steps", "5", "--out", str(tmp_path / "whole")])
    start = train.main([*run, "--steps", "2", "--out", str(tmp_path / "parts")])
    first = {name: p.clone() for name, p in start.g.named_parameters()}
    parts = train.main([*run, "--steps", "5", "--out", str(tmp_path / "parts"), "--workers", "1"])
    assert (whole.done, start.done, parts.done) == (5, 2, 5)
    saved = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts")]
    assert_same(*saved)
    assert saved[0]["length"] > 0
    for name, p in parts.g.named_parameters():
        assert p.isfinite().all(), name
        assert not torch.equal(p, first[name]), name
    pictures = [(tmp_path / name / "step000005.png").read_bytes() for name in ("whole", "parts")]
    assert pictures[0] == pictures[1]
    with Image.open(tmp_path / "whole" / "step000002.png") as grid:
        assert grid.size == (8 * 16, 4 * 16)


def test_torchrun_trains_one_network_in_two_processes(tmp_path):
    script = f"""
import sys
sys.path.insert(0, {str(EXAMPLES / "stylegan2")!r})
import torch, train
training = train.main(sys.argv[1:])
total = sum(p.double().abs().sum() for net in (training.g, training.d) for p in net.parameters())
print("weights", float(total))
"""
    (tmp_path / "both.py").write_text(script)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "both.py"]
    run += [*SMALL, "--steps", "2", "--out", "out", "--every", "1"]
    done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    totals = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    assert len(totals) == 2
    assert totals[0] == totals[1]  # they saw other pictures and have the same weights
    assert torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["done"] == 2


def test_pictures_of_a_folder(stylegan2, tmp_path):
    data = stylegan2("data")
    Image.new("RGB", (40, 30), "white").save(tmp_path / "a.png")
    Image.new("L", (30, 50), "white").save(tmp_path / "b.JPG")
    pictures = data.Pictures(data.files(tmp_path), 16, 0.5)
    batch = next(data.batches(pictures, 4))
    assert batch.shape == (4, 3, 16, 16)
    torch.testing.assert_close(batch, torch.ones_like(batch))
    with pytest.raises(FileNotFoundError, match="holds no picture"):
        data.files(tmp_path / "none")


def test_processes_get_different_pictures(stylegan2):
    data = stylegan2("data")
    pictures = data.Pictures(data.files(None), 8, 0.4)
    alone = data.batches(pictures, 4)
    shared = [data.batches(pictures, 2, 0, rank, 2) for rank in (0, 1)]
    for _ in range(2):
        assert torch.equal(next(alone), torch.cat([next(s) for s in shared]))


def test_networks_take_odd_settings(stylegan2):
    networks = stylegan2("networks")
    with pytest.raises(ValueError, match="power of 2"):
        networks.Widths(24)
    widths = networks.Widths(16, 64, 16, channels_last=True)
    g, d = networks.Generator(widths, 16).eval(), networks.Discriminator(widths)
    z = torch.randn(3, 16)
    pictures, ws = g(z, truncation=0.5)
    assert torch.equal(pictures, g(z, truncation=0.5)[0])  # fixed noise
    assert pictures.shape == (3, 3, 16, 16)
    assert ws.shape == (3, 6, 16)
    assert d(pictures).shape == (3, 1)
    torch.testing.assert_close(g(z[:1], truncation=0.5)[0], pictures[:1])
