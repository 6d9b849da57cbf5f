"""One pass over the training set."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_reduce

from diffnet.data import MeshBatches, TargetsAt, epoch_seed
from diffnet.geometry.errors import DiffnetError
from diffnet.train.batches import own_parts, packed
from diffnet.train.ranks import Ranks
from diffnet.train.resident import counts_of, taken
from diffnet.train.steps.augmentation import draw_changes, draw_variants
from diffnet.train.steps.step import TrainingStep, set_learning_rate

STREAM = 0x9E3779B97F4A7C15  # the distance between the seeds of two streams of random numbers


class TrainingError(DiffnetError, RuntimeError):
    """Training failed. The message gives the reason and names the checkpoint that is left."""


class Epoch:
    """One pass over the training set.

    samples: all samples and variants
    groups: the numbers of each training sample and of its variants
    labels_at: where the labels are
    """

    def __init__(
        self,
        epoch: int,
        step: TrainingStep,
        samples: Sequence[Any],
        groups: Sequence[Sequence[int]],
        labels_at: TargetsAt,
        ranks: Ranks,
    ) -> None:
        self._epoch, self._step, self._ranks, self._saved = epoch, step, ranks, f"epoch {epoch}"
        self._options, self._device, self._meshes = step.options, step.device, step.task.meshes_of_sample
        options, place = step.options, ranks.place
        self._seed(0)
        changes = draw_changes(len(groups) * self._meshes, options, step.device, labels_at)
        self._samples = taken(samples, draw_variants(groups))
        lengths = [int(n) for n in counts_of(self._samples)]
        batches = MeshBatches(  # of all ranks, see `own_parts`
            lengths,
            meshes=options.batch_meshes,
            max_vertices=options.batch_vertices,
            shuffle=True,
            seed=options.seed,
            num_replicas=1,
        )
        batches.set_epoch(epoch)
        self._batches = list(batches)
        # The numbers in the epoch of the samples in each pass of this rank.
        self._parts = own_parts(self._batches, lengths, place, options.accumulate)
        self._divided = place.world_size * options.accumulate > 1
        self._changes = changes.taken([self._meshes * n + i for n in _all(self._parts) for i in range(self._meshes)])
        if place.rank > 0:
            self._seed(place.rank)  # dropout

    def __call__(
        self,
        position: dict[str, Any] | None,
        after_step: Callable[[float], Any],
        checkpoint_every: int | None,
        save: Callable[[dict[str, Any]], Any],
    ) -> tuple[float, Tensor]:
        """Train. Returns the mean loss of what has labels, in all steps, and their tally under dropout.

        position: what `save` got when the epoch was stopped
        save: gets the position in the epoch after every `checkpoint_every` steps
        """
        begun, losses = self._begin(position)
        step, samples, world = self._step, self._samples, self._ranks.place.world_size
        step.model.train()
        step.model.blocks.train(self._options.freeze is None)  # frozen ones have no dropout
        order = [i for batch in self._batches for i in batch]
        todo = [[order[n] for n in part] for parts in self._parts[begun:] for part in parts]
        loaded = packed(samples, todo, self._device)
        reduce = all_reduce if world > 1 else (lambda sums: None)
        first = sum(map(len, self._batches[:begun]))  # number of samples that all ranks have used
        number = self._meshes * len(_all(self._parts[:begun]))  # meshes that this rank has used
        names: list[tuple[str, ...]] = [()] * begun
        rate_before: float | None = None
        for n in range(begun, len(self._batches)):
            rate = self._options.learning_rate_at(self._epoch + first / len(order))
            if rate != rate_before:  # on a GPU, setting it launches a kernel
                set_learning_rate(step.optimizer, rate)
                rate_before = rate
            names.append(())
            for sample in islice(loaded, len(self._parts[n])):
                changed = self._changes.made(sample, number)
                rotations = self._changes.rotations_of(number, len(sample.operators))
                if self._divided:
                    step.add(changed, rotations)
                else:
                    losses.append(step(changed, rotations))
                number += len(sample.operators)
                names[-1] += sample.names
            if self._divided:
                losses.append(step.update(reduce))
            first += len(self._batches[n])
            after_step(self._epoch + first / len(order))
            if checkpoint_every is not None and (n + 1) % checkpoint_every == 0 and first < len(order):
                self._check(losses, names)
                totals = {"tally": self._total(step.tally), "sums": self._total(step.sums)}
                random = self._ranks.gathered(random_state(self._device))
                self._saved = f"{n + 1} steps of it"
                save({"steps": n + 1, "losses": torch.stack(losses).cpu(), **totals, "random": random})
        self._check(losses, names)
        weighted, count = self._total(step.sums).tolist()
        return weighted / count if count > 0 else 0.0, self._total(step.tally)

    def _begin(self, position: dict[str, Any] | None) -> tuple[int, list[Tensor]]:
        """The number of steps that were taken before, and their losses."""
        totals = {"tally": self._step.tally, "sums": self._step.sums}
        for total in totals.values():
            total.zero_()
        if position is None:
            return 0, []
        place = self._ranks.place
        if place.rank == 0:
            for name, total in totals.items():
                total.add_(position[name].to(self._device))
        if len(position["random"]) == place.world_size:
            set_random_state(position["random"][place.rank], self._device)
        else:
            self._seed(place.world_size * position["steps"] + place.rank)
        return position["steps"], [*position["losses"].to(self._device)]

    def _seed(self, stream: int) -> None:
        """Seed the global generators. Each stream draws other numbers."""
        torch.manual_seed((epoch_seed(self._options.seed, self._epoch) + stream * STREAM) % 2**63)

    def _total(self, part: Tensor) -> Tensor:
        """The sum over all ranks, on the CPU."""
        total = part.clone()
        if not self._ranks.is_alone:
            all_reduce(total)
        return total.cpu()

    def _check(self, losses: Sequence[Tensor], names: Sequence[tuple[str, ...]]) -> None:
        """Raises TrainingError for a loss or weights that aren't finite. Reading them rarely keeps the GPU busy."""
        values: list[float] = torch.stack([*losses]).tolist()
        broken = [
            (f"loss became {v}", members) for v, members in zip(values, names, strict=True) if not math.isfinite(v)
        ]
        # No loss has been computed yet with the weights of the last step, and an infinite moment only stops its weight.
        moments = [x for state in self._step.optimizer.state.values() for x in state.values() if x.ndim > 0]
        for what, tensors in (("weights", [*self._step.model.parameters()]), ("moments of Adam", moments)):
            norms = torch._foreach_norm([x.detach() for x in tensors], math.inf)
            if not torch.stack(norms).isfinite().all():
                broken.append((f"{what} became NaN or infinite", names[-1]))
        if broken:
            fault, members = broken[0]
            batch = [name for names in self._ranks.gathered(members) for name in names]
            raise TrainingError(
                f"the {fault} in epoch {self._epoch + 1}, on {', '.join(batch)}; last.pt holds {self._saved}. "
                "A lower --lr or --precision fp32 may help"
            )


def _all(parts: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [n for division in parts for part in division for n in part]


def random_state(device: torch.device) -> list[str]:
    """The states of the generators of the CPU and of the device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [b64encode(bytes(state.tolist())).decode() for state in states]


def set_random_state(states: list[str], device: torch.device) -> None:
    """Go on with random numbers. States of another kind of device count for the CPU only."""
    first, *others = (torch.tensor(list(b64decode(text)), dtype=torch.uint8) for text in states)
    torch.set_rng_state(first)
    if others and device.type == "cuda":
        torch.cuda.set_rng_state(others[0], device)
