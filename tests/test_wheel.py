"""The wheel: its tag, what is in it, and which symbols its library asks for."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build(folder, *options):
    """A wheel of the tracked files, made as pip makes it, without touching this checkout's build folder."""
    source = folder / "source"
    names = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "src")
    source.mkdir()
    for name in names:
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        path = ROOT / name
        shutil.copytree(path, source / name, ignore=ignore) if path.is_dir() else shutil.copy(path, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), *options, str(source)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not COMPILER:
        pytest.skip("needs a C++ compiler")
    return build(tmp_path_factory.mktemp("wheel"))


def test_one_wheel_serves_every_python(wheel):
    assert re.fullmatch(r"pixfuse-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "pixfuse/_kernels.so" in names
    assert "pixfuse/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert [name for name in names if name.endswith((".cpp", ".h", ".c", ".txt.in"))] == []
    assert {name.split("/")[0] for name in names} == {"pixfuse", wheel.name.split("-py3")[0] + ".dist-info"}
    for room in ("bias_act", "filtered_lrelu", "group_norm", "upfirdn2d", "upsample"):
        for file in ("op.py", "reference.py", "cases.py", f"test_{room}.py"):
            assert f"pixfuse/{room}/{file}" in names


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_library_asks_only_for_the_stable_abi(wheel, tmp_path):
    zipfile.ZipFile(wheel).extract("pixfuse/_kernels.so", tmp_path)
    nm = ["nm", "-D", "--undefined-only", str(tmp_path / "pixfuse/_kernels.so")]
    wanted = [line.split()[-1].split("@")[0] for line in subprocess.check_output(nm, text=True).splitlines()]
    plain = subprocess.run(["c++filt"], input="\n".join(wanted), capture_output=True, text=True).stdout.splitlines()
    assert any(name.startswith("aoti_torch_") for name in wanted)
    assert [name for name in wanted if name.startswith("Py") or name.startswith("_Py")] == []
    assert [name for name in plain if re.match(r"(c10|at|torch)::", name)] == []


@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_library_offers_nothing_of_its_own(wheel, tmp_path):
    zipfile.ZipFile(wheel).extract("pixfuse/_kernels.so", tmp_path)
    strings = (tmp_path / "pixfuse/_kernels.so").read_bytes()
    assert str(ROOT).encode() not in strings, "a path of the machine that built it"


def test_installed_by_the_plain_command(wheel, tmp_path):
    """In an environment of its own that sees this one's torch, from another folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    zipfile.ZipFile(wheel).extractall(site)
    import torch

    (Path(site) / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    code = "import pixfuse, torch; print(pixfuse.__file__, pixfuse.backend('bias_act', torch.zeros(1)))"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{site}/pixfuse/__init__.py", "cpu"]


def test_without_a_compiler(tmp_path):
    wheel = build(tmp_path, "--config-settings=wheel.cmake=false")
    names = zipfile.ZipFile(wheel).namelist()
    assert "pixfuse/bias_act/op.py" in names
    assert [name for name in names if name.endswith((".so", ".cpp", ".h"))] == []
