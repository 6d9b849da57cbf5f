"""Preprocessing: operators, eigenbases, and data sets that go through the cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import TypeAlias

import numpy as np
import scipy.sparse
import torch
import trimesh
from numpy.typing import NDArray

from diffnet.benchmarks.harness.registry import Case, Options, Parameter, Run, Unavailable, benchmark
from diffnet.benchmarks.original.preprocessing import original_eigenbasis, original_precompute
from diffnet.data import Preprocessing, fill_cache, load_meanwhile, precompute_all, prepare
from diffnet.geometry import (
    FORMATS,
    LaplacianKind,
    Mesh,
    MeshError,
    MeshLike,
    Operators,
    eigenbases,
    eigenbasis,
    laplacian_and_mass,
    load_mesh,
    make_mesh,
    normalize_positions,
    precompute,
)
from diffnet.geometry.eigen.gpu.batches import BATCHES_AT_ONCE, in_batches, packed_eigenbases
from diffnet.geometry.eigen.gpu.lanczos import packed
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.mesh import mesh_suffix
from diffnet.geometry.processes import WorkerPool, available_cores, stop_workers

Problem: TypeAlias = tuple[scipy.sparse.csr_matrix, NDArray[np.float64]]

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
MESHES = 20  # meshes taken from a folder, or generated for a data set
TORUS = 5_000  # vertices of a mesh of the generated data set
SET = 64  # Laplacians solved at once
SMALL = 400  # small meshes
MAX_ORIGINAL = 150_000  # vertices; beyond, the original's factorization and loop take many minutes


@benchmark("precompute", metrics=("ms", "MB"))
def precompute_cases(options: Options) -> Iterator[Case]:
    """From meshes in memory to operators, on all cores.

    Meshes are processed one after another. Sets are also processed with one mesh per core; that time runs from the
    start of the processes to the end of the last one.
    """
    k = options.k or 128
    for name, meshes in _mesh_sets(options):
        peers: dict[str, Run] = {
            "original": partial(_original, meshes, k),
            "diffnet": partial(_precompute, meshes, k, "robust", options.device),
            "diffnet, cotan": partial(_precompute, meshes, k, "cotan", options.device),
        }
        if len(meshes) > 1:
            peers["original, a mesh a core"] = partial(_original_on_all_cores, meshes, k)
            peers["diffnet, a mesh a core"] = partial(_precompute_all_afresh, meshes, k)
        yield Case(_mesh_parameters(name, meshes, k), peers)


@benchmark("eigenbasis")
def eigenbasis_cases(options: Options) -> Iterator[Case]:
    """The k smallest eigenpairs of a Laplacian in memory."""
    k = options.k or 128
    for name, meshes in _mesh_sets(options):
        problems = [laplacian_and_mass(mesh, "cotan") for mesh in meshes]
        peers: dict[str, Run] = {
            "eigsh": partial(_eigsh, problems, k),
            "block Lanczos": partial(_one_by_one, problems, k, "cpu"),
        }
        if options.device.type == "cuda":
            peers["block Lanczos, GPU"] = partial(_one_by_one, problems, k, options.device)
            peers["block Lanczos, GPU, in its memory"] = _in_gpu_memory(problems, meshes, k, options.device)
        yield Case(_mesh_parameters(name, meshes, k), peers)


@benchmark("eigenbasis-set")
def eigenbasis_set_cases(options: Options) -> Iterator[Case]:
    """The k smallest eigenpairs of each of 64 Laplacians in memory.

    The meshes are tori with the same connectivity and different random offsets of the vertices. Peers that take one
    mesh after another take only the first few meshes, and their times are scaled up as their names say.
    """
    k = options.k or 128
    gpu = options.device.type == "cuda"
    for size in options.vertices or (15_000,):
        meshes = [bumpy_torus(size, seed) for seed in range(SET)]
        problems = [laplacian_and_mass(mesh, "cotan") for mesh in meshes]
        first = problems[: SET // 16]
        peers: dict[str, Run] = {
            "eigsh, 4 meshes × 16": partial(_eigsh, first, k),
            "block Lanczos, 4 meshes × 16": partial(_one_by_one, first, k, "cpu"),
            "block Lanczos, all cores": partial(eigenbases, problems, k),
        }
        if gpu:
            peers["block Lanczos, GPU, 4 meshes × 16"] = partial(_one_by_one, first, k, options.device)
            peers["block Lanczos, GPU, several at once"] = partial(eigenbases, problems, k, options.device)
            peers["block Lanczos, GPU, in its memory"] = _in_gpu_memory(problems, meshes, k, options.device)
        yield Case(
            _mesh_parameters("torus", meshes, k),
            peers,
            times={name: 16 for name in peers if name.endswith("× 16")},
        )


@benchmark("operators")
def operators_cases(options: Options) -> Iterator[Case]:
    """From meshes to operators on the device, in a process whose workers run and whose kernels are compiled.

    The cases are the files of a folder, 400 small meshes in memory, and large meshes one by one. The original's recipe
    takes one mesh after another, only the first few of each case, and its time is scaled up as its name says.
    """
    k, device = options.k or 128, options.device
    with tempfile.TemporaryDirectory() as scratch:
        if options.meshes is not None:
            files = _files(options.meshes)
            load = partial(precompute_all, files, k, normalize=True)
            peers = _on_cores_and_device(load, device)
            from_cache = partial(load, cache_dir=scratch, device=device)
            from_cache()  # fills it
            peers["diffnet, warm cache"] = from_cache
            yield _scaled_case(options.meshes.name, [_connected(load_mesh(file)) for file in files], k, peers)
    rng = np.random.default_rng(0)
    small = [bumpy_torus(int(size), seed) for seed, size in enumerate(rng.integers(250, 751, SMALL))]
    yield _scaled_case("small torus", small, k, _on_cores_and_device(partial(precompute_all, small, k), device))
    for size in options.vertices or (32_000, 200_000, 512_000, 1_000_000):
        mesh = bumpy_torus(size)
        yield _scaled_case("torus", [mesh], k, {"diffnet": partial(_precompute, [mesh], k, "robust", device)})


def _on_cores_and_device(load: Callable[..., list[Operators]], device: torch.device) -> dict[str, Run]:
    peers: dict[str, Run] = {"diffnet, all cores": load}
    if device.type == "cuda":
        peers["diffnet, cores and GPU"] = partial(load, device=device)
    return peers


def _scaled_case(name: str, meshes: Sequence[Mesh], k: int, peers: dict[str, Run]) -> Case:
    """A case of these meshes, with the original's recipe on one of fifty of them, or on the only one."""
    few = max(1, len(meshes) // 50)
    share = len(meshes) / few
    original = "original" if share == 1 else f"original, {few} meshes × {share:.0f}"
    return Case(
        _mesh_parameters(name, meshes, k),
        {original: partial(_original, meshes[:few], k), **peers},
        times={original: share},
    )


@benchmark("data-set", x="meshes")
def data_set_cases(options: Options) -> Iterator[Case]:
    """From mesh files to operators in memory, with an empty cache on all cores, and with a warm cache.

    The original's recipe reads the same files, one after another and on all cores.
    """
    preprocessing = Preprocessing(options.k or 128)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = _files(options.meshes) if options.meshes is not None else _write_tori(folder / "meshes")
        loaded = load_all(files, preprocessing, folder / "warm")
        mean_size = round(sum(operators.num_vertices for operators in loaded) / len(loaded))
        peers: dict[str, Run] = {
            "original": partial(_original, files, preprocessing.k),
            "original, a mesh a core": partial(_original_on_all_cores, files, preprocessing.k),
            "cold cache": partial(_load_all_afresh, files, preprocessing),
        }
        if options.device.type == "cuda":
            peers["cold cache with GPU"] = partial(_load_all_afresh, files, preprocessing, options.device)
        peers["warm cache"] = partial(load_all, files, preprocessing, folder / "warm")
        yield Case({"k": preprocessing.k, "vertices": mean_size, "meshes": len(files)}, peers)


def _load_all_afresh(
    sources: Sequence[MeshLike], preprocessing: Preprocessing, device: torch.device | str = "cpu"
) -> list[Operators]:
    """Load meshes as a fresh program does, with an empty cache and no processes running."""
    _stop_processes()
    with tempfile.TemporaryDirectory() as cache:
        return load_all(sources, preprocessing, Path(cache), device)


def _stop_processes() -> None:
    """Stop worker processes and the server that they are forked from, so that the next run starts as a fresh program.

    The standard library has no public function for this.
    """
    stop_workers()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def load_all(
    sources: Sequence[MeshLike], preprocessing: Preprocessing, cache: Path, device: torch.device | str = "cpu"
) -> list[Operators]:
    """Load operators while the cache is filled, as the training loop does. Raises ValueError for an unusable mesh."""
    failed, loaded = load_meanwhile(
        lambda i: prepare(sources[i], preprocessing, cache),
        lambda ready: fill_cache(sources, preprocessing, cache, device=device, ready=ready),
    )
    if failed:
        raise MeshError(f"{len(failed)} of {len(sources)} meshes can't be used: {next(iter(failed.values()))}")
    return [loaded[i].result()[1] for i in range(len(sources))]


def _mesh_sets(options: Options) -> Iterator[tuple[str, list[Mesh]]]:
    """Named sets of meshes at unit size.

    With a folder of meshes: some of its meshes, then four of these subdivided. Without a folder: tori of all sizes.
    """
    if options.meshes is None:
        for size in options.vertices or SIZES:
            yield "torus", [bumpy_torus(size)]
        return
    files = _files(options.meshes)
    chosen = [_connected(load_mesh(file)) for file in files[:: max(1, len(files) // MESHES)][:MESHES]]
    yield options.meshes.name, chosen
    yield f"{options.meshes.name}, subdivided", [_subdivided(mesh) for mesh in chosen[:4]]


def _files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if mesh_suffix(path) in FORMATS)
    if not files:
        raise OptionError(f"{folder}: no meshes ({', '.join(FORMATS)}, also with .gz) in this folder")
    return files


def bumpy_torus(vertices: int, seed: int = 0) -> Mesh:
    """A torus with bumps and random offsets, with about `vertices` vertices."""
    rng = np.random.default_rng(seed)
    minor = max(3, round(np.sqrt(vertices / 3)))
    major = max(3, round(vertices / minor))
    i, j = np.meshgrid(np.arange(major), np.arange(minor), indexing="ij")
    u = 2 * np.pi * (i + rng.uniform(-0.3, 0.3, i.shape)) / major
    v = 2 * np.pi * (j + rng.uniform(-0.3, 0.3, i.shape)) / minor
    tube = 0.33 * (1 + 0.2 * np.sin(5 * u) * np.sin(3 * v))
    ring = 1 + tube * np.cos(v)
    verts = np.stack([ring * np.cos(u), ring * np.sin(u), tube * np.sin(v)], axis=-1).reshape(-1, 3)
    corners = [((i + a) % major * minor + (j + b) % minor).ravel() for a, b in ((0, 0), (1, 0), (1, 1), (0, 1))]
    faces = np.concatenate([np.stack([corners[c] for c in triangle], axis=1) for triangle in ((0, 1, 2), (0, 2, 3))])
    return make_mesh(normalize_positions(verts), faces, name=f"torus of {len(verts)} vertices")


def _write_tori(folder: Path) -> list[Path]:
    folder.mkdir()
    files = []
    for seed in range(MESHES):
        mesh = bumpy_torus(TORUS, seed)
        files.append(folder / f"{seed}.off")
        trimesh.Trimesh(mesh.verts, mesh.faces, process=False).export(files[-1])
    return files


def _connected(mesh: Mesh) -> Mesh:
    """The mesh at unit size without unreferenced vertices, which the original's recipe can't handle."""
    used, faces = np.unique(mesh.faces, return_inverse=True)
    return make_mesh(normalize_positions(mesh.verts[used]), faces.reshape(-1, 3), name=mesh.name)


def _subdivided(mesh: Mesh) -> Mesh:
    verts, faces = trimesh.remesh.subdivide(mesh.verts, mesh.faces)  # type: ignore[no-untyped-call]
    return make_mesh(verts, faces, name=f"{mesh.name}, subdivided")


def _mesh_parameters(name: str, meshes: Sequence[Mesh], k: int) -> dict[str, Parameter]:
    mean_size = round(float(np.mean([len(mesh.verts) for mesh in meshes])))
    return {"mesh": name, "meshes": len(meshes), "k": k, "vertices": mean_size}


def _precompute(meshes: Sequence[Mesh], k: int, laplacian: LaplacianKind, device: torch.device) -> list[Operators]:
    return [precompute(mesh, k=k, laplacian=laplacian, device=device) for mesh in meshes]


def _precompute_all_afresh(meshes: Sequence[Mesh], k: int) -> list[Operators]:
    _stop_processes()
    return precompute_all(meshes, k)


def _original(sources: Sequence[MeshLike], k: int) -> list[object]:
    return [_by_original_recipe(source, k) for source in sources]


def _original_on_all_cores(sources: Sequence[MeshLike], k: int) -> list[object]:
    _stop_processes()
    jobs = min(available_cores(), len(sources))
    with WorkerPool(jobs, 1) as pool:
        running = [pool.submit(_by_original_recipe, source, k) for source in sources]
        return [future.result() for future in running]


def _by_original_recipe(source: MeshLike, k: int) -> object:
    mesh = _connected(load_mesh(source))
    _refuse_large([len(mesh.verts)])
    return original_precompute(mesh.verts, mesh.faces, k)


def _one_by_one(problems: Sequence[Problem], k: int, device: torch.device | str) -> list[object]:
    return [eigenbasis(laplacian, mass, k, device) for laplacian, mass in problems]


def _in_gpu_memory(problems: Sequence[Problem], meshes: Sequence[Mesh], k: int, device: torch.device) -> Run:
    """Solves as `precompute_all` does: from and to GPU memory, with the positions of the vertices, in two batches."""
    batches = []
    for part in np.array_split(np.arange(len(problems)), min(len(problems), BATCHES_AT_ONCE)):
        positions = torch.from_numpy(np.concatenate([meshes[i].verts for i in part])).to(device)
        batches.append(packed([problems[i] for i in part], device)._replace(positions=positions))
    return partial(
        in_batches, lambda batch, on_cores: packed_eigenbases(batch, k, on_cores), batches, device, available_cores()
    )


def _eigsh(problems: Sequence[Problem], k: int) -> list[object]:
    _refuse_large([len(mass) for _, mass in problems])
    return [original_eigenbasis(laplacian, mass, k) for laplacian, mass in problems]


def _refuse_large(sizes: Sequence[int]) -> None:
    if max(sizes) > MAX_ORIGINAL:
        raise Unavailable(f"takes many minutes beyond {MAX_ORIGINAL} vertices")
