"""Ctrl-C while a command starts or ends, and SIGTERM.

Python turns Ctrl-C into KeyboardInterrupt. Raised inside an import, or while the interpreter ends, it prints a
traceback. This module imports little, because Ctrl-C prints a traceback until it is imported.

SIGTERM ends a Python process at once by default, and leaves its temporary files. `kill`, batch systems and containers
send it.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # part of the interpreter, so it takes no time to import
import os
import sys

INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended: 128 + SIGINT
TERMINATED = 143  # the exit code of a command that SIGTERM ended: 128 + SIGTERM


class Terminated(SystemExit):
    """SIGTERM in a command. It unwinds the stack as Ctrl-C does, and prints no traceback."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


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


def raise_at_sigterm() -> None:
    """From now on, SIGTERM raises Terminated, unless it is ignored. Only the main thread may call this."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def ignore_sigterm() -> None:
    """From now on, SIGTERM does nothing, if it would raise Terminated. Only the main thread may call this."""
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _terminate(number: int, frame: object) -> None:
    raise Terminated


def exit_at_signals() -> None:
    """From now on, Ctrl-C and SIGTERM end the process at once, and nothing is cleaned up."""
    exit_at_ctrl_c()
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
