"""The Triton kernels of modulated_conv2d on a machine without a GPU: in the interpreter, and compiled ahead of time."""

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
from pixfuse.conv2d_resample import gpu, reference
from pixfuse.conv2d_resample.reference import BFLOAT16, EXACT, FLOAT16, PLAIN, ROUNDED

SHAPES = {  # of the weight, images
    "3x3": ((3, 6, 3, 3), 2),
    "1x1": ((3, 17, 1, 1), 5),
    "4x2": ((2, 3, 4, 2), 1),
    "7x7": ((1, 2, 7, 7), 3),
    "one": ((1, 1, 1, 1), 1),
    "1x5": ((4, 33, 1, 5), 2),
}


def _arguments(name, given=torch.float32, channels_last=False):
    torch.manual_seed(len(name))
    shape, images = SHAPES[name]
    weight, styles = torch.randn(shape).to(given), (3 * torch.randn(images, shape[1]) + 1).to(given)
    return in_layout(weight, channels_last), styles


def _gradients(weight, styles, dtype, channels_last):
    result = ROUNDED[dtype] or torch.float32
    dw, ds = torch.randn(weight.shape).to(result), torch.randn(styles.shape).to(result)
    dd = torch.randn(styles.shape[0], weight.shape[0]).to(result)
    return (None, None, dd) if dtype == PLAIN else (in_layout(dw, channels_last), ds, dd)


if INTERPRETING:

    @pytest.fixture(autouse=True)
    def fresh_memory_is_full_of_nan():
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    def _check(weight, styles, dtype, channels_last, needs=(True, True)):
        assert_accurate(gpu.modulation, reference.modulation, weight, styles, dtype, channels_last, False)
        args = (weight, styles, *_gradients(weight, styles, dtype, channels_last), dtype, *needs)
        assert_accurate(gpu.modulation_backward, reference.modulation_backward, *args)

    @pytest.mark.parametrize("dtype", [PLAIN, BFLOAT16, FLOAT16, EXACT], ids=["plain", "bf16", "fp16", "exact"])
    def test_dtypes_and_layouts(dtype):
        _check(*_arguments("3x3"), dtype, dtype == FLOAT16)
        _check(*_arguments("3x3", channels_last=True), dtype, dtype == BFLOAT16)

    @pytest.mark.parametrize("name", SHAPES)
    def test_sizes(name):
        _check(*_arguments(name), PLAIN, False)
        _check(*_arguments(name, channels_last=True), FLOAT16, True)

    def test_one_gradient_alone():
        for needs in ((True, False), (False, True)):
            _check(*_arguments("3x3"), EXACT, False, needs)

    @pytest.mark.parametrize("given", [torch.bfloat16, torch.float16])
    def test_modules_of_16_bits(given):
        _check(*_arguments("3x3", given), FLOAT16, True)

    def test_parameters_of_two_dtypes():
        weight, styles = _arguments("3x3")
        _check(weight, styles.half(), FLOAT16, False)
        _check(weight, styles.double(), PLAIN, False)

    @pytest.mark.parametrize("dtype", [PLAIN, FLOAT16], ids=["plain", "fp16"])
    def test_rows_in_parts(dtype):
        with mock.patch.multiple(gpu, _ROW=32, _TILE=32, _STYLES=4, _OUTPUTS=2):
            gpu._factors.cache_clear(), gpu._gradients.cache_clear()
            _check(*_arguments("3x3"), dtype, False)
            _check(*_arguments("7x7"), dtype, False)
        gpu._factors.cache_clear(), gpu._gradients.cache_clear()

    def test_any_strides():
        weight, styles = _arguments("3x3")
        dw, ds, dd = _gradients(weight, styles, EXACT, False)
        value = gpu.modulation(weight, styles, EXACT, False, False)
        wanted = gpu.modulation_backward(weight, styles, dw, ds, dd, EXACT, True, True)

        def scattered(t):
            wide = t.new_full([2 * n + 1 for n in t.shape], float("nan"))
            inner = wide[tuple(slice(1, None, 2) for _ in t.shape)]
            return inner.copy_(t)

        def turned(t):
            return t.transpose(0, 1).contiguous().transpose(0, 1)

        for change in (scattered, turned, lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2)):
            others = [change(t) for t in (weight, styles, dw, ds, dd)]
            for a, b in zip(gpu.modulation(*others[:2], EXACT, False, False), value, strict=True):
                assert torch.equal(a, b)
            for a, b in zip(gpu.modulation_backward(*others, EXACT, True, True), wanted, strict=True):
                assert torch.equal(a, b)

    def test_an_image_knows_nothing_of_the_others():
        weight, styles = _arguments("1x1")
        dw, ds, dd = _gradients(weight, styles, EXACT, False)
        _, s, d = gpu.modulation(weight, styles, EXACT, False, False)
        _, dstyles = gpu.modulation_backward(weight, styles, dw, ds, dd, EXACT, True, True)
        for i in range(len(styles)):
            one = slice(i, i + 1)
            _, s_alone, d_alone = gpu.modulation(weight, styles[one], EXACT, False, False)
            _, alone = gpu.modulation_backward(weight, styles[one], dw, ds[one], dd[one], EXACT, True, True)
            assert torch.equal(s[one], s_alone)
            assert torch.equal(d[one], d_alone)
            assert torch.equal(dstyles[one], alone)

    def test_large_and_small_numbers():
        weight, styles = _arguments("3x3")
        for size in (1e-25, 6e4):
            _check(size * weight, styles / size, FLOAT16, False)
        _, s, d = gpu.modulation(weight, torch.zeros_like(styles), FLOAT16, False, False)
        assert not s.any()
        assert not d.any()

    @pytest.mark.parametrize("empty", [(0, 4, 2), (3, 0, 2), (3, 4, 0)], ids=["outputs", "channels", "images"])
    def test_empty(empty):
        outputs, channels, images = empty
        weight, styles = torch.ones(outputs, channels, 3, 3), torch.ones(images, channels)
        for dtype in (PLAIN, FLOAT16):
            _check(weight, styles, dtype, False)

else:

    def test_interpreter():
        interpret(__file__, "-W", "ignore::RuntimeWarning")

    def _all_launches(shape, images, given, dtype, channels_last):
        weight = in_layout(torch.empty(shape, device="meta", dtype=given), channels_last)
        styles = torch.empty(images, shape[1], device="meta")
        factors = reference.modulation(weight, styles, dtype, channels_last, False)
        w, s, d = (None if t.numel() == 0 else t for t in factors)
        seen = launches(gpu.modulation, weight, styles, dtype, channels_last, False)
        for needs in ((True, True), (False, True)):
            seen += launches(gpu.modulation_backward, weight, styles, w, s, d, dtype, *needs)
        assert len(seen) == 5
        return seen

    CALLS = [
        ((512, 512, 3, 3), 4, torch.float32, PLAIN, False),
        ((512, 512, 3, 3), 4, torch.float32, FLOAT16, True),
        ((16, 24, 1, 1), 1, torch.float16, BFLOAT16, False),
        ((3, 2000, 3, 3), 64, torch.bfloat16, EXACT, False),
        ((1, 1, 1, 1), 1, torch.float32, FLOAT16, False),  # sizes of 1 are no arguments
    ]

    @pytest.mark.parametrize("target", TARGETS)
    def test_compiles(target):
        for call in CALLS:
            for launch, tensors in _all_launches(*call):
                compile_for(target, launch, tensors)
