"""Pages that a command opens in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path


def open_page(path: Path) -> bool:
    """Open a page in the browser of the desktop. Returns whether there is one.

    Nothing is opened without a display, where `webbrowser` may start a text browser, and nothing if the output of the
    command goes to a file or to a program.
    """
    has_display = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return has_display and sys.stdout.isatty() and webbrowser.open(path.resolve().as_uri())
