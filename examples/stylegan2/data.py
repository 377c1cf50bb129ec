"""Square pictures for training, from a folder or from the photographs in scikit-image's wheel.

What the training sees under a number depends on that number and the seed alone: a resumed run goes on as if it had
never stopped, whatever the number of workers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import pixfuse

PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "motorcycle_left.png",
    "rocket.jpg",
    "hubble_deep_field.jpg",
)
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
BLOCKS, BLOCK = 8, 4096
"""How much of a file its checksum reads: so many blocks, evenly spread, of so many bytes."""


def files(folder: Path | None) -> list[Path]:
    """The pictures in a folder and below it, or scikit-image's photographs. Each has been opened, but not decoded."""
    if folder is not None:
        found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
        if not found:
            raise FileNotFoundError(f"{folder} holds no picture ({', '.join(ENDINGS)})")
        for path in found:
            with reading(path), Image.open(path) as picture:
                if picture.mode == "F":
                    raise ValueError("its pixels are floats")
        return found
    spec = importlib.util.find_spec("skimage")  # only its pictures are wanted: it isn't imported
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("name a folder of pictures, or pip install scikit-image for its photographs")
    return [Path(spec.submodule_search_locations[0], "data", name) for name in PHOTOGRAPHS]


def contents(paths: list[Path]) -> str:
    """What tells some pictures from others: their number, and a checksum of names, sizes and samples of the bytes."""
    top, total = os.path.commonpath([path.parent for path in paths]), 0
    for path in paths:
        with reading(path), path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            total = zlib.crc32(repr((path.relative_to(top).as_posix(), size)).encode(), total)
            for start in sorted({max(0, size - BLOCK) * i // (BLOCKS - 1) for i in range(BLOCKS)}):
                file.seek(start)
                total = zlib.crc32(file.read(BLOCK), total)
    return f"of {len(paths)} pictures ({total:08x})"


class Pictures(Dataset[Tensor]):
    """Endless random squares of pictures, mirrored half of the time.

    Args:
        paths: the picture files.
        resolution: side of a square.
        zoom: a square's side is between this share of the picture's shorter side and all of it.
        seed: another one gives another order.
    """

    def __init__(self, paths: list[Path], resolution: int, zoom: float, seed: int = 0) -> None:
        self.paths, self.resolution, self.zoom, self.seed = paths, resolution, zoom, seed

    def __getitem__(self, number: int) -> Tensor:
        """``[3, resolution, resolution]`` in [-1, 1]."""
        random = np.random.default_rng([self.seed, number])
        picture = load(self.paths[random.integers(len(self.paths))])
        height, width = picture.shape[1:]
        side = max(1, round(min(height, width) * random.uniform(self.zoom, 1)))
        top, left = random.integers(height - side + 1), random.integers(width - side + 1)
        square = picture[None, :, top : top + side, left : left + side].float()
        square = pixfuse.interpolate(square, size=self.resolution, mode="bilinear", antialias=True)[0]
        return (square.flip(2) if random.integers(2) else square) / 127.5 - 1


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors name the file."""
    try:
        yield
    except Exception as error:  # decoders raise many kinds
        raise OSError(f"{path} is no picture that can be read: {error}".partition("\n")[0]) from error


@lru_cache(maxsize=64)
def load(path: Path) -> Tensor:
    """The pixels ``[3, H, W]`` of a file, uint8; of 16 bits the upper 8."""
    with reading(path), Image.open(path) as file:
        picture: Image.Image = file
        if picture.mode.startswith("I"):  # 16-bit greyscale, of which convert would make white
            values = np.asarray(picture)
            if values.min() < 0 or values.max() > 65535:
                raise ValueError("its pixels have more than 16 bits")
            picture = Image.fromarray((values >> 8).astype(np.uint8))
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).contiguous()


def batches(
    pictures: Pictures, size: int, first: int = 0, rank: int = 0, world: int = 1, workers: int = 0
) -> Iterator[Tensor]:
    """Batches ``[size, 3, H, W]`` from number ``first`` on; each of ``world`` processes gets its own."""

    def numbers() -> Iterator[list[int]]:
        batch = first
        while True:
            start = (batch * world + rank) * size
            yield list(range(start, start + size))
            batch += 1

    class Endless:
        def __iter__(self) -> Iterator[list[int]]:
            return numbers()

    yield from DataLoader(pictures, batch_sampler=Endless(), num_workers=workers, pin_memory=torch.cuda.is_available())
