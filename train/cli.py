"""The command line: `diffnet train` and the commands of `train/commands/`.

`--help` and mistakes on the command line should answer at once. So this file and the top of the commands' files import
neither PyTorch nor SciPy, and each command imports what it runs.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from io import TextIOWrapper
from typing import Annotated, get_args

import typer

from diffnet import __version__
from diffnet.geometry.errors import OptionError
from diffnet.geometry.processes import choose_waiting
from diffnet.interrupts import is_command
from diffnet.train.commands.demo import demo
from diffnet.train.commands.exporting import export
from diffnet.train.commands.matching import match
from diffnet.train.commands.meshes import info, precompute
from diffnet.train.commands.predicting import evaluate, predict, robustness
from diffnet.train.commands.training import train_command
from diffnet.train.commands.view import view
from diffnet.train.console import complain, show_warning, user_message
from diffnet.train.options.shared import TaskName
from diffnet.train.place import place

PATIENCE = 5.0  # seconds in which the first rank of a machine prints an error; when any rank ends, torchrun stops all

app = typer.Typer(
    help="Learning on surfaces with DiffusionNet: train on labeled meshes, predict on new ones.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
train_app = typer.Typer(help="Train a network on meshes.", no_args_is_help=True)


for name in get_args(TaskName):
    train_app.command(name)(train_command(name))


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
for command in (demo, predict, match, evaluate, robustness, precompute, export, info, view):
    app.command()(command)


def main() -> None:
    """Run the command line.

    An error that the user can fix prints one line on stderr, and the exit code is 1. Any other error is a bug, and
    shows its traceback. Of the ranks on a machine, the first one prints errors. Others do so if rank 0 is gone.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal can't show
    if is_command():
        warnings.showwarning = show_warning
        choose_waiting()
    try:
        prints = place().local_rank == 0
    except OptionError:  # the command says so, if it shares its work
        prints = True
    try:
        code = app(standalone_mode=prints)  # this mode prints mistakes on the command line, and ends the process
    except Exception as error:
        message, code = user_message(error) or "", getattr(error, "exit_code", 1)
        if not (message or hasattr(error, "exit_code")):
            raise
        if message and (prints or re.match(r"ranks? 0 |rank \d+ has lost", message)):
            complain(message)
        elif not message.startswith("rank"):  # the ranks don't know it from each other
            time.sleep(PATIENCE)
    sys.exit(code)
