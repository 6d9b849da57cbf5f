"""The training loop of all tasks."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet import DiffusionNet, WeightAverage
from diffnet.cuda_graphs import graphed
from diffnet.data import (
    ArrayStatistics,
    LabeledMeshes,
    MeshBatches,
    PairSample,
    Sample,
    Statistics,
    TargetsAt,
    epoch_seed,
)
from diffnet.data.counts import counted
from diffnet.data.stored import StoredMeshes, names_of
from diffnet.geometry.errors import DiffnetError, OptionError
from diffnet.geometry.files import write_atomically
from diffnet.train.batches import packed
from diffnet.train.checkpoint import Checkpoint, CheckpointError, build_model, load_checkpoint, save_checkpoint
from diffnet.train.evaluate import evaluate
from diffnet.train.mesh_hash import DIGITS, contents_of
from diffnet.train.options import TrainOptions
from diffnet.train.resident import DeviceSamples, counts_of, taken
from diffnet.train.run_folder.event_file import EventFile
from diffnet.train.run_folder.history import Row, as_csv, columns
from diffnet.train.run_folder.spool import Spool
from diffnet.train.steps.augmentation import draw_changes, draw_variants
from diffnet.train.steps.step import TrainingStep, restore_optimizer, set_learning_rate
from diffnet.train.tasks.task import Task

T = TypeVar("T")

FINGERPRINT = "2:"  # how those of `_fingerprint` begin


class TrainingError(DiffnetError, RuntimeError):
    """Training failed. The message gives the reason and names the checkpoint that is left."""


@dataclass(frozen=True)
class RunData:
    """The data set of a run, as samples.

    statistics: of the own arrays among the features of the samples, see `array_statistics`. Checkpoints store them.
    target_statistics: of the targets of a regression, see `target_statistics`. The samples have standardized targets.
    variants: of each training sample, see `make_variants`. Each epoch trains on one of a sample and its variants. Empty
        if there are none.
    """

    task: Task[Any, Any]
    meshes: LabeledMeshes
    train: Sequence[Sample | PairSample]
    test: Sequence[Sample | PairSample]
    statistics: Statistics | None = None
    target_statistics: ArrayStatistics | None = None
    variants: Sequence[Sequence[Sample]] = ()


def train(
    data: RunData,
    options: TrainOptions,
    out: Path,
    *,
    device: torch.device,
    resume: bool = False,
    capture: bool = True,
    after_epoch: Callable[[Row], Any] = lambda row: None,
    after_step: Callable[[float], Any] = lambda epochs: None,
    predictions: list[Tensor] | Spool | None = None,
) -> Checkpoint:
    """Train a network and write its checkpoints into the folder `out`.

    Returns the checkpoint to judge. With `validation`, that is the one with the highest score on the held-out
    training meshes. Without, it is the last one. The test set is evaluated, but never used to choose.

    `out` gets last.pt after every epoch, best.pt (by validation score, else by training loss), metrics.csv, and the
    event files of TensorBoard.

    A seed gives the same weights in every run on the same machine with the same number of threads. An epoch depends
    only on the previous epoch and on (seed, epoch), so a resumed run equals an uninterrupted one.

    capture: on a GPU, replay CUDA graphs of steps and evaluations. Graphs serve batches of any size.
    after_step: gets the number of epochs that have been trained, for example 2.25 after a quarter of the third
    predictions: an empty list or `Spool` that gets the predictions of each test sample by the checkpoint to judge, on
        the CPU, see `Task.predict`. It gets them only if this call trains the last epoch and that epoch is the one to
        judge.

    Raises TrainingError if a loss or a weight is not finite. last.pt then holds the previous epoch. Raises
    CheckpointError if a run can't be resumed, and OptionError if it was started with other options, and if validation
    leaves no mesh to train on.
    """
    task, meshes = data.task, data.meshes
    score_name, score_of = task.scoring(options)
    samples, groups = _grouped(data)
    fitted, held_out_groups = set_aside(groups, options)
    held_out = taken(samples, [group[0] for group in held_out_groups])
    torch.manual_seed(options.seed)
    model = build_model(options, meshes.label_names, meshes.labels_at, data.statistics).to(device)
    average = WeightAverage(model, options.average_weights) if options.average_weights > 0 else None
    scored = model if average is None else average.network
    step = TrainingStep(task, model, options, device, average)
    if capture and device.type == "cuda" and options.backend == "auto":
        if task.captured:
            trained = taken(samples, [number for group in fitted for number in group])
            sizes = trained.sizes() if isinstance(trained, DeviceSamples) else [s.operators for s in trained]
            step.capture(sizes)
        elif scored is not model:  # the network alone
            graphed(model, first_visits=0)
        graphed(scored, first_visits=0)  # in evaluations; the same kernels every time, so resumed runs are equal
    history: list[Row] = []
    best = -math.inf
    content = [contents_of(part) for part in (meshes.train, meshes.test)]
    fingerprint = _fingerprint(meshes, content, task.pairs(meshes))
    train_meshes = [mesh[:DIGITS] for mesh, *_ in content[0]]

    def checkpoint() -> Checkpoint:
        return {
            "model": scored.state_dict(),
            "averaging": None if average is None else average.state_dict(),
            "optimizer": step.optimizer.state_dict(),
            "history": history,
            "best": best,
            "options": options.as_dict(),
            "label_names": meshes.label_names,
            "label_numbers": meshes.label_numbers,
            "labels_at": meshes.labels_at,
            "data": fingerprint,
            "train_meshes": train_meshes,
            "statistics": dict(data.statistics or {}),
            "target_statistics": data.target_statistics,
        }

    if resume:
        stored = load_checkpoint(out / "last.pt", device)
        check_same_options(stored, options, out)
        _check_same_data(stored, checkpoint(), data, out)
        scored.load_state_dict(stored["model"])
        if average is not None:
            average.load_state_dict(stored["averaging"])
        restore_optimizer(step.optimizer, stored["optimizer"])
        history, best = stored["history"], stored["best"]
        # The run may have stopped after it wrote last.pt and before it wrote the table.
        write_atomically(out / "metrics.csv", as_csv(history, score_name))
    else:
        save_checkpoint(out / "last.pt", checkpoint())

    # TensorBoard's steps are epochs from 1. purge_step hides later epochs that an interrupted run may have written.
    with EventFile(out / "tensorboard", purge_step=len(history) + 1) as board:
        for epoch in range(len(history), options.epochs):
            started = time.perf_counter()
            torch.manual_seed(epoch_seed(options.seed, epoch))
            loss, tally = _train_epoch(
                model, step, task, samples, fitted, options, device, epoch, after_step, meshes.labels_at
            )
            if average is not None:
                average.write()
            last = epoch + 1 == options.epochs
            due = (epoch + 1) % options.eval_every == 0 or last
            tested = validated = None
            if due:
                kept = predictions if last else None
                tested = score_of(evaluate(task, scored, data.test, options, device, kept))
            if len(held_out):
                validated = score_of(evaluate(task, scored, held_out, options, device))
            row: Row = {
                "epoch": epoch + 1,
                "learning_rate": options.learning_rate_at(epoch),
                "train_loss": loss,
                f"train_{score_name}": score_of(tally),
                f"validation_{score_name}": validated,
                f"test_{score_name}": tested,
                "seconds": time.perf_counter() - started,
            }
            history.append(row)
            score = -loss if validated is None else validated
            # The score is NaN if nothing held out is labeled. The first epoch is then the best.
            improved = epoch == 0 or score > best
            best = max(best, score)
            # best.pt is written before last.pt. If the run stops between the two, resuming repeats this epoch.
            if improved:
                save_checkpoint(out / "best.pt", checkpoint())
            save_checkpoint(out / "last.pt", checkpoint())
            write_atomically(out / "metrics.csv", as_csv(history, score_name))
            board.add({name: value for name in columns(score_name)[1:] if (value := row[name]) is not None}, epoch + 1)
            after_epoch(row)
    judged = load_checkpoint(out / ("best.pt" if len(held_out) else "last.pt"), device)
    if predictions is not None and len(judged["history"]) != options.epochs:
        predictions.clear()
    return judged


def _grouped(data: RunData) -> tuple[Sequence[Any], list[list[int]]]:
    """All training samples and then their variants, and the numbers of each sample and its variants among these."""
    variants = data.variants or [()] * len(data.train)
    if isinstance(data.train, DeviceSamples):
        samples: Sequence[Any] = data.train.joined(own for own in variants if isinstance(own, DeviceSamples))
    else:
        samples = [*data.train, *chain.from_iterable(variants)]
    firsts = accumulate(map(len, variants), initial=len(data.train))
    groups = [
        [i, *range(first, first + len(own))] for i, (own, first) in enumerate(zip(variants, firsts, strict=False))
    ]
    return samples, groups


def set_aside(samples: Sequence[T], options: TrainOptions) -> tuple[list[T], list[T]]:
    """Split the training samples into those to fit and those to validate on. Only the seed decides which.

    Raises OptionError if none is left to fit.
    """
    count = round(options.validation * len(samples))
    if options.validation > 0:
        count = max(count, 1)
    if count >= len(samples):
        raise OptionError(
            f"validation should leave a mesh to train on, got {options.validation} of "
            + counted(len(samples), "training mesh", "training meshes")
        )
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(options.seed)).tolist()
    chosen = set(order[:count])
    fitted = [s for i, s in enumerate(samples) if i not in chosen]
    return fitted, [s for i, s in enumerate(samples) if i in chosen]


def _train_epoch(
    model: DiffusionNet,
    step: TrainingStep,
    task: Task[Any, Any],
    samples: Sequence[Any],
    groups: Sequence[Sequence[int]],
    options: TrainOptions,
    device: torch.device,
    epoch: int,
    after_step: Callable[[float], Any],
    labels_at: TargetsAt,
) -> tuple[float, Tensor]:
    """One pass over the training set. Returns the mean loss of its steps, and their tally under dropout.

    samples: all samples and variants
    groups: the numbers of each training sample and of its variants
    """
    model.train()
    step.tally.zero_()
    losses: list[Tensor] = []
    names: list[tuple[str, ...]] = []
    every = len(groups) * task.meshes_of_sample
    changes = draw_changes(every, options, device, labels_at)
    samples = taken(samples, draw_variants(groups))
    batches = MeshBatches(
        counts_of(samples),
        meshes=options.batch_meshes,
        max_vertices=options.batch_vertices,
        shuffle=True,
        seed=options.seed,
    )
    batches.set_epoch(epoch)
    first = 0
    rate_before: float | None = None
    for sample in packed(samples, batches, device):
        meshes = len(sample.operators)
        rate = options.learning_rate_at(epoch + first / every)
        if rate != rate_before:  # on a GPU, setting it launches a kernel
            set_learning_rate(step.optimizer, rate)
            rate_before = rate
        losses.append(step(changes.made(sample, first), changes.rotations_of(first, meshes)))
        names.append(sample.names)
        first += meshes
        after_step(epoch + first / every)
    # The losses are read once per epoch, so no step waits for the GPU.
    values = torch.stack(losses).tolist()
    broken = [(f"loss became {v}", batch) for v, batch in zip(values, names, strict=True) if not math.isfinite(v)]
    # No loss has been computed yet with the weights of the last step.
    if not all(torch.stack([p.detach().isfinite().all() for p in model.parameters()]).tolist()):
        broken.append(("weights became NaN or infinite", names[-1]))
    if broken:
        fault, batch = broken[0]
        raise TrainingError(
            f"the {fault} in epoch {epoch + 1}, on {', '.join(batch)}; last.pt holds epoch {epoch}. "
            "A lower --lr or --precision fp32 may help"
        )
    return sum(values) / len(values), step.tally.cpu()


def check_same_options(stored: Checkpoint, options: TrainOptions, out: Path) -> None:
    """Raises OptionError if the options differ from those of the stored run.

    Only the number of epochs may differ, and only if the schedule does not depend on it.
    """
    before = stored["options"]
    for name, value in options.as_dict().items():
        if (name != "epochs" or before["schedule"] == "cosine") and before[name] != value:
            why = "the cosine schedule depends on it" if name == "epochs" else "a resumed run keeps its options"
            started = "without it" if before[name] is None else f"with {before[name]}"
            raise OptionError(f"{name} is {value}, and the run in {out} was started {started}; {why}")


def _check_same_data(stored: Checkpoint, fresh: Checkpoint, data: RunData, out: Path) -> None:
    """Raises CheckpointError if the data of a resumed run differ from those of the stored one."""
    if not stored["data"].startswith(FINGERPRINT):
        fresh = {**fresh, "data": older_fingerprint(data.meshes, data.task.truths(data.meshes))}
    for name, difference in (
        ("label_names", "other labels"),
        ("labels_at", "other labels"),
        ("data", "other meshes"),
        ("statistics", "other own arrays"),
        ("target_statistics", "other targets"),
    ):
        if stored[name] != fresh[name]:
            raise CheckpointError(f"{out / 'last.pt'}: this run was started on a data set with {difference}")


def _fingerprint(data: LabeledMeshes, content: Sequence[Sequence[Sequence[str]]], pairs: bytes) -> str:
    """A hash of the meshes of a data set, their labels or pairs, and their order.

    content: `contents_of` both parts
    """
    digest = hashlib.sha256(pairs)
    for part, own in zip((data.train, data.test), content, strict=True):
        meaning = part.meaning if isinstance(part, StoredMeshes) else ""
        digest.update(f"{len(part)} meshes {meaning}".encode(errors="surrogatepass"))
        for name, hashes in zip(names_of(part), own, strict=True):
            digest.update(name.encode(errors="surrogatepass") + f" {hashes}".encode())  # a name need not be text
    return FINGERPRINT + digest.hexdigest()


def older_fingerprint(data: LabeledMeshes, truths: Iterable[Iterable[NDArray[Any]]]) -> str:
    """That of checkpoints of older versions, which needs the content of all meshes."""
    digest = hashlib.sha256()
    for part, known in zip((data.train, data.test), truths, strict=True):
        digest.update(f"{len(part)} meshes".encode())
        for item, truth in zip(part, known, strict=True):
            digest.update(item.name.encode(errors="surrogatepass"))
            for array in (item.mesh.verts, item.mesh.faces, truth):
                digest.update(f"{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
