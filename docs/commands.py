"""What every command says of itself, for the page about the command line."""

from __future__ import annotations

from pathlib import Path

import typer.rich_utils
from typer.testing import CliRunner

from pixfuse._cli.main import app


def make(page: Path) -> None:
    """Write the help of every command to ``page``, in Markdown."""
    typer.rich_utils.MAX_WIDTH = 112
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    parts = []
    for name in names:
        result = CliRunner().invoke(app, [name, "--help"], env={"TERM": "dumb", "COLUMNS": "112"})
        assert result.exit_code == 0, result.output
        lines = [line.rstrip() for line in result.output.splitlines()]
        parts.append("\n".join([f"## pixfuse {name}", "", "```text", *lines, "```", ""]))
    page.write_text("\n".join(parts))
