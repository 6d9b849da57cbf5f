"""`Operators` as trees of tensors, and files of `torch.save`."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trimesh
from operator_checks import assert_same, tiny_operators
from torch.utils import _pytree as pytree

from diffnet.geometry import Operators, collate, precompute, with_k_ring

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", ["mesh", "batch", "all fields", "row order"])
def test_leaves_are_all_tensors(kind: str) -> None:
    mesh, *others = tiny_operators()
    order = torch.arange(mesh.num_vertices - 1, -1, -1)
    operators = {
        "mesh": mesh,
        "batch": collate([mesh, *others]),
        "all fields": with_k_ring(mesh.with_gradient_evecs(), 2),
        "row order": replace(mesh, laplacian=mesh.laplacian.with_row_order(order)),
    }[kind]
    leaves, structure = pytree.tree_flatten(operators)
    assert_same(pytree.tree_unflatten(leaves, structure), operators)
    assert_same(pytree.tree_map_only(torch.Tensor, torch.clone, operators), operators)
    shapes = pytree.tree_map_only(torch.Tensor, lambda x: x.shape, operators)  # no tensors
    assert shapes.mass == operators.mass.shape
    if kind != "all fields":  # other meshes have another structure only if they have other fields
        assert structure == pytree.tree_structure(precompute(trimesh.creation.box(), k=2))
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(operators)[0]]
    assert {".mass", ".laplacian['values']", ".gradient['indptr']"} <= set(paths)


def test_edges_stay_known() -> None:
    mesh = tiny_operators()[0]
    assert torch.equal(pytree.tree_map(lambda x: x, mesh).edges, mesh.edges)
    edges = pytree.tree_leaves(mesh)[-1]
    assert torch.equal(edges, mesh.edges)


def test_saved_operators_load_as_weights(tmp_path: Path) -> None:
    batch = collate(tiny_operators()[:3])
    _ = batch.edges
    torch.save({"operators": batch}, tmp_path / "operators.pt")
    loaded = torch.load(tmp_path / "operators.pt", weights_only=True)["operators"]
    assert_same(loaded, batch)
    assert torch.equal(loaded.edges, batch.edges)


def test_without_diffnet_the_error_says_what_to_import(tmp_path: Path) -> None:
    torch.save(tiny_operators()[0], tmp_path / "operators.pt")
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # as in a process that has not imported diffnet
    try:
        with pytest.raises(pickle.UnpicklingError, match=r"diffnet\.geometry\.operators\.Operators"):
            torch.load(tmp_path / "operators.pt", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(known)


def test_original_tuple_and_back() -> None:
    for kind in ("diffnet", "original"):
        operators = precompute(trimesh.creation.icosphere(2), k=12, operators=kind)
        parts = operators.to_reference()
        assert [tuple(part.shape) for part in parts] == [(162, 3, 3), (162,), (162, 162), (12,), (162, 12)] + [
            (162, 162)
        ] * 2
        assert all(parts[i].layout == torch.sparse_coo and parts[i].is_coalesced() for i in (2, 5, 6))
        assert_same(Operators.from_reference(parts, operators.faces), operators)
    with pytest.raises(ValueError, match=r"holds one mesh, got 2; write \[o\.to_reference\(\) for o in operators\]"):
        collate([operators, operators]).to_reference()
