"""The command line: `diffnet demo`, `train`, `predict`, `match`, `evaluate`, `precompute`, `export`, `info` and `view`.

`--help` and mistakes on the command line should answer at once. So this file and the top of the commands' files import
neither PyTorch nor SciPy, and each command imports what it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, get_args

import typer

from diffnet import __version__
from diffnet.train.commands.console import complain, user_message
from diffnet.train.commands.demo import demo
from diffnet.train.commands.exporting import export
from diffnet.train.commands.matching import match
from diffnet.train.commands.meshes import info, precompute
from diffnet.train.commands.predicting import evaluate, predict
from diffnet.train.commands.view import view
from diffnet.train.tasks.options.shared import TaskName

app = typer.Typer(
    help="Learning on surfaces with DiffusionNet: train on labeled meshes, predict on new ones.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
train_app = typer.Typer(help="Train a network on meshes.", no_args_is_help=True)


def command_named(name: TaskName) -> Callable[..., None]:
    """The command `diffnet train NAME`."""
    command: Callable[..., None] = import_module(f"diffnet.train.tasks.commands.{name}").train
    return command


for name in get_args(TaskName):
    train_app.command(name)(command_named(name))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"diffnet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The options of `diffnet` itself."""


app.add_typer(train_app, name="train")
for command in (demo, predict, match, evaluate, precompute, export, info, view):
    app.command()(command)


def main() -> None:
    """Run the command line.

    An error that the user can fix prints one line on stderr, and the exit code is 1. Any other error is a bug, and
    shows its traceback.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal can't show
    try:
        app()
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        # Rank 0 prints its own error. Of other ranks, only the first one of each machine repeats it.
        if not message.startswith("rank 0: ") or os.environ.get("LOCAL_RANK", "0") == "0":
            complain(message)
        sys.exit(1)
