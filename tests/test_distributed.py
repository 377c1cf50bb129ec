"""Several processes give what one gives: DDP, FSDP2, and DTensors split along every axis (field case 30).

Starting processes takes longer than all checks, so each number of processes is started once, runs all of CHECKS and
writes down what failed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import pixfuse
import pixfuse.nn

RANKS = (2, 3)
CHECKS: dict[str, Callable[[Any], None]] = {}
ON_GPUS = ("rows_in_float32", "other_ranks_and_dtypes", "same_bits", "layout", "large_mean", "model_on_rows")
DEVICE = "cpu"  # of the images, in a process that runs checks


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run ``function(mesh)`` on every process."""
    CHECKS[function.__name__] = function
    return function


def run_checks(rank: int, ranks: int, folder: str, backend: str = "gloo", device: str = "cpu") -> None:
    global DEVICE, P, F1, F2
    torch.set_num_threads(1)
    if device == "cuda":
        DEVICE = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(DEVICE)
        P, F1, F2 = (t.to(DEVICE) for t in (P, F1, F2))
        torch.backends.cudnn.allow_tf32 = False
    else:
        warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*barrier.*|.*pg.*device.*|.*torch.jit.script.*")
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    import pixfuse.distributed  # noqa: F401

    mesh = init_device_mesh(device, (ranks,))
    failed = {}
    for name in CHECKS if device == "cpu" else ON_GPUS:
        try:
            CHECKS[name](mesh)
        except Exception:
            failed[name] = traceback.format_exc()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(failed))
    dist.destroy_process_group()


def failures_of(ranks: int, *where: str) -> list[dict[str, str]]:
    """What failed on each process."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_checks, (ranks, folder, *where), nprocs=ranks)
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}-processes")
def failures(request: Any) -> list[dict[str, str]]:
    return failures_of(request.param)


@pytest.fixture(scope="module")
def failures_on_gpus() -> list[dict[str, str]]:
    """On two GPUs, or on one that two processes share (which NCCL refuses)."""
    return failures_of(2, "nccl" if torch.cuda.device_count() > 1 else "gloo", "cuda")


# --- DTensor --------------------------------------------------------------------------------------------------

F1, F2 = torch.tensor([0.25, 0.5, 0.75, 1.0]), torch.tensor([[1.0, 2.0, -1.0], [0.5, 3.0, 1.0]])
P = torch.linspace(-1, 1, 12)


def fir(x: Tensor, p: Tensor, f: Tensor, **how: Any) -> Tensor:
    return pixfuse.upfirdn2d(x, f, **how)


def resized(x: Tensor, p: Tensor, f: Tensor, **how: Any) -> Tensor:
    return pixfuse.interpolate(x, **how)


def convolved(x: Tensor, p: Tensor, f: Tensor, transposed: bool = False, k: int = 3, **how: Any) -> Tensor:
    import pixfuse.distributed

    c = x.shape[1]
    weight = (p[:c, None, None, None] * p[None, :c, None, None]).sin() + p[:k, None] * p[None, :3]
    call = pixfuse.distributed.conv_transpose2d if transposed else pixfuse.distributed.conv2d
    return call(x, weight.to(x.dtype), p[:c].to(x.dtype), **how)


def modulated(x: Tensor, p: Tensor, f: Tensor, **how: Any) -> Tensor:
    weight, styles = (p[:, None] * p.cos()).sin()[:, :, None, None].expand(-1, -1, 3, 3), p.expand(x.shape[0], -1) + 2
    return pixfuse.modulated_conv2d(x, weight, styles, p[:1], padding=1, resample_filter=f.detach().float(), **how)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bias_act": lambda x, p, f: pixfuse.bias_act(x, p, act="swish"),
    "bias_act clamped": lambda x, p, f: pixfuse.bias_act(x, p, act="lrelu", clamp=1),
    "group_norm": lambda x, p, f: pixfuse.group_norm(x, 6, p, p, act="silu"),
    "group_norm plain": lambda x, p, f: pixfuse.group_norm(x, 12, p, None),
    "upfirdn2d": lambda x, p, f: fir(x, p, f),
    "upfirdn2d up": lambda x, p, f: fir(x, p, f, up=2, padding=[2, 1, 3, -1]),
    "upfirdn2d down": lambda x, p, f: fir(x, p, f, down=[2, 3], padding=[1, 2, 5, 4], flip_filter=True),
    "upfirdn2d both": lambda x, p, f: fir(x, p, f, up=[2, 3], down=[3, 2], padding=-1),
    "upsample2d": lambda x, p, f: pixfuse.upsample2d(x, f),
    "downsample2d": lambda x, p, f: pixfuse.downsample2d(x, f),
    "filtered_lrelu": lambda x, p, f: pixfuse.filtered_lrelu(
        x, f.detach(), f.detach(), p, up=2, down=2, padding=[5, 4, 6, 3], clamp=0.5
    ),
    "filtered_lrelu up": lambda x, p, f: pixfuse.filtered_lrelu(x, f.detach(), None, p, up=3, padding=9),
    "filtered_lrelu down": lambda x, p, f: pixfuse.filtered_lrelu(x, None, f.detach(), p, down=2, padding=3),
    "upsample_nearest": lambda x, p, f: pixfuse.upsample_nearest(x, [3, 2], gain=0.5),
    "nearest": lambda x, p, f: resized(x, p, f, scale_factor=2),
    "nearest-exact": lambda x, p, f: resized(x, p, f, size=[7, 4], mode="nearest-exact"),
    "bilinear": lambda x, p, f: resized(x, p, f, scale_factor=[1.7, 0.6], mode="bilinear"),
    "bilinear aligned": lambda x, p, f: resized(x, p, f, size=[9, 11], mode="bilinear", align_corners=True),
    "bicubic": lambda x, p, f: resized(x, p, f, size=[5, 9], mode="bicubic"),
    "bicubic double": lambda x, p, f: resized(x, p, f, scale_factor=2, mode="bicubic"),
    "area": lambda x, p, f: resized(x, p, f, size=[5, 4], mode="area"),
    "lanczos": lambda x, p, f: resized(x, p, f, size=[5, 17], mode="lanczos", antialias=True),
    "same rows": lambda x, p, f: resized(x, p, f, size=[x.shape[2], 3], mode="bicubic"),
    "conv2d": lambda x, p, f: convolved(x, p, f, padding=1),
    "conv2d same": lambda x, p, f: convolved(x, p, f, k=2, padding="same"),
    "conv2d valid": lambda x, p, f: convolved(x, p, f, stride=2, padding="valid"),
    "conv2d stride": lambda x, p, f: convolved(x, p, f, stride=2, padding=1),
    "conv2d dilation": lambda x, p, f: convolved(x, p, f, dilation=[2, 1], padding=[3, 0]),
    "conv2d wide": lambda x, p, f: convolved(x, p, f, k=1, stride=[3, 1], padding=[1, 2]),
    "conv_transpose2d": lambda x, p, f: convolved(x, p, f, True, stride=2, padding=1, output_padding=1),
    "conv_transpose2d wide": lambda x, p, f: convolved(x, p, f, True, k=2, stride=[4, 1]),
    "modulated_conv2d": lambda x, p, f: modulated(x, p, f, up=2),
    "modulated_conv2d apart": lambda x, p, f: modulated(x, p, f, down=2, fused_modconv=False),
    "conv2d_resample": lambda x, p, f: pixfuse.conv2d_resample(
        x, (p[:, None] * p)[:, :, None, None].expand(-1, -1, 3, 3).to(x.dtype), f.detach().float(), up=2, padding=1
    ),
}
NEED_ROWS = (
    "conv2d valid",
    "upfirdn2d",
    "upfirdn2d both",
    "downsample2d",
    "filtered_lrelu down",
    "modulated_conv2d apart",
)
ONE_OF_EACH = (
    "bias_act",
    "group_norm",
    "upfirdn2d both",
    "filtered_lrelu",
    "upsample_nearest",
    "bicubic",
    "conv2d stride",
)


def loss(y: Tensor) -> Tensor:
    return (y * y * y).sum()


def gradients(call: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    """The value of ``call`` and the gradients that its arguments got."""
    y = call(*args)
    loss(y).backward()
    return [y, *(t.grad for t in args if t.grad is not None)]


def compare(
    mesh: Any, name: str, call: Callable[..., Tensor], x: Tensor, f: Tensor, where: list[Any], dtensors: bool = False
) -> None:
    """Values and gradients of ``call`` on ``x`` split as ``where`` says against those of ``x`` in one piece.

    In float64 to rounding; else against float64, with at most twice the error that ``x`` in one piece has.
    """
    given = [t.to(x.dtype).clone().requires_grad_() for t in (x, P, f)]
    one = gradients(call, *given)
    split = [distribute_tensor(x, mesh, where).requires_grad_(), *(t.detach().clone() for t in given[1:])]
    if dtensors:
        split[1:] = [distribute_tensor(t, mesh, [Replicate()] * mesh.ndim) for t in split[1:]]
    for t in split[1:]:
        t.requires_grad_()
    several = gradients(call, *split)
    assert several[0].placements == tuple(where)
    assert len(one) == len(several)
    for t in split:
        assert t.grad is None or type(t.grad) is type(t)
        if isinstance(t.grad, DTensor):
            assert t.grad.placements == t.placements
    truth = one
    if x.dtype != torch.float64:
        truth = gradients(call, *(t.detach().double().requires_grad_() for t in given))
    for what, (a, b, t) in enumerate(zip(one, several, truth, strict=True)):
        b = b.full_tensor() if isinstance(b, DTensor) else b
        assert (b.shape, b.dtype) == (a.shape, a.dtype)
        allowed = 2 * (a - t).abs().max() + 4 * torch.finfo(x.dtype).eps * t.abs().max() + 1e-300
        if x.dtype == torch.float64:
            allowed = allowed * 16
        error = (b - t).abs().max()
        assert error <= allowed, f"{name}, {list(x.shape)}, {where}, result {what}: off by {error}, not {allowed}"


def image(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype).to(DEVICE)
    return x.to(memory_format=torch.channels_last) if channels_last else x


@check
def rows(mesh: Any) -> None:
    for height, channels_last, f in ((12, True, F1), (13, False, F2)):
        for name, call in CALLS.items():
            x = image((2, 12, height, 5), torch.float64, channels_last)
            compare(mesh, name, call, x, f, [Shard(2)], dtensors=channels_last)


@check
def rows_in_float32(mesh: Any) -> None:
    for name in CALLS if DEVICE == "cpu" and mesh.size() == 2 else ONE_OF_EACH:  # a GPU has kernels to compile
        compare(mesh, name, CALLS[name], image((1, 12, 11, 6), torch.float32, False), F1, [Shard(2)])


@check
def fewer_rows_than_processes(mesh: Any) -> None:
    for name, call in CALLS.items():
        if name not in NEED_ROWS:
            compare(mesh, name, call, image((1, 12, mesh.size() - 1, 7), torch.float64, True), F2, [Shard(2)])


@check
def other_axes(mesh: Any) -> None:
    for name in ONE_OF_EACH:
        for axis, batch in ((0, 4), (0, 1), (1, 2), (3, 1), (None, 2)):
            x = image((batch, 12, 6, 11), torch.float64, axis == 3)
            where = Replicate() if axis is None or (axis == 1 and "conv" in name) else Shard(axis)
            compare(mesh, name, CALLS[name], x, F2, [where], dtensors=batch == 2)


@check
def two_axes(mesh: Any) -> None:
    for shape in ((mesh.size(), 1), (1, mesh.size())):
        both = init_device_mesh("cpu", shape)
        for name in ONE_OF_EACH:
            where = [Shard(0 if name == "group_norm" else 3), Shard(2)]
            compare(both, name, CALLS[name], image((2, 12, 6, 7), torch.float64, False), F2, where)


@check
def second_order(mesh: Any) -> None:
    def penalty(call: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
        (dx,) = torch.autograd.grad(loss(call(*args)), args[:1], create_graph=True)
        dx.square().sum().backward()
        return [dx, *(t.grad for t in args if t.grad is not None)]

    for name in (*ONE_OF_EACH, "conv_transpose2d"):
        call = CALLS[name]
        x = image((2, 12, 7, 6), torch.float64, False)
        one = penalty(call, *(t.double().clone().requires_grad_() for t in (x, P, F2)))
        for where in (Shard(2), Shard(0)):
            split = distribute_tensor(x, mesh, [where]).requires_grad_()
            several = penalty(call, split, *(t.double().clone().requires_grad_() for t in (P, F2)))
            for a, b in zip(one, several, strict=True):
                b = b.full_tensor() if isinstance(b, DTensor) else b
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@check
def fewer_channels_than_processes(mesh: Any) -> None:
    """A process without channels still has a part in every sum, and gradients of its own parameters."""
    c = mesh.size() - 1
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "bias_act": lambda x, p, f: pixfuse.bias_act(x, p[:c], act="swish"),
        "group_norm": lambda x, p, f: pixfuse.group_norm(x, c, p[:c], p[:c], act="silu"),
        "filtered_lrelu": lambda x, p, f: pixfuse.filtered_lrelu(x, None, None, p[:c], up=2),
        "upfirdn2d": lambda x, p, f: fir(x, p, f, up=2),
        "bicubic": lambda x, p, f: resized(x, p, f, size=[3, 7], mode="bicubic"),
    }
    for name, call in calls.items():
        for dtensors in (False, True):
            compare(mesh, name, call, image((2, c, 5, 4), torch.float64, False), F2, [Shard(1)], dtensors)
    calls["bias of a vector"] = lambda x, p, f: pixfuse.bias_act(x, p[:c], dim=0, act="tanh")
    compare(mesh, "bias of a vector", calls["bias of a vector"], image((c,), torch.float64, False), F2, [Shard(0)])
    none = pixfuse.group_norm(distribute_tensor(torch.zeros(2, 0, 4, 3), mesh, [Shard(1)]), 2)
    assert none.shape == (2, 0, 4, 3)


@check
def split_parameters(mesh: Any) -> None:
    """Parameters split by FSDP's rule, with images split evenly or not: two orders, and what has no gradient alike."""

    def orders(call: Callable[..., Tensor], *given: Tensor) -> list[Tensor | None]:
        y = call(*given)
        first = torch.autograd.grad(loss(y), given, create_graph=True)
        norms = sum(whole((g * g).sum()) for g in first)
        alone = torch.autograd.grad(y.sum(), given, create_graph=True)  # of what is linear, independent of x
        norms = norms + sum(whole((g * g).sum()) for g in alone)
        second = torch.autograd.grad(norms, given, allow_unused=True)
        for t, g in zip(given * 2, (*first, *second), strict=True):
            if isinstance(t, DTensor) and g is not None:
                assert g.placements == t.placements
        return [y, *first, *second]

    def whole(t: Tensor) -> Tensor:
        return t.full_tensor() if isinstance(t, DTensor) else t

    calls: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
        "linear": (lambda x, b: pixfuse.bias_act(x, b, clamp=0.7), ((4,),)),
        "lrelu": (lambda x, b: pixfuse.bias_act(x, b, act="lrelu"), ((4,),)),
        "group_norm": (lambda x, w, b: pixfuse.group_norm(x, 4, w, b), ((4,), (4,))),
        "modulated_conv2d": (
            lambda x, w, s, n: pixfuse.modulated_conv2d(x, w, s, n, up=2, padding=1, resample_filter=F1),
            ((2, 4, 3, 3), (5, 4), (12, 6)),
        ),
        "conv2d_resample": (
            lambda x, w: pixfuse.conv2d_resample(x, w, F1, up=2, padding=1, groups=2, flip_weight=False),
            ((2, 2, 3, 3),),
        ),
    }
    for name, (call, shapes) in calls.items():
        x = image((5, 4, 6, 3), torch.float64, name != "lrelu")
        parameters = [image(shape, torch.float64, False) + 0.5 for shape in shapes]
        one = orders(call, *(t.clone().requires_grad_() for t in (x, *parameters)))
        for axis in (0, 1, 2):
            split = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in parameters]
            several = orders(call, distribute_tensor(x, mesh, [Shard(axis)]).requires_grad_(), *split)
            for i, (a, b) in enumerate(zip(one, several, strict=True)):
                assert (a is None) == (b is None), f"{name}, axis {axis}, result {i}"
                if a is not None and b is not None:
                    torch.testing.assert_close(whole(b), a, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@check
def compiled(mesh: Any) -> None:
    """Shards of the batch stay split, and parameters and filters may be plain."""
    if mesh.size() > 2:  # to compile takes seconds
        return

    def call(x: Tensor, p: Tensor, f: Tensor) -> Tensor:
        return pixfuse.upsample2d(pixfuse.bias_act(x, p, act="swish"), f.detach())

    run = torch.compile(call, backend="aot_eager")
    compare(mesh, "compiled", run, image((5, 12, 4, 3), torch.float64, False), F1, [Shard(0)])
    torch._dynamo.reset()


@check
def outside_the_mesh(mesh: Any) -> None:
    """A process that holds no shard makes the same calls, and has sizes and zeros."""
    first = DeviceMesh("cpu", [0])
    x = image((2, 12, 7, 6), torch.float64, False)
    for name in (*ONE_OF_EACH, "modulated_conv2d"):
        results = []
        for split in (False, True):
            x_there = distribute_tensor(x, first, [Shard(2)], src_data_rank=None) if split else x.clone()
            given = [x_there.requires_grad_(), P.double().requires_grad_(), F2.double()]
            y = CALLS[name](*given)
            (dx,) = torch.autograd.grad(loss(y), given[:1], create_graph=True)
            dx.square().sum().backward()
            results.append([y, dx, given[0].grad, given[1].grad])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None), name
            if a is not None and b is not None:
                assert b.shape == a.shape, name
                if mesh.get_local_rank() == 0:
                    b = b.full_tensor() if isinstance(b, DTensor) else b
                    torch.testing.assert_close(b, a, msg=lambda m, name=name: f"{name}: {m}")


@check
def other_ranks_and_dtypes(mesh: Any) -> None:
    def same(call: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> None:
        x = x.to(DEVICE)
        y = call(distribute_tensor(x, mesh, [Shard(axis)]))
        assert y.placements == (Shard(axis),)
        torch.testing.assert_close(y.full_tensor(), call(x))

    for axis in (2, 3, 4):
        x = torch.randn(1, 4, 5, 4, 7)
        same(lambda x: pixfuse.interpolate(x, size=[8, 3, 9], mode="trilinear"), x, axis)
        same(lambda x: pixfuse.upsample_nearest(x, [1, 3, 2]), x, axis)
        same(lambda x: pixfuse.group_norm(x, 2), x, axis)
        same(lambda x, axis=axis: pixfuse.bias_act(x, P[: x.shape[axis]], dim=axis), x, axis)
    same(lambda x: pixfuse.interpolate(x, size=9, mode="linear"), torch.randn(2, 3, 5), 2)
    picture = torch.arange(3 * 11 * 5, dtype=torch.uint8).reshape(1, 3, 11, 5)
    same(lambda x: pixfuse.interpolate(x, scale_factor=1.5, mode="bicubic"), picture, 2)
    same(lambda x: pixfuse.upsample_nearest(x, 2), picture > 9, 2)
    for dtype in (torch.bfloat16, torch.float16):
        same(lambda x: pixfuse.upsample2d(x, F1), torch.randn(1, 3, 7, 5).to(dtype), 2)


@check
def same_bits(mesh: Any) -> None:
    """A shard is the same op on what it reads, so it has the very same values."""
    for name in ("bias_act", "upfirdn2d up", "upfirdn2d down", "filtered_lrelu", "upsample_nearest", "nearest"):
        x = image((1, 12, 19, 16), torch.float32, False)
        y = CALLS[name](distribute_tensor(x, mesh, [Shard(2)]), P, F1)
        assert torch.equal(y.full_tensor(), CALLS[name](x, P, F1)), name


@check
def layout(mesh: Any) -> None:
    x = image((2, 12, 8, 6), torch.float32, True)
    for name in (*ONE_OF_EACH[:-1], "modulated_conv2d"):
        split = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
        y = CALLS[name](split, P, F1)
        y.sum().backward()
        for t in (y, split.grad):
            assert t.is_contiguous(memory_format=torch.channels_last), name
            assert t.to_local().is_contiguous(memory_format=torch.channels_last), name
    split = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
    y = pixfuse.bias_act(split, act="swish")
    (dx,) = torch.autograd.grad(y, split, torch.ones_like(y, memory_format=torch.contiguous_format))
    assert dx.is_contiguous(memory_format=torch.channels_last)


@check
def large_mean(mesh: Any) -> None:
    """The pooled statistics keep a variance that is 1e8 times smaller than the square of the mean."""
    x = image((2, 8, 9, 8), torch.float32, False)
    compare(mesh, "large mean", lambda x, p, f: pixfuse.group_norm(x, 2), x + 1e4, F1, [Shard(2)])
    constant = distribute_tensor(torch.full((1, 8, 5, 4), 3.0e4, device=DEVICE), mesh, [Shard(2)])
    assert torch.equal(pixfuse.group_norm(constant, 2, bias=P[:8]).full_tensor()[0, :, 2, 1], P[:8])
    for size in (1e30, 1e-30):
        y = pixfuse.group_norm(distribute_tensor(x * size, mesh, [Shard(2)]), 2, eps=0)
        torch.testing.assert_close(y.full_tensor(), pixfuse.group_norm(x * size, 2, eps=0))


@check
def errors(mesh: Any) -> None:
    n, last = mesh.size(), mesh.get_local_rank() == mesh.size() - 1
    local, shape = torch.zeros(1, 2, n + 1 if last else 1, 3), torch.Size([1, 2, 2 * n, 3])
    x = DTensor.from_local(local, mesh, [Shard(2)], shape=shape, stride=(12 * n, 6 * n, 3, 1))
    with pytest.raises(ValueError, match=r"as torch\.chunk splits them"):
        pixfuse.upsample2d(x, None)
    whole = distribute_tensor(torch.zeros(1, 2, 4, 3), mesh, [Shard(2)])
    elsewhere = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (n, 1)), [Replicate(), Replicate()])
    with pytest.raises(ValueError, match="must lie on one mesh"):
        pixfuse.group_norm(whole, 2, elsewhere)
    with pytest.raises(ValueError, match="weight must have shape"):
        pixfuse.group_norm(whole, 2, torch.ones(3))
    plain, b = torch.zeros(1, 2, 4, 3), distribute_tensor(torch.ones(2), mesh, [Replicate()])
    with pytest.raises(TypeError, match="bias_act: x must be a DTensor as b is, got float32 of shape"):
        pixfuse.bias_act(plain, b)
    w = distribute_tensor(torch.ones(2, 2, 9, 1), mesh, [Replicate()])
    with pytest.raises(TypeError, match="conv2d_resample: x must be a DTensor as w is, got float32 of shape"):
        pixfuse.conv2d_resample(plain, w, padding=4)
    with pytest.raises(ValueError, match=r"conv2d: stride must be at least 1, got \(0, 0\)"):
        pixfuse.distributed.conv2d(whole, w, stride=0)
    with pytest.raises(ValueError, match="output_padding must be smaller than stride or dilation"):
        pixfuse.distributed.conv_transpose2d(whole, w, output_padding=1)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        pixfuse.distributed.conv2d(whole, w)


@check
def partial_sums_and_odd_groups(mesh: Any) -> None:
    x = image((1, 12, 4, 3), torch.float64, False)
    y = pixfuse.bias_act(DTensor.from_local(x, mesh, [Partial()]), P.double(), act="swish")
    torch.testing.assert_close(y.full_tensor(), pixfuse.bias_act(x * mesh.size(), P.double(), act="swish"))
    y = pixfuse.group_norm(distribute_tensor(x, mesh, [Shard(1)]), 1)  # no whole group fits
    torch.testing.assert_close(y.full_tensor(), pixfuse.group_norm(x, 1))


# --- models ---------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.norm = pixfuse.nn.GroupNormSiLU(2, 8)
        self.up = pixfuse.nn.Upsample(scale_factor=2)
        self.blur = pixfuse.nn.Blur([1, 2, 1], down=2)
        self.second = torch.nn.Conv2d(8, 4, 3, padding=1, bias=False)
        self.act = pixfuse.nn.FusedLeakyReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.blur(self.up(self.norm(self.first(x))))))


def net(channels_last: bool) -> tuple[Net, Net, Tensor]:
    """A model, its twin and a batch."""
    torch.manual_seed(0)
    format = torch.channels_last if channels_last else torch.contiguous_format
    model, twin, x = Net().to(memory_format=format), Net().to(memory_format=format), torch.randn(6, 4, 12, 10)
    twin.load_state_dict(model.state_dict())
    return model.to(DEVICE), twin.to(DEVICE), x.to(DEVICE, memory_format=format)


def part(mesh: Any, x: Tensor) -> Tensor:
    return x.chunk(mesh.size())[mesh.get_local_rank()]


def same_parameters(model: Net, twin: Net) -> None:
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        a = a.full_tensor() if isinstance(a, DTensor) else a
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


def step(model: Any, x: Tensor) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@check
def ddp(mesh: Any) -> None:
    for channels_last in (False, True):
        model, twin, x = net(channels_last)
        step(twin, x)
        step(torch.nn.parallel.DistributedDataParallel(model), part(mesh, x))
        same_parameters(model, twin)


@check
def fsdp2(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for channels_last in (False, True):
        model, twin, x = net(False)  # FSDP refuses weights in channels_last
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        for module in (model.first, model.norm, model.second):
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            step(twin, x)
            step(model, part(mesh, x))
        same_parameters(model, twin)


@check
def readme(mesh: Any) -> None:
    """The example runs on several processes too; tests/test_docs.py runs it on one."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = (b for b in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "pixfuse.distributed" in b)
    os.environ["WORLD_SIZE"] = str(mesh.size())
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["y"].placements == (Shard(2),)
    assert names["model"][0].weight.grad.abs().sum() > 0


@check
def model_on_rows(mesh: Any) -> None:
    import pixfuse.distributed

    for channels_last in (False, True):
        model, twin, x = net(channels_last)
        assert pixfuse.distributed.patch_convolutions(model) is model
        y = model(distribute_tensor(x, mesh, [Shard(2)]))
        torch.testing.assert_close(y.full_tensor(), twin(x))
        step(twin, x)
        step(model, distribute_tensor(x, mesh, [Shard(2)]))
        same_parameters(model, twin)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ON_GPUS)
def test_on_gpus(name: str, failures_on_gpus: list[dict[str, str]]) -> None:
    test_on_several_processes(name, failures_on_gpus)


@pytest.mark.parametrize("name", CHECKS)
def test_on_several_processes(name: str, failures: list[dict[str, str]]) -> None:
    assert not any(name in failed for failed in failures), "\n".join(failed.get(name, "") for failed in failures)
