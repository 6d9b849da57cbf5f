"""Classification: a label for each mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from diffnet.data import LabeledMeshes, index_classes, shapes
from diffnet.data.stored import names_of
from diffnet.geometry.files import as_text
from diffnet.train.metrics import spread_over
from diffnet.train.options import TrainOptions
from diffnet.train.options.labels import CLASSIFICATION
from diffnet.train.options.task_options import SetOptions
from diffnet.train.tasks.labels import LabelTask
from diffnet.train.tasks.task import SHOWN_WHOLE, Fields, NetworkInput, Predicted, Scored, titles_of


class Classification(LabelTask):
    """A class for each mesh."""

    name = "classification"
    heading = "Predicted classes"
    targets_at = ("meshes",)

    def load(self, data: Sequence[str], how: SetOptions, options: TrainOptions) -> LabeledMeshes:
        if data[0] == CLASSIFICATION.builtin:  # with the smallest training part where it isn't read
            return shapes(**({} if how.needs_train else {"train": 1}), seed=how.seed)
        return index_classes(data[0], how.cache, labels=how.labels, ignored=options.ignore, **how.for_index())

    def predict(self, outputs: Tensor) -> Tensor:
        """The probabilities (B, C) float32."""
        return outputs.float().softmax(-1)

    def logits_of(self, predictions: Tensor) -> Tensor | None:
        return predictions.log()

    def per_mesh(self, scored: Scored, results: dict[str, Any]) -> list[list[Any]]:
        """The class of each mesh, the predicted one, and the probabilities of both."""
        names, rows = scored.label_names, [["mesh", "label", "predicted", "p_label", "p_predicted"]]
        truths = np.concatenate(self.read(scored)["truths"]).tolist()
        for name, truth, predicted in zip(names_of(scored.meshes), truths, scored.predictions, strict=True):
            shares, best = predicted.reshape(-1).tolist(), int(predicted.argmax())
            label, share = ("", "") if truth < 0 else (names[truth], f"{shares[truth]:.6g}")
            rows.append([as_text(name), label, names[best], share, f"{shares[best]:.6g}"])
        return rows

    def shown(self, scored: Scored) -> list[int]:
        """The errors first, then others spread over the test set."""
        truth = np.concatenate(self.read(scored)["truths"]).tolist()
        wrong = [i for i, label in enumerate(truth) if 0 <= label != int(scored.predictions[i].argmax())][:SHOWN_WHOLE]
        others = sorted(set(range(len(scored.meshes))) - set(wrong))
        return wrong + spread_over(others, SHOWN_WHOLE - len(wrong))

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

    def titles(self, predictions: Sequence[Predicted], network: NetworkInput) -> list[str]:
        labels = (network.label_names[int(predicted.values.argmax())] for predicted in predictions)
        titles = titles_of([predicted.mesh for predicted in predictions])
        return [f"{title}: {label}" for title, label in zip(titles, labels, strict=True)]


TASK = Classification()
