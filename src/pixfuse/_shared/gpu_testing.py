"""Testing Triton kernels on a machine without a GPU.

Two checks that complement each other: the interpreter runs a kernel on CPU tensors, and ahead-of-time compilation
shows that every architecture's compiler takes it. The interpreter must be chosen before Triton is imported, so a
test file has two halves::

    if INTERPRETING:
        def test_value(...): ...            # calls the functions of gpu.py on CPU tensors
    else:
        def test_interpreter(): interpret(__file__)
        def test_compiles(...): ...         # uses launches() and compile_for()
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import create_function_from_signature

from .gpu import Launch
from .layout import to_layout

INTERPRETING = bool(knobs.runtime.interpret)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def interpret(file: str, *options: str) -> None:
    """Run the tests of ``file`` in a child process under Triton's interpreter."""
    own = "ignore:Conversion of an array:DeprecationWarning"  # the interpreter's, at a loop bound that is a tensor
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", own, *options, file]
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout[-8000:]}\n{run.stderr[-2000:]}"


def launches(op: Callable[..., Any], *args: Any) -> list[tuple[Launch, tuple[Tensor | None, ...]]]:
    """The launches that a call of ``op`` would make, with their tensors. Meta tensors are enough for it."""
    seen = []
    with mock.patch.object(Launch, "__call__", lambda self, *tensors: seen.append((self, tensors))):
        op(*args)
    return seen


def compile_for(target: str, launch: Launch, tensors: tuple[Tensor | None, ...]) -> Any:
    """The kernel of ``launch`` compiled for a target of ``TARGETS``, specialised as a call would specialise it."""
    gpu = TARGETS[target]
    backend = make_backend(gpu)
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*tensors, *launch.arguments, **launch.options)
    options, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    return compile(source, target=gpu, options=options.__dict__)


def in_layout(x: Tensor, channels_last: bool) -> Tensor:
    """``x`` dense in the given layout."""
    return to_layout(x, channels_last)


def assert_accurate(op: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> None:
    """The results of ``op`` on CPU tensors, in the interpreter, are those of ``reference``.

    The battery's rule: an error of at most twice the reference's own in that dtype plus two ulps, against float64.
    The interpreter truncates to bfloat16 where a GPU rounds, so two more ulps for it.
    """
    exact = reference(*(a.double() if isinstance(a, Tensor) else a for a in args))
    expected, got = reference(*args), op(*args)
    if isinstance(got, Tensor):
        exact, expected, got = (exact,), (expected,), (got,)
    memory = [t.untyped_storage()._cdata for t in (*got, *(a for a in args if isinstance(a, Tensor)))]
    assert all(m not in memory[i + 1 :] for i, m in enumerate(memory[: len(got)])), "a result shares memory"
    for truth, model, result in zip(exact, expected, got, strict=True):
        assert result.dtype == model.dtype
        assert result.shape == model.shape
        assert result.stride() == model.stride() or 1 in result.shape
        assert torch.isfinite(result).all()
        if truth.numel() == 0:
            continue
        ulps = 4 if result.dtype == torch.bfloat16 else 2
        allowed = 2 * (model.double() - truth).abs().max() + ulps * torch.finfo(result.dtype).eps * truth.abs().max()
        error = (result.double() - truth).abs().max()
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g} (largest value {truth.abs().max():.3g})"
