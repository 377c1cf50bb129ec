"""The Triton kernels of group_norm on a machine without a GPU: in the interpreter, and compiled ahead of time."""

import re
from functools import partial
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
from pixfuse.group_norm import gpu, parts, reference

LAYOUTS = pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
# One launch; two launches; three. Small tiles make several of each of a small image.
DESIGNS = {
    "whole": {"_ONE_PASS": 16384},
    "pooling": {"_ONE_PASS": 0, "_ONE_PASS_BACKWARD": 0, "_TILE": 512, "_CHUNKS": 2},
    "pooled": {"_ONE_PASS": 0, "_ONE_PASS_BACKWARD": 0, "_TILE": 256, "_CHUNKS": 8, "_POOLED": 1},
}
CASES = {  # shape, groups, dtype, dtype of the parameters, act, round_before_act
    "even": ((2, 8, 6, 8), 4, torch.float32, torch.float32, 1, False),
    "odd": ((2, 15, 5, 9), 3, torch.float32, torch.float64, 0, False),
    "one-group": ((1, 24, 5, 7), 1, torch.bfloat16, torch.float32, 1, False),
    "instance": ((1, 5, 3, 4, 5), 5, torch.float16, None, 1, True),
    "one-axis": ((1, 6, 40), 2, torch.float32, None, 0, False),
}


@pytest.fixture(params=DESIGNS)
def design(request):
    """Which kernels a call takes."""
    plans = (gpu._tiling, gpu._forward, gpu._backward)
    with mock.patch.multiple(gpu, **DESIGNS[request.param]):
        for plan in plans:
            plan.cache_clear()
        yield request.param
    for plan in plans:
        plan.cache_clear()


def _arguments(name, channels_last):
    torch.manual_seed(len(name))
    shape, groups, dtype, parameters, act, rounded = CASES[name]
    x = in_layout((2 * torch.randn(shape) + 1).to(dtype), channels_last)
    weight, bias = (torch.randn(2, shape[1]) / 2 + 1).to(parameters or dtype)
    return x, weight if parameters else None, bias if parameters else None, groups, act, rounded


if INTERPRETING:

    @LAYOUTS
    @pytest.mark.parametrize(
        ("design", "name"),
        [
            *(("whole", name) for name in ("even", "odd", "instance")),
            *(("pooling", name) for name in ("even", "odd", "one-group")),
            *(("pooled", name) for name in ("odd", "one-axis")),
        ],
        indirect=["design"],
    )
    def test_value_and_gradients(design, name, channels_last):
        x, weight, bias, groups, act, rounded = _arguments(name, channels_last)
        args = (x, weight, bias, groups, 1e-3, act)
        # The pair of roundings is a step function, so float64 is no truth for it.
        model = partial(reference.group_norm, round_before_act=False)
        if not rounded:
            assert_accurate(partial(gpu.group_norm, round_before_act=False), model, *args)
        y, mean, rstd = gpu.group_norm(*args, rounded)
        (alone,) = gpu.group_norm.plan(*args, rounded).first(*args[:3])
        assert torch.equal(alone, y)
        dy = in_layout(torch.randn(x.shape).to(x.dtype), channels_last)
        args = (dy, x, mean, rstd, weight, bias, groups, act, False)
        some = [(True, False, False), (False, True, False), (False, False, True)]
        for needs in [(True, True, True), *(some if name == "even" else [])]:
            assert_accurate(gpu.group_norm_backward, reference.group_norm_backward, *args, *needs)

    def test_round_before_act():
        x, *_, groups, act, _ = _arguments("instance", False)
        got = gpu.group_norm(x, None, None, groups, 1e-5, act, True)[0]
        pair = torch.nn.functional.silu(torch.nn.functional.group_norm(x, groups))
        assert (got != pair).float().mean() < 0.02  # a rounding of float32 may tip one in float16

    @LAYOUTS
    def test_large_mean_constants_and_huge_values(design, channels_last):
        x = in_layout(torch.randn(1, 4, 8, 9) + 1e4, channels_last)
        truth = reference.group_norm(x.double(), None, None, 2, 1e-5, 0, False)[0]
        assert (gpu.group_norm(x, None, None, 2, 1e-5, 0, False)[0] - truth).abs().max() < 1e-5
        bias = torch.arange(4.0)
        y = gpu.group_norm(torch.full_like(x, 0.3), None, bias, 2, 1e-5, 0, False)[0]
        assert torch.equal(y, bias.reshape(4, 1, 1).expand_as(y))
        x = in_layout(3e29 * torch.randn(1, 4, 8, 9), channels_last)
        truth = reference.group_norm(x.double(), None, None, 1, 1e-5, 0, False)[0]
        assert (gpu.group_norm(x, None, None, 1, 1e-5, 0, False)[0] - truth).abs().max() < 1e-5
        y = gpu.group_norm(1e-25 * (x / 3e29), None, None, 1, 0.0, 0, False)[0]
        assert (y - reference.group_norm(x / 3e29, None, None, 1, 0.0, 0, False)[0]).abs().max() < 1e-5

    def test_batch_makes_no_difference(design):
        x = torch.randn(3, 6, 7, 9)
        for channels_last in (False, True):
            x = in_layout(x, channels_last)
            together = gpu.group_norm(x, None, None, 2, 1e-5, 1, False)[0]
            assert torch.equal(together[1:2], gpu.group_norm(x[1:2], None, None, 2, 1e-5, 1, False)[0])

    @LAYOUTS
    @pytest.mark.parametrize(
        ("design", "name"),
        [("pooling", "even"), ("pooled", "odd"), ("whole", "one-group"), ("pooled", "one-axis")],
        indirect=["design"],
    )
    def test_in_parts(design, name, channels_last):
        """An image cut in three, one part empty: the same as in one piece."""
        x, weight, bias, groups, act, _ = _arguments(name, channels_last)
        dy = in_layout(torch.randn(x.shape).to(x.dtype), channels_last)

        def cut(t):
            return [in_layout(p, channels_last) for p in t.split([t.shape[2] - 2, 0, 2], 2)]

        def value(x):
            parts_of_x = [(p, weight, bias, groups, 1e-3, act, False) for p in cut(x)]
            y, mean, rstd = zip(*_together(parts.group_norm, parts_of_x, [x]), strict=True)
            assert all(torch.equal(mean[0], m) for m in mean)
            return in_layout(torch.cat(y, 2), channels_last), mean[0].to(rstd[0].dtype), rstd[0], mean[0]

        def gradients(dy, x):
            both = zip(cut(dy), cut(x), strict=True)
            arguments = [(*pair, mean, rstd, weight, bias, groups, act, False, True, True, True) for pair in both]
            found = zip(*_together(parts.group_norm_backward, arguments, [dy, x]), strict=True)
            dx, dweight, dbias = found
            return in_layout(torch.cat(dx, 2), channels_last), sum(dweight), sum(dbias)

        if name == "even":
            x = x + 1e4
        with mock.patch.object(parts, "gpu_module", return_value=gpu):
            model = partial(reference.group_norm, round_before_act=False)
            assert_accurate(lambda x, *rest: value(x)[:3], model, x, weight, bias, groups, 1e-3, act)
            _, _, rstd, mean = value(x)
            rest = (weight, bias, groups, act, False, True, True, True)
            assert_accurate(
                lambda dy, x, *rest: gradients(dy, x), reference.group_norm_backward, dy, x, mean, rstd, *rest
            )

    def _together(run, every, whole):
        """``run`` on every part; each gets from ``gather`` what all of them gave it."""
        rounds: list[list[torch.Tensor]] = []
        while True:
            given, results = [], []

            def gather(t, used):
                used.append(t)
                if len(used) > len(rounds):
                    raise StopIteration
                return torch.stack(rounds[len(used) - 1])

            for args in every:
                used: list[torch.Tensor] = []
                try:
                    results.append(run(args, whole, {}, partial(gather, used=used)))
                except StopIteration:
                    given.append(used[-1])
            if not given:
                return results
            rounds.append(given)

    @pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 0, 3, 3)])
    def test_empty(shape):
        x = torch.empty(shape)
        weight = torch.ones(shape[1])
        y, mean, rstd = gpu.group_norm(x, weight, weight, 2, 1e-5, 0, False)
        assert y.shape == shape
        assert mean.shape == rstd.shape == (shape[0], 2)
        _, dweight, dbias = gpu.group_norm_backward(x, x, mean, rstd, weight, weight, 2, 0, False, True, True, True)
        assert torch.equal(dweight, torch.zeros(shape[1]))
        assert torch.equal(dbias, torch.zeros(shape[1]))

else:

    def test_interpreter():
        interpret(__file__, "-W", "ignore::RuntimeWarning")

    def _all_launches(x, parameter, groups):
        stats = torch.empty(x.shape[0], groups, device="meta")
        part = (x, x, stats.double(), stats, parameter, parameter, groups, 1, False)
        return [
            *launches(gpu.sums, *part),
            *launches(gpu.gradient, *part, torch.stack([stats, stats])),
            *launches(gpu.group_norm, x, parameter, parameter, groups, 1e-5, 1, False),
            *launches(
                gpu.group_norm_backward, x, x, stats, stats, parameter, parameter, groups, 1, False, True, True, True
            ),
        ]

    @pytest.mark.parametrize("target", TARGETS)
    def test_compiles(target):
        large = torch.empty(2, 320, 64, 64, device="meta", dtype=torch.bfloat16)
        small = torch.empty(2, 24, 9, 7, device="meta")
        seen = _all_launches(large.to(memory_format=torch.channels_last), None, 32)
        seen += _all_launches(small, torch.empty(24, device="meta", dtype=torch.float16), 8)
        assert len(seen) == 16
        for launch, tensors in seen:
            compile_for(target, launch, tensors)

    def test_an_image_is_read_in_vectors():
        for channels_last in (False, True):
            x = torch.empty(8, 128, 512, 512, device="meta", dtype=torch.bfloat16)
            x = x.to(memory_format=torch.channels_last) if channels_last else x
            for launch, tensors in _all_launches(x, None, 32):
                if launch.kernel.__name__ in ("_partial_kernel", "_apply_backward_kernel"):
                    assert re.search(r"ld\.global[\w.:]*\.v4", compile_for("sm_90", launch, tensors).asm["ptx"])

    def test_more_than_2_31_elements():
        for shape in [(17, 256, 1024, 1024), (1, 128, 8192, 4096), (524288, 1, 8, 8)]:
            for channels_last in (False, True):
                x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
                x = x.to(memory_format=torch.channels_last) if channels_last else x
                for launch, _ in _all_launches(x, None, 1):
                    assert 0 < launch.programs < 2**31
