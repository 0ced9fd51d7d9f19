"""Runs of the program, and what they leave behind."""

import gc
import socket
import time
from contextlib import ExitStack

from tests.helpers import children

SMALL = (
    "MODEL.NAME=test_resnet",
    "DATA.DATASET.NAME=synthetic",
    "DATA.DATASET.NUM_SAMPLES=96",
    "DATA.DATASET.NUM_SAMPLES_VAL=31",
    "DATA.DATASET.NUM_CLASSES=[2,6]",
    "DATA.IMG_SIZE=32",
    "DATA.BATCH_SIZE=16",
    "DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1",
    "TRAIN.EPOCHS=2",
    "EXPERIMENT.DEVICE=cpu",
    "EXPERIMENT.NAME=small",
)
"""A run of seconds. Later tokens override these."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def freeze_what_is_there():
    gc.collect()
    gc.freeze()


def wait_until(
    condition,
    process=None,
    log=None,
    limit_s=None,
):
    """Wait for a condition; fail with the log's text when it does not come, or the process has ended.

    It waits for `limit_s`, by default that of `children`.

    It looks again and again: a file, a record or a status cannot wake anybody.
    """
    deadline = time.monotonic() + (children.limit_s if limit_s is None else limit_s)
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended and condition():
            return
        said = log.read_text() if log is not None else "nothing has come"
        assert not ended, said
        assert time.monotonic() < deadline, said
        time.sleep(0.005)


def free_ports(count):
    """Ports of this machine that nobody listens on."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def checkpoint_of(folder, name="last.pt"):
    """The content of a run's checkpoint."""
    import torch

    return torch.load(folder / "checkpoints" / name, weights_only=True)


def weights(folder, name="last.pt"):
    """The model's tensors in a run's checkpoint."""
    return dict(checkpoint_of(folder, name)["state"]["model"])


def assert_same_bits(a, b):
    """Both hold the same tensors, bit for bit."""
    import torch

    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
