"""The command line, in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any
from unittest.mock import patch

from diffnet.train import cli


def diffnet(*arguments: object) -> tuple[Any, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["diffnet", *map(str, arguments)]
    with patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()


def output(*arguments: object) -> str:
    """The stdout of a command that succeeds and writes nothing to stderr."""
    code, out, err = diffnet(*arguments)
    assert (code, err) == (0, "")
    return out


def complaint(*arguments: object) -> str:
    """The message of a command that fails because of its input. It is the only line on stderr."""
    code, _, err = diffnet(*arguments)
    assert code == 1, err
    assert err.startswith("diffnet: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("diffnet: ").rstrip("\n")
