"""Folders of `save_pretrained`, and networks on the Hugging Face Hub, whose client asks a local server here."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from copies import ends_of_copies

from diffnet import CheckpointError, DiffusionNet
from diffnet.geometry.errors import OptionError

pytestmark = pytest.mark.usefixtures("one_thread")

save = partial(DiffusionNet(3, 2, width=8, blocks=1).save_pretrained, data_license="CC0-1.0")


def weights(model: DiffusionNet) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())


def test_a_folder_is_read_back(tmp_path: Path) -> None:
    model = DiffusionNet(3, 2, width=8, blocks=1, outputs_at="faces", last_activation=torch.sigmoid)
    model.metadata = {"features": "xyz", "data_license": "unknown"}
    folder = tmp_path / "deep" / "network"
    model.save_pretrained(folder, k=16, normalize=False, label_names=["a|b", "c"], test_accuracy=0.75)
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    found = DiffusionNet.from_pretrained(str(folder))
    assert weights(found) == weights(model)
    assert found.architecture == model.architecture
    expected = {"features": "xyz", "data_license": "unknown", "k": 16, "normalize": False, "label_names": ["a|b", "c"]}
    assert found.metadata == {**expected, "test_accuracy": 0.75}
    assert weights(DiffusionNet.load(folder / "model.safetensors")) == weights(model)
    assert DiffusionNet.from_pretrained(folder, outputs_at="vertices").outputs_at == "vertices"
    config = json.loads((folder / "config.json").read_text())
    assert config["metadata"] == found.metadata
    assert config["architecture"] == {**model.architecture, "last_activation": "sigmoid"}


def test_the_card(tmp_path: Path) -> None:
    save(tmp_path, task="segmentation", features="xyz", k=16, normalize=False, label_names=["a|b", "c"], license="MIT")
    card = (tmp_path / "README.md").read_text()
    assert card.startswith('---\nlibrary_name: "diffnet"\nlicense: "mit"\ntags: ["mesh"]\n---\n\n# DiffusionNet\n')
    rows = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    table = dict(rows[1:])
    parameters = sum(parameter.numel() for parameter in DiffusionNet(3, 2, width=8, blocks=1).parameters())
    assert table == {
        "task": "segmentation",
        "outputs at": "vertices",
        "input": "3 channels of xyz",
        "eigenpairs": "16",
        "normalized positions": "False",
        "labels": "a/b, c",
        "network": f"blocks 1, width 8, {parameters} parameters",
        "license of the training data": "CC0-1.0",
        "license of the weights": "MIT",
    }
    (tmp_path / "README.md").write_text("my own card")
    save(tmp_path)  # again
    assert (tmp_path / "README.md").read_text() == "my own card"
    assert DiffusionNet.from_pretrained(tmp_path).metadata == {"data_license": "CC0-1.0"}


@pytest.mark.parametrize("given", [{}, {"data_license": ""}, {"data_license": None}])
def test_the_license_of_the_data_is_needed(tmp_path: Path, given: dict[str, None]) -> None:
    with pytest.raises(ValueError, match=r"needs the license of the training data, .* data_license=\"unknown\""):
        DiffusionNet(3, 2, width=8).save_pretrained(tmp_path / "a", **given)
    assert not (tmp_path / "a").exists()


def test_wrong_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="a folder is needed here"):
        save(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such checkpoint"):
        DiffusionNet.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"a//b: neither a folder nor a network on the .* Hub \(Repo id"):
        DiffusionNet.from_pretrained("a//b")
    with pytest.raises(CheckpointError, match=r"file is a file, .* DiffusionNet\.load reads files"):
        DiffusionNet.from_pretrained(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"a/b is no folder, .* pip install 'diffnet\[hub\]'"):
        DiffusionNet.from_pretrained("a/b")
    save(tmp_path / "a")
    assert DiffusionNet.from_pretrained(tmp_path / "a").width == 8  # without huggingface_hub
    with pytest.raises(CheckpointError, match=r"this is a folder, expected a checkpoint; it holds model\.safetensors"):
        DiffusionNet.load(tmp_path / "a")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The address of a server that has one network, `user/parts`, as the Hub serves it."""
    save(tmp_path / "served")
    content = (tmp_path / "served" / "model.safetensors").read_bytes()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            found = self.path in (f"/user/parts/resolve/{name}/model.safetensors" for name in ("v1", COMMIT))
            self.send_response(200 if found else 404)
            for name, value in (("ETag", '"1"'), ("X-Repo-Commit", COMMIT)) if found else ():
                self.send_header(name, value)
            if not found:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(content) if found else 0))
            self.end_headers()
            if found and self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def download(hub: str, folder: Path, offline: str) -> None:
    os.environ |= {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": offline}
    for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    assert DiffusionNet.from_pretrained("user/parts", revision="v1").metadata == {"data_license": "CC0-1.0"}
    with pytest.raises(
        CheckpointError, match=r"^user/other: neither a folder nor a network on the Hugging Face Hub \("
    ):
        DiffusionNet.from_pretrained("user/other")


def test_the_hub(hub: str, tmp_path: Path) -> None:
    """In processes of their own, because huggingface_hub reads its settings when it is imported."""
    for offline in ("0", "1"):
        assert ends_of_copies(download, [(hub, tmp_path, offline)]) == [0]
