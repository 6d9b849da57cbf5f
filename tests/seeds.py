"""The seeds of the tests: fixed by default, fresh in soak runs.

`pytest --fresh-seeds` draws a new base for all seeds and prints it in the header. `pytest --seed N` repeats a run.
"""

from __future__ import annotations

import os
import random
import zlib

import numpy as np
import torch

VARIABLE = "DIFFNET_TEST_SEED"  # an environment variable reaches the workers of pytest-xdist


def base_seed() -> int:
    """The number that a run adds to all seeds, 0 unless the run asks for another."""
    return int(os.environ.get(VARIABLE, "0"))


def shifted(seed: int) -> int:
    """The seed of one draw: `seed` itself in ordinary runs, another one with `--fresh-seeds`."""
    return seed + base_seed()


def seed_globally(name: str) -> int:
    """Seed the global generators of PyTorch, NumPy and Python for a test or a fixture, and return the seed.

    The seed depends on the name alone, so the draws of a test do not depend on the tests that ran before it.
    """
    seed = (zlib.crc32(name.encode()) + base_seed()) % 2**32
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (trimesh draws from NumPy's global generator)
    random.seed(seed)
    return seed
