"""The other commands: help, doctor, bench and demo."""

import json
import math
import subprocess
import sys

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import pixfuse
from pixfuse._cli import bench, demo, doctor
from pixfuse._cli.main import app
from pixfuse._shared import timing
from pixfuse._shared.timing import BenchRow


def call(*words):
    return CliRunner().invoke(app, list(map(str, words)))


# --- help -----------------------------------------------------------------------------------------------------


def test_help_lists_the_commands():
    result = call("--help")
    assert result.exit_code == 0
    for words in ("doctor", "resize", "demo", "bench", "Start with"):
        assert words in result.output
    assert call().exit_code == 2  # nothing asked: the help, and no success
    assert call("--version").output == f"pixfuse {pixfuse.__version__}\n"


@pytest.mark.parametrize("command", ["doctor", "resize", "demo", "bench"])
def test_every_command_has_help(command):
    result = call(command, "--help")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 8


def test_help_imports_nothing_heavy():
    code = (
        "import sys, torch; before = set(sys.modules); import pixfuse._cli.main; "
        "print(*sorted(m for m in set(sys.modules) - before if m.split('.')[0] in "
        "('matplotlib', 'PIL', 'numpy', 'skimage', 'triton')))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []


def test_without_the_extra():
    """An install without typer gets one sentence."""
    code = "import sys; sys.modules['typer'] = None; import pixfuse._cli.main"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "pixfuse: the command line needs a few more packages: pip install 'pixfuse[cli]'\n"


# --- doctor ---------------------------------------------------------------------------------------------------


def test_doctor_knows_every_public_op():
    functions = {case.function for case in doctor._cases()}
    assert functions == {"bias_act", "filtered_lrelu", "group_norm", "interpolate", "upfirdn2d", "upsample_nearest"}


def test_doctor_is_content():
    result = call("doctor", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "checks are right." in result.output
    assert "wrong" not in result.output


def test_doctor_json_and_a_wrong_op(monkeypatch):
    right = pixfuse.upsample_nearest
    monkeypatch.setattr(pixfuse, "upsample_nearest", lambda x, scale: right(x, scale) * 1.05)
    monkeypatch.setattr(doctor, "_cases", lambda: _only("upsample_nearest", "upfirdn2d"))
    # The truth is right: only what's called outside the definition is bent.
    monkeypatch.setattr(doctor, "by_definition", _Straight(monkeypatch, right))
    result = call("doctor", "--json", "--device", "cpu")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["right"] is False
    assert report["torch"] == torch.__version__
    state = {(row["function"], row["dtype"]): row["right"] for row in report["checks"]}
    assert {key: right for key, right in state.items() if key[0] == "upfirdn2d"} == {
        ("upfirdn2d", dtype): True for dtype in ("float64", "float32", "bfloat16", "float16")
    }
    assert not any(right for key, right in state.items() if key[0] == "upsample_nearest")
    assert {entry["backend"] for entry in report["backends"]} <= {"cpu", "reference"}
    result = call("doctor", "--device", "cpu")
    assert result.exit_code == 1
    assert "WRONG: upsample_nearest float32 on cpu" in " ".join(result.output.split())


_CASES = doctor._cases()


def _only(*functions):
    return [case for case in _CASES if case.function in functions]


class _Straight:
    """``by_definition`` that also takes the bend out of ``upsample_nearest``."""

    def __init__(self, monkeypatch, right):
        self.monkeypatch, self.right, self.definition = monkeypatch, right, doctor.by_definition

    def __call__(self):
        return self

    def __enter__(self):
        self.bent = pixfuse.upsample_nearest
        pixfuse.upsample_nearest = self.right
        self.inner = self.definition()
        self.inner.__enter__()

    def __exit__(self, *error):
        pixfuse.upsample_nearest = self.bent
        self.inner.__exit__(*error)


def test_doctor_without_such_a_device():
    result = call("doctor", "--device", "cuda:9")
    assert result.exit_code == 2
    assert "there is no device 'cuda:9' here" in result.output


def test_doctor_compiles_in_other_processes(monkeypatch):
    """Where there is a GPU; a CPU has nothing to compile, but the processes and their checks are the same."""
    monkeypatch.setattr(doctor.pixfuse, "backend", lambda op, x: "triton" if x.dtype == torch.bfloat16 else "cpu")
    said = []
    doctor.compile_kernels("cpu", said.append)
    assert len(said) == 2 * len(_CASES)
    assert said[-1] == f"compiling kernels for cpu: {len(said) - 1} of {len(said)}"


# --- bench ----------------------------------------------------------------------------------------------------


def _row(**changes):
    x = torch.ones(1000)
    fields = {
        "op": "double",
        "case": "1000",
        "dtype": torch.float32,
        "layout": "contiguous",
        "direction": "forward",
        "ours": lambda: x + x,
        "peers": {"eager": lambda: x * 2},
        "bytes": 8000,
        "check": lambda: None,
    }
    return BenchRow(**{**fields, **changes})


def test_row_is_timed():
    record = timing.run_row(_row(), "cpu", copy_gbps=10.0, rounds=3)
    assert record.status == "ok"
    assert record.ours.p20 <= record.ours.median <= record.ours.p80
    assert record.gbps == pytest.approx(8000 / record.ours.median / 1e6)
    assert record.percent_of_copy == pytest.approx(10 * record.gbps)
    assert record.best_peer == "eager"
    assert record.speedup == pytest.approx(record.peers["eager"].median / record.ours.median)


def test_wrong_row_is_not_timed():
    def check():
        raise AssertionError("error 1 against float64")

    calls = []
    record = timing.run_row(_row(check=check, ours=lambda: calls.append(1)), "cpu", 10.0, rounds=3)
    assert (record.status, record.ours, calls) == ("wrong", None, [])
    assert "error 1 against float64" in record.message


def test_peer_that_raises_is_left_out():
    def broken():
        raise RuntimeError("no such op")

    record = timing.run_row(_row(peers={"eager": lambda: 1, "compile": broken}), "cpu", 10.0, rounds=3)
    assert list(record.peers) == ["eager"]
    assert record.left_out == {"compile": "RuntimeError: no such op"}


def test_rows_of_checks_against_float64():
    x, b = torch.randn(2, 3, 8, 8), torch.randn(3)

    def eager(x, b):
        return torch.relu(x + b[:, None, None])

    def ours(x, b):
        return pixfuse.bias_act(x, b, act="relu", gain=1)

    def wrong(x, b):
        return ours(x, b) * 1.001

    directions = timing.DIRECTIONS
    for row in timing.rows_of("bias_act", "small", "contiguous", (x, b), ours, eager, directions=directions):
        row.check()
        assert row.bytes > 2 * x.numel() * 4
        for call in (row.ours, row.peers["eager"]):
            call()
            call()
    for row in timing.rows_of("bias_act", "small", "contiguous", (x, b), wrong, eager, directions=directions):
        with pytest.raises(AssertionError, match="exceeds"):
            row.check()


def test_bench_writes_table_json_and_html(tmp_path, monkeypatch):
    def check():
        raise AssertionError("off by one")

    rows = [_row(), _row(case="2000"), _row(op="triple", direction="backward", check=check)]
    monkeypatch.setattr(bench, "rows", lambda device, ops: rows)
    monkeypatch.setattr(timing, "steady_allocator", lambda: None)
    monkeypatch.setattr(bench, "steady_allocator", lambda: None)
    files = tmp_path / "r.html", tmp_path / "r.json"
    result = call("bench", "--html", files[0], "--json", files[1], "--rounds", 3)
    assert result.exit_code == 1  # one row is wrong
    assert "NOT TIMED: triple backward 1000 float32 contiguous: AssertionError: off by one" in result.output
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok", "ok", "wrong"]
    assert lines[0]["machine"]["torch"] == torch.__version__
    assert {"device", "triton", "commit", "copy_gbps"} <= set(lines[0]["machine"])
    assert lines[0]["threads"] == 1
    page = files[0].read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "off by one" in page
    monkeypatch.setattr(bench, "rows", lambda device, ops: rows[:2])
    assert call("bench", "--rounds", 3).exit_code == 0


def test_bench_collects_every_room():
    found = bench.benches()
    assert set(found) >= {"bias_act"}
    for module in found.values():
        row = next(iter(module.rows("cpu")))
        assert isinstance(row, BenchRow)


def test_bench_refuses_what_it_can_not_do():
    assert call("bench", "--device", "nowhere").exit_code == 2
    result = call("bench", "--op", "nothing")
    assert result.exit_code == 2
    assert "nothing to time for nothing" in result.output


# --- demo -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_demo_trains_both_networks_alike(tmp_path, layout, monkeypatch):
    monkeypatch.setattr(demo, "CROP", (52, 64, 64, 64))
    monkeypatch.setattr(demo, "PATCH", 32)
    with timing.threads(1):
        result = call("demo", "--steps", 4, "--out", tmp_path, "--layout", layout)
    assert result.exit_code == 0, result.output
    for name in ("before_after.png", "loss.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 250
    for words in ("step time, median", "peak memory of a step", "held-out crop, restored", "pixfuse"):
        assert words in result.output


def test_demo_networks_are_the_same_function():
    torch.manual_seed(0)
    stock = demo.UNet(demo.STOCK)
    torch.nn.init.normal_(stock.leave.weight, std=0.1)
    ours = demo.UNet(demo.PIXFUSE)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(1, 3, 16, 20)
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-4)
    for net in (stock, ours):
        net(x).square().mean().backward()
    for (name, a), b in zip(stock.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_demo_says_when_the_pictures_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    result = call("demo", "--steps", 1, "--out", tmp_path)
    assert result.exit_code == 1
    assert "pip install 'pixfuse[cli]'" in result.output


def test_demo_without_such_a_device(tmp_path):
    result = call("demo", "--device", "nowhere", "--out", tmp_path)
    assert result.exit_code == 1
    assert "pixfuse demo: " in result.output


def test_psnr():
    x = torch.zeros(1, 3, 4, 4)
    assert demo.psnr(x + 0.2, x) == pytest.approx(20)
    assert math.isinf(demo.psnr(x, x))
