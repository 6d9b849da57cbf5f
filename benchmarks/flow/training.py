"""Training of the networks on the flow set, for equal times, and their scores on unseen bodies."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet import GraphedStep, Operators, collate, load_mesh, precompute_all
from diffnet.benchmarks.flow.cases import TABLE, area_vectors, forces, stream_of
from diffnet.benchmarks.flow.networks import SurfaceNetwork
from diffnet.benchmarks.harness.results import Row, read_csv
from diffnet.geometry import Mesh, PerMesh, load_attributes, mirrored, rotated, spread

WAIT = 20  # steps after which the clock waits for the device
WARM_UP = 0.05  # the part of the time in which the learning rate rises


class Case(NamedTuple):
    """A case, or several in a batch, as tensors.

    features: (V, 6), positions in m and normals
    conditions: (B, 2), standardized speed and angle
    pressure, areas: (F, 1) in Pa, and (F, 3) in m², normals times areas
    velocity: (V, 3) in m/s
    face_weights, vertex_weights: (F, 1) and (V, 1), areas over the integral of the squares of the field of the case
    table: (B, 3), angle, drag and lift; the lift is that before a case was turned
    """

    features: Tensor
    operators: Operators
    conditions: Tensor
    pressure: Tensor
    areas: Tensor
    velocity: Tensor
    face_weights: Tensor
    vertex_weights: Tensor
    table: Tensor


def load_cases(data: Path, k: int, device: torch.device) -> tuple[list[Case], list[Case]]:
    """The cases for training and for the test. Operators stay in the folder `cache` of the set."""
    rows = read_csv(data / TABLE)
    meshes = [load_mesh(data / row["file"]) for row in rows]
    operators = precompute_all(meshes, k, cache_dir=data / "cache", device=device)
    conditions = np.array([[float(row["speed"]), float(row["angle"])] for row in rows])
    of_training = conditions[[row["split"] == "train" for row in rows]]
    conditions = (conditions - of_training.mean(0)) / of_training.std(0)
    parts: dict[str, list[Case]] = {"train": [], "test": []}
    for row, *content in zip(rows, meshes, operators, conditions, strict=True):
        parts[row["split"]].append(_case(row, *content))
    return parts["train"], parts["test"]


def _case(row: dict[str, str], mesh: Mesh, operators: Operators, conditions: NDArray[np.float64]) -> Case:
    def tensor(x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=torch.float32, device=operators.device)

    arrays = load_attributes(str(mesh.path))
    pressure, areas = tensor(arrays.faces["pressure"])[:, None], tensor(area_vectors(mesh.verts, mesh.faces))
    velocity = torch.stack([tensor(arrays.vertices[f"velocity_{axis}"]) for axis in "xyz"], 1)
    face_weights, vertex_weights = (
        area / (area * field**2).sum()
        for area, field in ((areas.norm(dim=1, keepdim=True), pressure), (operators.mass[:, None], velocity))
    )
    return Case(
        torch.cat([tensor(mesh.verts), operators.normals], 1),
        operators,
        PerMesh(tensor(conditions)),  # type: ignore[arg-type]  # `collate` makes a tensor of it
        pressure,
        areas,
        velocity,
        face_weights,
        vertex_weights,
        PerMesh(tensor([float(row[name]) for name in ("angle", "drag", "lift")])),  # type: ignore[arg-type]
    )


def turned(case: Case, rng: np.random.Generator) -> Case:
    """A case, rotated about its stream by a random angle and perhaps mirrored before. The flow turns with the body."""
    operators, mirror = case.operators, rng.integers(2)
    angle = case.table.value[0].item()  # type: ignore[attr-defined]  # not packed yet
    turn = Rotation.from_rotvec(rng.uniform(0, 2 * np.pi) * stream_of(1.0, angle)).as_matrix()
    rotation = torch.from_numpy(turn.T).to(case.velocity)  # multiplies rows from the right
    if mirror:
        operators = mirrored(operators, axis=1)
    operators = rotated(operators, rotation[None])
    if mirror:
        rotation = torch.diag(rotation.new_tensor([1, -1, 1])) @ rotation
    return case._replace(
        features=(case.features.unflatten(1, (2, 3)) @ rotation).flatten(1),
        operators=operators,
        areas=case.areas @ rotation,
        velocity=case.velocity @ rotation,
    )


def packed(cases: Sequence[Case], size: int) -> list[Case]:
    """Batches of so many cases, in the order of the set."""
    return [collate(cases[i : i + size]) for i in range(0, len(cases), size)]


def inputs(network: nn.Module, case: Case) -> tuple[Tensor, Operators, list[Tensor]]:
    """Features, operators and further arguments. A network without conditions gets them as constant features."""
    if isinstance(network, SurfaceNetwork) and network.trunk.condition_channels:
        return case.features, case.operators, [case.conditions]
    return torch.cat([case.features, spread(case.conditions, case.operators)], 1), case.operators, []


def field_scales(batches: Sequence[Case]) -> Tensor:
    """The root mean squares (4,) of the pressure and of the velocity, by which outputs are multiplied."""
    pressure = torch.cat([batch.pressure for batch in batches]).square().mean().sqrt()
    velocity = torch.cat([batch.velocity for batch in batches]).square().mean().sqrt()
    return torch.stack([pressure, *[velocity] * 3])


def errors(outputs: Tensor, case: Case, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pressure (F, 1) of outputs (V, 4), and squared errors of pressure (F, 1) and velocity (V, 1).

    The sums of the errors of a case are the squares of its relative L2 errors.
    """
    values = outputs.float() * scales
    pressure = F.embedding(case.operators.faces, values[:, :1]).mean(1)
    of_velocity = (values[:, 1:] - case.velocity).square().sum(1, keepdim=True)
    return pressure, case.face_weights * (pressure - case.pressure).square(), case.vertex_weights * of_velocity


def loss(outputs: Tensor, case: Case, scales: Tensor) -> Tensor:
    """The mean over cases of the squared relative L2 errors of pressure and velocity, added."""
    _, of_pressure, of_velocity = errors(outputs, case, scales)
    return (of_pressure.sum() + of_velocity.sum()) / len(case.table)


def train(
    network: nn.Module,
    batches: Sequence[Case],
    scales: Tensor,
    seconds: float,
    rate: float,
    autocast: AbstractContextManager[Any],
) -> Row:
    """Train for a time. Returns the number of steps and the mean loss of the last ones.

    The first pass over the batches doesn't count, because kernels are compiled and graphs are recorded in it.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=1e-4)
    step = GraphedStep(network, optimizer, partial(loss, scales=scales), clip=1.0)
    step.graphs = isinstance(network, SurfaceNetwork)
    arguments = [(*inputs(network, case)[:2], case, *inputs(network, case)[2]) for case in batches]
    begin, losses = math.inf, deque[Tensor](maxlen=len(batches))
    for number, i in enumerate(_shuffled(len(batches))):
        if losses and (number % WAIT == 0 or number == len(batches)):
            losses[-1].item()  # the device may be behind
        if number == len(batches):
            begin = time.perf_counter()
        share = max((time.perf_counter() - begin) / seconds, 0.0)
        if share >= 1:
            break
        optimizer.param_groups[0]["lr"] = rate * learning_rate(share)
        with autocast:
            losses.append(step(*arguments[i]))
    return {"steps": number, "train_loss": float(f"{torch.stack([*losses]).mean().item():.4g}")}


def _shuffled(count: int) -> Iterator[int]:
    """Random permutations of so many numbers, one after another, without an end."""
    while True:
        yield from torch.randperm(count).tolist()


def learning_rate(share: float) -> float:
    """Relative to the highest one: a rise and half of a cosine. share: of the training time"""
    return min((share + 0.01) / WARM_UP, 1.0) * (1 + math.cos(math.pi * min(share, 1.0))) / 2


@torch.no_grad()
def scores(network: nn.Module, batches: Sequence[Case], scales: Tensor, autocast: AbstractContextManager[Any]) -> Row:
    """Relative L2 errors of pressure and velocity, means over cases, and R² of drag and lift of the pressure."""
    network.eval()
    relative, true, predicted = [], [], []
    for case in batches:
        features, operators, further = inputs(network, case)
        with autocast:
            outputs = network(features, operators, *further)
        pressure, *squares = errors(outputs, case, scales)
        parts = zip(*map(operators.unpack, squares, ("faces", "vertices")), strict=True)
        relative += [[part.sum().sqrt().item() for part in pair] for pair in parts]
        faces = zip(operators.unpack(pressure, "faces"), operators.unpack(case.areas, "faces"), strict=True)
        for (p, areas), (angle, *known) in zip(faces, case.table.tolist(), strict=True):
            predicted.append(forces(p[:, 0].double().cpu().numpy(), areas.double().cpu().numpy(), angle))
            true.append(known)
    known, found = np.array(true), np.array(predicted)
    r2 = 1 - ((known - found) ** 2).sum(0) / ((known - known.mean(0)) ** 2).sum(0)
    means = np.mean(relative, 0)
    names = ("pressure_relative_l2", "velocity_relative_l2", "drag_r2", "lift_r2")
    return {name: round(float(value), 4) for name, value in zip(names, (*means, *r2), strict=True)}
