"""Samples that are read when they are needed: from the cache and from shards."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import trimesh

from diffnet.benchmarks.cases.preprocessing import bumpy_torus
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.data import MeshSamples, Preprocessing, index_dataset, load_shards, write_shards
from diffnet.geometry.options import BasisPrecision

MESHES = 20  # generated meshes
PRECISIONS: tuple[BasisPrecision, ...] = ("float32", "float16")


@benchmark("read-samples")
def read_samples_cases(options: Options) -> Iterator[Case]:
    """Time of a core to read a sample from files in the page cache, with every byte of the eigenvectors.

    The first pass computes checksums. `pass_ms` is for later ones. With `--data`, the set is that of a folder.
    """
    for basis in PRECISIONS:
        chosen = Preprocessing(options.k or 128, features="xyz", basis=basis)
        with tempfile.TemporaryDirectory() as scratch:
            cache, folder = Path(scratch, "cache"), Path(scratch, "shards")
            root = options.data or _write_tori(Path(scratch, "set"), (options.vertices or (15_000,))[0])
            files = index_dataset(root, cache)
            write_shards(files, folder, chosen, cache)
            shards = load_shards(folder)
            from_cache = [MeshSamples(part, chosen, cache) for part in (files.train, files.test)]
            _read(from_cache)  # fills it
            sizes = np.concatenate([files.train.vertex_counts, files.test.vertex_counts])
            size = sum(file.stat().st_size for file in folder.glob("*.shard.zip")) / sizes.sum()
            from_shards = [MeshSamples(part, chosen) for part in (shards.train, shards.test)]
            yield Case(
                {"basis": basis, "k": chosen.k, "vertices": round(float(sizes.mean())), "meshes": len(sizes)},
                {"cache": partial(_passes, from_cache, size), "shards": partial(_passes, from_shards, size)},
                details=("first_ms", "pass_ms", "shard_bytes_per_vertex"),
            )


def _passes(parts: Sequence[MeshSamples], size: float) -> dict[str, float]:
    first, *later = (_read(parts) for _ in range(4))
    return {"first_ms": first, "pass_ms": min(later), "shard_bytes_per_vertex": size}


def _read(parts: Sequence[MeshSamples]) -> float:
    """Milliseconds of a core for each sample."""
    started = time.process_time()
    for samples in parts:
        for i in range(len(samples)):
            samples[i].operators.evecs.sum()
    return 1e3 * (time.process_time() - started) / sum(map(len, parts))


def _write_tori(folder: Path, size: int) -> Path:
    folder.mkdir()
    for seed in range(MESHES):
        mesh = bumpy_torus(size, seed)
        trimesh.Trimesh(mesh.verts, mesh.faces, process=False).export(folder / f"{seed}.off")
        np.save(folder / f"{seed}.npy", (mesh.verts[:, 0] > 0).astype(np.int64))
    return folder
