"""Calls that must raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(
    error: type[Exception] | tuple[type[Exception], ...],
    message: str,
    call: Callable[..., object],
    /,
    *arguments: Any,
    **options: Any,
) -> None:
    """The call raises the error, and its text matches the message."""
    with pytest.raises(error, match=message):
        call(*arguments, **options)
