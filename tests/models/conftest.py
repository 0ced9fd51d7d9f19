"""A hub that gives nothing, and a folder as a hub has it."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub.constants
import pytest
import timm
import torch


@pytest.fixture
def refusing_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[BaseHTTPRequestHandler]]:
    """A hub that answers every request with the `status` and the `code` that its handler has."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    class Refusing(BaseHTTPRequestHandler):
        status, code = 404, ""

        def do_HEAD(self) -> None:
            self.send_response(self.status)
            self.send_header("X-Error-Code", self.code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        yield Refusing
        server.shutdown()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub has it, of a model for one channel."""
    path = tmp_path_factory.mktemp("hub") / "model"
    torch.manual_seed(3)
    timm.models.save_for_hf(timm.create_model("test_resnet", in_chans=1), path)
    return path
