"""PyTorch Geometric (https://pyg.org): `Data` with operators, which its `DataLoader` batches.

This module needs `pip install 'diffnet[pyg]'`. A batch of PyTorch Geometric packs vertices as `Operators` do, so all
networks and layers of diffnet take `batch.x` and `batch.operators`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from diffnet.data.labeled import UNLABELED, LabeledMesh
from diffnet.geometry import MeshLike, Operators, collate, load_mesh, precompute
from diffnet.geometry.mesh.objects import on_host

try:
    from torch_geometric.data import Batch, Data, HeteroData
    from torch_geometric.transforms import BaseTransform
except ImportError as e:
    raise ImportError(f"diffnet.data.pyg needs PyTorch Geometric ({e}): pip install 'diffnet[pyg]'") from e

__all__ = ["AddOperators", "DataWithOperators", "from_data", "pack_operators", "to_data"]

D = TypeVar("D", bound="Data | HeteroData")


class DataWithOperators(Data):  # type: ignore[misc]
    """A `Data` with `operators`, which are packed in a batch. `AddOperators` makes it.

    A class of your own that has operators inherits from it in place of `Data`. Other attributes may hold operators,
    too, such as those of a second mesh; `pack_operators` packs them.
    """

    @property
    def operators(self) -> Operators:
        """The operators of this mesh, or the packed operators of the meshes of a batch."""
        if "operators" not in self:
            raise AttributeError("this data has no operators; write AddOperators()(data)")
        if not isinstance(self["operators"], Operators):
            pack_operators(self)
            _check_positions(self)
        elif "ptr" not in self:
            _check_positions(self)
        return self["operators"]

    @operators.setter
    def operators(self, operators: Operators) -> None:
        self["operators"] = operators
        if self.pos is not None and len(operators) == 1:
            self[_STEPS] = _steps(self.pos)

    def apply(self, func: Callable[[Any], Any], *args: str) -> DataWithOperators:
        """Apply a function, such as a move to a GPU, to all tensors. Operators are packed first, so they move once."""
        if "operators" in self:
            _ = self.operators
        pack_operators(self)
        return super().apply(func, *args)


_STEPS = "steps_of_operators"


def pack_operators(batch: D) -> D:
    """Pack the operators in all attributes of a batch, also of one of `HeteroData`. Returns the batch.

    PyTorch Geometric makes a list of all that is no tensor. `DataWithOperators` calls this by itself.

    >>> import torch
    >>> from torch_geometric.data import HeteroData
    >>> from torch_geometric.loader import DataLoader
    >>> data = HeteroData()
    >>> data["protein"].surface = precompute((torch.eye(3), [[0, 1, 2]]), k=2)
    >>> (batch,) = DataLoader([data] * 4, batch_size=4)
    >>> pack_operators(batch)["protein"].surface
    Operators(meshes=4, vertices=12, faces=4, k=2, dtype=torch.float32, device=cpu)
    """
    for store in batch.stores:
        for name, value in list(store.items()):
            if isinstance(value, list) and value and all(isinstance(each, Operators) for each in value):
                store[name] = collate(value)
    return batch


def _steps(pos: torch.Tensor) -> torch.Tensor:
    """The sum of the distances from each point to the next, (1,) float64. Rotations and shifts don't change it."""
    return pos.double().diff(dim=0).norm(dim=1).sum()[None]


def _check_positions(data: Data) -> None:
    """Raise ValueError if the points of a mesh have moved or are fewer than those that its operators are of.

    Rotations, shifts and mirror images are allowed. Rounding of positions changes a step by less than a few units of
    its last digit, at the size of the largest coordinate.
    """
    if _STEPS not in data or data.pos is None or data.pos.device.type != "cpu":
        return
    operators, way = data["operators"], "write AddOperators after the transforms that move or drop points"
    if len(data.pos) != operators.num_vertices:
        raise ValueError(f"the operators have {operators.num_vertices} vertices, pos has {len(data.pos)} points; {way}")
    for mesh, (pos, before) in enumerate(zip(operators.unpack(data.pos), data[_STEPS], strict=True)):
        rounding = 32 * torch.finfo(pos.dtype).eps * len(pos) * pos.abs().max() if len(pos) else 0
        if (_steps(pos)[0] - before).abs() > rounding:
            raise ValueError(f"the points of mesh {mesh} have moved since its operators were computed; {way}")


class AddOperators(BaseTransform):  # type: ignore[misc]
    """A transform of PyTorch Geometric: adds the `operators` of `data.pos`, `data.face` and, for points, `data.normal`.

    k: the number of eigenpairs
    options: the other options of `precompute`. With `cache_dir`, a mesh is preprocessed once.

    The result is a `DataWithOperators`. Rotations, shifts and mirror images may follow. After other transforms that
    move or drop points, reading `operators` on the CPU raises ValueError.

    Raises TypeError for a subclass of `Data` that doesn't inherit from `DataWithOperators`, and the errors of
    `precompute`.

    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.loader import DataLoader
    >>> from diffnet import DiffusionNet
    >>> triangle = Data(pos=torch.eye(3), face=torch.tensor([[0], [1], [2]]))
    >>> (batch,) = DataLoader([AddOperators(k=2)(triangle)] * 4, batch_size=4)
    >>> batch.operators
    Operators(meshes=4, vertices=12, faces=4, k=2, dtype=torch.float32, device=cpu)
    >>> DiffusionNet(3, 8, width=16)(batch.pos, batch.operators).shape
    torch.Size([12, 8])
    """

    def __init__(self, k: int = 128, **options: Any) -> None:
        self.options = {"k": k, **options}

    def forward(self, data: Data) -> DataWithOperators:
        if type(data) is Data:
            data = DataWithOperators.from_dict(data.to_dict())
        if not isinstance(data, DataWithOperators):
            way = "let it inherit from diffnet.data.pyg.DataWithOperators"
            if isinstance(data, Batch):
                way = "add operators before the DataLoader makes batches"
            raise TypeError(f"data should be Data or DataWithOperators, got {type(data).__name__}; {way}")
        data.operators = precompute(data, **self.options)
        return data

    def __repr__(self) -> str:
        return f"AddOperators({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


def to_data(mesh: MeshLike | LabeledMesh) -> Data:
    """A mesh or a point cloud as `Data`.

    mesh: anything that `load_mesh` reads, or a `LabeledMesh`

    Returns `pos` (V, 3) float32; `face` (3, F) int64 and `normal` (V, 3) float32, where the mesh has them; `y`, the
    labels; and the own arrays of a `LabeledMesh` by their names. An unlabeled element has -1 or NaN in `y`. Raises
    MeshError for a mesh that can't be used.
    """
    source = load_mesh(mesh.mesh if isinstance(mesh, LabeledMesh) else mesh)
    data = Data(pos=torch.from_numpy(source.verts).float())
    if not source.is_point_cloud:
        data.face = torch.from_numpy(source.faces).T.contiguous()
    if source.normals is not None:
        data.normal = torch.from_numpy(source.normals).float()
    if isinstance(mesh, LabeledMesh):
        data.y = torch.as_tensor(mesh.labels)
        data.update({name: torch.as_tensor(array) for name, array in mesh.arrays.items()})
    return data


def from_data(data: Data) -> LabeledMesh:
    """A `Data` as a `LabeledMesh`, for the data sets and the training of diffnet. The inverse of `to_data`.

    data: with `pos` (V, 3), and perhaps `face` (3, F), `normal` (V, 3) and labels `y`: whole numbers, (V,), (F,), (E,)
        or (1,), or the targets of a regression, floating point, (N,) or (N, C). Without `y`, no vertex has a label.
        Other tensors with a row for each vertex become own arrays, so `x` is a feature under the name "file:x".

    Raises MeshError for a mesh that can't be used, also for a batch; see `batch.to_data_list()`.
    """
    mesh = load_mesh(data)
    labels = np.full(len(mesh.verts), UNLABELED) if data.y is None else np.asarray(on_host(data.y))
    labels = labels.reshape(len(labels), -1) if labels.dtype.kind == "f" else labels.astype(np.int64)
    names = [name for name in data.node_attrs() if name not in ("pos", "normal", "y")]
    return LabeledMesh(mesh.name, mesh, labels, {name: np.asarray(on_host(data[name])) for name in names})


torch.serialization.add_safe_globals([DataWithOperators])  # for stored data sets, which are read without code
