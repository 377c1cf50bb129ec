"""The decoder of a latent-diffusion VAE on one GPU and on several, each of which holds some rows of the picture.

    torchrun --nproc-per-node 2 benchmarks/vae_decoder_two_gpus.py                 # time, memory and values, NCCL
    torchrun --nproc-per-node 2 benchmarks/vae_decoder_two_gpus.py --backend gloo  # values; processes share a GPU
    python benchmarks/vae_decoder_two_gpus.py --backend fake                       # one half without its neighbour

The last one times what a GPU computes of its half, with every kernel and every packing of a halo but no transport: an
upper bound of the scaling where there is one GPU only. bfloat16, channels_last, inference, random weights, the widths
of Stable Diffusion's decoder. Its mid-block attention is left out: it looks at all pixels, which rows do not split.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import pixfuse.nn
from pixfuse.distributed import Conv2d

WIDTHS = (512, 512, 256, 128)


class Resnet(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = pixfuse.nn.GroupNormSiLU(32, before), pixfuse.nn.GroupNormSiLU(32, after)
        self.conv1, self.conv2 = Conv2d(before, after, 3, padding=1), Conv2d(after, after, 3, padding=1)
        self.shortcut = Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.conv2(self.norm2(self.conv1(self.norm1(x))))


class Decoder(nn.Module):
    """Latents ``[N, 4, h, w]`` to pictures ``[N, 3, 8 h, 8 w]``."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.first = Conv2d(4, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList([nn.ModuleList([Resnet(widths[0], widths[0]) for _ in range(2)])])
        before = widths[0]
        for width in widths:
            self.blocks.append(nn.ModuleList([Resnet(before if i == 0 else width, width) for i in range(3)]))
            before = width
        self.after_upsampling = nn.ModuleList([Conv2d(w, w, 3, padding=1) for w in widths[:-1]])
        self.norm = pixfuse.nn.GroupNormSiLU(32, before)
        self.last = Conv2d(before, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for level, block in enumerate(self.blocks):
            for resnet in block:
                x = resnet(x)
            if 1 <= level <= len(self.after_upsampling):
                x = self.after_upsampling[level - 1](pixfuse.upsample_nearest(x, 2))
        return self.last(self.norm(x))


def make(dtype: torch.dtype, device: str, latent: int, widths: tuple[int, ...]) -> tuple[Decoder, Tensor]:
    torch.manual_seed(0)
    model = Decoder(widths).to(device, dtype, memory_format=torch.channels_last).requires_grad_(False)
    x = torch.randn(1, 4, latent, latent, device=device).to(dtype).to(memory_format=torch.channels_last)
    return model, x


def measure(model: nn.Module, x: Tensor, repeats: int) -> dict[str, Any]:
    """Milliseconds of a forward pass (median and all) and the GiB at its peak."""
    for _ in range(2):
        model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        if dist.is_initialized():
            dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(x)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    gib = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": round(statistics.median(times), 2), "all": [round(t, 2) for t in times], "GiB": round(gib, 2)}


def errors(mesh: Any, device: str, dtype: torch.dtype, latent: int, widths: tuple[int, ...]) -> dict[str, float]:
    """How far the pictures from one and from several processes are from that in the next larger dtype, relatively."""
    model, x = make(dtype, device, latent, widths)
    several = model(distribute_tensor(x, mesh, [Shard(2)]))
    assert isinstance(several, DTensor)
    pictures = {"one": model(x), "split": several.full_tensor()}
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    truth = model.to(wide)(x.to(wide)).double()
    return {name: float((y.double() - truth).norm() / truth.norm()) for name, y in pictures.items()}


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--backend", choices=("nccl", "gloo", "fake"), default="nccl")
    parse.add_argument("--latent", type=int, default=512, help="height and width of the latent; 8 times for pictures")
    parse.add_argument("--widths", type=int, nargs=4, default=WIDTHS)
    parse.add_argument("--repeats", type=int, default=7)
    parse.add_argument("--tune", action="store_true", help="let cuDNN time its algorithms in the warm-up")
    parse.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    how = parse.parse_args()
    torch.backends.cudnn.benchmark = how.tune
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if how.backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        device = how.device
    else:
        rank = int(os.environ["LOCAL_RANK"])
        device = f"cuda:{rank % torch.cuda.device_count()}" if how.device == "cuda" else "cpu"
        dist.init_process_group(how.backend)
    if how.device == "cuda":
        torch.cuda.set_device(device)
    parts, me = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(how.device, (parts,))
    found: dict[str, Any] = {"backend": how.backend, "parts": parts, "torch": torch.__version__}
    if how.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    with torch.inference_mode(False), torch.no_grad():
        if how.backend != "fake":
            for dtype in (torch.float32, torch.bfloat16):
                for latent in (24, 17):
                    found[f"relative errors, {dtype}, latent {latent}"] = errors(
                        mesh, device, dtype, latent, how.widths
                    )
        if how.device == "cuda" and how.backend != "gloo":
            model, x = make(torch.bfloat16, device, how.latent, how.widths)
            split = distribute_tensor(x, mesh, [Shard(2)])
            found["one"] = measure(model, x, how.repeats)
            found["split"] = measure(model, split, how.repeats)
            found["again"] = measure(model, x, how.repeats)["ms"]
            found["speedup"] = round(found["one"]["ms"] / found["split"]["ms"], 3)
            if how.backend == "nccl":
                a, b = model(split), model(x)
                rows = b.chunk(parts, 2)[me]
                found["difference, large"] = float((a.to_local() - rows).float().norm() / rows.float().norm())
    if me == 0:
        print(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
