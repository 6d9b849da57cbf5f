"""Agreement with published correspondence networks and their functional maps, stored in `../shared/golden`."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from conftest import SHARED
from torch import Tensor

from diffnet import DiffusionNet, Operators
from diffnet.checkpoints.original import our_names
from diffnet.data import PairSample, collate_pairs
from diffnet.geometry import make_mesh
from diffnet.ops import Regularizer, functional_map, functional_map_from_points, nearest_neighbors, to_spectral
from diffnet.train import load_matching_network, match_meshes
from diffnet.train.commands.predicting import described_input
from diffnet.train.correspondence.maps import pair_maps
from diffnet.train.correspondence.targets import unknown_map
from diffnet.train.inference.network_input import network_input
from diffnet.train.inference.predict import input_sample

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = SHARED / "golden"
FILES = {"fmnet": GOLDEN / "faust_hks.pth", "ulrssm": GOLDEN / "ulrssm_smal.pth"}
INPUTS = {"fmnet": "hks", "ulrssm": "verts"}


@functools.cache
def stored() -> dict[str, np.ndarray]:
    path = GOLDEN / "correspondence.npz"
    if not path.is_file():
        pytest.skip(f"reference file is absent ({path})")
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


def tensors() -> dict[str, Tensor]:
    return {key: torch.from_numpy(values) for key, values in stored().items()}


def operators_of(figure: int) -> Operators:
    """The original's operators of figure 0 or 1."""
    golden = stored()

    def matrix(name: str) -> scipy.sparse.csr_matrix:
        return scipy.sparse.csr_matrix(
            tuple(golden[f"{name}{figure}_{part}"] for part in ("data", "indices", "indptr"))
        )

    frames, mass, evals, evecs = (golden[f"{name}{figure}"] for name in ("frames", "mass", "evals", "evecs"))
    parts = (frames, mass, matrix("L"), evals, evecs, matrix("gradX"), matrix("gradY"))
    return Operators.from_reference(parts, golden[f"faces{figure}"])


def network(name: str) -> DiffusionNet:
    stored()  # skips where the files are absent
    return DiffusionNet.from_original_checkpoint(FILES[name])


def relative(a: Tensor, b: np.ndarray) -> float:
    """‖a − b‖ / ‖b‖"""
    expected = torch.from_numpy(b).double()
    return float((a.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("gradient", ["sparse", "spectral"])
def test_features(name: str, gradient: str) -> None:
    model, golden = network(name), stored()
    for figure in (0, 1):
        operators = operators_of(figure)
        operators = operators.with_gradient_evecs() if gradient == "spectral" else operators
        with torch.no_grad():
            out = model(torch.from_numpy(golden[f"{INPUTS[name]}{figure}"]), operators)
        assert relative(out, golden[f"{name}_features{figure}"]) < 1e-4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fmnet", "a correspondence checkpoint of the original implementation"),
        ("ulrssm", "a checkpoint of unsupervised correspondence (Cao et al. 2023)"),
    ],
)
def test_commands_name_the_kind(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    described_input(FILES[name], network(name))
    features = {"fmnet": "hks", "ulrssm": "xyz"}[name]
    out = capsys.readouterr().out
    assert f"{FILES[name].name}: {words}. It doesn't record its input, which is taken to be {features} at area 1" in out


def test_gradients_of_a_map() -> None:
    """Features in float32, as for the stored values, and the map in float64."""
    model, golden, prefix = network("fmnet"), stored(), "fmnet_grad_of_sum_C2__"
    coefficients, evals = [], []
    for figure in (0, 1):
        o = operators_of(figure)
        x = model(torch.from_numpy(golden[f"{INPUTS['fmnet']}{figure}"]), o)
        coefficients.append((o.evecs[:, :30].double().T @ (o.mass[:, None] * x).double())[None])
        evals.append(o.evals[:, :30].double())
    found = functional_map(*coefficients, *evals, regularizer="squared_difference")[0]
    assert relative(found, golden["fmnet_C"][0]) < 1e-4
    found.square().sum().backward()
    names = {key.removeprefix(prefix) for key in golden if key.startswith(prefix)}
    assert len(names) > 2
    for name, ours in our_names(sorted(names)).items():
        grad = model.get_parameter(ours).grad
        assert grad is not None
        assert relative(grad, golden[prefix + name]) < 1e-3, name


@pytest.mark.parametrize("name", FILES)
def test_maps_of_match_from_raw_meshes(name: str, tmp_path: Path) -> None:
    """The steps of `diffnet match`, on meshes of another size. Entries agree up to the signs of eigenvectors."""
    golden, k = stored(), {"fmnet": 30, "ulrssm": 50}[name]
    model = load_matching_network(FILES[name])
    expected = network_input(model)
    meshes = [make_mesh(3 * golden[f"verts{figure}"] + 1, golden[f"faces{figure}"]) for figure in (0, 1)]
    pair = collate_pairs(
        [PairSample(*(input_sample(mesh, expected, tmp_path) for mesh in meshes), lambda: unknown_map(1))]
    )
    with torch.no_grad():
        maps = pair_maps(model(pair.features, pair.operators), pair.operators, expected.options.method, k)
    for number, key in enumerate({"fmnet": ["fmnet_C"], "ulrssm": ["ulrssm_Cxy", "ulrssm_Cyx"]}[name]):
        assert relative(maps[0, number].abs(), np.abs(golden[key]).reshape(k, k)) < 1e-4
    found = match_meshes(*meshes, model, cache_dir=tmp_path)
    assert found.matches.shape == (len(meshes[1].verts),)
    assert 0 <= found.matches.min() <= found.matches.max() < len(meshes[0].verts)


# ---- functional maps of the original's network and of the unsupervised line ----


def mapped(features: str, first: int, second: int, k: int, regularizer: Regularizer) -> Tensor:
    """The map (k, k) from one figure to the other, by features of the file in float32."""
    golden = tensors()

    def coefficients(i: int) -> Tensor:
        x, evecs, mass = golden[f"{features}{i}"], golden[f"evecs{i}"], golden[f"mass{i}"]
        return to_spectral(x, evecs[:, :k], mass, torch.tensor([0, len(x)]))

    evals = [golden[f"evals{i}"][None, :k] for i in (first, second)]
    return functional_map(coefficients(first), coefficients(second), *evals, regularizer=regularizer)[0]


def test_map_of_the_original() -> None:
    """The squared difference, with the default weight."""
    expected = tensors()["fmnet_C"][0]
    out = mapped("fmnet_features", 0, 1, 30, "squared_difference")
    assert torch.linalg.norm(out - expected) < 1e-4 * torch.linalg.norm(expected)
    assert (out - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "first"), [("ulrssm_Cxy", 0), ("ulrssm_Cyx", 1)])
def test_maps_of_the_unsupervised_line(name: str, first: int) -> None:
    """The resolvent, with the default weight and gamma."""
    expected = tensors()[name]
    out = mapped("ulrssm_features", first, 1 - first, 50, "resolvent")
    assert (out - expected).abs().max() < 1e-4


def test_direction() -> None:
    """The maps are close to those of points nearest in features: "Cxy" goes from figure 0 to figure 1."""
    golden = tensors()
    matches = nearest_neighbors(golden["ulrssm_features1"], golden["ulrssm_features0"])
    evecs = [golden[f"evecs{i}"][:, :50] for i in (0, 1)]
    of_points = functional_map_from_points(matches, *evecs, golden["mass1"])
    right, wrong = (torch.linalg.norm(golden[name] - of_points) for name in ("ulrssm_Cxy", "ulrssm_Cyx"))
    assert right < 0.8 * wrong
