"""A run that dies and goes on, as TensorBoard and MLflow show it; the user's own callbacks."""

import sys

import numpy as np
import pytest

from linnaeus.training.callbacks import MOMENTS
from linnaeus.training.tracking import Tracker
from tests.helpers.runs import assert_same_bits, checkpoint_of, weights
from tests.helpers.small_runs import NAME, PLAIN, lines_of


class Recorder:
    """Counts the calls of each method, and dies after a step."""

    def __init__(self, dies_after=0):
        self.dies_after, self.counts = dies_after, [0, 0, 0]

    def on_step_end(self, state):
        self.counts[0] += state.loss is not None
        if state.step == self.dies_after:
            raise RuntimeError("died")

    def on_validation_end(self, state):
        self.counts[1] += "loss" in state.metrics and state.step % state.epoch == 0

    def on_epoch_end(self, state):
        self.counts[2] += not hasattr(state.model, "module")

    def state_dict(self):
        return {"counts": list(self.counts)}

    def load_state_dict(self, state):
        self.counts = state["counts"]


def callback(name="Recorder", arguments=""):
    return f"TRAIN.CALLBACKS=[{{_target_:{__name__}.{name}{arguments}}}]"


@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow")
def test_a_resumed_run_is_in_every_logger_once(run, tmp_path, monkeypatch):
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # MLflow's default takes seconds to set up
    plain = (*PLAIN, "DATA.BATCH_SIZE=25", "TRAIN.EPOCHS=2")
    run(*plain).ok()
    command = (*plain, NAME + "dies", "EXPERIMENT.LOGGERS=tensorboard,mlflow")
    with pytest.raises(RuntimeError, match="died") as caught:
        run(*command, callback(arguments=",dies_after:6"))
    assert caught.value.__notes__ == ["TRAIN.CALLBACKS[0]: Recorder.on_step_end"]
    run(*command, callback(), "TRAIN.AUTO_RESUME=True").ok()
    folder = tmp_path / "runs/dies"
    assert_same_bits(weights(folder), weights(tmp_path / "runs/plain"))
    assert checkpoint_of(folder)["callbacks"] == [state_of([8, 2, 2])]

    client = MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("linnaeus").experiment_id])
    assert (found.info.status, found.data.params["DATA.BATCH_SIZE"]) == ("FINISHED", "25")
    events = EventAccumulator(str(folder / "logs/tensorboard")).Reload()
    for split, steps in (("train", range(1, 9)), ("val", (4, 8))):
        lines = lines_of(folder, split)
        assert [line["step"] for line in lines] == [*steps]
        for name in lines[0].keys() - {"step", "epoch", "split", "time"}:
            points = [(line["step"], line[name]) for line in lines]
            shown = [(event.step, event.value) for event in events.Scalars(f"{split}/{name}")]
            assert shown == [(step, np.float32(value)) for step, value in points]
            history = client.get_metric_history(found.info.run_id, f"{split}/{name}")
            assert sorted({(entry.step, entry.value) for entry in history}) == points


def state_of(counts):
    """The entry of a checkpoint for a `Recorder`."""
    return {"TRAIN.CALLBACKS[0]": (f"{__name__}.Recorder", {"counts": counts})}


class Sequence:
    """Notes the moments of a run, and whether there are gradients in the first parameter."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name not in MOMENTS:
            raise AttributeError(name)

        def note(state):
            has_gradients = next(state.model.parameters()).grad is not None
            number = "" if state.micro_batch is None else f" {state.micro_batch.number} of 2"
            self.calls.append(f"{name[3:]}{number} {state.step}{' grad' * has_gradients}")

        return note

    def state_dict(self):
        return {"calls": list(self.calls)}


def test_a_callback_sees_moments_in_order_and_keeps_its_state(run, tmp_path):
    options = ("DATA.BATCH_SIZE=25", "TRAIN.ACCUMULATION_STEPS=2", "TRAIN.EPOCHS=1")
    run(*PLAIN, *options, callback("Sequence")).ok()
    [(_, state)] = checkpoint_of(tmp_path / "runs/plain")["callbacks"][0].values()
    calls = []
    for step in range(2):
        moments = ("step_start", "backward 1 of 2", "backward 2 of 2", "update")
        calls += [f"{moment} {step}{' grad' * ('back' in moment)}" for moment in moments]
        calls.append(f"step_end {step + 1}")
    assert state["calls"] == [*calls, "validation_end 2", "epoch_end 2"]
    again = (*options[:2], "TRAIN.EPOCHS=2", "TRAIN.AUTO_RESUME=True", callback())
    run(*PLAIN, *again).ok()
    saved = checkpoint_of(tmp_path / "runs/plain")["callbacks"]
    assert saved == [state_of([2, 1, 1])], "not that of another class"


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("EXPERIMENT.LOGGERS=mlflow", "linnaeus[mlflow]"),
        (callback("Tracker"), "CALLBACKS[0]"),
        (callback(arguments=",dies:1"), "'dies'"),
    ],
)
def test_a_missing_package_or_callback_is_named_before_the_run(
    run, tmp_path, monkeypatch, option, named
):
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as where it is not installed
    outcome = run(*PLAIN, option)
    assert outcome.code == 2
    assert named in outcome.err
    assert not (tmp_path / "runs").exists()


def test_a_logger_that_fails_is_left_out_and_the_others_go_on(
    caplog,
):
    tracker = Tracker(first=None, second=Tracker(third=None))
    for step in (1, 2):
        tracker.log({}, step=step)
    assert [record.args[0] for record in caplog.records] == ["first", "third"]


@pytest.mark.e2e
def test_callbacks_are_called_on_every_rank(torchrun, tmp_path):
    torchrun(2, *PLAIN, "DATA.BATCH_SIZE=16", callback()).ok()
    assert checkpoint_of(tmp_path / "runs/plain")["callbacks"] == [state_of([9, 3, 3])] * 2
