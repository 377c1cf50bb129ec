"""Train StyleGAN2 on the ops of pixfuse.

    python train.py --resolution 64 --out run                     # the photographs of scikit-image
    python train.py --data pictures/ --resolution 256 --out run   # a folder of pictures
    torchrun --nproc-per-node 8 train.py --data pictures/ ...     # several GPUs; --batch counts for each

Writes sample grids and ``checkpoint.pt`` into the folder; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import data
import losses
import torch
import torch.distributed as dist
from networks import Discriminator, Generator, Widths
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

R1_EVERY, PL_EVERY = 16, 4


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="a folder of pictures; without it the photographs of scikit-image")
    add("--out", type=Path, default=Path("stylegan2-out"), help="where pictures and checkpoint.pt go")
    add("--resolution", type=int, default=64)
    add("--steps", type=int, default=10_000)
    add("--batch", type=int, default=16, help="pictures per process and step")
    add("--base", type=int, default=16384, help="channels times resolution: 16384 is configuration E, 32768 is F")
    add("--most", type=int, default=512, help="the most channels of a layer, and the size of z and w")
    add("--half", type=int, default=0, help="compute this many of the highest resolutions in float16")
    add("--channels-last", action="store_true", help="the layout of activations; pays with --half on GPUs")
    add("--rate", type=float, default=0.002, help="learning rate")
    add("--gamma", type=float, help="weight of R1; by default 0.0002 * resolution**2 / all pictures of a step")
    add("--zoom", type=float, help="smallest random square, as a share of a picture; default 1 with --data, else 0.4")
    add("--every", type=int, default=500, help="steps between checkpoints with sample pictures")
    add("--workers", type=int, default=0, help="processes that load pictures")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


class Training:
    """Everything that changes while training, and the step that changes it."""

    def __init__(self, args: argparse.Namespace, device: torch.device, world: int) -> None:
        self.args, self.device = args, device
        torch.manual_seed(args.seed)
        widths = Widths(args.resolution, args.base, args.most, args.half, args.channels_last)
        self.g, self.d = Generator(widths, args.most).to(device), Discriminator(widths).to(device)
        self.average = copy.deepcopy(self.g).eval().requires_grad_(False)
        self.g_adam, self.d_adam = self._adam(self.g, PL_EVERY), self._adam(self.d, R1_EVERY)
        self.length = torch.zeros((), device=device)
        self.done = 0
        self.gamma = args.gamma or 0.0002 * args.resolution**2 / (args.batch * world)
        self.pictures = args.batch * world  # of a step
        self.call_g: nn.Module = self.g
        self.call_d: nn.Module = self.d
        if world > 1:
            where = [device] if device.type == "cuda" else None
            # Buffers change in every forward; only those of the first process are ever used.
            self.call_g = DistributedDataParallel(self.g, where, broadcast_buffers=False)
            self.call_d = DistributedDataParallel(self.d, where, broadcast_buffers=False)

    def _adam(self, net: nn.Module, every: int) -> torch.optim.Adam:
        """Adam that makes up for the regulariser's own steps, one in ``every`` (appendix B of the paper)."""
        share = every / (every + 1)
        return torch.optim.Adam(net.parameters(), lr=self.args.rate * share, betas=(0.0, 0.99**share), fused=True)

    def step(self, real: Tensor, rank: int) -> dict[str, float]:
        """Train on one batch. Returns the two losses."""
        torch.manual_seed((self.args.seed * 1_000_003 + self.done) * 4096 + rank)  # nothing depends on earlier steps
        real = real.to(self.device)
        z = torch.randn(len(real), self.args.most, device=self.device)

        self.d.requires_grad_(False)
        g_loss = self._update([losses.generator_loss(self.call_g, self.d, z)], self.g_adam)
        if self.done % PL_EVERY == 0:
            fewer = torch.randn(max(1, len(real) // 2), self.args.most, device=self.device)
            penalty = losses.path_length_penalty(self.call_g, fewer, self.length)
            self._update([penalty * (2 * PL_EVERY)], self.g_adam)
        self.d.requires_grad_(True)

        d_loss = self._update(losses.discriminator_losses(self.g, self.call_d, torch.randn_like(z), real), self.d_adam)
        if self.done % R1_EVERY == 0:
            self._update([losses.r1_penalty(self.call_d, real, self.gamma) * R1_EVERY], self.d_adam)

        self.done += 1
        # Half of the averaged weights' memory is 10,000 pictures long, or at first a twentieth of those seen.
        memory = 0.5 ** (1 / min(10_000 / self.pictures, 0.05 * self.done))
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), self.g.parameters(), strict=True):
                a.lerp_(p, 1 - memory)
            self.average.mapping.mean.copy_(self.g.mapping.mean)
        return {"G": g_loss, "D": d_loss}

    @staticmethod
    def _update(losses: Iterable[Tensor], adam: torch.optim.Adam) -> float:
        """A step along the gradient of a sum. Returns the sum."""
        adam.zero_grad()
        total = 0.0
        for loss in losses:
            loss.backward()
            total += loss.item()
            del loss
        for group in adam.param_groups:
            for p in group["params"]:
                if p.grad is not None:  # float16 may overflow
                    p.grad.nan_to_num_(0, 1e5, -1e5)
        adam.step()
        return total

    def _parts(self) -> dict[str, Any]:
        names = ("g", "d", "average", "g_adam", "d_adam")
        return {name: getattr(self, name) for name in names}

    def save(self, path: Path) -> None:
        """Write everything to a file, all or nothing."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        new = path.with_suffix(".new")
        torch.save(state | {"length": self.length, "done": self.done}, new)
        new.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a file."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.length.copy_(state["length"])
        self.done = state["done"]

    @torch.no_grad()
    def sample(self, path: Path, rows: int = 4, columns: int = 8) -> None:
        """Write a grid of pictures, always from the same z."""
        z = torch.randn(rows * columns, self.args.most, generator=torch.Generator().manual_seed(0)).to(self.device)
        pictures = torch.cat([self.average(part, truncation=0.7)[0] for part in z.split(8)])
        grid = pictures.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
        Image.fromarray((grid * 127.5 + 128).clamp(0, 255).byte().cpu().numpy()).save(path)


@contextlib.contextmanager
def processes(device: str) -> Iterator[tuple[torch.device, int, int]]:
    """This process' device, its rank and how many there are: one, or as torchrun says."""
    if "RANK" not in os.environ:
        yield torch.device(device), 0, 1
        return
    local = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield local, dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> Training:
    """Train. Returns what came of it."""
    args = options(arguments)
    console = Console()
    with processes(args.device) as (device, rank, world):
        paths = data.files(args.data)
        zoom = args.zoom or (0.4 if args.data is None else 1.0)
        pictures = data.Pictures(paths, args.resolution, zoom, args.seed)
        training = Training(args, device, world)
        checkpoint = args.out / "checkpoint.pt"
        args.out.mkdir(parents=True, exist_ok=True)
        if checkpoint.exists():
            training.load(checkpoint)
        if rank == 0:
            weights = sum(p.numel() for p in training.g.parameters())
            words = f"G of {weights:,} weights, {len(paths)} pictures, {world} x {device}, from step {training.done}"
            console.print(words, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        real = data.batches(pictures, args.batch, training.done, rank, world, args.workers)
        with Progress(*columns, console=console, disable=rank > 0) as progress:
            task = progress.add_task("training", total=args.steps, completed=training.done)
            while training.done < args.steps:
                found = training.step(next(real), rank)
                words = " ".join(f"{name} {value:.2f}" for name, value in found.items())
                progress.update(task, advance=1, description=words)
                if rank == 0 and (training.done % args.every == 0 or training.done == args.steps):
                    training.sample(args.out / f"step{training.done:06}.png")
                    training.save(checkpoint)
    return training


if __name__ == "__main__":
    main()
