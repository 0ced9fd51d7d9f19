"""What the start of a run says of its settings: those beyond a plain training, and those without effect."""

from __future__ import annotations

from collections.abc import Iterator

from linnaeus.config.instantiate import is_target
from linnaeus.config.schema import Config, LossConfig
from linnaeus.data.mixing import is_mixing
from linnaeus.words import counted


def settings_sentence(config: Config) -> str | None:
    """One line that names what is switched on in loss, batches, rates and head; None for a plain training."""
    parts = [*_of_batches(config), *_of_loss(config), *_of_model(config)]
    return f"training: {', '.join(parts)}" if parts else None


def _of_batches(config: Config) -> Iterator[str]:
    augment = config.DATA.AUGMENT
    off = f" (off in the last {counted(augment.MIX_OFF_EPOCHS, 'epoch')})" if augment.MIX_OFF_EPOCHS else ""
    if is_mixing(augment):
        alphas = {"Mixup": augment.MIXUP, "CutMix": augment.CUTMIX}
        yield " or ".join(f"{name} {alpha:g}" for name, alpha in alphas.items() if alpha > 0) + off
    if config.DATA.SAMPLER != "shuffle":
        yield f"{config.DATA.SAMPLER} sampler"


def _of_loss(config: Config) -> Iterator[str]:
    loss = config.LOSS
    if is_target(loss):
        return
    if loss.NAME != LossConfig().NAME:
        yield f"{loss.NAME} loss" + (f" with gamma {loss.FOCAL_GAMMA:g}" if loss.NAME == "focal" else "")
    if loss.CLASS_WEIGHTS is not None:
        yield f"class weights {loss.CLASS_WEIGHTS}"


def _of_model(config: Config) -> Iterator[str]:
    if not is_target(config.MODEL) and config.MODEL.HEAD != "independent":
        yield f"{config.MODEL.HEAD} head"
    if is_target(config.OPTIMIZER):
        return
    if config.OPTIMIZER.LAYER_DECAY is not None:
        yield f"layer decay {config.OPTIMIZER.LAYER_DECAY:g}"
    if config.OPTIMIZER.HEAD_LR_SCALE != 1:
        yield f"heads at {config.OPTIMIZER.HEAD_LR_SCALE:g} times the learning rate"


def settings_without_effect(config: Config) -> list[str]:
    """A sentence for each key that is set and changes nothing, because of the value of another key."""
    return [*_idle_in_loss(config), *_idle_in_mixing(config), *_idle_in_freezing(config)]


def _idle_in_loss(config: Config) -> Iterator[str]:
    loss = config.LOSS
    if not is_target(loss) and loss.NAME != "focal" and loss.FOCAL_GAMMA != LossConfig().FOCAL_GAMMA:
        yield f"LOSS.FOCAL_GAMMA: {loss.FOCAL_GAMMA:g} has no effect with LOSS.NAME {loss.NAME}"


def _idle_in_mixing(config: Config) -> Iterator[str]:
    augment = config.DATA.AUGMENT
    if augment.MIX_OFF_EPOCHS and not is_mixing(augment):
        yield (
            f"DATA.AUGMENT.MIX_OFF_EPOCHS: {augment.MIX_OFF_EPOCHS} has no effect, since DATA.AUGMENT.MIXUP "
            "and CUTMIX are 0"
        )


def _idle_in_freezing(config: Config) -> Iterator[str]:
    epoch, num_epochs = config.TRAIN.UNFREEZE_EPOCH, config.TRAIN.EPOCHS
    if epoch is None or is_target(config.MODEL):
        return
    key = f"TRAIN.UNFREEZE_EPOCH: {epoch}"
    if config.MODEL.FREEZE in (None, "none", []):
        yield f"{key} has no effect, since nothing is frozen (MODEL.FREEZE none)"
    elif epoch == 1:
        yield f"{key} unfreezes before the first epoch, so that MODEL.FREEZE has no effect"
    elif epoch > num_epochs:
        yield f"{key} comes after the last epoch (TRAIN.EPOCHS {num_epochs}): nothing is unfrozen in this run"
