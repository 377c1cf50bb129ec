"""Train StyleGAN2 on the ops of pixfuse.

    python train.py --resolution 64 --out run                     # the photographs of scikit-image
    python train.py --data pictures/ --resolution 256 --out run   # a folder of pictures
    python train.py --graphs ...                                  # a GPU repeats its steps without Python
    torchrun --nproc-per-node 8 train.py --data pictures/ ...     # several GPUs; --batch counts for each

Writes sample grids and ``checkpoint.pt`` into the folder; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # the imports below take seconds
    interrupt = signal.signal(signal.SIGINT, lambda *_: os._exit(130))

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
from torch.optim.swa_utils import get_ema_multi_avg_fn

R1_EVERY, PL_EVERY = 16, 4


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        """Exit status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def number(kind: type[int | float], least: float, most: float = sys.float_info.max) -> Callable[[str], float]:
    """The type of an option."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        words = "a whole number" if kind is int else "a number"
        limits = f"of at least {least}" if most == sys.float_info.max else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"must be {words} {limits}, got {text!r}")

    return parse


def side(text: str) -> int:
    """The type of --resolution."""
    if text not in (str(2**i) for i in range(3, 13)):
        raise argparse.ArgumentTypeError(f"must be a power of 2 from 8 to 4096, got {text!r}")
    return int(text)


def folder(text: str) -> Path:
    """The type of --data."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got {text!r}")
    return Path(text)


def new_folder(text: str) -> Path:
    """The type of --out."""
    return folder(text) if Path(text).exists() else Path(text)


def here(text: str) -> torch.device:
    """The type of --device: cuda is the GPU of this process, as torchrun numbers them."""
    try:
        device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if text == "cuda" else text)
        torch.ones(1, device=device).item()
    except Exception:  # each kind of device has its own
        raise argparse.ArgumentTypeError(f"must be a device of this machine, got {text!r}") from None
    return device


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    positive, weight = number(int, 1), number(float, 0)
    add("--data", type=folder, help="a folder of pictures; without it the photographs of scikit-image")
    add("--out", type=new_folder, default=Path("stylegan2-out"), help="where pictures and checkpoint.pt go")
    add("--resolution", type=side, default=64)
    add("--steps", type=positive, default=10_000)
    add("--batch", type=positive, default=16, help="pictures per process and step")
    add("--base", type=positive, default=16384, help="channels times resolution: 16384 is configuration E, 32768 is F")
    add("--most", type=positive, default=512, help="the most channels of a layer, and the size of z and w")
    add("--half", type=number(int, 0), default=0, help="compute this many of the highest resolutions in float16")
    add("--channels-last", action="store_true", help="the layout of activations; pays with --half on GPUs")
    add("--rate", type=weight, default=0.002, help="learning rate")
    add("--gamma", type=weight, help="weight of R1; by default 0.0002 * resolution**2 / all pictures of a step")
    add(
        "--zoom",
        type=number(float, 0, 1),
        help="smallest square, as a share of a picture; default 1 with --data, else 0.4",
    )
    add("--every", type=positive, default=500, help="steps between checkpoints with sample pictures")
    add("--workers", type=number(int, 0), default=0, help="processes that load pictures")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0)
    add("--device", type=here, default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--graphs",
        action="store_true",
        help="replay steps as CUDA graphs: twice as fast where the GPU waits for Python",
    )
    args = parser.parse_args(arguments)
    if args.graphs and (args.device.type != "cuda" or "RANK" in os.environ):
        many = "several processes" if "RANK" in os.environ else args.device
        parser.error(f"argument --graphs: must be for one process on a GPU, got {many}")
    if args.zoom is None:
        args.zoom = 0.4 if args.data is None else 1.0
    return args


class Replayed:
    """Part of a step on a GPU: run at its first call, recorded as a CUDA graph at the second, replayed from then on.

    Args:
        part: a function of tensors, always of the same sizes, that gives a tensor and never waits for the GPU.
    """

    pool: Any = None  # the memory of all graphs: they run one after the other

    def __init__(self, part: Callable[..., Tensor]) -> None:
        self.part, self.graph, self.inputs, self.calls = part, torch.cuda.CUDAGraph(), (), 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What the part gives."""
        self.calls += 1
        if self.calls == 1:  # kernels are compiled and libraries make their plans
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = self.part(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return result
        if self.calls == 2:
            self.inputs = tuple(map(torch.clone, inputs))
            with torch.cuda.graph(
                self.graph, pool=self.pool, capture_error_mode="thread_local"
            ):  # data is loaded beside
                self.result = self.part(*self.inputs)
            Replayed.pool = self.graph.pool()
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.result.clone()


class Training:
    """Everything that changes while training, and the step that changes it."""

    def __init__(self, args: argparse.Namespace, device: torch.device, world: int, contents: str) -> None:
        self.args, self.device = args, device
        torch.manual_seed(args.seed)
        widths = Widths(args.resolution, args.base, args.most, args.half, args.channels_last)
        self.g, self.d = Generator(widths, args.most).to(device), Discriminator(widths).to(device)
        self.average = copy.deepcopy(self.g).eval().requires_grad_(False)
        self.g_adam, self.d_adam = self._adam(self.g, PL_EVERY), self._adam(self.d, R1_EVERY)
        self.length = torch.zeros((), device=device)
        self.done = 0
        self.pictures = args.batch * world  # of a step
        self.gamma = 0.0002 * args.resolution**2 / self.pictures if args.gamma is None else args.gamma
        # What the course of the training depends on.
        names = ("resolution", "base", "most", "half", "channels-last", "rate", "zoom", "seed", "batch")
        self.settings = {f"--{name}": getattr(args, name.replace("-", "_")) for name in names}
        self.settings |= {"--data": contents, "--gamma": self.gamma, "processes": world}  # each draws its own numbers
        self.call_g: nn.Module = self.g
        self.call_d: nn.Module = self.d
        if world > 1:
            where = [device] if device.type == "cuda" else None
            # Buffers change in every forward; only those of the first process are ever used.
            new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
            own_buffers: Any = {"forward_sync_buffers" if new else "broadcast_buffers": False}
            self.call_g = DistributedDataParallel(self.g, where, **own_buffers)
            self.call_d = DistributedDataParallel(self.d, where, **own_buffers)
            self._settle_order()
        parts = (self._update_g, self._regularise_g, self._update_d, self._regularise_d)
        self.update_g, self.regularise_g, self.update_d, self.regularise_d = (
            map(Replayed, parts) if args.graphs else parts
        )

    def _settle_order(self) -> None:
        """The backward pass after which DDP sums gradients in another order, which shows in the last bit, is this."""
        picture, _ = self.call_g(torch.randn(2, self.args.most, device=self.device))
        self.call_d(picture.detach()).sum().backward()
        picture.sum().backward()
        for net in (self.g, self.d):
            net.zero_grad()
        self.g.mapping.mean.zero_()

    def _adam(self, net: nn.Module, every: int) -> torch.optim.Adam:
        """Adam that makes up for the regulariser's own steps, one in ``every`` (appendix B of the paper)."""
        share = every / (every + 1)
        capturable = self.device.type == "cuda"
        return torch.optim.Adam(
            net.parameters(), lr=self.args.rate * share, betas=(0.0, 0.99**share), fused=True, capturable=capturable
        )

    def step(self, real: Tensor, rank: int) -> dict[str, float]:
        """Train on one batch. Returns the two losses."""
        torch.manual_seed((self.args.seed * 1_000_003 + self.done) * 4096 + rank)  # nothing depends on earlier steps
        real = real.to(self.device)

        def z(n: int) -> Tensor:
            return torch.randn(n, self.args.most, device=self.device)

        g_loss = self.update_g(z(len(real)))
        if self.done % PL_EVERY == 0:
            self.regularise_g(z(max(1, len(real) // 2)))
        d_loss = self.update_d(z(len(real)), real)
        if self.gamma and self.done % R1_EVERY == 0:
            self.regularise_d(real)

        self.done += 1
        # Half of the averaged weights' memory is 10,000 pictures long, or at first a twentieth of those seen.
        memory = 0.5 ** (1 / min(10_000 / self.pictures, 0.05 * self.done))
        with torch.no_grad():
            get_ema_multi_avg_fn(memory)([*self.average.parameters()], [*self.g.parameters()], 0)
            self.average.mapping.mean.copy_(self.g.mapping.mean)
        return {"G": g_loss.item(), "D": d_loss.item()}

    # The parts of a step: tensors in, a loss out, and no look at a number in between, so that each may be a CUDA graph.

    def _update_g(self, z: Tensor) -> Tensor:
        self.d.requires_grad_(False)
        loss = self._update([losses.generator_loss(self.call_g, self.d, z)], self.g_adam)
        self.d.requires_grad_(True)
        return loss

    def _regularise_g(self, z: Tensor) -> Tensor:
        penalty = losses.path_length_penalty(self.call_g, z, self.length)
        return self._update([penalty * (2 * PL_EVERY)], self.g_adam)

    def _update_d(self, z: Tensor, real: Tensor) -> Tensor:
        return self._update(losses.discriminator_losses(self.g, self.call_d, z, real), self.d_adam)

    def _regularise_d(self, real: Tensor) -> Tensor:
        return self._update([losses.r1_penalty(self.call_d, real, self.gamma) * R1_EVERY], self.d_adam)

    def _update(self, losses: Iterable[Tensor], adam: torch.optim.Adam) -> Tensor:
        """A step along the gradient of a sum. Returns the sum."""
        total = torch.zeros((), device=self.device)
        for loss in losses:
            loss.backward()
            total += loss.detach()
            del loss
        for group in adam.param_groups:
            for p in group["params"]:
                if p.grad is not None:  # float16 may overflow
                    p.grad.nan_to_num_(0, 1e5, -1e5)
        adam.step()
        adam.zero_grad()
        return total

    def _parts(self) -> dict[str, Any]:
        names = ("g", "d", "average", "g_adam", "d_adam")
        return {name: getattr(self, name) for name in names}

    def save(self, path: Path) -> None:
        """Write everything to a file, all or nothing."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        with written(path) as new, new.open("wb") as file:  # whose errors say more than torch.save's own
            torch.save(state | {"length": self.length, "done": self.done, "settings": self.settings}, file)

    def load(self, path: Path) -> None:
        """Go on from a file. Raises OSError if that can't be."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            other = {name: value for name, value in self.settings.items() if state["settings"][name] != value}
            for name, part in self._parts().items() if not other else ():
                part.load_state_dict(state[name])
            for group in self.g_adam.param_groups + self.d_adam.param_groups:
                group["capturable"] = self.device.type == "cuda"  # the file may come from another device
            self.length.copy_(state["length"])
            self.done = state["done"]
        except Exception as error:  # a file may hold anything
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise OSError(
                f"{path} is no checkpoint of this program ({words}); name another folder with --out"
            ) from None
        if other:
            was, now = (
                ", ".join(f"{name} {found[name]}" for name in other) for found in (state["settings"], self.settings)
            )
            raise OSError(f"{path} was trained with {was}, not {now}; name another folder with --out to start anew")

    @torch.no_grad()
    def sample(self, path: Path, rows: int = 4, columns: int = 8) -> None:
        """Write a grid of pictures, always from the same z."""
        z = torch.randn(rows * columns, self.args.most, generator=torch.Generator().manual_seed(0)).to(self.device)
        pictures = torch.cat([self.average(part, truncation=0.7)[0] for part in z.split(8)])
        grid = pictures.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
        with written(path) as new:
            Image.fromarray((grid * 127.5 + 128).clamp(0, 255).byte().cpu().numpy()).save(new, "png")


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Where to write what becomes the file, all or nothing. Raises OSError if that can't be."""
    new = path.with_suffix(".new")
    try:
        yield new
        new.replace(path)
    except Exception as error:  # torch.save has its own for a full disk
        with contextlib.suppress(OSError):
            new.unlink()
        raise OSError(f"{path} can't be written: {error}".partition("\n")[0]) from None


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[tuple[int, int]]:
    """This process' rank and how many there are: one, or as torchrun says."""
    if "RANK" not in os.environ:
        yield 0, 1
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace) -> Training:
    """Train. Returns what came of it."""
    console = Console()
    paths = data.files(args.data)
    checkpoint = args.out / "checkpoint.pt"
    args.out.mkdir(parents=True, exist_ok=True)
    with processes(args.device) as (rank, world):
        training = Training(args, args.device, world, data.contents(paths))
        if checkpoint.exists():
            training.load(checkpoint)
        if rank == 0:
            weights = sum(p.numel() for p in training.g.parameters())
            words = (
                f"G of {weights:,} weights, {len(paths)} pictures, {world} x {args.device}, from step {training.done}"
            )
            console.print(words, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        pictures = data.Pictures(paths, args.resolution, args.zoom, args.seed)
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


def main(arguments: list[str] | None = None) -> Training:
    """Train. Returns what came of it."""
    try:
        return train(options(arguments))
    except OSError as error:
        sys.exit(f"train.py: {str(error).splitlines()[-1]}")  # before that, a worker's traceback
    except KeyboardInterrupt:
        print("train.py: stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)
    main()
