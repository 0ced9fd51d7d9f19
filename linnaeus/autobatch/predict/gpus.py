"""Names of GPUs and the bytes that torch sees of each: `torch.cuda.get_device_properties(i).total_memory`.

>>> find_gpu("NVIDIA H100").name, round(find_gpu("rtx4090").total_bytes / GIB, 2)
('h100-80gb', 23.64)

torch sees less than the memory of the GPU: the driver, and error correction where it is on, keep a part.
The table has the figure in torch's own messages, where a public report quotes one ("total capacity");
elsewhere the figure of `nvidia-smi`, less 0.6 GiB.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

GIB = 1024**3
_MIB = 1024**2

BASE_MIB: dict[tuple[str, ...], tuple[int, int, int]] = {
    # T4: 100 hpcaitech/Open-Sora#697, 135 Zheng-Chong/CatVTON#133, 141 FoundationVision/GenerateU#10;
    # RTX 2080 Ti: 197 lllyasviel/FramePack#369
    ("t4", "rtx-20"): (138, 100, 197),
    # A100: 498 pico-lm/pico-train#50, 501 TianheWu/CoSeR#10, 1430 (small MLPs) itu-rad/GPUMemNet; several
    # processes: 903, 997 meta-pytorch/torchrec#3580, 1133 awslabs/keys_values#92, 1464 wbfwonderful/Vad-R1#11
    ("a100", "a30"): (997, 498, 1464),  # no report of an A30
    # RTX A4000: 210 DengKaiCQ/VGGT-Long#6; RTX 3080: 257 bcmi/libcom#54; RTX 3090: 256 (context alone, torch
    # 2.7.1+cu128) invoke-ai/InvokeAI#9413, 304 bytedance/X-Portrait#7
    ("a10", "a40", "rtx-30", "rtx-a", "v100"): (
        256,
        210,
        304,
    ),  # no report of a V100 since CUDA 11.7
    # RTX 4090: 380 RLinf/RLinf#255, 473 pinokiofactory/flux-webui#11, 479 lrzjason/T2ITrainer#37,
    # 504 3DTopia/Phidias-Diffusion#8, 646 deepseek-ai/DeepSeek-V3#205; L40S: 419 stepfun-ai/Step-Video-T2V#8;
    # L40: 507 QwenLM/Qwen3-VL#2097; RTX 6000 Ada: 429 DINGYANB/MTVCrafter#21
    ("l4", "rtx-40", "rtx-6000-ada"): (476, 380, 646),
    # H100: 676 ali-vilab/VACE#56; of four processes 1106 aqlaboratory/openfold#481
    ("h100", "h200", "b200"): (891, 676, 1106),  # no report of a B200
    # RTX 5080: 336 Tencent-Hunyuan/Hunyuan3D-2#238; RTX 5090: 595 Wan-Video/Wan2.1#465
    ("rtx-50",): (465, 336, 595),
}
"""MiB that a process holds beside its allocator, by how the name of the GPU begins: median, least and most.

They are for the context of CUDA and the kernels that have run: since CUDA 11.7, code is loaded when needed.
Most follow from torch's message where memory ran out, in the GitHub issue: in use, less allocated, less
reserved, to some 10 MiB, with torch 2.1 or newer. Reports above 2 GiB are left out: other libraries allocate.
"""
ANY_GPU_MIB = 479, 141, 1106
"""Median, tenth and ninetieth percentile of these reports, for other GPUs."""
ASSUMED_BASE_BYTES = ANY_GPU_MIB[0] * _MIB

_LESS_THAN_NVIDIA_SMI = 0.6 * GIB
"""torch sees 0.35 to 0.75 GiB less than `nvidia-smi` says, by the GPUs with both figures known."""


@dataclass(frozen=True)
class Gpu:
    """A device: its name or size, such as `24 GiB`, and the bytes that torch sees.

    `base_mib` are in use beside the allocator, with the least and the most there may be.
    """

    name: str
    total_bytes: int
    base_mib: tuple[float, float, float] = ANY_GPU_MIB


def _gib(number: float) -> int:
    return int(number * GIB)


def _below_nvidia_smi(mib: int) -> int:
    return int(mib * _MIB - _LESS_THAN_NVIDIA_SMI)


GPUS: dict[str, int] = {
    "t4": _gib(14.56),  # github.com/Zheng-Chong/CatVTON/issues/133
    "v100-16gb": _gib(15.75),  # github.com/XuyangBai/TransFusion/issues/49; others say up to 15.78
    "v100-32gb": _gib(31.74),  # github.com/haotian-liu/LLaVA/issues/812
    # Values of nvidia-smi for a10, l4 and h100-80gb: github.com/modal-labs/modal-client/pull/2797
    "a10": _below_nvidia_smi(
        23_028
    ),  # 23.70 of torch in stanford_alpaca/issues/76 would be more than that
    "l4": _below_nvidia_smi(23_034),
    "a30": _gib(23.53),  # github.com/google/RB-Modulation/issues/5
    "rtx-3090": _gib(23.70),  # github.com/xiaoxiangAQ/GAS-Net/issues/7
    "rtx-4090": _gib(23.64),  # github.com/ali-vilab/VGen/issues/104
    "rtx-5090": _gib(31.37),  # github.com/Wan-Video/Wan2.1/issues/465
    "a100-40gb": _gib(39.50),  # github.com/TianheWu/CoSeR/issues/10
    "l40s": _gib(44.53),  # github.com/Wan-Video/Wan2.1/issues/205
    "h100-80gb": _below_nvidia_smi(81_559),
    "a100-80gb": _gib(79.25),  # github.com/wbfwonderful/Vad-R1/issues/11
    # Output of nvidia-smi for these GPUs; the smaller value where drivers differ.
    "rtx-2080-ti": _below_nvidia_smi(11_264),
    "rtx-3080-10gb": _below_nvidia_smi(10_240),
    "rtx-3080-12gb": _below_nvidia_smi(12_288),
    "rtx-4070": _below_nvidia_smi(12_282),
    "rtx-4080": _below_nvidia_smi(16_376),
    "rtx-a5000": _below_nvidia_smi(24_564),
    "rtx-a6000": _below_nvidia_smi(48_685),  # 49,140 with newer drivers
    "a40": _below_nvidia_smi(45_634),  # 46,068 with newer drivers
    "l40": _below_nvidia_smi(46_068),
    "rtx-6000-ada": _below_nvidia_smi(49_140),
    "h200": _below_nvidia_smi(143_771),
    "b200": _below_nvidia_smi(183_359),
}
"""Bytes that torch sees, by the name that is typed."""


def find_gpu(name: str) -> Gpu:
    """Find a GPU by its name; case, spaces, dashes, the maker's name and `RTX` do not matter.

    Raises:
        ValueError: several sizes have this name; the message names them.
        KeyError: no GPU of the table has it.
    """
    wanted = _plain(name)
    found = [
        known
        for known in GPUS
        if wanted in (_plain(known), _plain(re.sub("-[0-9]+gb$", "", known)))
    ]
    if len(found) > 1:
        raise ValueError(f"{name!r} has two sizes: use {' or '.join(found)}")
    if not found:
        raise KeyError(name)
    base_mib = next(mib for names, mib in BASE_MIB.items() if found[0].startswith(names))
    return Gpu(found[0], GPUS[found[0]], base_mib)


def device_that_would_do(num_bytes: float, note: str = "") -> str:
    """Return the memory that a device needs, in GiB rounded up, and the smallest GPU of the table with it.

    >>> device_that_would_do(24 * GIB, ", with nothing to spare")
    'a device of 24.00 GiB would do, with nothing to spare, such as rtx-5090'
    """
    smallest = min(
        (name for name in GPUS if GPUS[name] >= num_bytes), key=GPUS.__getitem__, default=None
    )
    example = "" if smallest is None else f", such as {smallest}"
    return f"a device of {math.ceil(100 * num_bytes / GIB) / 100:.2f} GiB would do{note}{example}"


def _plain(name: str) -> str:
    """Normalize a name: `NVIDIA GeForce RTX 4090` and `rtx4090` are the same."""
    letters = re.sub("[^a-z0-9]", "", name.lower())
    return re.sub("^(nvidia|geforce|tesla|rtx)+", "", letters).removesuffix("generation")
