"""Sizes that kernels can't address.

Offsets into tensors with a row for each vertex or entry are 64-bit, so these tensors may have any number of elements.
Numbers of rows and of programs, offsets in matrices of coefficients or weights, and offsets in a tile are 32-bit.
"""

from __future__ import annotations

LARGEST = 2**31 - 1
MOST_ROWS = 2**31 - 2**20  # the last programs and loads made ahead count beyond the end of the rows
MOST_ACROSS = 65_535  # programs along the second axis of a grid
TALLEST_TILE = 128  # rows


def check_programs(operation: str, programs: int, across: int = 1) -> None:
    """Check that a GPU can launch a grid of this size. Raises ValueError that names the operation."""
    if programs > LARGEST:
        raise ValueError(
            f"{operation} of these sizes takes {programs} programs on a GPU, at most {LARGEST} can be launched; "
            "divide the batch"
        )
    if across > MOST_ACROSS:
        raise ValueError(
            f"{operation} of these sizes takes {across} programs side by side on a GPU, at most {MOST_ACROSS} can be "
            "launched; divide the channels or pass backend='torch'"
        )


def check_rows(operation: str, *sizes: int) -> None:
    """Check that 32-bit numbers count these rows or columns. Raises ValueError that names the operation."""
    for size in sizes:
        if size > MOST_ROWS:
            raise ValueError(
                f"kernels of {operation} take at most {MOST_ROWS} rows and columns, got {size}; "
                "divide the batch or pass backend='torch'"
            )


def check_matrix(operation: str, rows: int, columns: int) -> None:
    """Check that 32-bit offsets reach all of a matrix of coefficients or weights, and a tile as wide as the matrix.

    Raises ValueError that names the operation.
    """
    if max(rows, TALLEST_TILE) * max(columns, TALLEST_TILE) > LARGEST:
        raise ValueError(
            f"kernels of {operation} take matrices of coefficients and weights of at most {LARGEST} elements and "
            f"{LARGEST // TALLEST_TILE} rows and columns, got {rows} × {columns}; pass backend='torch'"
        )
