"""What several tests share: reference files outside the repository, small meshes, and the skip for GPU tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from threadpoolctl import threadpool_limits

# Where there is no GPU, kernels run in Triton's interpreter, which has to be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# What a script starts in the background ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def shared() -> Path:
    """The folder of reference files."""
    if not SHARED.is_dir():
        pytest.skip(f"reference files are absent ({SHARED})")
    return SHARED


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take longer than meshes of a few dozen vertices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def sphere() -> trimesh.Trimesh:
    """A unit sphere of 642 vertices."""
    return trimesh.creation.icosphere(3)


@pytest.fixture
def plane() -> tuple[np.ndarray, np.ndarray]:
    """A jittered grid of triangles (verts (121, 3), faces (200, 3)) in the xy-plane turned by `random_rotation(1)`."""
    rng = np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(11.0), np.arange(11.0), indexing="ij")
    verts = np.stack([x.ravel(), y.ravel(), np.zeros(121)], axis=1)
    verts[:, :2] += rng.uniform(-0.2, 0.2, (121, 2))
    corner = (np.arange(10)[:, None] * 11 + np.arange(10)).ravel()
    faces = np.concatenate(
        [np.stack([corner, corner + 11, corner + 12], 1), np.stack([corner, corner + 12, corner + 1], 1)]
    )
    return verts @ random_rotation(1).T, faces


def random_rotation(seed: int) -> np.ndarray:
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))
    q = q * np.sign(np.diag(r))
    return q * np.sign(np.linalg.det(q))
