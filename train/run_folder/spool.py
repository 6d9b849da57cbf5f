"""Tensors that a run needs again at its end, in a file instead of the memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffnet.geometry.store.transfer import aligned


class Spool(Sequence[Tensor]):
    """Tensors on the CPU that are written to a file without a name. Each is read when it is asked for.

    folder: an existing folder on a disk. The system frees the file when the process ends.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is open as long as this object exists
        self._places: dict[int, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        self._end = 0

    def append(self, tensor: Tensor) -> None:
        """Write a tensor. Raises OSError if the disk is full."""
        self.put(len(self), tensor)

    def put(self, number: int, tensor: Tensor) -> None:
        """Write the tensor that gets a number. In the end, there should be one for each number from 0."""
        array = np.ascontiguousarray(tensor.numpy())
        self._file.write(array.data)
        self._places[number] = self._end, array.shape, array.dtype
        self._end += array.nbytes

    def clear(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._places, self._end = {}, 0

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: Any) -> Any:
        if i not in self._places:
            raise IndexError(i)
        offset, shape, dtype = self._places[i]
        self._file.flush()
        array = np.empty(shape, dtype)
        if (
            array.nbytes
            and os.preadv(self._file.fileno(), [array.reshape(-1).view(np.uint8).data], offset) < array.nbytes
        ):
            raise OSError(f"the temporary file of the predictions ends before tensor {i}")
        return aligned(torch.from_numpy(array))
