"""Cases of flow: a random body, its conditions, and the computed pressure, velocity and forces.

The velocity is that of the potential flow. In a potential flow, no closed body has a drag. So the pressure has a simple
model of separation: on faces that look downstream, it doesn't recover beyond the base pressure. Drag and lift are the
forces of this pressure along the stream and across it. They count for the body, all components together.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from diffnet.benchmarks.flow.bodies import random_body
from diffnet.benchmarks.flow.panels import Floats, area_vectors, surface_velocity
from diffnet.benchmarks.harness.results import Row, write_csv
from diffnet.geometry import Mesh, make_mesh, tangent_frames
from diffnet.geometry.elements.elements import face_areas
from diffnet.geometry.mesh.polygons import sums_at_vertices
from diffnet.viz import write_ply

DENSITY = 1.2  # of air, in kg/m³
BASE = -0.3  # the pressure coefficient at the base of blunt bodies, about that of a sphere
SPEEDS = 20.0, 40.0  # in m/s
ANGLES = -20.0, 20.0  # of attack, in degrees
TABLE = "cases.csv"
FIELDS = "pressure", "velocity_x", "velocity_y", "velocity_z"  # in the files: at faces, and the others at vertices


def stream_of(speed: float, angle: float) -> Floats:
    """The velocity (3,) far away: along x at an angle of attack of 0, and upward, to z, at a positive one."""
    return speed * np.array([np.cos(np.radians(angle)), 0, np.sin(np.radians(angle))])


def surface_pressure(velocity: Floats, normals: Floats, stream: Floats) -> Floats:
    """The pressure (F,) in Pa over that far away, of velocities and normals (F, 3)."""
    coefficient = 1 - (velocity**2).sum(1) / (stream @ stream)
    return DENSITY / 2 * (stream @ stream) * np.where(normals @ stream > 0, np.minimum(coefficient, BASE), coefficient)


def forces(pressure: Floats, areas: Floats, angle: float) -> tuple[float, float]:
    """Drag and lift in N. areas: (F, 3), the normals times the areas of the faces"""
    force, along = -pressure @ areas, stream_of(1.0, angle)
    return float(force @ along), float(force @ (-along[2], 0, along[0]))


def at_vertices(mesh: Mesh, velocity: Floats) -> Floats:
    """Velocities (F, 3) averaged over the faces around each vertex, as tangent vectors (V, 3)."""
    areas, normals = face_areas(mesh), tangent_frames(mesh)[:, 2]
    *columns, total = (sums_at_vertices(areas * x, mesh.faces, len(normals)) for x in (*velocity.T, 1))
    means = np.stack(columns, 1) / total[:, None]
    return means - (means * normals).sum(1)[:, None] * normals


def make_case(out: Path, vertices: tuple[int, int], seed: int, split: str, number: int) -> Row:
    """Write a case to a file with its FIELDS. Returns its row of the table.

    Every case has a random stream of its own, so a larger set begins with the same cases.
    """
    rng = np.random.default_rng(zlib.crc32(f"{seed} flow {split} {number}".encode()))
    verts, faces = random_body(rng, vertices)
    mesh = make_mesh(verts, faces)
    speed, angle = rng.uniform(*SPEEDS), rng.uniform(*ANGLES)
    stream, areas = stream_of(speed, angle), area_vectors(verts, faces)
    with threadpool_limits(1):
        velocity = surface_velocity(verts, faces, stream)
    pressure = surface_pressure(velocity, areas, stream)
    fields = dict(zip(FIELDS, (pressure, *at_vertices(mesh, velocity).T), strict=True))
    name = f"meshes/{split}_{number:04d}.ply"
    write_ply(out / name, mesh, scalars={field: values.astype(np.float32) for field, values in fields.items()})
    drag, lift = forces(pressure, areas, angle)
    return {"file": name, "speed": speed, "angle": angle, "drag": drag, "lift": lift, "split": split}


def make_cases(out: Path, train: int, test: int, vertices: tuple[int, int], seed: int, jobs: int) -> None:
    """Write a set to a folder, as `diffnet train regression --data cases.csv` reads it."""
    (out / "meshes").mkdir(parents=True, exist_ok=True)
    splits, numbers = ["train"] * train + ["test"] * test, [*range(train), *range(test)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        write_csv(out / TABLE, [*pool.map(partial(make_case, out, vertices, seed), splits, numbers)])
