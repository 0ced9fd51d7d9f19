#!/usr/bin/env bash
# Shows what only a GPU can show, in at most 9 minutes, on a machine without a network.
#
#   bash benchmarks/on_card.sh [FOLDER]                                    on a GPU
#   SMALL=1 python -m tests.phantom bash benchmarks/on_card.sh [FOLDER]    a dry run without one
#
# Each part writes NAME.txt into FOLDER (default: benchmarks/results/DEVICE). The table of all parts comes
# last, and is in summary.txt too. Wheels in .whl/ are installed first, into a temporary folder. The exit code
# is 1 if a part fails or runs out of time.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 WANDB_MODE=disabled
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}"
if compgen -G ".whl/*.whl" > /dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" .whl/*.whl || exit 1
fi
device=$(python3 -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "_"))') || exit 1
folder=${1:-benchmarks/results/$device}
mkdir -p "$folder"
: > "$folder/summary.txt"
failed=0

part() { # NAME LIMIT_S COMMAND...
  local name=$1 limit=$2 started=$SECONDS code
  shift 2
  timeout --signal=INT --kill-after=10 "$limit" "$@" > "$folder/$name.txt" 2>&1
  code=$?
  [ "$code" = 0 ] || failed=1
  printf '%-10s exit code %-4s %4d s  %s\n' "$name" "$code" $((SECONDS - started)) \
    "$(grep -v '^$' "$folder/$name.txt" | tail -n 1 | cut -c1-90)" | tee -a "$folder/summary.txt"
}

search_under_ddp() { # MODEL PIXELS MAX_BATCH_SIZE: NCCL with one rank
  part ddp 50 python3 - "$@" << 'PYTHON'
import sys

import timm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from linnaeus import auto_find_batch_size

name, pixels, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(timm.create_model(name, num_classes=10).cuda())
optimizer = torch.optim.AdamW(model.parameters())


def step(batch):
    torch.nn.functional.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()


def make_batch(n):
    return torch.randn(n, 3, pixels, pixels, device="cuda")


found = auto_find_batch_size(step, make_batch, state=(model, optimizer), max_batch_size=most)
for _ in range(20):
    step(make_batch(found.batch_size))
free, total = torch.cuda.mem_get_info()
print(f"batch size {found.batch_size} ({found.limited_by}), {len(found.trials)} trials, after 20 steps {1 - free / total:.3f} of the device in use")
dist.destroy_process_group()
PYTHON
}

train_with() { # NAME LIMIT_S KEY=VALUE...
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" python3 -m linnaeus.train DATA.DATASET.NAME=synthetic DATA.AUTOBATCH.ENABLED=True \
    DATA.AUTOBATCH.MIN_STEPS_PER_EPOCH=1 TRAIN.EPOCHS=1 EXPERIMENT.DEVICE=cuda EXPERIMENT.OUTPUT_DIR="$work/runs" \
    EXPERIMENT.NAME="$name" "$@"
}

part device 20 python3 -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_properties(0))'
if [ -n "${SMALL:-}" ]; then
  part tests 120 python3 -m pytest -q -p no:cacheprovider -p tests.phantom.values -m gpu tests/data/test_batch.py
  part truth 120 python3 -m benchmarks.research.gpu_truth --rows 1
  part finders 30 python3 benchmarks/search_peers.py --help
  search_under_ddp test_resnet 64 64
  train_with bf16 60 MODEL.NAME=test_resnet TRAIN.AMP=bf16 DATA.AUTOBATCH.MAX_BATCH_SIZE=64
  part overhead 60 python3 benchmarks/trainer_overhead.py --turns 2 --widths 256 --accumulation 1
else
  part tests 120 python3 -m pytest -q -p no:cacheprovider -m "gpu and not slow" tests/autobatch tests/memory tests/data tests/training/test_cached_blocks.py
  part truth 120 python3 -m benchmarks.research.gpu_truth --rows 2 --fraction 0.2
  part finders 140 python3 benchmarks/search_peers.py --device cuda --model vit_small_patch16_224 --img-size 224 --memory-limit-gb 20 --rounds 1
  search_under_ddp resnet50 224 4096
  train_with bf16 50 MODEL.NAME=resnet50 TRAIN.AMP=bf16 DATA.IMG_SIZE=224
  part overhead 40 python3 benchmarks/trainer_overhead.py --turns 5 --widths 256 1024 --accumulation 1
fi
echo
cat "$folder/summary.txt"
exit "$failed"
