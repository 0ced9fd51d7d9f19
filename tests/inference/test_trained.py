import pytest
import torch

import linnaeus
from linnaeus.inference.trained import load_run
from tests.helpers.runs import assert_same_bits
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
    file = folder / "checkpoints" / "last.pt"
    for name in ("checkpoints/last.pt", str(file)):
        assert first_weight(folder, checkpoint=name) == last
    assert first_weight(file) == last


def test_what_a_run_offers(folder):
    before = torch.get_rng_state()
    run = linnaeus.load_run(folder, device="cpu")
    assert torch.equal(torch.get_rng_state(), before), "random generators are left alone"
    assert (run.folder, run.taxonomy) == (folder, BIRDS)
    assert run.classes == {level.name: level.classes for level in BIRDS.levels}
    assert run.transform(torch.zeros(3, 50, 60, dtype=torch.uint8)).shape == (3, 32, 32)
    assert not run.model.training
    for word in ("best.pt", "test_resnet", "order", "species", "cpu"):
        assert word in run.description
        assert word in repr(run)


def test_an_unknown_argument_of_predict_is_named(folder):
    run = load_run(folder, device="cpu")
    with pytest.raises(TypeError, match=r"^device: .*\btta\b"):
        run.predict(torch.zeros(3, 50, 60, dtype=torch.uint8), device="nonsense")


def test_a_moved_folder_and_a_checkpoint_alone(tmp_path):
    folder = save_run(tmp_path / "runs" / "a", spec_of())
    expected = first_weight(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    assert first_weight(moved) == expected
    alone = (moved / "checkpoints" / "best.pt").rename(tmp_path / "model.pt")
    assert first_weight(alone) == expected
    assert load_run(alone, device="cpu").folder is None


def test_the_average_of_the_weights_is_preferred(tmp_path):
    spec = spec_of()
    model, average = spec.build(), spec.build()
    randomise(average, 1)
    state = {"model": model.state_dict(), "ema": {"module": average.state_dict()}}
    save_checkpoint(tmp_path / "a.pt", spec, state)
    assert_same_bits(
        load_run(tmp_path / "a.pt", device="cpu").model.state_dict(), average.state_dict()
    )
