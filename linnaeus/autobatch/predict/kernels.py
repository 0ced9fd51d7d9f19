"""Operations whose kernels on CUDA hold memory beside their outputs, and how much.

Each is recorded as its kernel in aten/src/ATen/native allocates: copies of arguments that it cannot read as
they are, workspaces of convolutions, sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnaeus.autobatch.predict.events import ConvFacts
from linnaeus.autobatch.predict.reductions import Reduction

if TYPE_CHECKING:
    from linnaeus.autobatch.predict.recorder import Recorder

BLAS_WORKSPACE_BYTES = 8_519_680
"""Workspace of cuBLAS: torch's default `:4096:2:16:8` up to compute capability 8.x."""
LT_WORKSPACE_BYTES = 1 << 20
"""Workspace of cuBLASLt, which adds the bias of a linear layer to the product."""

Kernel = Callable[["Recorder", str, Any, tuple[Any, ...], dict[str, Any]], Any]


def _is_dense(tensor: Tensor) -> bool:
    """Whether kernels read it as it is: contiguous, or channels-last."""
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _copying_strided(
    *indices: int, layouts: Callable[[Tensor], bool] = _is_dense, is_blas: bool = False
) -> Kernel:
    """A kernel that copies those of its arguments that are not dense, and holds the copies until it ends."""

    def run(recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copies = [
            recorder.allocate(tensor.nbytes, "copy")
            for tensor in (args[index] for index in indices if index < len(args))
            if isinstance(tensor, Tensor) and not layouts(tensor)
        ]
        outputs = func(*args, **kwargs)
        recorder.track_all(outputs, name)
        if is_blas:
            has_bias = name == "addmm" and args[0].dim() == 1 and kwargs.get("beta", 1) == 1
            recorder.use_blas(LT_WORKSPACE_BYTES if has_bias else BLAS_WORKSPACE_BYTES)
        for number in copies:
            recorder.release(number)
        return outputs

    return run


def _is_contiguous(tensor: Tensor) -> bool:
    return tensor.is_contiguous()


def _is_matrix(tensor: Tensor) -> bool:
    """Whether cuBLAS takes its last two dimensions as they are: one of them is dense."""
    if tensor.dim() < 2:
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def _convolution(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, w = args[0], args[1]
    copies = _conv_copies(recorder, x, w)
    y: Tensor = _in_format(func(*args, **kwargs), _conv_format(x, w))
    recorder.track(y, name)
    _conv_workspace(recorder, "forward", x, w, y, args[8], args[3])
    for number in copies:
        recorder.release(number)
    return y


def _convolution_backward(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    grad, x, w = args[:3]
    copies = _conv_copies(recorder, x, w, grad)
    layout = _conv_format(x, w)
    outputs = tuple(_in_format(output, layout) for output in func(*args, **kwargs))
    for kind, output in zip(("input", "weight", "bias"), outputs, strict=True):
        if output is not None:
            recorder.track(output, name)
            if kind == "bias":
                recorder.reduce(Reduction.of(grad, (0, *range(2, grad.dim()))))
            else:
                _conv_workspace(recorder, kind, x, w, grad, args[9], args[4])
    for number in copies:
        recorder.release(number)
    return outputs


def _in_format(output: Any, layout: torch.memory_format) -> Any:
    """The output of a convolution as cuDNN writes it; `meta` forgets the format of some."""
    if output is None or output.dim() != 4 or output.is_contiguous(memory_format=layout):
        return output
    return torch.empty_like(output, memory_format=layout)


def _conv_format(x: Tensor, w: Tensor) -> torch.memory_format:
    def is_last(tensor: Tensor) -> bool:
        last = tensor.is_contiguous(memory_format=torch.channels_last)
        return last and not tensor.is_contiguous()

    if x.dim() == 4 and (is_last(x) or is_last(w)):
        return torch.channels_last
    return torch.contiguous_format


def _conv_copies(recorder: Recorder, x: Tensor, w: Tensor, *others: Tensor) -> list[int]:
    layout = _conv_format(x, w)
    return [
        recorder.allocate(tensor.nbytes, "copy")
        for tensor in (x, w, *others)
        if not tensor.is_contiguous(memory_format=layout)
    ]


def _conv_workspace(
    recorder: Recorder, kind: str, x: Tensor, w: Tensor, y: Tensor, groups: int, strides: Any
) -> None:
    facts = ConvFacts(
        kind, tuple(x.shape), tuple(w.shape), tuple(y.shape), groups, tuple(strides), x.element_size(),
        _conv_format(x, w) is torch.channels_last,
    )  # fmt: skip
    recorder.record_convolution(facts)


def _reduction(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    output = func(*args, **kwargs)
    recorder.track_all(output, name)
    index = 2 if name == "linalg_vector_norm" else 1
    dims = args[index] if len(args) > index and not isinstance(args[index], bool) else kwargs.get("dim")
    recorder.reduce(Reduction.of(args[0], [dims] if isinstance(dims, int) else dims))
    return output


def _safe_softmax(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The softmax of attention without a fused kernel; it also holds an unmasked result and a mask."""
    output = func(*args, **kwargs)
    first = recorder.allocate(output.nbytes, "softmax")
    mask = recorder.allocate(output.numel(), "isneginf")
    recorder.track(output, name)
    for number in (mask, first):
        recorder.release(number)
    return output


def _efficient_backward(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Memory-efficient attention.

    In float32, the product of output and its gradient is computed before the kernel; in shorter formats, the
    kernel sums gradients in float32.
    """
    grad, query = args[0], args[1]
    accumulated = 0
    if query.dtype == torch.float32:
        recorder.release(recorder.allocate(grad.nbytes, "delta"))
    else:
        accumulated = recorder.allocate(4 * query.numel(), "gradients in float32")
    outputs = func(*args, **kwargs)
    recorder.track_all(outputs, name)
    recorder.release(accumulated)
    return outputs


def _flash_backward(
    recorder: Recorder, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Flash attention: the gradient of the query is summed in float32, its rows rounded up to 128."""
    query = args[1]
    batch, heads, rows, size = query.shape
    shape = batch, heads, -(-rows // 128) * 128, -(-size // 32) * 32
    outputs = func(*args, **kwargs)
    recorder.track_all(outputs, name)
    recorder.release(recorder.allocate(4 * prod(shape), "gradient in float32"))
    return outputs


KERNELS: dict[str, Kernel] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_layer_norm": _copying_strided(0, layouts=_is_contiguous),
    "native_layer_norm_backward": _copying_strided(0, 1, layouts=_is_contiguous),
    "_fused_rms_norm": _copying_strided(0, layouts=_is_contiguous),
    "_fused_rms_norm_backward": _copying_strided(0, 1, layouts=_is_contiguous),
    "native_group_norm": _copying_strided(0),
    "native_group_norm_backward": _copying_strided(0, 1),
    "_softmax": _copying_strided(0, layouts=_is_contiguous),
    "_softmax_backward_data": _copying_strided(0, 1, layouts=_is_contiguous),
    "_log_softmax": _copying_strided(0, layouts=_is_contiguous),
    "_log_softmax_backward_data": _copying_strided(0, 1, layouts=_is_contiguous),
    "max_pool2d_with_indices": _copying_strided(0),
    "avg_pool2d": _copying_strided(0),
    "avg_pool2d_backward": _copying_strided(0, 1),
    "mm": _copying_strided(0, 1, layouts=_is_matrix, is_blas=True),
    "bmm": _copying_strided(0, 1, layouts=_is_matrix, is_blas=True),
    "addmm": _copying_strided(1, 2, layouts=_is_matrix, is_blas=True),
    "baddbmm": _copying_strided(1, 2, layouts=_is_matrix, is_blas=True),
    "mv": _copying_strided(is_blas=True),
    "addmv": _copying_strided(is_blas=True),
    "dot": _copying_strided(is_blas=True),
    "sum": _reduction,
    "mean": _reduction,
    "linalg_vector_norm": _reduction,
    "_safe_softmax": _safe_softmax,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
"""Operations whose kernels on CUDA hold memory beside their outputs."""
