"""The training loop of all tasks."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import all_reduce
from torch.utils._pytree import tree_map_only

from diffnet import WeightAverage, __version__
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
from diffnet.train.random_state import random_state, set_random_state
from diffnet.train.ranks import ALONE, Ranks
from diffnet.train.resident import DeviceSamples, counts_of, taken
from diffnet.train.run_folder.event_file import EventFile
from diffnet.train.run_folder.history import Row, as_csv, columns
from diffnet.train.run_folder.spool import Spool
from diffnet.train.steps.augmentation import draw_changes, draw_variants
from diffnet.train.steps.parts import largest_part, own_parts
from diffnet.train.steps.step import TrainingStep, restore_optimizer, set_learning_rate
from diffnet.train.tasks.task import Task

T = TypeVar("T")

STREAM = 0x9E3779B97F4A7C15  # the distance between the seeds of two streams of random numbers
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
    checkpoint_every: int | None = None,
    ranks: Ranks = ALONE,
    after_epoch: Callable[[Row], Any] = lambda row: None,
    after_step: Callable[[float], Any] = lambda epochs: None,
    predictions: list[Tensor] | Spool | None = None,
) -> Checkpoint:
    """Train a network and write its checkpoints into the folder `out`.

    Returns the checkpoint to judge. With `validation`, that is the one with the highest score on the held-out
    training meshes. Without, it is the last one. The test set is evaluated, but never used to choose.

    `out` gets last.pt after every epoch, best.pt (by validation score, else by training loss), metrics.csv, and the
    event files of TensorBoard.

    A seed gives the same weights in every run on the same machine with the same number of threads and of ranks. An
    epoch depends only on the previous epoch and on (seed, epoch), so a resumed run equals an uninterrupted one. The
    order of the meshes and their augmentation are the same for any number of ranks, except `jitter`.

    capture: on a GPU, replay CUDA graphs of steps and evaluations. Graphs serve batches of any size.
    checkpoint_every: write last.pt also after every so many steps of an epoch. A resumed run goes on there.
    ranks: those that train together, with a `process_group`. Each has all data, and takes a part of each batch. Rank 0
        writes all files.
    after_step: gets the number of epochs that have been trained, for example 2.25 after a quarter of the third
    predictions: an empty list or `Spool` that gets the predictions of each test sample by the checkpoint to judge, on
        the CPU, see `Task.predict`. It gets them only if this call trains the last epoch and that epoch is the one to
        judge.

    Raises TrainingError if a loss or a weight is not finite. last.pt then holds the last checkpoint before. Raises
    CheckpointError if a run can't be resumed, and OptionError if it was started with other options, if validation
    leaves no mesh to train on, if there are more ranks than meshes, and if ranks have other data or versions.
    """
    task, meshes = data.task, data.meshes
    score_name, score_of = task.scoring(options)
    samples, groups = _grouped(data)
    fitted, held_out_groups = set_aside(groups, options)
    held_out = taken(samples, [group[0] for group in held_out_groups])
    check_divided(options, ranks, len(fitted))
    torch.manual_seed(options.seed)
    model = build_model(options, meshes.label_names, meshes.labels_at, data.statistics).to(device)
    average = WeightAverage(model, options.average_weights) if options.average_weights > 0 else None
    scored = model if average is None else average.network
    parts = ranks.place.world_size * options.accumulate
    step = TrainingStep(task, model, options, device, average, parts)
    if capture and device.type == "cuda" and options.backend == "auto":
        if task.captured:
            trained = taken(samples, [number for group in fitted for number in group])
            sizes = trained.sizes() if isinstance(trained, DeviceSamples) else [s.operators for s in trained]
            step.capture(sizes, limits=largest_part([int(n) for n in counts_of(trained)], options, parts))
        elif scored is not model:  # the network alone
            graphed(model, first_visits=0)
        graphed(scored, first_visits=0)  # in evaluations; the same kernels every time, so resumed runs are equal
    history: list[Row] = []
    best = -math.inf
    content = ranks.after_first(lambda: [contents_of(part) for part in (meshes.train, meshes.test)])
    fingerprint = _fingerprint(meshes, content, task.pairs(meshes))
    train_meshes = [mesh[:DIGITS] for mesh, *_ in content[0]]
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
        history, best, position = stored["history"], stored["best"], stored["position"]
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
            loss, tally = _Epoch(epoch, step, samples, fitted, meshes.labels_at, ranks)(
                position, after_step, checkpoint_every, save
            )
            position = None
            if average is not None:
                average.write()
            last = epoch + 1 == options.epochs
            due = (epoch + 1) % options.eval_every == 0 or last
            tested = validated = None
            if due:
                kept = predictions if last else None
                tested = score_of(evaluate(task, scored, data.test, options, device, kept, ranks))
            if len(held_out):
                validated = score_of(evaluate(task, scored, held_out, options, device, None, ranks))
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


def check_divided(options: TrainOptions, ranks: Ranks, meshes: int | None = None) -> None:
    """Raises OptionError if ranks can't share the batches.

    meshes: the number of meshes or pairs to fit, if it is known
    """
    world = ranks.place.world_size
    if world == 1:
        return
    if options.batch_meshes is not None and options.batch_meshes < world:
        raise OptionError(
            f"batch_meshes should be at least {world}, one mesh for each rank, got {options.batch_meshes}; it counts "
            "those of all ranks"
        )
    if meshes is not None and meshes < world:
        raise OptionError(
            f"there are {world} ranks, and only {counted(meshes, 'mesh or pair', 'meshes or pairs')} to train on"
        )


def check_alike(
    ranks: Ranks,
    meshes: LabeledMeshes,
    content: Sequence[Sequence[Sequence[str]]],
    fingerprint: str,
    options: TrainOptions,
    *reached: int | None,
) -> None:
    """Raises OptionError, which names a rank, if it has other data, options, versions or checkpoints than rank 0."""
    versions = f"diffnet {__version__}, PyTorch {torch.__version__}"
    every = ranks.gathered([versions, options.as_dict(), reached, fingerprint])
    for rank, own in enumerate(every):
        for name, first, found in zip(("versions", "options", "a checkpoint", "data"), every[0], own, strict=True):
            if first == found:
                continue
            of = f"rank {rank} has other {name} than rank 0"
            if name == "data":  # all ranks get here
                names = [name for part in (meshes.train, meshes.test) for name in names_of(part)]
                hashes = [" ".join(own) for part in content for own in part]
                both = ranks.gathered(list(zip(names, hashes, strict=True)))
                pairs = zip_longest(both[0], both[rank])
                mesh = next((theirs or ours for ours, theirs in pairs if ours != theirs), None)
                raise OptionError(of + ("" if mesh is None else f": {mesh[0]} differs, and maybe others"))
            raise OptionError(f"{of}: {found} and {first}")


class _Epoch:
    """One pass over the training set.

    samples: all samples and variants
    groups: the numbers of each training sample and of its variants
    labels_at: where the labels are
    """

    def __init__(
        self,
        epoch: int,
        step: TrainingStep,
        samples: Sequence[Any],
        groups: Sequence[Sequence[int]],
        labels_at: TargetsAt,
        ranks: Ranks,
    ) -> None:
        self._epoch, self._step, self._ranks, self._saved = epoch, step, ranks, f"epoch {epoch}"
        self._options, self._device, self._meshes = step.options, step.device, step.task.meshes_of_sample
        options, place = step.options, ranks.place
        self._seed(0)
        changes = draw_changes(len(groups) * self._meshes, options, step.device, labels_at)
        self._samples = taken(samples, draw_variants(groups))
        lengths = [int(n) for n in counts_of(self._samples)]
        batches = MeshBatches(
            lengths, meshes=options.batch_meshes, max_vertices=options.batch_vertices, shuffle=True, seed=options.seed
        )
        batches.set_epoch(epoch)
        self._batches = list(batches)
        # The numbers in the epoch of the samples in each pass of this rank.
        self._parts = own_parts(self._batches, lengths, place, options.accumulate)
        self._divided = place.world_size * options.accumulate > 1
        self._changes = changes.taken([self._meshes * n + i for n in _all(self._parts) for i in range(self._meshes)])
        if place.rank > 0:
            self._seed(place.rank)  # dropout

    def __call__(
        self,
        position: dict[str, Any] | None,
        after_step: Callable[[float], Any],
        checkpoint_every: int | None,
        save: Callable[[dict[str, Any]], Any],
    ) -> tuple[float, Tensor]:
        """Train. Returns the mean loss of the steps, and their tally under dropout.

        position: what `save` got when the epoch was stopped
        save: gets the position in the epoch after every `checkpoint_every` steps
        """
        begun, losses = self._begin(position)
        step, samples, world = self._step, self._samples, self._ranks.place.world_size
        step.model.train()
        order = [i for batch in self._batches for i in batch]
        todo = [[order[n] for n in part] for parts in self._parts[begun:] for part in parts]
        loaded = packed(samples, todo, self._device)
        reduce = all_reduce if world > 1 else (lambda sums: None)
        first = sum(map(len, self._batches[:begun]))  # number of samples that all ranks have used
        own = self._meshes * len(_all(self._parts[:begun]))  # meshes that this rank has used
        names: list[tuple[str, ...]] = [()] * begun
        rate_before: float | None = None
        for n in range(begun, len(self._batches)):
            rate = self._options.learning_rate_at(self._epoch + first / len(order))
            if rate != rate_before:  # on a GPU, setting it launches a kernel
                set_learning_rate(step.optimizer, rate)
                rate_before = rate
            names.append(())
            for sample in islice(loaded, len(self._parts[n])):
                changed = self._changes.made(sample, own)
                rotations = self._changes.rotations_of(own, len(sample.operators))
                if self._divided:
                    step.add(changed, rotations)
                else:
                    losses.append(step(changed, rotations))
                own += len(sample.operators)
                names[-1] += sample.names
            if self._divided:
                losses.append(step.update(reduce))
            first += len(self._batches[n])
            after_step(self._epoch + first / len(order))
            if checkpoint_every is not None and (n + 1) % checkpoint_every == 0 and first < len(order):
                self._check(losses, names)
                tally, random = self._tally(), self._ranks.gathered(random_state(self._device))
                self._saved = f"{n + 1} steps of it"
                save({"steps": n + 1, "losses": torch.stack(losses).cpu(), "tally": tally, "random": random})
        values = self._check(losses, names)
        return sum(values) / len(values), self._tally()

    def _begin(self, position: dict[str, Any] | None) -> tuple[int, list[Tensor]]:
        """The number of steps that were taken before, and their losses."""
        self._step.tally.zero_()
        if position is None:
            return 0, []
        place = self._ranks.place
        if place.rank == 0:
            self._step.tally.add_(position["tally"].to(self._device))
        if len(position["random"]) == place.world_size:
            set_random_state(position["random"][place.rank], self._device)
        else:
            self._seed(place.world_size * position["steps"] + place.rank)
        return position["steps"], [*position["losses"].to(self._device)]

    def _seed(self, stream: int) -> None:
        """Seed the global generators. Each stream draws other numbers."""
        torch.manual_seed((epoch_seed(self._options.seed, self._epoch) + stream * STREAM) % 2**63)

    def _tally(self) -> Tensor:
        """That of all ranks, on the CPU."""
        tally = self._step.tally.clone()
        if not self._ranks.is_alone:
            all_reduce(tally)
        return tally.cpu()

    def _check(self, losses: Sequence[Tensor], names: Sequence[tuple[str, ...]]) -> list[float]:
        """The losses as numbers. They are read rarely, so steps don't wait for the GPU. Raises TrainingError."""
        values: list[float] = torch.stack([*losses]).tolist()
        broken = [(f"loss became {v}", own) for v, own in zip(values, names, strict=True) if not math.isfinite(v)]
        # No loss has been computed yet with the weights of the last step.
        if not all(torch.stack([p.detach().isfinite().all() for p in self._step.model.parameters()]).tolist()):
            broken.append(("weights became NaN or infinite", names[-1]))
        if broken:
            fault, own = broken[0]
            batch = [name for names in self._ranks.gathered(own) for name in names]
            raise TrainingError(
                f"the {fault} in epoch {self._epoch + 1}, on {', '.join(batch)}; last.pt holds {self._saved}. "
                "A lower --lr or --precision fp32 may help"
            )
        return values


def _all(parts: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [n for own in parts for part in own for n in part]


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
