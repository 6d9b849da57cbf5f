"""Agreement of functional maps with the original's correspondence network and with the unsupervised line.

`../shared/golden/correspondence.npz` holds features, operators and maps of both. The tests skip where it is absent.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from conftest import SHARED
from torch import Tensor

from diffnet.ops import Regularizer, functional_map, functional_map_from_points, nearest_neighbors, to_spectral

FILE = SHARED / "golden" / "correspondence.npz"

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def stored() -> dict[str, Tensor]:
    if not FILE.is_file():
        pytest.skip(f"reference file is absent ({FILE})")
    with np.load(FILE) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def mapped(features: str, first: int, second: int, k: int, regularizer: Regularizer) -> Tensor:
    """The map (k, k) from one figure to the other, by features of the file in float32."""
    golden = stored()

    def coefficients(i: int) -> Tensor:
        x, evecs, mass = golden[f"{features}{i}"], golden[f"evecs{i}"], golden[f"mass{i}"]
        return to_spectral(x, evecs[:, :k], mass, torch.tensor([0, len(x)]))

    evals = [golden[f"evals{i}"][None, :k] for i in (first, second)]
    return functional_map(coefficients(first), coefficients(second), *evals, regularizer=regularizer)[0]


def test_map_of_the_original() -> None:
    """The squared difference, with the default weight."""
    expected = stored()["fmnet_C"][0]
    out = mapped("fmnet_features", 0, 1, 30, "squared_difference")
    assert torch.linalg.norm(out - expected) < 1e-4 * torch.linalg.norm(expected)
    assert (out - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "first"), [("ulrssm_Cxy", 0), ("ulrssm_Cyx", 1)])
def test_maps_of_the_unsupervised_line(name: str, first: int) -> None:
    """The resolvent, with the default weight and gamma."""
    expected = stored()[name]
    out = mapped("ulrssm_features", first, 1 - first, 50, "resolvent")
    assert (out - expected).abs().max() < 1e-4


def test_direction() -> None:
    """The maps are close to those of points nearest in features: "Cxy" goes from figure 0 to figure 1."""
    golden = stored()
    matches = nearest_neighbors(golden["ulrssm_features1"], golden["ulrssm_features0"])
    evecs = [golden[f"evecs{i}"][:, :50] for i in (0, 1)]
    of_points = functional_map_from_points(matches, *evecs, golden["mass1"])
    right, wrong = (torch.linalg.norm(golden[name] - of_points) for name in ("ulrssm_Cxy", "ulrssm_Cyx"))
    assert right < 0.8 * wrong
