"""The thread that solves for eigenbases on a GPU. Most tests replace the GPU's solver by the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import ellipsoid, soup

from diffnet import geometry
from diffnet.geometry import precompute
from diffnet.geometry.preprocessing import gpu_queue
from diffnet.geometry.preprocessing.many import fill_cache
from diffnet.geometry.preprocessing.options import Options

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Options(8)


def test_workers_do_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries are those of `precompute`. A mesh that can't be solved for doesn't stop the others."""

    def eigenbases(problems: Any, k: int, device: Any, jobs: int) -> Any:
        assert device == torch.device("meta")
        if len(problems) > 1 and any(len(mass) == 162 for _, mass in problems):
            raise RuntimeError("too little memory")
        return [eigenbasis(*problem, k, device) for problem in problems]

    def eigenbasis(laplacian: Any, mass: Any, k: int, device: Any) -> Any:
        if len(mass) == 162:
            raise RuntimeError("the eigenbasis didn't converge")
        return geometry.eigenbasis(laplacian, mass, k)

    monkeypatch.setattr(gpu_queue, "eigenbases", eigenbases)
    monkeypatch.setattr(gpu_queue, "eigenbasis", eigenbasis)
    whole = ellipsoid(2)
    joined = soup((whole.verts, whole.faces))  # before solving
    sources = [ellipsoid(0), tmp_path / "missing.off", ellipsoid(1), ellipsoid(3, 2), joined]
    seen: list[int] = []
    ready: list[int] = []
    failed = fill_cache(sources, OPTIONS, tmp_path, 2, lambda: seen.append(1), "meta", ready.append)
    assert list(failed) == [1, 3]
    assert "missing.off: no such file" in failed[1]
    assert failed[3] == "ellipsoid 3: the eigenbasis didn't converge"
    assert (sorted(ready), len(seen)) == ([0, 2, 4], 5)
    for i in (0, 2, 4):
        cached, fresh = precompute(sources[i], k=8, cache_dir=tmp_path), precompute(sources[i], k=8)
        for name in ("mass", "evals", "evecs", "frames"):
            assert torch.equal(getattr(cached, name), getattr(fresh, name))
        assert torch.equal(cached.gradient.values, fresh.gradient.values)
    monkeypatch.setattr(gpu_queue, "eigenbases", None)  # all entries are there, so it isn't called
    assert fill_cache([sources[0], sources[2]], OPTIONS, tmp_path, 2, device="meta") == {}


@pytest.mark.parametrize("fault", ["full-disk", pytest.param("no-gpu", marks=pytest.mark.slow)])
def test_workers_do_not_wait_for_a_gpu_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def full(path: Path, arrays: Any) -> None:
        raise OSError("no space left on device")

    def broken(*shape: int, device: Any) -> Any:
        raise RuntimeError("no GPU")

    def eigenbases(problems: Any, k: int, device: Any, jobs: int) -> Any:
        return [geometry.eigenbasis(*problem, k) for problem in problems]

    monkeypatch.setattr(gpu_queue, "eigenbases", eigenbases)
    monkeypatch.setattr(gpu_queue, "MOST_WAITING", 1)
    if fault == "full-disk":
        monkeypatch.setattr(gpu_queue, "write_entry", full)
        error: Any = pytest.raises(OSError, match="no space left")
    else:
        monkeypatch.setattr(torch, "zeros", broken)
        error = pytest.raises(RuntimeError, match="no GPU")
    with error:
        fill_cache([ellipsoid(i) for i in range(12)], OPTIONS, tmp_path, 2, device="meta")


@pytest.mark.gpu
def test_a_gpu_gives_the_same_pairs(tmp_path: Path) -> None:
    sources = [ellipsoid(i, 5) for i in range(3)] + [ellipsoid(3)]
    assert fill_cache(sources, OPTIONS, tmp_path, 2, device="cuda") == {}
    for source in sources:
        cached, fresh = precompute(source, k=8, cache_dir=tmp_path), precompute(source, k=8)
        torch.testing.assert_close(cached.evals, fresh.evals, rtol=1e-5, atol=1e-6)
        # An ellipsoid's eigenvectors have equal peaks on both sides, so rounding decides their signs.
        along = (cached.evecs * fresh.evecs * fresh.mass[:, None]).sum(0)
        torch.testing.assert_close(along.abs(), torch.ones(8), rtol=1e-4, atol=0)
