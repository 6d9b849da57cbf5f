"""Networks on another GPU than the current one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import trimesh
from kernel_accuracy import relative

from diffnet import DiffusionNet, collate, graphed, precompute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.mark.parametrize(
    ("options", "with_graphs"),
    [
        pytest.param({}, False, id="eager"),
        pytest.param({}, True, id="graphed"),
        pytest.param({"gradient": "sparse"}, False, id="sparse-eager"),
        pytest.param({"gradient": "sparse"}, True, id="sparse-graphed"),
        pytest.param({"diffusion": "implicit"}, False, id="implicit"),
        pytest.param({"attention_heads": 2}, False, id="attention"),
    ],
)
def test_training_steps_on_another_gpu_than_the_current_one(options: dict[str, Any], with_graphs: bool) -> None:
    """They give what plain PyTorch gives on the CPU, and leave the current device as it is.

    The second step launches kernels that the first one has compiled.
    """
    meshes = [trimesh.creation.icosphere(n) for n in (1, 2)]
    operators = collate([precompute(mesh, k=16) for mesh in meshes])
    features = torch.randn(operators.num_vertices, 3)
    plain = DiffusionNet(3, 5, width=16, blocks=2, dropout=0.0, initial_times="spread", backend="torch", **options)
    model = DiffusionNet(**plain.architecture | {"backend": "auto"})
    model.load_state_dict(copy.deepcopy(plain.state_dict()))
    model.to("cuda:1")
    if with_graphs:
        graphed(model, first_visits=0)
    expected = plain(features, operators)
    expected.square().mean().backward()
    with torch.cuda.device(0):
        there, x = operators.to("cuda:1"), features.to("cuda:1")
        for _ in range(2):
            model.zero_grad()
            out = model(x, there)
            out.square().mean().backward()
            assert torch.cuda.current_device() == 0
            assert relative(out.cpu(), expected.detach().double()) <= 1e-4
            for (name, found), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert found.grad is not None
                assert found.grad.device == torch.device("cuda:1")
                assert reference.grad is not None
                assert relative(found.grad.cpu(), reference.grad.double()) <= 1e-4, name
