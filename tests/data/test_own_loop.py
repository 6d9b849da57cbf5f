"""An own training loop, as the README shows it."""

from __future__ import annotations

import re

import pytest
import torch
from rooms import ROOT
from shapes import ellipsoid
from torch import Tensor

from diffnet import DiffusionNet, precompute

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_loop_of_the_readme() -> None:
    """The code block runs as it stands, for labels at vertices."""
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S) if "loader" in b)
    assert len(code.splitlines()) <= 12
    meshes = [ellipsoid(seed, 2) for seed in range(3)]
    positions = [torch.from_numpy(m.verts).float() for m in meshes]
    steps: list[Tensor] = []

    def model(x: Tensor, o: object) -> Tensor:
        steps.append(x)
        out: Tensor = network(x, o)
        return out

    network = DiffusionNet(3, 2, width=8, blocks=1)
    names = {
        "torch": torch,
        "model": model,
        "operators": [precompute(m, k=8) for m in meshes],
        "positions": positions,
        "labels": [(x[:, 0] > 0).long() for x in positions],
        "mesh": meshes[0],
        "predicted": [0, 1, 2],
        "true": [0, 5, 7],
    }
    exec(code.replace("50_000", "400"), names)
    assert [len(x) for x in steps] == [324, 162]
    assert names["landmarks"].shape == (1, 64)  # type: ignore[attr-defined]
    assert names["errors"][0] == 0 < names["errors"].mean() < 1  # type: ignore[index, attr-defined]
    assert names["loss"].isfinite()  # type: ignore[attr-defined]
    turned = steps[1]
    assert not any(torch.allclose(turned, x, atol=1e-3) for x in positions)
    assert any(torch.allclose(turned.norm(dim=1), x.norm(dim=1), atol=1e-5) for x in positions)
