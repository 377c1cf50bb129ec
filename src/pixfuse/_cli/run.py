"""``pixfuse run``: an unmodified script of another project on pixfuse's ops."""

from __future__ import annotations

import multiprocessing.spawn
import runpy
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..compat import install
from ..compat._peers import PEERS

Name = Enum("Name", [(name, name) for name in PEERS], type=str)  # type: ignore[misc]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``. What follows SCRIPT belongs to the script, ``--help`` too."""
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command("run", context_settings=settings)(_command)


def _command(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", exists=True, dir_okay=False, help="The script, as after 'python'.")
    ],
    compat: Annotated[
        list[Name], typer.Option("--compat", help="The project whose ops pixfuse replaces; may be repeated.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments and options.")
    ] = None,
) -> None:
    """Run a script of another project on pixfuse's ops.

    The script's imports of that project's ops (nvlabs: torch_utils.ops, rosinality: op, basicsr: basicsr.ops, mmcv:
    mmcv.ops) give pixfuse's, in processes that it spawns too. Nothing is compiled, and no file is changed.

    Example: pixfuse run --compat nvlabs gen_images.py --seeds=1 --network=ffhq.pkl --outdir=out
    """
    run([name.value for name in compat], script, args or [])


def run(names: Sequence[str], script: Path, args: Sequence[str]) -> None:
    """Run ``script`` as ``python script args`` would, with the drop-ins installed. What it raises passes through."""
    for name in names:
        install(name)
    _in_spawned_processes(names)
    sys.argv = [str(script), *args]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def _in_spawned_processes(names: Sequence[str]) -> None:
    """Let processes that multiprocessing spawns (torch.multiprocessing.spawn, say) install the drop-ins first."""
    before = multiprocessing.spawn.get_command_line
    first = "".join(f"import pixfuse.compat; pixfuse.compat.install({name!r}); " for name in names)

    def get_command_line(**kwargs: Any) -> list[str]:
        command = before(**kwargs)
        if "-c" in command:
            program = command.index("-c") + 1
            command[program] = first + command[program]
        return command

    multiprocessing.spawn.get_command_line = get_command_line
