"""The batch plan in a few aligned lines, for the start of a run."""

from __future__ import annotations

from linnaeus.batching.plan import BatchPlan, OptimizerNode
from linnaeus.batching.stages import Stage
from linnaeus.config.schema import OptimizerConfig, TrainConfig
from linnaeus.words import counted


def summary_lines(plan: BatchPlan, train: TrainConfig, optimizer: OptimizerNode) -> list[str]:
    """One line for each figure of the plan, without notes and warnings, and without what is switched off."""
    rows = [
        ("batch", _batch(plan)),
        *([("schedule", _schedule(plan, train))] if plan.changes else []),
        ("steps", _steps(plan)),
        ("rate", _learning_rate(plan, optimizer)),
    ]
    if isinstance(optimizer, OptimizerConfig) and optimizer.WEIGHT_DECAY_SCALING != "none":
        ratio = f"{plan.effective_batch_size}/{optimizer.BASE_BATCH_SIZE}"
        before = f"OPTIMIZER.WEIGHT_DECAY {optimizer.WEIGHT_DECAY:.6g}"
        rows.append(("weight decay", f"{plan.weight_decay:.6g} = {before} x sqrt({ratio})"))
    if plan.warmup_steps:
        rows.append(("warm-up", counted(plan.warmup_steps, "step")))
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {text}" for label, text in rows]


def _batch(plan: BatchPlan) -> str:
    return (
        f"{plan.micro_batch_size} micro-batch x {plan.accumulation_steps} accumulation x "
        f"{counted(plan.world_size, 'process')} = {counted(plan.effective_batch_size, 'sample')} per "
        "optimizer step"
    )


def _schedule(plan: BatchPlan, train: TrainConfig) -> str:
    first, last = plan.stages[0], plan.stages[-1]
    num_sizes = len({stage.effective_batch_size for stage in plan.stages})
    return (
        f"{train.BATCH_SCHEDULE.NAME}, {_split(first)} to {_split(last)}, {num_sizes} sizes; "
        "the line above is the largest"
    )


def _split(stage: Stage) -> str:
    return f"{stage.effective_batch_size} ({stage.micro_batch_size} x {stage.accumulation_steps})"


def _steps(plan: BatchPlan) -> str:
    steps, samples = plan.steps_per_epoch, plan.samples_per_epoch
    per_epoch = _span(min(steps), max(steps))
    return (
        f"{per_epoch} per epoch, {plan.total_steps} in all (TRAIN.EPOCHS {plan.num_epochs}); "
        f"{_span(min(samples), max(samples))} of {plan.num_samples} samples per epoch"
    )


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _learning_rate(plan: BatchPlan, optimizer: OptimizerNode) -> str:
    peak = f"{plan.learning_rate:.6g}"
    if not isinstance(optimizer, OptimizerConfig):
        return f"{peak} at the peak (the optimizer's own)"
    if optimizer.LR_SCALING == "none":
        return f"{peak} at the peak (OPTIMIZER.LR)"
    ratio = f"{plan.effective_batch_size}/{optimizer.BASE_BATCH_SIZE}"
    factor = ratio if optimizer.LR_SCALING == "linear" else f"sqrt({ratio})"
    return f"{peak} at the peak = OPTIMIZER.LR {optimizer.LR:.6g} x {factor} ({optimizer.LR_SCALING})"
