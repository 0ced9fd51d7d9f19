"""A run read back from its folder or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import linnaeus
from linnaeus.data.taxonomy import UNKNOWN, index_labels
from linnaeus.errors import CheckpointError, ConfigError
from linnaeus.inference.trained import load_run
from linnaeus.models.spec import ModelSpec
from linnaeus.rng import rng_state
from tests.helpers.trained import BIRDS, randomise, save_checkpoint, save_run, spec_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "birds", spec_of())


def first_weight(path: Path, **arguments: str) -> float:
    parameter = next(load_run(path, device="cpu", **arguments).model.parameters())
    return float(parameter.detach().flatten()[0])


def test_best_last_and_files_are_found(folder: Path) -> None:
    best, last = first_weight(folder), first_weight(folder, checkpoint="last")
    assert best != last
    assert first_weight(folder, checkpoint="best.pt") == best
    assert first_weight(folder, checkpoint="checkpoints/last.pt") == last
    assert first_weight(folder / "checkpoints" / "last.pt") == last
    assert first_weight(folder, checkpoint=str(folder / "checkpoints" / "last.pt")) == last


def test_what_a_run_offers(folder: Path) -> None:
    run = linnaeus.load_run(folder, device="cpu")
    assert (run.folder, run.taxonomy) == (folder, BIRDS)
    assert run.classes == {level.name: level.classes for level in BIRDS.levels}
    assert run.transform(torch.zeros(3, 50, 60, dtype=torch.uint8)).shape == (3, 32, 32)
    assert not run.model.training
    shown = repr(run)
    assert "best.pt', test_resnet, 3×32×32, order (2 classes), species (5 classes), cpu" in shown
    assert len(shown) < 400


def test_a_moved_folder_and_a_checkpoint_alone(tmp_path: Path) -> None:
    folder = save_run(tmp_path / "runs" / "a", spec_of())
    expected = first_weight(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    assert first_weight(moved) == expected
    alone = tmp_path / "model.pt"
    (moved / "checkpoints" / "best.pt").rename(alone)
    assert first_weight(alone) == expected
    assert load_run(alone, device="cpu").folder is None


def test_the_global_generators_are_left_alone(folder: Path) -> None:
    before = rng_state(torch.device("cpu"))
    load_run(folder, device="cpu")
    after = rng_state(torch.device("cpu"))
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert torch.equal(before["numpy"][1], after["numpy"][1])


def test_the_average_of_the_weights_is_preferred(tmp_path: Path) -> None:
    spec = spec_of()
    states = []
    for seed in range(2):
        model = spec.build()
        randomise(model, seed)
        states.append(model.state_dict())
    save_checkpoint(tmp_path / "a.pt", spec, {"model": states[0], "ema": {"module": states[1]}})
    loaded = load_run(tmp_path / "a.pt", device="cpu").model.state_dict()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in loaded.items())
    assert not all(torch.equal(tensor, states[0][name]) for name, tensor in loaded.items())


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = save_run(tmp_path / "runs" / "birds", spec_of())
    empty = tmp_path / "empty"
    empty.mkdir()
    (folder / "checkpoints" / "text.pt").write_text("no checkpoint")
    torch.save({"weight": torch.ones(2)}, folder / "checkpoints" / "state.pt")
    torch.save(torch.nn.Linear(2, 2), folder / "checkpoints" / "whole.pt")
    save_checkpoint(folder / "checkpoints" / "old.pt", None, {})
    save_checkpoint(folder / "checkpoints" / "bare.pt", spec_of(), {})
    save_checkpoint(folder / "checkpoints" / "odd.pt", None, {}, model_spec={"model": 1})
    other = spec_of(taxonomy=None, node={"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3})
    save_checkpoint(folder / "checkpoints" / "other.pt", other, {"model": {"weight": torch.ones(3)}})
    for path, checkpoint, message in [
        (tmp_path / "runs" / "brids", "best", r"there is no run .*brids; did you mean .*birds\?"),
        (empty, "best", "has no checkpoints; name the folder of a run"),
        (folder, "epoch7.pt", "has no checkpoint 'epoch7.pt'; it has bare.pt, best.pt, last.pt"),
        (folder / "checkpoints" / "best.pt", "last", "is a checkpoint itself"),
        (folder, "text.pt", "text.pt is damaged or no checkpoint: it is no whole zip archive"),
        (folder / "checkpoints" / "text.pt", "best", "what can be loaded is the folder of a run, one of its"),
        (folder, "state.pt", "no checkpoint of Linnaeus: it holds weights alone.*MODEL.WEIGHTS"),
        (folder, "whole.pt", "it holds more than tensors and plain values$"),
        (folder, "old.pt", "an older version of Linnaeus"),
        (folder, "bare.pt", "holds no weights"),
        (folder, "odd.pt", "its model_spec cannot be used"),
        (folder, "other.pt", "do not fit its model"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load_run(path, checkpoint=checkpoint, device="cpu")
    with pytest.raises(ConfigError, match="device: 'abacus' is not a torch device"):
        load_run(folder, device="abacus")


@pytest.mark.parametrize(
    "entry",
    ["", "no JSON", "[]", "{}", '{"spec": 1}', '{"spec": {}, "precision": {"AMP": "fp4"}}'],
)
def test_a_foreign_description_is_named(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(1)}, file, metadata={"linnaeus": entry})
    with pytest.raises(CheckpointError, match=r"model.safetensors: its (entry `linnaeus`|model_spec) .*"):
        load_run(file, device="cpu")


def test_what_a_run_says_about_itself(folder: Path) -> None:
    run = load_run(folder, device="cpu")
    assert run.description.endswith(
        "best.pt: test_resnet on 3 x 32 x 32 inputs, 2 classes of order, 5 classes of species, on cpu"
    )
    assert "crop_fraction=0.9" in repr(run.transform)


def test_classes_of_one_name_under_several_parents_survive(tmp_path: Path) -> None:
    """Epithets of iNaturalist, and a class whose parent no sample shows."""
    index = index_labels(
        ["genus", "species"], [("Corvus", "major"), ("Parus", "major"), ("Parus", "minor"), (None, "corone")]
    )
    spec = ModelSpec(**{**vars(spec_of()), "index": index})
    run = load_run(save_run(tmp_path / "run", spec), device="cpu")
    assert run.taxonomy == index.taxonomy
    assert sorted(run.classes["species"]) == ["Corvus/major", "Parus/major", "corone", "minor"]
    assert UNKNOWN in index.taxonomy.parents[0]
    assert run.spec.index is not None
    assert run.spec.index.encode(("Parus", "major")) == index.encode(("Parus", "major"))
