"""Private names of other packages that Linnaeus uses; one that is gone fails here by its name."""

import argparse
import ast
import functools
import importlib
import inspect
import sys

import optuna
import pytest
import torch
import torch.distributed as torch_dist
from hydra._internal.config_repository import ConfigRepository
from torch import library, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.helpers.forks import ROOT

SOURCES = [
    path
    for path in (ROOT / "linnaeus").rglob("*.py")
    if "integrations" not in path.parts  # their tests need other packages
]
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}

ATTRIBUTES = {
    torch.UntypedStorage: "_cdata",
    torch.Tensor: "_backward_hooks _indices _is_view _use_count _values",
    torch.ops.aten: "_log_softmax _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_flash_attention _softmax",
    torch.ops.aten.add.Tensor: "_schema",
    torch.amp.GradScaler: "_per_optimizer_states",
    nn.parallel.DistributedDataParallel: "_build_debug_param_to_name_mapping _comm_hooks "
    "_build_params_for_reducer _ddp_init_helper _delay_all_reduce_params _get_ddp_logging_data",
    torch_dist.Reducer: "_set_static_graph",
    torch_dist.Logger: "_set_static_graph",
    torch_dist.ProcessGroup: "_device_types _register_backend _set_default_backend "
    "_set_group_desc _set_group_name",
    library.Library: "_destroy",
    FSDPModule: "_get_fsdp_state",
    ConfigRepository: "_create_defaults_list _extract_defaults_list",
    argparse._ActionsContainer: "_actions",
    optuna.trial.FrozenTrial: "_trial_id",
}
"""Attributes of objects, by the class that has them."""

STRINGS = {
    torch.Tensor: "_backward_hooks _post_accumulate_grad_hooks",
    torch.optim.Optimizer: "_optimizer_load_state_dict_pre_hooks",
    torch.optim.lr_scheduler.LRScheduler: "_last_lr",
    torch.utils.data.dataloader._MultiProcessingDataLoaderIter: "_shutdown_workers _workers",
    DTensor: "_local_tensor",
    sys.modules[
        "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    ]: "_validate_no_meta_params",
    sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param"]: "_unsharded_param",
}
"""Names that the code holds as text, for `getattr` and `vars`."""

NAMED_TUPLE = {"_asdict", "_replace"}


def is_private(dotted):
    return any(part.startswith("_") and part[1:2] != "_" for part in dotted.split("."))


def own_names():
    """Names that Linnaeus itself gives to functions, classes and attributes."""
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    fields = {
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    stored = {
        getattr(node, "attr", None) or getattr(node, "id", "")
        for node in nodes
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store)
    }
    return defined | fields | stored


def imported(tree):
    """The full name of each name that a module imports from other packages."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("linnaeus"):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def full_names(path):
    """Private names that follow from an import, such as `torch._C._storage_Use_Count`."""
    names = imported(TREES[path])
    yield from filter(is_private, names.values())
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in names and is_private(rest) and rest.replace(".", "").isidentifier():
                yield f"{names[root]}.{rest}"


FULL_NAMES = sorted({name for path in SOURCES for name in full_names(path)})


@pytest.mark.parametrize("name", FULL_NAMES)
def test_a_private_name_of_another_package_is_there(name):
    assert has(name)


def test_a_name_that_is_gone_is_noticed():
    assert len(FULL_NAMES) > 20
    assert not has("torch._C._no_such_name")


def has(name):
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
            functools.reduce(getattr, parts[end:], module)
        except (ImportError, AttributeError):
            continue
        return True
    return False


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(owner, name, id=name)
        for owner, names in (*ATTRIBUTES.items(), *STRINGS.items())
        for name in names.split()
    ],
)
def test_a_private_attribute_of_a_foreign_object_is_there(owner, name):
    assert hasattr(owner, name) or name in inspect.getsource(owner)


def test_each_foreign_private_attribute_is_listed():
    own = own_names() | NAMED_TUPLE
    resolved = {name.rpartition(".")[2] for name in FULL_NAMES}
    used = {
        node.attr
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own
    }
    assert used - resolved <= {name for names in ATTRIBUTES.values() for name in names.split()}
