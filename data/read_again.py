"""Samples that are read again: from their entries into pinned memory, and their tensors are made on the GPU.

Making tensors takes Python's global lock, for which threads wait. Reading bytes doesn't.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffnet.data.samples import Interpolation, Sample
from diffnet.geometry.cache import Layout, layout_of, read_again
from diffnet.geometry.preprocessing.flat import layout
from diffnet.geometry.preprocessing.known_entry import have_even_rows, operators_of_tensors
from diffnet.geometry.transfer import Place, TensorsAt, empty_pinned

EXTENTS = ("ptr", "face_ptr")  # of a batch of one mesh; entries don't hold them


class Reading(NamedTuple):
    """How a sample is read again.

    entries: those that hold its arrays
    places: of its arrays in a buffer, in the order of the entries, and then of EXTENTS
    pieces: the bytes of each of these arrays in the buffer
    counts: of vertices and of faces
    size: of the buffer, in bytes
    """

    name: str
    entries: list[Layout]
    places: dict[str, Place]
    pieces: list[slice]
    counts: tuple[int, int]
    size: int

    def pinned(self) -> PinnedSample | None:
        """The sample in pinned memory. None if an entry has changed."""
        buffer = empty_pinned(self.size)
        content = buffer.numpy().data
        pieces = [content[piece] for piece in self.pieces]
        first = 0
        for entry in self.entries:
            last = first + len(entry.arrays)
            if not read_again(entry, pieces[first:last]):
                return None
            first = last
        for piece, count in zip(pieces[first:], self.counts, strict=True):
            piece[:] = np.array([0, count]).data.cast("B")
        return PinnedSample(self, buffer)


class PinnedSample(NamedTuple):
    """A sample in a buffer of pinned memory."""

    reading: Reading
    buffer: Tensor

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Sample:
        """The sample on a device. See `Operators.to`."""
        flat = self.buffer.to(device, non_blocking=non_blocking)
        places = self.reading.places
        tensors = TensorsAt(flat, places)
        back = Interpolation(tensors["elements"], tensors["weights"].float()) if "weights" in places else None
        operators = operators_of_tensors(tensors, *self.reading.counts)
        return Sample((self.reading.name,), tensors["features"], tensors["labels"], operators, back)


def reading_of(sample: Sample, paths: list[Path]) -> Reading | None:
    """How to read a sample again that has been read from these entries. None if its tensors are not all in them."""
    operators = sample.operators
    entries = [entry for entry in map(layout_of, paths) if entry is not None]
    if len(entries) < len(paths) or not have_even_rows(operators):
        return None
    arrays = [array for entry in entries for array in entry.arrays]
    arrays += [(name, np.dtype(np.int64), (2,), 16) for name in EXTENTS]
    offsets, size = layout(count for *_, count in arrays)
    places: dict[str, Place] = {}
    for (name, dtype, shape, _), offset in zip(arrays, offsets, strict=True):
        like = torch.from_numpy(np.empty(shape, dtype))
        places[name] = like.dtype, shape, like.stride(), offset // like.itemsize
    pieces = [slice(at, at + count) for (*_, count), at in zip(arrays, offsets, strict=True)]
    counts = operators.num_vertices, len(operators.faces)
    return Reading(sample.names[0], entries, places, pieces, counts, size)
