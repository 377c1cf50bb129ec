"""The Triton kernels of upsampling on a machine without a GPU: in the interpreter, and compiled ahead of time."""

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
from pixfuse.upsample import gpu, reference
from pixfuse.upsample.taps import AREA, CUBIC, LANCZOS, LINEAR, NEAREST, NEAREST_EXACT, axis_taps

LAYOUTS = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
CASES = {  # shape, size, mode, align_corners, antialias, scale
    "linear-x2": ((1, 3, 5, 4), (10, 8), LINEAR, False, False, (2.0, 0.0)),
    "cubic-x2": ((1, 3, 4, 7), (8, 14), CUBIC, False, False, (0.0, 2.0)),
    "one-pixel-x2": ((1, 2, 1, 1), (2, 2), CUBIC, False, False, (2.0, 2.0)),
    "cubic": ((2, 3, 7, 9), (11, 5), CUBIC, False, False, (0.0, 0.0)),
    "aligned": ((2, 3, 7, 9), (11, 5), LINEAR, True, False, (0.0, 0.0)),
    "area": ((1, 3, 9, 8), (4, 11), AREA, False, False, (0.0, 0.0)),
    "lanczos": ((1, 2, 13, 12), (5, 4), LANCZOS, False, True, (0.0, 0.0)),
    "antialias-one-axis": ((1, 2, 13, 12), (5, 12), CUBIC, False, True, (0.4, 0.0)),
    "one-axis": ((1, 3, 11), (22,), LINEAR, False, False, (2.0,)),
    "three-axes": ((1, 2, 3, 4, 5), (5, 4, 8), LINEAR, False, False, (0.0, 0.0, 1.7)),
    "nearest": ((2, 3, 7, 9), (9, 4), NEAREST_EXACT, False, False, (0.0, 0.0)),
    "same-size": ((1, 2, 4, 5), (4, 5), CUBIC, False, False, (1.1, 1.1)),
}


def _image(shape, dtype, channels_last):
    torch.manual_seed(sum(shape))
    return in_layout(torch.randn(shape).to(dtype), channels_last)


if INTERPRETING:

    @LAYOUTS
    @pytest.mark.parametrize(
        ("shape", "scale"), [((2, 3, 5, 7), (2, 2)), ((2, 5, 7), (3,)), ((1, 3, 2, 3, 5), (2, 1, 3))]
    )
    def test_nearest(shape, scale, channels_last):
        for dtype, gain in [(torch.float32, 1.0), (torch.bfloat16, 0.7)]:
            args = (_image(shape, dtype, channels_last), scale, gain)
            assert_accurate(gpu.upsample_nearest, reference.upsample_nearest, *args)
            dy = _image(reference.upsample_nearest(*args).shape, dtype, channels_last)
            assert_accurate(gpu.upsample_nearest_backward, reference.upsample_nearest_backward, dy, scale, gain)

    @LAYOUTS
    @pytest.mark.parametrize("name", CASES)
    def test_interpolate(name, channels_last):
        shape, size, *rest = CASES[name]
        dtype = torch.float32
        args = (_image(shape, dtype, channels_last), size, *rest)
        assert_accurate(gpu.interpolate, reference.interpolate, *args)
        args = (_image((*shape[:2], *size), dtype, channels_last), shape[2:], *rest)
        assert_accurate(gpu.interpolate_backward, reference.interpolate_backward, *args)

    @pytest.mark.parametrize("name", ["cubic-x2", "aligned", "lanczos", "nearest", "same-size"])
    def test_part_of_a_map(name):
        """Some rows of the result from the rows that these read."""
        shape, size, *rest = CASES[name]
        x = _image(shape, torch.float32, True)
        mode, *flags, scale = rest
        maps = [(n, o, float(s), mode, *flags, False) for n, o, s in zip(shape[2:], size, scale, strict=True)]
        first, last = 2, 4
        table = axis_taps(*maps[0])
        low, high = (first, last) if table is None else (int(table.start[first]), int(table.stop[last - 1]))
        pieces = [(*maps[0], (first, last, low)), (*maps[1], None)]
        copies = mode in (NEAREST, NEAREST_EXACT)
        y = gpu.resize(x[:, :, low:high], pieces, (last - first, size[1]), copies)
        whole = gpu.interpolate(x, size, *rest)[:, :, first:last]
        torch.testing.assert_close(y, whole)
        torch.testing.assert_close(reference.resize(x[:, :, low:high], [axis_taps(*m) for m in pieces], copies), whole)

    @LAYOUTS
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
    def test_integers_are_copied(dtype, channels_last):
        x = in_layout(torch.randint(0, 2 if dtype == torch.bool else 127, (2, 3, 4, 5)).to(dtype), channels_last)
        x = x + 2**40 if dtype == torch.int64 else x
        assert torch.equal(gpu.upsample_nearest(x, (2, 3), 1.0), reference.upsample_nearest(x, (2, 3), 1.0))
        args = (x, (7, 3), NEAREST, False, False, (0.0, 0.0))
        assert torch.equal(gpu.interpolate(*args), reference.interpolate(*args))

    @pytest.mark.parametrize("mode", [LINEAR, CUBIC])
    def test_bytes_are_rounded_and_saturated(mode):
        x = (torch.arange(2 * 81).reshape(1, 2, 9, 9) % 2 * 255).to(torch.uint8)
        args = (x, (18, 13), mode, False, False, (0.0, 0.0))
        assert torch.equal(gpu.interpolate(*args), reference.interpolate(*args))

    @pytest.mark.parametrize("name", ["linear-x2", "cubic-x2", "cubic", "aligned"])
    def test_constant_images_stay_constant(name):
        shape, size, *rest = CASES[name]
        # In float16: the interpreter truncates to bfloat16 where a GPU rounds.
        y = gpu.interpolate(torch.full(shape, 200.0, dtype=torch.float16), size, *rest)
        assert torch.equal(y, torch.full_like(y, 200.0))

    def test_any_strides():
        x = _image((2, 3, 6, 8), torch.float32, False)
        for view in (x.transpose(2, 3), x.flip(3)[:, :, ::2], x[:, :1].expand(-1, 4, -1, -1)):
            assert_accurate(gpu.upsample_nearest, reference.upsample_nearest, view, (2, 2), 1.0)

    def test_empty():
        x = torch.empty(0, 3, 4, 4)
        assert gpu.upsample_nearest(x, (2, 2), 1.0).shape == (0, 3, 8, 8)
        assert gpu.interpolate(x, (5, 5), LINEAR, False, False, (0.0, 0.0)).shape == (0, 3, 5, 5)

else:

    def test_interpreter():
        interpret(__file__, "-W", "ignore::RuntimeWarning")

    @pytest.mark.parametrize("target", TARGETS)
    def test_compiles(target):
        dtype, channels_last = torch.bfloat16, target in ("sm_90", "gfx942")
        x = torch.empty(2, 32, 16, 32, device="meta", dtype=dtype)
        y = torch.empty(2, 32, 32, 64, device="meta", dtype=dtype)
        if channels_last:
            x, y = (t.to(memory_format=torch.channels_last) for t in (x, y))
        double, thrice = (LINEAR, False, False, (2.0, 2.0)), (CUBIC, False, False, (0.0, 0.0))
        seen = [
            *launches(gpu.upsample_nearest, x, (2, 2), 1.0),
            *launches(gpu.upsample_nearest_backward, y, (2, 2), 1.0),
            *launches(gpu.interpolate, x, (32, 64), *double),
            *launches(gpu.interpolate_backward, y, (16, 32), *double),
            *launches(gpu.interpolate, x, (48, 96), *thrice),
        ]
        assert len(seen) == 5
        for launch, tensors in seen:
            compile_for(target, launch, tensors)

    def test_integers_compile():
        for dtype in (torch.bool, torch.uint8, torch.int64):
            x = torch.empty(2, 3, 5, 5, device="meta", dtype=dtype)
            seen = launches(gpu.upsample_nearest, x, (2, 2), 1.0)
            seen += launches(gpu.interpolate, x, (7, 7), NEAREST, False, False, (0.0, 0.0))
            for launch, tensors in seen:
                compile_for("sm_90", launch, tensors)

    def test_more_than_2_31_elements():
        for shape in [(20, 256, 512, 512), (524288, 1, 8, 8)]:
            x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
            size = (2 * shape[2], 2 * shape[3])
            for mode in (LINEAR, NEAREST):
                for layout in (torch.contiguous_format, torch.channels_last):
                    args = (x.to(memory_format=layout), size, mode, False, False, (2.0, 2.0))
                    assert all(0 < launch.programs < 2**31 for launch, _ in launches(gpu.interpolate, *args))
