"""``pixfuse resize``: pictures in, pictures out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

import pixfuse

NAMED: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode, "align_corners": False, "antialias": True} for mode in ("lanczos", "bicubic", "bilinear")},
    "nearest": {"mode": "nearest-exact"},
}
"""Filters by name, as arguments of :func:`pixfuse.interpolate`."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".ppm", ".pgm", ".avif")
"""What is taken from a folder."""


class Refused(Exception):
    """A file or an argument that can't be used; the message says which and why."""


@dataclass(frozen=True)
class Request:
    """What to do with every picture: a factor or a size, and a filter's name or taps."""

    scale: float | None
    size: tuple[int, int] | None
    filter: str | tuple[float, ...]


def parse(scale: float | None, size: str | None, filter: str) -> Request:
    """The request that the command line's words make, or :class:`Refused`."""
    if (scale is None) == (size is None):
        raise Refused("give either --scale or --size, for example --scale 2 or --size 640x480")
    pair = None
    if size is not None:
        match = re.fullmatch(r"(\d+)\s*[xX×]\s*(\d+)", size.strip())
        if not match or "0" in (match[1].strip("0") or "0", match[2].strip("0") or "0"):
            raise Refused(f"--size must be WIDTHxHEIGHT, for example 640x480, got {size!r}")
        pair = int(match[1]), int(match[2])
    if scale is not None and not 0 < scale < float("inf"):
        raise Refused(f"--scale must be greater than 0, got {scale:g}")
    if filter in NAMED:
        return Request(scale, pair, filter)
    try:
        taps = tuple(float(tap) for tap in filter.split(","))
    except ValueError:
        raise Refused(
            f"--filter must be one of {', '.join(NAMED)}, or FIR taps such as 1,3,3,1, got {filter!r}"
        ) from None
    if not all(np.isfinite(taps)) or abs(sum(taps)) < 1e-12:
        raise Refused(f"--filter taps must be finite and have a sum other than 0, got {filter!r}")
    if scale is None:
        raise Refused("--filter with FIR taps needs --scale: a whole number, or 1 divided by one")
    up = _factors(scale)[0]
    if up > len(taps):
        raise Refused(f"--filter {filter} is too short for --scale {up}: it needs at least {up} taps")
    phases = [sum(taps[i::up]) for i in range(up)]
    if max(phases) - min(phases) > 1e-4 * abs(sum(taps)):
        raise Refused(
            f"--filter {filter} would give stripes at --scale {up}: every {up}. tap sums to "
            f"{', '.join(f'{phase:g}' for phase in phases)}, and these must be equal"
        )
    return Request(scale, pair, taps)


def _factors(scale: float) -> tuple[int, int]:
    """The whole factors ``(up, down)`` of a scale that is n or 1/n."""
    if scale >= 1 and abs(scale - round(scale)) < 1e-6:
        return round(scale), 1
    if scale < 1 and abs(1 / scale - round(1 / scale)) < 1e-3:
        return 1, round(1 / scale)
    raise Refused(f"FIR taps need a --scale of a whole number, or 1 divided by one (0.5, 0.25, ...), got {scale:g}")


def resize(x: Tensor, request: Request) -> Tensor:
    """``x`` ``[1, C, H, W]`` resized."""
    if isinstance(request.filter, tuple):
        assert request.scale is not None
        up, down = _factors(request.scale)
        taps = pixfuse.setup_filter(list(request.filter)).to(x.dtype if x.dtype == torch.float64 else torch.float32)
        # Zeros outside would darken the border, so the picture is continued by its edge, and what's beyond cut off.
        edge = (len(request.filter) + down - 1) // down * down
        wide = torch.nn.functional.pad(x, (edge,) * 4, mode="replicate")
        y = pixfuse.upsample2d(wide, taps, up=up) if down == 1 else pixfuse.downsample2d(wide, taps, down=down)
        cut = edge * up // down
        height, width = (max(1, n * up // down) for n in x.shape[2:])
        return y[:, :, cut : cut + height, cut : cut + width]
    if request.size is not None:
        width, height = request.size
    else:
        assert request.scale is not None
        height, width = (max(1, round(n * request.scale)) for n in x.shape[2:])
    return pixfuse.interpolate(x, size=(height, width), **NAMED[request.filter])


def convert(picture: Image.Image, request: Request) -> Image.Image:
    """A picture resized: greyscale, colour, with alpha, palette, CMYK, 16-bit or float."""
    mode = picture.mode
    if mode == "P" or (mode in ("L", "RGB") and "transparency" in picture.info):
        picture = picture.convert("RGBA" if "transparency" in picture.info else "RGB")
    elif mode == "1":
        picture = picture.convert("L")
    elif mode == "PA":
        picture = picture.convert("RGBA")
    elif mode in ("La", "RGBa"):
        picture = picture.convert(mode.upper())
    elif mode not in ("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "F", "I") and not mode.startswith(
        "I;16"
    ):
        raise Refused(f"its kind of pixels ({mode}) is not known")
    pixels = np.asarray(picture)
    exact = request.filter == "nearest"
    x = torch.from_numpy(np.array(pixels, dtype=np.float64 if pixels.dtype == np.int32 else np.float32))
    x = x[None, None] if x.dim() == 2 else x.permute(2, 0, 1)[None]
    alpha = picture.mode in ("LA", "RGBA") and not exact
    if alpha:  # weigh colours by their opacity, so that what is invisible doesn't shine through
        opacity = x[:, -1:] / 255
        x = torch.cat([x[:, :-1] * opacity, x[:, -1:]], 1)
    y = resize(x, request)
    if alpha:
        opacity = y[:, -1:] / 255
        y = torch.cat([torch.where(opacity > 1e-3, y[:, :-1] / opacity.clamp(min=1e-3), 0), y[:, -1:]], 1)
    y = y[0, 0] if pixels.ndim == 2 else y[0].permute(1, 2, 0)
    values = y.numpy()
    if pixels.dtype != np.float32:
        limits = np.iinfo(np.uint16 if picture.mode.startswith("I;16") else pixels.dtype)
        values = np.clip(np.rint(values), limits.min, limits.max).astype(pixels.dtype)
    if picture.mode.startswith("I;16"):
        return Image.fromarray(values.astype(np.uint16))
    if picture.mode in ("CMYK", "YCbCr", "LAB", "HSV"):  # three or four channels, but not RGB
        bands = [Image.fromarray(np.ascontiguousarray(values[..., i])) for i in range(values.shape[2])]
        return Image.merge(picture.mode, bands)
    return Image.fromarray(np.ascontiguousarray(values))


def load(path: Path) -> tuple[Image.Image, dict[str, Any], list[str]]:
    """A picture the right way up, what of its metadata goes into the copy, and what of the file is lost, in words."""
    try:
        with Image.open(path) as picture:
            lost = []
            if picture.mode in ("RGB", "RGBA", "LA") and any(";16" in str(tile[-1]) for tile in picture.tile):
                lost.append("Pillow reads its 16-bit colours with 8 bits")
            if getattr(picture, "n_frames", 1) > 1:
                lost.append("only the first of its frames is taken")
            picture.load()
            kept = {"icc_profile": picture.info["icc_profile"]} if picture.info.get("icc_profile") else {}
            return ImageOps.exif_transpose(picture), kept, lost
    except UnidentifiedImageError:
        raise Refused("it isn't a picture, or of a kind that Pillow can't read") from None
    except FileNotFoundError:
        raise Refused("there is no such file") from None
    except Image.DecompressionBombError as error:
        raise Refused(str(error)) from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise Refused(f"it can't be read ({error})") from None


def _save(picture: Image.Image, path: Path, kept: dict[str, Any]) -> None:
    known = Image.registered_extensions()
    kind = known.get(path.suffix.lower())
    if kind is None or kind not in Image.SAVE:
        raise Refused(f"Pillow can't write {path.suffix or 'a file without a suffix'}: end {path.name} in .png or .jpg")
    options: dict[str, Any] = {**kept, "quality": 95} if kind in ("JPEG", "WEBP", "AVIF") else dict(kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place first, so that a failure leaves neither half a picture nor a lost old one.
    beside = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        picture.save(beside, format=kind, **options)
        beside.replace(path)
    except (OSError, ValueError, KeyError) as error:
        words = str(error)
        if "cannot write mode" in words:
            kinds = {"RGBA": "with transparency", "LA": "with transparency", "F": "of floats"}
            what = kinds.get(picture.mode, f"of kind {picture.mode}")
            words = f"a {kind} file can't hold a picture {what}: use .png or .tif"
        raise Refused(words) from None
    finally:
        beside.unlink(missing_ok=True)


def pairs(inputs: Sequence[Path], out: Path) -> list[tuple[Path, Path]]:
    """Every picture to read with the file to write, or :class:`Refused`."""
    sources: list[tuple[Path, Path]] = []
    folders = [path for path in inputs if path.is_dir()]
    for path in inputs:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            inside = out.resolve()
            found = [p for p in found if inside not in p.resolve().parents] if inside != path.resolve() else found
            if not found:
                raise Refused(f"{path}: this folder has no pictures ({', '.join(SUFFIXES)})")
            sources += [(p, p.relative_to(path)) for p in found]
        else:
            sources.append((path, Path(path.name)))
    single = len(inputs) == 1 and not folders and not out.is_dir() and bool(out.suffix)
    if single:
        return [(sources[0][0], out)]
    if out.exists() and not out.is_dir():
        raise Refused(f"{out}: the output of several pictures must be a folder, and this is a file")
    if not folders and len(inputs) > 1 and out.suffix.lower() in SUFFIXES and not out.is_dir():
        raise Refused(f"{out}: the output of several pictures must be a folder")
    found_pairs = [(source, out / name) for source, name in sources]
    seen: dict[Path, Path] = {}
    for source, target in found_pairs:
        if target in seen:
            raise Refused(f"{source} and {seen[target]} would both be written to {target}")
        seen[target] = source
    return found_pairs


def run(inputs: list[Path], out: Path, *, scale: float | None, size: str | None, filter: str, overwrite: bool) -> int:
    """Run the command. Returns its exit status: 0, or 1 when a picture failed, or 2 when nothing could be begun."""
    errors = Console(stderr=True)
    try:
        request = parse(scale, size, filter)
        work = pairs(inputs, out)
    except Refused as error:
        errors.print(f"pixfuse resize: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    console = Console()
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    originals = {source.resolve() for source, _ in work if source.exists()}
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("resizing", total=len(work))
        for source, target in work:
            progress.update(task, description=source.name)
            try:
                if target.resolve() in originals and not overwrite:
                    raise Refused(f"the output {target} is an input; --overwrite allows it")
                if target.exists() and not overwrite:
                    raise Refused(f"{target} exists; --overwrite allows it to be replaced")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                    picture, kept, lost = load(source)
                    for words in lost:
                        errors.print(f"{source}: {words}", style="yellow", markup=False, soft_wrap=True)
                    result = convert(picture, request)
                    _save(result, target, kept)
            except (Refused, MemoryError) as error:
                error = error if isinstance(error, Refused) else Refused("there is not enough memory for the result")
                failed += 1
                errors.print(f"pixfuse resize: {source}: {error}", style="red", markup=False, soft_wrap=True)
            else:
                sizes = f"{picture.size[0]}x{picture.size[1]} -> {result.size[0]}x{result.size[1]}"
                console.print(f"{source} -> {target}  {sizes}", markup=False, soft_wrap=True, highlight=False)
            progress.advance(task)
    if failed:
        errors.print(f"{failed} of {len(work)} pictures failed.", style="bold red")
    return int(failed > 0)
