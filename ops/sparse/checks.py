"""Checks of patterns and operands. Checks of operands read shapes, dtypes and devices only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_integer, not_a_tensor
from diffnet.ops.sparse.csr import row_of_each


def check_operand(
    name: str, operand: Any, shape: Sequence[int | str], device: torch.device, *, floating: bool = False
) -> None:
    """Check that an operand is a real tensor on this device whose last dimensions have this shape.

    Args:
        name: of the operand, for messages
        operand: the argument to check
        shape: the last dimensions. A string stands for any size.
        device: the device of the pattern
        floating: whether integers and bools are refused, too

    Raises:
        TypeError: if the operand is no tensor, is complex, or is not floating point although it should be.
        ValueError: for another shape or device.
    """
    if not isinstance(operand, Tensor):
        raise not_a_tensor(name, operand)
    if not operand.is_floating_point() and (floating or operand.is_complex()):
        raise TypeError(f"{name} should be {'floating point' if floating else 'real'}, got {operand.dtype}")
    found = operand.shape
    matches = len(found) >= len(shape)
    for n, m in zip(reversed(shape), reversed(found), strict=False):  # a loop, as a generator costs a microsecond
        if n != m and not isinstance(n, str):
            matches = False
    if not matches:
        raise ValueError(f"{name} should have shape (…, {', '.join(map(str, shape))}), shape is {tuple(found)}")
    if operand.device != device:
        raise ValueError(f"{name} should be on {device}, where the pattern is; it is on {operand.device}")


def check_csr(indptr: Tensor, indices: Tensor, columns: int, row_order: Tensor | None) -> None:
    """Check that arrays form a CSR pattern, see `Pattern`. Raises ValueError that names the value."""
    for name, array in (("indptr", indptr), ("indices", indices)):
        if array.ndim != 1 or array.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} should be 1-D int32 or int64, got {array.dtype} of shape {tuple(array.shape)}")
    if indptr.dtype != indices.dtype or indptr.device != indices.device:
        raise ValueError(
            f"indptr and indices should have one dtype and device, got {indptr.dtype} on {indptr.device} "
            f"and {indices.dtype} on {indices.device}"
        )
    if columns < 0:
        raise ValueError(f"columns should be at least 0, got {columns}")
    if len(indptr) == 0:
        raise ValueError("indptr should have one value more than there are rows, got none")
    first, last = indptr[[0, -1]].tolist()
    if first != 0:
        raise ValueError(f"indptr should start at 0, got {first}")
    if last != len(indices):
        raise ValueError(f"indptr should end at the number of indices, {len(indices)}, got {last}")
    descents = torch.diff(indptr) < 0
    if descents.any():
        row = int(descents.nonzero()[0])
        raise ValueError(f"indptr should not descend, got {indptr[row]} then {indptr[row + 1]} at row {row}")
    if row_order is not None:
        check_row_order(row_order, indptr)
    outside = (indices < 0) | (indices >= columns)
    if outside.any():
        entry = int(outside.nonzero()[0])
        raise ValueError(f"indices should be from 0 to {columns - 1}, got {indices[entry]} at entry {entry}")
    rows = row_of_each(indptr, indices)
    wrong = (rows[1:] == rows[:-1]) & (indices[1:] <= indices[:-1])
    if wrong.any():
        entry = int(wrong.nonzero()[0])
        before, after = indices[entry : entry + 2].tolist()
        found = f"column {after} twice" if before == after else f"{before} before {after}"
        row = int(rows[entry] if row_order is None else row_order[rows[entry]])
        raise ValueError(f"indices should ascend within a row, got {found} in row {row}")


def check_ell(indices: Any, columns: Any) -> None:
    """Check the arguments of an ELL pattern, see `EllPattern`.

    Reads the values of the indices, so it waits for a GPU. While something is traced, there are no values to read.

    Raises:
        TypeError: if `indices` is no tensor or `columns` is no integer.
        ValueError: that names the wrong value.
    """
    if isinstance(indices, torch.fx.Proxy):  # the stand-in of torch.compile
        return
    if not isinstance(indices, Tensor) or isinstance(indices, torch.nn.Parameter):
        raise TypeError(f"indices should be a plain tensor, got {type(indices).__name__}")
    check_integer("columns", columns)
    if indices.ndim != 2 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices should be 2-D int32 or int64, got {indices.dtype} of shape {tuple(indices.shape)}")
    if columns < 0:
        raise ValueError(f"columns should be at least 0, got {columns}")
    if type(indices) is not Tensor or indices.is_meta:
        return
    outside = (indices < -1) | (indices >= columns)
    if outside.any():
        row, place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"indices should be below columns, {columns}, and −1 at unused places, "
            f"got {indices[row, place]} at place {place} of row {row}"
        )
    before, after = indices[:, :-1], indices[:, 1:]
    wrong = (after >= 0) & (after <= before) | (after >= 0) & (before < 0)
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        a, b = indices[row, place : place + 2].tolist()
        if a < 0:
            raise ValueError(f"unused places should come last in a row, got −1 before {b} in row {row}")
        found = f"column {a} twice" if a == b else f"{a} before {b}"
        raise ValueError(f"indices should ascend within a row, got {found} in row {row}")


def check_row_order(order: Tensor, indptr: Tensor) -> None:
    """Check that `order` is a permutation of the rows of a pattern. Raises ValueError that names the row."""
    rows = len(indptr) - 1
    if order.shape != (rows,) or order.dtype != indptr.dtype or order.device != indptr.device:
        raise ValueError(
            f"row_order should have shape ({rows},), dtype {indptr.dtype} and be on {indptr.device}, "
            f"got {order.dtype} of shape {tuple(order.shape)} on {order.device}"
        )
    missing = (order.sort().values != torch.arange(rows, device=order.device)).nonzero()
    if len(missing) > 0:
        raise ValueError(f"row_order should have each row once, row {int(missing[0])} is missing or twice")
