"""The training loop of all tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from diffnet import DiffusionNet, WeightAverage
from diffnet.cuda_graphs import graphed
from diffnet.data import ArrayStatistics, LabeledMeshes, PairSample, Sample, Statistics
from diffnet.geometry.files import write_atomically
from diffnet.train.batches import largest_part
from diffnet.train.checkpoint import Checkpoint, build_model, load_checkpoint, save_checkpoint
from diffnet.train.epoch import Epoch
from diffnet.train.evaluate import evaluate
from diffnet.train.event_file import EventFile
from diffnet.train.fine_tuning import copy_weights
from diffnet.train.options import TrainOptions
from diffnet.train.ranks import ALONE, Ranks
from diffnet.train.resident import ReadAhead, counts_of, taken
from diffnet.train.run_checks import (
    DIGITS,
    check_alike,
    check_divided,
    check_same_data,
    check_same_options,
    contents_of,
    fingerprint_of,
)
from diffnet.train.run_folder import Row, Spool, as_csv, columns
from diffnet.train.steps.step import TrainingStep, restore_optimizer
from diffnet.train.tasks.task import Task


@dataclass(frozen=True)
class RunData:
    """The data set of a run, as samples.

    statistics: of the own arrays among the features, see `array_statistics`
    target_statistics: of the targets of a regression, which are standardized in the samples
    condition_statistics: of the conditions, which are standardized, too
    groups: the numbers of each training sample and of its variants, see `make_variants`, which are behind all training
        samples in `train`. An epoch trains on one of a group. Empty without variants.
    held_out: the numbers of the training samples that only choose the epoch, see `with_held_out`
    start: the network that a new run starts from, in rank 0
    """

    task: Task[Any, Any]
    meshes: LabeledMeshes
    train: Sequence[Sample | PairSample]
    test: Sequence[Sample | PairSample]
    statistics: Statistics | None = None
    target_statistics: ArrayStatistics | None = None
    condition_statistics: ArrayStatistics | None = None
    groups: Sequence[Sequence[int]] = ()
    held_out: Sequence[int] = ()
    start: DiffusionNet | None = None


def train(
    data: RunData,
    options: TrainOptions,
    out: Path,
    *,
    device: torch.device,
    resume: bool = False,
    capture: bool = True,
    checkpoint_every: int | None = None,
    ranks: Ranks = ALONE,
    after_epoch: Callable[[Row], Any] = lambda row: None,
    after_step: Callable[[float], Any] = lambda epochs: None,
    predictions: Spool | None = None,
) -> Checkpoint:
    """Train a network and write last.pt, best.pt, metrics.csv and the files of TensorBoard into the folder `out`.

    Returns the checkpoint to judge: with meshes that are held out, the one with the highest score on them, else the
    last one. The test set is evaluated, but never used to choose. best.pt has the lowest loss if none are held out.

    A seed gives the same weights in every run on the same machine with the same number of threads and of ranks. An
    epoch depends only on the previous epoch and on (seed, epoch), so a resumed run equals an uninterrupted one. The
    order of the meshes and their augmentation are the same for any number of ranks, except `jitter`.

    capture: on a GPU, replay CUDA graphs of steps and evaluations
    checkpoint_every: write last.pt also after every so many steps of an epoch
    ranks: those that train together, with a `process_group`. Each has all data. Rank 0 writes all files.
    after_step: gets the number of epochs that have been trained, for example 2.25 after a quarter of the third
    predictions: an empty `Spool` that gets `Task.predict` of each test sample, on the CPU, if this call trains
        the last epoch and that epoch is the one to judge

    Raises TrainingError if a loss or a weight is not finite, CheckpointError if a run can't be resumed, and OptionError
    if it was started with other options, if there are more ranks than meshes, and if ranks have other data or versions.
    """
    task, meshes = data.task, data.meshes
    score_name, score_of = task.score_name(options), partial(task.score, options=options)
    samples, groups = data.train, data.groups or [[i] for i in range(len(data.train))]
    out_of_training = set(data.held_out)
    fitted = [group for group in groups if group[0] not in out_of_training]
    held_out = taken(samples, data.held_out)
    check_divided(options, ranks, len(fitted))
    torch.manual_seed(options.seed)
    model, hashes = _first_network(data, options, ranks)
    model = model.to(device)
    average = WeightAverage(model, options.average_weights) if options.average_weights > 0 else None
    scored = model if average is None else average.network
    parts = ranks.place.world_size * options.accumulate
    step = TrainingStep(task, model, options, device, average)
    # Networks for partial shapes have an attention between two meshes, whose sizes a graph doesn't know.
    if capture and device.type == "cuda" and options.backend == "auto" and not options.partial:
        trained = taken(samples, [number for group in fitted for number in group])
        sizes = trained.sizes() if isinstance(trained, ReadAhead) else [s.operators for s in trained]
        step.capture(sizes, limits=largest_part([int(n) for n in counts_of(trained)], options, parts))
        graphed(scored, first_visits=0)  # in evaluations; the same kernels every time, so resumed runs are equal
    history: list[Row] = []
    best = -math.inf
    content = ranks.after_first(lambda: [contents_of(part) for part in (meshes.train, meshes.test)])
    fingerprint = fingerprint_of(meshes, content, task.pairs(meshes))
    train_meshes = [*(mesh[:DIGITS] for mesh, *_ in content[0]), *hashes]
    position: dict[str, Any] | None = None  # in an epoch

    def checkpoint() -> Checkpoint:
        return {
            "model": scored.state_dict(),
            "averaging": None if average is None else average.state_dict(),
            "optimizer": step.optimizer.state_dict(),
            "history": history,
            "position": position,
            "best": best,
            "options": options.as_dict(),
            "label_names": meshes.label_names,
            "label_numbers": meshes.label_numbers,
            "label_colors": dict(meshes.label_colors),
            "labels_at": meshes.labels_at,
            "data": fingerprint,
            "train_meshes": train_meshes,
            "statistics": dict(data.statistics or {}),
            "target_statistics": data.target_statistics,
            "condition_statistics": data.condition_statistics,
        }

    if resume:
        stored = load_checkpoint(out / "last.pt", device)
        check_same_options(stored, options, out)
        check_same_data(stored, checkpoint(), out)
        scored.load_state_dict(stored["model"])
        if average is not None:
            average.load_state_dict(stored["averaging"])
        restore_optimizer(step.optimizer, stored["optimizer"])
        history, best, position = stored["history"], stored["best"], stored["position"]
        train_meshes = stored.get("train_meshes") or train_meshes  # older checkpoints have none
    check_alike(ranks, meshes, content, fingerprint, options, len(history), (position or {}).get("steps"))
    if ranks.is_first and resume:
        # The run may have stopped after it wrote last.pt and before it wrote the table.
        write_atomically(out / "metrics.csv", as_csv(history, score_name))
    elif ranks.is_first:
        save_checkpoint(out / "last.pt", checkpoint())

    def save(reached: dict[str, Any]) -> None:
        nonlocal position
        position = reached
        if average is not None:
            average.write()
        if ranks.is_first:
            written.result()
            save_checkpoint(out / "last.pt", checkpoint())

    def write_epoch(paths: Sequence[Path], content: Checkpoint) -> None:
        save_checkpoint(paths[0], content, *paths[1:])
        write_atomically(out / "metrics.csv", as_csv(content["history"], score_name))

    # TensorBoard's steps are epochs from 1. purge_step hides later epochs that an interrupted run may have written.
    board_of_first = EventFile(out / "tensorboard", len(history) + 1) if ranks.is_first else nullcontext()
    with ThreadPoolExecutor(1) as writer, board_of_first as board:
        written: Future[None] = writer.submit(lambda: None)
        for epoch in range(len(history), options.epochs):
            started = time.perf_counter()
            loss, tally = Epoch(epoch, step, samples, fitted, meshes.labels_at, ranks)(
                position, after_step, checkpoint_every, save
            )
            position = None
            if average is not None:
                average.write()
            last = epoch + 1 == options.epochs
            due = (epoch + 1) % options.eval_every == 0 or last
            tested = validated = None
            if due:
                sink = predictions if last else None
                tested = score_of(evaluate(task, scored, data.test, options, device, sink, ranks))
            if len(held_out):
                validated = score_of(evaluate(task, scored, held_out, options, device, None, ranks))
            scores, seconds = (score_of(tally), validated, tested), time.perf_counter() - started
            values = epoch + 1, options.learning_rate_at(epoch), loss, *scores, seconds
            row: Row = dict(zip(columns(score_name), values, strict=True))
            history.append(row)
            score = -loss if validated is None else validated
            # The score is NaN if nothing held out is labeled. The first epoch is then the best.
            improved = epoch == 0 or score > best
            best = max(best, score)
            if board is not None:
                # best.pt is written before last.pt. If the run stops between the two, resuming repeats this epoch.
                paths = [out / "best.pt", out / "last.pt"][0 if improved else 1 :]
                written.result()
                # The thread writes a copy, because the next epoch changes the tensors.
                copied = tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), checkpoint())
                written = writer.submit(write_epoch, paths, copied)
                shown = {name: value for name in columns(score_name)[1:] if (value := row[name]) is not None}
                board.add(shown, epoch + 1)
            after_epoch(row)
        written.result()
    ranks.shared(lambda: None)  # rank 0 has written its files
    judged = load_checkpoint(out / ("best.pt" if len(held_out) else "last.pt"), device)
    if predictions is not None and len(judged["history"]) != options.epochs:
        predictions.clear()
    return judged


def _first_network(data: RunData, options: TrainOptions, ranks: Ranks) -> tuple[DiffusionNet, list[str]]:
    """The network before the first step, on the CPU, and hashes of the meshes that it was trained on before."""
    names = data.meshes.label_names
    model = build_model(options, names, data.meshes.labels_at, data.statistics)

    def started() -> dict[str, Any] | None:
        if data.start is None:
            return None
        statistics = data.statistics, data.target_statistics, data.condition_statistics
        copy_weights(data.start, model, options, names, *statistics)
        return {"weights": model.state_dict(), "meshes": data.start.metadata.get("train_meshes") or []}

    start = ranks.shared(started) or {"weights": model.state_dict(), "meshes": []}
    model.load_state_dict(start["weights"])
    if options.freeze == "blocks":
        for name in ("first", "blocks", "pairs", "modulation"):
            if hasattr(model, name):
                getattr(model, name).requires_grad_(False)
    return model, start["meshes"]
