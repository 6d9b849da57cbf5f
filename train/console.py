"""The console of the commands, and its progress bars."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diffnet.geometry.errors import DiffnetError

# Printed text holds names of files and classes. Markup is off, because "[b]" and ":x:" in a name are plain text.
console = Console(markup=False, emoji=False, highlight=False)


def complain(message: str) -> None:
    """Print one line on stderr."""
    print("diffnet:", " ".join(message.split()), file=sys.stderr)


def show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print a warning on stderr, without the line of code that it comes from. A `warnings.showwarning` for commands."""
    complain(f"warning: {message}")


def user_message(error: Exception) -> str | None:
    """The message of an error that the user can fix. None for a bug."""
    if isinstance(error, DiffnetError):
        return str(error)
    if isinstance(error, OSError):
        return str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
    # PyTorch has an error class for a GPU that is out of memory, but only a message for the main memory.
    torch = sys.modules.get("torch")  # if the error is PyTorch's, PyTorch is loaded
    exhausted = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, exhausted) or "can't allocate memory" in str(error):
        return f"out of memory ({error}). In training, lower --batch-vertices, --batch-meshes or --width"
    return None


def progress_bar(console: Console, disable: bool = False) -> Progress:
    """A bar with the count, the elapsed time and the remaining time. `disable` shows none."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
        console=console,
        disable=disable,
    )
