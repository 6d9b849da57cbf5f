"""Shared setup: threads, seeds, the skip of GPU tests, reference files outside the repository, and small meshes."""

from __future__ import annotations

import gc
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

# Workers of pytest-xdist share the cores. The libraries read these variables when they are loaded, so this comes first.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))

import numpy as np
import pytest
import quick_interpreter
import seeds
import torch
import trimesh
from hypothesis import settings
from threadpoolctl import threadpool_limits

# Without a GPU the kernels run in Triton's interpreter. The choice has to be made before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    quick_interpreter.install()
    # `torch.manual_seed` would record two stack traces in each call, for the time when a GPU is there.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None

# A background process of a shell script ignores Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

settings.register_profile("fixed", derandomize=True)
settings.register_profile("fresh", derandomize=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("seeds")
    group.addoption("--fresh-seeds", action="store_true", help="draw other random inputs than usual")
    group.addoption("--seed", type=int, help="repeat a run with --fresh-seeds that printed this seed")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its own option
def pytest_configure(config: pytest.Config) -> None:
    fresh = config.getoption("--fresh-seeds") or config.getoption("--seed") is not None
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit the variable
        seed = config.getoption("--seed")
        os.environ[seeds.VARIABLE] = str(seed if seed is not None else secrets.randbelow(2**31) if fresh else 0)
    settings.load_profile("fresh" if fresh else "fixed")
    if fresh:
        config.option.hypothesis_seed = seeds.base_seed()


def pytest_report_header() -> str:
    base = seeds.base_seed()
    return f"seeds: {base} (repeat with --seed {base})" if base else "seeds: 0, fixed (--fresh-seeds draws others)"


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """Seed fixtures that several tests share, so that their draws do not depend on the test that comes first."""
    if fixturedef.scope != "function":
        seeds.seed_globally(f"{fixturedef.baseid}::{fixturedef.argname}")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> int:
    """The seed of the global generators. Every test starts with its own."""
    return seeds.seed_globally(request.node.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """A collection of garbage takes 0.3 s less if it doesn't visit the objects that exist before the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def shared() -> Path:
    """The folder of reference files."""
    if not SHARED.is_dir():
        pytest.skip(f"reference files are absent ({SHARED})")
    return SHARED


@pytest.fixture(scope="session")
def triton_cache(pytestconfig: pytest.Config) -> Path:
    """A folder of compiled kernels, kept between runs, so that each version of a kernel is compiled once."""
    return pytestconfig.cache.mkdir("triton")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limits PyTorch and BLAS to one thread. On a few dozen vertices, threads spend more time waiting than working."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small_pictures() -> Iterator[None]:
    """Reports with small pictures, and with an empty picture for each chart. Drawing takes most of a short run."""
    # Imported here, because most tests need neither.
    from matplotlib.figure import Figure

    from diffnet.viz.render import png_bytes

    with pytest.MonkeyPatch.context() as patch:
        empty = png_bytes(np.zeros((2, 2, 3), np.uint8))
        patch.setattr(Figure, "savefig", lambda figure, out, **options: out.write(empty))
        patch.setattr("diffnet.train.report.report.PICTURE_SIZE", (84, 68))
        patch.setattr("diffnet.train.report.report.SMALL_SIZE", (60, 50))
        patch.setattr("diffnet.train.tasks.task.PICTURE_SIZE", (90, 90))
        yield


@pytest.fixture
def sphere() -> trimesh.Trimesh:
    """A unit sphere of 642 vertices."""
    return trimesh.creation.icosphere(3)


@pytest.fixture
def plane() -> tuple[np.ndarray, np.ndarray]:
    """A jittered grid of triangles in a plane: vertices (121, 3) and faces (200, 3).

    The plane is the xy-plane, turned by `random_rotation(1)`.
    """
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
    """A uniformly distributed rotation matrix (3, 3)."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))
    q = q * np.sign(np.diag(r))
    return q * np.sign(np.linalg.det(q))
