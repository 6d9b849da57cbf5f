"""Training of the networks on the flow set, for equal times, and their scores on unseen bodies."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet import GraphedStep, Operators, collate, load_mesh, precompute_all
from diffnet.benchmarks.flow.cases import DENSITY, FIELDS, SPEEDS, TABLE, forces, stream_of
from diffnet.benchmarks.flow.networks import SurfaceNetwork
from diffnet.benchmarks.flow.panels import Floats, area_vectors
from diffnet.benchmarks.harness.results import Row, read_csv
from diffnet.geometry import Mesh, load_attributes, rotated, spread

SPEED = sum(SPEEDS) / 2  # the units of outputs: of the velocity in m/s, and of the pressure in Pa
PRESSURE = DENSITY / 2 * SPEED**2
WAIT = 20  # steps after which the clock waits for the device
WARM_UP = 0.05  # the part of the time in which the learning rate rises


class Case(NamedTuple):
    """A case, or a batch of B, as tensors. One case has no dimension B.

    features: (V, 6), positions in m and normals
    conditions: (B, 2), standardized speed and angle
    pressure, areas: (F, 1) in units of PRESSURE, and (F, 3) in m², normals times areas
    velocity: (V, 3) in units of SPEED
    face_weights, vertex_weights: (F, 1) and (V, 1), areas over the integral of the squares of the field of the case
    table: (B, 3), angle, drag and lift; the lift is that before a rotation
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


def _case(row: dict[str, str], mesh: Mesh, operators: Operators, conditions: Floats) -> Case:
    def tensor(x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=torch.float32, device=operators.device)

    arrays = load_attributes(str(mesh.path))
    pressure, areas = tensor(arrays.faces[FIELDS[0]])[:, None] / PRESSURE, tensor(area_vectors(mesh.verts, mesh.faces))
    velocity = torch.stack([tensor(arrays.vertices[name]) for name in FIELDS[1:]], 1) / SPEED
    size, mass = areas.norm(dim=1, keepdim=True), operators.mass[:, None]
    of_faces, of_vertices = size / (size * pressure**2).sum(), mass / (mass * velocity**2).sum()
    features = torch.cat([tensor(mesh.verts), operators.normals], 1)
    table = tensor([float(row[name]) for name in ("angle", "drag", "lift")])
    return Case(features, operators, tensor(conditions), pressure, areas, velocity, of_faces, of_vertices, table)


def rotate_about_stream(case: Case, angle: float) -> Case:
    """One case, rotated about its stream by an angle in radians. The flow turns with the body."""
    rotation = Rotation.from_rotvec(angle * stream_of(1.0, float(case.table[0]))).as_matrix()
    matrix = torch.from_numpy(rotation.T).to(case.velocity)  # multiplies rows from the right
    return case._replace(
        features=(case.features.view(-1, 2, 3) @ matrix).flatten(1),
        operators=rotated(case.operators, matrix[None]),
        areas=case.areas @ matrix,
        velocity=case.velocity @ matrix,
    )


def make_batches(cases: Sequence[Case], size: int) -> list[Case]:
    """Batches of so many cases, in their order."""
    return [collate(cases[i : i + size]) for i in range(0, len(cases), size)]


def inputs(network: nn.Module, case: Case) -> tuple[Tensor, Operators, list[Tensor]]:
    """Features, operators and further arguments. A network without conditions gets them as constant features."""
    if isinstance(network, SurfaceNetwork) and network.trunk.condition_channels:
        return case.features, case.operators, [case.conditions]
    return torch.cat([case.features, spread(case.conditions, case.operators)], 1), case.operators, []


def errors(outputs: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The pressure (F, 1) of outputs (V, 4), and the squares () of the relative L2 errors, added over the batch."""
    pressure = F.embedding(case.operators.faces, outputs[:, :1].float()).mean(1)
    of_velocity = case.vertex_weights * (outputs[:, 1:].float() - case.velocity).square()
    return pressure, (case.face_weights * (pressure - case.pressure).square()).sum(), of_velocity.sum()


def loss(outputs: Tensor, case: Case) -> Tensor:
    """The mean over cases of the squared relative L2 errors of pressure and velocity, added."""
    _, of_pressure, of_velocity = errors(outputs, case)
    return (of_pressure + of_velocity) / len(case.table)


def train(network: nn.Module, batches: Sequence[Case], seconds: float, rate: float, cast: torch.autocast) -> Row:
    """Train for a time. Returns the number of steps and the mean loss of the last ones.

    The first pass over the batches doesn't count, because kernels are compiled and graphs are recorded in it.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=1e-4, fused=batches[0].areas.is_cuda)
    step = GraphedStep(network, optimizer, loss, clip=1.0)
    step.graphs = isinstance(network, SurfaceNetwork)
    step.reserve([case.operators for case in batches], batch_meshes=1)  # each batch comes as it is
    arguments = [(x, operators, case, *more) for case in batches for x, operators, more in [inputs(network, case)]]
    begin, losses = math.inf, deque[Tensor](maxlen=len(batches))
    orders = (torch.randperm(len(batches)).tolist() for _ in itertools.count())
    for number, i in enumerate(itertools.chain.from_iterable(orders)):
        if losses and (number % WAIT == 0 or number == len(batches)):
            losses[-1].item()  # the device may be behind
        if number == len(batches):
            begin = time.perf_counter()
        share = max((time.perf_counter() - begin) / seconds, 0.0)
        if share >= 1:
            break
        rise = min((share + 0.01) / WARM_UP, 1.0)
        optimizer.param_groups[0]["lr"] = rate * rise * (1 + math.cos(math.pi * share)) / 2
        with cast:
            losses.append(step(*arguments[i]))
    return {"steps": number, "train_loss": float(f"{torch.stack([*losses]).mean().item():.4g}")}


@torch.no_grad()
def scores(network: nn.Module, cases: Sequence[Case], cast: torch.autocast) -> Row:
    """Means of the relative L2 errors of pressure and velocity, and R² of drag and lift by the predicted pressure."""
    network.eval()
    relative, predictions = [], []
    for case in cases:
        features, operators, further = inputs(network, case)
        with cast:
            outputs = network(features, operators, *further)
        pressure, *squares = errors(outputs, case)
        relative.append([square.sqrt().item() for square in squares])
        values, areas = (x.double().cpu().numpy() for x in (PRESSURE * pressure[:, 0], case.areas))
        predictions.append(forces(values, areas, float(case.table[0, 0])))
    true = torch.cat([case.table for case in cases]).cpu().numpy()[:, 1:]
    r2 = 1 - ((true - predictions) ** 2).sum(0) / ((true - true.mean(0)) ** 2).sum(0)
    names = ("pressure_relative_l2", "velocity_relative_l2", "drag_r2", "lift_r2")
    return {name: round(float(value), 4) for name, value in zip(names, (*np.mean(relative, 0), *r2), strict=True)}
