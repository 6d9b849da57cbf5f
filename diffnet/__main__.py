"""The command line, `diffnet` or `python -m diffnet`: the commands of `diffnet.train.cli`.

This module stands above all rooms. No module imports it.

Worker processes import the script that started them, which imports this module. So every import that loads PyTorch is
inside a function.
"""

from __future__ import annotations

from diffnet.interrupts import INTERRUPTED, ExitAtCtrlC, exit_at_signals, is_command, raise_at_sigterm

with ExitAtCtrlC():
    import gc
    import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. See `diffnet.train.cli.main`. After Ctrl-C, the exit code is 130, after SIGTERM 143."""
    with ExitAtCtrlC():
        from diffnet.train import cli

    if is_command():
        raise_at_sigterm()
    try:
        cli.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if is_command():
            exit_at_signals()  # only the end of the interpreter is left
            gc.freeze()  # its garbage collections then walk no object; walking all takes 0.4 s


if __name__ == "__main__":
    main()
