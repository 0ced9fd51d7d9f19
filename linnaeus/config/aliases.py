"""Names that users of timm, Hugging Face, Lightning and Ultralytics type, and what they mean here."""

from __future__ import annotations

import re

_SETTINGS = {
    "DATA.DATASET.ROOT=/data/birds": "data data_dir data_path train_data_dir dataset_name image_folder",
    "DATA.DATASET.NAME=imagefolder": "dataset dataset_type",
    "DATA.DATASET.TRAIN=train": "train_split train_dir train_file",
    "DATA.DATASET.VAL=val": "val_split val_dir validation_dir validation_file eval_file",
    "DATA.DATASET.VAL_FRACTION=0.2": "train_val_split split_ratio validation_split val_size",
    "DATA.BATCH_SIZE=64": "b bs batch batch_size train_batch_size per_device_train_batch_size",
    "DATA.BATCH_SIZE_VAL=128": (
        "vb validation_batch_size val_batch_size eval_batch_size per_device_eval_batch_size"
    ),
    "DATA.AUTOBATCH.ENABLED=True": "auto_batch autobatch auto_find_batch_size auto_scale_batch_size",
    "DATA.IMG_SIZE=224": "img_size imgsz image_size img input_size resolution crop_size",
    "DATA.NUM_WORKERS=4": "j workers num_workers n_workers dataloader_num_workers",
    "DATA.PIN_MEMORY=True": "pin_mem dataloader_pin_memory",
    "DATA.PREFETCH_FACTOR=2": "prefetch dataloader_prefetch_factor",
    "DATA.SAMPLER=balanced": "balanced_sampler weighted_sampler weighted_random_sampler",
    "DATA.AUGMENT.POLICY=randaugment": "aa auto_augment autoaugment randaugment rand_augment trivialaugment",
    "DATA.AUGMENT.MIXUP=0.2": "mixup mixup_alpha",
    "DATA.AUGMENT.CUTMIX=1.0": "cutmix cutmix_alpha",
    "DATA.AUGMENT.MIX_OFF_EPOCHS=10": "mixup_off_epoch close_mosaic",
    "DATA.AUGMENT.ERASING=0.25": "reprob random_erasing random_erase",
    "DATA.AUGMENT.HFLIP=0.5": "horizontal_flip fliplr flip",
    "DATA.AUGMENT.COLOR_JITTER=0.4": "jitter",
    "DATA.AUGMENT.ROTATION=15": "degrees rotate",
    "DATA.AUGMENT.CROP_SCALE=[0.08,1.0]": "random_resized_crop",
    "DATA.AUGMENT.CROP_FRACTION=0.875": "crop_pct",
    "MODEL.NAME=resnet50": "model model_name model_name_or_path arch a architecture backbone",
    "MODEL.PRETRAINED=True": "pretrained use_pretrained",
    "MODEL.WEIGHTS=runs/first": "initial_checkpoint finetune weights checkpoint_path pretrained_path",
    "MODEL.FREEZE=backbone": "freeze freeze_backbone freeze_layers",
    "MODEL.DROP_RATE=0.1": "drop dropout",
    "MODEL.DROP_PATH_RATE=0.1": "drop_path drop_connect drop_block stochastic_depth",
    "DATA.DATASET.CHANNELS=1": "in_chans",
    "LOSS.LABEL_SMOOTHING=0.1": "smoothing label_smoothing label_smoothing_factor",
    "LOSS.NAME=bce": "bce_loss criterion loss_fn",
    "LOSS.CLASS_WEIGHTS=balanced": "class_weight class_weights",
    "OPTIMIZER.NAME=sgd": "opt optim optimizer optimizer_name",
    "OPTIMIZER.LR=0.001": "lr lr0 learning_rate base_lr max_lr",
    "OPTIMIZER.WEIGHT_DECAY=0.05": "wd weight_decay",
    "OPTIMIZER.LAYER_DECAY=0.75": "layer_decay llrd",
    "OPTIMIZER.KWARGS.momentum=0.9": "momentum",
    "OPTIMIZER.KWARGS.betas=[0.9,0.95]": "betas opt_betas adam_beta1 adam_beta2",
    "OPTIMIZER.KWARGS.eps=1e-6": "eps opt_eps adam_epsilon",
    "SCHEDULE.NAME=cosine": "sched lr_scheduler lr_scheduler_type scheduler cos_lr",
    "SCHEDULE.WARMUP_EPOCHS=5": "warmup warmup_epochs",
    "SCHEDULE.WARMUP_STEPS=500": "warmup_steps num_warmup_steps",
    "SCHEDULE.WARMUP_FRACTION=0.05": "warmup_ratio",
    "SCHEDULE.MIN_LR_FRACTION=0.01": "min_lr lrf eta_min",
    "TRAIN.EPOCHS=30": "epochs num_epochs num_train_epochs max_epochs",
    "TRAIN.EFFECTIVE_BATCH_SIZE=256": "nbs total_batch_size global_batch_size",
    "TRAIN.ACCUMULATION_STEPS=4": (
        "grad_accum_steps accumulate accumulate_grad_batches gradient_accumulation_steps"
    ),
    "TRAIN.AMP=bf16": "amp amp_dtype bf16 precision mixed_precision",
    "TRAIN.AMP=fp16": "fp16 half",
    "TRAIN.CLIP_GRAD_NORM=1.0": "clip_grad gradient_clip_val max_grad_norm",
    "TRAIN.EMA.ENABLED=True": "model_ema ema",
    "TRAIN.EMA.DECAY=0.9998": "model_ema_decay",
    "TRAIN.GRADIENT_CHECKPOINTING=True": "grad_checkpointing gradient_checkpointing",
    "TRAIN.CHANNELS_LAST=True": "channels_last",
    "TRAIN.COMPILE=True": "torchcompile torch_compile compile",
    "TRAIN.SYNC_BATCHNORM=True": "sync_bn sync_batchnorm",
    "TRAIN.DISTRIBUTE_BN=reduce": "dist_bn",
    "TRAIN.DETERMINISTIC=True": "deterministic",
    "TRAIN.LOG_EVERY=20": "log_interval log_every_n_steps logging_steps",
    "TRAIN.VALIDATE_EVERY=1": "val_interval check_val_every_n_epoch eval_steps eval_strategy",
    "TRAIN.CHECKPOINT_EVERY=1": "save_every save_period save_strategy",
    "TRAIN.CHECKPOINT_EVERY_STEPS=1000": "save_steps recovery_interval",
    "TRAIN.KEEP_CHECKPOINTS=3": "checkpoint_hist save_total_limit save_top_k",
    "TRAIN.AUTO_RESUME=True": "resume resume_from_checkpoint ckpt_path auto_resume",
    "EXPERIMENT.NAME=birds": "experiment run_name exp_name",
    "EXPERIMENT.OUTPUT_DIR=runs": "o output output_dir default_root_dir log_dir",
    "EXPERIMENT.SEED=0": "seed random_seed seed_everything",
    "EXPERIMENT.DEVICE=cuda": "device accelerator no_cuda use_cpu cpu cuda",
    "EXPERIMENT.WANDB.ENABLED=True": "log_wandb wandb use_wandb report_to",
    "DIST.BACKEND=nccl": "dist_backend ddp_backend",
    "DIST.FIND_UNUSED_PARAMETERS=True": "ddp_find_unused_parameters",
}  # fmt: skip
_SENTENCES = {
    "there is no TensorBoard or CSV logger; EXPERIMENT.WANDB.ENABLED=True records with Weights & Biases, and "
    "metrics.jsonl in the run's folder has every figure": "tensorboard tb csv csv_logger logger",
    "there is no early stopping; checkpoints/best.pt is the epoch with the best validation": (
        "early_stopping early_stop patience early_stopping_patience patience_epochs"
    ),
    "there are no step or plateau schedules; SCHEDULE.NAME is cosine, linear or constant": (
        "step_size decay_epochs decay_rate decay_milestones gamma plateau steplr multistep cooldown_epochs"
    ),
    "there is no multi-label training: a sample has one label in each rank": "multi_label multilabel",
    "there is no search for the learning rate; `linnaeus sweep` compares several": (
        "lr_find auto_lr_find lr_finder"
    ),
    "the number of classes comes from the labels (DATA.DATASET.NUM_CLASSES is that of `synthetic`)": (
        "num_classes n_classes nc num_labels classes"
    ),
    "training length is set in epochs: TRAIN.EPOCHS=30": "max_steps num_training_steps iterations max_iter",
    "torchrun starts several processes: torchrun --nproc_per_node=4 -m linnaeus.main ...": (
        "devices gpus num_gpus num_devices nproc_per_node strategy num_processes num_nodes local_rank"
    ),
    "a configuration file is read with --cfg my_exp.yaml": "config cfg_file config_file yaml",
    "a trained run is evaluated with `linnaeus evaluate runs/NAME`": "evaluate eval validate do_eval",
    "`linnaeus sweep` runs a grid of values: linnaeus sweep DATA.BATCH_SIZE=32,64": "multirun",
    "--print-config prints every value, with --origin where each comes from": "info resolve package c p i",
    "--config-dir DIR adds a folder of groups and files of your own": "config_path cp",
    "there are no callbacks; a `_target_` node replaces MODEL, DATA.DATASET, LOSS or OPTIMIZER": "callbacks",
}  # fmt: skip

_OF_HYDRA = (
    "settings of Hydra itself have no counterpart here; a run's folder is "
    "EXPERIMENT.OUTPUT_DIR/EXPERIMENT.NAME"
)
ALIASES: dict[str, str] = {
    name: meaning
    for table in (_SETTINGS, _SENTENCES)
    for meaning, names in table.items()
    for name in names.split()
}
"""`KEY=VALUE`, or a sentence, by the name that users type: lower case, underscores, no dashes before it."""


def alias(word: str, value: str | None = None) -> str | None:
    """What a word of another framework means here, as the end of an error message.

    Args:
        word: an option (`--batch-size`, `-b`), a word (`lr=0.1`) or a key that does not exist (`TRAIN.LR`),
            with or without a value. Of a key only the last component counts, unless all of it is known.
        value: the typed value; a number takes the place of the example's.

    Returns:
        The setting to write, or what there is in its place; None for an unknown word.
    """
    name = word.partition("=")[0].lstrip("-+~").lower().replace("-", "_")
    if name.startswith(("hydra.", "hydra/")):
        return _OF_HYDRA
    meaning = ALIASES.get(name) or ALIASES.get(name.rpartition(".")[2])
    if meaning not in _SETTINGS:
        return meaning
    typed = value or word.partition("=")[2]
    key, _, example = meaning.partition("=")
    is_number = re.fullmatch(r"[\d.]+(e-?\d+)?", typed) and re.match(r"\d", example)
    return f"write {key}={typed if is_number else example}"
