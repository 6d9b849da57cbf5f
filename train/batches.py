"""Batches on the device, and their division over ranks and passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate

import torch

from diffnet.data import PairSample, Sample, collate_pairs, collate_samples
from diffnet.data.samples import balanced_shares
from diffnet.train.options import TrainOptions
from diffnet.train.place import Place
from diffnet.train.resident import ReadAhead, read_ahead

# Batches. Packing one can take longer than a step, because its small kernels wait for free multiprocessors.
AHEAD = 2


def packed(
    samples: Sequence[Sample | PairSample], batches: Iterable[list[int]], device: torch.device
) -> Iterator[Sample]:
    """Batches of samples, or of pairs of them, on the device.

    While a GPU works on a batch, the next AHEAD ones are packed and moved. A batch may be used until the next one is
    asked for. The GPU may still work on it then.

    samples: `DeviceSamples`, or in memory. The latter are packed first and then moved, which may round differently.
    """
    batches = read_ahead(samples, batches)

    def pack(batch: list[int]) -> tuple[Sequence[Sample | PairSample], Sample]:
        members = [samples[i] for i in batch]
        pairs = [sample for sample in members if isinstance(sample, PairSample)]
        sample = collate_pairs(pairs) if pairs else collate_samples([s for s in members if isinstance(s, Sample)])
        tensors = sample.features, sample.labels, sample.operators.mass
        if any(x.device.type != device.type for x in tensors):
            sample = sample.to(device, non_blocking=True)
        return members, sample

    source = samples.source if isinstance(samples, ReadAhead) else None
    if device.type != "cuda" or (source is not None and source.is_resident):
        yield from (pack(batch)[1] for batch in batches)
        return
    # On the stream of the training steps, copies would wait for these steps. One thread does all of this: PyTorch gives
    # up Python's global lock in every operation, and a second thread would make each of them wait for it.
    copies, stream = copy_stream(device), torch.cuda.current_stream(device)
    copies.wait_stream(stream)  # memory of earlier batches may still be read
    # A field is packed when the network reads it, so the samples stay until the step on their batch has ended.
    steps: deque[tuple[torch.cuda.Event, Sequence[Sample | PairSample], Sample]] = deque()
    for batch in batches:
        if len(steps) > AHEAD:
            # The memory of this batch is used again. This also bounds the memory of waiting batches.
            steps.popleft()[0].synchronize()
        with torch.cuda.stream(copies):
            members, sample = pack(batch)  # those of `DeviceSamples` are moved when they are taken
        stream.wait_stream(copies)
        yield sample
        steps.append((stream.record_event(), members, sample))


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which batches are moved to a GPU. PyTorch caches memory for each stream, so there is only one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def own_parts(
    batches: Sequence[Sequence[int]], lengths: Sequence[int], place: Place, passes: int
) -> list[list[list[int]]]:
    """For each batch, the passes of a rank, without empty ones. They hold the numbers of meshes in the epoch, from 0.

    batches: all batches of an epoch
    lengths: number of vertices of each sample
    passes: how many passes a rank makes over its share of a batch, if it has so many meshes

    Ranks and passes get about equal numbers of vertices, see `balanced_shares`.

    >>> own_parts([[0, 1, 2], [3]], [50, 20, 30, 10], Place(1, 2), 2)
    [[[2], [1]], []]
    """
    firsts = accumulate(map(len, batches), initial=0)
    result = []
    for first, batch in zip(firsts, batches, strict=False):
        sizes = [lengths[i] for i in batch]
        share = balanced_shares(sizes, place.world_size)[place.rank]
        parts = balanced_shares([sizes[p] for p in share], passes)
        result.append([[first + share[p] for p in part] for part in parts if part])
    return result


def largest_part(lengths: Sequence[int], options: TrainOptions, parts: int) -> tuple[int | None, int | None]:
    """Limits of the meshes and the vertices of the parts of batches. A larger mesh is a part of its own."""
    meshes, vertices = options.batch_meshes, options.batch_vertices
    if parts == 1 or not lengths:
        return meshes, vertices
    largest = sorted(lengths, reverse=True)[:meshes]
    total = sum(largest) if vertices is None else min(sum(largest), max(vertices, largest[0]))
    # The mesh that a share gets last found it smaller than the mean share. Batches are divided twice.
    return meshes, -(-total // parts) + 2 * largest[0]
