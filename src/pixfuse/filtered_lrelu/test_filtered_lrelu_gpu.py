"""The Triton kernel of filtered_lrelu on a machine without a GPU: in the interpreter, and compiled ahead of time."""

import pytest
import torch

from pixfuse._shared.gpu_testing import (
    INTERPRETING,
    TARGETS,
    assert_accurate,
    compile_for,
    in_layout,
    interpret,
    launches,
)
from pixfuse.filtered_lrelu import gpu, reference

CASES = {  # shape, dtype, channels_last, taps up and down, up, down, pad_x, pad_y, trailing pad, bias, slope, clamp
    "up2": ((1, 2, 7, 9), torch.float32, False, 6, 4, 2, 2, 4, 5, 3, True, 0.2, 0.7),
    "channels_last": ((2, 3, 6, 5), torch.float16, True, 4, 4, 2, 2, 3, 2, 3, True, 0.2, 0.7),
    "up4": ((1, 1, 5, 6), torch.bfloat16, False, 8, 4, 4, 2, 7, 6, 3, False, 0.2, -1.0),
    "down4": ((1, 1, 12, 13), torch.float32, False, 3, 5, 2, 4, 2, 1, 2, True, 0.0, 0.5),
    "crop": ((1, 2, 9, 10), torch.float32, False, 4, 3, 2, 1, -3, -2, 0, True, 1.5, -1.0),
    "no-filters": ((1, 3, 5, 6), torch.float32, True, 0, 0, 1, 1, 0, 1, 0, True, 0.2, 0.5),
}


def _arguments(name, taps_2d=False):
    shape, dtype, channels_last, ku, kd, up, down, pad_x, pad_y, after, bias, slope, clamp = CASES[name]
    torch.manual_seed(len(name))
    x = in_layout(torch.randn(shape).to(dtype), channels_last)
    fu, fd = (torch.rand((k, k) if taps_2d else k) / k if k else None for k in (ku, kd))
    b = torch.randn(shape[1]).to(dtype) if bias else None
    cut = max(ku, 1) + max(kd, 1) - 2
    out_w = (shape[3] * up + pad_x + after - cut - 1) // down + 1
    out_h = (shape[2] * up + pad_y + after - cut - 1) // down + 1
    return x, fu, fd, b, up, down, pad_x, pad_y, out_w, out_h, name == "up2", 1.4, slope, clamp


def _all(name, **options):
    """The three ops with their arguments."""
    args = _arguments(name, **options)
    x, out_w, out_h = args[0], *args[8:10]
    dy = in_layout(torch.randn(*x.shape[:2], out_h, out_w).to(x.dtype), CASES[name][2])
    v = in_layout(torch.randn(x.shape).to(x.dtype), CASES[name][2])
    yield "filtered_lrelu", args
    yield "filtered_lrelu_tangent", (v, *args)
    yield "filtered_lrelu_backward", (dy, *args)


if INTERPRETING:

    @pytest.mark.parametrize("name", CASES)
    def test_against_reference(name):
        for op, args in _all(name):
            assert_accurate(getattr(gpu, op), getattr(reference, op), *args)

    def test_a_bias_with_gaps():
        for op, args in _all("up2"):
            b = torch.randn(2 * CASES["up2"][0][1])[::2].to(args[0].dtype)
            args = [b if a is args[-11] else a for a in args]
            assert_accurate(getattr(gpu, op), getattr(reference, op), *args)

    def test_segments(monkeypatch):
        monkeypatch.setattr(gpu, "_segments", lambda *a: 3)
        gpu._plan.cache_clear()
        for op, args in _all("up2"):
            assert_accurate(getattr(gpu, op), getattr(reference, op), *args)
        gpu._plan.cache_clear()

    def test_filters_that_are_not_separable():
        for op, args in _all("up2", taps_2d=True):
            assert launches(getattr(gpu, op), *args) == []  # composed of public ops, which are CPU kernels here
            assert_accurate(getattr(gpu, op), getattr(reference, op), *args)

    @pytest.mark.parametrize("shape", [(0, 2, 7, 9), (2, 0, 7, 9)])
    def test_empty(shape):
        _, fu, fd, _, *rest = _arguments("up2")
        assert gpu.filtered_lrelu(torch.empty(shape), fu, fd, None, *rest).shape[:2] == shape[:2]

else:

    def test_interpreter():
        interpret(__file__)

    @pytest.mark.parametrize("target", TARGETS)
    def test_compiles(target):
        for op, args in _all("channels_last"):
            args = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
            ((launch, tensors),) = launches(getattr(gpu, op), *args)
            compile_for(target, launch, tensors)

    def test_stays_in_registers():
        x = torch.empty(1, 8, 64, 64, device="meta", dtype=torch.float16)
        f = torch.empty(6, device="meta")
        ((launch, tensors),) = launches(gpu.filtered_lrelu, x, f, f, None, 2, 2, 5, 5, 64, 64, True, 1.4, 0.2, 256.0)
        compiled = compile_for("sm_90", launch, tensors)
        assert compiled.metadata.shared == 0
        assert "st.local" not in compiled.asm["ptx"]
