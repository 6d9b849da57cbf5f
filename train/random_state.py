"""The states of the random generators, as text."""

from __future__ import annotations

from base64 import b64decode, b64encode

import torch
from torch import Tensor


def random_state(device: torch.device) -> list[str]:
    """The states of the generators of the CPU and of the device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [b64encode(bytes(state.tolist())).decode() for state in states]


def set_random_state(states: list[str], device: torch.device) -> None:
    """Go on with random numbers. States of another kind of device count for the CPU only."""
    first, *others = map(_tensor, states)
    torch.set_rng_state(first)
    if others and device.type == "cuda":
        torch.cuda.set_rng_state(others[0], device)


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(b64decode(text)), dtype=torch.uint8)
