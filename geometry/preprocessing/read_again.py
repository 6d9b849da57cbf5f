"""Reads the entries of a mesh again: their bytes go to pinned memory, and their tensors are made on the GPU.

Threads that make tensors wait for Python's global lock. Threads that read bytes don't.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffnet.geometry.cache import open_again
from diffnet.geometry.preprocessing.flat import Place, layout
from diffnet.geometry.transfer import TensorsAt, empty_pinned

EXTENTS = ("ptr", "face_ptr")  # of a batch of one mesh; entries don't hold them


class PinnedEntries(NamedTuple):
    """Arrays in a buffer of pinned memory, and their places there."""

    buffer: Tensor
    places: dict[str, Place]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> TensorsAt:
        """The tensors on a device. They share one buffer."""
        return TensorsAt(self.buffer.to(device, non_blocking=non_blocking), self.places)


def read_again(entries: Mapping[Path, tuple[str, ...] | None], counts: tuple[int, int]) -> PinnedEntries | None:
    """The arrays in entries that have been read before, and EXTENTS. None if an entry is gone or has changed.

    entries: with the names of the arrays that are wanted, None for all
    counts: of vertices and of faces
    """
    with ExitStack() as files:
        try:
            found = []
            for path, wanted in entries.items():
                entry = open_again(path, wanted)
                if entry is None:
                    return None
                files.enter_context(entry.file)
                found.append(entry)
            arrays = [array for entry in found for array in entry.arrays]
            arrays += [(extent, np.dtype(np.int64), (2,), 16) for extent in EXTENTS]
            offsets, size = layout(count for *_, count in arrays)
            buffer = empty_pinned(size)
            content = buffer.numpy().data
            pieces = iter([content[at : at + count] for (*_, count), at in zip(arrays, offsets, strict=True)])
            if not all(entry.read([*islice(pieces, len(entry.arrays))]) for entry in found):
                return None
        except OSError:
            return None
    for piece, count in zip(pieces, counts, strict=True):
        piece[:] = np.array([0, count]).data.cast("B")
    places = {own: (dtype, shape, at) for (own, dtype, shape, _), at in zip(arrays, offsets, strict=True)}
    return PinnedEntries(buffer, places)
