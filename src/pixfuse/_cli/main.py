"""The command line: arguments and help. Each command's work is in the module of its name, imported when called."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:  # an install without the extra
    sys.exit("pixfuse: the command line needs a few more packages: pip install 'pixfuse[cli]'")

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


def main() -> None:
    """Entry point of the script ``pixfuse``."""
    app()


if __name__ == "__main__":
    main()
