"""`collate`: samples of tensors, labels and operators as one batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from diffnet.geometry.operators import Operators, pack
from diffnet.ops import SparseMatrix, block_diagonal


class PerMesh(NamedTuple):
    """A tensor or array that belongs to a mesh as a whole. `collate` stacks them, (B, …), whatever their shape is.

    Without it, an array that by chance has a row for each vertex of its mesh in all of the batch is concatenated.

    >>> collate([PerMesh([0.5, 1.0]), PerMesh([0.0, 2.0])]).shape
    torch.Size([2, 2])
    """

    value: Any


class Rows(NamedTuple):
    """Rows of a mesh whose number is its own, such as landmarks. `collate` packs them, and counts those of each mesh.

    values: (N, …), a tensor, an array or a list
    lengths: the number of rows of each mesh; one mesh has all if there are none

    >>> landmarks = collate([Rows([3, 7]), Rows([5])])
    >>> landmarks.values, landmarks.lengths
    (tensor([3, 7, 5]), (2, 1))
    >>> landmarks.split()
    (tensor([3, 7]), tensor([5]))
    """

    values: Any
    lengths: tuple[int, ...] = ()

    def split(self) -> tuple[Tensor, ...]:
        """The rows of each mesh. They are views."""
        values = torch.as_tensor(self.values)
        return torch.split(values, list(self.lengths or (len(values),)))


@overload
def collate(batch: Sequence[Operators]) -> Operators: ...
@overload
def collate(batch: Sequence[Any]) -> Any: ...
def collate(batch: Sequence[Any]) -> Any:
    """Pack operators, or samples that hold operators, into one batch. Use it as `collate_fn` of a `DataLoader`.

    A sample is a tuple, list or dict of these, also nested. All samples must be built alike. The batch is built like
    one sample:

    - Operators are packed: mesh b owns the vertices ptr[b]:ptr[b+1].
    - A tensor or NumPy array with one row per vertex, face or edge of operators in its sample is concatenated, (V, …).
    - Other tensors and arrays of one shape are stacked, (B, …).
    - `PerMesh` and `Rows` say what the rows of a tensor are, where its shape may not tell.
    - Sparse matrices become the blocks of one block-diagonal matrix, for example those between two resolutions.
    - Numbers are stacked, (B,): int64 for integers, float32 for floats, bool for bools.
    - Strings, paths and None become a list.

    A row count decides first. If every tensor of the batch has as many rows as its mesh has vertices, faces or edges,
    it is concatenated.

    All operators must have the same dtype and device. Meshes with fewer eigenpairs than others get vectors 0, and
    values that repeat the last one, see `Operators`; meshes without any can't be mixed with them. `gradient_evecs` is
    kept if all have it. Each mesh keeps its neighborhood. What `prepared` remembers for all meshes is packed, too.
    `evecs`, `laplacian`, `gradient`, `frames` and `faces` are packed when they are first read, so don't write to the
    meshes' tensors before. Networks don't read all of them.

    Raises ValueError for an empty batch, for operators that can't be packed, and for tensors that fit no rule. Raises
    TypeError for samples that are built differently, and for other objects.

    >>> import torch
    >>> from diffnet.geometry import precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
    >>> batch = collate([triangle, triangle])
    >>> batch.ptr.tolist(), batch.faces.tolist()
    ([0, 3, 6], [[0, 1, 2], [3, 4, 5]])
    >>> features, operators, labels = collate([(torch.zeros(3, 16), triangle, 0), (torch.zeros(3, 16), triangle, 1)])
    >>> features.shape, labels
    (torch.Size([6, 16]), tensor([0, 1]))
    """
    samples = list(batch)
    if all(isinstance(sample, Operators) for sample in samples):
        return pack(samples)
    return _packed(samples, "sample", list(zip(*map(_operators_of, samples), strict=False)))


def _operators_of(sample: Any) -> list[Operators]:
    """All operators in a sample, in order."""
    if isinstance(sample, Operators):
        return [sample]
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    return [o for part in sample for o in _operators_of(part)] if isinstance(sample, (tuple, list)) else []


def _packed(values: Sequence[Any], place: str, meshes: Sequence[tuple[Operators, ...]]) -> Any:
    """Pack one entry of all samples.

    place: where the entry stands, for errors
    meshes: for each place of operators in a sample, the operators of all samples
    """
    first = values[0]
    if isinstance(first, Operators):
        return pack(_alike(values, Operators, place))
    if isinstance(first, SparseMatrix):
        return block_diagonal(_alike(values, SparseMatrix, place))
    if isinstance(first, PerMesh):
        return torch.stack(_as_tensors([v.value for v in _alike(values, PerMesh, place)], meshes))
    if isinstance(first, Rows):
        parts = [part for v in _alike(values, Rows, place) for part in v.split()]
        return Rows(torch.cat(_as_tensors(parts, meshes)), tuple(map(len, parts)))
    if isinstance(first, (Tensor, np.ndarray, np.generic, int, float)):
        return _tensors(_alike(values, (Tensor, np.ndarray, np.generic, int, float), place), place, meshes)
    if isinstance(first, (str, bytes, os.PathLike)) or first is None:
        return list(_alike(values, (str, bytes, os.PathLike, type(None)), place))
    if isinstance(first, Mapping):
        keys = list(first)
        if any(value.keys() != first.keys() for value in _alike(values, Mapping, place)):
            raise TypeError(f"the dicts at {place} should have the same keys, {keys}")
        return {key: _packed([v[key] for v in values], f"{place}[{key!r}]", meshes) for key in keys}
    if isinstance(first, (tuple, list)):
        if any(len(value) != len(first) for value in _alike(values, type(first), place)):
            raise TypeError(f"the sequences at {place} should have the same length, {len(first)}")
        items = [_packed(entry, f"{place}[{i}]", meshes) for i, entry in enumerate(zip(*values, strict=True))]
        named = hasattr(first, "_fields")  # a namedtuple takes its entries one by one
        return type(first)(*items) if named else type(first)(items)
    raise TypeError(
        f"collate packs Operators, tensors, sparse matrices, numbers, strings, and tuples, lists and dicts of these; "
        f"{place} is of type {type(first).__name__}"
    )


def _alike(values: Sequence[Any], kinds: Any, place: str) -> Sequence[Any]:
    """Return the values if all are of these types. Raises TypeError otherwise."""
    if not all(isinstance(value, kinds) for value in values):
        types = ", ".join(sorted({type(value).__name__ for value in values}))
        raise TypeError(f"{place} should have one type in all samples, got {types}")
    return values


def _tensors(values: Sequence[Any], place: str, meshes: Sequence[tuple[Operators, ...]]) -> Tensor:
    if not any(isinstance(value, (Tensor, np.ndarray)) for value in values):
        return torch.tensor(values, device=_device(meshes))
    tensors = _as_tensors(values, meshes)
    shapes = [tuple(x.shape) for x in tensors]
    if all(shapes):  # no tensor is a single number
        rows = [shape[0] for shape in shapes]
        for count in _COUNTS:
            if any([count(operators) for operators in group] == rows for group in meshes):
                return torch.cat(tensors)
    if len(set(shapes)) == 1:
        return torch.stack(tensors)
    vertices = [[o.num_vertices for o in group] for group in meshes]
    raise ValueError(
        f"{place} should have one row per vertex, face or edge, or one shape in all samples; "
        f"shapes are {shapes}, numbers of vertices are {vertices}"
    )


def _device(meshes: Sequence[tuple[Operators, ...]]) -> torch.device:
    return meshes[0][0].device if meshes else torch.device("cpu")


def _as_tensors(values: Sequence[Any], meshes: Sequence[tuple[Operators, ...]]) -> list[Tensor]:
    return [v if isinstance(v, Tensor) else torch.as_tensor(v, device=_device(meshes)) for v in values]


_COUNTS: tuple[Callable[[Operators], int], ...] = (
    lambda operators: operators.num_vertices,
    lambda operators: len(operators.faces),
    lambda operators: sum(operators.edge_lengths) if len(operators.faces) else 0,  # found only if needed
)
