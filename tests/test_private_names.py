"""Private names of torch that Linnaeus holds as text: one that is gone raises nothing in `getattr`."""

import inspect

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor

NAMES = {
    torch.Tensor: "_backward_hooks _post_accumulate_grad_hooks",
    torch.optim.Optimizer: "_optimizer_load_state_dict_pre_hooks",
    torch.optim.lr_scheduler.LRScheduler: "_last_lr",
    torch.utils.data.dataloader._MultiProcessingDataLoaderIter: "_shutdown_workers _workers",
    DTensor: "_local_tensor",
    _fsdp_param_group: "_validate_no_meta_params",
    _fsdp_param: "_unsharded_param",
}


def test_private_names_of_torch_are_there():
    for owner, names in NAMES.items():
        for name in names.split():
            assert hasattr(owner, name) or name in inspect.getsource(owner), name
