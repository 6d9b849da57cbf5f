"""Writing files that are complete under their name, or not there."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffnet.geometry.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# How a cell begins that spreadsheets run as a formula. Apostrophes before it are part of the text, or escape it.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_ESCAPED = re.compile(r"'" + _FORMULA.pattern)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-](nan|inf)", re.ASCII | re.IGNORECASE)


def write_atomically(path: str | os.PathLike[str], content: bytes | memoryview | str) -> None:
    """Write a file. Under its name there is always a complete file: the old one or the new one.

    content: bytes, or text, which becomes UTF-8 after `as_text`

    Raises OSError, which names the file, for example if the disk is full.
    """
    path = Path(path)
    # Files made by the module tempfile can be read by their owner only. `remove_leftovers` knows this form.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(as_text(content).encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as e:  # a failed write names no file, and others name the temporary one
        raise named(e, path) from e
    finally:
        temporary.unlink(missing_ok=True)


def as_text(name: str) -> str:
    """Text without surrogates, which stand for bytes of file names that are not UTF-8. They become `\\udcff`."""
    return name.encode(errors="backslashreplace").decode()


def full_number(value: float) -> str:
    """The shortest text that reads as the same number, such as 2, 0.1 or 1e-07."""
    return repr(float(value)).removesuffix(".0")


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The content of a CSV file with these rows, which `csv_rows` reads.

    Text that a spreadsheet would run as a formula gets an apostrophe in front. Numbers stay, also as text.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")  # so cells with a part of it are quoted
    for row in rows:
        writer.writerow([_without_formula(cell) for cell in row])
        text.seek(text.tell() - 2)
        text.write("\n")
    text.truncate()
    return text.getvalue()


def csv_rows(lines: Iterable[str], *, strict: bool = False, delimiter: str = ",") -> Iterator[list[str]]:
    """The rows of a CSV file, of `csv_text` or of another program. Raises csv.Error, see `csv.reader`."""
    for row in csv.reader(lines, strict=strict, delimiter=delimiter):
        yield [cell[1:] if _ESCAPED.match(cell) else cell for cell in row]


def npy_bytes(array: NDArray[Any]) -> bytes:
    """The content of a file of NumPy (.npy)."""
    import numpy as np

    np.save(content := io.BytesIO(), array)
    return content.getvalue()


def npz_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The content of an archive of arrays by name (.npz)."""
    import numpy as np

    np.savez(content := io.BytesIO(), **arrays)  # type: ignore[arg-type]  # of the further arguments
    return content.getvalue()


def _without_formula(cell: Any) -> Any:
    text = str(cell)
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else cell


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove the temporary files that `write_atomically` left for these files in a process that was killed.

    Those of running processes stay. Processes on other machines are not known, so no other machine should be writing
    these files.
    """
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(path.name)
    for folder, written in names.items():
        for file in folder.glob(".*.tmp"):
            match = re.fullmatch(r"\.(.+)\.([1-9][0-9]{0,9})\.tmp", file.name)
            if match and match[1] in written and not _runs(int(match[2])):
                file.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    if sys.platform == "win32":  # os.kill sends Ctrl-C there, so nothing is known
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder with its parents, unless it is there. Raises OptionError, see `check_folder_path`."""
    check_folder_path(path)
    Path(path).mkdir(parents=True, exist_ok=True)


def check_folder_path(path: str | os.PathLike[str]) -> None:
    """Raises OptionError if there can't be a folder: a file is there or above, or a link whose target is missing."""
    path = Path(path)
    place = next(p for p in (path, *path.parents) if p.exists() or p.is_symlink() or p == p.parent)
    if place.is_symlink() and not place.exists():
        raise OptionError(f"{place}: this link points to {os.readlink(place)}, which is missing")
    if place.exists() and not place.is_dir():
        raise OptionError(f"{place}: a folder is needed here, and this is a file")


def named(error: OSError, path: Path) -> OSError:
    """The same error with the name of a file, as the user knows it."""
    return type(error)(error.errno, error.strerror or str(error), str(path))
