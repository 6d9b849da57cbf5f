"""Sizes that kernels can't address. Offsets into tensors are 64-bit, numbers of rows and programs are 32-bit."""

from __future__ import annotations

LARGEST = 2**31 - 1


def check_programs(operation: str, programs: int) -> None:
    """Check that a GPU can launch this many programs at once. Raises ValueError that names the operation."""
    if programs > LARGEST:
        raise ValueError(
            f"{operation} of these sizes takes {programs} programs on a GPU, at most {LARGEST} can be launched; "
            "divide the batch"
        )


def check_rows(operation: str, *sizes: int) -> None:
    """Check that 32-bit numbers count these rows or columns. Raises ValueError that names the operation."""
    for size in sizes:
        if size > LARGEST:
            raise ValueError(f"kernels of {operation} take at most {LARGEST} rows and columns, got {size}")
