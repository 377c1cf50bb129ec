"""What else of PyTorch a network with these ops meets: function transforms, checkpointing, tracing, copies.

The battery has vmap, torch.func, forward mode, autocast and deterministic mode for every op (``check_func`` ...);
test_field.py has processes, threads and the workers of a DataLoader.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import pixfuse
import pixfuse.nn as pnn
from pixfuse._shared.testing import DEVICE

FILTER = pixfuse.setup_filter([1, 3, 3, 1], device=DEVICE)
B = torch.linspace(-1, 1, 4, device=DEVICE).double()
W = torch.linspace(-1, 1, 4 * 4 * 9, device=DEVICE).reshape(4, 4, 3, 3).double()
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "bias_act": lambda x: pixfuse.bias_act(x, B.to(x.dtype), act="swish"),
    "upfirdn2d": lambda x: pixfuse.upfirdn2d(x, FILTER, up=2, down=3, padding=2),
    "filter2d": lambda x: pixfuse.filter2d(x, FILTER),
    "downsample2d": lambda x: pixfuse.downsample2d(x, FILTER),
    "upsample2d": lambda x: pixfuse.upsample2d(x, FILTER),
    "filtered_lrelu": lambda x: pixfuse.filtered_lrelu(x, FILTER, FILTER, B.to(x.dtype), 2, 2, 3, clamp=1),
    "group_norm": lambda x: pixfuse.group_norm(x, 2, B.to(x.dtype), B.to(x.dtype), act="silu"),
    "conv2d_resample": lambda x: pixfuse.conv2d_resample(x, W.to(x.dtype), FILTER, up=2, padding=1),
    "modulated_conv2d": lambda x: pixfuse.modulated_conv2d(x, W.to(x.dtype), x.mean((2, 3)), padding=1),
    "upsample_nearest": lambda x: pixfuse.upsample_nearest(x, 2),
    "interpolate": lambda x: pixfuse.interpolate(x, scale_factor=1.5, mode="bicubic"),
}
every_op = pytest.mark.parametrize("op", OPS)


def picture(dtype: torch.dtype = torch.float64, size: int = 5) -> Tensor:
    return torch.randn(2, 4, size, size + 1, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(4, 8, 3), pnn.GroupNormSiLU(2, 8), pnn.Blur(down=2)),
        nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), pnn.FusedLeakyReLU(4), pnn.Upsample(scale_factor=1.5)),
        pnn.FilteredLReLU(4, [1, 3, 3, 1], [1, 3, 3, 1], up=2, down=2, padding=3),
    ).to(DEVICE)


# --- function transforms ------------------------------------------------------------------------------------------


@every_op
def test_jacobians_both_ways(op: str) -> None:
    x, call = picture(size=3)[:1], OPS[op]
    forward, reverse = torch.func.jacfwd(call)(x), torch.func.jacrev(call)(x)
    torch.testing.assert_close(forward, reverse)
    assert reverse.any()


@every_op
def test_hessian(op: str) -> None:
    x, call = picture(size=2)[:1], OPS[op]

    def loss(x: Tensor) -> Tensor:
        return call(x).square().sum()

    hessian = torch.func.hessian(loss)(x)  # forward over reverse
    torch.testing.assert_close(hessian, torch.func.jacrev(torch.func.jacrev(loss))(x))
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(loss, x))
    torch.testing.assert_close(hessian, torch.func.jacfwd(torch.func.jacfwd(loss))(x))


@every_op
def test_forward_mode_runs_the_kernel(op: str) -> None:
    """The value beside a tangent is the op's own, to the last bit, in every dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        x, call = picture(dtype), OPS[op]
        if op == "modulated_conv2d" and dtype != torch.float32:
            continue  # PyTorch's convolutions
        value, tangent = torch.func.jvp(call, (x,), (x,))
        assert torch.equal(value, call(x))
        assert tangent.dtype == dtype
        exact = torch.func.jvp(call, (x.double(),), (x.double(),))[1]
        torch.testing.assert_close(tangent.double(), exact, rtol=0.02, atol=0.05 * float(exact.abs().max()))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.unpack_dual(call(torch.autograd.forward_ad.make_dual(x, x)))
            assert torch.equal(dual.primal, value)
            assert torch.equal(dual.tangent, tangent)


def test_tangents_of_filters() -> None:
    """upfirdn2d has them, as it has their gradient; filtered_lrelu has neither and says so."""
    x = picture()
    for taps in (FILTER.double(), pixfuse.setup_filter([1, 2, 4], separable=True, device=DEVICE).double()):
        tangent = torch.linspace(-1, 1, taps.numel(), dtype=torch.float64, device=DEVICE).reshape(taps.shape)

        def call(f: Tensor) -> Tensor:
            return pixfuse.upfirdn2d(x, f, up=2, padding=3)

        forward = torch.func.jvp(call, (taps,), (tangent,))[1]
        torch.testing.assert_close(
            forward, (torch.func.jacrev(call)(taps) * tangent).flatten(4).sum(-1).view_as(forward)
        )
    with pytest.raises(ValueError, match="filtered_lrelu: fu must be a filter without a tangent"):
        torch.func.jvp(lambda f: pixfuse.filtered_lrelu(x, f), (FILTER,), (FILTER,))


def test_gradients_of_every_sample_of_a_network() -> None:
    model = network()
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    x = picture(torch.float32, 12)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).square().mean()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, one in enumerate(x):
        for k, wanted in torch.func.grad(loss)(parameters, one).items():
            torch.testing.assert_close(each[k][i], wanted, rtol=1e-4, atol=1e-5)


# --- checkpointing ------------------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(op: str, reentrant: bool) -> None:
    results = []
    for run in (OPS[op], lambda x: checkpoint(OPS[op], x, use_reentrant=reentrant)):
        x = picture(torch.float32).requires_grad_()
        y = run(x)
        y.square().sum().backward()  # torch.autograd.grad is more than reentrant checkpoints know
        results.append((y, x.grad))
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


@every_op
def test_second_order_through_a_checkpoint(op: str) -> None:
    results = []
    for run in (OPS[op], lambda x: checkpoint(OPS[op], x, use_reentrant=False)):
        x = picture(torch.float32).requires_grad_()
        (dx,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), x)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_network(reentrant: bool) -> None:
    gradients = []
    for segments in (0, 3):
        model, x = network(), picture(torch.float32, 12).requires_grad_()
        y = checkpoint_sequential(model, segments, x, use_reentrant=reentrant) if segments else model(x)
        y.square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


# --- tracing ------------------------------------------------------------------------------------------------------


@every_op
def test_jit_trace(op: str) -> None:
    """PyTorch deprecates it; what it records are the operators, which save, load and run for the size traced."""
    x = picture(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(OPS[op], x, check_trace=False)
        buffer = io.BytesIO()
        torch.jit.save(traced, buffer)
        buffer.seek(0)
        loaded = torch.jit.load(buffer)
    other = picture(torch.float32).flip(2).requires_grad_()
    for got, wanted in zip(*(_gradient(call, other) for call in (loaded, OPS[op])), strict=True):
        if op == "modulated_conv2d":  # its arithmetic between the ops is fused
            torch.testing.assert_close(got, wanted)
        else:
            assert torch.equal(got, wanted)


def _gradient(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), x)]


def test_fx_has_the_ops_as_nodes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x: Tensor) -> Tensor:
            y = pixfuse.upsample_nearest(self.body(x), 2)
            return pixfuse.modulated_conv2d(y, W.float(), y.mean((2, 3)), padding=1)

    model, x = Net(), picture(torch.float32, 12)
    traced = torch.fx.symbolic_trace(model)
    ops = [
        node.target.__name__ for node in traced.graph.nodes if node.op == "call_function" and "torch" not in str(node)
    ]
    wanted = ["group_norm", "upfirdn2d", "bias_act", "interpolate", "filtered_lrelu"]
    assert [op for op in ops if hasattr(pixfuse, op)] == [*wanted, "upsample_nearest", "modulated_conv2d"]
    assert torch.equal(traced(x), model(x))
    again = copy.deepcopy(traced)
    assert torch.equal(again(x), model(x))


# --- modes --------------------------------------------------------------------------------------------------------


@every_op
def test_inference_mode(op: str) -> None:
    x = picture(torch.float32)
    with torch.inference_mode():
        y = OPS[op](x)
    assert y.is_inference()
    assert torch.equal(y, OPS[op](x))


def test_shapes_on_the_meta_device() -> None:
    """Without data: what tools that plan memory, or load weights later, ask."""
    filtered = pnn.FilteredLReLU(4, [1, 3, 3, 1], [1, 3, 3, 1], up=2, down=2, padding=3)
    resized = pnn.Upsample(scale_factor=1.5, mode="bicubic")
    model = nn.Sequential(pnn.GroupNormSiLU(2, 4), pnn.Blur(up=2), pnn.FusedLeakyReLU(4), filtered, resized)
    real = model.to(DEVICE)(picture(torch.float32, 12).contiguous(memory_format=torch.channels_last))
    x = torch.empty(2, 4, 12, 13, device="meta").contiguous(memory_format=torch.channels_last)
    y = model.to("meta")(x)
    assert y.is_meta
    assert (y.shape, y.stride(), y.dtype) == (real.shape, real.stride(), real.dtype)


@every_op
def test_saved_tensors_may_be_kept_elsewhere(op: str) -> None:
    """As offloading does it: what an op keeps for backward is packed, and unpacked once."""
    packed: list[Tensor] = []

    def unpack(i: int) -> Tensor:
        found, packed[i] = packed[i], None  # type: ignore[call-overload]
        return found

    def pack(t: Tensor) -> int:
        packed.append(t.clone())
        return len(packed) - 1

    x = picture(torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = OPS[op](x)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    (wanted,) = torch.autograd.grad(OPS[op](x).square().sum(), x)
    assert torch.equal(got, wanted)


@every_op
def test_anomaly_mode(op: str) -> None:
    x = picture(torch.float32).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with torch.autograd.detect_anomaly():
            (got,) = torch.autograd.grad(OPS[op](x).square().sum(), x)
    assert torch.equal(got, torch.autograd.grad(OPS[op](x).square().sum(), x)[0])
