"""Constants of the Triton kernels: the search, the table, and who reads it. No GPU is needed."""

import json
import math
import types

import pytest
from typer.testing import CliRunner

from pixfuse._cli.main import app
from pixfuse._shared import tuning


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A machine with an sm_90 whose table lies under ``tmp_path``."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "architecture", lambda: "sm_90")
    monkeypatch.setattr(tuning, "CANDIDATES", {})
    return tmp_path


def test_search_keeps_what_is_faster_and_passes_over_what_fails():
    module = types.SimpleNamespace(_A=1, _B=(1, 2))

    def measure():
        if module._A == 3:
            raise RuntimeError("out of registers")
        return {1: 10.0, 2: 5.0}[module._A] + (1.0 if module._B == (1, 2) else 0.99)

    trials = list(tuning.search(module, {"_A": (1, 2, 3), "_B": ((1, 2), (2, 2))}, measure))
    assert module == types.SimpleNamespace(_A=2, _B=(1, 2))  # 1% is noise
    assert [(t.constant, t.value, t.best) for t in trials] == [("_A", 2, True), ("_A", 3, False), ("_B", (2, 2), False)]
    assert trials[1].time == math.inf


def test_search_forgets_plans_made_with_other_constants():
    dropped = []
    plan = types.SimpleNamespace(cache_clear=lambda: dropped.append(1))
    module = types.SimpleNamespace(_A=1, _plan=plan)
    list(tuning.search(module, {"_A": (1, 2)}, lambda: 1.0))
    assert len(dropped) == 3  # before either measurement, and at the end


def test_saved_constants_are_taken(home):
    path = tuning.save({"group_norm": {"_TILE": 4096, "_SHAPE": (2, 256)}})
    assert path == tuning.table_path() == home / "pixfuse" / "tuning.json"
    tuning.save({"bias_act": {"_BLOCK": 1024}})
    assert json.loads(path.read_text())["sm_90"].keys() == {"group_norm", "bias_act"}
    choose = {"_TILE": (2048, 4096), "_SHAPE": ((4, 128), (2, 256)), "_WARPS": (2, 4)}
    assert tuning.tuned("pixfuse.group_norm.gpu", **choose) == (4096, (2, 256), 2)
    assert tuning.CANDIDATES["group_norm"] == choose


def test_other_gpus_and_unknown_values_take_the_defaults(home, monkeypatch):
    tuning.save({"bias_act": {"_BLOCK": 999}})
    assert tuning.tuned("pixfuse.bias_act.gpu", _BLOCK=(2048, 1024)) == (2048,)
    tuning.save({"bias_act": {"_BLOCK": 1024}})
    assert tuning.tuned("pixfuse.bias_act.gpu", _BLOCK=(2048, 1024)) == (1024,)
    monkeypatch.setattr(tuning, "architecture", lambda: "gfx942")
    assert tuning.tuned("pixfuse.bias_act.gpu", _BLOCK=(2048, 1024)) == (2048,)


@pytest.mark.parametrize("text", ["{", "[1]", '{"sm_90": {"bias_act": 3}}'])
def test_a_broken_table_is_named(home, text):
    tuning.table_path().parent.mkdir()
    tuning.table_path().write_text(text)
    with pytest.raises(ValueError, match=r"tuning\.json must be a table that 'pixfuse tune' wrote"):
        tuning.tuned("pixfuse.bias_act.gpu", _BLOCK=(2048, 1024))


def test_command_without_a_gpu(monkeypatch):
    monkeypatch.setattr(tuning, "architecture", lambda: None)
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 1
    assert "there is no GPU here" in result.output
    result = CliRunner().invoke(app, ["tune", "--op", "conv"])
    assert result.exit_code == 2
    assert "--op must be one of" in result.output


def test_every_room_has_candidates_with_its_value_first():
    import importlib

    for room in ("bias_act", "upfirdn2d", "filtered_lrelu", "group_norm", "upsample"):
        module = importlib.import_module(f"pixfuse.{room}.gpu")
        assert len(tuning.CANDIDATES[room]) > 0
        for name, values in tuning.CANDIDATES[room].items():
            assert getattr(module, name) == values[0]
            assert len(set(values)) == len(values) > 1
