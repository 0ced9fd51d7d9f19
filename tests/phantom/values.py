"""Real values for small tensors on a phantom GPU: the CPU's kernels repeat what the device's would have done.

    python -m tests.phantom python -m tests.phantom.values MODULE ARGUMENTS    # as python -m MODULE ARGUMENTS

A phantom's kernels do nothing, but its memory is the host's. Each CUDA kernel of ATen is wrapped: it runs as
ever, so that the caching allocator sees what it always sees, then the CPU's kernel runs on tensors that lie
at the same addresses. No dispatch mode is on, so autograd accumulates gradients as it does without values.
Results above `LIMIT_BYTES`, results of larger tensors and of kernels that the CPU lacks are zeros.
"""

import contextlib
import ctypes
import functools
import os
import runpy
import sys
import warnings

import torch
from torch import Tensor, library
from torch.utils._pytree import tree_leaves, tree_map

from tests.phantom import is_on

LIMIT_BYTES = float(os.environ.get("PHANTOM_VALUES_MIB", "4")) * 2**20

aten = torch.ops.aten
NOT_REPEATED = {
    "_efficientzerotensor",
    "_local_scalar_dense",
    "_nested_compute_contiguous_strides_offsets",
    "_nested_view_from_buffer",
    "_pin_memory",
    "_reshape_alias",
    "as_strided",
    "empty",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "record_stream",
    "resize_",
    "set_",
    "unfold",
    "view",
    "view_as_complex",
    "view_as_real",
}
"""Operations without a kernel, and those that do their work on a phantom too."""

COMPOSITE = ("copy_", "convolution_backward")
"""Operations that have no kernel of their own for CUDA, and reach one past the dispatcher."""

DYNAMIC_SHAPES = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}
"""Shapes of their results depend on values: only the host can know them, whatever their size."""


def _norm_backward(x, grad, *rest):
    *weight_and_statistics, eps, _ = rest
    return aten.native_batch_norm_backward(grad, x, *weight_and_statistics, True, eps, [True] * 3)


def _convolution(x, w, padding, stride, dilation, groups, *_):
    return aten.convolution(x, w, None, stride, padding, dilation, False, [0] * len(stride), groups)


def _depthwise(x, w, _, bias, stride, padding, dilation):
    return aten.convolution(
        x, w, bias, stride, padding, dilation, False, [0] * len(stride), x.shape[1]
    )


CPU_EQUIVALENTS = {
    "cudnn_batch_norm": aten.native_batch_norm.default,
    "cudnn_batch_norm_backward": _norm_backward,
    "cudnn_convolution": _convolution,
    "_conv_depthwise2d": _depthwise,
}
"""Operations that the CPU has under another name."""


class TooLargeError(Exception):
    """A tensor is above the limit."""


def on_host(tensor, limit_bytes=LIMIT_BYTES):
    """The bytes of a tensor on the phantom as a tensor of the CPU."""
    if tensor.numel() * tensor.element_size() > limit_bytes:
        raise TooLargeError
    if not tensor.numel() or not tensor.untyped_storage().nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = (ctypes.c_uint8 * ((last + 1) * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(span, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)


def _is_on_device(value):
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _on_host(arguments, limit_bytes=LIMIT_BYTES):
    def moved(value):
        if _is_on_device(value):
            return on_host(value, limit_bytes)
        is_device = isinstance(value, torch.device) and value.type == "cuda"
        return torch.device("cpu") if is_device else value

    return tree_map(moved, arguments)


def _with_dynamic_shape(operation):
    def run(*args, **kwargs):
        device = next(value.device for value in tree_leaves((args, kwargs)) if _is_on_device(value))
        torch._C._cuda_synchronize()
        args, kwargs = _on_host((args, kwargs), float("inf"))
        return tree_map(
            lambda v: v.to(device) if isinstance(v, Tensor) else v, operation(*args, **kwargs)
        )

    return run


def _repeated(name, operation):
    kernel = library.get_kernel(operation, "CUDA")
    repeat = CPU_EQUIVALENTS.get(name, operation)
    is_random = torch.Tag.nondeterministic_seeded in operation.tags
    is_tensor = [str(argument.type) == "Tensor" for argument in operation._schema.arguments]

    def run(keyset, *args, **kwargs):
        args = tuple(  # numbers in place of tensors come without being wrapped
            torch.tensor(value, dtype=torch.result_type(args[0], value))
            if takes_tensor and isinstance(value, int | float | complex)
            else value
            for value, takes_tensor in zip(args, is_tensor, strict=False)
        )
        torch._C._cuda_synchronize()  # collectives that this operation waits for
        given = {
            v.untyped_storage()._cdata for v in tree_leaves((args, kwargs)) if _is_on_device(v)
        }
        seed = _seed() if is_random else None
        try:
            host_args, host_kwargs = _on_host((args, kwargs))
            host_kwargs.pop("pin_memory", None)
        except TooLargeError:
            host_args = None
        outputs = kernel.call_boxed(keyset, *args, **kwargs)
        made = [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]
        new = [_is_on_device(v) and v.untyped_storage()._cdata not in given for v in made]
        try:
            if host_args is None:
                raise TooLargeError
            found = _seeded(seed, repeat, *host_args, **host_kwargs)
            if isinstance(outputs, bool | int | float):
                return found
            results = [value for value in tree_leaves(found) if isinstance(value, Tensor)]
            for tensor, is_new, result in zip(made, new, results, strict=False):
                if is_new:
                    on_host(tensor).copy_(result)
        except (
            TooLargeError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
            IndexError,
        ) as error:
            if os.environ.get("PHANTOM_VALUES_TRACE"):
                sys.stderr.write(f"phantom values: {operation}: {error!r:.150}\n")
            for tensor, is_new in zip(made, new, strict=True):
                if is_new:
                    _set_to_zero(tensor)
        return outputs

    return run


def _set_to_zero(tensor):
    num_bytes = ctypes.c_size_t(tensor.untyped_storage().nbytes())
    ctypes.CDLL(None).cudaMemset(ctypes.c_void_p(tensor.untyped_storage().data_ptr()), 0, num_bytes)


def _seed():
    """Where the device's generator stands; it moves on as ever."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return hash((generator.initial_seed(), generator.get_offset())) % 2**63


def _seeded(seed, function, *args, **kwargs):
    if seed is None:
        return function(*args, **kwargs)
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        return function(*args, **{**kwargs, "generator": None} if "generator" in kwargs else kwargs)
    finally:
        torch.default_generator.set_state(before)


_until_the_end = contextlib.ExitStack()


@functools.cache
def enable():
    """Wrap the kernels, for good. Does nothing where the GPU is no phantom."""
    if not is_on() or not torch.cuda.is_available():
        return
    kernels = _until_the_end.enter_context(library._scoped_library("aten", "IMPL"))
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each name: that a kernel is replaced
        for full_name in sorted({*names, *(f"aten::{name}" for name in COMPOSITE)}):
            if not full_name.startswith("aten::"):
                continue
            name, _, overload = full_name.removeprefix("aten::").partition(".")
            if name in NOT_REPEATED:
                continue
            operation = getattr(getattr(aten, name), overload or "default")
            if name in DYNAMIC_SHAPES and overload in ("", "default", "Tensor"):
                kernels.impl(full_name, _with_dynamic_shape(operation), "CUDA")
            else:
                kernels.impl(full_name, _repeated(name, operation), "CUDA", with_keyset=True)


def pytest_configure(config):
    """With `-p tests.phantom.values`."""
    enable()


if __name__ == "__main__":
    enable()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
