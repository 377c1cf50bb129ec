"""Field case 30: DDP keeps quiet about gradient strides, and DTensor gives what one process gives."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import pixfuse

RANKS = 2


def _run(rank: int, worker: Callable[..., None], folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*barrier.*|.*pg.*device.*|.*torch.jit.script.*")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        worker(rank, *arguments)
    finally:
        dist.destroy_process_group()


def on_ranks(worker: Callable[..., None], *arguments: Any) -> None:
    """Run ``worker(rank, *arguments)`` in RANKS processes joined by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (worker, folder, arguments), nprocs=RANKS)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.norm = torch.nn.GroupNorm(2, 8)
        self.second = torch.nn.Conv2d(8, 4, 3, padding=1, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = pixfuse.group_norm(self.first(x), 2, self.norm.weight, self.norm.bias, act="silu")
        h = pixfuse.upsample_nearest(h, 2)
        h = pixfuse.upfirdn2d(h, torch.tensor([0.25, 0.5, 0.25]), down=2, padding=1)
        return pixfuse.bias_act(self.second(h), self.bias, act="lrelu")


def _net(channels_last: bool) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 4, 12, 10)
    if channels_last:
        return net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return net, x


def _ddp(rank: int, channels_last: bool) -> None:
    net, x = _net(channels_last)
    alone = _net(channels_last)[0]
    alone(x).square().mean().backward()
    parallel = torch.nn.parallel.DistributedDataParallel(net)
    parallel(x[rank * 2 : rank * 2 + 2]).square().mean().backward()
    for ours, whole in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, whole.grad)


@pytest.mark.parametrize("channels_last", [False, True])
def test_ddp(channels_last: bool) -> None:
    on_ranks(_ddp, channels_last)


CALLS: dict[str, Callable[..., Tensor]] = {
    "bias_act": lambda x, p: pixfuse.bias_act(x, p, act="swish"),
    "group_norm": lambda x, p: pixfuse.group_norm(x, 2, p, p, act="silu"),
    "upfirdn2d": lambda x, p: pixfuse.upfirdn2d(x, None, up=2, down=3, padding=1),
    "upsample_nearest": lambda x, p: pixfuse.upsample_nearest(x, 2),
    "interpolate": lambda x, p: pixfuse.interpolate(x, scale_factor=1.5, mode="bilinear"),
}


def _dtensor(rank: int, batch: int, shard: bool) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    import pixfuse.distributed  # noqa: F401

    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(1)
    x, p = torch.randn(batch, 4, 6, 5), torch.randn(4)
    placement = [Shard(0)] if shard else [Replicate()]

    def split(t: Tensor, where: list[Any]) -> Tensor:
        return distribute_tensor(t, mesh, where).requires_grad_()

    for name, call in CALLS.items():
        results = []
        for make in (lambda t, where: t.clone().requires_grad_(), split):
            a, b = make(x, placement), make(p, [Replicate()])
            y = call(a, b)
            y.square().sum().backward()
            grads = [g for g in (a.grad, b.grad) if g is not None]
            results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (y, *grads)])
        assert len(results[0]) == len(results[1])
        for whole, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, whole, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("batch", "shard"), [(4, True), (3, True), (3, False)], ids=["even", "uneven", "replicate"])
def test_dtensor(batch: int, shard: bool) -> None:
    on_ranks(_dtensor, batch, shard)
