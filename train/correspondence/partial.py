"""Partial shapes: the loss, the maps and the scores of networks that predict the overlap of two meshes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from diffnet.data import MeshPairs, Sample
from diffnet.data.pairs.shapes import Pair, PairShape
from diffnet.geometry import Operators
from diffnet.train.metrics import confusion_matrix

TEMPERATURE = 0.07  # of the similarities of features of length 1


def overlap_outputs(outputs: Tensor, operators: Operators) -> Tensor:
    """What the loss or the scores need of the outputs of a network, at all vertices.

    outputs: (V, C + 1), features and the logit of the overlap
    operators: meshes a and b of each of P pairs in turn, as `collate_pairs` packs them

    Returns features of length 1 and the logit, (V, C + 1). Without gradients, (V, 2): for each vertex the number of its
    nearest vertex on the other mesh, and the logit.
    """
    outputs = outputs.float()
    unit, logits = F.normalize(outputs[:, :-1], dim=1), outputs[:, -1:]
    if outputs.requires_grad:
        return torch.cat([unit, logits], 1)
    features, scores = (torch.split(x, list(operators.lengths)) for x in (unit, F.logsigmoid(logits)))
    nearest = [nearest_vertices(x, features[i ^ 1], scores[i ^ 1][:, 0]) for i, x in enumerate(features)]
    return torch.cat([torch.cat(nearest).float()[:, None], logits], 1)


def nearest_vertices(x: Tensor, others: Tensor, scores: Tensor) -> Tensor:
    """For each of V features (V, C) of length 1, the most similar of others (W, C). scores: (W,), log probabilities"""
    return torch.addmm(scores[None], x, others.mT, alpha=1 / TEMPERATURE).argmax(1)


def overlap_targets(data: MeshPairs | None, first: PairShape, second: PairShape, device: torch.device) -> Tensor:
    """The targets of a pair (V_second + V_first, 3) int64, the second mesh first, as `collate_pairs` packs them.

    Columns: whether a vertex is in the overlap, see `MeshPairs.overlap`; the vertex of the other mesh that corresponds,
    or −1; and the number of the vertex, from 0 in each mesh.

    data: the set, or None if the truth is not to be used
    """
    shapes = second, first
    targets = [np.full((len(shape.mesh.verts), 3), -1) for shape in shapes]
    for rows in targets:
        rows[:, 2] = np.arange(len(rows))
    truth = None if data is None else data.truth(first, second)
    if data is not None and truth is not None:
        points = truth.nearest_vertices(second.mesh)
        targets[1][:, 0], targets[0][:, 0] = data.overlap(first, second)
        targets[0][points, 1], targets[1][truth.vertices, 1] = truth.vertices, points
    return torch.from_numpy(np.concatenate(targets)).to(device)


@dataclass(frozen=True)
class OverlapTargets:
    """Computes targets of pairs, see `overlap_targets`. None as data: they are not known."""

    data: MeshPairs | None
    shapes: list[PairShape]

    def __call__(self, pair: Pair, one: Sample, other: Sample) -> Tensor:
        return overlap_targets(self.data, self.shapes[pair[0]], self.shapes[pair[1]], one.features.device)


def overlap_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss () of P pairs, averaged over these: the cross entropy of the overlap, and that of the match.

    outputs: (V, C + 1), see `overlap_outputs`
    targets: (V, 3), see `overlap_targets`

    The probability of a match is the softmax of the similarities of a vertex to all vertices of the other mesh, divided
    by TEMPERATURE (van den Oord et al. 2018). Vertices without a known match don't count, and neither do those of which
    the overlap isn't known.
    """
    starts = (targets[:, 2] == 0).nonzero()[:, 0].tolist()
    lengths = np.diff([*starts, len(targets)]).tolist()
    meshes = list(zip(outputs.split(lengths), targets.split(lengths), strict=True))
    loss = outputs.new_zeros(())
    for (x, t), (y, u) in zip(meshes[0::2], meshes[1::2], strict=True):
        logits, labels = torch.cat([x[:, -1], y[:, -1]]), torch.cat([t[:, 0], u[:, 0]])
        loss = loss + _mean(F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0).float(), reduction="none")[labels >= 0])
        for one, other, match in ((x, y, t[:, 1]), (y, x, u[:, 1])):
            rows = (match >= 0).nonzero()[:, 0]
            scores = one[rows, :-1] @ other[:, :-1].mT / TEMPERATURE
            loss = loss + _mean(F.cross_entropy(scores, match[rows], reduction="none")) / 2
    return loss / (len(meshes) // 2)


def _mean(losses: Tensor) -> Tensor:
    return losses.sum() / max(len(losses), 1)


def overlap_tally(outputs: Tensor, targets: Tensor) -> Tensor:
    """The vertices (2,) in both the true and the predicted overlap, and in one of them. See `Task.tally`."""
    counts = confusion_matrix((outputs[:, -1] > 0).long(), targets[:, 0], 2)
    return torch.stack([counts[1, 1], counts[1, 1] + counts[0, 1] + counts[1, 0]]).double()


@dataclass(frozen=True)
class OverlapScores:
    """The scores of a predicted overlap of a pair, from 0 to 1: means over both meshes. NaN if the truth isn't known.

    iou: intersection over union of the true and the predicted overlap
    balanced_accuracy: the mean of the shares of vertices inside and outside that are right; of meshes that have both
    """

    iou: float
    balanced_accuracy: float


def overlap_scores(predicted: list[NDArray[np.bool_]], labels: tuple[NDArray[np.int64], ...]) -> OverlapScores:
    """predicted: whether each vertex (V,) of both meshes is in the overlap; labels: see `MeshPairs.overlap`"""
    ious, accuracies = [], []
    for inside, truth in zip(predicted, labels, strict=True):
        known = truth >= 0
        inside, right = inside[known], truth[known] == 1
        ious.append((inside & right).sum() / max((inside | right).sum(), 1) if len(right) else np.nan)
        if right.any() and not right.all():
            accuracies.append((inside[right].mean() + (~inside[~right]).mean()) / 2)
    return OverlapScores(float(np.mean(ious)), float(np.mean(accuracies)) if accuracies else float("nan"))
