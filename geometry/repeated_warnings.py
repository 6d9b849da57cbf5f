"""Warnings that many meshes or worker processes would repeat."""

from __future__ import annotations

import warnings

_texts: set[str] = set()  # that this process has warned with


def warn_once(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, unless this process has warned with the same text before.

    Python shows a text once for each place in the code, but it begins again whenever a filter changes.
    """
    if text not in _texts:
        _texts.add(text)
        warnings.warn(text, category, stacklevel=3)
