"""Sizes that kernels can't address.

Offsets into tensors with a row for each vertex or entry are 64-bit, so these tensors may have any number of elements.
Numbers of rows and of programs, offsets in matrices of coefficients or weights, and offsets in a tile are 32-bit.
"""

from __future__ import annotations

MAX_INT32 = 2**31 - 1
MAX_ROWS = 2**31 - 2**20  # the last programs, and loads made ahead, count beyond the last row
MAX_ACROSS = 65_535  # programs along the second axis of a grid
MAX_TILE_ROWS = 128  # rows


def check_programs(operation: str, programs: int, across: int = 1) -> None:
    """Check that a GPU can launch a grid of this size. Raises ValueError that names the operation."""
    if programs > MAX_INT32:
        raise ValueError(
            f"{operation} of these sizes takes {programs} programs on a GPU, at most {MAX_INT32} can be launched; "
            "divide the batch"
        )
    if across > MAX_ACROSS:
        raise ValueError(
            f"{operation} of these sizes takes {across} programs side by side on a GPU, at most {MAX_ACROSS} can "
            "be launched; divide the channels or pass backend='torch'"
        )


def check_rows(operation: str, *sizes: int) -> None:
    """Check that 32-bit numbers count these rows or columns. Raises ValueError that names the operation."""
    for size in sizes:
        if size > MAX_ROWS:
            raise ValueError(
                f"kernels of {operation} take at most {MAX_ROWS} rows and columns, got {size}; "
                "divide the batch or pass backend='torch'"
            )


def check_matrix(operation: str, rows: int, columns: int) -> None:
    """Check that 32-bit offsets reach all of a matrix of coefficients or weights, and a tile as wide as the matrix.

    Raises ValueError that names the operation.
    """
    if max(rows, MAX_TILE_ROWS) * max(columns, MAX_TILE_ROWS) > MAX_INT32:
        raise ValueError(
            f"kernels of {operation} take matrices of coefficients and weights of at most {MAX_INT32} elements and "
            f"{MAX_INT32 // MAX_TILE_ROWS} rows and columns, got {rows} × {columns}; pass backend='torch'"
        )
