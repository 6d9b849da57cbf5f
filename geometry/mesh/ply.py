"""Reader of PLY files, ASCII and binary.

Every number of the file takes at most 8 bytes, so memory stays a small multiple of the file. plyfile takes a hundred
bytes for each list, and what it accepts in ASCII files depends on the version of NumPy.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.mesh.text import Line, integer, numbered_lines, real, table, whole

Columns: TypeAlias = "dict[str, NDArray[Any] | Lists]"
_BYTE_ORDERS = {"ascii": "=", "binary_little_endian": "<", "binary_big_endian": ">"}
_TYPES = {
    **{"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"},
    **{"int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2", "int32": "i4", "uint32": "u4"},
    **{"float": "f4", "double": "f8", "float32": "f4", "float64": "f8"},
}


class Lists(NamedTuple):
    """A property whose rows are lists.

    sizes: (N,) int64, the number of items in each row
    items: those of all rows, with the file's dtype
    """

    sizes: NDArray[np.int64]
    items: NDArray[Any]


class _Property(NamedTuple):
    """dtype: of the numbers. length: the dtype of the lengths of lists, None for a single number."""

    name: str
    dtype: np.dtype[Any]
    length: np.dtype[Any] | None


class _Element(NamedTuple):
    name: str
    rows: int
    properties: dict[str, _Property]


def read_ply(data: bytes) -> dict[str, Columns]:
    """The properties of each element of a PLY file. Raises ValueError for a damaged file."""
    first = re.match(rb"ply[ \t]*(\r\n|\r|\n)", data)
    if first is None:
        raise ValueError("the first line should be 'ply'")
    # Some programs write another line end after the header than in it. A single CR may stand before a byte of data, LF.
    ends = rb"\r" if first[1] == b"\r" else rb"\r?\n"
    last = re.compile(rb"[\r\n]end_header[ \t]*" + ends).search(data)
    if last is None:
        raise ValueError("the header has no line 'end_header'; the header is damaged, or the file is cut off")
    header = data[first.end() : last.start()].decode("utf-8", "replace")
    order, elements = _read_header(re.split("\r\n|\r|\n", header))
    for element in elements.values():
        if element.rows * max(len(element.properties), 1) > len(data):  # a number takes a byte or more
            raise ValueError(
                f"its header declares {element.rows} rows of element {element.name[:30]!r}, more than {len(data)} "
                f"bytes can hold with {len(element.properties)} properties; the header is damaged, or the file is cut "
                "off"
            )
    start = last.end()
    if order == _BYTE_ORDERS["ascii"]:
        return _read_text(data, start, elements)
    columns = {}
    for name, element in elements.items():
        columns[name], start = _read_binary(data, start, element)
    return columns


def _read_header(lines: list[str]) -> tuple[str, dict[str, _Element]]:
    """The byte order, a value of _BYTE_ORDERS, and the elements."""
    order = ""
    elements: dict[str, _Element] = {}
    properties: dict[str, _Property] | None = None  # those of the last element
    for number, line in enumerate(lines, 2):
        words = line.split()
        try:
            if not words or words[0] in ("comment", "obj_info"):
                continue
            if words[0] == "format" and not order:
                if len(words) != 3 or words[1] not in _BYTE_ORDERS or words[2] != "1.0":
                    raise ValueError(f"the format should be {', '.join(_BYTE_ORDERS)} 1.0")
                order = _BYTE_ORDERS[words[1]]
            elif words[0] == "element" and order:
                if len(words) != 3 or not re.fullmatch("[0-9]+", words[2]) or words[1] in elements:
                    raise ValueError("expected 'element NAME COUNT' with a new name")
                properties = {}
                elements[words[1]] = _Element(words[1], int(words[2][:30]), properties)
            elif words[0] == "property" and properties is not None:
                prop = _property(words, order)
                if prop.name in properties:
                    raise ValueError("two properties of an element have the same name")
                properties[prop.name] = prop
            else:
                raise ValueError("this line is not expected here")
        except ValueError as e:
            raise ValueError(f"line {number}: {e}, got {line[:60]!r}") from e
    return order, elements


def _property(words: list[str], order: str) -> _Property:
    is_list = words[1:2] == ["list"]
    types = words[2:-1] if is_list else words[1:-1]
    if len(types) != 1 + is_list or not set(types) <= _TYPES.keys():
        raise ValueError(
            f"expected 'property TYPE NAME' or 'property list TYPE TYPE NAME' of types {', '.join(_TYPES)}"
        )
    length, dtype = (np.dtype(order + _TYPES[name]) for name in (types[0], types[-1]))
    if is_list and length.kind == "f":
        raise ValueError("the length of a list should be an integer")
    return _Property(words[-1], dtype, length if is_list else None)


def _read_binary(data: bytes, start: int, element: _Element) -> tuple[Columns, int]:
    """The columns of an element that begins at a byte, and its end."""
    properties = element.properties.values()
    columns, end = _read_rows(data, start, element, min(element.rows, 1))
    if element.rows <= 1 or not properties:
        return columns, end
    # If all rows have lists of the same lengths as the first, they are one array.
    lengths = {name: int(column.sizes[0]) for name, column in columns.items() if isinstance(column, Lists)}
    fields: list[Any] = []
    for prop in properties:
        fields += [] if prop.length is None else [(f"{prop.name}\nlength", prop.length)]
        fields.append((prop.name, prop.dtype, () if prop.length is None else (lengths[prop.name],)))
    dtype = np.dtype(fields)
    end = start + element.rows * dtype.itemsize
    if end <= len(data):
        rows = np.frombuffer(data, dtype, element.rows, start)
        if all((rows[f"{name}\nlength"] == length).all() for name, length in lengths.items()):
            for prop in properties:
                columns[prop.name] = _even(rows[prop.name].astype(prop.dtype.newbyteorder("=")))
            return columns, end
    return _read_rows(data, start, element, element.rows)


def _read_rows(data: bytes, start: int, element: _Element, count: int) -> tuple[Columns, int]:
    """The columns of the first rows, read one by one, and their end."""
    numbers = {name: bytearray() for name in element.properties}
    lengths = {name: bytearray() for name in element.properties}
    for row in range(count):
        for prop in element.properties.values():
            size = 1
            if prop.length is not None:
                end = start + prop.length.itemsize
                order = "big" if prop.length.str[0] == ">" else "little"
                size = int.from_bytes(data[start:end], order, signed=prop.length.kind == "i")  # type: ignore[arg-type]
                lengths[prop.name] += data[start:end]
                start = end
            end = start + size * prop.dtype.itemsize
            if size < 0:
                raise _damaged(element, row, prop, f"a list of {size}")
            if end > len(data):
                raise _damaged(element, row, prop, "the file ends here")
            numbers[prop.name] += data[start:end]
            start = end
    return _as_columns(element, numbers, lengths), start


def _read_text(data: bytes, start: int, elements: dict[str, _Element]) -> dict[str, Columns]:
    columns = {}
    lines, before = numbered_lines(data, start), 0
    for name, element in elements.items():
        table = _read_table(islice(lines, element.rows), element)
        if table is None:  # read line by line: lists have different lengths, or the message must name a row
            lines = islice(numbered_lines(data, start), before, None)
            table = _read_lines(islice(lines, element.rows), element)
        columns[name] = table
        before += element.rows
    return columns


def _read_table(lines: Iterator[Line], element: _Element) -> Columns | None:
    """The columns of an element with at most one list in a row, always of the same length. None for another one."""
    values = table(line for _, line in lines)
    if values is None or len(values) != element.rows:
        return None
    length = values.shape[1] - len(element.properties)
    if length and sum(prop.length is not None for prop in element.properties.values()) != 1:
        return None
    columns: Columns = {}
    at = 0
    for prop in element.properties.values():
        if prop.length is None:
            part = values[:, at]
            at += 1
        elif length < 0 or (values[:, at] != length).any():
            return None
        else:
            part = values[:, at + 1 : at + 1 + length]
            at += 1 + length
        if prop.dtype.kind != "f":
            bounds = np.iinfo(prop.dtype)
            if not (whole(part) and ((part >= bounds.min) & (part <= bounds.max)).all()):
                return None
        with np.errstate(over="ignore"):  # numbers beyond float32 are infinite
            columns[prop.name] = _even(part.astype(prop.dtype))
    return columns


def _even(rows: NDArray[Any]) -> NDArray[Any] | Lists:
    """A property with a number (N,) or a list of the same length (N, L) in each row."""
    return rows if rows.ndim == 1 else Lists(np.full(len(rows), rows.shape[1]), rows.reshape(-1))


def _read_lines(lines: Iterator[Line], element: _Element) -> Columns:
    numbers: dict[str, Any] = {
        name: array("d" if prop.dtype.kind == "f" else "q") for name, prop in element.properties.items()
    }
    lengths = {name: array("q") for name in element.properties}
    parsers = {name: _parser(prop.dtype) for name, prop in element.properties.items()}
    row = 0
    for _, line in lines:
        words = line.split()
        at = 0
        prop: _Property | None = None
        try:
            for name, prop in element.properties.items():
                size = 1
                if prop.length is not None:
                    size = integer(words[at])
                    if size < 0:
                        raise ValueError(f"a list of {size}")
                    lengths[name].append(size)
                    at += 1
                if at + size > len(words):
                    raise IndexError
                numbers[name].extend(map(parsers[name], words[at : at + size]))
                at += size
        except IndexError:
            raise _damaged(element, row, prop, "the line ends here") from None
        except (ValueError, OverflowError) as e:
            raise _damaged(element, row, prop, str(e)) from e
        if at != len(words):
            raise _damaged(element, row, None, f"{len(words)} numbers in the line, expected {at}")
        row += 1
    if row < element.rows:
        raise _damaged(element, row, None, "the file ends here")
    return _as_columns(element, numbers, lengths)


def _parser(dtype: np.dtype[Any]) -> Callable[[str], float]:
    if dtype.kind == "f":
        return real
    bounds = np.iinfo(dtype)

    def parse(word: str) -> int:
        value = integer(word)
        if not bounds.min <= value <= bounds.max:
            raise ValueError(f"{word[:40]} is not from {bounds.min} to {bounds.max}")
        return value

    return parse


def _as_columns(element: _Element, numbers: dict[str, Any], lengths: dict[str, Any]) -> Columns:
    """The columns in buffers: bytes of the file, or arrays that hold the numbers of text in 8 bytes each."""

    def array_of(buffer: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(buffer, dtype if isinstance(buffer, bytearray) else buffer.typecode)

    columns: Columns = {}
    for name, prop in element.properties.items():
        with np.errstate(over="ignore"):  # numbers beyond float32 are infinite
            values = array_of(numbers[name], prop.dtype).astype(prop.dtype.newbyteorder("="))
        if prop.length is not None:
            columns[name] = Lists(array_of(lengths[name], prop.length).astype(np.int64), values)
        else:
            columns[name] = values
    return columns


def _damaged(element: _Element, row: int, prop: _Property | None, what: str) -> ValueError:
    place = "" if prop is None else f"property {prop.name[:40]!r}: "
    return ValueError(f"element {element.name[:40]!r}: row {row}: {place}{what[:200]}")
