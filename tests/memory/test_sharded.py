"""Predictions of sharded models in a job: one in use is predicted like one on `meta`, and stays as it is."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from linnaeus import predict_memory
from linnaeus.autobatch.predict.prediction import replay
from linnaeus.autobatch.predict.swap import UntraceableError
from linnaeus.autobatch.state.sharded import fake_job


@pytest.fixture(autouse=True)
def job():
    with fake_job(4):
        yield


class Training:
    """Rank 0 of four, with parameters that do not divide by four."""

    def __init__(self, device, **options):
        mesh = init_device_mesh("cpu", (4,))
        with torch.device(device):
            blocks = (nn.Sequential(nn.Linear(513, 513), nn.ReLU()) for _ in range(4))
            self.model = nn.Sequential(*blocks, nn.Linear(513, 1001))
        for block in self.model[:4]:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(self.model, mesh=mesh, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, batch):
        self.model(batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def predicted(self):
        return predict_memory(
            self.step, lambda n: torch.randn(n, 513), state=(self.model, self.optimizer)
        )

    def sizes(self):
        found = self.predicted()
        return [found.reserved_bytes(n) for n in (1, 1000, 50_000)]


def test_a_model_in_use_is_predicted_like_a_new_one():
    expected = Training("meta").sizes()
    training = Training("cpu")
    assert training.sizes() == expected, "before its first step"
    training.step(torch.randn(3, 513))
    before = {name: part.to_local().clone() for name, part in training.model.state_dict().items()}
    assert training.sizes() == expected, "after a step"
    with torch.no_grad():  # which leaves the parameters of the root gathered
        training.model(torch.randn(3, 513))
    assert training.sizes() == expected, "after a validation"
    after = training.model.state_dict()
    assert all(torch.equal(after[name].to_local(), part) for name, part in before.items())
    training.step(torch.randn(3, 513))


def test_streams_keep_their_blocks_to_themselves():
    found = Training("meta").predicted()
    events = list(found._events(8))
    assert {event.stream for event in events} == {0, 1, 2}, "of all-gathers and reduce-scatters"
    on_one = replay([event._replace(stream=0) for event in events])
    assert on_one.peak_reserved_bytes < found.reserved_bytes(8)


def test_parameters_in_host_memory_are_not_predicted():
    training = Training("meta", offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(UntraceableError):
        training.sizes()
