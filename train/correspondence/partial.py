"""Partial shapes: the loss, the maps and the scores of networks that predict the overlap of two meshes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from diffnet.data import MeshPairs, Sample
from diffnet.data.pairs.shapes import Pair, PairShape
from diffnet.geometry import Operators
from diffnet.train.metrics import class_scores, confusion_matrix, mean_score, number_or_none

OVERLAP = "overlap_iou", "overlap_balanced_accuracy"  # the scores of an overlap, from 0 to 1
TEMPERATURE = 0.07  # of the similarities of features of length 1
COHERENT, STEPS, COHERENCE = 30, 3, 30.0  # eigenpairs, steps and weight of `coherent_map`


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
    lengths, evecs = list(operators.lengths), operators.evecs[:, :COHERENT].float()
    features, inside, bases, mass = (torch.split(x, lengths) for x in (unit, logits[:, 0], evecs, operators.mass))
    scales = operators.evals[:, 1:COHERENT].float().clamp(min=1e-3).rsqrt()
    nearest = []
    for i, x in enumerate(features):
        j = i ^ 1  # the other mesh of the pair
        scores = torch.addmm(F.logsigmoid(inside[j])[None], x, features[j].mT, alpha=1 / TEMPERATURE)
        nearest.append(coherent_map(scores, bases[i], inside[i].sigmoid() * mass[i], bases[j][:, 1:] * scales[j]))
    return torch.cat([torch.cat(nearest).float()[:, None], logits], 1)


def matches_inside(outputs: Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The nearest vertex (V,) of each vertex, and whether it is in the overlap, by `overlap_outputs` (V, 2)."""
    nearest, logits = outputs.cpu().unbind(1)
    return nearest.long().numpy(), (logits > 0).numpy()


def coherent_map(scores: Tensor, basis: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """The vertex (V,) of y for each vertex of x that has a high score, and is where the neighbors go.

    scores: (V, W), of the vertices of y for each vertex of x
    basis: (V, K), low eigenvectors of x; weights: (V,), of the vertices of x: their mass in the overlap
    places: (W, C), coordinates of the vertices of y, such as φ/√λ of the commute-time distance

    The features of left and right are similar, so scores alone exchange them at single vertices. The expected places
    are a function on x, whose projection to the basis says where the neighbors go. Each step lowers the scores of
    vertices far from there.
    """
    weighted, current = (basis * weights[:, None]).mT, scores
    gram = weighted @ basis + 1e-3 * torch.eye(basis.shape[1], device=basis.device)
    for _ in range(STEPS):
        expected = basis @ torch.linalg.solve(gram, weighted @ (current.softmax(1) @ places))
        distances = torch.cdist(expected, places).square()
        current = scores - COHERENCE * distances / distances.mean().clamp(min=1e-12)
    return current.argmax(1)


def overlap_targets(data: MeshPairs, shapes: Sequence[PairShape], pair: Pair, one: Sample, other: Sample) -> Tensor:
    """The targets (V_second + V_first, 3) int64 of a pair, the second mesh first, as `collate_pairs` packs them.

    Columns: whether a vertex is in the overlap, see `MeshPairs.overlap`; the vertex of the other mesh that corresponds,
    or −1; and the number of the vertex, from 0 in each mesh.
    """
    first, second = (shapes[i] for i in pair)
    targets = [np.full((len(shape.mesh.verts), 3), -1) for shape in (second, first)]
    for rows in targets:
        rows[:, 2] = np.arange(len(rows))
    truth = data.truth(first, second)
    if truth is not None:
        targets[1][:, 0], targets[0][:, 0] = data.overlap(first, second)
        targets[0][truth.points, 1], targets[1][truth.vertices, 1] = truth.vertices, truth.points
    return torch.from_numpy(np.concatenate(targets)).to(one.features.device)


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
    meshes = list(zip(torch.split(outputs, lengths), torch.split(targets, lengths), strict=True))
    loss = outputs.new_zeros(())
    for (x, t), (y, u) in zip(meshes[0::2], meshes[1::2], strict=True):
        logits, labels = torch.cat([x[:, -1], y[:, -1]]), torch.cat([t[:, 0], u[:, 0]])
        mask = labels >= 0
        losses = F.binary_cross_entropy_with_logits(logits, mask * labels.to(logits), reduction="none")
        loss = loss + (mask * losses).sum() / mask.sum().clamp(min=1)
        for one, other, match in ((x, y, t[:, 1]), (y, x, u[:, 1])):
            scores = one[:, :-1] @ other[:, :-1].mT / TEMPERATURE
            losses = F.cross_entropy(scores, match, ignore_index=-1, reduction="sum")
            loss = loss + losses / (match >= 0).sum().clamp(min=1) / 2
    return loss / (len(meshes) // 2)


def overlap_tally(outputs: Tensor, targets: Tensor) -> Tensor:
    """The vertices (2,) in both the true and the predicted overlap, and in one of them. See `Task.tally`."""
    counts = confusion_matrix((outputs[:, -1] > 0).long(), targets[:, 0], 2)
    return torch.stack([counts[1, 1], counts[1, 1] + counts[0, 1] + counts[1, 0]]).double()


def overlap_scores(
    predicted: Sequence[NDArray[np.bool_]], labels: Sequence[NDArray[np.int64]]
) -> dict[str, float | None]:
    """The scores of a predicted overlap of a pair, see OVERLAP: means over both meshes. None if they aren't known.

    predicted: whether each vertex (V,) of both meshes is in the overlap; labels: see `MeshPairs.overlap`

    The balanced accuracy is the mean of the shares of vertices inside and outside that are right. It is that of the
    meshes that have both.
    """
    ious, accuracies = [], []
    for inside, truth in zip(predicted, labels, strict=True):
        scores = class_scores(confusion_matrix(torch.from_numpy(inside).long(), torch.from_numpy(truth), 2))
        ious.append(scores.iou[1])
        accuracies.append(scores.accuracy.mean())  # NaN without vertices on one side
    means = (mean_score(np.array(values)) for values in (ious, accuracies))
    return dict(zip(OVERLAP, map(number_or_none, means), strict=True))
