"""Augmentation in training: its options, what is drawn in an epoch, resumed runs, and captured steps."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from graph_emulator import EmulatedGraph
from rich.console import Console

from diffnet.data import LabeledMesh, LabeledMeshes, Sample, collate_samples, make_sample
from diffnet.geometry import make_mesh
from diffnet.geometry.errors import OptionError
from diffnet.train.checkpoint import build_model, load_checkpoint, restore_model, save_checkpoint
from diffnet.train.options import TrainOptions
from diffnet.train.run import run_training
from diffnet.train.steps.augmentation import draw_changes, draw_variants
from diffnet.train.steps.step import TrainingStep, make_optimizer
from diffnet.train.tasks.task import task_named

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

CPU = torch.device("cpu")
ALL: dict[str, Any] = {
    "rotate_about": "z",
    "scale_range": 1.5,
    "jitter": 0.01,
    "mirror": True,
    "mirror_labels": "1,0",
    "cut": 0.5,
    "variants": 2,
}


def balls(train: int = 3, test: int = 1) -> LabeledMeshes:
    """Stretched spheres whose lower and upper halves have different labels."""
    items = []
    for seed in range(train + test):
        ball = trimesh.creation.icosphere(1 + seed % 2)
        verts = np.array(ball.vertices) * np.random.default_rng(seed).uniform(0.6, 1.4, 3)
        mesh = make_mesh(verts, ball.faces, name=f"ball {seed}")
        items.append(LabeledMesh(mesh.name, mesh, (verts[:, 2] > 0).astype(np.int64)))
    return LabeledMeshes(items[:train], items[train:], ["low", "high"], "vertices")


def options(**given: Any) -> TrainOptions:
    small = {"features": "xyz+hks", "k": 8, "width": 8, "blocks": 1, "epochs": 3, "dropout": 0.0}
    return TrainOptions(**{**small, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rotate_about": "w"}, "rotate_about should be one of any, x, y, z, got 'w'"),
        ({"rotate_about": "z", "features": "hks"}, "rotate_about needs features with xyz, normals or vector:NAME"),
        ({"rotate_about": "z", "rotate": False}, "rotate_about should be any where nothing is rotated, got 'z'"),
        ({"scale_range": 0.5}, "scale_range should be from 1 to 10, got 0.5"),
        ({"scale_range": float("nan")}, "scale_range should be from 1"),
        ({"jitter": -0.1}, "jitter should be at least 0 and below 1, got -0.1"),
        ({"jitter": 0.1, "features": "normals"}, "jitter needs features with xyz, got 'normals'"),
        ({"cut": 1.0}, "cut should be at least 0 and below 1, got 1.0"),
        ({"decimate": -1.0}, "decimate should be at least 0 and below 1"),
        ({"variants": 0}, "variants should be at least 1, got 0"),
    ],
)
def test_bad_options_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        options(**given)


def test_nothing_is_changed_by_default() -> None:
    sample = make_sample(balls().train[0], options().preprocessing)
    changes = draw_changes(5, options(rotate=False), CPU)
    assert changes.made(sample, 0) is sample
    assert changes.rotations_of(0, 2) is None
    assert options().mesh_variants.count == 0
    assert draw_variants([["a"], ["b"]]) == ["a", "b"]


def test_older_checkpoints_have_no_augmentation(tmp_path: Path) -> None:
    model = build_model(options(), ["low", "high"], "vertices")
    optimizer = make_optimizer(model, options(), CPU)
    stored = {name: value for name, value in options().as_dict().items() if name not in {*ALL, "decimate"}}
    save_checkpoint(
        tmp_path / "last.pt",
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "history": [],
            "best": 0.0,
            "options": stored,
            "label_names": ["low", "high"],
            "labels_at": "vertices",
            "data": "",
        },
    )
    assert restore_model(load_checkpoint(tmp_path / "last.pt"))[1] == options()


def test_what_is_drawn() -> None:
    torch.manual_seed(0)
    changes = draw_changes(2000, options(**ALL), CPU)
    assert changes.rotations is not None
    assert changes.mirror is not None
    assert changes.factors is not None
    torch.testing.assert_close(changes.rotations[:, :, 2], torch.tensor([0.0, 0, 1]).expand(2000, 3))
    torch.testing.assert_close(torch.linalg.det(changes.rotations), torch.ones(2000))
    assert torch.equal(changes.rotations_of(3, 2), changes.rotations[3:5])  # type: ignore[arg-type]
    assert changes.rotations[:, 0, :2].mean(0).abs().max() < 0.1
    assert 0.45 < changes.mirror.float().mean() < 0.55
    assert 1 / 1.5 <= changes.factors.min() < 0.7
    assert 1.4 < changes.factors.max() <= 1.5
    assert changes.factors.log().mean().abs() < 0.03
    drawn = Counter(draw_variants([["whole", "first", "second", "third"]] * 4000))
    assert 0.3 < drawn["whole"] / 4000 < 0.37
    assert all(0.19 < drawn[name] / 4000 < 0.26 for name in ("first", "second", "third"))


def test_each_mesh_of_a_batch_has_its_own_changes() -> None:
    samples = [make_sample(item, options().preprocessing) for item in balls().train]
    changes = draw_changes(6, options(scale_range=2.0, mirror=True), CPU)
    batch = changes.made(collate_samples(samples), 2)
    for i, sample in enumerate(samples):
        alone = changes.made(sample, 2 + i)
        torch.testing.assert_close(batch.operators[i].evecs, alone.operators.evecs)
        torch.testing.assert_close(batch.operators[i].gradient.values, alone.operators.gradient.values)
        torch.testing.assert_close(batch.operators.unpack(batch.features)[i], alone.features)


def run(out: Path, epochs: int, resume: bool = False, **given: Any) -> dict[str, Any]:
    console = Console(file=io.StringIO(), width=200)
    chosen = options(epochs=epochs, **given)
    run_training(
        balls(), chosen, out, device=CPU, cache_dir=out.parent / "cache", jobs=1, resume=resume, console=console
    )
    return {"checkpoint": load_checkpoint(out / "last.pt"), "text": console.file.getvalue()}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("addresses")
def test_a_run_with_everything_resumes_and_says_what_it_makes(tmp_path: Path) -> None:
    chosen = {**ALL, "schedule": "step"}  # the cosine schedule depends on the number of epochs
    whole = run(tmp_path / "whole", 3, **chosen)
    run(tmp_path / "parts", 2, **chosen)
    resumed = run(tmp_path / "parts", 3, resume=True, **chosen)
    assert "variants: 2 of each training mesh" in whole["text"]
    assert "10/10" in whole["text"].replace(" ", "")  # 3 meshes with 2 variants each, and a test mesh
    models = [each["checkpoint"]["model"] for each in (whole, resumed)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    stored = whole["checkpoint"]["options"]
    assert {name: stored[name] for name in ALL} == ALL
    assert (
        whole["checkpoint"]["history"][0]["train_loss"]
        != run(tmp_path / "plain", 1)["checkpoint"]["history"][0]["train_loss"]
    )


def losses(samples: list[Sample], chosen: TrainOptions, capture: bool) -> Any:
    torch.manual_seed(0)
    model = build_model(chosen, ["low", "high"], "vertices")
    step = TrainingStep(task_named(chosen.task), model, chosen, CPU)
    if capture:
        step.capture([s.operators for s in samples], EmulatedGraph)
    torch.manual_seed(1)
    changes = draw_changes(len(samples), chosen, CPU)
    return torch.stack([step(changes.made(s, i), changes.rotations_of(i, 1)) for i, s in enumerate(samples)])


def test_captured_steps_see_the_changes() -> None:
    chosen = options(scale_range=2.0, mirror=True, mirror_labels="1,0", jitter=0.01)
    samples = [make_sample(item, chosen.preprocessing) for item in balls().train] * 3
    samples = [replace(s, operators=s.operators.with_gradient_evecs()) for s in samples]
    before = EmulatedGraph.replays
    captured = losses(samples, chosen, True)
    assert EmulatedGraph.replays - before == len(samples) - 2  # 42 and 162 vertices
    torch.testing.assert_close(captured, losses(samples, chosen, False), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(captured, losses(samples, options(), False), rtol=1e-3)


@pytest.mark.gpu
def test_changes_wait_for_nothing() -> None:
    chosen = options(scale_range=2.0, mirror=True, mirror_labels="1,0", jitter=0.01, features="xyz+hks+wks")
    samples = [make_sample(item, chosen.preprocessing).to("cuda") for item in balls().train]
    batches = [collate_samples(samples), samples[0]]
    changes = draw_changes(3, chosen, torch.device("cuda"))
    for batch in batches:
        changes.made(batch, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            made = changes.made(batch, 0)
            assert made.operators.evecs.shape == batch.operators.evecs.shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
