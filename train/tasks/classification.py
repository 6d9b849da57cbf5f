"""Classification: a label for each mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diffnet.data import LabeledMeshes, TargetsAt, index_classes, shapes
from diffnet.data.stored import StoredMeshes
from diffnet.geometry.files import write_atomically
from diffnet.train.metrics import confusion_matrix, scores_a_test, spread_over
from diffnet.train.options import TrainOptions
from diffnet.train.options.task_options import SetOptions
from diffnet.train.tasks.labels import LabelTask, accuracies, accuracy_summary, class_results, matrix_of
from diffnet.train.tasks.task import Fields, NetworkInput, Predicted, Scored, titles_of, write_views

SHOWN_MESHES = 60  # on the page of predictions


def _matrix(scored: Scored) -> NDArray[np.int64]:
    return matrix_of(scored, (probabilities.argmax(-1) for probabilities in scored.predictions))


def _shown(scored: Scored) -> list[int]:
    """The meshes on the page: the errors first, then others spread over the test set."""
    known = scored.meshes.mesh_labels if isinstance(scored.meshes, StoredMeshes) else None
    truth = [int(item.labels.flat[0]) for item in scored.meshes] if known is None else known.reshape(-1).tolist()
    wrong = [i for i, label in enumerate(truth) if 0 <= label != int(scored.predictions[i].argmax())][:SHOWN_MESHES]
    others = sorted(set(range(len(scored.meshes))) - set(wrong))
    return wrong + spread_over(others, SHOWN_MESHES - len(wrong))


class Classification(LabelTask):
    """A class for each mesh."""

    name = "classification"
    targets_at = ("meshes",)

    def load(self, data: Sequence[str], how: SetOptions, options: TrainOptions) -> LabeledMeshes:
        if how.generated is not None:  # the smallest training part where it isn't read
            return shapes(**({} if how.needs_train else {"train": 1}), seed=how.seed, shift=how.generated or None)
        return index_classes(
            data[0], how.cache, seed=how.seed, needs_train=how.needs_train, group_by=how.group_by, jobs=how.jobs
        )

    def predict(self, outputs: Tensor) -> Tensor:
        """The probabilities (B, C) float32."""
        return outputs.float().softmax(-1)

    def tally(self, probabilities: Tensor, labels: Tensor, classes: int) -> Tensor:
        return confusion_matrix(probabilities.argmax(-1), labels, classes)

    def results(self, scored: Scored) -> dict[str, Any]:
        matrix = _matrix(scored)
        return {**accuracies(matrix), "classes": class_results(matrix, scored.label_names)}

    def write_report(
        self, out: Path, scored: Scored, results: dict[str, Any], summary: Mapping[str, str], curves: bytes | None
    ) -> None:
        # Matplotlib takes half a second to import, and training starts without it.
        from diffnet.train.report.charts import confusion_png
        from diffnet.train.report.report import Prediction, write_report

        matrix = _matrix(scored)
        confusion = confusion_png(matrix, scored.label_names)
        write_atomically(out / "confusion.png", confusion)

        def row(i: int) -> Prediction:
            item = scored.meshes[i]
            return Prediction(item.name, item.mesh.verts, item.mesh.faces, scored.predictions[i].numpy(), item.labels)

        write_report(
            out / "predictions.html",
            (row(i) for i in _shown(scored)),
            {**accuracy_summary(results), **summary},
            matrix=matrix,
            label_names=scored.label_names,
            confusion=confusion,
            curves=curves,
            title=f"Classification of the {'test' if scores_a_test(results) else 'scored'} meshes",
            at="meshes",
        )

    def table(self, predictions: Sequence[Predicted], network: NetworkInput) -> list[list[str]]:
        """The columns are file, label, and the probability of each class."""
        rows = [["file", "label", *network.label_names]]
        for predicted in predictions:
            shares = (f"{share:.6g}" for share in predicted.values.flatten().tolist())
            rows.append([predicted.mesh.name, network.label_names[int(predicted.values.argmax())], *shares])
        return rows

    def fields(self, predicted: Predicted, network: NetworkInput) -> Fields:
        label = int(predicted.values.argmax())
        return Fields("labels", "vertices", {"prediction": np.full(len(predicted.mesh.verts), label)})

    def write_views(
        self, predictions: Sequence[Predicted], network: NetworkInput, html: Path | None, png: Path | None
    ) -> None:
        meshes, label_names = [predicted.mesh for predicted in predictions], network.label_names
        chosen = [int(predicted.values.argmax()) for predicted in predictions]
        titles = [f"{title}: {label_names[label]}" for title, label in zip(titles_of(meshes), chosen, strict=True)]
        fields = [self.fields(predicted, network).values for predicted in predictions]
        write_views(
            meshes,
            html,
            png,
            "Predicted classes",
            fields,
            kind="labels",
            titles=titles,
            at="vertices",
            label_names=label_names,
        )

    def formats(self, at: TargetsAt) -> tuple[str, ...]:
        return ()  # one table


TASK = Classification()
