"""Many meshes: `precompute_all`, `fill_cache`, a thread that solves on a GPU, and the pool of worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from operator_checks import assert_same
from polygon_files import written
from refusals import refused
from shapes import ellipsoid, soup

from diffnet.data import Preprocessing, fill_cache
from diffnet.geometry import Mesh, MeshError, file_state, load_mesh, make_mesh, precompute, precompute_all, processes
from diffnet.geometry.discretize import gradient
from diffnet.geometry.errors import WorkerError
from diffnet.geometry.mesh import mesh
from diffnet.geometry.options import Options
from diffnet.geometry.preprocessing import group, many, one as one_mesh, worker
from diffnet.geometry.preprocessing.many import in_blocks
from diffnet.geometry.preprocessing.worker import CacheJob, GpuMesh, operators_path
from diffnet.geometry.processes import WorkerPool, WorkerTraceback, stop_workers, take_phases
from diffnet.geometry.store import entry, reading
from diffnet.geometry.store.cache import read_entry
from diffnet.geometry.store.codec import GPU_ALIGNMENT
from diffnet.geometry.store.reading import PinnedEntries, has_even_rows
from diffnet.geometry.store.transfer import TensorsAt
from diffnet.ops.sparse import pattern

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS, PREPROCESSING = Options(8), Preprocessing(8)


def operator_entries(folder: Path) -> list[Path]:
    return list(folder.rglob("*.operators.*"))


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code as a script in another process."""
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "script.py"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=folder)


class Deadly(str):
    """A path. The process that unpickles it dies."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_given_positions(tmp_path: Path, device: str) -> None:
    """They are taken when a process can start on them, and nothing else is computed."""
    sources = [*(ellipsoid(i) for i in range(5)), tmp_path / "missing.off"]
    taken, seen, ready = [], [], []
    positions = (taken.append(i) or i for i in (4, 5, 1))
    more = {"positions": positions, "ready": lambda i: ready.append((i, len(taken)))}
    failed = fill_cache(sources, PREPROCESSING, tmp_path, 1, lambda: seen.append(1), device, **more)
    assert list(failed) == [5]
    assert "missing.off: no such file" in failed[5]
    assert ready == ([(4, 1), (1, 3)] if device == "cpu" else [(4, 3), (1, 3)])  # a GPU takes 32 at once
    assert (len(seen), len(operator_entries(tmp_path))) == (3, 2)
    assert fill_cache(sources, PREPROCESSING, tmp_path, 1, device=device, positions=iter(())) == {}


@pytest.mark.parametrize("jobs", [1, 2], ids=["one-process", "two-processes"])
def test_a_bad_mesh_does_not_stop_the_others(tmp_path: Path, jobs: int) -> None:
    sources = [ellipsoid(0), tmp_path / "missing.off", ellipsoid(1), ([[0, 0, 0]] * 3, [[0, 1, 2]]), ellipsoid(2)]
    cache, seen = tmp_path / "cache", []
    failed = fill_cache(sources, PREPROCESSING, cache, jobs, lambda: seen.append(1))
    assert list(failed) == [1, 3]
    assert "missing.off: no such file" in failed[1]
    assert "one point" in failed[3]
    assert len(seen) == 5
    written = {path: path.stat().st_mtime_ns for path in operator_entries(cache)}
    assert len(written) == 3
    assert fill_cache([sources[0], sources[2]], PREPROCESSING, cache, jobs) == {}
    for i in (0, 2, 4):
        precompute(sources[i], k=8, cache_dir=cache, normalize=True)
    assert {path: path.stat().st_mtime_ns for path in operator_entries(cache)} == written
    assert fill_cache([], PREPROCESSING, cache, jobs) == {}


def test_precompute_all_is_precompute_for_each_mesh(tmp_path: Path) -> None:
    """Positions aren't normalized."""
    meshes = [ellipsoid(i) for i in range(3)]
    meshes[1] = replace(meshes[1], verts=3 * meshes[1].verts)
    expected = [precompute(mesh, k=8, laplacian="cotan", basis="float16") for mesh in meshes]
    for folder, jobs in ((None, 1), (tmp_path, 2)):
        found = precompute_all(meshes, 8, "cotan", folder, basis="float16", jobs=jobs)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.faces, b.faces)
            torch.testing.assert_close(a.mass, b.mass)
            torch.testing.assert_close(a.evals, b.evals, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(a.gradient.values, b.gradient.values)
            torch.testing.assert_close(a.evecs.abs(), b.evecs.abs(), rtol=0, atol=2e-3)
    assert len(operator_entries(tmp_path)) == 3
    assert precompute_all([], 8) == []


def test_precompute_all_names_what_cannot_be_used(tmp_path: Path) -> None:
    meshes = [ellipsoid(0), tmp_path / "a.off", ellipsoid(1), *(tmp_path / f"{i}.off" for i in range(5))]
    with pytest.raises(MeshError, match=r"6 of 8 meshes can't be used: \S*a\.off, .*3\.off, …: no such file$"):
        precompute_all(meshes, 4, cache_dir=tmp_path / "cache", jobs=1)
    assert len(operator_entries(tmp_path)) == 2
    refused(ValueError, "k should be at least 0, got -1", precompute_all, meshes, -1)
    for one in ("a.obj", tmp_path / "a.obj", load_mesh(np.eye(3))):
        with pytest.raises(MeshError, match=r"expected a list of meshes, got one, .*; write it in brackets, \[mesh\]"):
            precompute_all(one, k=4)  # type: ignore[arg-type]


def test_a_mesh_that_kills_its_process_is_the_only_one_lost(tmp_path: Path) -> None:
    sources = [ellipsoid(0), Deadly("bad.off"), *(ellipsoid(i) for i in range(1, 4))]
    advance = Mock()
    failed = fill_cache(sources, PREPROCESSING, tmp_path, 2, advance)
    assert list(failed) == [1]
    assert "bad.off" in failed[1]
    assert "killed" in failed[1]
    assert advance.call_count == 5
    assert len(operator_entries(tmp_path)) == 4


def test_workers_do_not_import_pytorch(tmp_path: Path) -> None:
    """Importing PyTorch takes seconds, and as much memory as everything else in a worker."""
    script = """
import sys
from diffnet.geometry.options import Options
from diffnet.geometry.preprocessing.worker import CacheJob, GpuMesh, compute_entry
from diffnet.geometry.processes import WorkerPool

ball = ([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2]])
for options, for_gpu in ((Options(3, "robust", "bfloat16"), False), (Options(2, "cotan"), True)):
    print(compute_entry(ball, CacheJob(options, "cache", normalize=True), keep=False, for_gpu=for_gpu))
print("torch" in sys.modules)
if __name__ == "__main__":
    with WorkerPool(1, 1) as pool:
        print(pool.submit(eval, "'torch' in __import__('sys').modules").result())
"""
    ran = run_script(script, tmp_path)
    assert ran.stdout.splitlines()[-4:] == ["None", "None", "False", "False"], ran.stderr


WITH_PYTORCH = "import trimesh\nfrom diffnet import data, geometry\nball = trimesh.creation.icosphere(2)\n"
UNGUARDED = {
    "pool": "from diffnet.geometry.processes import WorkerPool\n"
    "with WorkerPool(2, 1) as pool:\n"
    "    for call in [pool.submit(abs, -1) for _ in range(50)]:\n"
    "        call.result()\n",
    "fill_cache": WITH_PYTORCH + "data.fill_cache([ball] * 50, data.Preprocessing(4), 'cache', 2)\n",
    "eigenbases": WITH_PYTORCH
    + "geometry.eigenbases([geometry.laplacian_and_mass(geometry.load_mesh(ball))] * 50, 4, jobs=2)\n",
}


@pytest.mark.parametrize(
    "name", ["pool", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fill_cache", "eigenbases"))]
)
def test_a_script_without_main_guard_gets_an_error(tmp_path: Path, name: str) -> None:
    """Workers import the script. Without `if __name__ == "__main__":` each of them would run it."""
    ran = run_script(UNGUARDED[name], tmp_path)
    assert ran.returncode == 1
    (message,) = (line for line in ran.stderr.splitlines() if "WorkerError: worker processes don't" in line)
    assert "__main__" in message
    assert ran.stderr.count("Traceback") == 1  # none from the workers


def test_bugs_are_not_blamed_on_the_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffnet.geometry.preprocessing.recipe.discretize", Mock(side_effect=TypeError("a bug")))
    refused(TypeError, "a bug", fill_cache, [ellipsoid(0)], PREPROCESSING, tmp_path, 1)
    monkeypatch.setattr("diffnet.geometry.preprocessing.recipe.discretize", Mock(side_effect=MemoryError))
    assert "ellipsoid 0: " in fill_cache([ellipsoid(0)], PREPROCESSING, tmp_path, 1)[0]


def test_an_interrupt_stops_the_workers(tmp_path: Path) -> None:
    slow = [ellipsoid(i, 6) for i in range(3)]  # each takes a second or more
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        fill_cache([ellipsoid(0), *slow], Preprocessing(128), tmp_path, 2, Mock(side_effect=KeyboardInterrupt))
    assert len(operator_entries(tmp_path)) == 1
    assert time.perf_counter() - started < 60


def test_the_cache_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(OSError, "file", fill_cache, [ellipsoid(0)], PREPROCESSING, tmp_path / "file", 1)


@pytest.fixture
def tensors_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" stands for a GPU, whose part the CPU does."""
    compute = group.compute_on
    cpu = torch.device("cpu")
    monkeypatch.setattr(group, "compute_on", lambda _, *rest, **named: compute(cpu, *rest, **named))


@pytest.mark.usefixtures("tensors_on_the_cpu")
@pytest.mark.parametrize("jobs", [1, 2], ids=["one-process", "two-processes"])
def test_a_gpu_computes_the_large_meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    solve, alone = group.packed_eigenbases, group.computed_arrays
    compute = Mock(side_effect=lambda mesh, options, _: alone(mesh, options, "cpu"))

    def eigenbases(problem: Any, *rest: Any) -> Any:
        if len(problem.lengths) > 1:
            raise torch.OutOfMemoryError("too little memory")  # so each mesh of the group is computed alone
        return solve(problem, *rest)

    monkeypatch.setattr(group, "computed_arrays", compute)
    monkeypatch.setattr(many, "POSITIONS", 2)
    sources = [ellipsoid(0, 5), ellipsoid(1), tmp_path / "missing.off", ellipsoid(2, 5)]
    advance, ready = Mock(), []
    failed = fill_cache(sources, PREPROCESSING, tmp_path, jobs, advance, "meta", ready.append)
    assert list(failed) == [2]
    assert "missing.off: no such file" in failed[2]
    assert (sorted(ready), advance.call_count, compute.call_count) == ([0, 1, 3], 4, 0)
    for i in (0, 1, 3):
        cached, fresh = (precompute(sources[i], k=8, cache_dir=folder, normalize=True) for folder in (tmp_path, None))
        assert torch.equal(cached.gradient.pattern.indices, fresh.gradient.pattern.indices)
        for name in ("mass", "evals", "frames"):
            torch.testing.assert_close(getattr(cached, name), getattr(fresh, name), rtol=1e-5, atol=1e-6)
    assert len(operator_entries(tmp_path)) == 3  # so none was computed again
    monkeypatch.setattr(group, "packed_eigenbases", eigenbases)
    monkeypatch.setattr(many, "POSITIONS", 4)
    assert fill_cache(sources, PREPROCESSING, tmp_path / "other", jobs, device="meta") == failed
    assert sorted(call.args[0].name for call in compute.call_args_list) == ["ellipsoid 0", "ellipsoid 2"]
    ready.clear()
    more: Any = {"device": "meta", "ready": ready.append, "leave_large": True}
    assert fill_cache(sources, PREPROCESSING, tmp_path / "small", jobs, **more) == failed
    assert (sorted(ready), len(operator_entries(tmp_path / "small"))) == ([0, 1, 3], 1)


@pytest.mark.parametrize(("ranks", "expected"), [(1, [32, 32, 32, 4]), (2, [25, 18, 14, 10, 8, 8, 8, 8, 1])])
def test_the_last_blocks_of_several_ranks_are_smaller(ranks: int, expected: list[int]) -> None:
    blocks: list[int] = []
    positions, add = in_blocks(iter(range(100)), lambda meshes: blocks.append(len(meshes)), 100, ranks)
    for position in positions:
        add(position, GpuMesh(ellipsoid(0), None))
    assert blocks == expected


@pytest.mark.usefixtures("tensors_on_the_cpu")
def test_operators_from_a_gpu_do_not_pass_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "usable_device", torch.device)
    monkeypatch.setattr(worker, "MIN_VERTICES", 600)
    sources = [ellipsoid(0, 3), ellipsoid(1, 3)]
    first = precompute_all(sources, k=8, jobs=1, device="meta")
    for basis in ("float32", "float16"):
        again = precompute_all(sources, k=8, jobs=1, device="meta", cache_dir=tmp_path, basis=basis)
        for i, source in enumerate(sources):
            if basis == "float32":
                assert torch.equal(first[i].evecs, again[i].evecs)
            stored = precompute(source, k=8, cache_dir=tmp_path, basis=basis)  # waits for the entry
            assert_same(stored, again[i])
    assert len(operator_entries(tmp_path)) == 4


@pytest.mark.usefixtures("pinned_on_the_cpu")
def test_small_meshes_move_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes find everything but uneven rows."""
    sources = [*(ellipsoid(i, i % 3 + 1) for i in range(4)), open_cone(200)]
    expected = precompute_all(sources, 8, jobs=1)
    *found, cone = precompute_all(sources, 8, jobs=1, device="meta")
    assert cone.mass.is_meta
    for a, b in zip(found, expected, strict=False):
        assert_same(a, b)
        for ours, theirs in ((a.laplacian.pattern, b.laplacian.pattern), (a.gradient.pattern, b.gradient.pattern)):
            assert torch.equal(ours.transpose[1], theirs.transpose[1])
            assert ours.transpose[0].stored_indices is ours.stored_indices  # so nothing is copied twice
            assert torch.equal(ours.rows_by_length, theirs.rows_by_length)


@pytest.mark.parametrize("near", [gradient.MAX_GAP, 0], ids=["rows in mesh order", "rows reordered"])
def test_entries_tell_whether_rows_are_even(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, near: int) -> None:
    assert entry.ROWS_TOGETHER == pattern.ROWS_TOGETHER
    monkeypatch.setattr(gradient, "MAX_GAP", near)
    soup_mesh = make_mesh(*soup((ellipsoid(0).verts, ellipsoid(0).faces)))
    for source, even, rest in (
        (ellipsoid(0, 2), True, [0, 0]),
        (open_cone(40), near == 0, [0, 0]),
        (open_cone(200), False, [0, 0]),
        (soup_mesh, near == 0, [1, 0]),  # the gradient reads functions at the first of the joined vertices
    ):
        operators = precompute(source, k=8, cache_dir=tmp_path)
        mesh_for = CacheJob(OPTIONS, tmp_path, normalize=False).read(source)
        arrays = read_entry(operators_path(mesh_for, OPTIONS, tmp_path))
        assert has_even_rows(arrays) == even
        patterns = operators.laplacian.pattern, operators.gradient.pattern
        assert all(len(p.long_pieces) == 0 and (near == 0 or len(p.rows_by_length) == 0) for p in patterns) == even
        assert arrays["facts"][-2:].tolist() == rest
        assert not has_even_rows({name: x for name, x in arrays.items() if name != "facts"})  # of an earlier version


def open_cone(sides: int) -> Mesh:
    """A cone whose tip has as many neighbors as there are sides."""
    angles = np.linspace(0, 6, sides)
    base = np.stack([np.cos(angles), np.sin(angles), np.ones(sides)], 1)
    corners = np.arange(1, sides)
    return make_mesh(np.concatenate([np.zeros((1, 3)), base]), np.stack([0 * corners, corners, corners + 1], 1))


def assert_same_on_gpu(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.mass.is_cuda
        assert a.frames.data_ptr() % GPU_ALIGNMENT == 0
        assert_same(a.cpu(), b)
        assert torch.equal(a.gradient.pattern.transpose[1].cpu(), b.gradient.pattern.transpose[1])


@pytest.mark.gpu
@pytest.mark.parametrize("basis", ["float32", "bfloat16"])
def test_small_meshes_on_a_gpu_have_the_same_bits(basis: Any) -> None:
    sources = [*(ellipsoid(i, 2) for i in range(9)), open_cone(200)]
    on_cpu, on_gpu = (precompute_all(sources, 8, jobs=2, basis=basis, device=device) for device in ("cpu", "cuda"))
    assert_same_on_gpu(on_gpu, on_cpu)


@pytest.mark.usefixtures("tensors_on_the_cpu")
def test_an_error_on_the_gpu_ends_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "discretize_on", Mock(side_effect=ZeroDivisionError("a fault")))
    monkeypatch.setattr(group, "MAX_WAITING", 1)
    monkeypatch.setattr(many, "POSITIONS", 1)
    meshes = [ellipsoid(i, 5) for i in range(3)]
    refused(ZeroDivisionError, "a fault", fill_cache, meshes, PREPROCESSING, tmp_path, 1, device="meta")


def write_off(path: Path, verts: np.ndarray, faces: np.ndarray) -> Path:
    path.write_text(written("off", verts.tolist(), faces.tolist()))
    return path


def write_files(folder: Path) -> list[Path]:
    """Meshes. Two can't be read again on a GPU: one has joined vertices, and one has a long row."""
    shapes = [ellipsoid(0), ellipsoid(1, 2)]
    cone = open_cone(40)
    meshes = [
        *((each.verts, each.faces) for each in shapes),
        soup((shapes[0].verts, shapes[0].faces)),
        (cone.verts, cone.faces),
        (np.random.default_rng(0).random((30, 3)), np.zeros((0, 3), np.int64)),
    ]
    return [write_off(folder / f"{i}.off", *mesh) for i, mesh in enumerate(meshes)]


@pytest.fixture
def pinned_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" stands for a GPU. What this process computes or reads again stays in ordinary memory."""
    monkeypatch.setattr(many, "usable_device", torch.device)
    monkeypatch.setattr(reading, "empty_pinned", lambda size: torch.full((size,), 255, dtype=torch.uint8))
    monkeypatch.setattr(PinnedEntries, "to", lambda self, *_, **__: TensorsAt(*self))
    monkeypatch.setattr(file_state, "SETTLED", -(10**10))  # files that have just been written are settled


@pytest.mark.usefixtures("pinned_on_the_cpu")
@pytest.mark.parametrize("near", [gradient.MAX_GAP, 0], ids=["rows in mesh order", "rows reordered"])
@pytest.mark.parametrize("basis", ["float32", "float16"])
def test_operators_that_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: int, basis: Any) -> None:
    monkeypatch.setattr(gradient, "MAX_GAP", near)
    for module in (pattern, reading):
        monkeypatch.setattr(module, "PIECE", 30)
    files, folder = write_files(tmp_path), tmp_path / "cache"
    expected = [precompute(file, k=8, basis=basis, normalize=True, cache_dir=folder) for file in files]
    load = partial(precompute_all, files, 8, basis=basis, normalize=True, cache_dir=folder, jobs=2)
    parse = Mock(wraps=mesh.read_content)
    monkeypatch.setattr(mesh, "read_content", parse)
    for device in ("cpu", "cpu", "meta"):
        found = load(device=device)
        on_cpu = [i for i, each in enumerate(found) if not each.mass.is_meta]
        assert on_cpu == (list(range(5)) if device == "cpu" else [0, 1, 4] if basis == "float32" else [])
        for i in on_cpu:
            assert_same(found[i], expected[i])
            for name in ("laplacian", "gradient"):
                ours, theirs = (getattr(each, name).pattern for each in (found[i], expected[i]))
                assert ours._transpose is not None  # a private name: it is known, so products need not sort
                assert torch.equal(ours.transpose[1], theirs.transpose[1])
                assert torch.equal(ours.transpose[0].stored_indptr, theirs.transpose[0].stored_indptr)
                assert torch.equal(ours.transpose[0].stored_indices, theirs.transpose[0].stored_indices)
                assert torch.equal(ours.long_pieces, theirs.long_pieces)
                assert torch.equal(ours.rows_by_length, theirs.rows_by_length)
    parse.assert_not_called()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


@pytest.mark.usefixtures("pinned_on_the_cpu")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["mesh", "operators"])
@pytest.mark.parametrize("how", [damage, Path.unlink], ids=["damaged", "missing"])
def test_changes_of_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, kind: str, how: Any) -> None:
    monkeypatch.setattr(many, "operators_of", lambda *args: one_mesh.operators_of(*args[:3], torch.device("cpu")))
    files, folder = write_files(tmp_path)[:2], tmp_path / "cache"
    expected = [precompute(file, k=8, cache_dir=folder) for file in files]
    for _ in range(2):
        precompute_all(files, 8, cache_dir=folder, jobs=2)
    for path in folder.rglob(f"*.{kind}.safetensors"):
        how(path)
    with pytest.warns(UserWarning, match="can't be read") if how is damage else nullcontext():
        found = precompute_all(files, 8, cache_dir=folder, jobs=2, device=device)
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


@pytest.mark.usefixtures("pinned_on_the_cpu")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_files_that_change_are_read_afresh(tmp_path: Path, device: str) -> None:
    """Also if their size and their time of modification stay."""
    files, folder = write_files(tmp_path)[:2], tmp_path / "cache"
    before, content = files[0].stat(), load_mesh(files[0])
    for _ in range(3):
        precompute_all(files, 8, cache_dir=folder, jobs=2)
    write_off(files[0], content.verts, content.faces[::-1])
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files[0].stat().st_size == before.st_size
    for where in ("cpu", "cpu", device):  # computed, read and read again
        first, _ = precompute_all(files, 8, cache_dir=folder, jobs=2, device=where)
        assert torch.equal(first.faces, torch.from_numpy(content.faces[::-1].copy()))
    files[0].unlink()
    refused(MeshError, r"0\.off: no such file", precompute_all, files, 8, cache_dir=folder, jobs=2, device=device)


@pytest.mark.gpu
def test_files_that_are_read_again_on_a_gpu_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_state, "SETTLED", -(10**10))
    files, again = write_files(tmp_path), Mock(wraps=many.read_again)
    monkeypatch.setattr(many, "read_again", again)
    expected = [precompute(file, k=8, cache_dir=tmp_path) for file in files]
    for count in (0, 3, 6):
        assert_same_on_gpu(precompute_all(files, 8, cache_dir=tmp_path, device="cuda"), expected)
        assert again.call_count == count


@pytest.mark.gpu
def test_a_gpu_gives_the_same_pairs(tmp_path: Path) -> None:
    sources = [ellipsoid(i, 5) for i in range(3)] + [ellipsoid(3)]
    assert fill_cache(sources, PREPROCESSING, tmp_path, 2, device="cuda") == {}
    for source in sources:
        cached, fresh = (precompute(source, k=8, cache_dir=folder, normalize=True) for folder in (tmp_path, None))
        torch.testing.assert_close(cached.evals, fresh.evals, rtol=1e-5, atol=1e-6)
        # An ellipsoid's eigenvectors have equal peaks on both sides, so rounding decides their signs.
        along = (cached.evecs * fresh.evecs * fresh.mass[:, None]).sum(0)
        torch.testing.assert_close(along.abs(), torch.ones(8), rtol=1e-4, atol=0)


@pytest.mark.parametrize("jobs", [1, 2], ids=["one-process", "two-processes"])
def test_phases_add_up_over_processes(tmp_path: Path, jobs: int) -> None:
    sources = [ellipsoid(i, 2) for i in range(3)]
    take_phases()
    fill_cache(sources, PREPROCESSING, tmp_path, jobs)
    assert set(take_phases()) == {"read", "check", "assemble", "solve", "write"}
    fill_cache(sources, PREPROCESSING, tmp_path, jobs)
    assert set(take_phases()) <= {"read", "check"}  # the cache has all of them


# ---- the pool of worker processes ----


def workers() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def process_of_a_call(threads: int = 1) -> int:
    with WorkerPool(1, threads) as pool:
        return pool.submit(os.getpid).result()


def test_results_errors_and_deaths() -> None:
    """One pool for all of these, since starting processes takes time. Each call fails or succeeds for itself."""
    stop_workers()
    with WorkerPool(2, 1) as pool:
        assert not workers()  # processes start with the first calls
        first = pool.submit(os.getpid).result()
        assert first != os.getpid()
        assert pool.submit(sum, range(5), 7).result() == 17
        assert len(pool.submit(bytes, 10**7).result()) == 10**7  # more than a pipe holds

        with pytest.raises(ZeroDivisionError) as e:
            pool.submit(divmod, 1, 0).result()
        assert isinstance(e.value.__cause__, WorkerTraceback)
        assert "Traceback" in str(e.value.__cause__)
        with pytest.raises(AttributeError):
            pool.submit(lambda: 0).result()  # can't be pickled
        with pytest.raises((TypeError, AttributeError)):
            pool.submit(eval, "(i for i in range(3))").result()  # the result can't be pickled

        dying, working = pool.submit(os._exit, 3), pool.submit(sum, [1, 2])
        refused(BrokenProcessPool, "killed", dying.result)
        assert working.result() == 3
        assert [pool.submit(abs, -i).result() for i in range(5)] == list(range(5))
        dead = pool.submit(os._exit, 3)
    refused(BrokenProcessPool, "killed", dead.result)
    assert 1 <= len(workers()) <= 2  # those that live wait for the next pool


def test_calls_that_fail_alike_have_errors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that several calls raise would collect the traceback of each."""
    failure = WorkerError("worker processes don't start")
    # Private: no process of a test's own fails to start.
    monkeypatch.setattr(processes._Worker, "wait_until_ready", Mock(side_effect=failure))
    with WorkerPool(1, 1) as pool:
        calls = [pool.submit(abs, -1) for _ in range(3)]
        errors = [call.exception() for call in calls]
    assert [str(error) for error in errors] == ["worker processes don't start"] * 3
    assert len({id(error) for error in errors}) == 3


def test_processes_stay_for_later_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_workers()
    first = process_of_a_call()
    threads = "max(x['num_threads'] for x in __import__('threadpoolctl').threadpool_info())"
    with WorkerPool(1, 2) as pool:
        assert pool.submit(os.getpid).result() == first
        assert pool.submit(eval, threads).result() == 2
    with WorkerPool(1, 1) as pool:
        assert pool.submit(eval, threads).result() == 1
    os.kill(first, signal.SIGKILL)
    while first in workers():
        time.sleep(0.01)
    second = process_of_a_call()  # a process that died in between fails no call
    assert second != first
    monkeypatch.chdir(tmp_path)
    with WorkerPool(1, 1) as pool:
        assert pool.submit(os.getcwd).result() == str(tmp_path)
        assert pool.submit(os.getpid).result() != second
    monkeypatch.setattr(processes, "IDLE_SECONDS", 0)
    third = process_of_a_call()
    assert process_of_a_call() != third
    stop_workers()
    assert not workers()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory of processes in /proc")
def test_a_process_that_keeps_much_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(1, 1) as pool:
        first = pool.submit(keep_bytes, 1000).result()
        monkeypatch.setattr(processes, "MAX_GROWTH", 150 << 20)
        assert pool.submit(keep_bytes, 200 << 20).result() == first
        second = pool.submit(keep_bytes, 1000).result()
        assert second != first
        assert pool.submit(keep_bytes, 1000).result() == second
        assert {worker.process.pid for worker in pool._workers} == {second}  # private: those to end with the pool
    assert first not in workers()


def keep_bytes(count: int) -> int:
    """Keep memory for good, as a leak does. Returns the number of the process."""
    _leak.append(b"1" * count)
    return os.getpid()


_leak: list[bytes] = []


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = """
import os, signal
from diffnet.geometry.processes import WorkerPool

if __name__ == "__main__":
    with WorkerPool(1, 1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    # This also waits for the end of the worker, which has the same standard output.
    ran = run_script(script, tmp_path)
    assert ran.returncode == -signal.SIGKILL
    assert ran.stderr == ""
    assert int(ran.stdout) > 0


def test_a_forked_process_leaves_the_workers_to_its_parent() -> None:
    """As in a DataLoader with workers."""
    first = process_of_a_call()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=send_process_of_a_call, args=(theirs,))
    child.start()
    theirs.close()  # so that the end of the child would end the wait
    assert ours.poll(60)
    assert ours.recv() != first
    child.join()
    assert process_of_a_call() == first


def send_process_of_a_call(connection: Any) -> None:
    try:
        connection.send(process_of_a_call())
    except OSError as e:
        connection.send(e)  # Python's fork server serves the process that started it only


def test_an_interrupt_stops_running_calls() -> None:
    """Calls that wait with arguments of more than a pipe holds don't keep the pool from stopping."""

    def interrupted() -> None:
        with WorkerPool(1, 1) as pool:
            pool.submit(os.getpid).result()
            busy = pool.submit(time.sleep, 100)
            waiting = pool.submit(len, bytes(10**7))
            time.sleep(0.5)
            assert busy.running()
            assert not waiting.running()
            raise KeyboardInterrupt

    stop_workers()
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.perf_counter() - started < 60
    assert not workers()
    assert process_of_a_call() in workers()


def test_a_warning_of_several_workers_is_given_once() -> None:
    with pytest.warns(UserWarning, match="^of a worker$") as found, WorkerPool(2, 1) as pool:
        wait([pool.submit(warnings.warn, "of a worker") for _ in range(6)])
    assert len(found) == 1
