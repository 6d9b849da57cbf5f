"""Checks of the fields of `Operators`. They read types, shapes and devices only, so they never wait for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffnet.geometry.fields import FIELDS, Fields
from diffnet.ops.common.checks import check_index, check_tensor
from diffnet.ops.common.compiler import is_stand_in
from diffnet.ops.sparse.op import check_is_matrix
from diffnet.ops.sparse.pattern import check_is_pattern, check_square

# They have the sizes with which the others should agree.
_CHECKED_FIRST = ("mass", "ptr", "evals", "faces")


def check_fields(operators: Fields) -> None:
    """Check that all fields have the types and shapes that `Operators` documents, on one device.

    Raises TypeError or ValueError that names the field and what is expected. Values that torch.compile traces are
    stand-ins, which aren't checked.
    """
    mass = operators.mass
    if torch.compiler.is_compiling() or is_stand_in(mass):
        return
    check_tensor("mass", mass, ("V",))
    device, vertices = mass.device, mass.shape[0]
    check_index("ptr", operators.ptr, None, device)
    meshes = operators.ptr.shape[0] - 1
    if meshes < 0:
        raise ValueError("ptr should have one value more than there are meshes, got none")
    check_tensor("evals", operators.evals, (meshes, "K"), device)
    faces, k = operators.faces, operators.evals.shape[1]
    check_index("faces", faces, tuple(faces.shape) if isinstance(faces, Tensor) else None, device)
    if faces.ndim != 2 or faces.shape[1] != 3:
        raise ValueError(f"faces should have shape (F, 3), shape is {tuple(faces.shape)}")
    sizes: dict[Any, Any] = {"B": meshes, "V": vertices, "F": faces.shape[0], "K": k}
    for name, kind in FIELDS.items():
        if name in _CHECKED_FIRST:
            continue
        value = getattr(operators, name)
        if value is None and kind.optional:
            continue
        shape: tuple[Any, ...] = tuple(map(sizes.get, kind.shape, kind.shape))  # numbers stay
        if kind.kind == "values":
            check_tensor(name, value, shape, device)
        elif kind.kind == "matrix":
            check_is_matrix(name, value, "; Operators.from_parts takes other matrices")
            check_square(name, value.pattern, vertices, device)
            check_tensor(f"{name}.values", value.values, (*shape, value.nnz), device)
        elif kind.kind == "pattern":
            check_is_pattern(value, name)
            check_square(name, value, vertices, device)
        else:
            check_index(name, value, shape if kind.kind == "vertices" else (meshes + 1,), device)
