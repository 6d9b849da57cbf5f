"""`diffnet demo`, and the network that it uses."""

import re
import sys
import webbrowser
from pathlib import Path

import numpy as np
import pytest
from command import complaint, output
from PIL import Image

from diffnet import DiffusionNet
from diffnet.data import figures
from diffnet.train import predict_labels
from diffnet.train.commands.demo import WEIGHTS


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail(f"opened {url}"))
    told = output("demo")
    assert output("demo") == told  # the folder is written again
    out = tmp_path / "diffnet-demo"
    assert sorted(path.name for path in out.iterdir()) == [
        *("figure.html", "figure.ply", "figure.png", "network.safetensors")
    ]
    right = float(re.search(r"([\d.]+) % of its ", told)[1])
    assert right > 92
    html = (out / "figure.html").read_text(encoding="utf-8")
    assert '"name":"prediction"' in html
    assert '"name":"truth"' in html
    assert np.asarray(Image.open(out / "figure.png")).std() > 10
    # The first command of "Next" works as it is printed.
    command = re.search(r"diffnet (view .*?) +#", told)[1]
    assert output(*command.split(), "--out", "view.html") == "wrote view.html\n"
    assert '"name":"prediction"' in Path("view.html").read_text(encoding="utf-8")


def test_demo_keeps_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "figure.png").write_text("mine")
    assert "this folder holds other files" in complaint("demo", "--out", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("display", ["", ":0"])
@pytest.mark.parametrize("terminal", [False, True])
def test_demo_opens_its_page_on_a_desktop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, display: str, terminal: bool
) -> None:
    from diffnet.train.commands.view import open_page

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) is None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.chdir(tmp_path)
    assert open_page(Path("a b.html")) == bool(display and terminal)
    assert opened == [f"{tmp_path.as_uri()}/a%20b.html"] * bool(display and terminal)


def test_network_of_the_demo() -> None:
    assert WEIGHTS.stat().st_size < 2e6
    network = DiffusionNet.load(WEIGHTS)
    assert network.metadata["training_command"].startswith("diffnet train segmentation --data figures ")
    assert network.metadata["license"] == "MIT"
    items = figures(train=1, test=3).test
    predicted = predict_labels([item.mesh for item in items], network, "cpu")
    pairs = zip(predicted, items, strict=True)
    accuracy = np.concatenate([labels == item.labels for (_, labels), item in pairs]).mean()
    assert accuracy == pytest.approx(network.metadata["test_accuracy"], abs=0.03)
