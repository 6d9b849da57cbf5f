"""Eigenbases of many Laplacians on a GPU that factorises them, several at once.

One of 15,000 vertices keeps a GPU waiting for launches. So batches of them take the steps of the iteration together.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from diffnet.geometry.eigenbasis import (
    MODERATE,
    TOLERANCE,
    Array,
    Component,
    Pairs,
    Problem,
    checked_pairs,
    component_pairs,
    search,
)
from diffnet.geometry.lanczos import KrylovSpace
from diffnet.geometry.shift_invert import CudssShiftInvert, ShiftInverts, is_worth_a_device

MOST_TOGETHER = 8
BATCHES = 3  # under way side by side: while the GPU works for one, the cores do for the others


def eigenbases_on_gpu(problems: Sequence[Problem], k: int, device: torch.device, jobs: int) -> list[Pairs]:
    """See `eigenbases`. The work is that of threads, since processes would take turns on the GPU."""
    by_size = sorted(range(len(problems)), key=lambda i: len(problems[i][1]))
    size = _batch_size(problems, k, device)
    batches = [by_size[i : i + size] for i in range(0, len(problems), size)]
    found: dict[int, Pairs] = {}
    with (
        threadpool_limits(1),
        ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as helpers,
        ThreadPoolExecutor(BATCHES) as pool,
    ):
        running = [pool.submit(_batch, [problems[i] for i in batch], k, device, helpers) for batch in batches]
        for batch, future in zip(batches, running, strict=True):
            found |= zip(batch, future.result(), strict=True)
    return [found[i] for i in range(len(problems))]


def _batch_size(problems: Sequence[Problem], k: int, device: torch.device) -> int:
    """Such that there is a batch for each at a time, and memory for their bases, of up to 5 k vectors and as many
    numbers again."""
    each = 2 * 5 * k * 8 * max(len(mass) for _, mass in problems)
    fit = torch.cuda.mem_get_info(device)[0] // (BATCHES * each + 1)
    return max(1, min(MOST_TOGETHER, fit, -(-len(problems) // BATCHES)))


def _batch(problems: Sequence[Problem], k: int, device: torch.device, helpers: ThreadPoolExecutor) -> list[Pairs]:
    searches = [search(laplacian, mass, k) for laplacian, mass in problems]
    answers: dict[int, Pairs | None] = dict.fromkeys(range(len(searches)))
    found: dict[int, Pairs] = {}
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        while answers:
            asked = helpers.map(_go_on, [searches[i] for i in answers], answers.values())
            components: dict[int, Component] = {}
            for i, got in zip(answers, asked, strict=True):
                if isinstance(got, Component):
                    components[i] = got
                else:
                    found[i] = got
            answers = dict(zip(components, pairs_together([*components.values()], device, helpers), strict=True))
    return [found[i] for i in range(len(searches))]


def _go_on(steps: Generator[Component, Pairs, Pairs], answer: Pairs | None) -> Component | Pairs:
    """Until there is a component that is worth the GPU, or the result."""
    try:
        component = steps.send(answer)  # type: ignore[arg-type]
        while component.is_small or not is_worth_a_device(component.mass):
            component = steps.send(component_pairs(component, torch.device("cpu")))
        return component
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def pairs_together(components: Sequence[Component], device: torch.device, helpers: ThreadPoolExecutor) -> list[Pairs]:
    """`component_pairs` of each, found by the same steps. One that fails is solved again, alone and with all care."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def factorized(component: Component) -> CudssShiftInvert | None:
        with torch.cuda.stream(stream), suppress(ArithmeticError):
            return CudssShiftInvert(component.laplacian, component.mass, component.shift(MODERATE), device)
        return None

    def checked(i: int, values: Array, rows: Tensor) -> Pairs | None:
        component, operator = components[i], operators[i]
        k, own = component.k, rows[: component.k, : len(component.mass)]
        with torch.cuda.stream(stream), suppress(ArithmeticError, np.linalg.LinAlgError):
            return checked_pairs(component, operator, component.shift(MODERATE), values[:k], own, operator.block)
        return None

    made = dict(enumerate(helpers.map(factorized, components)))
    operators = {i: operator for i, operator in made.items() if operator is not None}
    found: dict[int, Pairs | None] = {}
    if operators:
        together, most = ShiftInverts([*operators.values()]), max(components[i].k for i in operators)
        with suppress(ArithmeticError, np.linalg.LinAlgError):
            values, rows = KrylovSpace(together, most, together.block).converge(TOLERANCE)
            found = dict(zip(operators, helpers.map(checked, operators, values, rows), strict=True))
    return [found.get(i) or component_pairs(component, device) for i, component in enumerate(components)]
