"""Large tables of all pairs of points, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

# Numbers of a table that are held at once: 64 MB in float32 on a GPU, and what stays in a cache on the CPU. Matrix
# products need enough rows to be fast.
MAX_ENTRIES = {"cuda": 2**24, "cpu": 2**21}
MIN_ROWS = {"cuda": 512, "cpu": 64}


def row_chunks(rows: int, like: Tensor, columns: int) -> Iterator[slice]:
    """Slices of almost equal numbers of rows, for a table (rows, columns) on the device of a tensor."""
    kind = "cuda" if like.is_cuda else "cpu"
    largest = max(MIN_ROWS[kind], MAX_ENTRIES[kind] // max(columns, 1))
    count = -(-rows // largest)
    for i in range(count):
        yield slice(rows * i // count, rows * (i + 1) // count)
