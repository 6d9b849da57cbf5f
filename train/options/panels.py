"""The panels of --help in their order, and what declares an option in each."""

from __future__ import annotations

from functools import partial

from diffnet.options import option

NETWORK = "Network"
PANELS = (None, "Labels", "Features and operators", NETWORK, "Training", "Augmentation", "Run")
of_labels, of_features, _, of_training, of_augmentation, of_run = (partial(option, panel=name) for name in PANELS[1:])
