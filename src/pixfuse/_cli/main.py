"""The command line: arguments and help. Each command's work is in the module of its name, imported when called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:  # an install without the extra
    sys.exit("pixfuse: the command line needs a few more packages: pip install 'pixfuse[cli]'")

from .run import Script
from .run import register as register_run

app = typer.Typer(
    name="pixfuse",
    help="Image-network ops for PyTorch: check this machine, see them train a network, resize pictures, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with 'pixfuse doctor'. Every command explains itself: 'pixfuse resize --help'.",
)


def _version(wanted: bool) -> None:
    if wanted:
        import pixfuse

        typer.echo(f"pixfuse {pixfuse.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    device: Annotated[
        list[str] | None, typer.Option(help="Only this device (cpu, cuda:0, ...); may be repeated.")
    ] = None,
) -> None:
    """Check every op on this machine.

    Says which implementation each op takes here and why, and compares every op, dtype and layout with the float64
    definition. Exit status 1 when one is wrong.
    """
    from .doctor import run

    raise typer.Exit(run(as_json=json, devices=device))


register_run(app)


@app.command()
def resize(
    inputs: Annotated[list[Path], typer.Argument(metavar="IN...", help="Pictures, or folders of pictures.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="OUT", help="A file for one picture, a folder for several.")
    ],
    scale: Annotated[float | None, typer.Option(help="Factor of both sides, for example 2 or 0.5.")] = None,
    size: Annotated[str | None, typer.Option(metavar="WxH", help="New size, for example 640x480.")] = None,
    filter: Annotated[
        str,
        typer.Option(
            metavar="FILTER",
            help="lanczos, bicubic, bilinear, nearest, or FIR taps such as 1,3,3,1 (then --scale is n or 1/n).",
        ),
    ] = "lanczos",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist, inputs too.")] = False,
) -> None:
    """Resize pictures.

    Keeps alpha, greyscale, 16 bits, CMYK and the colour profile; turns pictures as their EXIF orientation says.

    Examples: pixfuse resize cat.jpg --scale 2 -o big.jpg; pixfuse resize holiday/ --size 640x480 -o small/
    """
    from .resize import run

    raise typer.Exit(run(inputs, out, scale=scale, size=size, filter=filter, overwrite=overwrite))


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training for each of the two networks.")] = 250,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the pictures go.")] = Path("demo-out"),
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    layout: Annotated[str, typer.Option(help="contiguous or channels_last.")] = "channels_last",
) -> None:
    """Train a small U-Net to restore photographs, on stock PyTorch and on pixfuse.

    Both start from the same weights and see the same batches. Writes before_after.png and loss.png and prints step
    time and peak memory of both. Takes about two minutes on two cores.
    """
    if layout not in ("contiguous", "channels_last"):
        raise typer.BadParameter(f"layout must be contiguous or channels_last, got {layout!r}")
    from .demo import run

    raise typer.Exit(run(steps=steps, out=out, device=device, layout=layout))


@app.command()
def bench(
    op: Annotated[list[str] | None, typer.Option(help="Only this op or room; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with plots.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one JSON line per row.")] = None,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="CPU threads; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples per row.")] = 30,
    layout: Annotated[list[str] | None, typer.Option(help="Only this layout; may be repeated.")] = None,
    direction: Annotated[list[str] | None, typer.Option(help="Only this direction; may be repeated.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype; may be repeated.")] = None,
    compile: Annotated[bool, typer.Option(help="Compare with torch.compile too (slow to start).")] = True,
    graph: Annotated[bool, typer.Option("--graph", help="On a GPU, time the replay of CUDA graphs.")] = False,
) -> None:
    """Measure the ops against PyTorch's own and torch.compile, side by side in one run.

    A row is timed only if its result is right against float64; one that isn't makes the exit status 1. On a CPU
    one thread is the default, which gives steady ratios.
    """
    from .bench import run

    status = run(
        ops=op or [],
        device=device,
        html_path=html,
        json_path=json,
        thread_counts=threads or [1],
        rounds=rounds,
        compiled=compile,
        graph=graph,
        layouts=layout,
        directions=direction,
        dtypes=dtype,
    )
    raise typer.Exit(status)


@app.command()
def tune(
    op: Annotated[list[str] | None, typer.Option(help="Only this room (group_norm, ...); may be repeated.")] = None,
) -> None:
    """Search for the fastest constants of the Triton kernels on this GPU.

    The defaults are the fastest on an H200, so this is for other GPUs. Takes some minutes per room, checks what it
    chose and keeps it in ~/.config/pixfuse/tuning.json, which new processes read. Delete that file to take it back.
    """
    from .tune import run

    raise typer.Exit(run(op or []))


def main() -> None:
    """Entry point of the script ``pixfuse``."""
    try:
        app()
    except SystemExit as stop:
        if not isinstance(stop.code, Script):
            raise
        script: Script = stop.code
    script.run()  # out here, for the command line takes some exceptions for its own


if __name__ == "__main__":
    main()
