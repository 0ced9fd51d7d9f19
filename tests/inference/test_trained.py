"""A run read back from its folder or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import linnaeus
from linnaeus.autobatch.rng import rng_state
from linnaeus.data.taxonomy import UNKNOWN, index_labels
from linnaeus.inference.trained import load_run
from linnaeus.models.model_spec import ModelSpec
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
    for text in (repr(run), run.description):
        assert [
            word for word in ("best.pt", "test_resnet", "order", "species", "cpu") if word not in text
        ] == []
        assert len(text) < 400
    assert "crop_fraction=0.9" in repr(run.transform)


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
