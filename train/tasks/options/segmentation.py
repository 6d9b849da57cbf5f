"""The options of segmentation."""

from diffnet.train.tasks.options.labels import LABELED

OPTIONS = LABELED
