"""Lines and numbers of text files, read one line at a time so that memory stays a small multiple of the file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Line: TypeAlias = "tuple[int, str]"

MAX_LINE = 2**26  # characters; the words of a line need many times its memory
_SHAPE = bytes(ord("0" if i in b"0123456789" else " " if i in b" \t" else "x") for i in range(256))  # for `translate`


def numbered_lines(data: bytes, start: int = 0, *, continued: bool = False, errors: str = "replace") -> Iterator[Line]:
    """Yield the lines of UTF-8 text from byte `start` on, with their numbers from 1. LF, CR and CRLF end a line.

    continued: join a line that ends in a backslash with the next one
    errors: see `bytes.decode`

    Raises ValueError for a line of more than MAX_LINE characters.
    """
    stream = io.BytesIO(data)
    stream.seek(start)
    parts: list[str] = []
    length = 0
    for number, line in enumerate(io.TextIOWrapper(stream, "utf-8" if start else "utf-8-sig", errors), 1):
        length += len(line)
        if length > MAX_LINE:
            raise ValueError(f"line {number} has more than {MAX_LINE} characters")
        if continued and line.endswith("\\\n"):
            parts.append(line[:-2])
            continue
        yield number, " ".join([*parts, line])
        parts, length = [], 0


def without_comments(lines: Iterable[Line]) -> Iterator[Line]:
    """The stripped lines that hold more than a comment, each up to its comment."""
    for number, line in lines:
        text = line.split("#", 1)[0].strip()
        if text:
            yield number, text


def lines_with_content(data: bytes) -> Iterator[Line]:
    """`without_comments` of `numbered_lines`. Text without comments is read in less than half of the time."""
    if len(data) > MAX_LINE or b"#" in data or b"\r" in data or not data.isascii():
        return without_comments(numbered_lines(data))
    return filter(itemgetter(1), enumerate(map(str.strip, data.decode().split("\n")), 1))


def real(word: str) -> float:
    """The number that a word stands for. Raises ValueError, also for digits grouped as in `1_0` or of other scripts.

    Python reads these as numbers, but no format of meshes or labels has them.
    """
    try:
        if word.isascii() and "_" not in word:
            return float(word)
    except ValueError:
        pass
    raise ValueError(f"{word[:40]!r} is not a number")


def integer(word: str) -> int:
    """The whole number that a word stands for. It may be written as a float (`1.000e+00`). See `real`."""
    try:
        if word.isascii() and "_" not in word:
            return int(word)
    except ValueError:
        pass
    value = real(word)
    if not value.is_integer():
        raise ValueError(f"{word[:40]!r} is not a whole number")
    return int(value)


def table(lines: Iterable[str], columns: int | None = None, dtype: type = np.float64) -> NDArray[Any] | None:
    """The numbers in the first columns of each line, by NumPy: (N, columns). None if a line holds something else.

    columns: None means all columns. Each line then has the same number of them.
    """
    rest = iter(lines)
    first = next(rest, "")
    if not first.strip():  # NumPy warns if there is no number at all
        return None
    used: Any = None if columns is None else range(columns)
    try:
        return np.loadtxt(chain([first], rest), dtype, comments=None, usecols=used, ndmin=2, encoding=None)
    except ValueError:
        return None


def whole_table(lines: Sequence[str], columns: int | None = None) -> NDArray[np.int64] | None:
    """As `table`, for whole numbers, which may be written as floats."""
    # NumPy reads digits as integers seven times faster than as floats. It accepts other words and numbers beyond 64
    # bits, too, and rounds them, so these are looked for.
    shape = " ".join(lines).encode().translate(_SHAPE)
    if b"x" not in shape and b"0" * 19 not in shape:
        return table(lines, columns, np.int64)
    values = table(lines, columns)
    return None if values is None or not whole(values) else values.astype(np.int64)


def whole(values: NDArray[np.float64]) -> bool:
    """Whether all values are whole numbers that float64 holds exactly."""
    return bool(((np.abs(values) < 2**53) & (values == np.trunc(values))).all())
