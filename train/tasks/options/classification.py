"""The options of classification."""

from dataclasses import replace

from diffnet.train.tasks.options.labels import LABELED

OPTIONS = replace(
    LABELED,
    generated="shapes",
    recipe={"width": 128, "learning_rate": 1e-3, "batch_meshes": 4, "label_smoothing": 0.2},
    original={"width": 32, "dropout": 0.0, "label_smoothing": 0.2},
)
