"""Own training loops, as docs/python.md shows them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from rooms import ROOT
from shapes import ellipsoid
from torch import Tensor

from diffnet import DiffusionNet, precompute

pytestmark = pytest.mark.usefixtures("one_thread")


def blocks(page: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_loop_with_a_loader() -> None:
    """The code runs as it stands, for labels at vertices."""
    (code,) = (b for b in blocks("docs/python.md") if "farthest_points" in b)
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


def test_the_loop_with_an_indexed_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The code runs on a CPU, with fewer eigenpairs, smaller batches and no worker processes."""
    monkeypatch.chdir(tmp_path)
    Path("scans").mkdir()
    for seed in range(4):
        mesh = ellipsoid(seed, 2)
        trimesh.Trimesh(mesh.verts, mesh.faces, process=False).export(f"scans/{seed}.ply")
        np.savetxt(f"scans/{seed}.txt", mesh.verts[:, 0] > 0, fmt="%d")
    (code,) = (b for b in blocks("docs/python.md") if "index_dataset" in b)
    names = {"torch": torch, "model": DiffusionNet(16, 2, width=8, blocks=1), "__name__": "__main__"}
    code = (
        code.replace("50_000", "400")
        .replace("k=128", "k=16")
        .replace('"cuda"', '"cpu"')
        .replace("workers=2", "workers=0")
    )
    exec(code, names)
    assert names["loss"].isfinite()  # type: ignore[attr-defined]
