"""The device that a run computes on, and the precision of its matrix products."""

from __future__ import annotations

import torch

from diffnet.geometry.device import usable_device
from diffnet.geometry.errors import OptionError
from diffnet.train.options.shared import Precision
from diffnet.train.place import place


def pick_device(name: str) -> torch.device:
    """The device called `name`: "auto", "cpu", "cuda" or "cuda:N". "auto" is the GPU if there is one, else the CPU.

    Each of several ranks on one machine gets its own GPU for "auto" and "cuda", which becomes the current device.

    Raises OptionError for another name, and for a GPU that is not present.

    >>> pick_device("cpu")
    device(type='cpu')
    """
    here = place()
    if name in ("auto", "cuda") and here.local_world_size > 1 and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if here.local_rank >= gpus:
            raise OptionError(
                f"rank {here.rank} has no GPU of its own, because this machine has {gpus} for "
                f"{here.local_world_size} ranks: start {gpus} (--nproc-per-node {gpus}), or choose a --device"
            )
        torch.cuda.set_device(here.local_rank)
        return torch.device("cuda", here.local_rank)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return usable_device(name, expected="auto, cpu, cuda or cuda:N")


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The autocast context of a run. It caches no casts of weights, which a CUDA graph would read forever."""
    enabled = matmul_dtype(precision, device) == torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def matmul_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype of matrix products under `autocast`. "auto" is bf16 on GPUs that compute it, else fp32.

    >>> matmul_dtype("auto", torch.device("cpu"))
    torch.float32
    """
    bf16 = precision == "bf16" or (
        precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return torch.bfloat16 if bf16 else torch.float32
