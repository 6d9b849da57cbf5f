"""The folder of `DiffusionNet.save_pretrained`, in the form that the Hugging Face Hub expects.

| file | content |
|---|---|
| `model.safetensors` | the file of `DiffusionNet.save`: weights, architecture and metadata. Only it is read. |
| `config.json` | its architecture and metadata, for people and for other programs |
| `README.md` | a model card |
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from diffnet.checkpoints.files import CheckpointError, FilePath
from diffnet.geometry.files import write_atomically
from diffnet.pretrained import NETWORK_FILE, names_text, network_path


def check_license(metadata: Mapping[str, Any]) -> None:
    """Raises ValueError for metadata without the license of the training data."""
    text = metadata.get("data_license")
    if not isinstance(text, str) or not text:
        raise ValueError(
            "save_pretrained needs the license of the training data, because it can restrict the use of the weights, "
            f'got data_license={text!r}; write for example data_license="CC-BY-4.0" or data_license="unknown"'
        )


def write_description(folder: Path, parameters: int) -> None:
    """Write config.json and, unless there is one, README.md beside the file of a network."""
    with safe_open(folder / NETWORK_FILE, "pt") as file:
        texts = file.metadata()
    config = {name: json.loads(texts[name]) for name in ("architecture", "metadata")}
    config = {"library_name": "diffnet", "diffnet_version": texts["diffnet_version"], **config}
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if not (folder / "README.md").exists():
        write_atomically(folder / "README.md", _card(config["architecture"], config["metadata"], parameters))


def _card(architecture: Mapping[str, Any], metadata: Mapping[str, Any], parameters: int) -> str:
    rows = {
        "task": metadata.get("task"),
        "outputs at": str(architecture["outputs_at"]).replace("_", " "),
        "input": f"{architecture['in_channels']} channels of {metadata.get('features', 'features of your own')}",
        "eigenpairs": metadata.get("k"),
        "normalized positions": metadata.get("normalize"),
        "labels": ", ".join(map(str, metadata.get("label_names") or ())),
        "network": f"blocks {architecture['blocks']}, width {architecture['width']}, {parameters:,} parameters",
        "trained from": metadata.get("start"),
        "training data": metadata.get("data"),
        "license of the training data": metadata["data_license"],
        "license of the weights": metadata.get("license"),
    }
    scores = {name.replace("_", " "): value for name, value in metadata.items() if name.startswith("test_")}
    # The Hub knows licenses by names in lower case. JSON is YAML, too.
    head = {"library_name": "diffnet", "license": str(metadata.get("license") or "unknown").lower(), "tags": ["mesh"]}
    table = {name: str(value).replace("|", "/") for name, value in (rows | scores).items() if value not in (None, "")}
    lines = [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in head.items()),
        "---",
        "",
        "# DiffusionNet",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in table.items()),
        "",
        "`config.json` has all options. To use the network from this folder, or from the Hugging Face Hub by its name:",
        "",
        "```python",
        "from diffnet import DiffusionNet",
        "",
        'model = DiffusionNet.from_pretrained("path/to/this/folder")',
        "```",
        "",
        "The commands of diffnet, such as `diffnet predict`, take this folder as `--checkpoint`.",
        "",
    ]
    return "\n".join(lines)


def network_file(name: FilePath, revision: str | None) -> Path:
    """The file of a network in a folder, of a built-in one, or on the Hugging Face Hub, from which it is downloaded.

    Raises CheckpointError if it is not there, ImportError if huggingface_hub is needed and not installed.
    """
    if Path(name).is_file():
        raise CheckpointError(f"{name} is a file, and a folder is needed here; DiffusionNet.load reads files")
    path = network_path(name)
    if path.exists():
        return path / NETWORK_FILE if path.is_dir() else path  # which may be missing
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as e:
        raise ImportError(
            f"{name} is no folder, and the Hugging Face Hub needs huggingface_hub: pip install 'diffnet[hub]'"
            f"{names_text()}"
        ) from e
    try:
        return Path(hf_hub_download(os.fspath(name), NETWORK_FILE, revision=revision))
    except (OSError, ValueError) as e:  # the errors of huggingface_hub
        reason = str(e).strip().splitlines()[0]
        raise CheckpointError(
            f"{name}: neither a folder nor a network on the Hugging Face Hub ({reason}){names_text()}"
        ) from e
