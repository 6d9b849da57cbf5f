"""Checks of the device that a user names."""

from __future__ import annotations

import torch

from diffnet.geometry.errors import OptionError


def usable_device(device: torch.device | str, expected: str = "cpu, cuda or cuda:N") -> torch.device:
    """The device that a name stands for, the CPU or a GPU. Raises OptionError if it is not available.

    Args:
        device: a name or a device
        expected: the names that the error message for any other name lists
    """
    place = existing_device(device, expected)
    if place.type not in ("cpu", "cuda"):
        raise OptionError(f"device should be {expected}, got {str(device)!r}")
    if place.type == "cpu":
        if place.index:
            raise OptionError(f"device {str(device)!r} is not available: the only CPU device is cpu")
        return torch.device("cpu")
    return place


def existing_device(device: torch.device | str, expected: str = "cpu, cuda, cuda:N or meta") -> torch.device:
    """The device that a name stands for. Raises OptionError if PyTorch has none of this name, or if it is a GPU that is
    not available.

    Any device of PyTorch can hold tensors, for example meta. For computations, see `usable_device`.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise OptionError(f"device should be {expected}, got {str(device)!r:.80}") from None
    if place.type != "cuda":
        return place
    if not torch.cuda.is_available():
        raise OptionError(f"device {str(device)!r} is not available: PyTorch finds no GPU; write 'cpu' instead")
    if place.index is not None and place.index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise OptionError(f"device {str(device)!r} is not available: the last GPU is cuda:{last}")
    return place
