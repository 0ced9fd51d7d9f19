"""Code that the files of a run name: it runs with consent alone, and some of it never."""

import json
import os
import socket
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from linnaeus.config.instantiate import call_target
from linnaeus.inference.trained import load_run
from linnaeus.runtime.errors import ConfigError, LinnaeusError, TrustError
from tests.helpers.runs import SMALL
from tests.helpers.trained import Flat, save_checkpoint, save_run, spec_of, write_images

MARK = Path("mark.txt")
"""What hostile code leaves in the current folder."""


def mark(*_, **__):
    """A function that anybody can import, and that does harm."""
    return str(MARK.write_text("run"))


def flat(num_classes, in_chans, img_size):
    """A user's function that makes a model."""
    return Flat(num_classes, in_chans, img_size)


class Harmful:
    """A class that is no module, and does harm when it is made."""

    def __init__(self, **_):
        mark()


class Reduced:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"echo run > {MARK}",)


OWN = {"_target_": f"{__name__}.mark"}
SHELL = {
    "_target_": "linnaeus.sweep.slurm._call",
    "_args_": ["sh", "-c", f"echo run > {MARK}"],
}
WRITE = {
    "_target_": "pathlib.Path.write_text",
    "_args_": [{"_target_": "pathlib.Path", "_args_": ["mark.txt"]}, "x"],
}
ALIAS = {**WRITE, "_target_": f"{__name__}.Path.write_text"}
FLAT = {"_target_": f"{Flat.__module__}.Flat"}
TIMM = {"NAME": "test_resnet", "HEAD": "independent"}
NESTED = {
    "a list": {**FLAT, "extra": [1, [OWN]]},
    "a mapping": {**FLAT, "extra": {"a": {"b": OWN}}},
    "_args_": {**FLAT, "_args_": [OWN]},
    "a _partial_": {**FLAT, "extra": {**OWN, "_partial_": True}},
    "a target within a _partial_": {**FLAT, "_partial_": True, "extra": OWN},
    "not _recursive_": {**FLAT, "_recursive_": False, "extra": OWN},
    "KWARGS": {**TIMM, "KWARGS": {"act_layer": OWN}},
    "LORA": {**TIMM, "LORA": {"RANK": 1, "ALPHA": OWN}},
}
HARMFUL = {"_target_": f"{__name__}.Harmful"}


def as_checkpoint(node):
    """A checkpoint that has this MODEL node."""
    spec = spec_of(node=node, size=(4, 4))
    save_checkpoint(Path("evil.pt"), spec, {"model": {"w": torch.ones(1)}})
    return Path("evil.pt")


def as_safetensors(node):
    """A file such as `export` writes that has this MODEL node."""
    about = {"spec": spec_of(node=node, size=(4, 4)).as_dict()}
    save_file({"w": torch.ones(1)}, "evil.safetensors", metadata={"linnaeus": json.dumps(about)})
    return Path("evil.safetensors")


def as_folder(node):
    """The folder of a run whose checkpoint has this MODEL node."""
    Path("evil/checkpoints").mkdir(parents=True)
    as_checkpoint(node).rename("evil/checkpoints/best.pt")
    return Path("evil")


def in_forms(first, *rest, safetensors=()):
    """All nodes in a checkpoint, the first one in the other forms of a file, and some in safetensors."""
    cases = [(form, first) for form in (as_checkpoint, as_safetensors, as_folder)]
    cases += [(as_checkpoint, node) for node in rest]
    cases += [(as_safetensors, node) for node in safetensors]
    return pytest.mark.parametrize(("form", "node"), cases)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("node", [OWN, SHELL, WRITE, ALIAS, HARMFUL, NESTED["a list"]])
def test_the_code_of_these_tests_does_harm_when_called(node):
    """A negative control of all tests below."""
    offer = {"num_classes": {"a": 1}, "in_chans": 1, "img_size": (1, 1)}
    call_target(node, "MODEL", offer={} if node in (SHELL, WRITE, ALIAS) else offer)
    assert MARK.exists()


@in_forms(SHELL, WRITE, ALIAS, OWN, HARMFUL, {**OWN, "_partial_": True}, *NESTED.values())
def test_a_file_calls_nothing_without_consent(form, node):
    path = form(node)
    with pytest.raises(TrustError) as caught:
        load_run(path, device="cpu")
    named = node.get("_target_", OWN["_target_"])
    file = "evil/checkpoints/best.pt" if path.is_dir() else path.name
    assert [word for word in (named, file) if word not in str(caught.value)] == []
    assert not MARK.exists()


@in_forms(SHELL, WRITE, ALIAS, HARMFUL, safetensors=NESTED.values())
def test_no_file_calls_python_or_linnaeus_with_consent(form, node):
    """Nor a class that is no module, nor safetensors what their arguments name."""
    with pytest.raises(TrustError):
        load_run(form(node), device="cpu", trust_code=True)
    assert not MARK.exists()


@pytest.mark.parametrize("node", [OWN, NESTED["a mapping"]])
def test_consent_calls_what_the_file_names(node):
    """The word is no ornament: with it, a function that can be imported runs, and has to give a module."""
    with pytest.raises(LinnaeusError):
        load_run(as_checkpoint(node), device="cpu", trust_code=True)
    assert MARK.exists()


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": f"{__name__}.flat"},
        {**FLAT, "extra": {"_target_": "collections.OrderedDict", "a": 1}},
        {**FLAT, "extra": {"_target_": "hydra.utils.get_class", "path": "torch.nn.GELU"}},
    ],
)
def test_a_model_of_ones_own_opens_with_consent(run, node):
    save_run(Path("own"), spec_of(node=node, size=(4, 4)))
    (photo,) = write_images(Path("photos"), 1)
    predict = ("predict", "own", str(photo), "--device", "cpu")
    outcome = run(*predict)
    assert (outcome.code, "--trust-code" in outcome.err) == (2, True)
    run(*predict, "--trust-code").ok()
    assert isinstance(load_run("own", device="cpu", trust_code=True).model, Flat)


def test_safetensors_of_a_model_of_ones_own_need_consent():
    opened = load_run(save_run(Path("own"), spec_of(node=FLAT, size=(4, 4))), trust_code=True)
    file = opened.export("safetensors", "own.safetensors").path
    with pytest.raises(TrustError):
        load_run(file)
    again, (photo,) = load_run(file, trust_code=True), write_images(Path("photos"), 1)
    assert repr(again.predict(photo)) == repr(opened.predict(photo))


@pytest.mark.parametrize("form", [list, tuple, lambda texts: {"a": {"b": texts}}])
def test_texts_of_a_file_are_no_interpolations(monkeypatch, form):
    monkeypatch.setenv("SECRET", "hunter2")
    extra = form(["${oc.env:SECRET}", r"\${oc.env:SECRET}", "a${b}${oc.env:SECRET}"])
    folder = save_run(Path("run"), spec_of(node={**FLAT, "extra": extra}, size=(4, 4)))
    model = load_run(folder, device="cpu", trust_code=True).model
    assert model.extra == (list(extra) if isinstance(extra, tuple) else extra)


# Names that would be fetched.


@pytest.fixture
def asked(monkeypatch):
    """The hosts that something asks for; there is no network."""
    hosts = []

    def refuse(host, *_, **__):
        hosts.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return hosts


@in_forms("hf-hub:someone/model", "hf_hub:a/b", "local-dir:/tmp", "x:y")
def test_a_file_names_no_place_to_fetch_a_model_from(form, node, asked):
    path = form({**TIMM, "NAME": node})
    for trust_code in (False, True):
        with pytest.raises(TrustError, match=node):
            load_run(path, device="cpu", trust_code=trust_code)
    assert asked == []


PLACES = {"file": "weights.pt", "hf_hub_id": "a/b", "url": "http://a/b"}


@pytest.mark.parametrize(
    "more",
    [
        {"PRETRAINED": True},
        {"WEIGHTS": "weights.pt"},
        {"KWARGS": {"pretrained_cfg": PLACES}},
        {"KWARGS": {"pretrained_cfg_overlay": PLACES}},
    ],
)
def test_weights_that_a_file_names_are_not_read(more, asked):
    torch.save(Reduced(), "weights.pt")
    save_run(Path("run"), spec_of())
    content = torch.load("run/checkpoints/best.pt", weights_only=True)
    content["model_spec"]["model"] |= more
    torch.save(content, "run/checkpoints/best.pt")
    load_run("run", device="cpu")
    assert (MARK.exists(), asked) == (False, [])


@pytest.mark.parametrize("argument", [{"pretrained": True}, {"checkpoint_path": "weights.pt"}])
def test_arguments_that_load_weights_are_refused(argument, asked):
    torch.save(Reduced(), "weights.pt")
    with pytest.raises(ConfigError):
        load_run(as_checkpoint({**TIMM, "KWARGS": argument}), device="cpu", trust_code=True)
    assert (MARK.exists(), asked) == (False, [])


@pytest.mark.parametrize(
    "node", [{**TIMM, "LORA": {"RANK": 1, "a": 2}}, {"NAME": 7}, {**TIMM, "KWARGS": 3}, 5]
)
def test_an_odd_model_is_one_clear_error(node):
    content = spec_of().as_dict() | {"model": node}
    save_checkpoint(Path("odd.pt"), None, {"model": {"w": torch.ones(1)}}, model_spec=content)
    with pytest.raises(LinnaeusError):
        load_run("odd.pt", device="cpu")


# The configuration of a run.


IMAGES = {"DATASET": {"NAME": "imagefolder", "ROOT": "data"}, "IMG_SIZE": 32}


def with_config(**nodes):
    """A run of timm on a folder of images, with these nodes in its `config.yaml` and in its checkpoint."""
    write_images(Path("data/val/Passeriformes/Sitta"), 2)
    config = {"DATA": IMAGES} | nodes
    folder = save_run(Path("run"), spec_of(), config=config)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


EVALUATE = ("evaluate", "run", "EXPERIMENT.DEVICE=cpu", "DATA.NUM_WORKERS=0")
EXPORT = ("export", "run", "--format", "torch-export")
DATA = {"DATASET": {"_target_": f"{__name__}.mark", "split": "val"}, "IMG_SIZE": 32}
BUILT = {
    "a dataset": {"DATA": DATA},
    "in a dataset": {"DATA": {"DATASET": {"_target_": "torch.utils.data.Dataset", "x": [OWN]}}},
    "a loss": {"LOSS": OWN},
    "in a loss": {"LOSS": {"_target_": "torch.nn.CrossEntropyLoss", "weight": OWN}},
}


@pytest.mark.parametrize("nodes", BUILT.values(), ids=BUILT.keys())
def test_a_run_calls_its_dataset_and_loss_with_consent(run, nodes):
    with_config(**nodes)
    outcome = run(*EVALUATE)
    assert (outcome.code, MARK.exists()) == (2, False), outcome.err
    assert all(word in outcome.err for word in ("run/config.yaml", "--trust-code"))
    run(*EVALUATE, "--trust-code")
    assert MARK.exists()
    MARK.unlink()
    Path("run/config.yaml").unlink()  # what the checkpoint says is a file's word too
    outcome = run(*EVALUATE)
    assert (outcome.code, "best.pt" in outcome.err, MARK.exists()) == (2, True, False), outcome.err


@pytest.mark.parametrize("node", [SHELL, WRITE, ALIAS])
def test_no_configuration_of_a_run_calls_python(run, node):
    with_config(DATA={"DATASET": node}, LOSS=node)
    assert run(*EVALUATE, "--trust-code").code == 2
    assert not MARK.exists()


@pytest.mark.parametrize(
    ("command", "nodes"),
    [
        (EVALUATE, {"TRAIN": {"CALLBACKS": [OWN]}, "OPTIMIZER": OWN, "MODEL": OWN}),
        (EVALUATE, {"DATA": {**IMAGES, "AUGMENT": {"TRAIN": [OWN]}}}),
        (EXPORT, {"DATA": DATA}),
    ],
)
def test_what_a_command_does_not_need_is_never_called(run, command, nodes):
    """And needs no consent."""
    with_config(**nodes)
    for words in ([], ["--trust-code"]):
        outcome = run(*command, *words)
        assert (outcome.code, MARK.exists()) == (0, False), outcome.err


def test_what_the_user_types_needs_no_consent(run):
    with_config()
    run(*EVALUATE, f"DATA.DATASET._target_={__name__}.mark", "DATA.DATASET.split=val")
    assert MARK.exists()


@pytest.mark.parametrize("more", ["TRAIN: {AMP: '${oc.env:SECRET}'}", "defaults: [other]"])
def test_a_run_has_no_interpolations_and_no_defaults(run, monkeypatch, more):
    monkeypatch.setenv("SECRET", "hunter2")
    Path("other.yaml").write_text("DATA: {DATASET: {ROOT: hunter2}}")
    file = with_config() / "config.yaml"
    text = file.read_text()
    file.write_text(f"{text}\n{more}\n")
    outcome = run(*EVALUATE)
    assert (outcome.code, "hunter2" in outcome.err + outcome.out) == (2, False)
    file.write_text(text.replace("ROOT: data", r"ROOT: data\${oc.env:SECRET}"))
    assert r"ROOT: data\${oc.env:SECRET}" in run(*EVALUATE, "--print-config").out


# Files that are data alone.


@pytest.mark.parametrize("command", [("compare", "run"), EVALUATE, EXPORT])
def test_yaml_makes_no_objects(run, command):
    folder = with_config()
    (folder / "config.yaml").write_text(f"DATA: !!python/object/apply:os.system ['echo > {MARK}']")
    run(*command)
    assert not MARK.exists()


def spoil(file):
    """Name hostile code wherever a checkpoint may name a class."""
    content = torch.load(file, weights_only=True)
    content["model_spec"]["model"] = {**OWN, "LORA": OWN}
    content["config"]["MODEL"] |= OWN
    content["config"]["DATA"]["DATASET"] = OWN
    content["config"]["TRAIN"]["CALLBACKS"] = [OWN]
    content["callbacks"] = [{"TRAIN.CALLBACKS[0]": OWN}]
    torch.save(content, file)


def test_resuming_and_weights_run_no_code(run):
    run("train", *SMALL).ok()
    folder = Path("runs/small")
    last = folder / "checkpoints/last.pt"
    for file in (last, folder / "checkpoints/best.pt"):
        spoil(file)
    (folder / "config.yaml").write_text(yaml.safe_dump({"MODEL": OWN, "LOSS": OWN}))
    resume = ("TRAIN.EPOCHS=3", "TRAIN.AUTO_RESUME=True")
    for words in (("MODEL.WEIGHTS=runs/small", "EXPERIMENT.NAME=next"), resume):
        outcome = run("train", *SMALL, *words)
        assert (outcome.code, MARK.exists()) == (0, False), outcome.err
    torch.save({"state": Reduced()}, "pickle.pt")
    last.write_bytes(Path("pickle.pt").read_bytes())
    weights = ("MODEL.WEIGHTS=pickle.pt", "EXPERIMENT.NAME=third")
    assert run("train", *SMALL, *weights).code == 2
    run("train", *SMALL, *resume, "TRAIN.EPOCHS=4")
    assert not MARK.exists()
    torch.load("pickle.pt", weights_only=False)
    assert MARK.exists(), "a negative control"
