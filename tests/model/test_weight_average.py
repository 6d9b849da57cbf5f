"""The average of weights belongs to the parameters that the network had when it was made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from diffnet import DiffusionNet, WeightAverage


@pytest.mark.parametrize(
    ("change", "fault"),
    {
        "replaced": (lambda model: setattr(model, "last", nn.Linear(8, 4)), r"^last\.weight was replaced"),
        "inside": (lambda model: setattr(model.blocks[0].mlp, "2", nn.Linear(8, 8)), r"^blocks\.0\.mlp\.2\.weight was"),
        "added": (lambda model: model.blocks.append(nn.Linear(8, 8)), r"^blocks\.1\.weight was replaced, added"),
        "moved": (lambda model: model.double(), "is now torch.float64 on cpu"),
    }.values(),
)
def test_changes_of_the_network(change: Callable[[DiffusionNet], object], fault: str) -> None:
    model = DiffusionNet(3, 4, width=8, blocks=1)
    average = WeightAverage(model, 0.9)
    average.update()
    model.blocks[0].mlp.dropout = nn.Dropout(0.1)  # no parameter
    model.first.requires_grad_(False)
    average.update()
    average.write()
    assert torch.equal(average.network.first.weight, model.first.weight)  # not rounded
    change(model)
    for work in (average.update, average.write):
        with pytest.raises(RuntimeError, match=fault):
            work()
