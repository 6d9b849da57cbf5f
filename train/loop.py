"""Training a segmentation network."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from diffnet import DiffusionNet
from diffnet.data import UNLABELED, LabeledMeshes, MeshBatches, Sample, collate_samples, epoch_seed
from diffnet.ops import Backend, cross_entropy
from diffnet.train.capture import CapturedStep
from diffnet.train.checkpoint import Checkpoint, CheckpointError, build_model, load_checkpoint, save_checkpoint
from diffnet.train.metrics import accuracy, confusion_matrix
from diffnet.train.options import TrainOptions, autocast
from diffnet.train.report.export import write_atomically

COLUMNS = (
    "epoch",
    "learning_rate",
    "train_loss",
    "train_accuracy",
    "validation_accuracy",
    "test_accuracy",
    "seconds",
)

Row = dict[str, float | int | None]


class TrainingError(RuntimeError):
    """Training can't go on. The message says why, and what is left."""


def train(
    data: LabeledMeshes,
    train_samples: Sequence[Sample],
    test_samples: Sequence[Sample],
    options: TrainOptions,
    out: Path,
    *,
    device: torch.device,
    resume: bool = False,
    capture: bool = False,
    after_epoch: Callable[[Row], Any] = lambda row: None,
) -> Checkpoint:
    """Train, writing into the folder `out`; returns the checkpoint that is to be judged.

    That is the one of highest accuracy on the part of the training set that `validation` sets aside, or, without one,
    the last. The test set is only looked at, never chosen by.

    In `out`: last.pt after every epoch and best.pt (by validation accuracy, else by training loss), metrics.csv, and
    TensorBoard's event files. An epoch depends on the one before and on (seed, epoch) only, so a run that is resumed
    is the run that was interrupted.

    capture: record the step of each mesh that is kept on the GPU as a CUDA graph, and replay it in later epochs

    Raises TrainingError where a loss is not finite; last.pt then holds the epoch before. See `check_capture`, too.
    """
    check_capture(capture, options, device)
    fitted, held_out = _set_aside(train_samples, options)
    torch.manual_seed(options.seed)
    model = build_model(options, data.label_names, data.labels_at).to(device)
    optimizer = _make_optimizer(model, options, device)
    steps = _Steps(model, optimizer, options, device, capture)
    history: list[Row] = []
    best = -math.inf
    fingerprint = _fingerprint(data)

    def checkpoint() -> Checkpoint:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "history": history,
            "best": best,
            "options": options.as_dict(),
            "label_names": data.label_names,
            "labels_at": data.labels_at,
            "data": fingerprint,
        }

    if resume:
        stored = load_checkpoint(out / "last.pt", device)
        _check_same_run(stored, checkpoint(), options, out)
        model.load_state_dict(stored["model"])
        _restore_optimizer(optimizer, stored["optimizer"])
        history, best = stored["history"], stored["best"]
        # The run may have ended between the two files.
        write_atomically(out / "metrics.csv", _as_csv(history))
    else:
        save_checkpoint(out / "last.pt", checkpoint())
    batches = MeshBatches(
        [s.operators.num_vertices for s in fitted],
        meshes=options.batch_meshes,
        max_vertices=options.batch_vertices,
        shuffle=True,
        seed=options.seed,
    )
    loader: Iterable[Sample] = DataLoader(fitted, batch_sampler=batches, collate_fn=collate_samples)  # type: ignore[arg-type]

    # Steps are epochs from 1; of those to come, what an interrupted run may have left is not to be shown.
    with SummaryWriter(str(out / "tensorboard"), purge_step=len(history) + 1) as board:
        for epoch in range(len(history), options.epochs):
            started = time.perf_counter()
            batches.set_epoch(epoch)
            torch.manual_seed(epoch_seed(options.seed, epoch))
            _set_learning_rate(optimizer, options.learning_rate_at(epoch))
            loss, matrix = _train_epoch(model, steps, loader, options, device, epoch)
            due = (epoch + 1) % options.eval_every == 0 or epoch + 1 == options.epochs
            row: Row = {
                "epoch": epoch + 1,
                "learning_rate": options.learning_rate_at(epoch),
                "train_loss": loss,
                "train_accuracy": accuracy(matrix),
                "validation_accuracy": accuracy(evaluate(model, held_out, options, device)) if held_out else None,
                "test_accuracy": accuracy(evaluate(model, test_samples, options, device)) if due else None,
                "seconds": time.perf_counter() - started,
            }
            history.append(row)
            score = row["validation_accuracy"] if held_out else -loss
            assert score is not None
            # A score is NaN where nothing held out is labelled; then the first epoch is as good as any.
            improved = epoch == 0 or score > best
            best = max(best, score)
            # The best first: should the run end between the two, resuming runs this epoch again.
            if improved:
                save_checkpoint(out / "best.pt", checkpoint())
            save_checkpoint(out / "last.pt", checkpoint())
            write_atomically(out / "metrics.csv", _as_csv(history))
            for name in COLUMNS[1:]:
                if row[name] is not None:
                    board.add_scalar(name, row[name], epoch + 1)
            after_epoch(row)
    return load_checkpoint(out / ("best.pt" if held_out else "last.pt"), device)


def check_capture(capture: bool, options: TrainOptions, device: torch.device) -> None:
    """Raises ValueError for `capture` on the CPU or with several meshes a step, which are never the same twice."""
    if capture and (device.type != "cuda" or options.batch_meshes != 1):
        raise ValueError(
            f"capture needs a GPU and steps of one mesh, got device {device} and batch_meshes = {options.batch_meshes}"
        )


def evaluate(model: DiffusionNet, samples: Iterable[Sample], options: TrainOptions, device: torch.device) -> Tensor:
    """The confusion matrix (C, C) of a network on samples, on the CPU."""
    classes = model.last.out_features
    matrix = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    for sample in samples:
        sample = sample.to(device)
        matrix += confusion_matrix(predict(model, sample, options, device), sample.labels, classes)
    return matrix.cpu()


def predict(model: DiffusionNet, sample: Sample, options: TrainOptions, device: torch.device) -> Tensor:
    """The most likely class (N,) int64 of every element of a sample, on the device."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), autocast(options.precision, device):
        sample = sample.to(device)
        prediction: Tensor = model(sample.features, sample.operators).argmax(-1)
    model.train(was_training)
    return prediction


def keep_on_device(
    samples: Sequence[Sample], device: torch.device, basis_dtype: torch.dtype = torch.float32
) -> list[Sample]:
    """The samples on a GPU, ready for gradients on the basis, as long as they take at most half of its free memory;
    else as they are, to be moved batch by batch. basis_dtype: what the basis is rounded to, once rather than each step
    """
    if device.type != "cuda":
        return list(samples)
    # The basis and the two gradients of it, float32; the rest is small beside them.
    needed = sum(3 * 4 * s.operators.evecs.numel() for s in samples)
    if needed > torch.cuda.mem_get_info(device)[0] / 2:
        return list(samples)
    return [_with_gradient_evecs(s.to(device), basis_dtype) for s in samples]


def _with_gradient_evecs(sample: Sample, basis_dtype: torch.dtype) -> Sample:
    return replace(sample, operators=sample.operators.with_gradient_evecs().with_basis_dtype(basis_dtype))


def _train_epoch(
    model: DiffusionNet,
    steps: _Steps,
    loader: Iterable[Sample],
    options: TrainOptions,
    device: torch.device,
    epoch: int,
) -> tuple[float, Tensor]:
    """One pass over the training set: the mean loss of its steps and the confusion matrix, dropout included."""
    model.train()
    classes = model.last.out_features
    matrix = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    losses: list[Tensor] = []
    names: list[tuple[str, ...]] = []
    for loaded, sample in _moved_ahead(loader, device):
        features = rotate(sample.features, sample.operators.lengths) if options.rotates else sample.features
        stays = sample.operators is loaded.operators
        loss, prediction = steps(replace(sample, features=features), stays)
        matrix += confusion_matrix(prediction, sample.labels, classes)
        losses.append(loss.clone())  # a captured step writes its next loss over this one
        names.append(sample.names)
    # Read back once an epoch, so that a step never waits for the GPU.
    values = torch.stack(losses).tolist()
    broken = [(f"loss became {v}", batch) for v, batch in zip(values, names, strict=True) if not math.isfinite(v)]
    # The last step's weights have had no loss yet to show in.
    if not all(torch.stack([p.detach().isfinite().all() for p in model.parameters()]).tolist()):
        broken.append(("weights became NaN or infinite", names[-1]))
    if broken:
        what, batch = broken[0]
        raise TrainingError(
            f"the {what} in epoch {epoch + 1}, on {', '.join(batch)}; last.pt holds epoch {epoch}. "
            "A lower --lr or --precision fp32 may help"
        )
    return sum(values) / len(values), matrix


def _moved_ahead(batches: Iterable[Sample], device: torch.device) -> Iterator[tuple[Sample, Sample]]:
    """Each batch, and the same on the device: read, packed and moved while the step before is under way."""
    ahead = iter(batches)
    if device.type != "cuda":  # where steps need the cores themselves
        yield from ((batch, batch.to(device)) for batch in ahead)
        return

    def fetch() -> tuple[Sample, Sample] | None:
        batch = next(ahead, None)
        return None if batch is None else (batch, batch.to(device))

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(fetch)
        while (fetched := pending.result()) is not None:
            pending = pool.submit(fetch)
            yield fetched


class _Steps:
    """Training steps: the loss () and the predictions (N,) of a sample, after which the network is a step further."""

    def __init__(
        self,
        model: DiffusionNet,
        optimizer: torch.optim.Optimizer,
        options: TrainOptions,
        device: torch.device,
        capture: bool,
    ) -> None:
        self._model, self._optimizer, self._options, self._device = model, optimizer, options, device
        # By mesh: the sample that its graph reads. It holds the operators, so that no other can take their place.
        self._captured: dict[int, tuple[Sample, CapturedStep[tuple[Tensor, Tensor]]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    def __call__(self, sample: Sample, stays: bool) -> tuple[Tensor, Tensor]:
        """stays: whether its operators are where they are in every epoch, so that a graph can go on reading them"""
        if self._pool is None or not stays:
            return self._step(sample)
        key = id(sample.operators)
        if key not in self._captured:
            own = replace(sample, features=sample.features.clone())
            self._captured[key] = own, CapturedStep(partial(self._step, own), self._pool)
        own, step = self._captured[key]
        own.features.copy_(sample.features)
        return step()

    def _step(self, sample: Sample) -> tuple[Tensor, Tensor]:
        self._optimizer.zero_grad(set_to_none=True)
        with autocast(self._options.precision, self._device):
            logits = self._model(sample.features, sample.operators)
        loss = segmentation_loss(logits, sample.labels, self._options.backend)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach(), logits.detach().argmax(-1)


def _make_optimizer(model: DiffusionNet, options: TrainOptions, device: torch.device) -> torch.optim.Optimizer:
    if device.type != "cuda":
        return torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    # One kernel for all parameters, and everything where a CUDA graph can read it.
    rate = torch.tensor(options.learning_rate, device=device)
    return torch.optim.Adam(model.parameters(), lr=rate, fused=True, capturable=True)


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what was trained; how the optimizer computes stays as it was made, for the device that it is on."""
    ways = [
        {name: group[name] for name in ("lr", "fused", "capturable", "foreach")} for group in optimizer.param_groups
    ]
    groups = [{**group, **way} for group, way in zip(state["param_groups"], ways, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})


def _set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def segmentation_loss(logits: Tensor, labels: Tensor, backend: Backend = "auto") -> Tensor:
    """Cross-entropy, the mean over labelled elements; 0 where there are none. logits (N, C), labels (N,) int64 → ()"""
    # Summed apart: where PyTorch's loss does it, one multiprocessor of a GPU goes through all elements.
    return cross_entropy(logits, labels, UNLABELED, backend=backend).sum() / (labels != UNLABELED).sum().clamp(min=1)


def rotate(positions: Tensor, lengths: Sequence[int]) -> Tensor:
    """Turn the positions (V, 3) of each mesh by its own random rotation, uniform over all."""
    turned = []
    for points in torch.split(positions, list(lengths)):
        # QR of a Gaussian matrix with the signs of R taken out is uniform over the orthogonal group (Mezzadri 2007).
        q, r = torch.linalg.qr(torch.randn(3, 3))
        q = q * r.diagonal().sign()
        turned.append(points @ (q * torch.linalg.det(q)).to(points))
    return torch.cat(turned)


def _set_aside(samples: Sequence[Sample], options: TrainOptions) -> tuple[list[Sample], list[Sample]]:
    """The training samples, divided into those to fit and those to validate on."""
    count = round(options.validation * len(samples))
    if options.validation > 0:
        count = max(count, 1)
    if count >= len(samples):
        raise ValueError(f"validation = {options.validation} of {len(samples)} training meshes leaves none to train on")
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(options.seed)).tolist()
    chosen = set(order[:count])
    fitted = [s for i, s in enumerate(samples) if i not in chosen]
    return fitted, [s for i, s in enumerate(samples) if i in chosen]


def _check_same_run(stored: Checkpoint, fresh: Checkpoint, options: TrainOptions, out: Path) -> None:
    """A run may be resumed with nothing changed but more epochs, and those only where the schedule doesn't use them."""
    before = {**TrainOptions().as_dict(), **stored["options"]}  # an older run hasn't heard of newer options
    for name, value in fresh["options"].items():
        if (name != "epochs" or options.schedule == "cosine") and before[name] != value:
            raise CheckpointError(f"{out / 'last.pt'}: this run was started with {name} = {before[name]}, not {value}")
    for name, what in (("label_names", "other labels"), ("labels_at", "other labels"), ("data", "other meshes")):
        if stored[name] != fresh[name]:
            raise CheckpointError(f"{out / 'last.pt'}: this run was started on a data set with {what}")


def _fingerprint(data: LabeledMeshes) -> str:
    """A hash of the meshes of a data set, their labels and their order."""
    digest = hashlib.sha256()
    for part in (data.train, data.test):
        digest.update(f"{len(part)} meshes".encode())
        for item in part:
            digest.update(item.name.encode())
            for array in (item.mesh.verts, item.mesh.faces, item.labels):
                digest.update(f"{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def _as_csv(history: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()
