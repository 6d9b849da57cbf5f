"""The input features of a network, and the preprocessing that they need."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.data.options import FEATURE_CHANNELS, FeatureKind, Preprocessing
from diffnet.geometry import Mesh, MeshLike, Operators, hks, precompute, wks
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.normalize import load_normalized
from diffnet.geometry.preprocessing import many
from diffnet.geometry.preprocessing.many import load_meanwhile as load_meanwhile  # __init__.pyi exports these three
from diffnet.geometry.preprocessing.many import precompute_all as precompute_all
from diffnet.geometry.preprocessing.options import Options
from diffnet.geometry.processes import available_cores as available_cores


def prepare(
    source: MeshLike,
    options: Preprocessing,
    cache_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Mesh, Operators]:
    """A mesh at normalized positions, and its operators on the CPU.

    device: device that computes the eigenbasis, see `precompute`

    Raises MeshError for a mesh that can't be used.
    """
    mesh = load_normalized(source, cache_dir)
    return mesh, precompute(
        mesh,
        k=options.k,
        laplacian=options.laplacian,
        cache_dir=cache_dir,
        basis=options.basis,
        device=device,
        join=options.join,
    )


def fill_cache(
    sources: Sequence[MeshLike],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
    device: torch.device | str = "cpu",
    ready: Callable[[int], Any] = lambda position: None,
) -> dict[int, str]:
    """Store the operators of all these meshes in the cache, at normalized positions, where `prepare` finds them.

    jobs: number of worker processes; by default one for each core
    advance: called once for each mesh, usable or not, when it is done
    device: the device that computes eigenbases. A GPU solves for all meshes that wait for it at once. Rounding depends
        on which meshes these are.
    ready: called with the position of each mesh as soon as the cache has it

    Returns an error message for each mesh that can't be used, by position. These don't hold up the others.

    With several jobs, a script must call this under ``if __name__ == "__main__":``, because worker processes import the
    script; otherwise it raises WorkerError. Raises OSError if the cache folder can't be made.
    """
    decisive = Options(options.k, options.laplacian, options.basis, options.join)
    return many.fill_cache(sources, decisive, cache_dir, jobs, advance, device, ready, normalize=True)


def input_features(mesh: Mesh, operators: Operators, kind: FeatureKind) -> Tensor:
    """The network's input features (V, FEATURE_CHANNELS[kind]), float32.

    kind: "hks" and "wks" are the descriptors, and "xyz" the positions. "log-hks" is log(hks) / 3. On small components
        and tips, the heat kernel is a thousand times larger than elsewhere, and its logarithm is easier to learn from.

    Raises OptionError for an unknown kind, ValueError for descriptors of operators without eigenpairs, and for a mesh
    and operators that differ in the number of vertices.
    """
    if kind not in FEATURE_CHANNELS:
        raise OptionError(f"the kind of features should be one of {', '.join(FEATURE_CHANNELS)}, got {kind!r}")
    if len(mesh.verts) != operators.num_vertices:
        raise ValueError(
            f"the mesh has {len(mesh.verts)} vertices and the operators {operators.num_vertices}; "
            "pass the operators of this mesh"
        )
    if kind == "xyz":
        return torch.from_numpy(mesh.verts).float()
    if kind == "wks":
        return wks(operators, FEATURE_CHANNELS[kind])
    descriptor = hks(operators, FEATURE_CHANNELS[kind])
    return descriptor if kind == "hks" else descriptor.clamp(min=1e-6).log() / 3
