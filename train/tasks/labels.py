"""Functions for tasks whose targets are labels: the loss, the confusion matrix and its scores."""

from __future__ import annotations

import math
import shlex
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from diffnet.data import UNLABELED, LabeledMeshes
from diffnet.data.folders.files import listing
from diffnet.data.stored import names_of
from diffnet.geometry.errors import OptionError
from diffnet.geometry.files import as_text, write_atomically
from diffnet.ops import cross_entropy, dice_loss, focal_loss, generalized_dice_loss, label_smoothing_loss
from diffnet.ops.cross_entropy.op import row_weights, total_weight
from diffnet.train.metrics import (
    SCORE_NAMES,
    accuracy,
    class_mean,
    class_scores,
    confusion_matrix,
    number,
    number_or_none,
    percent,
    scores_a_test,
)
from diffnet.train.options import TrainOptions
from diffnet.train.options.labels import RANKED, LabelScore
from diffnet.train.options.sides import FDI, NO_SIDES, found_sides, tooth_on_other_side
from diffnet.train.ranking import average_precision, exact_rankings, log_odds, new_ranking, ranking_tally, roc_auc
from diffnet.train.tasks.classes import class_counts, numbers_on, with_class_options
from diffnet.train.tasks.task import MeshTask, ReportParts, Scored

SHOWN_CLASSES = 12  # in the summary of a set
TEETH = "tla", "tsa", "tir"  # the scores of teeth


LABEL_SCORES: dict[LabelScore, Callable[[Any], float]] = {
    "accuracy": accuracy,
    "balanced-accuracy": partial(class_mean, "accuracy"),
    "mean-iou": partial(class_mean, "iou"),
    "dice": partial(class_mean, "dice"),
    "roc-auc": roc_auc,
    "average-precision": average_precision,
}


def _score_texts(results: Mapping[str, Any], digits: int = 1) -> dict[str, str]:
    """The scores in results.json as texts, by the names that people read. digits: of percentages"""
    names = {"test_accuracy": "test accuracy" if scores_a_test(results) else "accuracy", **SCORE_NAMES}
    names |= {"soft_accuracy": "accuracy by soft labels", **{name: name.upper() for name in TEETH}}
    ranked = {"roc_auc", "average_precision", *TEETH}
    return {
        title: number(results[name]) if name in ranked else percent(results[name], digits)
        for name, title in names.items()
        if name in results
    }


def score_cells(scores: Iterable[float]) -> list[str]:
    """Scores as cells of a table, empty for NaN."""
    return ["" if math.isnan(score) else f"{score:.6g}" for score in scores]


class LabelTask(MeshTask):
    """The parts that tasks with labels share."""

    report_files = ("confusion.png", "ranking.png")

    def prepared(self, data: LabeledMeshes, options: TrainOptions) -> tuple[LabeledMeshes, TrainOptions]:
        return with_class_options(*super().prepared(data, options))

    def check(self, data: LabeledMeshes, options: TrainOptions) -> None:
        """Raises OptionError if meshes are mirrored, classes have sides, and `mirror_labels` is not given."""
        if not options.mirror or options.mirror_labels is not None or not (pairs := found_sides(data.label_names)):
            return
        teeth = all(tooth_on_other_side(name) == other for name, other in pairs)
        exchanged = FDI if teeth else shlex.quote(",".join(f"{name}={other}" for name, other in pairs))
        (name, other), *_ = pairs
        raise OptionError(
            f"mirror leaves labels as they are, but there are the classes {name!r} and {other!r}. To exchange them in "
            f"mirrored meshes, add --mirror-labels {exchanged}. If labels don't depend on the side, add "
            f"--mirror-labels {NO_SIDES}"
        )

    def described(self, data: LabeledMeshes, jobs: int | None) -> list[tuple[str, str]]:
        unlabeled, *counts = class_counts(data, jobs)
        occur = {name: count for name, count in zip(data.label_names, counts, strict=True) if count}
        every = listing((f"{name} {count:,}" for name, count in occur.items()), SHOWN_CLASSES)
        none = f"; {len(counts) - len(occur)} don't occur" if len(occur) < len(counts) else ""
        none += f"; {unlabeled:,} unlabeled" if unlabeled else ""
        rows = [("labels", data.labels_from)] if data.labels_from else []
        rows.append(("classes", f"{len(counts)} at the {data.labels_at}, without the test part: {every}{none}"))
        numbers = data.label_numbers or ()
        if list(numbers) != [*range(len(numbers))] and data.label_names != list(map(str, numbers)):
            pairs = zip(numbers, data.label_names, strict=True)
            rows.append(("names", listing((f"{number} is {name}" for number, name in pairs), SHOWN_CLASSES)))
        return rows

    def loss(self, outputs: Tensor, targets: Tensor, options: TrainOptions) -> Tensor:
        """The loss () over labeled elements, 0 if there are none. outputs: logits (N, C), targets: labels (N,) int64"""
        loss, smoothing, backend = options.label_loss, options.label_smoothing, options.backend
        weights = None if options.class_weights is None else numbers_on(outputs.device, options.class_weights)
        if loss == "focal":
            return focal_loss(outputs, targets, ignored=UNLABELED, backend=backend, weights=weights)
        if loss == "generalized-dice":
            return generalized_dice_loss(outputs, targets, UNLABELED)
        if loss == "dice":
            return dice_loss(outputs, targets, UNLABELED, weights=weights)
        if smoothing > 0:
            entropy = label_smoothing_loss(outputs, targets, smoothing, UNLABELED, backend, weights=weights)
        else:
            # PyTorch's own loss computes this mean on a single multiprocessor of the GPU. A separate sum uses all.
            losses = cross_entropy(outputs, targets, UNLABELED, backend, weights=weights)
            entropy = losses.sum() / total_weight(targets, UNLABELED, weights)
        return entropy + dice_loss(outputs, targets, UNLABELED, weights=weights) if "dice" in loss else entropy

    def loss_weight(self, options: TrainOptions) -> Callable[[Tensor], Tensor]:
        """The number of labeled elements, each with the weight of its class."""
        if "dice" in options.label_loss:
            raise OptionError(
                f"label_loss is {options.label_loss}, which is no mean over elements, so several ranks and "
                "--accumulate can't compute it in parts; choose cross-entropy or focal"
            )

        def weight(labels: Tensor) -> Tensor:
            counted = labels != UNLABELED
            if options.class_weights is None:
                return counted.sum()
            return torch.where(counted, row_weights(numbers_on(labels.device, options.class_weights), labels), 0).sum()

        return weight

    def counted(self, options: TrainOptions) -> Callable[[Tensor], Tensor]:
        if "dice" in options.label_loss:  # no mean over elements, so batches with labels count alike
            return lambda labels: (labels != UNLABELED).any()
        return self.loss_weight(options)

    def classes_of(self, predictions: Tensor) -> Tensor:
        """The classes (N,) int64 of the result of `to_score`, which may be logits or probabilities (N, C)."""
        return predictions.argmax(-1) if predictions.is_floating_point() else predictions

    @abstractmethod
    def logits_of(self, predictions: Tensor) -> Tensor | None:
        """Logits (N, C) that rank the elements, from the result of `to_score`, or None if it has classes alone."""

    def new_tally(self, channels: int, device: torch.device, options: TrainOptions) -> Tensor:
        """A confusion matrix (C, C) int64, or rankings."""
        if options.score in RANKED:
            return new_ranking(channels, device)
        return torch.zeros(channels, channels, dtype=torch.int64, device=device)

    def tally(self, predictions: Tensor, targets: Tensor, channels: int, options: TrainOptions) -> Tensor:
        if options.score not in RANKED:
            return confusion_matrix(self.classes_of(predictions), targets, channels)
        logits = self.logits_of(predictions)
        assert logits is not None  # `to_score` keeps them for these scores
        return ranking_tally(logits, targets)

    def read(self, scored: Scored) -> dict[str, Any]:
        """The confusion matrix (C, C) of each mesh and of all, and the rankings, in one pass over all meshes."""
        memo, classes = scored.memo, len(scored.label_names)
        if "matrix" in memo:
            return memo
        each, odds, truths = list[NDArray[np.int64]](), list[NDArray[np.float32]](), list[NDArray[np.int64]]()
        for (_, labels), predicted in zip(scored.cases(), scored.predictions, strict=True):
            truth = torch.as_tensor(labels).reshape(-1)
            each.append(confusion_matrix(self.classes_of(predicted), truth, classes).numpy())
            if (logits := self.logits_of(predicted)) is not None:
                odds.append(log_odds(logits).numpy().astype(np.float32))
                truths.append(truth.numpy())
        memo["matrix"] = sum(each, np.zeros((classes, classes), np.int64))
        memo["matrices"], memo["odds"], memo["truths"] = each, odds, truths
        memo["rankings"] = exact_rankings(odds, truths, classes) if odds else []
        return memo

    def worst_first(self, scored: Scored) -> list[int]:
        """The meshes by their accuracy, the worst first, and those without labels last."""
        shares = [accuracy(torch.from_numpy(matrix)) for matrix in self.read(scored)["matrices"]]
        return sorted(range(len(shares)), key=lambda i: math.inf if math.isnan(shares[i]) else shares[i])

    def per_mesh(self, scored: Scored, results: dict[str, Any]) -> list[list[Any]]:
        memo, names = self.read(scored), names_of(scored.meshes)
        scores = [score for score in LABEL_SCORES if memo["odds"] or score not in RANKED]
        rows: list[list[Any]] = [["mesh", "labeled", *(score.replace("-", "_") for score in scores)]]
        for i, (name, matrix) in enumerate(zip(names, memo["matrices"], strict=True)):
            tallies: dict[LabelScore, Any] = dict.fromkeys(scores, torch.from_numpy(matrix))
            if memo["odds"]:
                tallies |= dict.fromkeys(RANKED, exact_rankings([memo["odds"][i]], [memo["truths"][i]], len(matrix)))
            cells = score_cells(LABEL_SCORES[score](tally) for score, tally in tallies.items())
            rows.append([as_text(name), int(matrix.sum()), *cells])
        return rows

    def results(self, scored: Scored) -> dict[str, Any]:
        """The accuracy over all elements, the mean over the classes that occur in the truth, and scores of these.

        The first two are None if nothing is labeled.
        """
        matrix, rankings = (self.read(scored)[name] for name in ("matrix", "rankings"))
        scores, labeled = class_scores(matrix)._asdict(), bool(matrix.any())
        count = scores.pop("elements")
        return {
            "test_accuracy": accuracy(torch.from_numpy(matrix)) if labeled else None,
            "balanced_accuracy": class_mean("accuracy", matrix) if labeled else None,
            "dice": number_or_none(class_mean("dice", matrix)),
            **{score.replace("-", "_"): number_or_none(LABEL_SCORES[score](rankings)) for score in RANKED if rankings},
            **self.further_results(scored),
            "classes": [
                {"name": scored.label_names[i], "count": int(count[i])}
                | {name: float(each[i]) for name, each in scores.items()}
                for i in np.flatnonzero(count).tolist()
            ],
        }

    def further_results(self, scored: Scored) -> dict[str, Any]:
        """Further entries of results.json."""
        return {}

    def write_report(self, scored: Scored, results: dict[str, Any], parts: ReportParts) -> None:
        # Matplotlib takes half a second to import, and training starts without it.
        from diffnet.train.report.charts import confusion_png, ranking_png
        from diffnet.train.report.report import class_table, labels_html

        matrix, rankings = (self.read(scored)[name] for name in ("matrix", "rankings"))
        names, at = scored.label_names, scored.labels_at
        confusion = confusion_png(matrix, names)
        write_atomically(parts.out / "confusion.png", confusion)
        ranking = ranking_png(rankings, names) if rankings else None
        if ranking is not None:
            write_atomically(parts.out / "ranking.png", ranking)
        charts = [
            (confusion, "Confusion matrix", "Confusions by class"),
            (ranking, "ROC curves and precision by recall", "Ranking by probability"),
            (parts.curves, "Losses and accuracies over the epochs", "Training"),
        ]
        entries = {name[0].upper() + name[1:]: text for name, text in _score_texts(results).items()}
        parts = parts._replace(summary={**entries, **parts.summary})
        title, section = f"{self.name.capitalize()} of the", partial(labels_html, label_names=names, at=at)
        self.write_page(scored, results, parts, title, class_table(matrix, names, at), charts, section)

    def score(self, tally: Tensor, options: TrainOptions) -> float:
        return LABEL_SCORES[options.score](tally)

    def score_name(self, options: TrainOptions) -> str:
        return options.score.replace("-", "_")

    def summary(self, results: dict[str, Any]) -> tuple[Table, str]:
        """The scores of each class as a table, and those of all classes as a line."""
        shown = results["classes"]
        table = Table("class", "elements" if "mean_iou" in results else "meshes", "accuracy", "IoU")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in shown[:30]:
            table.add_row(row["name"], str(row["count"]), percent(row["accuracy"]), percent(row["iou"]))
        if len(shown) > 30:
            table.add_row(f"… {len(shown) - 30} more in results.json", "", "", "")
        texts = _score_texts({name: value for name, value in results.items() if name != "dice"}, 2)
        return table, ", ".join(f"{name} {text}" for name, text in texts.items())
