"""What the documents show runs: every code block and every command; and the pinned tools agree."""

import doctest
import inspect
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from PIL import Image
from typer.testing import CliRunner

import pixfuse
import pixfuse.array
import pixfuse.nn
import pixfuse.onnx
from pixfuse._cli.main import app
from pixfuse._shared import timing

if sys.version_info < (3, 11):
    pytest.skip("reads pyproject.toml with tomllib", allow_module_level=True)
import tomllib

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")

# Commands that a test can't run inside a test: what runs them instead.
ELSEWHERE = {
    "pip install .": "tests/test_wheel.py",
    "pip install '.[cli]'": "tests/test_wheel.py",
    "pixfuse tune": "tests/test_tuning.py, as it needs a GPU",
    "pre-commit install": "nothing: it changes the checkout's git hooks",
    "cmake -S . -B build/dev -G Ninja && ninja -C build/dev": "pip runs the same CMake project in tests/test_wheel.py",
    ".venv/bin/python -m pytest src/pixfuse/group_norm": "this very suite",
}

# Added to a command so that it takes seconds.
SHORTER = {
    "demo": ["--steps", "2"],
    "doctor": ["--device", "cpu"],
    "bench": ["--op", "bias_act", "--rounds", "1", "--no-compile", "--layout", "contiguous", "--dtype", "float32"],
}


def blocks(language):
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        for number, match in enumerate(re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S)):
            yield pytest.param(match[1], id=f"{name}-{number}")


def commands():
    """Every line of a ``sh`` block and every command in running text, without its comment."""
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        lines = [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        lines += re.findall(r"`((?:pip|make|cmake|pixfuse|pre-commit|\.venv/bin/\w+) [^`]+)`", prose)
        for line in dict.fromkeys(line.split(" #")[0].strip().replace("\n", " ") for line in lines):
            yield pytest.param(line, id=f"{name}-{line}")


@pytest.fixture
def one_process(monkeypatch):
    """What torchrun sets for a single process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # torch.onnx itself
@pytest.mark.parametrize("code", list(blocks("python")))
def test_example(code, one_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(code.strip().splitlines()) <= 12
    exec(compile(code, "example", "exec"), {})


def docstrings():
    """The examples of every public function, class and method."""
    for module in (pixfuse, pixfuse.nn, pixfuse.onnx):
        for name in module.__all__:
            thing = getattr(module, name)
            if not inspect.ismodule(thing):
                yield pytest.param(thing, id=f"{module.__name__}.{name}")
    yield pytest.param(pixfuse.array.on_arrays, id="pixfuse.array")


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # torch.onnx itself
@pytest.mark.parametrize("thing", list(docstrings()))
def test_docstring(thing):
    source = doctest.DocTestParser().get_doctest(thing.__doc__, {}, thing.__name__, None, None)
    assert source.examples
    said = []
    doctest.DocTestRunner().run(source, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("command", list(commands()))
def test_command(command, tmp_path, monkeypatch):
    if command in ELSEWHERE:
        return
    words = shlex.split(command)
    if words[0] == "make":
        if not shutil.which("make"):
            pytest.skip("needs make")
        dry = subprocess.run([*words, "-n", "-C", ROOT], capture_output=True, text=True)
        assert dry.returncode == 0, dry.stderr
        return
    assert words[0] == "pixfuse"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pixfuse._cli.bench.steady_allocator", lambda: None)
    Image.new("RGB", (20, 10), "red").save("cat.png")
    Path("generate.py").write_text("from torch_utils.ops import bias_act, upfirdn2d")
    if words[1] == "run":  # in a process of its own: it installs modules for good
        code = "import sys; from pixfuse._cli.main import main; main()"
        monkeypatch.setenv("PYTHONPATH", str(Path(pixfuse.__file__).parents[1]))
        assert subprocess.run([sys.executable, "-c", code, *words[1:]]).returncode == 0
        return
    with timing.threads(1):
        result = CliRunner().invoke(app, [*words[1:], *SHORTER.get(words[1] if len(words) > 1 else "", [])])
    assert result.exit_code == 0, result.output


def test_every_public_name_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for name in [*pixfuse.__all__, *pixfuse.nn.__all__]:
        assert name in readme, name


def test_links_lead_somewhere():
    for name in (*DOCUMENTS, "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
            assert target.startswith("http") or (ROOT / target).exists(), f"{name}: {target}"


def test_hooks_have_the_versions_of_make_lint():
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["lint"]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    used = set(re.findall(r"additional_dependencies: \[(\S+)\]", hooks))
    assert used
    assert used <= set(pins)


def test_what_the_readme_says_is_tested_there():
    """The files of the table "Works with" are there."""
    named = re.findall(r"`((?:tests|src)/\S+\.py)`", (ROOT / "README.md").read_text())
    assert len(set(named)) >= 9
    for name in named:
        assert (ROOT / name).exists(), name


def test_licence_and_changes():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
