"""The batch plan in a few aligned lines, for the start of a run."""

from __future__ import annotations

from linnaeus.batch_plan.plan import BatchPlan, OptimizerNode
from linnaeus.batch_plan.stages import Stage
from linnaeus.config.schema import OptimizerConfig, TrainConfig
from linnaeus.runtime.words import counted


def summary_lines(plan: BatchPlan, train: TrainConfig, optimizer: OptimizerNode) -> list[str]:
    """Return one line for each number of the plan, without notes, warnings and disabled features."""
    rows = {
        "batch": f"{plan.micro_batch_size} micro-batch x {plan.accumulation_steps} accumulation x "
        f"{counted(plan.world_size, 'rank')} = {counted(plan.effective_batch_size, 'sample')} per "
        "optimizer step"
    }
    if plan.changes:
        num_sizes = len({stage.effective_batch_size for stage in plan.stages})
        rows["schedule"] = (
            f"{train.BATCH_SCHEDULE.NAME}, {_split(plan.stages[0])} to {_split(plan.stages[-1])}, "
            f"{num_sizes} sizes; the line above is the largest"
        )
    rows["steps"] = (
        f"{_span(plan.steps_per_epoch)} per epoch, {plan.total_steps} in all (TRAIN.EPOCHS "
        f"{plan.num_epochs}); {_span(plan.samples_per_epoch)} of {plan.num_samples} samples per epoch"
    )
    if plan.max_steps is not None:
        epochs = sum(plan.samples_per_epoch) / plan.num_samples
        rows["steps"] = f"{plan.total_steps} in all (TRAIN.MAX_STEPS), {epochs:.4g} epochs"
    rows["learning rate"] = f"{plan.learning_rate:.6g} at the peak (the optimizer's own)"
    if isinstance(optimizer, OptimizerConfig):
        ratio = f"{plan.effective_batch_size}/{optimizer.BASE_BATCH_SIZE}"
        factors = {"linear": ratio, "sqrt": f"sqrt({ratio})"}
        rule, key = optimizer.LR_SCALING, "OPTIMIZER.LR"
        scaled = "" if rule == "none" else f" = {key} {optimizer.LR:.6g} x {factors[rule]}"
        rows["learning rate"] = (
            f"{plan.learning_rate:.6g} at the peak{scaled} ({rule if scaled else key})"
        )
        if optimizer.WEIGHT_DECAY_SCALING != "none":
            before = f"OPTIMIZER.WEIGHT_DECAY {optimizer.WEIGHT_DECAY:.6g}"
            rows["weight decay"] = f"{plan.weight_decay:.6g} = {before} x sqrt({ratio})"
    if plan.warmup_steps:
        rows["warm-up"] = counted(plan.warmup_steps, "step")
    width = max(map(len, rows))
    return [f"{label:<{width}}  {text}" for label, text in rows.items()]


def _split(stage: Stage) -> str:
    return f"{stage.effective_batch_size} ({stage.micro_batch_size} x {stage.accumulation_steps})"


def _span(values: tuple[int, ...]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
