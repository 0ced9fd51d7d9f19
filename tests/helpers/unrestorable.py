"""Objects that a search cannot restore, and refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class Hiding(torch.optim.SGD):
    """Its rate depends on a number that is in a closure."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr=lr)
        number = 0

        def next_rate() -> float:
            nonlocal number
            number += 1
            return lr * number

        self.next_rate = next_rate

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = self.next_rate()
        super().step(closure)


class Helped(torch.optim.SGD):
    """Counts in an object of its own; the count matters once in a thousand steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.helper = SimpleNamespace(count=0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.helper.count += 1


class Forgetful:
    """Its `load_state_dict` leaves out what a step changes."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass
