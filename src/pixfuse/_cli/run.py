"""``pixfuse run``: an unmodified script of another project on pixfuse's ops."""

from __future__ import annotations

import builtins
import contextlib
import multiprocessing.spawn
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated, Any

import typer

from ..compat import install
from ..compat._peers import PEERS

Name = Enum("Name", [(name, name) for name in PEERS], type=str)  # type: ignore[misc]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``. What follows SCRIPT belongs to the script, ``--help`` too."""
    app.command("run", context_settings={"allow_interspersed_args": False})(_command)


def _command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, as after 'python'.")],
    compat: Annotated[
        list[Name], typer.Option("--compat", help="The project whose ops pixfuse replaces; may be repeated.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments and options.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as after 'python -m'.")] = False,
) -> None:
    """Run a script of another project on pixfuse's ops.

    The script's imports of that project's ops (nvlabs: torch_utils.ops, rosinality: op, basicsr: basicsr.ops, mmcv:
    mmcv.ops) give pixfuse's, in processes that multiprocessing starts too. Nothing is compiled, and no file is changed.

    Example: pixfuse run --compat nvlabs gen_images.py --seeds=1 --network=ffhq.pkl --outdir=out
    """
    if not module and not Path(script).is_file():
        kind = "is a folder" if Path(script).is_dir() else "does not exist"
        raise typer.BadParameter(f"File {script!r} {kind}.", param_hint="'SCRIPT'")
    start = Script([name.value for name in compat], script, args or [], module)
    try:
        start.prepare()
    except ValueError as error:  # something else lies at the project's import path
        raise typer.BadParameter(str(error), param_hint="'--compat'") from None
    raise SystemExit(start)  # main runs it


@dataclass
class Script:
    """A script or module to be run as ``python script args`` or ``python -m script args`` would."""

    names: Sequence[str]
    script: str
    args: Sequence[str]
    module: bool

    def prepare(self) -> None:
        """Install the drop-ins where the script will find them."""
        if not getattr(sys.flags, "safe_path", False):  # of Python 3.11
            sys.path[0] = os.getcwd() if self.module else str(Path(self.script).resolve().parent)
        for name in self.names:
            install(name)

    def run(self) -> None:
        """What the script raises passes through, without the frames of this program."""
        _install_in_children(self.names)
        hook = sys.excepthook

        def from_the_script(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
            codes = [frame.f_code for frame, _ in traceback.walk_tb(tb)]
            for _ in range(codes.index(Script.run.__code__) + 1 if Script.run.__code__ in codes else 0):
                tb = tb and tb.tb_next
            hook(kind, error.with_traceback(tb), tb)

        sys.excepthook = from_the_script
        sys.argv = [self.script, *self.args]
        sys.modules["__main__"] = main = ModuleType("__main__")
        vars(main).update(__builtins__=builtins, __annotations__={})
        if self.module:
            runpy._run_module_as_main(self.script)  # type: ignore[attr-defined]  # as python -m does
            return
        path = os.path.join(os.getcwd(), self.script)
        vars(main).update(__file__=path, __loader__=SourceFileLoader("__main__", path))
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


def _install_in_children(names: Sequence[str]) -> None:
    """Let processes that multiprocessing starts anew (torch.multiprocessing.spawn, say) install the drop-ins first."""
    before = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return before(name) | {"pixfuse": _Installs(names)}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
    with contextlib.suppress(ImportError, ValueError):  # Windows has no fork server
        multiprocessing.set_forkserver_preload([])  # not the script, which would come before the drop-ins


class _Installs:
    """Installs the drop-ins where it is unpickled: before the script is imported there."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        for name in names:
            install(name)

    def __reduce__(self) -> tuple[type[_Installs], tuple[Sequence[str]]]:
        return _Installs, (self.names,)
