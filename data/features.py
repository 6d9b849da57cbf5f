"""The input features of a network, and the preprocessing that they need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.data.arrays import own_arrays, vertices_in_mask
from diffnet.data.conversion import standardized
from diffnet.data.feature_names import KINDS, Statistics, feature_parts
from diffnet.data.options import Preprocessing
from diffnet.geometry import Mesh, MeshLike, Operators, precompute, rotate
from diffnet.geometry.mesh.normalize import load_normalized
from diffnet.geometry.preprocessing import many

# __init__.pyi exports these three.
from diffnet.geometry.preprocessing.many import load_meanwhile as load_meanwhile, precompute_all as precompute_all
from diffnet.geometry.preprocessing.worker import CacheJob
from diffnet.geometry.processes import available_cores as available_cores
from diffnet.geometry.store.cache import remove_abandoned


def prepare(
    source: MeshLike,
    options: Preprocessing,
    cache_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Mesh, Operators]:
    """A mesh at normalized positions, and its operators.

    device: the device that computes the operators and that they are on, see `precompute`

    Raises MeshError for a mesh that can't be used.
    """
    mesh = load_normalized(source, cache_dir, options.normalize)
    return mesh, precompute(mesh, **asdict(options.decisive), cache_dir=cache_dir, device=device)


def fill_cache(
    sources: Sequence[MeshLike],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
    device: torch.device | str = "cpu",
    ready: Callable[[int], Any] = lambda position: None,
    positions: Iterable[int] | None = None,
    leave_large: bool = False,
) -> dict[int, str]:
    """Store the operators of all these meshes in the cache, at normalized positions, where `prepare` finds them.

    jobs: number of worker processes; by default one for each core
    advance: called once for each mesh, usable or not, when it is done
    device: the device that computes the operators of large meshes, see `precompute_all`
    ready: called with the position of each mesh as soon as the cache has it
    positions: those of the meshes that this call should store, instead of all. They are taken one by one, when a
        process or a GPU can start on them.
    leave_large: don't compute meshes that the device would compute. They are ready without an entry.

    Returns an error message for each mesh that can't be used, by position. These don't hold up the others.

    With several jobs, a script must call this under ``if __name__ == "__main__":``, because worker processes import the
    script; otherwise it raises WorkerError. Raises OSError if the cache folder can't be made.
    """
    remove_abandoned(cache_dir)
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    job, place = CacheJob(options.decisive, cache_dir, options.normalize), torch.device(device)
    run = many.OperatorRun(
        sources, job, jobs, place, lambda position, _: ready(position), False, advance, positions, leave_large
    )
    return run.run()


def input_features(
    mesh: Mesh,
    operators: Operators,
    features: str,
    *,
    statistics: Statistics | None = None,
    arrays: Mapping[str, Any] | None = None,
) -> Tensor:
    """The network's input features (V, C), float32.

    mesh: at normalized positions, see `prepare`
    features: one of these parts, or several joined by +, such as "xyz+normals". The order doesn't matter.

        - "xyz", 3 channels: the positions
        - "normals", 3: the normals of the tangent frames
        - "curvature", 2: with the mean curvature H and the Gaussian curvature K times the distance r of the farthest
          vertex from the mean of the vertices, asinh(H r) / 2 and sign(K) asinh(√|K| r) / 2. This doesn't depend on
          the size, and large values grow as their logarithm.
        - "diffused-curvature", 8: the same, of the surface diffused for four times, see `diffused_curvature`. It
          depends on the triangulation much less.
        - "metric-curvature", 10: both, in the unit of the positions, and of the surface diffused for fixed times. So a
          part of a mesh has the values of the whole, except near its border.
        - "diffused-offsets", 24: products and determinants of a vertex's normal and of the ways that it moves, if the
          surface is diffused for four times in the unit of the positions. The determinants tell left from right.
        - "hks", 16: the heat kernel signature
        - "log-hks", 16: log(hks) / 3. On small components and tips, the heat kernel is a thousand times larger than
          elsewhere, and its logarithm is easier to learn from.
        - "wks", 16: the wave kernel signature
        - "file:NAME", "vector:NAME", "scalar:NAME": an own array, see `own_arrays`. A vector turns with the mesh.
        - "mask:NAME", 1: where vertices count. All own arrays are 0 elsewhere.

    statistics: of the own arrays in the training set, see `array_statistics`. Each channel is then standardized. None
        leaves own arrays as they are.
    arrays: own arrays by name, instead of those beside the mesh file

    A single part has the values above. If there are several parts, constants shift and scale each of them to values of
    about −1 to 1, so that none drowns the others. They don't depend on the data set. Own arrays are only standardized.

    Raises OptionError for an unknown part, DataError for an own array that can't be used, ValueError for descriptors of
    operators without eigenpairs, and for a mesh and operators that differ in the number of vertices.
    """
    parts = feature_parts(features)
    if len(mesh.verts) != operators.num_vertices:
        raise ValueError(
            f"the mesh has {len(mesh.verts)} vertices and the operators {operators.num_vertices}; "
            "pass the operators of this mesh"
        )
    values_of = own_arrays(mesh, features, statistics, arrays)
    inside = vertices_in_mask(mesh, features, values_of)
    columns = []
    for part in parts:
        kind = KINDS.get(part.name)
        if part.array is not None:
            array: NDArray[Any] = values_of[part.array]
            if statistics is not None and part.array in statistics:
                array = standardized(array, statistics[part.array])
            values = torch.from_numpy(np.where(inside[:, None], array, 0)).float()
        else:
            values = KINDS[part.name].values(mesh, operators)
        columns.append(values if kind is None or len(parts) == 1 else (values - kind.shift) * kind.factor)
    return torch.cat(columns, 1) if len(columns) > 1 else columns[0]


def rotate_vectors(x: Tensor, vectors: Sequence[slice], rotations: Tensor, ptr: Tensor) -> Tensor:
    """Rotate the vectors in the input features of packed meshes. All other channels stay.

    x: (V, C)
    vectors: see `vector_channels`
    rotations: (B, 3, 3)
    ptr: (B+1,), the extents of the meshes

    Returns a new tensor (V, C).
    """
    turned = [rotate(x[:, channels], rotations, ptr) for channels in vectors]
    rest = x[:, vectors[-1].stop :] if vectors else x  # vectors come first
    return turned[0] if len(turned) == 1 and not rest.shape[1] else torch.cat([*turned, rest], 1)
