"""Programs that leave PyTorch: AOTInductor packages and ONNX models give the values of the ops that they came from.

That every op exports with torch.export is in the battery (``check_export``).
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import pixfuse
import pixfuse.nn as pnn
import pixfuse.onnx
from pixfuse._shared.library import OPS
from pixfuse._shared.testing import DEVICE, Case
from pixfuse.bias_act.cases import CASES as BIAS_ACT
from pixfuse.filtered_lrelu.cases import CASES as FILTERED_LRELU
from pixfuse.group_norm.cases import CASES as GROUP_NORM
from pixfuse.upfirdn2d.cases import CASES as UPFIRDN2D
from pixfuse.upsample.cases import INTERPOLATE_CASES, NEAREST_CASES
from pixfuse.upsample.taps import AREA, CUBIC, LANCZOS, LINEAR, NEAREST, NEAREST_EXACT, taps

pytestmark = [  # PyTorch's own, when it exports
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
CASES: list[tuple[Callable[..., Tensor], Case]] = [
    (function, case)
    for function, cases in (
        (pixfuse.bias_act, BIAS_ACT),
        (pixfuse.group_norm, GROUP_NORM),
        (pixfuse.upfirdn2d, UPFIRDN2D),
        (pixfuse.filtered_lrelu, FILTERED_LRELU),
        (pixfuse.upsample_nearest, NEAREST_CASES),
        (pixfuse.interpolate, INTERPOLATE_CASES),
    )
    for case in cases
]
FILTER = pixfuse.setup_filter([1, 3, 3, 1])
B, W = torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4 * 4 * 9).reshape(4, 4, 3, 3)


class EveryOp(nn.Module):
    """Every public op on one picture of 4 channels."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            *(pixfuse.bias_act(x, B, act=act, clamp=1) for act in ("lrelu", "swish", "softplus", "selu")),
            pixfuse.upfirdn2d(x, FILTER, up=[3, 2], down=[1, 2], padding=[2, -1, -2, 3]),
            pixfuse.upsample2d(x, pixfuse.setup_filter([1, 2, 5], separable=True)),
            pixfuse.downsample2d(x, FILTER),
            pixfuse.filter2d(x, FILTER),
            pixfuse.filtered_lrelu(x, FILTER, FILTER, B, up=2, down=2, padding=3, clamp=1),
            pixfuse.group_norm(x, 2, B, B, act="silu"),
            pixfuse.upsample_nearest(x, [2, 3], gain=0.5),
            pixfuse.interpolate(x, scale_factor=1.7),
            pixfuse.interpolate(x, scale_factor=1.01, mode="bilinear"),
            pixfuse.interpolate(x, scale_factor=1.5, mode="bicubic"),
            pixfuse.interpolate(x, size=(5, 9), mode="bilinear", align_corners=True),
            pixfuse.interpolate(x, size=(5, 9), mode="area"),
            pixfuse.interpolate(x, scale_factor=0.4, mode="lanczos", antialias=True),
            pixfuse.conv2d_resample(x, W, FILTER, up=2, padding=1),
            pixfuse.modulated_conv2d(x, W, x.mean((2, 3)), padding=1),
        ]


def picture(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


# --- without pixfuse's operators ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "case"), CASES, ids=lambda v: v.id if isinstance(v, Case) else v.__name__)
def test_portable_forms_compute_the_ops(
    function: Callable[..., Tensor], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {k: t.detach() for k, t in case.tensors(torch.float64).items()}
    wanted = case.run(function, made)
    for name, op in OPS.items():
        form = pixfuse.onnx.decompositions()[op.overload]
        monkeypatch.setattr(type(op), "__call__", lambda op, *args: pixfuse.onnx.decompositions()[op.overload](*args))
        assert callable(form), name
    got = case.run(function, made)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", [NEAREST, NEAREST_EXACT, LINEAR, CUBIC, AREA, LANCZOS])
def test_tables_in_operators_are_the_tables(mode: int, antialias: bool) -> None:
    if (mode == LANCZOS) > antialias or (antialias and mode not in (LINEAR, CUBIC, LANCZOS)):
        return
    for n in (1, 2, 5, 13, 40):
        for out in (1, 2, 5, 7, 13, 41, 57):
            for scale in (0.0, out / n, (out + 0.4) / n):
                for align in {False, mode in (LINEAR, CUBIC) and not antialias and scale == 0}:
                    index, weights = pixfuse.onnx._table(n, out, scale, mode, align, antialias, torch.device("cpu"))
                    index = index.reshape(out, -1)
                    weights = torch.ones(index.shape, dtype=torch.float64) if weights is None else weights
                    got = torch.zeros(out, n, dtype=torch.float64).scatter_add_(1, index, weights)
                    table = taps(n, out, scale, mode, align, antialias)
                    wanted = torch.eye(n, dtype=torch.float64)
                    if table is not None:
                        wanted = torch.zeros(out, n, dtype=torch.float64)
                        for o in range(out):
                            count = table.stop[o] - table.start[o]
                            wanted[o, table.start[o] : table.stop[o]] = torch.tensor(table.weights[o, :count])
                    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_decompositions_leave_no_operator_of_pixfuse() -> None:
    x = picture(2, 4, 9, 11)
    program = torch.export.export(EveryOp(), (x,))
    assert "pixfuse" in str(program.graph)
    plain = program.run_decompositions(pixfuse.onnx.decompositions())
    assert "pixfuse" not in str(plain.graph)
    for got, wanted in zip(plain.module()(x), EveryOp()(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


# --- ONNX ---------------------------------------------------------------------------------------------------------


def onnx(model: nn.Module, x: Tensor, folder: Path, axes: Any = None) -> tuple[Any, list[str]]:
    """A session of onnxruntime and the operators that it runs."""
    program = pixfuse.onnx.export(
        model, (x,), folder / "model.onnx", dynamic_shapes=axes, input_names=["picture"], verbose=False
    )
    assert {node.domain for node in program.model_proto.graph.node} == {""}
    assert not program.model_proto.functions
    operators = sorted({node.op_type for node in program.model_proto.graph.node})
    return onnxruntime.InferenceSession(folder / "model.onnx"), operators


def test_onnxruntime_gives_the_values_of_every_op_at_any_size(tmp_path: Path) -> None:
    axes = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    session, _ = onnx(EveryOp(), picture(2, 4, 9, 11), tmp_path, axes)
    for shape in ((2, 4, 9, 11), (3, 4, 14, 10), (1, 4, 33, 64)):
        x = picture(*shape)
        for got, wanted in zip(session.run(None, {"picture": x.numpy()}), EveryOp()(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-5, atol=1e-5)


def test_tables_of_fixed_sizes_are_constants_in_onnx(tmp_path: Path) -> None:
    x, model = picture(2, 4, 9, 11), nn.Sequential(pnn.Upsample((5, 13), mode="lanczos", antialias=True), pnn.Blur())
    session, operators = onnx(model, x, tmp_path)
    assert operators == ["Conv", "Gather", "Mul", "ReduceSum", "Reshape"]
    (got,) = session.run(None, {"picture": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=1e-5, atol=1e-5)


MODES: list[tuple[dict[str, Any], tuple[float, ...]]] = [  # with factors that float32 rounds to other samples or sizes
    ({"mode": "nearest"}, (0.29, 0.6, 2.3)),
    ({"mode": "nearest-exact"}, (0.35, 1.3, 2.3)),
    ({"mode": "bilinear"}, (0.29,)),
    ({"mode": "bilinear", "align_corners": True}, (1.15,)),
    ({"mode": "bilinear", "antialias": True}, (0.29,)),
    ({"mode": "bicubic"}, (2.3,)),
    ({"mode": "bicubic", "antialias": True}, (0.7,)),
    ({"mode": "area"}, (0.29,)),
    ({"mode": "lanczos", "antialias": True}, (0.6,)),
]


class Resizes(nn.Module):
    """The rows of a picture in every mode."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [pixfuse.interpolate(x, scale_factor=(f, 1), **how) for how, factors in MODES for f in factors]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_awkward_factors_in_onnx(dynamic: bool, tmp_path: Path) -> None:
    axes = ({2: torch.export.Dim.DYNAMIC},) if dynamic else None
    session, _ = onnx(Resizes(), picture(2, 1, 40, 1), tmp_path, axes)
    names = [(how, factor) for how, factors in MODES for factor in factors]
    for rows in (7, 13, 40, 100, 255) if dynamic else (40,):
        x = picture(2, 1, rows, 1)
        found = zip(names, session.run(None, {"picture": x.numpy()}), Resizes()(x), strict=True)
        for (how, factor), got, wanted in found:
            apart = 0 if how["mode"].startswith("nearest") else 1e-6
            torch.testing.assert_close(
                torch.from_numpy(got), wanted, rtol=apart, atol=apart, msg=lambda m, at=(how, factor): f"{at}: {m}"
            )


def test_sizes_of_a_model_are_exact_in_onnx(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            n = x.shape[2]
            whole = torch.sym_int  # int makes a constant of it
            sizes = whole(n * 0.29), whole(0.7 * n + 0.1), math.floor(n / 3 - 0.2), math.ceil(n * 1.1), 2 * n - 1
            return [pixfuse.interpolate(x, size=(size, 1)) for size in sizes]

    session, _ = onnx(Model(), picture(2, 1, 40, 1), tmp_path, ({2: torch.export.Dim.DYNAMIC},))
    for rows in (7, 13, 90, 100, 255):
        x = picture(2, 1, rows, 1)
        for got, wanted in zip(session.run(None, {"picture": x.numpy()}), Model()(x), strict=True):
            assert torch.equal(torch.from_numpy(got), wanted)


# --- AOTInductor --------------------------------------------------------------------------------------------------


class Generator(nn.Module):
    """Style to picture, as small as it gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3))
        self.grow = nn.Sequential(pnn.FusedLeakyReLU(8), pnn.Upsample(scale_factor=2, mode="bicubic"))
        self.norm, self.leave = pnn.GroupNormSiLU(2, 8), pnn.FilteredLReLU(8, [1, 3, 3, 1], [1, 3, 3, 1], 2, 2, 3)
        self.register_buffer("taps", FILTER)

    def forward(self, style: Tensor) -> Tensor:
        x = self.start.expand(style.shape[0], -1, -1, -1)
        x = pixfuse.modulated_conv2d(x, self.weight, style, up=2, padding=1, resample_filter=self.taps)
        return self.leave(self.norm(self.grow(x)))


class Stock(nn.Module):
    """A generator without pixfuse."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, style: Tensor) -> Tensor:
        return self.conv(style[:, :, None, None].expand(-1, -1, 4, 4))


def package(model: nn.Module, style: Tensor, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile ``model`` into a package and run that in another process, which writes pictures.pt."""
    folder.mkdir()
    program = torch.export.export(model, (style[:2],), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    file = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(folder / "generator.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # a third of the time
    )
    torch.save(style, folder / "style.pt")
    code = f"""
import torch, pixfuse
model = torch._inductor.aoti_load_package({file!r})
torch.save(model(torch.load({str(folder / "style.pt")!r})), {str(folder / "pictures.pt")!r})
"""
    own = {"PYTHONPATH": str(Path(pixfuse.__file__).parents[1]), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    environment = {k: v for k, v in os.environ.items() if k in ("PATH", "LD_LIBRARY_PATH")} | own  # where drivers lie
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="AOTInductor needs a C++ compiler")
def test_a_package_runs_in_another_process(tmp_path: Path) -> None:
    model, style = Generator().to(DEVICE).eval(), picture(3, 8).to(DEVICE)
    done = package(model, style, tmp_path / "own")
    if done.returncode < 0 and DEVICE != "cpu":
        stock = package(Stock().to(DEVICE).eval(), style, tmp_path / "stock")
        if stock.returncode < 0:
            pytest.xfail(
                f"a package of PyTorch's own convolution ends this machine's process, too ({stock.returncode})"
            )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "own" / "pictures.pt"), model(style))


@pytest.mark.parametrize("act", ["softplus", "swish", "sigmoid", "tanh", "elu", "selu"])
def test_activations_far_from_zero_in_onnx(act: str, tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pixfuse.bias_act(x, act=act, gain=1)

    x = torch.tensor([[-1000.0, -100.0, -20.0, 0.0, 20.0, 88.0, 90.0, 1000.0]])
    file = str(tmp_path / "act.onnx")
    pixfuse.onnx.export(Model(), (x,), file, input_names=["x"], verbose=False)
    (y,) = onnxruntime.InferenceSession(file).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), Model()(x), rtol=1e-6, atol=1e-6)
