"""Batches on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

from diffnet.data import PairSample, Sample, collate_pairs, collate_samples
from diffnet.train.resident import ReadAhead, read_ahead

T = TypeVar("T")
R = TypeVar("R")


def packed(
    samples: Sequence[Sample | PairSample], batches: Iterable[list[int]], device: torch.device
) -> Iterator[Sample]:
    """Batches of samples, or of pairs of them, on the device.

    If samples must be moved to a GPU, threads read them, and one packs and moves a batch while the GPU works on the one
    before. A batch may be used until the next one is asked for. The GPU may still work on it then.

    samples: of `on_device`, or in memory. The latter are packed first and then moved, which may round differently.
    """
    batches = read_ahead(samples, batches)

    def pack(batch: list[int]) -> Sample:
        chosen = [samples[i] for i in batch]
        pairs = [sample for sample in chosen if isinstance(sample, PairSample)]
        return collate_pairs(pairs) if pairs else collate_samples([s for s in chosen if isinstance(s, Sample)])

    if device.type != "cuda" or _are_there(samples):
        yield from (pack(batch).to(device) for batch in batches)
        return
    # On the stream of the training steps, copies would wait for these steps.
    copies = copy_stream(device)
    copies.wait_stream(torch.cuda.current_stream(device))  # memory of earlier batches may still be read
    steps: deque[torch.cuda.Event] = deque()

    def load(numbered: tuple[int, list[int]]) -> Sample:
        number, batch = numbered
        if number >= 2:
            # Its memory may be that of the last batch but one, so the step on that one must have ended. This also
            # bounds the memory of waiting batches.
            steps.popleft().synchronize()
        with torch.cuda.stream(copies):
            # Samples of `on_device` are moved when they are taken.
            sample = pack(batch).to(device)
            copies.synchronize()
        return sample

    for sample in computed_ahead(load, enumerate(batches)):
        yield sample
        steps.append(torch.cuda.current_stream(device).record_event())


def _are_there(samples: Sequence[Sample | PairSample]) -> bool:
    """Whether all samples are on the GPU."""
    if isinstance(samples, ReadAhead):
        return samples.is_resident
    return all(s.operators.device.type == "cuda" for s in samples)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which batches are moved to a GPU. PyTorch caches memory for each stream, so there is only one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def computed_ahead(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """The results of a function of each item, in order. A thread computes the next one while the last one is used."""
    computed: deque[Future[R]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for item in items:
            computed.append(pool.submit(function, item))
            if len(computed) > 1:
                yield computed.popleft().result()
        yield from (future.result() for future in computed)
