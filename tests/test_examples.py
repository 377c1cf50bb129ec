"""The examples run, at small size: training StyleGAN2, patching a diffusion U-Net, switching existing projects."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pixfuse.compat
from pixfuse._shared.library import by_definition
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("half", ["0", "1"])
def test_graphs_train_the_same_network_on_gpus(stylegan2, tmp_path, monkeypatch, half):
    train = stylegan2("train")
    monkeypatch.setattr(train, "R1_EVERY", 2)
    monkeypatch.setattr(train, "PL_EVERY", 3)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    run = [*SMALL, "--half", half, "--every", "4", "--device", "cuda", "--channels-last"]
    saved = []
    for name, steps, options in (("eager", 9, []), ("graphs", 4, ["--graphs"]), ("graphs", 9, ["--graphs"])):
        train.main([*run, "--steps", str(steps), "--out", str(tmp_path / name), *options])
        saved.append(torch.load(tmp_path / name / "checkpoint.pt", weights_only=True))
    assert_same(saved[0], saved[2])
    assert saved[2]["done"] == 9


def test_graphs_are_for_one_process_on_a_gpu(stylegan2, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        stylegan2("train").main([*SMALL, "--graphs", "--out", str(tmp_path / "out")])
    assert capsys.readouterr().err == "train.py: argument --graphs: must be for one process on a GPU, got cpu\n"


def documented(first, name):
    """The arguments of the commands in examples/README.md that start with ``first`` and run the script ``name``."""
    block = "".join(re.findall(r"^```sh\n(.*?)^```", (EXAMPLES / "README.md").read_text(), re.M | re.S))
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert all(words[0] in ("python", "torchrun", "pixfuse") for words in lines)
    found = [words for words in lines if words[0] == first and any(w.endswith(name) for w in words)]
    assert found
    return found


def pictures_in(folder):
    folder.mkdir()
    for i, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (30 + i, 24), colour).save(folder / f"{i}.png")


def test_training_commands_of_the_readme(stylegan2, tmp_path, monkeypatch):
    train = stylegan2("train")
    monkeypatch.chdir(tmp_path)
    pictures_in(tmp_path / "pictures")
    for words in documented("python", "train.py"):
        training = train.main([*words[2:], *SMALL, "--steps", "1"])
        assert (training.args.out / "checkpoint.pt").exists()


def test_torchrun_command_of_the_readme_trains_one_network_in_two_processes(tmp_path):
    script = f"""
import sys
sys.path.insert(0, {str(EXAMPLES / "stylegan2")!r})
import train
training = train.main(sys.argv[1:])
total = sum(p.double().abs().sum() for net in (training.g, training.d) for p in net.parameters())
print("weights", float(total.detach()))
"""
    (tmp_path / "both.py").write_text(script)
    pictures_in(tmp_path / "pictures")
    ((_, *words),) = documented("torchrun", "train.py")
    words[words.index("examples/stylegan2/train.py")] = "both.py"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words, *SMALL, "--steps", "2"]
    done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Warning" not in done.stderr
    totals = [line for line in done.stdout.splitlines() if line.startswith("weights")]
    assert len(totals) == 2
    assert totals[0] == totals[1]  # they saw other pictures and have the same weights
    assert torch.load(tmp_path / "faces" / "checkpoint.pt", weights_only=True)["done"] == 2


def test_resumed_training_in_three_processes_is_that_without_a_stop(tmp_path):
    script = f"""
import contextlib, sys
sys.path.insert(0, {str(EXAMPLES / "stylegan2")!r})
import torch, train
train.PL_EVERY, train.R1_EVERY = 2, 3
with train.processes(torch.device("cpu")) as place:
    train.processes = lambda device: contextlib.nullcontext(place)
    for out, steps in (("whole", "8"), ("parts", "4"), ("parts", "8")):
        train.main([*sys.argv[1:], "--out", out, "--steps", steps])
        torch.distributed.barrier()
"""
    (tmp_path / "both.py").write_text(script)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "both.py", *SMALL]
    done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    saved = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "parts")]
    assert_same(*saved)
    assert saved[0]["length"] > 0


REFUSED = {
    "--gamma": (["-1", "nan", "x"], "must be a number of at least 0"),
    "--rate": (["-0.1", "inf"], "must be a number of at least 0"),
    "--zoom": (["3", "-1"], "must be a number from 0 to 1"),
    "--resolution": (["24", "33", "4", "-8", "64.0"], "must be a power of 2 from 8 to 4096"),
    "--steps": (["-1", "0", "1e3"], "must be a whole number of at least 1"),
    "--batch": (["0"], "must be a whole number of at least 1"),
    "--every": (["0"], "must be a whole number of at least 1"),
    "--most": (["0"], "must be a whole number of at least 1"),
    "--base": (["0"], "must be a whole number of at least 1"),
    "--half": (["-1"], "must be a whole number of at least 0"),
    "--workers": (["-1"], "must be a whole number of at least 0"),
    "--seed": (["-1", "4294967296"], "must be a whole number from 0 to 4294967295"),
    "--device": (["cuda:99", "meta", "gpu"], "must be a device of this machine"),
    "--data": (["0.png", "missing"], "must be a folder"),
    "--out": (["0.png"], "must be a folder"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_training_refuses_in_one_sentence(stylegan2, tmp_path, monkeypatch, capsys, option):
    train = stylegan2("train")
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (9, 9)).save("0.png")
    values, words = REFUSED[option]
    for value in values:
        with pytest.raises(SystemExit) as stop:
            train.main([*SMALL, "--out", "out", option, value])
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"train.py: argument {option}: {words}, got {value!r}\n"
    assert not (tmp_path / "out").exists()


def refused(train, *arguments):
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, "--steps", "1", *arguments])
    return stop.value.code  # words, printed with status 1


def test_training_refuses_pictures_in_one_sentence(stylegan2, tmp_path):
    train = stylegan2("train")
    data, out = tmp_path / "data", tmp_path / "out"
    (data / "folder.png").mkdir(parents=True)
    run = ["--data", str(data), "--out", str(out)]
    assert refused(train, *run) == f"train.py: {data} holds no picture (.png, .jpg, .jpeg, .webp, .bmp)"
    (data / "a.jpg").write_text("no picture")
    assert refused(train, *run).startswith(
        f"train.py: {data / 'a.jpg'} is no picture that can be read: cannot identify"
    )
    assert not out.exists()
    pictures = torch.randint(256, (40, 50, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(pictures.numpy()).save(data / "a.jpg")
    whole = (data / "a.jpg").read_bytes()
    (data / "a.jpg").write_bytes(whole[: len(whole) // 2])  # is seen when it is decoded
    for workers in ("0", "1"):
        words = refused(train, *run, "--workers", workers)
        assert f"{data / 'a.jpg'} is no picture that can be read: image file is truncated" in words
        assert "\n" not in words


def test_training_goes_on_only_from_its_own_checkpoints(stylegan2, tmp_path):
    train = stylegan2("train")
    out = ["--out", str(tmp_path)]
    first = train.main([*SMALL, "--steps", "1", *out])
    checkpoint = tmp_path / "checkpoint.pt"
    before = checkpoint.read_bytes()
    for option, was, now in (
        ("--seed", 0, 1),
        ("--rate", 0.002, 0.1),
        ("--gamma", first.gamma, 0.0),
        ("--zoom", 0.4, 0.0),
        ("--resolution", 16, 8),
        ("--base", 128, 64),
        ("--most", 16, 8),
        ("--half", 0, 1),
        ("--batch", 4, 8),
    ):
        same = ["--gamma", str(first.gamma)]
        words = refused(train, *same, *out, option, str(now))
        assert words.startswith(f"train.py: {checkpoint} was trained with {option} {was}, not {option} {now}; name")
    assert "with --channels-last False, not --channels-last True; name" in refused(train, *out, "--channels-last")
    pictures_in(tmp_path / "pictures")
    assert "--data of 6 pictures (" in refused(train, *out, "--zoom", "0.4", "--data", str(tmp_path / "pictures"))
    first.settings["processes"] = 2
    with pytest.raises(OSError, match="with processes 1, not processes 2; name"):
        first.load(checkpoint)
    assert checkpoint.read_bytes() == before
    assert list(tmp_path.glob("*.new")) == []
    other, tampered = tmp_path / "other.pt", torch.load(checkpoint, weights_only=True)
    torch.save(torch.nn.Linear(2, 2).state_dict(), other)
    foreign = other.read_bytes()
    torch.save(tampered | {"g": {}}, other)
    for content in (b"", b"hello", before[:5000], foreign, other.read_bytes()):
        checkpoint.write_bytes(content)
        words = refused(train, *out)
        assert words.startswith(f"train.py: {checkpoint} is no checkpoint of this program (")
        assert "\n" not in words
    checkpoint.unlink()
    checkpoint.mkdir()
    assert "is no checkpoint of this program (IsADirectoryError" in refused(train, *out)


@pytest.mark.parametrize("name", ["checkpoint", "step000001"])
@pytest.mark.parametrize("full", [True, False])
def test_what_cannot_be_written_is_said_in_one_sentence(stylegan2, tmp_path, name, full):
    train, new = stylegan2("train"), tmp_path / f"{name}.new"
    if full:
        new.symlink_to("/dev/full")
    else:
        new.mkdir()
    words = refused(train, "--out", str(tmp_path))
    assert re.match(rf"train\.py: {re.escape(str(tmp_path / name))}\.(pt|png) can't be written: ", words)
    assert ("No space left on device" if full else "Is a directory") in words
    assert "\n" not in words
    assert not new.is_file()
    assert not new.is_symlink()
    assert not (tmp_path / "checkpoint.pt").exists()


def test_interrupted_imports(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    script = str(EXAMPLES / "stylegan2" / "train.py")
    code = f"import runpy; runpy.run_path({script!r}, run_name='__main__')"
    both = os.pathsep.join([str(tmp_path), str(Path(script).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment() | {"PYTHONPATH": both}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_gamma_of_zero_leaves_r1_out(stylegan2, tmp_path, monkeypatch):
    train = stylegan2("train")
    monkeypatch.setattr(train.losses, "r1_penalty", None)
    assert train.main([*SMALL, "--steps", "1", "--gamma", "0", "--out", str(tmp_path)]).gamma == 0
    with pytest.raises(TypeError):
        train.main([*SMALL, "--steps", "1", "--out", str(tmp_path / "other")])


def test_interrupted_training_leaves_its_last_checkpoint(stylegan2, tmp_path):
    script, checkpoint = EXAMPLES / "stylegan2" / "train.py", tmp_path / "checkpoint.pt"
    run = [sys.executable, str(script), *SMALL, "--every", "1", "--out", str(tmp_path), "--workers", "1"]
    process = subprocess.Popen(
        run,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
    )
    for _ in range(600):
        if checkpoint.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to workers too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "train.py: stopped; the same command goes on from the last checkpoint\n"
    done = torch.load(checkpoint, weights_only=True)["done"]
    assert f"from step {done}" not in out
    after = stylegan2("train").main([*SMALL, "--every", "1", "--steps", str(done + 1), "--out", str(tmp_path)])
    assert after.done == done + 1


def test_pictures_of_a_folder(stylegan2, tmp_path):
    data = stylegan2("data")
    Image.new("RGB", (40, 30), "white").save(tmp_path / "a.png")
    Image.new("L", (30, 50), "white").save(tmp_path / "b.JPG")
    pictures = data.Pictures(data.files(tmp_path), 16, 0.5)
    batch = next(data.batches(pictures, 4))
    assert batch.shape == (4, 3, 16, 16)
    torch.testing.assert_close(batch, torch.ones_like(batch))
    smallest = data.Pictures([tmp_path / "a.png"], 16, 0.0)
    assert all(smallest[i].shape == (3, 16, 16) for i in range(50))


def test_16_bit_greyscale_pictures_keep_their_greys(stylegan2, tmp_path):
    data = stylegan2("data")
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16) + np.arange(16, dtype=np.uint16)
    wanted = torch.from_numpy((values >> 8).astype(np.uint8)).expand(3, 16, 16)
    swapped = Image.frombytes("I;16B", (16, 16), values.astype(">u2").tobytes())
    for name, kind, picture in (
        ("a.png", "png", Image.fromarray(values)),
        ("b.png", "tiff", swapped),  # Pillow goes by what is in a file
        ("c.png", "tiff", Image.fromarray(values.astype(np.int32))),
    ):
        picture.save(tmp_path / name, kind)
    found = data.files(tmp_path)
    for path, mode in zip(found, ("I;16", "I;16B", "I"), strict=True):
        with Image.open(path) as picture:
            assert picture.mode == mode
        assert torch.equal(data.load(path), wanted)
    Image.fromarray(values.astype(np.int32) * 2).save(tmp_path / "c.png", "tiff")
    data.load.cache_clear()
    with pytest.raises(OSError, match=r"c\.png is no picture that can be read: its pixels have more than 16 bits"):
        data.load(found[2])
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "d.png", "tiff")
    with pytest.raises(OSError, match=r"d\.png is no picture that can be read: its pixels are floats"):
        data.files(tmp_path)


@pytest.mark.parametrize("side", [1, 20, 50, 300])
def test_pictures_are_told_apart_by_their_bytes(stylegan2, tmp_path, side):
    """Also where names and sizes are the same."""
    data = stylegan2("data")
    found = {}
    for seed in (0, 1, 0):
        pixels = torch.randint(
            256, (2, side, side, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
        )
        for i in range(2):
            Image.fromarray(pixels[i].numpy()).save(tmp_path / f"{i}.bmp")
        words = data.contents(data.files(tmp_path))
        assert found.setdefault(seed, words) == words
    assert len(set(found.values())) == 2
    (tmp_path / "1.bmp").rename(tmp_path / "2.bmp")
    assert data.contents(data.files(tmp_path)) not in found.values()


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


@pytest.fixture
def benchmark(stylegan2, monkeypatch):
    """benchmarks/stylegan2_config_e.py, on fresh modules of the example."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # it adds to it
    path = EXAMPLES.parent / "benchmarks" / "stylegan2_config_e.py"
    spec = importlib.util.spec_from_file_location("stylegan2_config_e", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep_gradients(net, found):
    found += [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_benchmark_compares_the_same_steps(benchmark, channels_last):
    """The plain compositions that StyleGAN2's steps are timed on give the losses and gradients of pixfuse's."""
    found = []
    for ops in (benchmark.PLAIN, pixfuse):
        benchmark.networks.pixfuse = ops
        widths = benchmark.Widths(16, 128, 8, channels_last=channels_last)
        training = benchmark.Training("cpu", widths, 8, 4, compiled=False)
        losses, gradients = [], []
        for m, adam in training.adam.items():
            adam.step = functools.partial(keep_gradients, m, gradients)
        for name in benchmark.STEPS:
            torch.manual_seed(0)
            losses.append(training.step(name))
        found.append((losses, gradients))
    assert len(found[0][1]) > 100
    for kind in (0, 1):
        for plain, ours in zip(found[0][kind], found[1][kind], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()) + 1e-7)


def test_the_benchmark_prints_its_table(benchmark, monkeypatch, capsys, tmp_path):
    small = ["--device", "cpu", "--resolution", "8", "--base", "32", "--most", "4", "--profile", str(tmp_path / "p")]
    monkeypatch.setattr(sys, "argv", ["x", *small, "--ops", "plain", "pixfuse", "--precision", "fp32"])
    benchmark.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [r[0].strip() for r in rows[-7:]] == ["ops", "plain", "plain", "pixfuse", "pixfuse", "target", "target"]
    assert all(float(cell) > 0 for r in rows[-6:-2] for cell in r[3:8])
    assert "convolution" in (tmp_path / "p").read_text()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_diffusion_unet_gives_the_same_on_pixfuse(monkeypatch, capsys, layout):
    assert documented("python", "diffusion_unet.py") == [["python", "examples/diffusion_unet.py"]]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "diffusion_unet", raising=False)
    module = importlib.import_module("diffusion_unet")
    small = ["--width", "16", "--size", "8", "--batch", "2", "--rounds", "1", "--device", "cpu", "--layout", layout]
    apart = module.main(small)
    assert apart.keys() == {"sample", "train"}
    assert max(apart.values()) < 1e-5
    report = capsys.readouterr().out
    assert "26 modules of UNet replaced" in report
    assert "down.0          ResBlock: norm1, norm2 with SiLU in one pass" in report
    assert "left as they are" not in report
    assert "train" in report


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--width", "12", "--width must be a positive multiple of 8, got 12"),
        ("--size", "30", "--size must be a positive multiple of 4, got 30"),
        ("--batch", "0", "--batch must be a positive multiple of 1, got 0"),
        ("--rounds", "-1", "--rounds must be a positive multiple of 1, got -1"),
        ("--device", "cuda:99", "--device must be a device of this machine, got 'cuda:99'"),
    ],
)
def test_diffusion_unet_refuses_in_one_sentence(monkeypatch, capsys, option, value, words):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "diffusion_unet", raising=False)
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("diffusion_unet").main([option, value])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {words}\n")


def numbers(text):
    return [float(n) for n in re.findall(r"-?\d+\.\d+", text)]


def test_switched_projects_run_unchanged():
    """As the README says: in three lines, and without touching a file. Their numbers are those of the definition."""
    ((_, switch),) = documented("python", "switch.py")
    ((_, *words),) = documented("pixfuse", "discriminator.py")
    root = EXAMPLES.parent
    code = "import sys; from pixfuse._cli.main import main; main()"
    outputs = []
    for command in ([switch], ["-c", code, *words]):
        done = subprocess.run([sys.executable, *command], cwd=root, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        outputs.append(done.stdout.splitlines())
    assert len(outputs[0]) == 2
    assert outputs[1] == outputs[0][:1]
    assert outputs[0][0].startswith("discriminator block: (2, 16, 8, 8)")
    assert outputs[0][1].startswith("restorer: (2, 3, 24, 20)")
    with pixfuse.compat.installed("nvlabs"), by_definition():
        module = runpy.run_path(str(EXAMPLES / "switching" / "discriminator.py"))
        torch.manual_seed(0)
        x = torch.randn(2, 8, 16, 16, requires_grad=True)
        y = module["Block"](8, 16)(x)
        (slope,) = torch.autograd.grad(y.sum(), [x])
    found = numbers(outputs[0][0])
    assert found == pytest.approx([float(y.detach().mean()), float(slope.square().sum())], abs=1e-3)


def test_readme_of_the_examples():
    text = (EXAMPLES / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (EXAMPLES / target).exists(), target
    switch = (EXAMPLES / "switching" / "switch.py").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    for line in block.splitlines():
        assert line in switch or line.startswith("#"), line
