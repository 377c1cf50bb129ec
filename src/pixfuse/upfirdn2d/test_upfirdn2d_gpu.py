"""The Triton kernels of upfirdn2d on a machine without a GPU: in the interpreter, and compiled ahead of time."""

import contextlib
from unittest import mock

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
from pixfuse.upfirdn2d import gpu, reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = {  # shape, filter, (up_x, up_y, down_x, down_y, pad_x, pad_y), trailing pads
    "up2": ((2, 3, 5, 16), (4, 4), (2, 2, 1, 1, 2, 2), (1, 1)),
    "up2-odd": ((1, 2, 7, 11), (4, 4), (2, 2, 1, 1, 2, 2), (1, 1)),
    "down2": ((2, 2, 10, 32), (4, 4), (1, 1, 2, 2, 1, 1), (1, 1)),
    "blur": ((1, 4, 9, 24), (4, 4), (1, 1, 1, 1, 2, 1), (1, 2)),
    "crop": ((1, 3, 12, 16), (3, 3), (1, 1, 1, 1, -2, -1), (-1, -3)),
    "far": ((1, 1, 5, 8), (4, 4), (1, 1, 1, 1, 13, 9), (2, 0)),
    "rectangular": ((1, 8, 9, 13), (3, 5), (2, 1, 1, 3, 3, -1), (2, 4)),
    "ratio": ((1, 2, 6, 10), (4, 4), (3, 2, 2, 3, 2, 1), (1, 1)),
    "separable": ((1, 2, 9, 12), (5,), (2, 2, 1, 1, 3, 3), (2, 2)),
    "separable-blur": ((1, 2, 14, 16), (12,), (1, 1, 1, 1, 6, 5), (5, 6)),
    "long": ((1, 2, 9, 12), (33,), (2, 1, 1, 2, 17, 16), (16, 17)),
    "large": ((1, 2, 9, 12), (13, 17), (2, 2, 3, 1, 9, 7), (9, 9)),
    "none": ((1, 2, 6, 7), (), (3, 2, 2, 1, 1, 0), (0, 1)),
}


@contextlib.contextmanager
def _by_taps():
    """Without the kernel that keeps its window in registers."""
    gpu._plan.cache_clear()
    with mock.patch.object(gpu, "_polyphase", return_value=None):
        yield
    gpu._plan.cache_clear()


def _arguments(name, dtype, channels_last):
    torch.manual_seed(len(name))
    shape, taps, axes, after = CASES[name]
    kx, ky = (1, 1) if not taps else (taps[-1], taps[0])
    out_w = (shape[3] * axes[0] + axes[4] + after[0] - kx) // axes[2] + 1
    out_h = (shape[2] * axes[1] + axes[5] + after[1] - ky) // axes[3] + 1
    x = in_layout(torch.randn(shape).to(dtype), channels_last)
    return x, torch.randn(taps) if taps else None, *axes, out_w, out_h


if INTERPRETING:

    @pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
    @pytest.mark.parametrize("name", CASES)
    def test_value(name, channels_last):
        for dtype, flip in zip(DTYPES, [True, False, True], strict=True):
            args = (*_arguments(name, dtype, channels_last), flip, 1.5)
            assert_accurate(gpu.upfirdn2d, reference.upfirdn2d, *args)

    @pytest.mark.parametrize("name", ["rectangular", "long"])
    def test_value_by_taps(name):
        args = (*_arguments(name, torch.float16, name == "long"), False, 1.5)
        with _by_taps():
            assert_accurate(gpu.upfirdn2d, reference.upfirdn2d, *args)

    @pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
    @pytest.mark.parametrize("name", ["up2-odd", "rectangular"])
    def test_filter_backward(name, channels_last):
        x, f, *axes, out_w, out_h = _arguments(name, torch.float32, channels_last)
        dy = in_layout(torch.randn(*x.shape[:2], out_h, out_w), channels_last)
        args = (x, dy, f.shape[1], f.shape[0], *axes, False, 1.5)
        assert_accurate(gpu.upfirdn2d_filter_backward, reference.upfirdn2d_filter_backward, *args)

    def test_any_strides():
        x, *rest = _arguments("up2-odd", torch.float32, False)
        for view in (x.transpose(2, 3), x.flip(3)[:, :, ::2], x[:, :1].expand(-1, 4, -1, -1)):
            h, w = view.shape[2:]
            args = (view, *rest[:-2], 2 * w, 2 * h, True, 1.0)
            assert_accurate(gpu.upfirdn2d, reference.upfirdn2d, *args)

    @pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8)])
    def test_empty(shape):
        y = gpu.upfirdn2d(torch.empty(shape), torch.ones(4, 4), 2, 2, 1, 1, 2, 2, 16, 10, True, 1.0)
        assert y.shape == (*shape[:2], 10, 16)
        df = gpu.upfirdn2d_filter_backward(torch.empty(shape), y, 4, 4, 2, 2, 1, 1, 2, 2, True, 1.0)
        assert torch.equal(df, torch.zeros(4, 4))

else:

    def test_interpreter():
        interpret(__file__)

    @pytest.mark.parametrize("target", TARGETS)
    def test_compiles(target):
        for name, dtype, channels_last in [("up2", torch.float16, False), ("rectangular", torch.bfloat16, True)]:
            x, f, *axes, out_w, out_h = (
                a.to("meta") if isinstance(a, torch.Tensor) else a for a in _arguments(name, dtype, channels_last)
            )
            seen = launches(gpu.upfirdn2d, x, f, *axes, out_w, out_h, True, 1.0)
            dy = x.new_empty(*x.shape[:2], out_h, out_w)
            seen += launches(gpu.upfirdn2d_filter_backward, x, dy, *f.shape, *axes, True, 1.0)
            with _by_taps():
                seen += launches(gpu.upfirdn2d, x, f, *axes, out_w, out_h, True, 1.0)
            assert len(seen) == 4
            for launch, tensors in seen:
                compile_for(target, launch, tensors)

    @pytest.mark.parametrize("name", ["up2", "down2", "blur"])
    def test_stays_in_registers(name):
        x, f, *rest = _arguments(name, torch.float16, False)
        ((launch, tensors),) = launches(gpu.upfirdn2d, x.to("meta"), f.to("meta"), *rest, True, 1.0)
        compiled = compile_for("sm_90", launch, tensors)
        assert compiled.metadata.shared == 0
        assert "ld.global.v" in compiled.asm["ptx"]
        assert "st.global.v" in compiled.asm["ptx"]

    def test_offsets_beyond_32_bits():
        x = torch.empty(17, 256, 1024, 1024, device="meta", dtype=torch.bfloat16)
        f = torch.empty(4, 4, device="meta")
        ((launch, _),) = launches(gpu.upfirdn2d, x, f, 2, 2, 1, 1, 2, 2, 2048, 2048, True, 1.0)
        assert launch.programs < 2**31
