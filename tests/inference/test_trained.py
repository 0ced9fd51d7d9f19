import torch

import linnaeus
from linnaeus.inference.trained import load_run
from tests.helpers.trained import BIRDS, save_run, spec_of


def first_weight(path, **arguments):
    parameter = next(load_run(path, device="cpu", **arguments).model.parameters())
    return float(parameter.detach().flatten()[0])


def test_best_last_and_files_are_found_where_they_are(tmp_path):
    folder = save_run(tmp_path / "runs/birds", spec_of()).rename(tmp_path / "moved")
    best, last = first_weight(folder), first_weight(folder, checkpoint="last")
    assert best != last
    assert first_weight(folder, checkpoint="best.pt") == best
    file = folder / "checkpoints" / "last.pt"
    for name in ("checkpoints/last.pt", str(file)):
        assert first_weight(folder, checkpoint=name) == last
    alone = file.rename(tmp_path / "model.pt")
    assert first_weight(alone) == last
    assert load_run(alone, device="cpu").folder is None


def test_what_a_run_offers(tmp_path):
    folder = save_run(tmp_path / "birds", spec_of())
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
