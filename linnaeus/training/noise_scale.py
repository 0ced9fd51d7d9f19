"""The gradient noise scale: up to which batch size a larger batch saves optimizer steps.

For the gradient G of the whole data and the covariance Σ of the gradient of one sample,

    B_simple = tr(Σ) / |G|²                         (McCandlish et al. 2018, "An Empirical Model of
                                                     Large-Batch Training", eq. 2.9)

A gradient g_B over B samples has E|g_B|² = |G|² + tr(Σ)/B, so that the norms at two batch sizes give |G|² and
tr(Σ) without bias (their appendix A.1). These two are averaged over steps separately and then divided, since
the mean of their quotients would be far off. An optimizer step with several micro-batches or ranks has
gradients at two batch sizes: that of one micro-batch or rank, and that of the whole step before clipping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from linnaeus.batch_plan.plan import BatchPlan
from linnaeus.config.schema import NoiseScaleConfig
from linnaeus.runtime.errors import ConfigError
from linnaeus.training.callbacks import CallbackState
from linnaeus.training.step import TrainStep


@dataclass
class NoiseScale:
    """Running estimate of B_simple: exponential averages of |G|² and of tr(Σ).

    Attributes:
        decay: weight of the previous average at each measurement, in [0, 1).
        num: measurements so far.
        gradient_sq, trace: the averages, biased towards their initial 0; the bias cancels in the quotient.
    """

    decay: float
    num: int = 0
    gradient_sq: float = 0.0
    trace: float = 0.0

    def add(
        self, small_batch: float, small_norm_sq: float, large_batch: float, large_norm_sq: float
    ) -> None:
        """Add a measurement: unbiased estimates of both, but noisy ones; |G|² may even be negative.

        >>> scale = NoiseScale(decay=0.0)
        >>> scale.add(2, 1 + 12 / 2, 8, 1 + 12 / 8)
        >>> scale.gradient_sq, scale.trace
        (1.0, 12.0)

        Args:
            small_batch, large_batch: number of samples that each gradient is the mean of.
            small_norm_sq, large_norm_sq: squared norms of the gradients.
        """
        # McCandlish et al. 2018, eq. A.2 and A.3
        gradient_sq = large_batch * large_norm_sq - small_batch * small_norm_sq
        gradient_sq /= large_batch - small_batch
        trace = (small_norm_sq - large_norm_sq) / (1 / small_batch - 1 / large_batch)
        self.gradient_sq = self.decay * self.gradient_sq + (1 - self.decay) * gradient_sq
        self.trace = self.decay * self.trace + (1 - self.decay) * trace
        self.num += 1

    @property
    def value(self) -> float | None:
        """B_simple in samples; None while one of the averages is not positive."""
        if self.gradient_sq <= 0 or self.trace <= 0:
            return None
        return self.trace / self.gradient_sq

    def state_dict(self) -> dict[str, Any]:
        """The averages, for a checkpoint."""
        return {"num": self.num, "gradient_sq": self.gradient_sq, "trace": self.trace}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.num, self.gradient_sq, self.trace = state["num"], state["gradient_sq"], state["trace"]


class GradientProbe:
    """Callback that measures the two norms in every so many training steps.

    With one rank the smaller batch is the first micro-batch, measured before the second adds its gradient.
    With several ranks it is one rank's samples of the step, and the norm is averaged over the ranks: on such
    a step DistributedDataParallel does not synchronise, and the probe averages the gradients in place after
    it has measured them. On other steps it does nothing.

    Args:
        step: the training step; the norms are divided by the scale of its scaler.
        decay: decay of the running averages.
        every: optimizer steps between two measurements.
        num_ranks: ranks that the gradients are averaged over, by default those of the model's process group.
    """

    def __init__(
        self, step: TrainStep, *, decay: float, every: int = 1, num_ranks: int | None = None
    ) -> None:
        self.scale = NoiseScale(decay)
        self._step, self._every, self._wanted_ranks = step, every, num_ranks
        self._is_measuring = False
        self._small_norm_sq: Tensor | None = None
        self._small_batch = 0
        self._num_samples = 0

    @property
    def _group(self) -> torch_dist.ProcessGroup | None:
        model = self._step.model
        return model.process_group if isinstance(model, DistributedDataParallel) else None

    @property
    def _num_ranks(self) -> int:
        group = self._group
        return 1 if group is None else self._wanted_ranks or group.size()

    def on_step_start(self, state: CallbackState) -> None:
        """Decide whether to measure this step."""
        self._is_measuring = state.step % self._every == 0
        self._step.averages_gradients = not (self._is_measuring and self._num_ranks > 1)
        self._small_norm_sq, self._small_batch, self._num_samples = None, 0, 0

    def on_backward(self, state: CallbackState) -> None:
        """Measure, before anything changes the gradients."""
        if not self._is_measuring or state.micro_batch is None:
            return
        number, total, num_samples, divisor = state.micro_batch
        self._num_samples += num_samples
        if number == 1 and self._num_ranks == 1:
            self._small_norm_sq = divisor**2 * _norm_sq(self._step.model)
            self._small_batch = num_samples
        if number == total:
            self._measure()

    def _measure(self) -> None:
        small_batch, large_batch = self._small_batch, self._num_samples * self._num_ranks
        if self._num_ranks > 1:
            small_batch, self._small_norm_sq = self._num_samples, _norm_sq(self._step.model)
            self._average()
        if self._small_norm_sq is None or small_batch >= large_batch:
            return
        norms = torch.stack([self._small_norm_sq, _norm_sq(self._step.model)])
        if self._num_ranks > 1:
            torch_dist.all_reduce(norms, group=self._group)
            norms /= self._num_ranks
        if norms.is_meta:  # a trace of the step: there are no numbers
            return
        norms /= self._step.scaler.get_scale() ** 2
        small_norm_sq, large_norm_sq = norms.tolist()
        if math.isfinite(small_norm_sq) and math.isfinite(
            large_norm_sq
        ):  # the scaler skips such a step
            self.scale.add(small_batch, small_norm_sq, large_batch, large_norm_sq)

    def _average(self) -> None:
        """Average every gradient over the ranks, in place: there may be no memory for a copy."""
        parameters = [
            parameter for parameter in self._step.model.parameters() if parameter.requires_grad
        ]
        device = parameters[0].device
        is_used = torch.tensor(
            [parameter.grad is not None for parameter in parameters], device=device
        ).int()
        torch_dist.all_reduce(is_used, group=self._group)  # ranks may use different parameters
        for parameter, num_ranks in zip(parameters, is_used.tolist(), strict=True):
            if num_ranks:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad /= self._num_ranks
                torch_dist.all_reduce(parameter.grad, group=self._group)


def check_noise_scale(config: NoiseScaleConfig, num_gradients: int) -> None:
    """Raise `ConfigError` if an optimizer step has one gradient: of one micro-batch on one rank."""
    if config.ENABLED and num_gradients == 1:
        raise ConfigError(
            "TRAIN.NOISE_SCALE.ENABLED: True, but with one rank and one micro-batch per optimizer step "
            "there is only one batch size to measure gradients at, and two are needed: set "
            "TRAIN.ACCUMULATION_STEPS 2 or more, a TRAIN.EFFECTIVE_BATCH_SIZE above DATA.BATCH_SIZE, or run "
            "several ranks under torchrun"
        )


def build_probe(config: NoiseScaleConfig, step: TrainStep, plan: BatchPlan) -> GradientProbe | None:
    """Return the probe of a run; None where it is not enabled.

    Raises:
        ConfigError: no step of the plan has gradients at two batch sizes.
    """
    if not config.ENABLED:
        return None
    max_accumulation_steps = max(stage.accumulation_steps for stage in plan.stages)
    check_noise_scale(config, plan.world_size * max_accumulation_steps)
    return GradientProbe(step, decay=config.DECAY, every=config.EVERY)


def _norm_sq(model: nn.Module) -> Tensor:
    """Squared L2 norm of all gradients together."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients).float().square()
