"""pixfuse.compat.install: before and after the client's imports, with and without the peer, and back."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pixfuse
from pixfuse import compat
from pixfuse.compat._peers import PEERS

PEER_PACKAGES = [(name, peer.path) for name, peer in PEERS.items()]
Project = Callable[[dict[str, str]], Path]


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """Every test leaves the import system as it found it; what it imports itself is forgotten."""
    modules, meta_path, path = dict(sys.modules), list(sys.meta_path), list(sys.path)
    yield
    assert not compat._install._installed
    assert sys.meta_path == meta_path
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        if name.partition(".")[0] in ("torch_utils", "op", "basicsr", "mmcv", "client", "models"):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Writes the files of a client project and makes it importable."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        sys.path.insert(0, str(tmp_path))
        importlib.invalidate_caches()
        return tmp_path

    return write


OWN = "def {0}(*args):\n    return 'own'\n"
NVLABS = {
    "torch_utils/__init__.py": "",
    "torch_utils/misc.py": "here = True\n",
    "torch_utils/ops/__init__.py": "",
    "torch_utils/ops/upfirdn2d.py": OWN.format("upfirdn2d"),
    "torch_utils/ops/bias_act.py": OWN.format("bias_act"),
    "torch_utils/ops/extra.py": "from . import upfirdn2d\n",
}
ROSINALITY = {
    "op/__init__.py": "from .fused_act import fused_leaky_relu\nfrom .upfirdn2d import upfirdn2d\n",
    "op/fused_act.py": "raise RuntimeError('no CUDA here')\n",
    "op/upfirdn2d.py": "raise RuntimeError('no CUDA here')\n",
}


# --- no peer --------------------------------------------------------------------------------------------------


def test_nvlabs_without_the_peer() -> None:
    with compat.installed("nvlabs") as report:
        from torch_utils.ops import bias_act, conv2d_gradfix, upfirdn2d

        assert bias_act.bias_act(torch.zeros(1, 2), act="relu").shape == (1, 2)
        assert upfirdn2d.upfirdn2d is compat.nvlabs.upfirdn2d.upfirdn2d
        import torch_utils.ops.fma

        assert torch_utils.ops.fma.fma is compat.nvlabs.fma.fma
        assert conv2d_gradfix is compat.nvlabs.conv2d_gradfix
        assert torch_utils.__path__ is not None
        assert "Stands in" in torch_utils.__doc__
        assert str(report) == "pixfuse.compat: nvlabs is installed as torch_utils.ops"
        with pytest.raises(ModuleNotFoundError, match=r"torch_utils\.misc"):
            importlib.import_module("torch_utils.misc")
    for name in ("torch_utils", "torch_utils.ops", "torch_utils.ops.fma"):
        assert name not in sys.modules
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_rosinality_without_the_peer() -> None:
    with compat.installed("rosinality"):
        from op import FusedLeakyReLU, conv2d_gradfix, fused_leaky_relu, upfirdn2d
        from op.fused_act import FusedLeakyReLU as same

        assert FusedLeakyReLU is same is compat.rosinality.FusedLeakyReLU
        assert upfirdn2d is compat.rosinality.upfirdn2d
        assert fused_leaky_relu is compat.rosinality.fused_leaky_relu
        assert conv2d_gradfix.enabled is True
    assert "op" not in sys.modules


def test_basicsr_without_the_peer() -> None:
    with compat.installed("basicsr"):
        from basicsr.ops.fused_act import FusedLeakyReLU, fused_leaky_relu
        from basicsr.ops.upfirdn2d import upfirdn2d

        assert upfirdn2d is compat.basicsr.upfirdn2d
        assert fused_leaky_relu is compat.basicsr.fused_leaky_relu
        assert FusedLeakyReLU is compat.basicsr.FusedLeakyReLU
    assert "basicsr" not in sys.modules


@pytest.mark.parametrize("real", [False, True])
def test_modules_inside_those_of_basicsr(project: Project, real: bool) -> None:
    if real:
        files = {"basicsr/__init__.py": "", "basicsr/ops/__init__.py": ""}
        for name, function in (("upfirdn2d", "upfirdn2d"), ("fused_act", "fused_leaky_relu")):
            files[f"basicsr/ops/{name}/__init__.py"] = f"from .{name} import {function}\n"
            files[f"basicsr/ops/{name}/{name}.py"] = OWN.format(function)
        project(files)
    with compat.installed("basicsr"):
        from basicsr.ops.fused_act.fused_act import fused_leaky_relu
        from basicsr.ops.upfirdn2d import upfirdn2d
        from basicsr.ops.upfirdn2d.upfirdn2d import upfirdn2d as inner

        assert fused_leaky_relu is compat.basicsr.fused_leaky_relu
        assert upfirdn2d is inner is compat.basicsr.upfirdn2d
    assert not [name for name in sys.modules if name.startswith("basicsr.ops.")]


def test_a_block_that_was_not_entered() -> None:
    block = compat.installed("nvlabs")
    with compat.installed("nvlabs"), pytest.raises(RuntimeError, match="must be entered before it ends"):
        block.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="must be entered before it ends"):
        block.__exit__(None, None, None)


def test_mmcv_without_the_peer() -> None:
    with compat.installed("mmcv"):
        import mmcv.ops
        from mmcv.ops import (
            FusedBiasLeakyReLU,
            bias_act,
            conv2d,
            conv_transpose2d,
            filter2d,
            filtered_lrelu,
            upsample2d,
        )
        from mmcv.ops.conv2d_gradfix import no_weight_gradients
        from mmcv.ops.upfirdn2d import downsample2d

        assert mmcv.ops.upfirdn2d is compat.mmcv.upfirdn2d
        assert downsample2d is compat.mmcv.downsample2d
        assert no_weight_gradients is compat.nvlabs.conv2d_gradfix.no_weight_gradients
        assert not hasattr(mmcv.ops, "downsample2d")
        assert not hasattr(mmcv.ops, "no_weight_gradients")
        for value in (FusedBiasLeakyReLU, bias_act, conv2d, conv_transpose2d, filter2d, filtered_lrelu, upsample2d):
            assert value.__module__.startswith("pixfuse.")
    assert "mmcv" not in sys.modules


# --- the peer is there ----------------------------------------------------------------------------------------


def test_real_packages_stay(project: Project) -> None:
    root = project(NVLABS)
    with compat.installed("nvlabs"):
        import torch_utils.misc
        from torch_utils.ops import extra, upfirdn2d

        assert torch_utils.misc.here
        assert Path(torch_utils.__file__).is_relative_to(root)
        assert Path(torch_utils.ops.__file__).is_relative_to(root)
        assert upfirdn2d is compat.nvlabs.upfirdn2d
        assert extra.upfirdn2d is upfirdn2d
    assert "torch_utils" in sys.modules
    assert "torch_utils.ops" not in sys.modules
    assert not hasattr(torch_utils, "ops")
    from torch_utils.ops import upfirdn2d

    assert upfirdn2d.upfirdn2d() == "own"


def test_the_clients_path_may_come_later(project: Project) -> None:
    compat.install("nvlabs")
    try:
        root = project(NVLABS)
        import torch_utils.misc

        assert Path(torch_utils.misc.__file__).is_relative_to(root)
    finally:
        compat.uninstall("nvlabs")


def test_a_package_that_compiles_at_import_does_not(project: Project) -> None:
    project(ROSINALITY)
    with compat.installed("rosinality"):
        from op import conv2d_gradfix, upfirdn2d

        assert upfirdn2d is compat.rosinality.upfirdn2d
        assert conv2d_gradfix is compat.rosinality.conv2d_gradfix
    with pytest.raises(RuntimeError, match="no CUDA here"):
        importlib.import_module("op")


def test_a_package_that_does_not_import(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    """As mmcv-lite, whose ops need a compiled module."""
    project({"mmcv/__init__.py": "version = 2\n", "mmcv/ops/__init__.py": "from .. import _ext\n"})
    with caplog.at_level(logging.WARNING, "pixfuse"), compat.installed("mmcv"):
        import mmcv
        from mmcv.ops import upfirdn2d

        assert mmcv.version == 2
        assert upfirdn2d is compat.mmcv.upfirdn2d
    assert "mmcv.ops does not import, so only pixfuse's ops are there" in caplog.text
    with pytest.raises(ImportError):
        importlib.import_module("mmcv.ops")


def test_other_ops_of_the_peer_stay(project: Project) -> None:
    project(
        {
            "mmcv/__init__.py": "",
            "mmcv/ops/__init__.py": "from .nms import nms\nfrom .upfirdn2d import upfirdn2d\n",
            "mmcv/ops/nms.py": OWN.format("nms"),
            "mmcv/ops/upfirdn2d.py": OWN.format("upfirdn2d"),
        }
    )
    with compat.installed("mmcv"):
        from mmcv.ops import bias_act, nms, upfirdn2d

        assert nms() == "own"
        assert upfirdn2d is compat.mmcv.upfirdn2d
        assert bias_act is compat.mmcv.bias_act
    from mmcv.ops import nms, upfirdn2d

    assert nms() == upfirdn2d() == "own"


def test_namespace_packages(project: Project) -> None:
    project({"torch_utils/ops/extra.py": "here = True\n"})
    with compat.installed("nvlabs"):
        from torch_utils.ops import extra, fma

        assert extra.here
        assert fma is compat.nvlabs.fma


# --- the client came first ------------------------------------------------------------------------------------


def _snapshot() -> dict[str, Any]:
    state: dict[str, Any] = dict(sys.modules)
    for name in ("torch_utils", "torch_utils.ops", "torch_utils.ops.upfirdn2d", "client"):
        state.update({f"{name}:{k}": v for k, v in vars(sys.modules[name]).items()})
    return state


CLIENT = (
    "import torch_utils.ops.bias_act\nfrom torch_utils.ops import upfirdn2d\nfrom torch_utils.ops.upfirdn2d import "
    "upfirdn2d as function\n"
)


def test_after_the_client_imported_it(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    project({**NVLABS, "client.py": CLIENT})
    import client

    importlib.import_module("pixfuse.compat.nvlabs")
    before = _snapshot()
    with caplog.at_level(logging.WARNING, "pixfuse"), compat.installed("nvlabs") as report:
        from torch_utils.ops import upfirdn2d

        assert upfirdn2d is compat.nvlabs.upfirdn2d
        assert client.torch_utils.ops.bias_act is compat.nvlabs.bias_act
        assert importlib.import_module("torch_utils.ops.fma") is compat.nvlabs.fma
        assert client.function() == "own"
        assert report.replaced == ["torch_utils.ops.upfirdn2d", "torch_utils.ops.bias_act"]
        assert sorted(report.held) == ["client.function", "client.upfirdn2d"]
        assert "still the peer's own, held from before: client." in str(report)
        assert "pass rebind=True" in caplog.text
    after = _snapshot()
    assert after.keys() == before.keys()
    assert all(after[k] is before[k] for k in before)


def test_rebind(project: Project) -> None:
    project({**NVLABS, "client.py": CLIENT})
    import client

    importlib.import_module("pixfuse.compat.nvlabs")
    before = _snapshot()
    with compat.installed("nvlabs", rebind=True) as report:
        assert client.upfirdn2d is compat.nvlabs.upfirdn2d
        assert client.function is compat.nvlabs.upfirdn2d.upfirdn2d
        assert "changed in other modules: client." in str(report)
    after = _snapshot()
    assert all(after[k] is before[k] for k in before)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [k for k in before.keys() | after.keys() if k not in before or after.get(k) is not before[k]]


DEEP = {**NVLABS, "torch_utils/ops/deep/__init__.py": "from .. import bias_act\n", "client.py": CLIENT}


def _meddle() -> None:
    """What a client may do with the real packages while the drop-ins are installed."""
    import torch_utils.ops.deep
    from torch_utils.ops import extra

    assert torch_utils.ops.deep.bias_act is compat.nvlabs.bias_act
    for name in ("torch_utils.ops", "torch_utils", "torch_utils.ops.extra"):
        importlib.reload(sys.modules[name])
    assert extra.upfirdn2d is compat.nvlabs.upfirdn2d
    for name in ("torch_utils.ops.upfirdn2d", "torch_utils.ops.extra", "torch_utils.ops", "torch_utils.ops.fma"):
        del sys.modules[name]
        importlib.import_module(name)
    assert importlib.reload(sys.modules["torch_utils.ops"]).bias_act is compat.nvlabs.bias_act
    assert sys.modules["torch_utils.ops.upfirdn2d"] is compat.nvlabs.upfirdn2d
    assert compat.nvlabs.upfirdn2d.__spec__.name == "pixfuse.compat.nvlabs.upfirdn2d"


def test_reloads_and_imports_in_between_leave_nothing(project: Project) -> None:
    project(DEEP)
    importlib.import_module("client")
    extra = importlib.import_module("torch_utils.ops.extra")
    importlib.import_module("pixfuse.compat.nvlabs")
    before = _snapshot()
    with compat.installed("nvlabs"):
        _meddle()
    after = _snapshot()
    # reload itself makes these anew
    new = {f"torch_utils:{name}" for name in ("__spec__", "__loader__", "__cached__", "__file__", "__path__")}
    new |= {f"torch_utils.ops:{name}" for name in ("__cached__", "__file__", "__path__")}
    assert set(_changed(before, after)) <= new
    import torch_utils.ops.extra

    assert torch_utils.ops.extra is extra
    assert extra.upfirdn2d.upfirdn2d() == "own"


def test_packages_first_imported_in_between_leave_nothing(project: Project) -> None:
    project(DEEP)
    with compat.installed("nvlabs"):
        _meddle()
    assert [name for name in sys.modules if name.startswith("torch_utils.")] == []
    import torch_utils.ops.deep  # all of it their own again, attributes of the packages too
    import torch_utils.ops.extra

    assert torch_utils.ops.deep.bias_act.bias_act() == torch_utils.ops.extra.upfirdn2d.upfirdn2d() == "own"


def test_reload_of_a_namespace_and_a_name_of_the_parents_own(project: Project) -> None:
    project({"models/__init__.py": "op = 3\n", "torch_utils/ops/fma.py": ""})
    package = importlib.import_module("torch_utils.ops")
    with compat.installed("nvlabs"), compat.installed("rosinality", "models.op"):
        importlib.reload(package)
        import models
    assert package.__doc__ is None
    assert models.op == 3


def test_reload_of_a_module_of_ours() -> None:
    with compat.installed("rosinality"):
        import op.fused_act

        assert importlib.reload(op.fused_act) is op.fused_act
        assert op.fused_act.FusedLeakyReLU is compat.rosinality.FusedLeakyReLU


def test_a_blocked_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules is how tests take a package away."""
    monkeypatch.setitem(sys.modules, "torch_utils", None)
    monkeypatch.setitem(sys.modules, "torch_utils.ops", None)
    with compat.installed("nvlabs"):
        from torch_utils.ops import fma

        assert fma is compat.nvlabs.fma
    assert sys.modules["torch_utils"] is sys.modules["torch_utils.ops"] is None


def test_rebind_later(project: Project) -> None:
    project({**NVLABS, "client.py": CLIENT})
    import client

    own = client.upfirdn2d
    with compat.installed("nvlabs") as report:
        assert client.upfirdn2d is own
        with compat.installed("nvlabs", rebind=True) as same:
            assert same is report
            assert report.rebound
        assert sorted(report.held) == ["client.function", "client.upfirdn2d"]
        assert client.upfirdn2d is compat.nvlabs.upfirdn2d
        client.function = None  # the client's own doing stays
    assert client.upfirdn2d is own
    assert client.function is None


def test_functions_of_the_package_itself(project: Project) -> None:
    project({"op/__init__.py": OWN.format("upfirdn2d"), "client.py": "from op import upfirdn2d\nimport op\n"})
    import client
    import op

    own = op.upfirdn2d
    with compat.installed("rosinality") as report:
        assert client.op.upfirdn2d is compat.rosinality.upfirdn2d
        assert report.held == ["client.upfirdn2d"]
    assert op.upfirdn2d is own
    assert not hasattr(op, "FusedLeakyReLU")
    assert not hasattr(op, "conv2d_gradfix")


# --- bookkeeping ----------------------------------------------------------------------------------------------


def test_twice_and_nested() -> None:
    with compat.installed("nvlabs") as first:
        with compat.installed("nvlabs") as second:
            assert second is first
        import torch_utils.ops

        assert torch_utils.ops.fma is compat.nvlabs.fma
    assert "torch_utils" not in sys.modules
    assert compat.install("nvlabs") is compat.install("nvlabs")
    with compat.installed("nvlabs"):
        pass
    importlib.import_module("torch_utils.ops.fma")
    compat.uninstall("nvlabs")
    assert "torch_utils" not in sys.modules


def test_install_and_blocks_that_overlap() -> None:
    block = compat.installed("nvlabs")
    with block, block:
        report = compat.install("nvlabs")
        compat.uninstall("nvlabs")
        with pytest.raises(ValueError, match=r"got nvlabs as torch_utils\.ops \(installed: nothing is\)"):
            compat.uninstall("nvlabs")
        importlib.import_module("torch_utils.ops.fma")
        compat.install("nvlabs")
    with block as other:
        assert other is report
    importlib.import_module("torch_utils.ops.fma")
    with block:
        compat.uninstall("nvlabs")
        importlib.import_module("torch_utils.ops.fma")
    assert "torch_utils" not in sys.modules

    @block
    def client() -> Any:
        return importlib.import_module("torch_utils.ops.fma")

    assert client() is client() is compat.nvlabs.fma
    assert "torch_utils" not in sys.modules


@pytest.mark.parametrize("real", [False, True])
def test_threads(project: Project, real: bool) -> None:
    """Blocks of 8 threads, with install and uninstall in between: nobody misses a module, and nothing is left."""
    if real:
        project({"mmcv/__init__.py": "", "mmcv/ops/__init__.py": "", "mmcv/ops/nms.py": "here = True\n"})
        importlib.import_module("mmcv")
    errors = []

    def work(number: int) -> None:
        try:
            for i in range(25):
                with compat.installed("mmcv", None if (number + i) % 3 else "models.ops"):
                    ops = importlib.import_module("mmcv.ops" if (number + i) % 3 else "models.ops")
                    assert ops.bias_act is compat.mmcv.bias_act
                if number == 0:
                    compat.install("mmcv")
                    importlib.import_module("mmcv.ops.upfirdn2d")
                    compat.uninstall("mmcv")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert "mmcv.ops" not in sys.modules
    assert ("mmcv" in sys.modules) == real
    assert not real or not hasattr(sys.modules["mmcv"], "ops")
    assert not [name for name in sys.modules if name.partition(".")[0] == "models"]


def test_several_peers_and_an_exception() -> None:
    def client() -> None:
        with compat.installed("nvlabs"), compat.installed("mmcv"):
            importlib.import_module("mmcv.ops")
            importlib.import_module("torch_utils.ops")
            raise KeyError

    with pytest.raises(KeyError):
        client()
    assert "mmcv" not in sys.modules
    assert "torch_utils" not in sys.modules


def test_a_path_of_ones_own(project: Project) -> None:
    project({"models/__init__.py": "", "models/stylegan2/__init__.py": "here = True\n"})
    with compat.installed("rosinality", "models.stylegan2.op"):
        from models.stylegan2 import here
        from models.stylegan2.op import FusedLeakyReLU, upfirdn2d

        assert here
        assert upfirdn2d is compat.rosinality.upfirdn2d
        assert FusedLeakyReLU is compat.rosinality.FusedLeakyReLU
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("models.stylegan2.op")


def test_refusals(project: Project) -> None:
    with pytest.raises(ValueError, match="name must be one of nvlabs, rosinality, basicsr, mmcv, got 'stylegan'"):
        compat.install("stylegan")
    with pytest.raises(TypeError, match=r"install: name must be one of .*, got 3"):
        compat.install(3)  # type: ignore[arg-type]
    for name, error in (("stylegan", ValueError), ("", ValueError), (["nvlabs"], TypeError), (None, TypeError)):
        for verb in (compat.install, compat.installed, compat.uninstall):
            with pytest.raises(error, match="install: name must be one of nvlabs, rosinality, basicsr, mmcv, got"):
                verb(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"uninstall: name must be that of an installed peer, got mmcv as mmcv\.ops"):
        compat.uninstall("mmcv")
    with pytest.raises(ValueError, match=r"install: path must be None or an import path such as .*, got 'a b'"):
        compat.install("nvlabs", "a b")
    with pytest.raises(TypeError, match="install: path must be None or an import path"):
        compat.install("nvlabs", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="install: rebind must be True or False, got 1"):
        compat.install("nvlabs", rebind=1)  # type: ignore[arg-type]
    with (
        compat.installed("nvlabs", "models.op"),
        pytest.raises(ValueError, match=r"path must be apart from what is installed, got models\.op, but nvlabs is"),
    ):
        compat.install("mmcv", "models.op")
    project({"op.py": "something = 'else'\n"})
    wrong_root = r"install: path must lead through packages, got op, but op is the module .*op\.py"
    with pytest.raises(ValueError, match=wrong_root):
        compat.install("rosinality")
    importlib.import_module("op")
    with pytest.raises(ValueError, match=wrong_root):
        compat.install("rosinality")


@pytest.mark.parametrize("path", ["", "a..b", ".a", "1a", "a b", "class.op", "models.if"])
def test_paths_that_cannot_be_imported(path: str) -> None:
    with pytest.raises(ValueError, match=r"install: path must be None or an import path such as 'models\.op', got"):
        compat.install("nvlabs", path)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("json", "be that of a copy of .* ops, or be free, got json, which has none of upfirdn2d"),
        ("torch", "be that of a copy of"),
        ("torch.nn", "be that of a copy of"),
        ("numpy.linalg", "be that of a copy of"),
        ("xml.dom", "be that of a copy of"),  # not imported
        ("json.decoder", r"lead through packages, got json\.decoder, but json\.decoder is the module .*decoder\.py"),
        ("torch.ops", r"lead through packages, got torch\.ops"),
        (
            "torch.nn.functional.op",
            r"lead .*, got torch\.nn\.functional\.op, but torch\.nn\.functional is",
        ),
        ("os.path", "lead through packages"),
        ("sys", "lead through packages"),
        ("__main__.op", "lead through packages"),
        ("pixfuse", "lie outside of pixfuse, got 'pixfuse'"),
        ("pixfuse.upfirdn2d", "lie outside of pixfuse"),
        ("pixfuse.op", "lie outside of pixfuse"),
    ],
)
def test_paths_of_something_else(name: str, path: str, match: str) -> None:
    loaded = set(sys.modules)
    with pytest.raises(ValueError, match=f"install: path must {match}"):
        compat.install(name, path)
    assert {n for n in set(sys.modules) - loaded if not n.startswith("pixfuse.")} == set()  # looked at, not imported


def test_paths_in_each_other() -> None:
    with compat.installed("rosinality", "models"):
        for path in ("models", "models.op", "models.upfirdn2d"):
            with pytest.raises(ValueError, match=r"apart from .*, got .*, but rosinality is installed as models"):
                compat.install("nvlabs", path)
    with compat.installed("rosinality", "models.op"):
        with pytest.raises(ValueError, match="apart from what is installed"):
            compat.install("nvlabs", "models")
        with compat.installed("nvlabs", "models.ops"):
            importlib.import_module("models.op.fused_act")
            importlib.import_module("models.ops.fma")
        assert importlib.import_module("models.op.upfirdn2d").upfirdn2d is compat.rosinality.upfirdn2d
        import models

        assert not hasattr(models, "ops")
    assert "models" not in sys.modules


COPIES = {
    "a package with one of the modules": {"models/sub/op/upfirdn2d.py": OWN.format("upfirdn2d")},
    "in packages that compile when imported": {
        "models/__init__.py": "raise RuntimeError\n",
        "models/sub/__init__.py": "",
        "models/sub/op/__init__.py": "raise RuntimeError\n",
        "models/sub/op/fused_act.py": "",
    },
    "a function of the package itself": {"models/sub/op/__init__.py": OWN.format("upfirdn2d")},
    "nothing in a namespace": {"models/sub/other.py": ""},
}


@pytest.mark.parametrize("files", COPIES.values(), ids=COPIES)
def test_paths_of_copies(project: Project, files: dict[str, str]) -> None:
    project(files)
    with compat.installed("rosinality", "models.sub.op"):
        if "models/__init__.py" not in files:
            from models.sub.op import FusedLeakyReLU

            assert FusedLeakyReLU is compat.rosinality.FusedLeakyReLU


def test_a_package_of_the_clients_own_is_no_copy(project: Project) -> None:
    project({"models/op/__init__.py": "def conv2d():\n    pass\n", "models/op/nms.py": ""})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"got models\.op, which has none of upfirdn2d, fused_act, conv2d_gradfix"):
            compat.install("rosinality", "models.op")
        importlib.import_module("models.op")


@pytest.mark.parametrize(("name", "path"), PEER_PACKAGES)
def test_pixfuse_itself_stays(name: str, path: str) -> None:
    before = dict(vars(pixfuse))
    with compat.installed(name):
        importlib.import_module(path)
    assert all(vars(pixfuse)[k] is v for k, v in before.items())
    assert getattr(compat, name).__name__ == f"pixfuse.compat.{name}"
    assert name in dir(compat)
    with pytest.raises(AttributeError, match="stylegan"):
        _ = compat.stylegan
