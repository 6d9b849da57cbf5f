"""Ctrl-C while a command starts or ends.

Python turns Ctrl-C into KeyboardInterrupt. Raised inside an import, or while the interpreter ends, it prints a
traceback. This module imports little, because Ctrl-C prints a traceback until it is imported.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # part of the interpreter, so it takes no time to import
import os
import sys

INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended: 128 + SIGINT


class ExitAtCtrlC:
    """In this context, Ctrl-C ends the process at once with exit code 130, and prints nothing.

    Nothing is cleaned up, so this is for imports only. The context changes nothing where Ctrl-C has another handler
    than Python's own, in threads, and if `when` is False.
    """

    def __init__(self, when: bool = True) -> None:
        self._when = when
        self._changed = False

    def __enter__(self) -> None:
        self._changed = self._when and exit_at_ctrl_c()

    def __exit__(self, *error: object) -> None:
        if self._changed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_at_ctrl_c() -> bool:
    """From now on, Ctrl-C ends the process as in `ExitAtCtrlC`. Returns whether that is a change."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    try:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    except ValueError:  # only the main thread may
        return False
    return True


def is_command() -> bool:
    """Whether this process was started as `diffnet` or `python -m diffnet`."""
    arguments = sys.orig_argv[1:]
    while arguments and arguments[0].startswith("-") and arguments[0] != "-m":  # options of the interpreter
        arguments = arguments[1:]
    return arguments[:2] == ["-m", "diffnet"] or os.path.basename("".join(arguments[:1])) in ("diffnet", "diffnet.exe")
