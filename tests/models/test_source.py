"""Pretrained weights by name: those of timm's list, of a folder, and of a hub that cannot be reached."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest
import timm
import torch
from torch import Tensor

from linnaeus.config.schema import ModelConfig
from linnaeus.errors import ConfigError
from linnaeus.models.build import build_model
from linnaeus.models.source import find_source
from tests.models.test_build import TWO_RANKS, build


def said(**keys: Any) -> str:
    """The line that says which weights a model has."""
    _, line = build_model(ModelConfig(**keys), taxonomy=TWO_RANKS, in_chans=3, img_size=(32, 32))
    return line


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub at a port where nothing listens, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub has it, of a model for one channel."""
    path = tmp_path_factory.mktemp("hub") / "model"
    torch.manual_seed(3)
    timm.models.save_for_hf(timm.create_model("test_resnet", in_chans=1), path)
    return path


@pytest.mark.parametrize("in_chans", [1, 3])
def test_weights_of_a_folder_are_adapted_to_the_channels(folder: Path, in_chans: int) -> None:
    model = build(f"local-dir:{folder}", PRETRAINED=True, in_chans=in_chans)
    torch.manual_seed(3)
    source = timm.create_model("test_resnet", in_chans=1)
    expected, found = source.state_dict(), model.backbone.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found if name != "conv1.0.weight")
    first: Tensor = found["conv1.0.weight"]
    torch.testing.assert_close(first.sum(1, keepdim=True), expected["conv1.0.weight"])
    random = build(f"local-dir:{folder}", in_chans=in_chans)  # the same random numbers for the heads
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(model.heads, random.heads, strict=True))
    assert not torch.equal(random.backbone.state_dict()["conv1.0.weight"], first)


def test_the_line_says_which_weights_there_are(folder: Path) -> None:
    heads = "; new: heads of family, species"
    assert (
        said(NAME=f"local-dir:{folder}", PRETRAINED=True)
        == f"weights: local-dir:{folder} (test_resnet){heads}"
    )
    one_head = said(NAME=f"local-dir:{folder}", PRETRAINED=True, HEAD="marginal")
    assert one_head.endswith("; new: head of family, species")
    assert said(NAME="test_resnet") == "weights: random"
    for name in (f"local-dir:{folder}", "test_resnet.r160_in1k"):
        assert (
            said(NAME=name) == f"weights: random ({name} names weights that only MODEL.PRETRAINED True loads)"
        )
    tagged = find_source("test_resnet.r160_in1k")
    assert tagged.origin == find_source("test_resnet").origin
    assert tagged.origin == "timm test_resnet.r160_in1k (hub timm/test_resnet.r160_in1k)"


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("keys", "key", "place"),
    [
        ({"NAME": "test_resnet"}, "MODEL.PRETRAINED", "hub timm/test_resnet.r160_in1k"),
        ({"NAME": "hf-hub:someone/model"}, "MODEL.NAME", "hub someone/model"),
    ],
)
def test_without_a_network_one_error_says_how_to_bring_the_weights(
    keys: dict[str, Any], key: str, place: str
) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError) as error:
        said(**keys, PRETRAINED=True)
    [problem] = error.value.problems
    assert problem.startswith(f"{key}: the files of {place} cannot be downloaded (")
    assert "refused" in problem
    for remedy in ("HF_HOME", "local-dir:FOLDER", "MODEL.WEIGHTS FILE"):
        assert remedy in problem
    assert "\n" not in problem
    assert time.monotonic() - started < 5  # the hub's client alone tries again for half a minute
    assert said(NAME="test_resnet") == "weights: random"


class Refusing(BaseHTTPRequestHandler):
    """Answers every request as the hub does for a model or a file that it does not give."""

    status, code = 404, ""

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("status", "code", "message", "is_network"),
    [
        (404, "EntryNotFound", "MODEL.NAME: hub someone/model has no config.json", False),
        (401, "RepoNotFound", "cannot be downloaded (there is no such model, or it is private", False),
        (403, "GatedRepo", "cannot be downloaded (access to it has to be asked for", False),
        (404, "RevisionNotFound", "cannot be downloaded (the model has no such revision)", False),
        (502, "", "the files of hub someone/model cannot be downloaded (", True),
    ],
)  # fmt: skip
def test_a_hub_that_answers_is_not_called_unreachable(
    status: int, code: str, message: str, is_network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refusing, "status", status)
    monkeypatch.setattr(Refusing, "code", code)
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        with pytest.raises(ConfigError) as error:
            said(NAME="hf-hub:someone/model", PRETRAINED=True)
        server.shutdown()
    assert message in error.value.problems[0]
    assert ("without a network" in error.value.problems[0]) == is_network


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"NAME": "test_resnet.foo"}, "'test_resnet.foo' has the tag 'foo', which timm does not know; there "
         "are weights for test_resnet.r160_in1k"),
        ({"NAME": "vit_tiny_r_s16_p8_224.nothing", "PRETRAINED": True}, "there are weights for vit_tiny_r_"),
        ({"NAME": "regnetz_005", "PRETRAINED": True}, "MODEL.PRETRAINED: True, but timm has no weights for "
         "'regnetz_005'; there are none for 'regnetz_005', but for "),
        ({"NAME": "elsewhere:model"}, "give hf-hub:OWNER/MODEL or local-dir:FOLDER"),
        ({"NAME": "local-dir:nowhere"}, "'local-dir:nowhere' needs a description of the model in nowhere"),
        ({"KWARGS": {"pretrained": True}}, "MODEL.KWARGS.pretrained: True; use MODEL.PRETRAINED instead"),
        ({"KWARGS": {"checkpoint_path": "a"}}, "MODEL.KWARGS.checkpoint_path: 'a'; use MODEL.WEIGHTS"),
        ({"PRETRAINED": True, "WEIGHTS": "a.pt"}, "MODEL.WEIGHTS: 'a.pt', but MODEL.PRETRAINED is True too"),
    ],
)  # fmt: skip
def test_names_and_keys_that_cannot_be_used_say_why(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        said(**{"NAME": "test_resnet", **keys})


def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"the weights local-dir:.* do not load") as error:
        said(NAME=f"local-dir:{tmp_path}", PRETRAINED=True)
    assert "without a network" not in str(error.value)
    state = timm.create_model("test_resnet").state_dict()
    part = {name: tensor for name, tensor in state.items() if "layer4" not in name}
    torch.save(part, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"\d+ parameters are missing, such as 'layer4.0.conv1.weight'"):
        said(NAME=f"local-dir:{tmp_path}", PRETRAINED=True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="needs a description of the model"):
        said(NAME=f"local-dir:{tmp_path}")
