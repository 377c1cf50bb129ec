"""The Triton kernels of bias_act on a machine without a GPU: in the interpreter, and compiled ahead of time."""

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
from pixfuse.bias_act import gpu, reference
from pixfuse.bias_act.reference import ACTIVATIONS

ACTS = range(len(ACTIVATIONS))
NAMES = [a.name for a in ACTIVATIONS]


def _scalars(act, dim=1, clamp=-1.0):
    return dim, act, ACTIVATIONS[act].def_alpha, ACTIVATIONS[act].def_gain, clamp


if INTERPRETING:

    def _check(shape, dim, dtype, bias_dtype, act, clamp, channels_last):
        torch.manual_seed(act)
        x, dy, v = (in_layout(t.to(dtype), channels_last) for t in 3 * torch.randn(3, *shape))
        b = torch.randn(shape[dim]).to(bias_dtype) if bias_dtype else None
        scalars = _scalars(act, dim, clamp)
        assert_accurate(gpu.bias_act, reference.bias_act, x, b, *scalars)
        assert_accurate(gpu.bias_act_second, reference.bias_act_second, v, dy, x, b, *scalars)
        known = [(x, b, None)]
        if act <= 2:
            known.append((None, None, reference.bias_act(x, b, *scalars)))
        if act == 0 and clamp < 0:
            known.append((None, None, None))
        for saved in known:
            for need_db in (True, False) if act == 2 else (True,):
                args = (dy, *saved, *scalars, channels_last, need_db)
                if saved[2] is None or clamp < 0:
                    assert_accurate(gpu.bias_act_backward, reference.bias_act_backward, *args)
                else:  # the limit is rounded to the dtype of dy, so float64 is no truth here
                    got, model = gpu.bias_act_backward(*args), reference.bias_act_backward(*args)
                    torch.testing.assert_close(got[0].float(), model[0].float(), rtol=2**-7, atol=1e-6)
                    torch.testing.assert_close(got[1], model[1], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("act", ACTS, ids=NAMES)
    def test_activations(act):
        _check((2, 5, 7, 9), 1, torch.float32, torch.float32, act, 2.0 if act % 2 else -1.0, act % 2 == 1)

    @pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
    @pytest.mark.parametrize(
        ("shape", "dim", "dtype", "bias_dtype", "act", "clamp"),
        [
            ((2, 8, 6, 8), 1, torch.float16, torch.float16, 2, 1.0),
            ((2, 8, 6, 8), 1, torch.bfloat16, torch.float32, 2, 0.3),
            ((2, 8, 6, 4), 1, torch.bfloat16, None, 0, -1.0),
            ((3, 8, 6, 8), 0, torch.float32, torch.float64, 8, 1.0),
            ((3, 8, 5, 8), 2, torch.float32, torch.float32, 1, -1.0),
            ((2, 3, 2, 5, 4), 4, torch.float32, torch.float32, 7, -1.0),
        ],
    )
    def test_layouts_axes_and_dtypes(shape, dim, dtype, bias_dtype, act, clamp, channels_last):
        _check(shape, dim, dtype, bias_dtype, act, clamp, channels_last)

    @pytest.mark.parametrize(("shape", "dim"), [((300, 24), 1), ((64, 5, 3), 1)])
    def test_few_axes(shape, dim):
        _check(shape, dim, torch.float32, torch.float32, 8, -1.0, False)

    def test_small_numbers_keep_their_digits():
        t = torch.cat([-(10.0 ** torch.arange(-30.0, 2, 0.5)), 10.0 ** torch.arange(-30.0, 2, 0.5)])
        for act in ACTS:
            scalars = _scalars(act)
            got = gpu.bias_act(t, None, *scalars).double()
            truth = reference.bias_act(t.double(), None, *scalars)
            assert bool(((got - truth).abs() <= 6 * torch.finfo(torch.float32).eps * truth.abs() + 1e-44).all()), act

    def test_values_that_are_not_finite():
        t = torch.tensor([float("nan"), float("inf"), -float("inf"), 200.0, -200.0])
        for act in ACTS:
            for clamp in (-1.0, 3.0):
                args = (t, None, *_scalars(act, clamp=clamp))
                torch.testing.assert_close(gpu.bias_act(*args), reference.bias_act(*args), equal_nan=True)

    def test_empty():
        for shape in ((0, 4, 3), (2, 0, 3)):
            x, b = torch.empty(shape), torch.empty(shape[1])
            assert gpu.bias_act(x, b, *_scalars(2)).shape == shape
            dx, db = gpu.bias_act_backward(x, x, b, None, *_scalars(2), False, True)
            assert dx.shape == shape
            assert torch.equal(db, torch.zeros(shape[1]))

else:

    def test_interpreter():
        interpret(__file__, "-W", "ignore::RuntimeWarning")

    @pytest.mark.parametrize("target", TARGETS)
    def test_compiles(target):
        for dtype, channels_last, act in [(torch.float16, False, 2), (torch.bfloat16, True, 8)]:
            x = torch.empty(2, 32, 16, 16, device="meta", dtype=dtype)
            x = x.to(memory_format=torch.channels_last) if channels_last else x
            b = torch.empty(32, device="meta", dtype=dtype)
            scalars = _scalars(act, clamp=256.0)
            seen = [
                *launches(gpu.bias_act, x, b, *scalars),
                *launches(gpu.bias_act_backward, x, x, b, None, *scalars, channels_last, True),
                *launches(gpu.bias_act_backward, x, None, None, x, *scalars, channels_last, False),
                *launches(gpu.bias_act_second, x, x, x, b, *scalars),
            ]
            assert len(seen) == 4
            for launch, tensors in seen:
                compile_for(target, launch, tensors)

    @pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
    def test_16_bytes_a_thread(channels_last):
        x = torch.empty(2, 32, 64, 64, device="meta", dtype=torch.float16)
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        b = torch.empty(32, device="meta", dtype=torch.float16)
        ((launch, tensors),) = launches(gpu.bias_act, x, b, *_scalars(2))
        ptx = compile_for("sm_90", launch, tensors).asm["ptx"]
        assert "ld.global.v4" in ptx
        assert "st.global.v4" in ptx

    def test_more_than_2_31_elements():
        x = torch.empty(17, 256, 1024, 1024, device="meta", dtype=torch.bfloat16)
        b = torch.empty(256, device="meta")
        seen = launches(gpu.bias_act, x, b, *_scalars(2))
        seen += launches(gpu.bias_act_backward, x, x, b, None, *_scalars(2), False, True)
        assert all(0 < launch.programs < 2**31 for launch, _ in seen)
