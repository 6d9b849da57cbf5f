"""`Operators` from matrices of other programs, and the checks of `Operators` itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import potpourri3d
import pytest
import scipy.sparse
import scipy.sparse.linalg
import torch
import trimesh
from operator_checks import assert_same, assert_sound, matrix, relative
from refusals import refused
from shapes import arrays, degraded_sphere

from diffnet import DiffusionNet, Operators, precompute
from diffnet.geometry import eigenbasis, one_ring
from diffnet.ops import SparseMatrix

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def mesh() -> tuple[np.ndarray, np.ndarray]:
    verts, faces = arrays(trimesh.creation.icosphere(2))
    return verts * [1, 0.8, 0.6], faces


@pytest.fixture(scope="module")
def expected(mesh: tuple[np.ndarray, np.ndarray]) -> Operators:
    return precompute(*mesh, k=12, laplacian="cotan")


def cotangents(verts: np.ndarray, faces: np.ndarray) -> tuple[scipy.sparse.csr_matrix, scipy.sparse.dia_matrix]:
    """Cotangent Laplacian and lumped mass matrix, as users of libigl or pyFM have them."""
    return potpourri3d.cotan_laplacian(verts, faces), scipy.sparse.diags(potpourri3d.vertex_areas(verts, faces))


def parts_of(o: Operators) -> dict[str, Any]:
    """The arguments of `from_parts` that give these operators again."""
    fields = {name: getattr(o, name) for name in ("mass", "laplacian", "evecs", "frames", "faces")}
    grad_x, grad_y = (SparseMatrix(o.gradient.pattern, values) for values in o.gradient.values)
    return {**fields, "evals": o.evals[0], "grad_x": grad_x, "grad_y": grad_y}


def indefinite(parts: dict[str, Any], change: float = 2.5) -> scipy.sparse.csr_matrix:
    """The Laplacian with one weight of the wrong sign. Its diagonal is positive, and its rows sum to 0."""
    laplacian = scipy.sparse.csr_matrix(matrix(parts["laplacian"]))
    ends = np.array([0, laplacian.indices[laplacian.indices > 0][0]])
    entries = [-change, change, change, -change], (ends[[0, 0, 1, 1]], ends[[0, 1, 0, 1]])
    changed = laplacian + scipy.sparse.csr_matrix(entries, laplacian.shape)
    assert (changed.diagonal() > 0).all()
    return changed


def skewed(frames: torch.Tensor) -> torch.Tensor:
    """Frames of which one has equal tangents."""
    frames = frames.clone()
    frames[7, 1] = frames[7, 0]
    return frames


def outputs(o: Operators, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    network = DiffusionNet(3, 5, width=8, blocks=2, **options).eval()
    return network(torch.linspace(-1, 1, 3 * o.num_vertices).reshape(-1, 3), o)


CONVERSIONS: dict[str, Callable[[SparseMatrix], Any]] = {
    "own": lambda m: m,
    "scipy-csr": lambda m: m.to_scipy(),
    "scipy-coo": lambda m: scipy.sparse.coo_matrix(m.to_scipy()),
    "torch-csr": lambda m: m.to_torch(),
    "torch-coo": lambda m: m.to_torch().to_sparse_coo(),
    "torch-dense": lambda m: m.to_torch().to_dense(),
    "numpy": lambda m: m.to_scipy().toarray(),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_all_parts_give_the_same_operators(expected: Operators, convert: Callable[[SparseMatrix], Any]) -> None:
    parts = parts_of(expected)
    for name in ("laplacian", "grad_x", "grad_y"):
        parts[name] = convert(parts[name])
    assert_same(Operators.from_parts(**parts), expected)
    order = ("frames", "mass", "laplacian", "evals", "evecs", "grad_x", "grad_y")
    found = Operators.from_reference(tuple(parts[name] for name in order), parts["faces"])
    assert_same(found, expected)
    for options in ({}, {"diffusion": "implicit"}, {"attention_heads": 2}, {"outputs_at": "faces"}):
        assert torch.equal(outputs(found, **options), outputs(expected, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrices_in_half_precision(dtype: torch.dtype, expected: Operators) -> None:
    """SciPy has neither dtype. The values are those of the same matrices in float64."""
    parts = parts_of(expected)
    halves = {name: parts[name].to(dtype) for name in ("laplacian", "grad_x", "grad_y")}
    exact = Operators.from_parts(**parts | {name: half.to_dense().double() for name, half in halves.items()})
    for name in ("own", "torch-csr", "torch-dense"):
        given = {part: CONVERSIONS[name](half) for part, half in halves.items()}
        assert_same(Operators.from_parts(**parts | given), exact)


def test_masses_of_any_kind(expected: Operators) -> None:
    masses = expected.mass.double().numpy()
    diagonal = scipy.sparse.diags(masses)
    sparse = torch.sparse_coo_tensor(np.stack([np.arange(len(masses))] * 2), masses, diagonal.shape)
    same = (masses.tolist(), diagonal, diagonal.tocsr(), diagonal.toarray(), sparse, sparse.to_sparse_csr())
    for mass in (masses, *same):
        assert_same(Operators.from_parts(**parts_of(expected) | {"mass": mass}), expected)
    laplacian = matrix(expected.laplacian)
    np.testing.assert_array_equal(eigenbasis(laplacian, diagonal, 4)[0], eigenbasis(laplacian, masses, 4)[0])


def test_an_own_cotangent_laplacian(mesh: tuple[np.ndarray, np.ndarray], expected: Operators) -> None:
    laplacian, mass = cotangents(*mesh)
    verts, faces = mesh
    found = Operators.from_parts(mass=mass, laplacian=laplacian, verts=verts, faces=faces, k=12)
    assert_sound(found, 12)
    solved = {name: getattr(expected, name) for name in ("mass", "laplacian", "evals", "evecs")}
    assert_same(replace(found, **solved), expected)
    assert relative(found.mass, expected.mass) < 1e-6
    assert relative(found.evals, expected.evals) < 1e-5
    assert relative(outputs(found).detach(), outputs(expected).detach()) < 1e-3
    pairs = {"evals": found.evals[0], "evecs": found.evecs}
    assert_same(Operators.from_parts(mass=mass, laplacian=laplacian, verts=verts, faces=faces, **pairs), found)


def test_a_graph_laplacian_without_faces(mesh: tuple[np.ndarray, np.ndarray]) -> None:
    """The gradient is fitted to the edges of the graph."""
    verts, faces = mesh
    weights = one_ring(faces, len(verts)) - scipy.sparse.eye(len(verts))
    laplacian = scipy.sparse.diags(np.asarray(weights.sum(axis=1)).ravel()) - weights
    found = Operators.from_parts(mass=np.ones(len(verts)), laplacian=laplacian, verts=torch.tensor(verts), k=6)
    assert_sound(found, 6)
    assert len(found.faces) == 0
    assert found.gradient.pattern.nnz == laplacian.nnz
    assert outputs(found).isfinite().all()
    degrees = laplacian.diagonal() ** -0.5
    normalized = scipy.sparse.diags(degrees) @ laplacian @ scipy.sparse.diags(degrees)
    parts = {"mass": np.ones(len(verts)), "laplacian": normalized, "verts": verts}
    with pytest.raises(ValueError, match=r"rows of laplacian should sum to 0, but .* Pass evals and evecs"):
        Operators.from_parts(**parts, k=6)
    evals, evecs = scipy.sparse.linalg.eigsh(normalized, 6, sigma=-1e-6)
    assert Operators.from_parts(**parts, evals=evals, evecs=evecs).k == 6


@pytest.mark.parametrize("cloud", [False, True])
def test_frames_of_a_gradient(mesh: tuple[np.ndarray, np.ndarray], expected: Operators, cloud: bool) -> None:
    """The gradient is given in frames that are turned about the normals. They are found from it."""
    verts, faces = mesh
    turn = torch.linspace(0, 6, len(verts))
    cos, sin = torch.cos(turn), torch.sin(turn)
    x, y, normal = expected.frames.unbind(1)
    frames = torch.stack([cos[:, None] * x + sin[:, None] * y, cos[:, None] * y - sin[:, None] * x, normal], 1)
    grad_x, grad_y = (scipy.sparse.csr_matrix(matrix(expected.gradient, i)) for i in range(2))
    c, s = scipy.sparse.diags(cos.double().numpy()), scipy.sparse.diags(sin.double().numpy())
    parts = parts_of(expected) | {"grad_x": c @ grad_x + s @ grad_y, "grad_y": c @ grad_y - s @ grad_x}
    del parts["frames"]
    found = Operators.from_parts(**parts | {"verts": verts, "faces": None if cloud else faces})
    cosine = (found.frames * frames).sum(-1).min()
    assert cosine > (0.95 if cloud else 1 - 1e-6)  # the normals of clouds are estimated


def test_gradients_of_two_patterns(expected: Operators) -> None:
    """SciPy drops zeros, so the patterns of both components can differ. Rows without entries keep the diagonal."""
    grad_x, grad_y = (scipy.sparse.lil_matrix(matrix(expected.gradient, i)) for i in range(2))
    grad_x[0], grad_y[1], grad_y[5] = 0, 0, 0
    grad_x[5] = 0
    found = Operators.from_parts(**parts_of(expected) | {"grad_x": grad_x.tocsr(), "grad_y": grad_y})
    for i, given in enumerate((grad_x, grad_y)):
        assert abs(matrix(found.gradient, i) - given).max() < 1e-6 * abs(given).max()
    assert found.gradient.pattern.row_lengths[5] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"laplacian": -matrix(p["laplacian"])}, "positive semi-definite.*pass -laplacian .*libigl"),
        (lambda p: {"laplacian": scipy.sparse.diags(1 / p["mass"].numpy()) @ matrix(p["laplacian"])}, "symmetric, but"),
        (lambda p: {"laplacian": matrix(p["laplacian"])[1:]}, r"should have shape \(162, 162\), shape is \(161, 162\)"),
        (lambda p: {"laplacian": matrix(p["laplacian"]) * np.nan}, "Laplacian has entries that are not finite"),
        (lambda p: {"laplacian": p["mass"]}, r"laplacian should be a matrix \(V, V\), shape is \(162,\)"),
        (lambda p: {"laplacian": None}, r"laplacian should be a matrix \(V, V\) of SciPy.*got NoneType"),
        (lambda p: {"mass": p["mass"] * torch.nan}, r"162 are not; the first is mass\[0\] = nan"),
        (lambda p: {"mass": -p["mass"]}, "masses should be finite and at least 0, but 162 are not"),
        (lambda p: {"mass": 0 * p["mass"]}, "mass should be positive .* 162 masses are 0"),
        (lambda p: {"mass": abs(matrix(p["laplacian"]))}, r"entries beside the diagonal\. Lump it: .*sum\(axis=1\)"),
        (lambda p: {"mass": p["mass"][:, None]}, r"vector \(V,\) or a diagonal matrix \(V, V\), shape is \(162, 1\)"),
        (lambda p: {"evals": p["evals"][1:]}, r"evecs should have shape \(162, 11\), shape is \(162, 12\)"),
        (lambda p: {"evals": p["evals"][None]}, r"evals should have shape \(K,\), shape is \(1, 12\)"),
        (lambda p: {"evecs": p["evecs"][1:]}, r"evecs should have shape \(162, 12\), shape is \(161, 12\)"),
        (lambda p: {"evecs": 2 * p["evecs"]}, "ΦᵀMΦ differs from I by up to 3, more than 0.001"),
        (lambda p: {"evecs": p["evecs"].flip(0)}, "ΦᵀMΦ differs from I"),
        (lambda p: {"evecs": p["evecs"] * torch.inf}, "evecs has entries that are not finite"),
        (lambda p: {"evals": p["evals"].flip(0)}, "evals should be at least 0 and ascend"),
        (lambda p: {"evals": -p["evals"].flip(0)}, "evals should be at least 0 and ascend"),
        (lambda p: {"evals": p["evals"].numpy() + 0j}, r"evals are not an array of numbers \(they are complex\)"),
        (lambda p: {"mass": p["mass"].numpy() + 0j}, r"masses are not an array of numbers \(they are complex\)"),
        (lambda p: {"evals": 100 * p["evals"]}, r"be eigenpairs, L φ = λ M φ.* evals\[11\] is 1707.*φᵀLφ .* is 17\.07"),
        (lambda p: {"evals": 0 * p["evals"]}, r"accurate only to 0\.76, not to 0\.01; evals\[11\] is 0, and φᵀLφ"),
        (lambda p: {"evals": p["evals"].index_add(0, torch.tensor([0]), torch.ones(1))}, r"evals\[0\] is 1, and φᵀLφ"),
        (lambda p: {"laplacian": indefinite(p)}, "positive semi-definite, but .* has eigenvalues down to -35.4"),
        (lambda p: {"laplacian": indefinite(p), "evals": None, "evecs": None}, "has eigenvalues down to -35.4"),
        (lambda p: {"laplacian": indefinite(p, 1.65), "evals": None, "evecs": None}, r"down to -1\.03"),
        (lambda p: {"frames": 0 * p["frames"]}, r"right-handed and orthonormal.* 162 are not.*frames\[0\] = \[\[0\.0"),
        (lambda p: {"frames": 1.01 * p["frames"]}, "frames should be right-handed and orthonormal"),
        (lambda p: {"frames": p["frames"].flip(1)}, "frames should be right-handed and orthonormal"),
        (lambda p: {"frames": skewed(p["frames"])}, r"but 1 are not; the first is frames\[7\] = \[\["),
        (lambda p: {"evals": None}, "evecs is given without evals; pass both, or neither"),
        (lambda p: {"grad_y": None}, "grad_x is given without grad_y; pass both, or neither"),
        (lambda p: {"grad_x": None, "grad_y": None}, r"needs a gradient: pass grad_x and grad_y .* or verts \(V, 3\)"),
        (lambda p: {"frames": None}, r"needs the tangent frames .* pass frames \(V, 3, 3\), or verts"),
        (lambda p: {"frames": p["frames"][:, :2]}, r"frames should have shape \(162, 3, 3\), shape is \(162, 2, 3\)"),
        (lambda p: {"grad_x": p["evecs"]}, r"grad_x should have shape \(162, 162\), shape is \(162, 12\)"),
        (lambda p: {"grad_y": scipy.sparse.diags(np.full(162, np.inf))}, "grad_y has entries that are not finite"),
        (lambda p: {"grad_x": matrix(p["grad_x"]) * 1j}, r"grad_x should be real.*grad_x=G\.real and grad_y=G\.imag"),
        (lambda p: {"faces": p["faces"] + 1}, "from_parts: face .* vertex indices run from 0 to 161"),
        (lambda p: {"verts": np.zeros((161, 3)), "faces": None}, "there are 161 verts, but 162 masses"),
    ],
)
def test_wrong_parts(expected: Operators, change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    parts = parts_of(expected)
    refused(ValueError, message, Operators.from_parts, **parts | change(parts))


def test_wrong_tuples(expected: Operators) -> None:
    for wrong, found in ((expected, "Operators"), ((expected.mass,), "1 items")):
        with pytest.raises(ValueError, match=rf"frames, mass, L, evals, evecs, gradX and gradY, got {found}"):
            Operators.from_reference(wrong)


WRONG_TYPES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("laplacian", lambda x: x.to_torch().to_sparse_coo(), r"got Tensor of torch.sparse_coo; Operators\.from_parts"),
    ("laplacian", lambda x: None, "laplacian should be a SparseMatrix, got NoneType"),
    ("ptr", lambda x: x.tolist(), "ptr should be a tensor, got list; convert it with torch.tensor"),
    ("ptr", lambda x: x.float(), "ptr should be int32 or int64, got torch.float32"),
    ("mass", lambda x: None, "mass should be a tensor, got NoneType"),
    ("evecs", lambda x: x.numpy(), "evecs should be a tensor, got ndarray"),
    ("faces", lambda x: x.float(), "faces should be int32 or int64, got torch.float32"),
    ("faces", lambda x: None, "faces should be a tensor, got NoneType"),
    ("neighborhood", lambda x: torch.zeros(3), "neighborhood should be a Pattern, got Tensor"),
    ("joined", lambda x: torch.zeros(3), "joined should be int32 or int64"),
]
WRONG_SHAPES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("laplacian", lambda x: SparseMatrix(x.pattern, x.values[None]), r"laplacian\.values should have shape"),
    ("gradient", lambda x: SparseMatrix(x.pattern, x.values[0]), r"gradient\.values should have shape \(2, "),
    ("gradient", lambda x: SparseMatrix.from_scipy(scipy.sparse.eye(3)), r"\(162, 162\), shape is \(3, 3\)"),
    ("ptr", lambda x: x[:0], "ptr should have one value more than there are meshes, got none"),
    ("mass", lambda x: x[:, None], r"mass should have shape \(V,\), shape is \(162, 1\)"),
    ("evals", lambda x: x[0], r"evals should have shape \(1, K\), shape is \(12,\)"),
    ("evals", lambda x: x.repeat(2, 1), r"evals should have shape \(1, K\), shape is \(2, 12\)"),
    ("evecs", lambda x: x[1:], r"evecs should have shape \(162, 12\), shape is \(161, 12\)"),
    ("evecs", lambda x: x.to("meta"), "evecs should be on cpu, it is on meta"),
    ("frames", lambda x: x[:, 0], r"frames should have shape \(162, 3, 3\)"),
    ("faces", lambda x: x.T, r"faces should have shape \(F, 3\), shape is \(3, 320\)"),
    ("face_ptr", lambda x: x[1:], r"face_ptr should have shape \(2,\), shape is \(1,\)"),
    ("gradient_evecs", lambda x: torch.zeros(2, 162, 3), r"should have shape \(2, 162, 12\)"),
]


@pytest.mark.parametrize(
    ("error", "name", "change", "message"),
    [*((TypeError, *each) for each in WRONG_TYPES), *((ValueError, *each) for each in WRONG_SHAPES)],
)
def test_wrong_fields(expected: Operators, error: type[Exception], name: str, change: Any, message: str) -> None:
    refused(error, message, replace, expected, **{name: change(getattr(expected, name))})


def test_a_laplacian_in_single_precision_is_solved(expected: Operators) -> None:
    """Its rows sum to 0 up to rounding only, and slivers have entries that are much larger than the others."""
    laplacian = matrix(expected.laplacian)
    sliver = np.zeros((162, 162))
    sliver[np.ix_([0, 1], [0, 1])] = np.array([[1, -1], [-1, 1]]) * 1e6 / 3
    rounded = scipy.sparse.csr_matrix((laplacian + sliver).astype(np.float32))
    parts = parts_of(expected) | {"laplacian": rounded, "evals": None, "evecs": None}
    exact = eigenbasis(laplacian + sliver, expected.mass.double().numpy(), 12)[0]
    np.testing.assert_allclose(Operators.from_parts(**parts, k=12).evals[0], exact, rtol=1e-3, atol=1e-3)


def test_a_basis_in_half_precision_is_accepted(expected: Operators) -> None:
    half = {"evecs": expected.evecs.half(), "frames": expected.frames.half()}
    assert torch.equal(Operators.from_parts(**parts_of(expected) | half).evecs, half["evecs"].float())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of degenerate faces
@pytest.mark.parametrize(("seed", "k"), [(36, 4), (53, 16)])
def test_a_rounded_laplacian_is_accepted(seed: int, k: int) -> None:
    """Rounding to single precision makes the first one indefinite, and changes eigenvectors of the second by 0.1 %."""
    operators = precompute(degraded_sphere(seed), k=k, laplacian="cotan")
    assert_same(Operators.from_parts(**parts_of(operators)), replace(operators, joined=None))
    assert Operators.from_parts(**parts_of(operators) | {"evals": None, "evecs": None}, k=k).k == k


def test_pairs_of_the_shifted_laplacian() -> None:
    """The original adds a shift before it solves. Vertices without faces then have eigenvalues above 0."""
    ball = trimesh.creation.icosphere(1)
    verts = np.concatenate([ball.vertices, [[2.0, 0, 0], [0, 2, 0]]])
    original = precompute((verts, ball.faces), k=44, operators="original")
    assert (original.evecs[42:] != 0).any()
    assert_same(Operators.from_parts(**parts_of(original)), original)
