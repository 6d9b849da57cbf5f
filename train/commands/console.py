"""The console of the commands."""

from __future__ import annotations

import sys

from rich.console import Console

# Printed text holds names of files and classes. Markup is off, because "[b]" and ":x:" in a name are plain text.
console = Console(markup=False, emoji=False, highlight=False)


def complain(message: str) -> None:
    """Print one line on stderr."""
    print("diffnet:", " ".join(message.split()), file=sys.stderr)
