"""``pixfuse demo``: the same small U-Net learns to restore photographs, on stock PyTorch ops and on pixfuse.

Both networks start from the same weights and see the same batches; their steps alternate, so that what else the
machine does hits both alike. The photographs ship in the wheel of scikit-image; one of them is held out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import pixfuse.nn

from .._shared.timing import environment

TRAINING = ("astronaut.png", "coffee.png", "rocket.jpg", "motorcycle_left.png")
HELD_OUT = "chelsea.png"
CROP = (52, 64, 240, 256)
"""Top, left, height and width of the crop of the held-out photograph."""
NOISE = 0.12
FIR = (1, 3, 3, 1)
PATCH, BATCH = 64, 8
WIDTHS = (32, 48, 64)


# --- the two sets of layers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """What differs between the networks: four kinds of layers, with the same state-dict keys in both sets."""

    name: str
    norm_silu: Callable[[int], nn.Module]
    activation: Callable[[int], nn.Module]
    down: Callable[[], nn.Module]
    up: Callable[[], nn.Module]


class _StockNormSiLU(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class _StockActivation(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x + self.bias[:, None, None], 0.2) * math.sqrt(2)


class _StockDown(nn.Module):
    """FIR filter and every second sample, as the depthwise convolution that it is."""

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        taps = torch.tensor(FIR, dtype=torch.float32) / sum(FIR)
        self.register_buffer("kernel", torch.outer(taps, taps))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.kernel.expand(x.shape[1], 1, 4, 4)
        return F.conv2d(x, weight, stride=2, padding=1, groups=x.shape[1])


STOCK = Layers(
    "stock PyTorch",
    norm_silu=lambda channels: _StockNormSiLU(8, channels),
    activation=_StockActivation,
    down=_StockDown,
    up=lambda: nn.Upsample(scale_factor=2),
)
PIXFUSE = Layers(
    "pixfuse",
    norm_silu=lambda channels: pixfuse.nn.GroupNormSiLU(8, channels),
    activation=pixfuse.nn.FusedLeakyReLU,
    down=lambda: pixfuse.nn.Blur(FIR, down=2),
    up=lambda: pixfuse.nn.Upsample(scale_factor=2),
)


class Block(nn.Module):
    """GroupNorm + SiLU and a convolution, with a short cut."""

    def __init__(self, layers: Layers, channels: int) -> None:
        super().__init__()
        self.norm = layers.norm_silu(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        return x + self.conv(self.norm(x))


class UNet(nn.Module):
    """Three resolutions; adds a correction to the picture that it is given."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        first, *others = WIDTHS
        self.enter = nn.Conv2d(3, first, 3, padding=1)
        self.before = nn.ModuleList([Block(layers, width) for width in WIDTHS])
        self.down = nn.ModuleList(
            [
                nn.Sequential(layers.down(), nn.Conv2d(a, b, 3, padding=1, bias=False), layers.activation(b))
                for a, b in zip(WIDTHS, others, strict=False)
            ]
        )
        self.up = nn.ModuleList(
            [
                nn.Sequential(layers.up(), nn.Conv2d(b, a, 3, padding=1, bias=False), layers.activation(a))
                for a, b in zip(WIDTHS, others, strict=False)
            ]
        )
        self.after = nn.ModuleList([Block(layers, width) for width in WIDTHS])
        self.norm = layers.norm_silu(first)
        self.leave = nn.Conv2d(first, 3, 3, padding=1)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)  # type: ignore[arg-type]

    def forward(self, picture: Tensor) -> Tensor:
        """``[N, 3, H, W]`` with H and W multiples of 4."""
        x = self.before[0](self.enter(picture))
        skips = []
        for down, block in zip(self.down, self.before[1:], strict=True):
            skips.append(x)
            x = block(down(x))
        x = self.after[-1](x)
        for up, block, skip in reversed(list(zip(self.up, self.after, skips, strict=False))):
            x = block(up(x) + skip)
        return picture + self.leave(self.norm(x))


# --- the data -------------------------------------------------------------------------------------------------


def photographs() -> tuple[list[Tensor], Tensor]:
    """The training photographs and the held-out one, each ``[3, H, W]`` in [-1, 1]."""
    spec = importlib.util.find_spec("skimage")  # only its pictures are wanted: it isn't imported
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the photographs are those of scikit-image: pip install 'pixfuse[cli]'")
    folder = Path(spec.submodule_search_locations[0], "data")

    def load(name: str) -> Tensor:
        with Image.open(folder / name) as picture:
            pixels = np.asarray(picture.convert("RGB"), dtype=np.float32)
        return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1).contiguous()

    return [load(name) for name in TRAINING], load(HELD_OUT)


def degrade(x: Tensor, generator: torch.Generator) -> Tensor:
    """A slightly soft and very noisy version of ``x`` ``[N, 3, H, W]``, as from a dark room."""
    taps = torch.tensor([1.0, 2.0, 1.0]) / 4
    weight = torch.outer(taps, taps).expand(3, 1, 3, 3)
    soft = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), weight, groups=3)
    return soft + 2 * NOISE * torch.randn(x.shape, generator=generator)


def batches(pictures: list[Tensor], generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Random patches, flipped and turned, as ``(degraded, clean)``."""

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    while True:
        clean = []
        for _ in range(BATCH):
            picture = pictures[draw(len(pictures))]
            top, left = draw(picture.shape[1] - PATCH - 1), draw(picture.shape[2] - PATCH - 1)
            patch = picture[:, top : top + PATCH, left : left + PATCH]
            clean.append(torch.rot90(patch.flip(2) if draw(2) else patch, draw(4), (1, 2)))
        stack = torch.stack(clean)
        yield degrade(stack, generator), stack


def psnr(x: Tensor, truth: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of pictures in [-1, 1]."""
    error = (x.clamp(-1, 1) - truth).square().mean()
    return float(10 * torch.log10(4 / error))


# --- training -------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One network in training and what was measured of it."""

    layers: Layers
    net: UNet
    optimizer: torch.optim.Optimizer
    schedule: Any
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    restored: Tensor | None = None

    def step(self, degraded: Tensor, clean: Tensor) -> None:
        """One step of training, timed."""
        synchronize(degraded)
        start = time.perf_counter()
        loss = F.l1_loss(self.net(degraded), clean)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        synchronize(degraded)
        self.seconds.append(time.perf_counter() - start)
        self.schedule.step()
        self.losses.append(float(loss.detach()))

    @property
    def step_time(self) -> float:
        """Median seconds of a step; the first ones are warm-up."""
        return median(self.seconds[3:] or self.seconds)


def synchronize(x: Tensor) -> None:
    """Wait for the device of ``x``."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def prepare(layers: Layers, weights: dict[str, Tensor] | None, steps: int, device: str, layout: Any) -> Run:
    """A network ready to train, from ``weights`` if given."""
    torch.manual_seed(0)
    net = UNet(layers)
    if weights is not None:
        net.load_state_dict(weights)
    net = net.to(device).to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1, pct_start=0.15)
    return Run(layers, net, optimizer, schedule)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No standard error: the profiler's C++ writes lines of its own there."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def peak_memory(run: Run, degraded: Tensor, clean: Tensor) -> int:
    """Most bytes of tensors that one step holds at once, weights and optimizer not counted."""
    if degraded.is_cuda:
        before = torch.cuda.memory_allocated(degraded.device)
        torch.cuda.reset_peak_memory_stats(degraded.device)
        F.l1_loss(run.net(degraded), clean).backward()
        return int(torch.cuda.max_memory_allocated(degraded.device) - before)
    from torch.profiler import ProfilerActivity, profile

    run.optimizer.zero_grad()
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        F.l1_loss(run.net(degraded), clean).backward()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def run(*, steps: int, out: Path, device: str, layout: str) -> int:
    """Run the command. Returns its exit status."""
    console = Console()
    try:
        torch.zeros(1, device=device)
        training, held_out = photographs()
    except (OSError, RuntimeError, AssertionError) as error:  # no photographs, or no such device
        Console(stderr=True).print(f"pixfuse demo: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    stock = prepare(STOCK, None, steps, device, memory_format)
    ours = prepare(PIXFUSE, stock.net.state_dict(), steps, device, memory_format)
    runs = (stock, ours)

    top, left, height, width = CROP
    clean = held_out[None, :, top : top + height, left : left + width]
    degraded = degrade(clean, torch.Generator().manual_seed(2))
    before = psnr(degraded, clean)
    console.print(
        f"A U-Net of {sum(p.numel() for p in stock.net.parameters()):,} weights learns to restore noisy photographs on "
        f"{environment(device)['name']}, {torch.get_num_threads()} threads, float32 {layout}: {steps} steps of "
        f"{BATCH} patches of {PATCH}x{PATCH}, once on stock PyTorch and once on pixfuse in turns."
    )
    taken = {name: pixfuse.backend(name, torch.zeros(1, device=device)) for name in ("group_norm", "upfirdn2d")}
    if "reference" in taken.values():
        slow = next(t for t in taken.values() if t == "reference")
        console.print(f"Note: pixfuse runs on its slow reference here: {slow.reason}.", style="yellow", markup=False)

    began = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    generator = torch.Generator().manual_seed(1)
    pairs = batches(training, generator)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps)
        for number in range(steps):
            batch = [t.to(device).contiguous(memory_format=memory_format) for t in next(pairs)]
            for current in runs if number % 2 else reversed(runs):
                current.step(*batch)
            progress.update(
                task, advance=1, description=f"loss {stock.losses[-1]:.3f} stock, {ours.losses[-1]:.3f} pixfuse"
            )
    batch = [t.to(device).contiguous(memory_format=memory_format) for t in next(pairs)]
    for current in runs:
        current.peak = peak_memory(current, *batch)
        with torch.no_grad():
            picture = degraded.to(device).contiguous(memory_format=memory_format)
            current.restored = current.net(picture).cpu().clamp(-1, 1)
    seconds = time.perf_counter() - began

    _picture(out / "before_after.png", degraded, clean, runs)
    _curve(out / "loss.png", runs)
    console.print(_table(before, clean, runs))
    console.print(_verdict(*runs))
    console.print(
        f"The held-out crop went from {before:.1f} dB to {psnr(_restored(ours), clean):.1f} dB in {seconds:.0f} s. "
        f"See {out / 'before_after.png'} and {out / 'loss.png'}.",
        markup=False,
        soft_wrap=True,
    )
    return 0


# --- what is shown --------------------------------------------------------------------------------------------


def _restored(current: Run) -> Tensor:
    assert current.restored is not None
    return current.restored


def _table(before: float, clean: Tensor, runs: tuple[Run, ...]) -> Table:
    table = Table(title="The same training on both", title_justify="left")
    table.add_column("")
    for current in runs:
        table.add_column(current.layers.name, justify="right")
    lines: list[tuple[str, Callable[[Run], str]]] = [
        ("step time, median", lambda r: f"{1e3 * r.step_time:.1f} ms"),
        ("peak memory of a step", lambda r: f"{r.peak / 2**20:.1f} MiB"),
        ("last loss (mean of 20)", lambda r: f"{sum(r.losses[-20:]) / len(r.losses[-20:]):.4f}"),
        ("held-out crop, degraded", lambda r: f"{before:.2f} dB"),
        ("held-out crop, restored", lambda r: f"{psnr(_restored(r), clean):.2f} dB"),
    ]
    for label, cell in lines:
        table.add_row(label, *(cell(current) for current in runs))
    return table


def _verdict(stock: Run, ours: Run) -> str:
    time_ratio, memory_ratio = stock.step_time / ours.step_time, ours.peak / stock.peak
    if time_ratio >= 1.02:
        words = f"pixfuse's step is {time_ratio:.2f} times as fast"
    elif time_ratio <= 0.98:
        words = f"pixfuse's step is SLOWER here: it takes {1 / time_ratio:.2f} times as long"
    else:
        words = "both steps take the same time"
    return f"{words} (convolutions are the same in both), with {100 * memory_ratio:.0f}% of the memory."


def _pixels(x: Tensor) -> Any:
    return ((x[0].permute(1, 2, 0) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()


def _picture(path: Path, degraded: Tensor, clean: Tensor, runs: tuple[Run, ...]) -> None:
    """Before, after (both networks) and the truth side by side, each pixel enlarged to 2x2."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(f"before: {psnr(degraded, clean):.1f} dB", degraded)]
    panels += [(f"after, {r.layers.name}: {psnr(_restored(r), clean):.1f} dB", _restored(r)) for r in runs]
    panels.append(("the photograph (held out)", clean))
    height, width = clean.shape[2:]
    dpi, scale, gap, head = 100, 2, 12, 34
    size = (2 * (width * scale + gap) + gap, 2 * (height * scale + head + gap))
    figure = Figure(figsize=(size[0] / dpi, size[1] / dpi), dpi=dpi)
    FigureCanvasAgg(figure)
    for i, (title, picture) in enumerate(panels):
        x = gap + (i % 2) * (width * scale + gap)
        y = size[1] - (i // 2 + 1) * (height * scale + head + gap) + gap
        axes = figure.add_axes((x / size[0], y / size[1], width * scale / size[0], height * scale / size[1]))
        axes.imshow(_pixels(picture), interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(title, fontsize=13, pad=6)
    figure.savefig(path)


def _curve(path: Path, runs: tuple[Run, ...]) -> None:
    """Both losses over the steps, with their running mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for current, colour, line in zip(runs, ("tab:orange", "tab:blue"), ("-", "--"), strict=True):
        window = min(15, len(current.losses))
        mean = np.convolve(current.losses, np.ones(window) / window, mode="valid")
        axes.plot(range(1, len(current.losses) + 1), current.losses, color=colour, alpha=0.2, linewidth=1)
        axes.plot(
            range(window, len(current.losses) + 1),
            mean,
            line,
            color=colour,
            linewidth=2,
            label=f"{current.layers.name}, {1e3 * current.step_time:.0f} ms a step",
        )
    axes.set(xlabel="step", ylabel="L1 loss", title="The same training on stock ops and on pixfuse", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
