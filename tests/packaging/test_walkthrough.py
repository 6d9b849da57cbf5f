"""The walkthrough in CONTRIBUTING.md that adds a descriptor."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from rooms import ROOT
from shapes import ellipsoid

from diffnet import geometry
from diffnet.data import FEATURE_CHANNELS, Sample, augmented, feature_names, input_features
from diffnet.data.features import descriptor
from diffnet.geometry import descriptors, make_mesh, precompute

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_new_descriptor_is_a_feature_also_of_scaled_meshes(
    monkeypatch: pytest.MonkeyPatch, sphere: trimesh.Trimesh
) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(r"^## Walkthrough: add a descriptor\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    function, entry, test = (dedent(block) for block in re.findall(r"```python\n(.*?)```", section[1], re.DOTALL))
    room: dict[str, Any] = dict(vars(descriptors))
    exec(function, room)
    monkeypatch.setattr(geometry, "gps_norm", room["gps_norm"], raising=False)
    for name, kind in eval(f"{{{entry}}}", dict(vars(feature_names))).items():
        monkeypatch.setitem(feature_names.KINDS, name, kind)
        monkeypatch.setitem(FEATURE_CHANNELS, name, kind.channels)
    room |= {"trimesh": trimesh, "precompute": precompute, "np": np}
    exec(test, room)
    room["test_gps_norm_against_a_loop"](sphere)

    def sample(factor: float, parts: str) -> Sample:
        mesh = make_mesh(ellipsoid(0).verts * factor, ellipsoid(0).faces)
        operators = precompute(mesh, k=10)
        return Sample(("",), input_features(mesh, operators, parts), torch.zeros(42, dtype=torch.int64), operators)

    for parts in ("gps-norm", "xyz+gps-norm"):
        expected = sample(1.25, parts).features
        found = augmented(sample(1.0, parts), parts, factors=torch.tensor([1.25])).features
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gps", "xyz", "file:own", ""])
def test_other_names_are_no_descriptors(name: str) -> None:
    with pytest.raises(ValueError, match=f"name should be one of hks, log-hks, wks.*, got '{name}'"):
        descriptor(name, precompute(ellipsoid(0), k=4))
