import pytest
import torch

import linnaeus
from linnaeus.inference.trained import load_run
from tests.helpers.trained import BIRDS, randomise, save_checkpoint, save_run, spec_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("runs") / "birds", spec_of())


def first_weight(path, **arguments):
    parameter = next(load_run(path, device="cpu", **arguments).model.parameters())
    return float(parameter.detach().flatten()[0])


def test_best_last_and_files_are_found(folder):
    best, last = first_weight(folder), first_weight(folder, checkpoint="last")
    assert best != last
    assert first_weight(folder, checkpoint="best.pt") == best
    assert first_weight(folder, checkpoint="checkpoints/last.pt") == last
    assert first_weight(folder / "checkpoints" / "last.pt") == last
    assert first_weight(folder, checkpoint=str(folder / "checkpoints" / "last.pt")) == last


def test_what_a_run_offers(folder):
    before = torch.get_rng_state()
    run = linnaeus.load_run(folder, device="cpu")
    assert torch.equal(torch.get_rng_state(), before), "random generators are left alone"
    assert (run.folder, run.taxonomy) == (folder, BIRDS)
    assert run.classes == {level.name: level.classes for level in BIRDS.levels}
    assert run.transform(torch.zeros(3, 50, 60, dtype=torch.uint8)).shape == (3, 32, 32)
    assert not run.model.training
    words = ("best.pt", "test_resnet", "order", "species", "cpu")
    assert [word for word in words if word not in run.description or word not in repr(run)] == []
    assert "crop_fraction=0.9" in repr(run.transform)


def test_an_unknown_argument_of_predict_is_named(folder):
    run = load_run(folder, device="cpu")
    with pytest.raises(TypeError, match=r"^device: .*\btta\b"):
        run.predict(torch.zeros(3, 50, 60, dtype=torch.uint8), device="nonsense")


def test_a_moved_folder_and_a_checkpoint_alone(tmp_path):
    folder = save_run(tmp_path / "runs" / "a", spec_of())
    expected = first_weight(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    assert first_weight(moved) == expected
    alone = tmp_path / "model.pt"
    (moved / "checkpoints" / "best.pt").rename(alone)
    assert first_weight(alone) == expected
    assert load_run(alone, device="cpu").folder is None


def test_the_average_of_the_weights_is_preferred(tmp_path):
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
