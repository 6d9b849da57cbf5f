"""Reads samples again: the bytes of their entries go to pinned memory, and their tensors are made on the GPU.

Threads that make tensors wait for Python's global lock. Threads that read bytes don't.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffnet.data.samples import Interpolation, Sample
from diffnet.geometry.cache import open_again
from diffnet.geometry.preprocessing.flat import layout
from diffnet.geometry.preprocessing.known_entry import operators_of_tensors
from diffnet.geometry.transfer import Place, TensorsAt, empty_pinned

EXTENTS = ("ptr", "face_ptr")  # of a batch of one mesh; entries don't hold them


class PinnedSample(NamedTuple):
    """A sample in a buffer of pinned memory.

    places: of its tensors in the buffer
    counts: of vertices and of faces
    """

    name: str
    buffer: Tensor
    places: dict[str, Place]
    counts: tuple[int, int]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Sample:
        """The sample on a device. See `Operators.to`."""
        tensors = TensorsAt(self.buffer.to(device, non_blocking=non_blocking), self.places)
        back = Interpolation(tensors["elements"], tensors["weights"].float()) if "weights" in self.places else None
        operators = operators_of_tensors(tensors, *self.counts)
        return Sample((self.name,), tensors["features"], tensors["labels"], operators, back)


def read_again(name: str, paths: Sequence[Path], counts: tuple[int, int]) -> PinnedSample | None:
    """A sample that has been read from these entries before. None if one of them is gone or has changed.

    counts: of vertices and of faces
    """
    with ExitStack() as files:
        try:
            entries = []
            for path in paths:
                entry = open_again(path)
                if entry is None:
                    return None
                files.enter_context(entry.file)
                entries.append(entry)
            arrays = [array for entry in entries for array in entry.arrays]
            arrays += [(extent, np.dtype(np.int64), (2,), 16) for extent in EXTENTS]
            offsets, size = layout(count for *_, count in arrays)
            buffer = empty_pinned(size)
            content = buffer.numpy().data
            pieces = iter([content[at : at + count] for (*_, count), at in zip(arrays, offsets, strict=True)])
            if not all(entry.read([*islice(pieces, len(entry.arrays))]) for entry in entries):
                return None
        except OSError:
            return None
    for piece, count in zip(pieces, counts, strict=True):
        piece[:] = np.array([0, count]).data.cast("B")
    places = {own: (dtype, shape, at) for (own, dtype, shape, _), at in zip(arrays, offsets, strict=True)}
    return PinnedSample(name, buffer, places, counts)
