"""Training, resuming, checkpoints and the report of a run."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from rich.console import Console
from runs import InMemory, labeled_balls, table_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diffnet import WeightAverage
from diffnet.data import LabeledMesh, LabeledMeshes, Sample, epoch_seed, make_sample
from diffnet.data.stored import names_of
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import write_atomically
from diffnet.train import batches, epoch, evaluate as evaluate_module
from diffnet.train.checkpoint import CheckpointError, build_model, load_checkpoint, restore_model, save_checkpoint
from diffnet.train.device import autocast
from diffnet.train.epoch import TrainingError
from diffnet.train.evaluate import evaluate
from diffnet.train.loop import RunData, train
from diffnet.train.metrics import accuracy, class_mean, class_scores, confusion_matrix
from diffnet.train.options import TrainOptions
from diffnet.train.preprocessing import of_stored_run
from diffnet.train.resident import DeviceSamples
from diffnet.train.run import run_training
from diffnet.train.run_folder import columns
from diffnet.train.set_parts import part_names, set_summary
from diffnet.train.steps.step import Adam, TrainingStep
from diffnet.train.tasks import labels
from diffnet.train.tasks.segmentation import TASK
from diffnet.train.validation import held_out

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

CPU = torch.device("cpu")
NAMES = ["low", "high"]


def options(**given: Any) -> TrainOptions:
    small = {"features": "xyz", "rotate": False, "k": 8, "width": 8, "blocks": 1, "epochs": 4, "eval_every": 1}
    small |= {"schedule": "step", "dropout": 0.5}
    return TrainOptions(**{**small, "learning_rate": 1e-2, **given})


def samples_of(items: Sequence[LabeledMesh], chosen: TrainOptions) -> list[Sample]:
    return [make_sample(item, chosen.preprocessing) for item in items]


def fit(data: LabeledMeshes, out: Path, samples: list[Sample] | None = None, **given: Any) -> dict[str, Any]:
    """A run. given: options, and arguments of `train`"""
    how = {name: given.pop(name) for name in ("resume", "after_epoch", "checkpoint_every") if name in given}
    chosen = options(**given)
    out.mkdir(exist_ok=True)
    samples = samples_of(data.train, chosen) if samples is None else samples
    held = held_out(names_of(data.train), chosen)
    run_data = RunData(TASK, data, samples, samples_of(data.test, chosen), held_out=held)
    return train(run_data, chosen, out, device=CPU, **how)


def same_run(a: Path, b: Path) -> None:
    for row_a, row_b in zip(table_of(a / "metrics.csv"), table_of(b / "metrics.csv"), strict=True):
        assert {**row_a, "seconds": ""} == {**row_b, "seconds": ""}
    for name in ("last.pt", "best.pt"):
        one, other = load_checkpoint(a / name), load_checkpoint(b / name)
        assert one["model"].keys() == other["model"].keys()
        assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
        states = one["optimizer"]["state"], other["optimizer"]["state"]
        assert all(torch.equal(states[0][i][key], states[1][i][key]) for i in states[0] for key in states[0][i])
        assert one["best"] == other["best"]
        assert len(one["history"]) == len(other["history"])


@pytest.fixture(scope="module")
def data() -> LabeledMeshes:
    return labeled_balls()


@pytest.fixture(scope="module")
def run(data: LabeledMeshes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run: its folder and the checkpoint that training returned."""
    out = tmp_path_factory.mktemp("run")
    return out, fit(data, out, epochs=4)


# ---- metrics, loss, augmentation ----


def test_confusion_ignores_unlabeled_elements() -> None:
    truth = torch.tensor([0, 0, 1, 2, -1, 2, -1])
    prediction = torch.tensor([0, 1, 1, 0, 2, 2, 0])
    matrix = confusion_matrix(prediction, truth, 4)
    assert matrix.tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert accuracy(matrix) == pytest.approx(3 / 5)
    assert np.isnan(accuracy(confusion_matrix(prediction, torch.full((7,), -1), 4)))
    assert confusion_matrix(prediction[:0], truth[:0], 2).tolist() == [[0, 0], [0, 0]]


def test_bad_options_are_named() -> None:
    xyz = {"features": "xyz"}
    for given, message in (
        ({"epochs": 0}, "epochs .*0"),
        ({"batch_meshes": 0}, "batch_meshes .*0"),
        ({"dropout": 1.0}, "dropout .*1.0"),
        ({"validation": -0.1}, "validation .*-0.1"),
        ({"learning_rate": 0.0}, "learning_rate .*0.0"),
        ({"learning_rate": float("nan")}, "learning_rate .*nan"),
        ({"learning_rate": 1e300}, "learning_rate .*1e\\+300"),
        ({"precision": "fp8"}, "precision .*'fp8'"),
        ({"backend": "cudnn"}, "backend .*'cudnn'"),
        ({"schedule": "linear"}, "schedule .*'linear'"),
        ({"features": "shot"}, "features .*'shot'"),
        ({"seed": -1}, "seed .*-1"),
        ({"diffusion": "heat"}, "diffusion .*'heat'"),
        ({"attention_heads": 3, "width": 16}, "attention_heads .*16, got 3"),
        ({"attention_heads": -1}, "attention_heads .*-1"),
        ({"features": "xyz", "k": 0}, "spectral diffusion, got 0"),
        ({"features": "hks", "k": 0, "diffusion": "implicit"}, "at least 1, got 0"),
        ({"rotate": True, "features": "hks"}, "rotate .*'hks'"),
        ({"rotate_about": "w"}, "rotate_about should be one of any, x, y, z, got 'w'"),
        ({"rotate_about": "z", "features": "hks"}, "rotate_about needs features with xyz, normals or vector:NAME"),
        ({**xyz, "rotate_about": "z", "rotate": False}, "rotate_about should be any where nothing is rotated, got 'z'"),
        ({"scale_range": 0.5}, "scale_range should be from 1 to 10, got 0.5"),
        ({"scale_range": float("nan")}, "scale_range should be from 1"),
        ({**xyz, "jitter": -0.1}, "jitter should be at least 0 and below 1, got -0.1"),
        ({"jitter": 0.1, "features": "normals"}, "jitter needs features with xyz, got 'normals'"),
        ({"cut": 1.0}, "cut should be at least 0 and below 1, got 1.0"),
        ({"decimate": -1.0}, "decimate should be at least 0 and below 1"),
        ({"variants": 0}, "variants should be at least 1, got 0"),
    ):
        refused(ValueError, message, TrainOptions, **given)
    assert TrainOptions(features="xyz").rotates
    assert not TrainOptions(features="hks").rotates
    assert not TrainOptions(features="xyz", rotate=False).rotates


@pytest.mark.parametrize(
    ("names", "features", "k", "hints"),
    [
        (["left arm", "right arm"], "hks", 8, ["left arm and right arm look alike to these features; --features xyz"]),
        (["left arm", "right arm"], "xyz", 8, []),
        (["head", "foot"], "hks", 43, ["--k is 43, but ball 0 has 42 vertices and no more eigenpairs"]),
    ],
)
def test_hints(names: list[str], features: str, k: int, hints: list[str]) -> None:
    data = replace(labeled_balls(), label_names=names)
    lines = set_summary(TASK, data, part_names(data, []), options(features=features, k=k, rotate=None), jobs=1)
    texts = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    assert len(texts) == len(hints)
    assert all(text.startswith(hint) for text, hint in zip(texts, hints, strict=True))


def test_schedules() -> None:
    step = TrainOptions(learning_rate=1.0, schedule="step", decay_every=2)
    assert [step.learning_rate_at(e) for e in range(5)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = TrainOptions(learning_rate=1.0, schedule="cosine", epochs=4)
    assert [cosine.learning_rate_at(e) for e in (0, 2, 4)] == pytest.approx([1, 0.5, 0])
    assert 0.5 < cosine.learning_rate_at(1.5) < cosine.learning_rate_at(1)
    assert step.learning_rate_at(1.5) == 1


def test_the_rate_changes_in_an_epoch(data: LabeledMeshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr("diffnet.train.epoch.set_learning_rate", lambda optimizer, rate: rates.append(rate))
    fit(data, tmp_path, epochs=2, schedule="cosine")
    steps = len(data.train)  # of one mesh each
    chosen = options(epochs=2, schedule="cosine")
    assert rates == pytest.approx([chosen.learning_rate_at(i / steps) for i in range(2 * steps)])
    assert len(set(rates)) == 2 * steps > 2


# ---- training ----


@pytest.mark.parametrize(
    ("at", "given"),
    [("edges", {"diffusion": "implicit", "k": 0}), ("faces", {"attention_heads": 2}), ("cloud", {})],
    ids=["edges-implicit", "faces-attention", "cloud"],
)
def test_training_learns(at: str, given: dict[str, Any], tmp_path: Path) -> None:
    data = labeled_balls(6, 2, at)
    checkpoint = fit(data, tmp_path, epochs=12, learning_rate=2e-2, width=16, dropout=0.0, **given)
    history = checkpoint["history"]
    assert history[0]["train_loss"] > history[-1]["train_loss"]
    assert history[-1]["test_accuracy"] > 0.9
    assert checkpoint["labels_at"] == data.labels_at
    assert accuracy(evaluated(checkpoint, data)) == history[-1]["test_accuracy"]


def evaluated(checkpoint: dict[str, Any], data: LabeledMeshes) -> torch.Tensor:
    """The confusion matrix of a stored network on the test set."""
    model, chosen = restore_model(checkpoint)
    return evaluate(TASK, model, samples_of(data.test, chosen), chosen, CPU)


def test_a_run_leaves_its_files(run: tuple[Path, dict[str, Any]], data: LabeledMeshes) -> None:
    (out, checkpoint), table = run, table_of(run[0] / "metrics.csv")
    assert {p.name for p in out.iterdir()} == {"last.pt", "best.pt", "metrics.csv", "tensorboard"}
    assert tuple(table[0]) == columns("accuracy")
    assert [row["epoch"] for row in table] == ["1", "2", "3", "4"]
    assert all(float(row["seconds"]) > 0 and 0 <= float(row["train_accuracy"]) <= 1 for row in table)
    assert {row["validation_accuracy"] for row in table} == {""}
    for name in ("last.pt", "best.pt"):
        stored = torch.load(out / name, weights_only=True)
        assert stored["label_names"] == NAMES
        assert stored["labels_at"] == "vertices"
        model, chosen = restore_model(stored)
        assert not model.training
        assert chosen == options()
        assert chosen.preprocessing.k == 8
    # Without a validation set, the last checkpoint is judged, and the best one has the lowest loss.
    assert len(checkpoint["history"]) == 4
    losses = [float(row["train_loss"]) for row in table]
    assert len(load_checkpoint(out / "best.pt")["history"]) == 1 + int(np.argmin(losses))
    shown = scalars(out)
    assert set(shown) == {name for name in columns("accuracy")[1:] if table[0][name]}
    for name, points in shown.items():
        assert [step for step, _ in points] == [1, 2, 3, 4]
        assert [value for _, value in points] == pytest.approx([float(row[name]) for row in table], rel=1e-6)


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves for TensorBoard."""
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_how_often_the_test_set_is_evaluated(data: LabeledMeshes, tmp_path: Path) -> None:
    fit(data, tmp_path, eval_every=3, epochs=4)
    assert [bool(row["test_accuracy"]) for row in table_of(tmp_path / "metrics.csv")] == [False, False, True, True]


def test_held_out_meshes_depend_on_the_seed_only() -> None:
    names = [f"{i}" for i in range(10)]

    def chosen(**given: Any) -> list[int]:
        return held_out(names, options(**given))

    assert len(chosen(validation=0.3)) == 3
    assert len(chosen(validation=0.01)) == 1
    assert chosen(validation=0.0) == []
    assert chosen(validation=0.3) == chosen(validation=0.3, epochs=9, dropout=0.1, learning_rate=1.0)
    assert len({tuple(chosen(validation=0.3, seed=seed)) for seed in range(6)}) > 1
    refused(ValueError, r"validation should leave .* got 0.9 of 4", held_out, names[:4], options(validation=0.9))
    refused(ValueError, "0 training meshes", held_out, [], options())


def test_progress_is_reported_after_each_step(tmp_path: Path) -> None:
    data, chosen, seen = labeled_balls(3, 1), options(epochs=2, batch_meshes=2), []
    samples = samples_of(data.train, chosen)
    train(RunData(TASK, data, samples, samples[:1]), chosen, tmp_path, device=CPU, after_step=seen.append)
    assert seen == pytest.approx([2 / 3, 1, 5 / 3, 2])


def test_with_a_validation_set_the_best_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.5, 0.9, 0.9, 0.1])
    # Each epoch evaluates the validation set (42 elements), then the test set (84).
    monkeypatch.setattr(TASK, "score", lambda matrix, options: next(scores) if matrix.sum() == 42 else 0.0)
    checkpoint = fit(labeled_balls(), tmp_path, validation=0.25)
    assert [row["validation_accuracy"] for row in table_of(tmp_path / "metrics.csv")] == ["0.5", "0.9", "0.9", "0.1"]
    assert len(checkpoint["history"]) == 2
    assert checkpoint["best"] == 0.9


def test_the_best_epoch_by_mean_iou(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two epochs has the better accuracy and misses the rare class."""
    validated = iter([[[40, 0], [2, 0]], [[37, 3], [0, 2]]])
    score = lambda m: class_mean("iou", next(validated) if m.sum() == 42 else m)  # noqa: E731
    monkeypatch.setitem(labels.LABEL_SCORES, "mean-iou", score)
    checkpoint = fit(labeled_balls(), tmp_path, validation=0.25, epochs=2, score="mean-iou")
    found = [float(row["validation_mean_iou"]) for row in table_of(tmp_path / "metrics.csv")]
    assert found == pytest.approx([(40 / 42 + 0) / 2, (37 / 40 + 2 / 5) / 2])
    assert tuple(table_of(tmp_path / "metrics.csv")[0]) == columns("mean_iou")
    assert (len(checkpoint["history"]), checkpoint["best"]) == (2, found[1])
    tested = class_mean("iou", evaluated(checkpoint, labeled_balls(4, 2)))
    assert float(table_of(tmp_path / "metrics.csv")[1]["test_mean_iou"]) == tested
    assert np.isnan(class_mean("iou", torch.zeros(2, 2)))
    assert TASK.score(torch.tensor([[3, 1], [0, 2]]), options(score="balanced-accuracy")) == 0.875


def test_a_validation_set_without_labels_can_be_judged(tmp_path: Path) -> None:
    data = labeled_balls()
    blank = [replace(item, labels=np.full_like(item.labels, -1)) for item in data.train]
    checkpoint = fit(replace(data, train=blank), tmp_path, validation=0.25, epochs=2)
    assert len(checkpoint["history"]) == 1
    assert float(table_of(tmp_path / "metrics.csv")[1]["train_loss"]) == 0
    fit(replace(data, train=blank), tmp_path, resume=True, validation=0.25, epochs=3)
    assert len(table_of(tmp_path / "metrics.csv")) == 3


def test_bf16_trains_on_the_cpu_too(data: LabeledMeshes, tmp_path: Path) -> None:
    checkpoint = fit(data, tmp_path, precision="bf16", epochs=1)
    assert all(value.dtype == torch.float32 for value in checkpoint["model"].values())
    with autocast("auto", CPU):
        assert not torch.is_autocast_enabled("cpu")


def test_a_loss_that_is_not_finite_stops_the_run(data: LabeledMeshes, tmp_path: Path) -> None:
    samples = samples_of(data.train, options())
    fit(data, tmp_path, samples=samples, epochs=2)
    before = {name: (tmp_path / name).read_bytes() for name in ("last.pt", "best.pt", "metrics.csv")}
    samples[2] = replace(samples[2], features=samples[2].features * float("nan"))
    with pytest.raises(TrainingError, match=r"nan in epoch 3, on ball 2; last.pt holds epoch 2"):
        fit(data, tmp_path, resume=True, samples=samples)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    model = restore_model(load_checkpoint(tmp_path / "last.pt"))[0]
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_learning_rate_far_too_high_stops_the_run(data: LabeledMeshes, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"loss .* in epoch 1, on ball .*last.pt holds epoch 0.*--lr"):
        fit(data, tmp_path, learning_rate=1e30)
    stored = load_checkpoint(tmp_path / "last.pt")
    assert stored["history"] == []
    assert all(value.isfinite().all() for value in stored["model"].values())


@pytest.mark.parametrize("fault", ["weights", "moments of Adam"])
def test_weights_and_moments_that_are_not_finite_are_not_kept(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without labels the loss is 0 even if the output is NaN, but the gradient is NaN. Squares may overflow."""
    data = labeled_balls(1)
    (sample,) = samples_of(data.train, options())
    if fault == "weights":
        sample = replace(sample, features=sample.features * math.nan, labels=torch.full_like(sample.labels, -1))
    else:
        call = TrainingStep.__call__

        def step(self: TrainingStep, *arguments: Any) -> Any:
            loss = call(self, *arguments)
            for state in self.optimizer.state.values():
                state["exp_avg_sq"].fill_(math.inf)
            return loss

        monkeypatch.setattr(TrainingStep, "__call__", step)
    with pytest.raises(TrainingError, match=rf"the {fault} became .* in epoch 1, on ball 0; last.pt holds epoch 0"):
        fit(data, tmp_path, samples=[sample])
    assert all(value.isfinite().all() for value in load_checkpoint(tmp_path / "last.pt")["model"].values())


# ---- resuming ----

VARIANTS = [
    {"validation": 0.5, "dropout": 0.3},
    {"rotate": True, "batch_meshes": None, "batch_vertices": 100},
    {"schedule": "cosine", "seed": 7, "average_weights": 0.9},
]


def test_the_average_of_weights() -> None:
    torch.manual_seed(0)
    model = build_model(options(), NAMES, "vertices")
    average = WeightAverage(model, 0.9)
    steps = []
    for _ in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-1, 1)
        average.update()
        steps.append([p.detach().double() for p in model.parameters()])
    average.write()
    weights = 0.9 ** torch.arange(5.0, dtype=torch.float64).flip(0)
    for found, *expected in zip(average.network.parameters(), *steps, strict=True):
        mean = torch.tensordot(weights / weights.sum(), torch.stack(expected), 1)
        torch.testing.assert_close(found.double(), mean, rtol=1e-5, atol=1e-6)


def test_a_run_saves_the_averaged_network(data: LabeledMeshes, tmp_path: Path) -> None:
    """The training itself doesn't depend on the average."""
    plain = fit(data, tmp_path / "plain")
    averaged = fit(data, tmp_path / "averaged", average_weights=0.9)
    losses = [[row["train_loss"] for row in stored["history"]] for stored in (plain, averaged)]
    assert losses[0] == losses[1]
    for name, weight in plain["model"].items():
        assert torch.equal(weight, averaged["averaging"]["trained"][name])
        assert not torch.equal(weight, averaged["model"][name])
    assert accuracy(evaluated(averaged, data)) == averaged["history"][-1]["test_accuracy"]


@pytest.mark.parametrize("given", VARIANTS, ids=lambda given: "-".join(given))
def test_a_resumed_run_equals_an_uninterrupted_one(data: LabeledMeshes, tmp_path: Path, given: dict[str, Any]) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    whole, parted = tmp_path / "whole", tmp_path / "parted"
    expected = fit(data, whole, **given)
    with pytest.raises(KeyboardInterrupt):
        fit(data, parted, after_epoch=interrupt, **given)
    assert len(table_of(parted / "metrics.csv")) == 2
    torch.manual_seed(99)  # random numbers drawn before do not matter
    returned = fit(data, parted, resume=True, **given)
    same_run(whole, parted)
    assert len(returned["history"]) == len(expected["history"])
    assert all(torch.equal(weight, expected["model"][name]) for name, weight in returned["model"].items())
    assert [step for step, _ in scalars(parted)["train_loss"]] == [1, 2, 3, 4]


def test_a_run_can_be_made_longer(data: LabeledMeshes, run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    fit(data, tmp_path, epochs=2)
    fit(data, tmp_path, epochs=4, resume=True)
    same_run(run[0], tmp_path)
    # A finished run is left unchanged.
    assert len(fit(data, tmp_path, epochs=2, resume=True)["history"]) == 4
    same_run(run[0], tmp_path)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_resumed_within_an_epoch(
    data: LabeledMeshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """With dropout, random rotations and averaged weights. The checkpoints change nothing."""
    given = {"epochs": 2, "rotate": True, "average_weights": 0.9, "batch_meshes": 2, "accumulate": accumulate}
    fit(data, tmp_path / "whole", **given)
    parted = tmp_path / "parted"
    # The first file is last.pt of epoch 0. Epoch 1 has a checkpoint after each step but the last, best.pt and last.pt.
    left = -(-len(data.train) // 2) + 3

    def save(path: Path, content: Any, *more: Path) -> None:
        nonlocal left
        save_checkpoint(path, content, *more)
        left -= 1 + len(more)
        if left == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr("diffnet.train.loop.save_checkpoint", save)
    with pytest.raises(KeyboardInterrupt):
        fit(data, parted, checkpoint_every=1, **given)
    stored = load_checkpoint(parted / "last.pt")
    assert (len(stored["history"]), stored["position"]["steps"]) == (1, 1)
    torch.manual_seed(99)
    fit(data, parted, resume=True, **given)
    same_run(tmp_path / "whole", parted)
    assert load_checkpoint(parted / "last.pt")["position"] is None
    for name, value in (("steps", 2), ("losses", None), ("random", [1])):
        save_checkpoint(parted / "last.pt", {**stored, "position": {**stored["position"], name: value}})
        refused(CheckpointError, "position should be one in an epoch", load_checkpoint, parted / "last.pt")


def test_passes_give_the_step_of_the_batch(data: LabeledMeshes, tmp_path: Path) -> None:
    given = {"epochs": 2, "dropout": 0.0, "rotate": True, "mirror": True, "features": "xyz+normals"}
    losses = {}
    for passes in (1, 3):
        fit(data, tmp_path / str(passes), batch_meshes=3, accumulate=passes, **given)
        losses[passes] = [float(row["train_loss"]) for row in table_of(tmp_path / str(passes) / "metrics.csv")]
    np.testing.assert_allclose(losses[3], losses[1], rtol=1e-5)
    with pytest.raises(OptionError, match="label_loss is dice, which is no mean over elements"):
        fit(data, tmp_path / "dice", accumulate=2, label_loss="dice")


def test_a_run_that_ends_between_two_files_can_be_resumed(
    data: LabeledMeshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write is last.pt of epoch 0. Then each epoch writes best.pt, last.pt and metrics.csv."""
    fit(data, tmp_path / "whole", epochs=2)

    def count(path: Path, content: bytes) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        write_atomically(path, content)

    for writes in range(1, 6):
        left, parted = [writes], tmp_path / str(writes)
        with monkeypatch.context() as patch:
            patch.setattr("diffnet.train.loop.write_atomically", count)
            patch.setattr("diffnet.train.checkpoint.write_atomically", count)
            with pytest.raises(KeyboardInterrupt):
                fit(data, parted, epochs=2)
        fit(data, parted, epochs=2, resume=True)
        same_run(tmp_path / "whole", parted)


def test_order_and_dropout_differ_between_epochs_and_seeds(
    data: LabeledMeshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    plain = batches.collate_samples
    monkeypatch.setattr(batches, "collate_samples", lambda batch: seen.append(batch[0].names[0]) or plain(batch))
    seeds = []
    monkeypatch.setattr(epoch, "epoch_seed", lambda *given: seeds.append(given) or epoch_seed(*given))
    fit(data, tmp_path / "a", epochs=4, seed=1)
    epochs = [tuple(seen[i : i + 4]) for i in range(0, 16, 4)]
    assert all(len(set(epoch)) == 4 for epoch in epochs)
    assert len(set(epochs)) > 1
    assert seeds == [(1, epoch) for epoch in range(4)]


def test_a_cosine_run_keeps_its_length(data: LabeledMeshes, tmp_path: Path) -> None:
    fit(data, tmp_path, epochs=2, schedule="cosine")
    with pytest.raises(OptionError, match=r"epochs is 3, .* with 2; the cosine"):
        fit(data, tmp_path, epochs=3, schedule="cosine", resume=True)
    with pytest.raises(CheckpointError, match="other labels"):
        fit(replace(data, label_names=["a", "b"]), tmp_path, epochs=2, schedule="cosine", resume=True)
    swapped = replace(data, train=[*data.train[:-1], data.test[0]], test=[data.train[-1], *data.test[1:]])
    relabeled = replace(data, test=[replace(data.test[0], labels=1 - data.test[0].labels), *data.test[1:]])
    for other in (labeled_balls(train=5), swapped, relabeled):
        refused(CheckpointError, "other meshes", fit, other, tmp_path, epochs=2, schedule="cosine", resume=True)


def test_a_run_is_not_resumed_with_other_statistics() -> None:
    stored: Any = {"statistics": {"file:a": {"mean": [1.0, 2.0]}}}
    for means, equal in (([1.0 + 1e-12, 2.0], True), ([1.0, 2.1], False), ([1.0], False)):
        found = {"file:a": {"mean": means}}
        with nullcontext() if equal else pytest.raises(CheckpointError, match="other own arrays"):
            assert of_stored_run(stored, "statistics", found, Path("run")) is stored["statistics"]


# ---- a whole run ----


def whole_run(data: LabeledMeshes, out: Path, tmp_path: Path, resume: bool = False, **given: Any) -> dict[str, Any]:
    where: dict[str, Any] = {"device": CPU, "cache_dir": tmp_path / "cache", "jobs": 1, "console": Console(quiet=True)}
    return run_training(data, options(**given), out, resume=resume, **where)


def test_the_last_evaluation_is_reported(data: LabeledMeshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test set is evaluated once more only if training has not evaluated the weights that are judged."""
    seen = []
    outputs = evaluate_module.network_outputs

    def network_outputs(model: torch.nn.Module, sample: Sample, *rest: Any) -> torch.Tensor:
        seen.append(sample.names[0])
        return outputs(model, sample, *rest)

    monkeypatch.setattr(evaluate_module, "network_outputs", network_outputs)
    tests = [item.name for item in data.test]
    once = whole_run(data, tmp_path / "once", tmp_path, epochs=2, eval_every=2)
    assert seen == tests
    # Nothing is left to train, so the stored weights are evaluated.
    seen.clear()
    again = whole_run(data, tmp_path / "once", tmp_path, resume=True, epochs=2, eval_every=2)
    assert seen == tests
    for name in ("test_accuracy", "mean_iou", "classes"):
        assert once[name] == again[name]
    # The best epoch is not the last one.
    scores = iter([0.9, 0.1])
    monkeypatch.setattr(TASK, "score", lambda matrix, options: next(scores) if matrix.sum() == 42 else 0.5)
    best = whole_run(data, tmp_path / "best", tmp_path, epochs=2, eval_every=2, validation=0.2)
    assert best["judged_epoch"] == 1
    assert best["test_accuracy"] == accuracy(evaluated(load_checkpoint(tmp_path / "best" / "best.pt"), data))


@pytest.mark.usefixtures("charts")
def test_a_run_is_reported(tmp_path: Path) -> None:
    data = labeled_balls(4, 3)
    unlabeled = data.test[0].labels.copy()
    unlabeled[:10] = -1
    data = replace(data, test=[replace(data.test[0], labels=unlabeled), *data.test[1:]], label_names=[*NAMES, "none"])
    out = tmp_path / "deep" / "run"
    results = whole_run(data, out, tmp_path)

    def reject(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((out / "results.json").read_text(), parse_constant=reject) == results
    for chart in ("confusion.png", "curves.png"):
        assert np.asarray(Image.open(out / chart).convert("RGB")).std() > 5
    page = (out / "predictions.html").read_text()
    assert "http" not in page.replace("http://www.w3.org", "")
    assert page.count("<article>") == 3

    matrix = evaluated(load_checkpoint(out / "last.pt"), data)
    assert matrix.sum() == 3 * 42 - 10
    scores = class_scores(matrix)
    assert results["test_accuracy"] == accuracy(matrix)
    assert results["test_accuracy"] == load_checkpoint(out / "last.pt")["history"][-1]["test_accuracy"]
    assert results["mean_iou"] == pytest.approx(np.nanmean(scores.iou))
    assert [c["name"] for c in results["classes"]] == NAMES  # "none" does not occur
    assert [found["count"] for found in results["classes"]] == matrix.sum(1)[:2].tolist()
    assert [found["accuracy"] for found in results["classes"]] == pytest.approx(scores.accuracy[:2].tolist())
    assert [found["iou"] for found in results["classes"]] == pytest.approx(scores.iou[:2].tolist())
    assert (results["options"]["k"], results["train_meshes"], results["test_meshes"]) == (8, 4, 3)


def test_a_test_set_without_labels_makes_valid_json(tmp_path: Path) -> None:
    data = labeled_balls(2, 1)
    blank = [replace(item, labels=np.full_like(item.labels, -1)) for item in data.test]
    out = tmp_path / "run"
    results = whole_run(replace(data, test=blank), out, tmp_path, epochs=1)
    assert (results["test_accuracy"], results["mean_iou"], results["classes"]) == (None, None, [])
    assert "NaN" not in (out / "results.json").read_text()
    assert (out / "predictions.html").exists()


def test_runs_do_not_overwrite_each_other(data: LabeledMeshes, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "results.json").write_text("mine")
    refused(ValueError, r"results.json", whole_run, data, out, tmp_path)
    refused(ValueError, "no run in this folder to resume", whole_run, data, out, tmp_path, resume=True)
    assert [(p.name, p.read_text()) for p in out.iterdir()] == [("results.json", "mine")]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "fused"), [("auto", True), ("torch", False)], ids=["auto", "torch"])
def test_backend_decides_the_kernels(data: LabeledMeshes, tmp_path: Path, backend: str, fused: bool) -> None:
    device = torch.device("cuda")
    chosen = options(backend=backend, precision="bf16", epochs=1)
    samples = DeviceSamples(InMemory(samples_of(data.train, chosen)), device)
    _ = [samples[i] for i in range(len(samples))]  # moved to the GPU, where a kernel computes gradients of the basis
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train(RunData(TASK, data, samples, samples), chosen, tmp_path, device=device)
    kernels = {event.key for event in profile.key_averages()}
    assert any(name.startswith("void at::native::") for name in kernels)
    triton = {name for name in kernels if re.fullmatch(r"\w*(forward|backward)\w*_kernel", name)}
    assert bool(triton) == fused, triton


def test_backend_reaches_every_module(data: LabeledMeshes, tmp_path: Path) -> None:
    for backend in ("auto", "torch"):
        checkpoint = fit(data, tmp_path / backend, backend=backend, epochs=1)
        model, _ = restore_model(checkpoint)
        assert {module.backend for module in model.modules() if hasattr(module, "backend")} == {backend}


def test_adam_is_adam_of_pytorch() -> None:
    """Also when it continues from a stored state. The closures and hooks of PyTorch's optimizers work, too."""
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    first, expected = (kind(model.parameters(), lr=0.1) for kind, model in ((Adam, ours), (torch.optim.Adam, theirs)))
    second = Adam(ours.parameters(), lr=0.1)
    seen = []
    second.register_step_post_hook(lambda *arguments: seen.append(len(seen)))
    for i in range(6):
        if i == 3:
            second.load_state_dict(first.state_dict())
        x = torch.randn(7, 5)
        for model, optimizer in ((ours, first if i < 3 else second), (theirs, expected)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert seen == [0, 1, 2]
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=0, atol=0)
    assert second.state_dict().keys() == expected.state_dict().keys()
    assert second.step(lambda: 7.0) == 7.0
