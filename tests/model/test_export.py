"""Networks under `torch.export`, with an open number of vertices."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import trimesh
from torch import Tensor

from diffnet import DiffusionNet, Operators, collate, precompute

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    """Surfaces of 42, 162 and 192 vertices, whose edges are known."""
    shapes = (trimesh.creation.icosphere(1), trimesh.creation.icosphere(2), trimesh.creation.torus(1, 0.3, 16, 12))
    operators = [precompute(shape, k=8) for shape in shapes]
    for each in operators:
        _ = each.edges
    return operators


def features(operators: Operators) -> Tensor:
    return operators.normals.contiguous()


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 2},
        {"outputs_at": "global_mean"},
        {"outputs_at": "faces"},
        {"outputs_at": "edges"},
        {"attention_heads": 2},
        {"gradient": "spectral", "mlp_norm": "rms", "last_activation": torch.sigmoid},
        {"diffusion": "implicit"},
    ],
    ids=lambda options: " ".join(options),  # names alone, because the text of a function differs between processes
)
def test_export_with_operators(
    meshes: list[Operators], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "torch.export.dynamic_shapes")
    torch.manual_seed(0)
    network = DiffusionNet(3, 5, **{"width": 16, "blocks": 1, **options}).eval()
    more = torch.export.AdditionalInputs()
    for operators in meshes[:2]:
        more.add((features(operators), operators))
    with torch.no_grad():
        exported = torch.export.export(network, (features(meshes[0]), meshes[0]), dynamic_shapes=more).module()
        for operators in meshes:
            expected = network(features(operators), operators)
            torch.testing.assert_close(exported(features(operators), operators), expected, rtol=1e-5, atol=1e-5)


def test_messages_of_what_cannot_be_exported(meshes: list[Operators]) -> None:
    batch = collate(meshes)
    with pytest.raises(ValueError, match="takes operators of one mesh, got a batch of 3"):
        torch.export.export(DiffusionNet(3, 5, width=8, blocks=1).eval(), (features(batch), batch))
    unread = precompute(trimesh.creation.icosphere(1), k=8)
    network = DiffusionNet(3, 5, width=8, blocks=1, outputs_at="edges").eval()
    with pytest.raises(ValueError, match=r"read operators\.edges once before"):
        torch.export.export(network, (features(unread), unread))
