"""Match two meshes with a trained network."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.checkpoints.files import CheckpointError
from diffnet.data import PairSample, Sample, collate_pairs
from diffnet.data.arrays import counted_vertices
from diffnet.data.pairs.shapes import check_whole
from diffnet.geometry import Mesh, MeshError, MeshLike, Operators, load_mesh
from diffnet.geometry.errors import OptionError
from diffnet.train.correspondence.maps import point_map_of, unsupervised_loss
from diffnet.train.correspondence.partial import matches_inside
from diffnet.train.correspondence.targets import unknown_map
from diffnet.train.device import autocast
from diffnet.train.fine_tuning import load_any_network
from diffnet.train.inference.network_input import network_input
from diffnet.train.inference.predict import input_sample
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import is_tilted, warn_of_tilted
from diffnet.train.steps.step import make_optimizer
from diffnet.train.tasks.correspondence import TASK as CORRESPONDENCE
from diffnet.train.tasks.task import MetadataError

FINE_TUNING_RATE = 1e-4


@dataclass(frozen=True)
class Matched:
    """Two matched meshes, at their original positions.

    matches: (V_b,) int64, a vertex of a for each vertex of b, from 0, or −1 for a vertex of b that no face uses, or
        outside of the predicted overlap of partial shapes
    functional_map: (K, K) float32 on the CPU, from functions on a to functions on b, before any refinement. None from
        networks for partial shapes.
    operators: those of a and b on the CPU, whose first K eigenpairs are the bases of the functional map
    overlap: (V_a,) and (V_b,) float32, the probability that a vertex is on the other shape, too. None from networks for
        whole shapes.
    """

    a: Mesh
    b: Mesh
    matches: NDArray[np.int64]
    functional_map: Tensor | None
    operators: tuple[Operators, Operators]
    overlap: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None

    def __repr__(self) -> str:
        size = "None" if self.functional_map is None else str(tuple(self.functional_map.shape))
        return f"Matched(a={self.a}, b={self.b}, matches={self.matches.shape}, functional_map={size})"


def load_matching_network(path: str | os.PathLike[str]) -> DiffusionNet:
    """The network in a checkpoint of `diffnet train correspondence`, or in a published one of correspondence.

    Raises CheckpointError for any other file.
    """
    network = load_any_network(path)
    task = network.metadata.get("task", network.metadata.get("kind", "an unknown task"))
    if task != CORRESPONDENCE.name:
        raise CheckpointError(
            f"{path}: the network is for {'segmentation' if task == 'original' else task}; expected one of "
            "`diffnet train correspondence`, or a published one of correspondence"
        )
    return network


def match_meshes(
    a: MeshLike,
    b: MeshLike,
    network: DiffusionNet,
    device: torch.device | str = "cpu",
    *,
    zoomout: bool = False,
    fine_tune: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    after_step: Callable[[], Any] = lambda: None,
) -> Matched:
    """Find a vertex of a for each vertex of b.

    a, b: meshes of any numbers of vertices
    network: one of `load_matching_network`, whose metadata say what it takes as input. It stays as it is.
    device: where to compute
    zoomout: refine the functional map, see `point_map_of`
    fine_tune: steps on these two meshes with the unsupervised losses, and the limit of gradients of the training. The
        features of the supervised method aren't made for soft maps, so its networks are tuned without the coupling
        term.
    cache_dir: a folder that keeps operators, see `precompute`
    after_step: called after each of these steps

    Maps of more eigenpairs than a mesh has vertices use fewer. A network for partial shapes matches the overlap alone.

    Raises MeshError for a mesh that can't be used, for a point cloud, and, if the network isn't one for partial shapes,
    for a whole and a partial shape. Raises MetadataError for a network of another task or without what is needed, and
    OptionError for `zoomout` or `fine_tune` with a network for partial shapes.
    """
    expected, device = network_input(network), torch.device(device)
    if expected.options.task != CORRESPONDENCE.name:
        raise MetadataError(f"the network is for {expected.options.task}; matching needs one for correspondence")
    first, second = load_mesh(a, cache_dir), load_mesh(b, cache_dir)
    for mesh in (first, second):
        if mesh.is_point_cloud:
            raise MeshError(f"{mesh.name}: a point cloud has no faces; matching needs triangle meshes")
    if not expected.options.partial:
        check_whole([(first, second)])
    elif zoomout or fine_tune:
        raise OptionError("zoomout and fine_tune are for whole shapes, and the network is for partial ones")
    names = "the first mesh", "the second mesh"
    upright = expected.options.upright
    warn_of_tilted([name for name, mesh in zip(names, (first, second), strict=True) if is_tilted(mesh, upright)])
    one, other = (input_sample(mesh, expected, cache_dir, device=device).to(device) for mesh in (first, second))
    most = min(one.operators.k, len(first.verts), len(second.verts))
    options = replace(expected.options, map_k=min(expected.options.map_k, most))
    pair, reverse = (
        collate_pairs([PairSample(*sides, lambda: unknown_map(1))]) for sides in ((one, other), (other, one))
    )
    network = copy.deepcopy(network).to(device).eval()
    if fine_tune > 0:
        _fine_tune(network, pair, reverse, options, fine_tune, after_step)
    c = overlap = None
    with torch.no_grad():
        outputs = _outputs(network, pair, options)
    if options.partial:
        nearest, inside = matches_inside(outputs[len(first.verts) :])
        matches = np.where(inside, nearest, -1)
        of_first, of_second = torch.split(outputs[:, 1].sigmoid().cpu(), [len(first.verts), len(second.verts)])
        overlap = of_first.numpy(), of_second.numpy()
    else:
        c = outputs[:, 0]
        matches = point_map_of(c, one.operators, other.operators, zoomout).cpu().numpy()
    matches[~counted_vertices(second, options.features, options.preprocessing.normalize)] = -1
    operators = one.operators.to("cpu"), other.operators.to("cpu")
    return Matched(first, second, matches, None if c is None else c[0].float().cpu(), operators, overlap)


def _outputs(network: DiffusionNet, pair: Sample, options: TrainOptions) -> Tensor:
    """See `Correspondence.from_network`."""
    with autocast(options.precision, pair.features.device):
        features: Tensor = network(pair.features, pair.operators)
    return CORRESPONDENCE.from_network(features, pair.operators, options)


def _fine_tune(
    network: DiffusionNet,
    pair: Sample,
    reverse: Sample,
    options: TrainOptions,
    steps: int,
    after_step: Callable[[], Any],
) -> None:
    """Train on one pair. Dropout is off, so that the steps are no different from the match that follows."""
    options = replace(options, learning_rate=FINE_TUNING_RATE)
    optimizer = make_optimizer(network, options, pair.features.device)
    for _ in range(steps):
        optimizer.zero_grad()
        maps = _outputs(network, pair, options)
        if options.method == "supervised":
            maps = torch.cat([maps, _outputs(network, reverse, options)], 1)
        unsupervised_loss(maps, options.weight_of).backward()  # type: ignore[no-untyped-call]
        if options.clip > 0:
            torch.nn.utils.clip_grad_norm_(network.parameters(), options.clip)
        optimizer.step()
        after_step()
