"""Exported files give the run's outputs, without Linnaeus, and say what they mean."""

import json
import warnings

import pytest
import safetensors
import torch

from linnaeus.data.taxonomy import UNKNOWN, Taxonomy
from linnaeus.inference.export import formats
from linnaeus.inference.export import run as export_module
from linnaeus.inference.trained import load_run
from linnaeus.runtime.errors import ConfigError, LinnaeusError
from tests.helpers.trained import BIRDS, Flat, picture, save_run, spec_of


def run_of(folder, name="test_resnet", amp="off", **spec):
    save_run(folder, spec_of(name, **spec), config={"TRAIN": {"AMP": amp}})
    return load_run(folder, device="cpu", trust_code=True)


def flat_run(folder, **spec):
    """A tiny model, for what does not depend on the architecture."""
    node = {"_target_": f"{Flat.__module__}.Flat"}
    return run_of(folder, **{"node": node, "size": (4, 4), **spec})


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("runs") / "birds", amp="bf16")


@torch.no_grad()
def outputs_of(run, batch):
    outputs = run.model(batch)
    return outputs if isinstance(outputs, dict) else dict(zip(run.classes, outputs, strict=True))


def check_equal(found, expected, rtol=1e-3, atol=1e-5):
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol)


def check_description(content, outputs, size=32):
    levels = [(level["name"], tuple(level["classes"])) for level in content["levels"]]
    assert levels == [(level.name, level.classes) for level in BIRDS.levels]
    assert content["levels"][1]["parents"] == list(BIRDS.parents[0])
    assert content["outputs"] == outputs
    expected = {
        "name": "images",
        "channels": 3,
        "height": size,
        "width": size,
        "dtype": "float32",
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.3, 0.25],
        "crop_fraction": 0.9,
        "interpolation": "bilinear",
        "resize": "crop",
    }
    assert content["input"] == expected


def test_safetensors(birds, tmp_path):
    exported = birds.export("safetensors", tmp_path / "birds.safetensors")
    assert exported.difference == 0
    with safetensors.safe_open(exported.path, "pt") as file:
        check_description(json.loads(file.metadata()["linnaeus"]), None)
        assert {*file.keys()} == set(birds.model.state_dict())
    found = load_run(exported.path, device="cpu").predict(picture(0))
    assert repr(found) == repr(birds.predict(picture(0)))
    in_full = run_of(tmp_path / "off")
    assert repr(found) != repr(in_full.predict(picture(0))), "it keeps the number format"


def onnx_outputs(path, batch):
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    names = [entry.name for entry in session.get_outputs()]
    outputs = session.run(None, {"images": batch.numpy()})
    return dict(zip(names, map(torch.from_numpy, outputs), strict=True))


def program_outputs(path, batch, about):
    extra = {"linnaeus.json": ""}
    with warnings.catch_warnings(action="ignore"):  # torch 2.11 warns of its own buffer
        program = torch.export.load(path, extra_files=extra)
    found = program.module()(batch)
    assert json.loads(extra["linnaeus.json"])["outputs"] == about
    return found


@pytest.mark.slow
def test_a_marginal_head_as_a_computation(tmp_path):
    """Its outputs are log-probabilities already, which do not add up to 1 where a parent is unknown."""
    taxonomy = Taxonomy(BIRDS.levels, ((0, 0, 1, UNKNOWN, 0),))
    run = run_of(tmp_path / "run", taxonomy=taxonomy, HEAD="marginal")
    batch = torch.randn(3, 3, 32, 32)
    expected = outputs_of(run, batch)
    found = program_outputs(run.export("torch-export").path, batch, "probabilities")
    check_equal(found, {level: logs.exp() for level, logs in expected.items()})
    assert not torch.allclose(found["order"], expected["order"].softmax(1), rtol=1e-2)
    logs = run.export("torch-export", outputs="logits").path
    check_equal(program_outputs(logs, batch, "log-probabilities"), expected)


@pytest.mark.e2e  # seconds to import what writes ONNX
def test_onnx_gives_logits(tmp_path):
    onnx = pytest.importorskip("onnx")
    run, batch, sizes = flat_run(tmp_path / "run"), torch.randn(3, 3, 4, 4), {}
    for half in (False, True):
        folder = tmp_path / str(half)
        path = run.export("onnx", folder / "a.onnx", outputs="logits", opset=20, half=half).path
        assert [*folder.iterdir()] == [path]
        check_equal(onnx_outputs(path, batch), outputs_of(run, batch), atol=0.05 if half else 1e-5)
        model = onnx.load(path)
        assert [each.version for each in model.opset_import if not each.domain] == [20]
        entries = [*model.graph.input, *model.graph.output]
        assert {entry.type.tensor_type.shape.dim[0].dim_param for entry in entries} == {"batch"}
        about = {each.key: each.value for each in model.metadata_props}
        check_description(json.loads(about["linnaeus"]), "logits", size=4)
        sizes[half] = sum(tensor.ByteSize() for tensor in model.graph.initializer)
    assert sizes[True] < 0.7 * sizes[False]
    conv = {"_target_": "torch.nn.Conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": 4}
    plain = flat_run(tmp_path / "plain", taxonomy=None, node=conv)
    assert list(onnx_outputs(plain.export("onnx").path, batch)) == ["output"]


def test_a_file_with_other_outputs_is_an_error_and_is_not_left(tmp_path, monkeypatch):
    """A negative control: what is written is the model with one weight changed."""
    run, real = flat_run(tmp_path / "run"), export_module._write_program

    def write(run, *arguments):
        bias = run.model.layers["species"].bias
        kept = bias.detach().clone()
        with torch.no_grad():
            bias[0] += 1.0
        try:
            return real(run, *arguments)
        finally:
            bias.data = kept

    monkeypatch.setattr(export_module, "_write_program", write)
    with pytest.raises(LinnaeusError, match="'species'"):
        run.export("torch-export", tmp_path / "out/model.pt2")
    assert not list((tmp_path / "out").iterdir())


def test_packages_that_are_missing_are_named(birds, monkeypatch):
    monkeypatch.setattr(formats, "_NEEDED", ("onnx", "no_such_package"))
    with pytest.raises(ConfigError, match=r"no_such_package.*linnaeus\[export\]"):
        birds.export("onnx")


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=pytest.mark.e2e), "torch-export"])
@pytest.mark.parametrize(("half", "atol"), [(False, 1e-5), (True, 0.02)])
def test_pixels_in_and_probabilities_out(tmp_path, format, half, atol):
    run = run_of(tmp_path / "run")
    path = run.export(format, preprocessing=True, half=half).path
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    for batch in (pixels, pixels[:1]):
        outputs = outputs_of(run, run.spec.preprocessing.normalise()(batch))
        expected = {level: logits.softmax(1) for level, logits in outputs.items()}
        if format == "onnx":
            found = onnx_outputs(path, batch)
        else:
            found = program_outputs(path, batch, "probabilities")
        check_equal(found, expected, rtol=1e-5, atol=atol)
