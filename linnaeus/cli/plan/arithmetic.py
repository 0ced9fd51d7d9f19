"""Steps and samples that a batch size needs, and the smallest fast size. Pure arithmetic, without torch.

How many optimizer steps and samples it takes to reach some loss at batch size B follows from the gradient
noise scale B_noise, in samples: McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training
(2018), section 2. Between the least possible steps S_min (at B -> infinity) and the least possible samples
E_min (at B -> 0) they find (S / S_min - 1)(E / E_min - 1) = 1. With E = B S and B_noise = E_min / S_min that
is S = S_min (1 + B_noise / B) and E = S_min (B + B_noise). The figures here are multiples of S_min. It is the
same for all sizes, so that sizes can be compared although S_min is not known.
"""

from __future__ import annotations

from collections.abc import Mapping


def relative_steps(batch: float, noise_scale: float) -> float:
    """Optimizer steps to the same loss, as a multiple of S_min: 1 + B_noise / B (McCandlish et al. 2018).

    >>> relative_steps(1000, noise_scale=1000), relative_steps(250, noise_scale=1000)
    (2.0, 5.0)

    Args:
        batch: samples per optimizer step, over all processes.
        noise_scale: B_noise, in samples.
    """
    return 1 + noise_scale / batch


def relative_samples(batch: float, noise_scale: float) -> float:
    """Samples to the same loss, as a multiple of S_min: B times the steps, which is B + B_noise.

    >>> relative_samples(250, noise_scale=1000)
    1250.0
    """
    return batch * relative_steps(batch, noise_scale)


def smallest_fast(speeds: Mapping[int, float], tolerance: float) -> int:
    """The smallest size whose samples per second come within a tolerance of the best.

    >>> smallest_fast({32: 90.0, 64: 96.0, 128: 100.0, 256: 99.0}, tolerance=0.05)
    64

    Args:
        speeds: samples per second by size.
        tolerance: how far below the best a speed may be, relative to the best.
    """
    best = max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= (1 - tolerance) * best)
