"""Which keys the batch sizes found depend on: each one, by name."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from linnaeus.autobatch.conditions import memory_settings, process_conditions, search_key, shared_key
from linnaeus.config.keys import KEYS, dotted
from linnaeus.config.load import load_config
from linnaeus.config.schema import Config
from linnaeus.dist import World
from tests.helpers.runs import SMALL
from tests.helpers.searches import OWN_DATA, OWN_MODEL, prepared

DROPPED = {
    "OPTIMIZER.LR": 0.5, "OPTIMIZER.LR_SCALING": "linear", "OPTIMIZER.WEIGHT_DECAY_SCALING": "sqrt",
    "OPTIMIZER.BASE_BATCH_SIZE": 7, "TRAIN.EPOCHS": 3, "TRAIN.LOG_EVERY": 3, "TRAIN.VALIDATE_EVERY": 3,
    "TRAIN.KEEP_CHECKPOINTS": 3, "TRAIN.CHECKPOINT_EVERY": 3, "TRAIN.CHECKPOINT_EVERY_STEPS": 3,
    "TRAIN.CHECKPOINT_EVERY_MINUTES": 3, "TRAIN.AUTO_RESUME": True, "TRAIN.RESUME_WITH": "lr",
    "TRAIN.DISTRIBUTE_BN": "none", "TRAIN.ON_OUT_OF_MEMORY": "split", "TRAIN.EMA.DECAY": 0.5,
    "TRAIN.NOISE_SCALE.EVERY": 3, "TRAIN.NOISE_SCALE.DECAY": 0.5, "DATA.AUTOBATCH.LOG_LEVEL": "ERROR",
    "DATA.AUTOBATCH.LOG_LEVEL_VAL": "ERROR", "DATA.AUTOBATCH.SHARED_FOLDER": "there",
    "DATA.BATCH_SIZE": 3, "DATA.BATCH_SIZE_VAL": 3, "DATA.SAMPLER": "balanced",
}  # fmt: skip
"""Keys that no search depends on, and another value of each."""
OF_NO_STEP = (
    "EXPERIMENT.NAME", "EXPERIMENT.OUTPUT_DIR", "EXPERIMENT.WANDB.ENABLED", "EXPERIMENT.WANDB.PROJECT",
    "EXPERIMENT.WANDB.ENTITY", "EXPERIMENT.WANDB.GROUP", "EXPERIMENT.WANDB.TAGS", "SCHEDULE.NAME",
    "SCHEDULE.WARMUP_EPOCHS", "SCHEDULE.WARMUP_FRACTION", "SCHEDULE.WARMUP_STEPS", "SCHEDULE.MIN_LR_FRACTION",
    "DIST.TIMEOUT_MINUTES", "DIST.START_MINUTES",
)  # fmt: skip
"""Keys of other nodes, of names, rates and times, that no step's memory depends on. A new key has to be named
here, or to count."""
IN_OTHER_FORM = ("EXPERIMENT.SEED", "EXPERIMENT.DEVICE", "DIST.BACKEND", "DIST.FIND_UNUSED_PARAMETERS")
"""Keys that do not count, but what they choose does: a test below shows it for each."""
ONLY_WHETHER = {
    "MODEL.DROP_RATE": (0.1, 0.2), "MODEL.DROP_PATH_RATE": (0.1, 0.2), "LOSS.LABEL_SMOOTHING": (0.1, 0.2),
    "OPTIMIZER.WEIGHT_DECAY": (0.1, 0.2), "TRAIN.CLIP_GRAD_NORM": (1.0, 2.0),
}  # fmt: skip
"""Keys of which it only counts whether they are 0 or null, and two values that are neither."""
ALL_KEYS = sorted(map(dotted, KEYS))
ON = ("DATA.AUTOBATCH.ENABLED=True",)
CPU = World(torch.device("cpu"))


def changed(config: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return dataclasses.replace(
        config, **{name: changed(getattr(config, name), rest, value) if rest else value}
    )


def settings(config: Config) -> dict[str, Any]:
    return memory_settings(config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, config.DATA)


def another(value: Any) -> Any:
    """Some other value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return value + type(value)("x") if isinstance(value, (str, list)) else {**value, "x": 1}


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(ON).config


def test_each_key_counts_unless_no_memory_depends_on_it(config: Config) -> None:
    named = [*DROPPED, *ONLY_WHETHER, *OF_NO_STEP, *IN_OTHER_FORM]
    assert set(named) <= set(ALL_KEYS)
    assert len(named) == len(set(named))
    base = settings(config)
    for key in ALL_KEYS:
        before = config
        for name in key.split("."):
            before = getattr(before, name)
        counts = settings(changed(config, key, another(before))) != base
        if key in ONLY_WHETHER:
            one, two = (settings(changed(config, key, value)) for value in ONLY_WHETHER[key])
            assert one == two, key
            counts = one != settings(changed(config, key, 0.0))
        assert counts == (key not in {*DROPPED, *OF_NO_STEP, *IN_OTHER_FORM}), key


def test_seed_schedule_and_names_do_not_count() -> None:
    def key(*argv: str) -> str:
        search, _ = prepared(*SMALL, *argv)
        config = load_config([*ON, *SMALL, "EXPERIMENT.DEVICE=cpu", *argv]).config
        nodes = (config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, config.DATA)
        return shared_key(search_key(*nodes, search.world), search)

    base = key()
    assert key("EXPERIMENT.SEED=5", "SCHEDULE.NAME=linear", "EXPERIMENT.NAME=x", "OPTIMIZER.LR=1") == base
    for other in ("DATA.IMG_SIZE=40", "DATA.DATASET.NUM_SAMPLES=90", "MODEL.NAME=test_vit"):
        assert key(other) != base


def test_a_seed_that_chooses_samples_of_another_shape_counts() -> None:
    """The trials of a run use the largest of the samples that its seed chooses."""

    def key(seed: int) -> str:
        search, _ = prepared(
            OWN_MODEL, OWN_DATA, "DATA.AUTOBATCH.NUM_SPEC_SAMPLES=1", f"EXPERIMENT.SEED={seed}"
        )
        return shared_key("", search)

    keys = {key(seed) for seed in range(4)}
    assert len(keys) > 1


def test_validation_beside_training_without_a_search_depends_on_its_size() -> None:
    def of_size(size: int, *argv: str) -> dict[str, Any]:
        return settings(load_config([f"DATA.BATCH_SIZE={size}", "DATA.BATCH_SIZE_VAL=9", *argv]).config)

    assert of_size(8, *ON) == of_size(16, *ON)
    assert of_size(8, "DATA.AUTOBATCH.ENABLED_VAL=True") != of_size(16, "DATA.AUTOBATCH.ENABLED_VAL=True")


def test_rates_of_an_optimizer_of_torch_do_not_count_and_those_of_ones_own_do() -> None:
    def of_rate(rate: float, target: str, name: str = "lr") -> dict[str, Any]:
        return settings(load_config([f"OPTIMIZER._target_={target}", f"OPTIMIZER.{name}={rate}"]).config)

    assert of_rate(0.1, "torch.optim.SGD") == of_rate(0.2, "torch.optim.SGD")
    assert of_rate(0.1, "my.SGD") != of_rate(0.2, "my.SGD")
    decay = [of_rate(value, "torch.optim.SGD", "weight_decay") for value in (0.1, 0.2, 0.0)]
    assert (decay[0] == decay[1], decay[0] == decay[2]) == (True, False)


def peaks(*argv: str) -> list[int]:
    """Peaks of the training step at two sizes, as a trace of it predicts them."""
    base = ("MODEL.DROP_RATE=0.1", "OPTIMIZER.NAME=sgd", "TRAIN.EMA.ENABLED=True", "LOSS.LABEL_SMOOTHING=0.1")
    search, _ = prepared(*SMALL, *base, *argv)
    prediction = search.predict("train")
    return [prediction.peak_bytes(size) for size in (8, 64)]


def test_the_step_needs_the_same_memory_whatever_the_keys_left_out_are() -> None:
    left_out = [f"{key}={value}" for key, value in DROPPED.items() if not key.startswith("DATA.BATCH_SIZE")]
    other_numbers = [f"{key}={two}" for key, (_, two) in ONLY_WHETHER.items()]
    base = peaks("MODEL.DROP_PATH_RATE=0.1")
    assert peaks(*left_out, *other_numbers) == base
    without = peaks("OPTIMIZER.WEIGHT_DECAY=0", "TRAIN.CLIP_GRAD_NORM=null", "MODEL.DROP_RATE=0")
    assert without != base, "whether they are there matters"


def test_the_device_counts(config: Config) -> None:
    nodes = (config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, config.DATA)
    assert search_key(*nodes, CPU) == search_key(*nodes, CPU)
    assert search_key(*nodes, CPU) != search_key(*nodes, World(torch.device("meta")))
    assert search_key(*nodes, CPU) != search_key(*nodes, dataclasses.replace(CPU, world_size=2))


def test_the_backend_and_unused_parameters_count(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (config.MODEL, config.LOSS, config.OPTIMIZER, config.TRAIN, config.DATA)
    assert search_key(*nodes, CPU) != search_key(*nodes, CPU, find_unused_parameters=True)
    alone = process_conditions(CPU)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    backends = []
    for name in ("gloo", "nccl"):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda name=name: name)
        backends.append(process_conditions(CPU)["backend"])
    assert [alone["backend"], *backends] == [None, "gloo", "nccl"]


COUNT = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TIMM_FUSED_ATTN", "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "CUDA_MODULE_LOADING", "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHDYNAMO_DISABLE", "TORCH_CUDNN_V8_API_DISABLED", "NCCL_BUFFSIZE", "MALLOC_ARENA_MAX", "LD_PRELOAD",
    "LINNAEUS_MEMORY_LIMIT_GB",
)  # fmt: skip
"""Variables that change what is allocated."""
OF_A_LAUNCHER = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "TORCH_LOGS", "CUDA_MPS_PIPE_DIRECTORY", "NCCL_DEBUG_FILE",
    "WANDB_RUN_ID", "SLURM_JOB_ID", "RANK", "MASTER_PORT", "HOSTNAME", "PWD",
)  # fmt: skip
"""Variables that differ between runs."""


def test_of_variables_those_count_that_change_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COUNT, *OF_A_LAUNCHER):
        conditions = []
        for value in ("1", "2"):
            monkeypatch.setenv(name, value)
            conditions.append(process_conditions(CPU))
        monkeypatch.delenv(name)
        conditions.append(process_conditions(CPU))
        assert (conditions[0] == conditions[1] == conditions[2]) == (name in OF_A_LAUNCHER), name
        assert (conditions[0] != conditions[1] != conditions[2]) == (name in COUNT), name


def test_switches_of_torch_and_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("highest")  # the default, which torch then calls by another name
    base = process_conditions(CPU)
    number = torch.get_num_threads()
    for switch, value, usual in (
        (torch.set_float32_matmul_precision, "high", "highest"),
        (torch.set_num_threads, number + 1, number),
        (torch.use_deterministic_algorithms, True, False),
        (torch.backends.cuda.enable_flash_sdp, False, True),
    ):
        switch(value)
        other = process_conditions(CPU)
        switch(usual)
        assert other != base
    assert process_conditions(CPU) == base
    monkeypatch.setattr("linnaeus.autobatch.conditions.version", lambda name: "0.1")
    assert process_conditions(CPU) != base


def test_what_the_model_is_made_of_counts_where_its_name_and_parameters_stay() -> None:
    search, assembly = prepared(*SMALL)
    base = shared_key("", search)
    assert shared_key("", search) == base
    name = next(name for name, each in assembly.model.named_modules() if isinstance(each, torch.nn.ReLU))
    parent = assembly.model.get_submodule(name.rpartition(".")[0])
    relu = parent.get_submodule(name.rpartition(".")[2])
    setattr(parent, name.rpartition(".")[2], torch.nn.GELU())
    assert shared_key("", search) != base
    setattr(parent, name.rpartition(".")[2], relu)
    assert shared_key("", search) == base
    next(assembly.model.parameters()).requires_grad_(requires_grad=False)
    assert shared_key("", search) != base


def test_an_edited_file_of_ones_own_that_is_loaded_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's activations may be kept or not, whatever its parameters and classes are."""
    library = tmp_path / "site-packages"
    library.mkdir()
    for folder in (tmp_path, library):
        monkeypatch.syspath_prepend(folder)
    texts = {
        "own_of_test": "import lib_of_test, ops_of_test\n"
        "from tests.helpers.searches import Model\nclass Own(Model): pass\n",
        "ops_of_test": "def op(): pass\n",
        "unused_of_test": "",
        "site-packages/lib_of_test": "",
    }
    files = {name: tmp_path / f"{name}.py" for name in texts}
    for name, file in files.items():
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
        file.write_text(texts[name])
    search, _ = prepared("MODEL._target_=own_of_test.Own", OWN_DATA)
    base = shared_key("", search)
    for name, file in files.items():
        file.write_text(texts[name] + "# edited\n")
        assert (shared_key("", search) != base) == (name in ("own_of_test", "ops_of_test")), name
        file.write_text(texts[name])
    assert shared_key("", search) == base
