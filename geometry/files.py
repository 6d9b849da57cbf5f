"""Writing files that are complete under their name, or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file, text as UTF-8. Under its name there is always a complete file: the old one or the new one.

    Raises OSError, which names the file, for example if the disk is full.
    """
    path = Path(path)
    # Files made by the module tempfile can be read by their owner only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as e:  # a failed write names no file, and others name the temporary one
        raise named(e, path) from e
    finally:
        temporary.unlink(missing_ok=True)


def named(error: OSError, path: Path) -> OSError:
    """The same error with the name of a file, as the user knows it."""
    return type(error)(error.errno, error.strerror or str(error), str(path))
