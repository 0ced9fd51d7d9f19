"""What one watches in a run: gradient norm, speed, waiting for data, memory, a profile."""

import gzip
import json

import pytest

from linnaeus.training.watch import Speed, TimedBatches, loader_advice
from tests.helpers.runs import assert_same_bits, weights
from tests.helpers.small_runs import NAME, PLAIN, lines_of

WATCHED = ("data_s", "compute_s", "samples_per_s", "peak_memory_gib", "grad_norm")


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_the_norm_of_a_gradient_is_logged_and_changes_nothing(run, tmp_path, amp):
    """Without clipping it is measured for the lines alone."""
    options = {
        "often": ("TRAIN.CLIP_GRAD_NORM=null", "TRAIN.LOG_EVERY=1"),
        "seldom": ("TRAIN.CLIP_GRAD_NORM=null", "TRAIN.LOG_EVERY=100"),
        "clipped": ("TRAIN.CLIP_GRAD_NORM=1e9", "TRAIN.LOG_EVERY=1"),
    }
    lines = {}
    for name, more in options.items():
        run(*PLAIN, f"TRAIN.AMP={amp}", "TRAIN.EPOCHS=2", *more, f"{NAME}{name}").ok()
        lines[name] = lines_of(tmp_path / "runs" / name)
        assert_same_bits(weights(tmp_path / "runs" / name), weights(tmp_path / "runs/often"))
        assert all(line.keys() >= {*WATCHED} for line in lines[name])
    norms = {name: [line["grad_norm"] for line in each] for name, each in lines.items()}
    assert norms["often"] == pytest.approx(norms["clipped"], rel=1e-5)
    steps = [line["step"] - 1 for line in lines["seldom"]]
    assert norms["seldom"] == [norms["often"][step] for step in steps]
    assert min(norms["often"]) > 0


def test_waiting_counts_for_the_line_in_which_it_ends():
    times, speed, waits, lines = iter([0.0, 2.0, 5.0, 5.5]), Speed(), [], []
    batches = TimedBatches(iter("ab"), waits.append, clock=lambda: next(times))
    for seconds, num_samples in ((4.0, 32), (5.0, 48)):
        next(batches)
        line = speed.read(seconds, sum(waits), num_samples)
        lines.append((line["data_s"], line["compute_s"], line["samples_per_s"]))
    assert lines == [(2.0, 2.0, 8.0), (0.5, 0.5, 16.0)]


@pytest.mark.parametrize(
    ("data_s", "compute_s", "is_slow"),
    [(40.0, 60.0, True), (30.0, 70.0, False), (0.0, 0.0, False)],
)
def test_advice_on_the_loader_from_a_third_of_the_time(data_s, compute_s, is_slow):
    advice = loader_advice({"data_s": data_s, "compute_s": compute_s}, 3)
    assert (advice is not None) == is_slow
    assert not is_slow or "DATA.NUM_WORKERS (now 3)" in str(advice)


def test_a_profile_has_the_steps_asked_for(run, tmp_path):
    assert run(*PLAIN, "TRAIN.EPOCHS=2", "TRAIN.PROFILE=[4,2]").code == 2
    for steps, number in (("[2,4]", 3), ("[5,99]", 2)):  # the run ends before the last one
        run(*PLAIN, "TRAIN.EPOCHS=2", f"TRAIN.PROFILE={steps}", f"{NAME}{number}").ok()
        with gzip.open(tmp_path / f"runs/{number}/logs/profile.json.gz") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert sum(name.startswith("Optimizer.step#") for name in names) == number
