"""Take the paths of CUDA on `meta`: fused kernels, casts under autocast, multi-tensor optimizers.

Without this, `meta` decomposes attention, dropout and RMSNorm into parts that save more than the fused
kernels of CUDA, ignores autocast, and lets optimizers and gradient clipping take the path for devices without
multi-tensor kernels. This module has the rules of torch 2.11 to 2.15 (aten/src/ATen: autocast_mode.h,
native/transformers/cuda/sdp_utils.cpp, native/Dropout.cpp).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.amp.autocast_mode import autocast
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only  # torch 2.11 has no public one

from linnaeus.autobatch.predict.swap import UntraceableError
from linnaeus.autobatch.predict.values import StandIn

aten = torch.ops.aten


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION = _names("""
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    _convolution prelu addmm addmv addr matmul __matmul__ __rmatmul__ einsum mm mv linear addbmm
    baddbmm bmm chain_matmul linalg_vecdot linalg_multi_dot multi_dot scaled_dot_product_attention
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""")
"""Functions whose arguments CUDA's autocast casts to its own format."""

FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__
    __rpow__ softplus layer_norm native_layer_norm group_norm frobenius_norm nuclear_norm
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss_nd nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm
""")
"""Functions whose arguments it casts to float32."""

FLOAT32_RESULT = _names("""
    prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum
""")
"""Functions that return float32 under autocast."""

WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add cat concat
    concatenate stack tensordot
""")
"""Functions whose arguments it casts to the widest format among them."""


class CudaPaths(TorchFunctionMode):
    """Mode that takes the paths of CUDA for functions of `meta` tensors, in forward and backward.

    Attributes:
        casts: parameters with their casts, which autocast keeps until its region ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in CASTS and torch.is_autocast_enabled("cuda"):
            func, args, kwargs = self._autocast(name, func, args, kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": on_meta(kwargs["device"])}
        route = ROUTES.get(name)
        return func(*args, **kwargs) if route is None else route(func, *args, **kwargs)

    def _autocast(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        dtype = torch.get_autocast_dtype("cuda")
        if name in FLOAT32_RESULT:
            if not (args and _is_eligible(args[0])) or kwargs.get("dtype") is not None:
                return func, args, kwargs
            if name in ("softmax", "log_softmax") and args[0].dtype != torch.float32:
                return _FUSED_SOFTMAX[name], args, kwargs
            return func, args, {**kwargs, "dtype": torch.float32}
        if name in FLOAT32:
            dtype = torch.float32
        elif name in WIDEST:
            if not any(
                _is_eligible(t) and t.dtype == torch.float32 for t in tree_leaves((args, kwargs))
            ):
                return func, args, kwargs
            dtype = torch.float32
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: self._cast(tensor, dtype), (args, kwargs)
        )
        return func, args, kwargs

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not _is_eligible(tensor) or tensor.dtype == dtype:
            return tensor
        is_kept = (
            tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and tensor.dtype == torch.float32
            and torch.is_autocast_cache_enabled()
        )
        if not is_kept:
            return tensor.to(dtype)
        if id(tensor) not in self.casts:
            self.casts[id(tensor)] = tensor, tensor.to(dtype)
        return self.casts[id(tensor)][1]


def on_meta(device: Any) -> Any:
    """Return `meta` in place of a CUDA device, anything else unchanged."""
    return "meta" if str(device).startswith("cuda") or isinstance(device, int) else device


def _is_eligible(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.is_meta
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )


def _half_to_float(fused: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Softmax that reads float16 and writes float32 in one kernel; of other tensors it reads a copy."""

    def run(x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        dim = -1 if dim is None else dim
        return fused(x, dim, True) if x.dtype == torch.half else fused(x.float(), dim, False)

    return run


_FUSED_SOFTMAX = {
    "softmax": _half_to_float(aten._softmax),
    "log_softmax": _half_to_float(aten._log_softmax),
}


def _cross_entropy(
    func: Any,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Under autocast, the softmax keeps the logits' format, and its result is copied to float32."""
    is_half = _is_eligible(x) and x.dtype != torch.float32
    if not (is_half and torch.is_autocast_enabled("cuda")) or target.is_floating_point():
        return func(x, target, weight, reduction, ignore_index, label_smoothing)
    dim = min(1, x.dim() - 1)
    log = torch.log_softmax(x, dim, dtype=x.dtype)
    weight = None if weight is None else weight.float()
    result = aten.nll_loss_nd(log.float(), target, weight, reduction, ignore_index)
    if label_smoothing:
        smooth = log.sum(dim, dtype=torch.float32).neg()
        smooth = smooth if reduction == 0 else smooth.sum()
        result = result * (1 - label_smoothing) + smooth * (label_smoothing / x.shape[dim])
    return result


def _dropout(func: Any, x: Tensor, p: float = 0.5, train: bool = True) -> Any:
    is_fused = x.is_meta and train and 0 < p < 1 and x.numel()
    return torch.native_dropout(x, p, True)[0] if is_fused else func(x, p, train)


class _FusedRmsNorm(torch.autograd.Function):
    """Memory of the fused kernel; `meta` would run it in parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_dims: int, weight: Tensor | None) -> Tensor:
        copy = (
            None
            if x.is_contiguous()
            else torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = x.new_empty(x.shape[: x.dim() - num_dims], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        del copy
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        copies = [
            torch.empty(t.shape, dtype=t.dtype, device=t.device)
            for t in (*grads, x)
            if not t.is_contiguous()
        ]
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_weight = None if weight is None else torch.empty_like(weight)
        del copies
        return grad_x, None, grad_weight


def _rms_norm(
    func: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Any:
    """Run RMSNorm in one kernel, where input and weight have one format."""
    is_one_format = weight is None or weight.dtype == x.dtype
    if x.is_meta and is_one_format:
        return _FusedRmsNorm.apply(x, len(shape), weight)
    return func(x, shape, weight, eps)


def _attention(
    func: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Scaled dot-product attention by the kernel that CUDA chooses at compute capability 8.0 and above."""
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    is_fusable = (
        q.is_meta
        and q.dim() == k.dim() == v.dim() == 4
        and all(t.stride(-1) == 1 for t in (q, k, v))
        and all(t.numel() for t in (q, k, v))
        and (is_half or q.dtype == torch.float32)
    )
    if is_fusable and is_half and attn_mask is None and q.shape[-1] == v.shape[-1] <= 256:
        heads, size = q.shape[1], q.shape[-1]
        if enable_gqa:
            k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        padded = [torch.constant_pad_nd(t, (0, -size % 8)) if size % 8 else t for t in (q, k, v)]
        scale = size**-0.5 if scale is None else scale
        result = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale
        )[0]
        return result[..., :size]
    alignment = 8 if is_half else 4
    if is_fusable and not enable_gqa and q.shape[-1] % alignment == v.shape[-1] % alignment == 0:
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        bias = _bias(attn_mask, q, k)
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    options = {"enable_gqa": True} if enable_gqa else {}
    return func(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, **options)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the mask for memory-efficient attention: in the inputs' format, rows aligned to 8 entries."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype)
    num_keys = k.shape[2]
    if num_keys % 8:
        padded = torch.constant_pad_nd(mask.expand(*mask.shape[:-1], num_keys), (0, -num_keys % 8))
        mask = padded[..., :num_keys]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], num_keys)


def _item(func: Any, tensor: Tensor) -> Any:
    """Return a stand-in for an unknown value: a number that is only logged need not be known."""
    try:
        return func(tensor)
    except UntraceableError:
        return StandIn(1)


def _tolist(func: Any, tensor: Tensor) -> Any:
    host = tensor.cpu()
    return tree_map(StandIn, torch.ones(host.shape).tolist()) if host.is_meta else func(host)


def _numpy(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.is_meta:
        raise UntraceableError("`.numpy()` needs the values of a tensor")
    return func(tensor, *args, **kwargs)


def _format(tensor: Tensor, spec: str) -> str:
    return format(tensor.item() if tensor.dim() == 0 else str(tensor), spec)


def _to(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], str | int | torch.device):
        args = (on_meta(args[0]), *args[1:])
    return func(tensor, *args, **kwargs)


ROUTES: dict[str, Callable[..., Any]] = {
    "cross_entropy_loss": _cross_entropy,
    "dropout": _dropout,
    "item": _item,
    "numpy": _numpy,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    "to": _to,
    "tolist": _tolist,
    "cuda": lambda func, tensor, *args, **kwargs: tensor.to("meta"),
    "pin_memory": lambda func, tensor, *args, **kwargs: tensor,
}
"""Functions that run differently on CUDA and on `meta`."""

CASTS = LOWER_PRECISION | FLOAT32 | FLOAT32_RESULT | WIDEST
"""Functions that autocast changes."""


@contextlib.contextmanager
def cuda_paths() -> Iterator[CudaPaths]:
    """Run steps on `meta` tensors as CUDA would run them, inside the context.

    `torch.autocast` for CUDA and for `meta` sets CUDA's autocast, whether or not there is a device.
    """
    paths = CudaPaths()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(StandIn, "is_traced", True))
        for target, name, value in (*_SEE_THROUGH, *_DEVICES, *_autocast_methods(paths)):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(paths)
        yield paths


_SEE_THROUGH: tuple[tuple[Any, str, Any], ...] = tuple(
    (module, name, lambda *args: False)
    for module in (torch.nn.functional, torch.functional, torch._tensor, torch.autograd)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    if hasattr(module, name)
)
"""Switches off `__torch_function__` in torch's Python wrappers, so the mode sees the ATen calls inside."""


def _with_meta(supported: Callable[[], list[str]]) -> Callable[[], list[str]]:
    return lambda: [*supported(), "meta"]


def _of_cuda(asked: Callable[[str], Any]) -> Callable[..., Any]:
    return lambda device_type="cuda": asked("cuda" if device_type == "meta" else device_type)


_DEVICES: tuple[tuple[Any, str, Any], ...] = (
    *(
        (module, name, _with_meta(getattr(torch.utils._foreach_utils, name)))
        for module in (torch.utils._foreach_utils, sys.modules[torch.optim.Optimizer.__module__])
        for name in (
            "_get_foreach_kernels_supported_devices",
            "_get_fused_kernels_supported_devices",
        )
    ),
    *(
        (torch, name, _of_cuda(getattr(torch, name)))
        for name in ("is_autocast_enabled", "get_autocast_dtype")
    ),
    # No gradient is infinite: on `meta` there is no value to look at.
    (
        torch.amp.GradScaler,
        "_maybe_opt_step",
        lambda _, optimizer, state, *a, **kw: optimizer.step(*a, **kw),
    ),
    (Tensor, "__format__", _format),
    (
        DistributedDataParallel,
        "forward",
        lambda wrapper, *args, **kwargs: wrapper.module(*args, **kwargs),
    ),
    (torch.utils.checkpoint, "_infer_device_type", lambda *args: "cuda"),
)
"""Replacements inside the context: `meta` counts as CUDA where torch asks for the kind of device, a wrapper
needs no other rank, and a number that is formatted need not be known."""


def _autocast_methods(paths: CudaPaths) -> Iterator[tuple[Any, str, Any]]:
    plain_init, plain_exit = autocast.__init__, autocast.__exit__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain_init(self, "cuda" if device_type == "meta" else device_type, *args, **kwargs)

    def leave(self: Any, *error: Any) -> Any:
        result = plain_exit(self, *error)
        if not torch.is_autocast_enabled("cuda"):
            paths.casts.clear()
        return result

    yield torch.cuda.amp.common, "amp_definitely_not_available", lambda: False
    yield torch.cuda, "is_bf16_supported", lambda: True
    yield autocast, "__init__", init
    yield autocast, "__exit__", leave
