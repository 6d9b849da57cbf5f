"""The file of `DiffusionNet.save`: weights in safetensors format, and JSON texts in the metadata of its header.

| entry of the header's metadata | content |
|---|---|
| `format` | "pt", as other programs write it |
| `diffnet_format` | the version of this layout |
| `diffnet_version` | the version of diffnet that wrote the file |
| `architecture` | JSON: the arguments of `DiffusionNet` |
| `metadata` | JSON: what the user gave to `save` |
| `sha256` | a hash of all weights and of the other entries. Files of older versions lack it. |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from diffnet import __version__
from diffnet.checkpoints.files import (
    NAMED_ACTIVATIONS,
    CheckpointError,
    FilePath,
    check_format,
    check_named_tensors,
    with_older_scale,
)
from diffnet.geometry.files import write_atomically

FORMAT = 2  # increase when older versions would misread a file


def write_network(
    path: FilePath, weights: Mapping[str, Tensor], architecture: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    """Write the file of a network. The old file stays until the new one is complete.

    Raises TypeError for metadata that JSON can't hold, CheckpointError for weights that `read_network_file` refuses.
    """
    check_named_tensors(path, dict(weights), in_memory=True)
    activation = architecture["last_activation"]
    names = [name for name, function in NAMED_ACTIVATIONS.items() if function is activation]
    stand_in = None if activation is None else {"own": getattr(activation, "__name__", type(activation).__name__)}
    texts = {
        "format": "pt",
        "diffnet_format": str(FORMAT),
        "diffnet_version": __version__,
        "architecture": json.dumps({**architecture, "last_activation": names[0] if names else stand_in}),
        "metadata": "{" + ", ".join(f"{json.dumps(name)}: {_json(name, metadata[name])}" for name in metadata) + "}",
    }
    # A copy of each tensor: safetensors refuses tensors that share memory.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}
    write_atomically(path, safetensors.torch.save(copies, metadata={**texts, "sha256": _checksum(copies, texts)}))


def _checksum(weights: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    """A hash of contiguous tensors on the CPU, with their names, dtypes and shapes, and of texts with their names."""
    digest = hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as e:  # ValueError for a list that contains itself
        hints = {"ndarray": "tolist()", "Tensor": "tolist()"}
        kind = type(value).__name__
        hint = f"; write {name}={name}.{hints[kind]}" if kind in hints else ""
        raise TypeError(
            f"the metadata {name} should be JSON (text, numbers, booleans, None, lists and dictionaries), got {kind}: "
            f"{e}{hint}"
        ) from e


def is_safetensors(path: FilePath) -> bool:
    """Whether a file looks like one in safetensors format: the length of a header, then a JSON object."""
    try:
        if not Path(path).is_file():  # opening a pipe waits for its other end
            return False
        with Path(path).open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return False


def read_network_file(path: FilePath) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Read the weights, the arguments of `DiffusionNet` and the metadata from a file of `write_network`.

    `last_activation` is a function or None, or a dictionary that names a function that the file does not hold.

    Raises CheckpointError for any other file.
    """
    try:
        content = Path(path).read_bytes()
        weights = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    # safetensors has an error class of its own. A dtype that PyTorch lacks is a KeyError.
    except Exception as e:
        reason = e.strerror if isinstance(e, OSError) else type(e).__name__
        raise CheckpointError(f"{path}: not a safetensors file, or a damaged one ({reason})") from e
    texts = header.get("__metadata__") or {}
    if "diffnet_format" not in texts:
        raise CheckpointError(
            f"{path}: no network of DiffusionNet.save: it has weights, but no architecture. Build the network and "
            "load them with model.load_state_dict(safetensors.torch.load_file(path))"
        )
    text = texts["diffnet_format"]
    number = int(text) if text.isdecimal() and len(text) < 10 else text
    check_format(path, number, FORMAT, texts.get("diffnet_version", ""))
    checksum = texts.pop("sha256", None)
    if checksum is not None and checksum != _checksum(weights, texts):
        raise CheckpointError(f"{path}: damaged, the checksum of its weights and metadata differs")
    architecture, metadata = (_object(path, name, texts.get(name)) for name in ("architecture", "metadata"))
    activation = architecture.get("last_activation")
    if isinstance(activation, str):
        if activation not in NAMED_ACTIVATIONS:
            names = ", ".join(NAMED_ACTIVATIONS)
            raise CheckpointError(f"{path}: last_activation should be one of {names}, got {activation[:80]!r}")
        architecture["last_activation"] = NAMED_ACTIVATIONS[activation]
    return check_named_tensors(path, weights), architecture, with_older_scale(number, metadata)


def _object(path: FilePath, name: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: the {name} in the file is not JSON") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the {name} should be a JSON object, got {type(value).__name__}")
    return value
