"""Data, transforms, loaders and layers of PyTorch Geometric with operators."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from operator_checks import assert_same
from refusals import refused
from shapes import ellipsoid
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import Sequential, SimpleConv, global_mean_pool
from torch_geometric.utils import get_mesh_laplacian, to_dense_adj

from diffnet import DiffusionNet, DiffusionNetBlock, MeshError, Operators, collate, gradient, precompute
from diffnet.data import BODIES, LabeledMesh, Preprocessing, load_dataset, make_sample
from diffnet.data.pyg import AddOperators, DataWithOperators, from_data, pack_operators, to_data

pytestmark = pytest.mark.usefixtures("one_thread")

K = 12


def surfaces() -> list[Data]:
    """Four meshes of two sizes, with features at the vertices and a label of each mesh."""
    found = [to_data(ellipsoid(seed, 1 + seed % 2)) for seed in range(4)]
    for i, data in enumerate(found):
        data.x, data.y = torch.randn(data.num_nodes, 3), torch.tensor([i % 2])
    return found


@pytest.fixture
def data() -> list[Data]:
    """The surfaces with operators."""
    return [AddOperators(K)(each) for each in surfaces()]


def batch_of(data: list[Data], **options: Any) -> Any:
    (batch,) = DataLoader(data, batch_size=len(data), **options)
    return batch


@pytest.mark.parametrize("outputs_at", ["vertices", "faces", "edges", "global_mean"])
def test_a_batch_has_packed_operators(data: list[Data], outputs_at: Any) -> None:
    """Outputs and gradients of a network are those of `collate`."""
    batch, packed = batch_of(data), collate([precompute(each, k=K) for each in data])
    assert_same(batch.operators, packed)
    assert torch.equal(batch.face.T, batch.operators.faces)
    assert torch.equal(batch.ptr, batch.operators.ptr)
    model = DiffusionNet(3, 5, width=8, blocks=2, dropout=0.0, outputs_at=outputs_at)
    results = [model(x, o) for x, o in ((batch.x, batch.operators), (torch.cat([each.x for each in data]), packed))]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in results]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_batch_is_taken_apart(data: list[Data]) -> None:
    batch = batch_of(data)
    for unpacked in (True, False):
        for found, expected in zip(batch.to_data_list(), data, strict=True):
            assert type(found) is DataWithOperators
            assert torch.equal(found.x, expected.x)
            assert torch.equal(found.face, expected.face)
            assert_same(found.operators, expected.operators)
        if unpacked:
            assert len(batch.operators) == 4  # packs them
    assert_same(batch_of([batch, batch]).operators, collate([d.operators for d in [*data, *data]]))


def test_a_batch_moves(data: list[Data]) -> None:
    """Operators move with the tensors, and a pickled batch, as worker processes send it, keeps them."""
    batch = batch_of(data)
    again = pickle.loads(pickle.dumps(batch))
    assert_same(again.operators, batch.operators)
    moved = again.to("meta")
    assert moved.x.is_meta
    assert moved.operators.device.type == "meta"
    assert moved.operators.laplacian.pattern.stored_indices.is_meta
    for pair, own in zip(DataLoader(data, batch_size=2, num_workers=2), (data[:2], data[2:]), strict=True):
        assert_same(pair.operators, collate([d.operators for d in own]))


@pytest.mark.gpu
def test_a_batch_moves_to_a_gpu(data: list[Data]) -> None:
    batch = batch_of(data, pin_memory=True).to("cuda")
    assert_same(batch.operators, collate([d.operators for d in data]).to("cuda"))


def test_layers_of_both_libraries_in_one_network() -> None:
    """A network that a user of PyTorch Geometric would write learns to tell long shapes from round ones."""
    shapes = [ellipsoid(seed) for seed in range(6)]
    data = [to_data(shape) for shape in shapes]
    for each in data:
        each.y = (each.pos.amax(0).max() > 1.3).long()[None]
    assert 0 < sum(int(each.y) for each in data) < 6
    model = Sequential(
        "x, operators, batch",
        [
            (torch.nn.Linear(3, 16), "x -> x"),
            (DiffusionNetBlock(16, dropout=0.0), "x, operators -> x"),
            (global_mean_pool, "x, batch -> x"),
            (torch.nn.Linear(16, 2), "x -> x"),
        ],
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader([AddOperators(K)(each) for each in data], batch_size=3, shuffle=True)
    losses = []
    for _ in range(30):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch.pos.abs(), batch.operators, batch.batch), batch.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) / 2


def test_edge_weights_are_the_matrices(data: list[Data]) -> None:
    """Message passing with them is the product with the Laplacian, and the gradient, which is not symmetric."""
    batch = batch_of(data)
    conv = SimpleConv(aggr="sum")
    operators, x = batch.operators, batch.x
    edges, weights = operators.laplacian.to_edges()
    torch.testing.assert_close(conv(x, edges, weights), operators.laplacian @ x, rtol=1e-5, atol=1e-5)
    edges, weights = operators.gradient.to_edges()
    assert weights.shape == (edges.shape[1], 2)
    products = torch.stack([conv(x, edges, weight) for weight in weights.T])
    torch.testing.assert_close(products, gradient(x, operators), rtol=1e-5, atol=1e-5)
    order = torch.randperm(operators.num_vertices)
    shuffled = operators.gradient.with_row_order(order)
    dense = [torch.zeros(2, *operators.gradient.pattern.shape) for _ in range(2)]
    for found, matrix in zip(dense, (operators.gradient, shuffled), strict=True):
        (columns, rows), weights = matrix.to_edges()
        found[:, rows, columns] = weights.T
    assert torch.equal(*dense)


def test_edge_weights_against_pytorch_geometric() -> None:
    """Its Laplacian has the other sign."""
    data = to_data(ellipsoid(1))
    operators = AddOperators(K, laplacian="cotan")(data).operators
    expected = to_dense_adj(*_by_index(get_mesh_laplacian(data.pos.double(), data.face)))[0]
    found = to_dense_adj(*_by_index(operators.laplacian.to_edges()))[0]
    torch.testing.assert_close(found.double(), -expected, rtol=1e-5, atol=1e-5)


def _by_index(edges: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, None, torch.Tensor]:
    return edges[0], None, edges[1]


def test_transforms_of_pytorch_geometric() -> None:
    """Before this one: positions that they change, and points whose `normal` they give."""
    data = to_data(ellipsoid(1, 2))
    scaled = T.Compose([T.NormalizeScale(), AddOperators(K)])(data)
    expected = precompute((scaled.pos, data.face.T), k=K)
    assert_same(scaled.operators, expected)
    assert "operators" not in data  # the transform changes a copy
    points = T.Compose([T.SamplePoints(200, include_normals=True), AddOperators(K)])(data)
    assert points.face is None
    cosines = torch.cosine_similarity(points.operators.normals, points.normal)
    torch.testing.assert_close(cosines, torch.ones(200), rtol=0, atol=1e-5)
    assert repr(AddOperators(8, join="never")) == "AddOperators(k=8, join='never')"


def test_normals_of_data() -> None:
    """Points use them, meshes when they are asked to, as `precompute` says of the normals of a file."""
    mesh = ellipsoid(0)
    towards = mesh.verts / np.linalg.norm(mesh.verts, axis=1, keepdims=True)
    data = to_data(mesh)
    data.normal = torch.from_numpy(-3 * towards).float()
    own = precompute(mesh, k=K)
    assert_same(precompute(data, k=K), own)
    expected = precompute(mesh, k=K, normals=-towards)
    torch.testing.assert_close(precompute(data, k=K, normals="file").frames, expected.frames)
    del data.face
    expected = precompute(mesh.verts, k=K, normals=-towards)
    torch.testing.assert_close(precompute(data, k=K).frames, expected.frames)
    assert not torch.allclose(precompute(data, k=K, normals="geometry").frames, expected.frames, atol=0.1)
    data.normal[4:] = torch.nan
    assert precompute(data, k=K).frames.isfinite().all()
    data.normal = data.normal[:7]
    refused(MeshError, r"Data object: normals should have shape \(42, 3\), .* shape is \(7, 3\)", precompute, data, k=K)


def test_round_trip() -> None:
    mesh = load_dataset(BODIES, labels_at="vertices").train[3]
    labeled = LabeledMesh("mesh", mesh.mesh, mesh.labels, {"x": np.random.default_rng(0).random((len(mesh.labels), 2))})
    data = to_data(labeled)
    assert (data.pos.dtype, data.face.shape, data.y.dtype) == (torch.float32, mesh.mesh.faces.T.shape, torch.int64)
    assert data.validate()
    found = from_data(data)
    np.testing.assert_array_equal(found.mesh.verts.astype(np.float32), mesh.mesh.verts.astype(np.float32))
    np.testing.assert_array_equal(found.mesh.faces, mesh.mesh.faces)
    np.testing.assert_array_equal(found.labels, labeled.labels)
    np.testing.assert_array_equal(found.arrays["x"], labeled.arrays["x"])
    assert list(found.arrays) == ["x"]
    sample = make_sample(found, Preprocessing(features="file:x", k=K))
    assert sample.features.shape == (data.num_nodes, 2)
    assert torch.equal(sample.labels, data.y)
    points = to_data(mesh.mesh.verts)
    assert points.face is None
    assert from_data(points).mesh.is_point_cloud
    for each in (points, to_data(mesh)):
        each.normal = torch.nn.functional.normalize(each.pos)
        torch.testing.assert_close(to_data(from_data(each)).normal, each.normal)
        assert list(from_data(each).arrays) == []


@pytest.mark.parametrize(
    ("y", "labels"),
    [
        (None, np.full(42, -1)),
        (3, np.array(3)),
        (torch.tensor([2], dtype=torch.uint8), np.array([2])),
        (torch.arange(42) > 5, np.arange(42) > 5),
        (torch.arange(42.0), np.arange(42.0)[:, None]),
        (torch.arange(84.0).reshape(42, 2), np.arange(84.0).reshape(42, 2)),
        (torch.tensor([[0.5, 1.5]], requires_grad=True), np.array([[0.5, 1.5]])),
    ],
    ids=["none", "number", "of mesh", "bool", "targets", "two targets", "targets of mesh"],
)
def test_labels(y: Any, labels: np.ndarray) -> None:
    data = to_data(ellipsoid(0))
    data.y = y
    found = from_data(data).labels
    np.testing.assert_array_equal(found, labels)
    assert found.dtype == (np.float32 if labels.dtype.kind == "f" else np.int64)


class Numbered(DataWithOperators):
    """A class of a user."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return 10 if key == "number" else super().__inc__(key, value, *args, **kwargs)


def test_own_classes() -> None:
    add = AddOperators(K)
    batch = batch_of([add(Numbered(**to_data(ellipsoid(i)).to_dict(), number=torch.tensor([i]))) for i in range(3)])
    assert batch.number.tolist() == [0, 11, 22]
    assert len(batch.operators) == 3

    class Own(Data):
        pass

    with pytest.raises(TypeError, match=r"data should be Data or DataWithOperators, got Own; let it inherit"):
        add(Own(**to_data(ellipsoid(0)).to_dict()))
    refused(TypeError, "got DataBatch; add operators before the DataLoader", add, batch_of([to_data(ellipsoid(0))] * 2))
    refused(MeshError, r"no positions \(`pos` is None\)", add, Data(x=torch.ones(4, 3)))
    refused(MeshError, "a batch of 3 meshes", from_data, batch)
    with pytest.raises(AttributeError, match="operators"):
        _ = DataWithOperators().operators
    assert not hasattr(DataWithOperators(), "operators")
    data = DataWithOperators(**to_data(ellipsoid(0)).to_dict())
    data.operators = precompute(ellipsoid(0), k=4)  # without the transform
    assert batch_of([data, data]).operators.k == 4


class Ellipsoids(InMemoryDataset):
    """A data set as users of PyTorch Geometric write it."""

    processed_file_names = "data.pt"

    def process(self) -> None:
        self.save([self.pre_transform(data) for data in surfaces()], self.processed_paths[0])


@pytest.mark.filterwarnings("error:Weights only load failed")  # it would run code from the file
def test_stored_data_sets(tmp_path: Path) -> None:
    for _ in range(2):  # makes it, reads it
        dataset = Ellipsoids(str(tmp_path), pre_transform=AddOperators(K))
        dataset.load(dataset.processed_paths[0])
        batch = next(iter(DataLoader(dataset, batch_size=3)))
        assert_same(batch.operators, collate([precompute(data, k=K) for data in surfaces()[:3]]))


def test_without_pytorch_geometric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "diffnet.data.pyg")
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(ImportError) as error:
        importlib.import_module("diffnet.data.pyg")
    assert str(error.value).startswith("diffnet.data.pyg needs PyTorch Geometric (")
    assert str(error.value).endswith("pip install 'diffnet[pyg]'")


def test_operators_in_other_attributes(data: list[Data]) -> None:
    """A second mesh in a `Data`, and meshes in `HeteroData`."""
    packed = collate([each.operators for each in data])
    for each in data:
        each.partner = each.operators
    assert_same(batch_of(data).to("cpu").partner, packed)
    samples = [HeteroData({"surface": {"pos": each.pos, "first": each.operators}}) for each in data]
    assert_same(pack_operators(batch_of(samples))["surface"].first, packed)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (T.RandomRotate(180), None),
        (T.Center(), None),
        (T.NormalizeScale(), "points of mesh 0 have moved"),
        (T.RandomJitter(0.01), "points of mesh 0 have moved"),
        (T.FixedPoints(20, replace=False), r"have \d+ vertices, pos has \d0 points; write AddOperators after"),
    ],
    ids=str,
)
def test_transforms_after_operators(transform: Any, message: str | None) -> None:
    """Operators of points that have moved or are dropped are refused, alone and in a batch."""
    data = [AddOperators(K)(to_data(ellipsoid(seed, 1))) for seed in range(2)]
    for read in (
        lambda: transform(data[0].clone()).operators,
        lambda: batch_of([transform(d) for d in data]).operators,
    ):
        if message is None:
            assert isinstance(read(), Operators)
        else:
            refused(ValueError, message, read)
