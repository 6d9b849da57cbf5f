"""Networks are saved to files and folders and loaded from them and from the Hub. Files of others are refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import trimesh
from copies import ends_of_copies
from refusals import refused
from torch import Tensor, nn

from diffnet import CheckpointError, DiffnetError, DiffusionNet, collate, graphed, precompute
from diffnet.checkpoints.files import log_softmax
from diffnet.geometry.errors import OptionError

MESH = trimesh.creation.icosphere(0)  # 12 vertices
FEATURES = torch.linspace(-1, 1, 36).reshape(12, 3)
network = partial(DiffusionNet, 3, 5, width=8, blocks=2)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"outputs_at": "faces", "last_activation": log_softmax, "mlp_hidden": (16,), "dropout": 0},
    {"outputs_at": "edges", "gradient_features": False, "attention_heads": 2, "dropout": np.float32(0.25)},
    {"gradient_rotation": False, "last_activation": torch.sigmoid, "gradient": "sparse", "mlp_hidden": []},
    {"diffusion": "implicit", "outputs_at": "global_mean", "backend": "torch", "width": np.int64(4)},
    {"mlp_norm": "layer", "initial_times": "spread"},
    {"mlp_norm": "rms", "diffusion": "implicit", "initial_times": "spread"},
    {"condition_channels": 2, "global_tokens": 3},
    {"pair_attention": 1},
    {"vectors": 1, "gradient_rotation": False, "outputs_at": "faces"},
]


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        channels = getattr(model, "condition_channels", 0)
        conditions = [torch.ones(1, channels)] if channels else []
        features = FEATURES.to(next(model.parameters()).dtype)
        operators = precompute(MESH, k=6)
        if getattr(model, "pair_attention", 0):
            features, operators = features.repeat(2, 1), collate([operators, operators])
        out: Tensor = model.eval()(features, operators, *conditions)
    return out


def message(call: Callable[[], object], kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "network.safetensors"


@pytest.mark.parametrize("options", OPTIONS)
def test_a_network_is_read_back(options: dict[str, Any], path: Path) -> None:
    model = network(**options)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.save(path, features="xyz", classes=["a", "ü"], best=0.5)
    loaded = DiffusionNet.load(path)
    assert not loaded.training
    assert all(p.requires_grad and p.is_contiguous() for p in loaded.parameters())
    assert loaded.architecture == model.architecture
    assert loaded.metadata == {"features": "xyz", "classes": ["a", "ü"], "best": 0.5}
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(outputs(loaded), outputs(model))
    rebuilt = DiffusionNet(**loaded.architecture)
    rebuilt.load_state_dict(loaded.state_dict())


def test_options_are_attributes_and_the_last_layer_may_change(path: Path) -> None:
    model = network(outputs_at="faces", dropout=0.25)
    assert (model.in_channels, model.out_channels, model.width, len(model.blocks)) == (3, 5, 8, 2)
    assert (model.outputs_at, model.dropout, model.mlp_hidden) == ("faces", 0.25, [8, 8])
    assert (model.gradient_features, model.gradient_rotation, model.diffusion) == (True, True, "spectral")
    assert (model.gradient, model.attention_heads, model.backend, model.metadata) == ("auto", 0, "auto", {})
    assert [*model.architecture][:4] == ["in_channels", "out_channels", "width", "blocks"]
    model.last = nn.Linear(8, 7)
    assert model.architecture["out_channels"] == 7
    model.save(path)
    assert torch.equal(outputs(DiffusionNet.load(path)), outputs(model))


def test_a_network_is_loaded_to_a_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    missing = "device 'cuda' is not available: PyTorch finds no GPU; write 'cpu' instead"
    unknown = "device should be cpu, cuda, cuda:N or meta, got 'gpu'"
    for device, expected in (("cuda", missing), (torch.device("cuda"), missing), ("gpu", unknown)):
        assert message(partial(DiffusionNet.load, path, device=device), OptionError) == expected
    network().save(path)
    assert DiffusionNet.load(path, device=torch.device("meta")).last.weight.is_meta


def test_metadata_is_kept_and_added_to(path: Path) -> None:
    network().save(path, k=8, path="a", self=1, names=("a", "b"))
    loaded = DiffusionNet.load(path)
    assert loaded.metadata == {"k": 8, "path": "a", "self": 1, "names": ["a", "b"]}
    loaded.save(path, k=9)
    assert DiffusionNet.load(path).metadata == {"k": 9, "path": "a", "self": 1, "names": ["a", "b"]}
    assert loaded.metadata["k"] == 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_of_weights_is_kept(dtype: torch.dtype, path: Path) -> None:
    model = network().to(dtype)
    model.save(path)
    loaded = DiffusionNet.load(path)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert torch.equal(loaded.first.weight, model.first.weight)


def test_wrapped_networks(path: Path) -> None:
    plain = network()
    expected = outputs(plain)
    shared = copy.deepcopy(plain)
    shared.blocks[1].mlp = shared.blocks[0].mlp  # two names for one tensor
    for model in (graphed(copy.deepcopy(plain)), torch.compile(copy.deepcopy(plain), backend="eager")):
        model.save(path)
        loaded = DiffusionNet.load(path)
        assert torch.equal(outputs(loaded), expected)
        graphed(loaded).load_state_dict(plain.state_dict())
    shared.save(path)
    assert torch.equal(outputs(DiffusionNet.load(path)), outputs(shared))


@pytest.mark.gpu
def test_networks_on_a_gpu(path: Path) -> None:
    model = network().cuda().eval()
    operators = precompute(MESH, k=6).to("cuda")
    replayed = graphed(copy.deepcopy(model), first_visits=0)
    with torch.no_grad():
        expected = model(FEATURES.cuda(), operators)
        replayed(FEATURES.cuda(), operators)
        for saved in (model, replayed):
            saved.save(path)
            assert DiffusionNet.load(path).first.weight.device.type == "cpu"
            loaded = DiffusionNet.load(path, device="cuda")
            assert loaded.first.weight.is_cuda
            assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())
            torch.testing.assert_close(loaded(FEATURES.cuda(), operators), expected)
            torch.testing.assert_close(graphed(loaded, first_visits=0)(FEATURES.cuda(), operators), expected)


def test_own_activations_are_named(path: Path) -> None:
    model = network(last_activation=lambda x: x.exp())
    model.save(path)
    line = message(lambda: DiffusionNet.load(path))
    assert "the network ends in <lambda>, a function that a file can't hold; pass last_activation=…" in line
    loaded = DiffusionNet.load(path, last_activation=torch.exp)
    assert torch.equal(outputs(loaded), outputs(model))
    assert torch.equal(outputs(DiffusionNet.load(path, last_activation=None)).exp(), outputs(model))


def test_pickles_of_whole_networks_may_lack_newer_attributes() -> None:
    model = pickle.loads(pickle.dumps(DiffusionNet(3, 5, width=8, blocks=1, last_activation=log_softmax)))
    assert "recompute_activations" not in vars(model)
    assert not model.recompute_activations
    del vars(model.blocks[0])["tokens"], vars(model)["global_tokens"], vars(model)["condition_channels"]
    assert outputs(pickle.loads(pickle.dumps(model))).shape == (12, 5)
    assert model.last_activation is log_softmax


def test_options_can_be_replaced(path: Path) -> None:
    model = network(last_activation=torch.tanh)
    model.save(path)
    loaded = DiffusionNet.load(path, outputs_at="faces", backend="torch", last_activation=None)
    assert len(outputs(loaded)) == 20
    assert loaded.backend == "torch"
    assert "width is 16, but the weights are those of width 8" in message(lambda: DiffusionNet.load(path, width=16))
    assert "outputs_at should be one of" in message(lambda: DiffusionNet.load(path, outputs_at="corners"))
    line = message(lambda: DiffusionNet.load(path, C_width=8, colour=1), TypeError)
    assert line == "DiffusionNet has no argument C_width, colour"


def test_metadata_should_be_json(path: Path) -> None:
    network().save(path, k=8)
    before = path.read_bytes()
    words = "the metadata accuracy should be JSON"
    refused = partial(network().save, path, loss=1.0)
    line = message(lambda: refused(accuracy=torch.ones(2)), TypeError)
    assert words in line
    assert "got Tensor" in line
    assert "write accuracy=accuracy.tolist()" in line
    assert "got ndarray" in message(lambda: refused(accuracy=np.ones(2)), TypeError)
    assert words in message(lambda: refused(accuracy={"deep": [object()]}), TypeError)
    assert words in message(lambda: refused(accuracy={(1, 2): 3}), TypeError)
    endless: list[Any] = []
    endless.append(endless)
    assert words in message(lambda: refused(accuracy=endless), TypeError)
    assert path.read_bytes() == before


def test_networks_that_are_not_saved(path: Path) -> None:
    def first_is(layer: nn.Module) -> DiffusionNet:
        changed = network()
        changed.first = layer
        return changed

    without_mlp = network()
    without_mlp.blocks[0].mlp = nn.Linear(24, 8)
    for changed, expected in (
        (without_mlp, "lacks weights: blocks.0.mlp.0.bias"),
        (first_is(nn.Identity()), "lacks weights: first.bias, first.weight"),
        (first_is(nn.modules.linear.NonDynamicallyQuantizableLinear(3, 8)), "has other modules: first is NonDyn"),
    ):
        line = message(partial(changed.save, path), ValueError)
        assert f"is not the one of DiffusionNet(**model.architecture), it {expected}" in line
        assert "write torch.save(model.state_dict(), path)" in line
    assert "meta device" in message(lambda: network().to("meta").save(path), ValueError)
    diverged = network()
    diverged.last.bias.data[1] = torch.nan
    assert f"{path}: last.bias has values that are not finite" in message(lambda: diverged.save(path))
    assert not path.exists()


def test_a_failed_save_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network().save(path, k=8)
    write = Path.write_bytes

    def stopped(self: Path, content: bytes) -> int:
        write(self, content[: len(content) // 2])
        raise KeyboardInterrupt

    def full(self: Path, content: bytes) -> int:
        write(self, content[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", stopped)
    with pytest.raises(KeyboardInterrupt):
        network().save(path, k=9)
    monkeypatch.setattr(Path, "write_bytes", full)
    refused(OSError, re.escape(f"{path}"), network().save, path, k=9)
    assert DiffusionNet.load(path).metadata == {"k": 8}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def rewrite(path: Path, weights: dict[str, Tensor], **texts: str) -> None:
    safetensors.torch.save_file(weights, path, texts)


def test_other_files(path: Path) -> None:
    """Each message names the file and says what to do. Nothing is built from sizes that the weights don't have."""
    model = network()
    model.save(path, k=8)
    weights = safetensors.torch.load(path.read_bytes())  # a mapped file must not be overwritten
    with safetensors.safe_open(path, "pt") as file:
        texts = file.metadata()
    assert texts["format"] == "pt"
    del texts["sha256"]  # as in files of older versions
    assert json.loads(texts["metadata"]) == {"k": 8}

    def line(changed: dict[str, Tensor] | None = None, **changes: str) -> str:
        rewrite(path, weights if changed is None else changed, **texts | changes)
        found = message(lambda: DiffusionNet.load(path))
        assert found.startswith(str(path))
        return found

    def architecture(**changes: Any) -> str:
        return line(architecture=json.dumps(json.loads(texts["architecture"]) | changes))

    assert "newer version (diffnet 9.8, checkpoint format 3)" in line(diffnet_format="3", diffnet_version="9.8")
    assert "checkpoint format 'x'" in line(diffnet_format="x")
    assert "the architecture in the file is not JSON" in line(architecture="{")
    assert "the metadata in the file is not JSON" in line(metadata="[" * 100_000)
    assert "metadata should be a JSON object, got list" in line(metadata="[]")
    assert "blocks is 1000000000, but the weights are those of blocks 2" in architecture(blocks=10**9)
    assert "width is 1000000000" in architecture(width=10**9)
    assert "width is '8'" in architecture(width="8")
    assert "mlp_hidden is of type list, but the weights are those of mlp_hidden [8, 8]" in architecture(mlp_hidden=[1])
    assert "gradient_rotation is False" in architecture(gradient_rotation=False)
    assert "dropout is 0" in architecture(dropout=0)
    assert "dropout should be at least 0 and below 1, got 7" in architecture(dropout=7)
    assert "attention_heads is 2" in architecture(attention_heads=2)
    assert "diffusion should be one of" in architecture(diffusion=["spectral"])
    assert "'curvature'" in architecture(curvature=1)
    assert "last_activation should be one of log_softmax" in architecture(last_activation="os.system")
    assert "lacks weights: last.bias" in line({n: w for n, w in weights.items() if n != "last.bias"})
    assert "has unknown weights: more" in line({**weights, "more": torch.zeros(2)})
    assert "not finite" in line({**weights, "last.bias": torch.full((5,), torch.nan)})
    assert "dense tensor of real numbers" in line({**weights, "last.bias": torch.zeros(5, dtype=torch.int64)})
    assert "not those of a DiffusionNet" in line({"weight": torch.zeros(2)})
    for name in ("last.vectors.along_normal.weight", "blocks.0.tokens.share.weight"):
        assert f"has unknown weights: {name}" in line({**weights, name: torch.zeros(())})
    less = json.loads(texts["architecture"])
    del less["width"]
    assert "the options of the network lack width" in line(architecture=json.dumps(less))

    rewrite(path, weights)
    assert "no network of DiffusionNet.save" in message(lambda: DiffusionNet.load(path))
    torch.save(model.state_dict(), path)
    assert "a state dict, which has no options of its network" in message(lambda: DiffusionNet.load(path))
    torch.save([1], path)
    assert "neither a file of DiffusionNet.save nor a checkpoint" in message(lambda: DiffusionNet.load(path))
    torch.save(model, path)
    assert "not a checkpoint" in message(lambda: DiffusionNet.load(path))  # it would need code
    torch.save({"first_lin.weight": torch.zeros(2, 2)}, path)
    assert "DiffusionNet.from_original_checkpoint(path)" in message(lambda: DiffusionNet.load(path))
    path.unlink()
    assert "no such checkpoint" in message(lambda: DiffusionNet.load(path))
    assert issubclass(CheckpointError, DiffnetError)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files(path: Path, seed: int) -> None:
    """A file that was cut or has a flipped bit gives one line. Only a bit in the name of the hash can be lost."""
    network().save(path, k=8)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(seed)
    for length in [0, 1, 8, 9, *rng.integers(0, len(whole), 6), len(whole) - 1]:
        path.write_bytes(whole[:length])
        message(lambda: DiffusionNet.load(path))
    for position in [*rng.integers(0, header, 30), *rng.integers(header, len(whole), 30)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        if b'"sha256"' in damaged:
            assert str(path) in message(lambda: DiffusionNet.load(path))


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"width": 16}, "width is 8 in the state dict and 16 here"),
    ({"blocks": 3}, "blocks is 2 in the state dict and 3 here"),
    ({"in_channels": 4}, "in_channels is 3 in the state dict and 4 here"),
    ({"out_channels": 6}, "out_channels is 5 in the state dict and 6 here"),
    ({"mlp_hidden": [4, 8]}, "mlp_hidden is [8, 8] in the state dict and [4, 8] here"),
    ({"gradient_features": False}, "gradient_features is True in the state dict and False here"),
    ({"gradient_rotation": False}, "gradient_rotation is True in the state dict and False here"),
    ({"attention_heads": 2}, "attention_heads is 0 in the state dict and above 0 here"),
    ({"mlp_norm": "rms"}, "mlp_norm is none in the state dict and rms here"),
    ({"global_tokens": 3}, "global_tokens is 0 in the state dict and 3 here"),
    ({"pair_attention": 2}, "pair_attention is 0 in the state dict and 2 here"),
    ({"condition_channels": 2}, "condition_channels is 0 in the state dict and 2 here"),
    ({"dropout": 0}, "dropout is above 0 in the state dict and 0 here"),
]


@pytest.mark.parametrize(("options", "words"), DIFFERENT)
def test_state_dicts_of_other_networks(options: dict[str, Any], words: str) -> None:
    other = DiffusionNet(**{**network().architecture, "mlp_hidden": None} | options)
    state = network().state_dict()
    line = message(lambda: other.load_state_dict(state), RuntimeError)
    assert line == f"the state dict is of another network: {words}"
    inside = {f"0.{name}": weight for name, weight in state.items()}
    assert message(lambda: nn.Sequential(other).load_state_dict(inside), RuntimeError) == line


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "network.", "model.network."])
def test_weights_of_a_larger_module(prefix: str, path: Path) -> None:
    """The message names the prefix, and what it says to write works."""
    model, loaded, path = network(), network(), path.with_suffix(".ckpt")
    state_dict = {f"{prefix}{name}": weight for name, weight in model.state_dict().items()} | {
        "head.bias": torch.ones(1)
    }
    torch.save({"state_dict": state_dict, "epoch": 3}, path)
    for line, names in (
        (message(lambda: loaded.load_state_dict(state_dict), RuntimeError), {"state_dict": state_dict}),
        (message(lambda: DiffusionNet.load(path)), {"torch": torch, "path": path}),
    ):
        assert f"begin with {prefix!r}" in line
        torch.nn.init.zeros_(loaded.first.weight)
        eval(line.split("write ")[1].split(", after")[0], {"network": loaded, **names})
        assert torch.equal(loaded.first.weight, model.first.weight)


def test_other_state_dicts() -> None:
    line = message(lambda: network(width=16, blocks=1).load_state_dict(network().state_dict()), RuntimeError)
    assert "width is 8 in the state dict and 16 here; blocks is 2" in line  # all differences
    assert "mlp_hidden" not in line
    load = network().load_state_dict
    assert "from_original_state_dict(state_dict)" in message(
        lambda: load({"first_lin.weight": torch.ones(2)}), RuntimeError
    )
    assert "DiffusionNet.load(path)" in message(lambda: load({"model": {}, "options": {}}), RuntimeError)
    for state in ({}, {"a": torch.ones(2)}, {"first.weight": 3}, {"blocks.x.0": torch.ones(2)}):
        refused(RuntimeError, "Missing key", load, state)
    model = network()
    missing, _ = model.load_state_dict({"first.bias": torch.ones(8)}, strict=False)
    assert "last.bias" in missing
    assert (model.first.bias == 1).all()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.load_state_dict(averaged.state_dict())


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
    refused(OptionError, "a folder is needed here", save, tmp_path / "file")
    refused(CheckpointError, r"model\.safetensors: no such checkpoint", DiffusionNet.from_pretrained, tmp_path)
    with pytest.raises(CheckpointError, match=r"a//b: neither a folder nor a network on the .* Hub \(Repo id"):
        DiffusionNet.from_pretrained("a//b")
    with pytest.raises(CheckpointError, match=r"file is a file, .* DiffusionNet\.load reads files"):
        DiffusionNet.from_pretrained(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(ImportError, r"a/b is no folder, .* pip install 'diffnet\[hub\]'", DiffusionNet.from_pretrained, "a/b")
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
    assert all(ends_of_copies(download, [(hub, tmp_path, offline)]) == [0] for offline in ("0", "1"))
