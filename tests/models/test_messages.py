import pytest
import timm
import torch
from torch import nn

from linnaeus.config.schema import DataConfig, ModelConfig
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.models.build import build_model, set_gradient_checkpointing
from linnaeus.models.freeze import build_freezing
from linnaeus.models.preprocessing import with_preprocessing
from tests.helpers.messages import error_of
from tests.helpers.small_models import ONE_LEVEL, TWO_LEVELS, build, built
from tests.helpers.trained import save_run, spec_of


def not_a_module():
    return {}


def own(node, **facts):
    build_model(node, **{"taxonomy": TWO_LEVELS, "in_chans": 3, "img_size": (32, 32), **facts})


KEYS = {
    "name, misspelt": {"name": "test_resnt"},
    "name, like none": {"name": "zzzzzz"},
    "tag": {"name": "test_resnet.foo"},
    "source": {"name": "elsewhere:model"},
    "no folder": {"name": "local-dir:nowhere"},
    "arguments": {"KWARGS": {"colour": "red"}},
    "argument for weights": {"KWARGS": {"pretrained": True}},
    "two sources of weights": {"PRETRAINED": True, "WEIGHTS": "a.pt"},
    "size of images": {"name": "test_vit", "img_size": (30, 30)},
    "marginal head": {"HEAD": "marginal", "taxonomy": Taxonomy(TWO_LEVELS.levels)},
}
FREEZING = {"list": ["backbone", "heads.1"], "everything": "*"}


@pytest.fixture
def folder(tmp_path):
    """A folder as the hub has it."""
    path = tmp_path / "hub"
    torch.manual_seed(3)
    timm.models.save_for_hf(timm.create_model("test_resnet"), path)
    return path


def of_files(folder, tmp_path):
    state = timm.create_model("test_resnet").state_dict()
    files = {
        "another model": timm.create_model("test_vit").state_dict(),
        "a part": {key: value for key, value in state.items() if not key.startswith("layer4")},
        "another width": timm.create_model("test_resnet", channels=(48, 48, 48, 96)).state_dict(),
        "a list": [1, 2],
    }
    found = {}
    path = tmp_path / "weights.pth"
    for title, content in files.items():
        torch.save(content, path)
        found[f"file with {title}"] = error_of(build, WEIGHTS=str(path))
    path.write_text("not weights at all")
    found["file with text"] = error_of(build, WEIGHTS=str(path))
    path.unlink()
    found["no file"] = error_of(build, WEIGHTS=str(path))
    found["folder that is no run"] = error_of(build, WEIGHTS=str(tmp_path))
    found["folder of timm"] = error_of(build, WEIGHTS=str(folder))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    name = f"local-dir:{tmp_path}"
    found["folder without weights"] = error_of(build, name, PRETRAINED=True)
    torch.save(files["a part"], tmp_path / "pytorch_model.bin")
    found["folder with a part"] = error_of(build, name, PRETRAINED=True)
    (tmp_path / "config.json").write_text("{")
    found["folder that is damaged"] = error_of(build, name)
    return found


def test_messages(golden, folder, tmp_path, monkeypatch):
    messages = {f"error: {title}": error_of(build, **keys) for title, keys in KEYS.items()}
    messages["error: no labels"] = error_of(own, ModelConfig(), taxonomy=None)
    messages["error: no images"] = error_of(own, ModelConfig(), in_chans=None, img_size=None)
    messages["error: own, no module"] = error_of(own, {"_target_": f"{__name__}.not_a_module"})
    messages["error: checkpointing"] = error_of(
        set_gradient_checkpointing, nn.Sequential(nn.Linear(2, 2))
    )
    for title, freeze in FREEZING.items():
        messages[f"error: freeze, {title}"] = error_of(
            build_freezing, ModelConfig(FREEZE=freeze), build(), None
        )
    messages["error: freeze, own"] = error_of(
        build_freezing, {"_target_": "a.B"}, nn.Linear(1, 1), 2
    )
    messages |= {f"error: {title}": text for title, text in of_files(folder, tmp_path).items()}

    def refuse(*_, **__):
        raise ConnectionError("connection refused")

    monkeypatch.setattr("timm.models._hub.hf_hub_download", refuse)
    messages["error: hub, unreachable"] = error_of(build, "hf-hub:someone/model", PRETRAINED=True)
    messages["weights: random"] = built()[1]
    messages["weights: of a name, not loaded"] = built("test_resnet.r160_in1k")[1]
    messages["weights: of a folder"] = built(f"local-dir:{folder}", PRETRAINED=True)[1]
    torch.save(build().backbone.state_dict(), tmp_path / "a.pth")
    messages["weights: of a file"] = built(WEIGHTS=str(tmp_path / "a.pth"))[1]
    torch.save(build().state_dict(), tmp_path / "whole.pth")
    messages["weights: with heads"] = built(WEIGHTS=str(tmp_path / "whole.pth"))[1]
    run = save_run(tmp_path / "run", spec_of(taxonomy=TWO_LEVELS))
    messages["weights: of a run"] = built(taxonomy=ONE_LEVEL, WEIGHTS=str(run))[1]
    averages = {f"net.{name}": each for name, each in build().backbone.state_dict().items()}
    torch.save({"model": {}, "ema": averages | {"step": torch.ones(1)}}, tmp_path / "a.pth")
    messages["weights: of another program"] = built(WEIGHTS=str(tmp_path / "a.pth"))[1]
    torch.save({"arch": "test_vit", **averages}, tmp_path / "a.pth")
    messages["error: file of another architecture"] = error_of(
        build, "test_convnext", WEIGHTS=str(tmp_path / "a.pth")
    )
    messages["freezing"] = str(build_freezing(ModelConfig(FREEZE="backbone"), build(), 3).sentence)
    data = DataConfig()
    data.DATASET.NAME, data.AUGMENT.MEAN = "synthetic", [0.5] * 3
    messages["preprocessing"] = str(
        with_preprocessing(data, ModelConfig(NAME="resnet18", PRETRAINED=True))[1]
    )
    golden("models", messages, folder=folder, tmp=tmp_path, here=__name__)
