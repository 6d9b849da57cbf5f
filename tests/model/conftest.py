"""Fixtures of the tests of networks, which all run in one thread."""

from __future__ import annotations

import pytest
import trimesh

from diffnet import Operators, precompute


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    """Spheres of 12, 42 and 162 vertices."""
    return [precompute(trimesh.creation.icosphere(i), k=6) for i in range(3)]


@pytest.fixture(scope="module")
def operators(meshes: list[Operators]) -> Operators:
    return meshes[0]
