"""Agreement with published correspondence networks, on the operators in `../shared/golden/correspondence.npz`."""

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
from diffnet.ops import functional_map
from diffnet.train import load_matching_network, match_meshes
from diffnet.train.commands.predicting import described_input
from diffnet.train.correspondence.maps import pair_maps
from diffnet.train.correspondence.targets import unknown_map
from diffnet.train.inference.network_input import network_input
from diffnet.train.inference.predict import input_sample

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
