"""The options of segmentation."""

from dataclasses import replace

from diffnet.train.tasks.options.labels import LABELED

OPTIONS = replace(LABELED, generated="figures")
