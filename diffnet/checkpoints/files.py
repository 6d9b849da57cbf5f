"""Reading the file of a checkpoint, what it can hold, and checks of its content. A file can hold anything."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from diffnet.geometry.errors import DiffnetError
from diffnet.geometry.options import chosen_scale
from diffnet.pretrained import NETWORK_FILE, names_text

# "original": segmentation and classification of the original implementation.
# "original correspondence": its functional maps, whose network is a part "feature_extractor".
# "unsupervised correspondence": {"networks": {"feature_extractor": …}} of unsupervised functional maps
#     (Cao et al. 2023).
Kind: TypeAlias = Literal["original", "original correspondence", "unsupervised correspondence"]

FIRST = "first.weight"  # of each `DiffusionNet`
EXTRACTOR = "feature_extractor"
# The first layers of networks of other programs.
FIRSTS: dict[str, Kind] = {"first_lin.weight": "original", "first_linear.weight": "unsupervised correspondence"}

FilePath: TypeAlias = str | os.PathLike[str]
Activation: TypeAlias = Callable[[Tensor], Tensor]  # a function that a network ends in


def log_softmax(x: Tensor) -> Tensor:
    """Log-probabilities over the last dimension."""
    return torch.nn.functional.log_softmax(x, dim=-1)


# The functions that a file can name. All others are code, which a file doesn't hold.
NAMED_ACTIVATIONS: dict[str, Activation] = {"log_softmax": log_softmax, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


class CheckpointError(DiffnetError, ValueError):
    """A file is not a usable checkpoint. The message names the file and gives the reason."""


class OriginalWeights(NamedTuple):
    """The network of another program in the content of a file.

    weights: with its own names. prefix: what these begin with in the file. others: further names beside them
    """

    kind: Kind
    weights: dict[str, Any]
    prefix: str
    others: list[str]


def original_weights(content: Any) -> OriginalWeights | None:
    """The network of another program in the content of a file, or None for any other content.

    Its names may begin with those of larger modules, such as "module." or "backbone.", and it may be in a dictionary,
    such as that of "state_dict".
    """
    dictionaries: dict[int, tuple[str, Any]] = {id(content): ("", content)}  # each once: a file may hold circles
    for place, part in (queue := list(dictionaries.values())):
        names = [name for name in part if isinstance(name, str)] if isinstance(part, dict) else []
        for first, kind in FIRSTS.items():
            name = next((name for name in names if name == first or name.endswith(f".{first}")), None)
            if name is not None:
                prefix = name.removesuffix(first)
                if kind == "original" and EXTRACTOR in f"{place}.{prefix}".split("."):
                    kind = "original correspondence"
                weights = {name.removeprefix(prefix): part[name] for name in names if name.startswith(prefix)}
                return OriginalWeights(kind, weights, prefix, [name for name in names if not name.startswith(prefix)])
        for name in names:
            if isinstance(part[name], dict) and id(part[name]) not in dictionaries:
                dictionaries[id(part[name])] = f"{place}.{name}", part[name]
                queue.append(dictionaries[id(part[name])])
    return None


def larger_module(content: Any, state: str) -> str | None:
    """What to write for the weights of a module that holds a network, such as those of Lightning or torch.compile.

    content: a state dict, or a dictionary with one as "state_dict"
    state: how the message names the content

    Returns None for other content.
    """
    inner = content.get("state_dict") if isinstance(content, dict) else None
    weights, place = (inner, f'{state}["state_dict"]') if isinstance(inner, dict) else (content, state)
    names = [name for name in weights if isinstance(name, str)] if isinstance(weights, Mapping) else []
    prefix = next((name.removesuffix(FIRST) for name in names if name.endswith(f".{FIRST}")), None)
    if prefix is None or FIRST in names:
        return None
    size = len(prefix)
    return (
        f"the names of the weights begin with {prefix!r}, as those of a larger module; write "
        f"network.load_state_dict({{k[{size}:]: w for k, w in {place}.items() if k.startswith({prefix!r})}})"
    )


def read_checkpoint_file(path: FilePath, device: torch.device | str = "cpu") -> Any:
    """Read what `torch.save` wrote: tensors and plain values, never code (`weights_only`).

    Raises CheckpointError for any other file. A file never expands: one that claims to hold more than its own size is
    refused.
    """
    if Path(path).is_dir():
        networks = [name for name in ("last.pt", "best.pt", NETWORK_FILE) if (Path(path) / name).is_file()]
        hint = f"; it holds {' and '.join(networks)}" if networks else ""
        raise CheckpointError(f"{path}: this is a folder, expected a checkpoint{hint}")
    if not Path(path).exists():
        raise CheckpointError(f"{path}: no such checkpoint{names_text()}")
    if not Path(path).is_file():
        raise CheckpointError(f"{path}: this is a pipe, a socket or a device, expected a checkpoint")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > Path(path).stat().st_size:
                    raise CheckpointError(f"{path}: not a checkpoint: it holds more than its size")
                damaged = archive.testzip()
                if damaged is not None:
                    raise CheckpointError(f"{path}: damaged, the checksum of {damaged} differs")
        with Path(path).open("rb") as file:  # by its name, PyTorch may take it for another format
            return torch.load(file, map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except Exception as e:  # unpickling a damaged file can raise any error: KeyError, IndexError, struct.error …
        reason = e.strerror if isinstance(e, OSError) else type(e).__name__
        raise CheckpointError(f"{path}: not a checkpoint, or a damaged one ({reason})") from e


def check_named_tensors(path: FilePath, weights: Any, *, in_memory: bool = False) -> dict[str, Tensor]:
    """Return a state dict whose tensors are dense, real and finite, and no larger than the file, if there is one.

    Raises CheckpointError for anything else. Nothing is allocated before the sizes are known to be real: a tensor can
    claim to be larger than its memory, which then holds one value for many elements.
    """
    if not isinstance(weights, dict):
        raise CheckpointError(f"{path}: weights should be a dictionary of tensors, got {type(weights).__name__}")
    size = 0
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            entry = f"{name!s:.80}: {type(tensor).__name__}"
            raise CheckpointError(f"{path}: weights should be a dictionary of tensors by name, got {entry}")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or not tensor.is_floating_point():
            raise CheckpointError(f"{path}: {name:.80} should be a dense tensor of real numbers")
        size += tensor.numel() * tensor.element_size()
    if not in_memory and size > Path(path).stat().st_size:
        raise CheckpointError(f"{path}: the weights claim {size} bytes, more than the file has")
    for name, tensor in weights.items():
        if not tensor.float().isfinite().all():
            raise CheckpointError(
                f"{path}: {name:.80} has values that are not finite in single precision, as if a training diverged"
            )
    return weights


def check_format(path: FilePath, number: Any, current: int, version: Any) -> None:
    """Raises CheckpointError, which names newer versions, unless a file has the known format or an older one."""
    if type(number) is int and number > current:
        written_by = f"diffnet {version!s:.20}".strip()
        raise CheckpointError(
            f"{path}: written by a newer version ({written_by}, checkpoint format {number}); this version reads format "
            f"{current}. Update diffnet"
        )
    if type(number) is not int or number < 1:
        raise CheckpointError(f"{path}: checkpoint format {shown(number)}, this version reads {current}")


def with_older_scale(file_format: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options or the metadata in a file. Up to format 1, vertices of no face counted in `normalize`."""
    if file_format > 1 or "normalize" not in options:
        return dict(options)
    return {**options, "normalize": chosen_scale(options["normalize"], "original")}


def difference(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """How the names and shapes of weights differ from those of a network, such as "lacks weights: a, b"."""
    for what, names in (("lacks", expected.keys() - weights.keys()), ("has unknown", weights.keys() - expected.keys())):
        if names:
            first = ", ".join(f"{name:.80}" for name in sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return f"{what} weights: {first}{more}"
    for name, weight in expected.items():
        shape = tuple(weights[name].shape)
        if shape != tuple(weight.shape):
            return f"has another shape: {name} should have shape {tuple(weight.shape)}, its shape is {shape}"
    return None


def check_names_and_shapes(path: FilePath, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless the names and shapes are those of a network, which may be on the meta device."""
    text = difference(weights, expected)
    if text is not None:
        raise CheckpointError(f"{path}: the checkpoint {text}")


def shown(value: Any) -> str:
    """A short text for a message. The repr of a list may be endless, and that of a huge integer is an error."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, (float, NoneType)) or (isinstance(value, int) and abs(value) < 2**64):
        return repr(value)
    return f"of type {type(value).__name__}"
