"""Serve a network of `diffnet train`: `python prediction_server.py run`, with Python's standard library.

Without a network, it takes the built-in one of body parts.
Ask it with `curl --data-binary @scan.obj http://localhost:8000/scan.obj`. The path says what format the mesh has.
"""

import json
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch

from diffnet import DiffusionNet
from diffnet.geometry import MeshError
from diffnet.train import predict_labels


def server(name: str, port: int = 8000, largest: int = 2**28) -> HTTPServer:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = DiffusionNet.from_pretrained(name, device=device)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers.get("Content-Length", 0))
            if size > largest:
                return self.answer(413, {"error": f"a mesh may have {largest} bytes, got {size}"})
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "mesh").with_suffix(Path(self.path).suffix)
                path.write_bytes(self.rfile.read(size))
                try:
                    labels = predict_labels([path], network, device)[0][1]
                except MeshError as error:
                    return self.answer(400, {"error": str(error)})
            return self.answer(200, {"labels": labels.tolist(), "label_names": network.metadata["label_names"]})

        def answer(self, status, content):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

    return HTTPServer(("localhost", port), Handler)


if __name__ == "__main__":
    server(*sys.argv[1:] or ["body-parts"]).serve_forever()
