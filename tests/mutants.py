"""Mistakes that the tests must catch: each is made in a copy of the repository, where its tests run.

`python -m tests.mutants [WORD...]` prints the test that kills each mutant whose name holds a WORD, and exits
with 1 if one survives.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.helpers.children import ROOT


class Mutant(NamedTuple):
    """A text of `linnaeus/` that is replaced, and the tests that notice."""

    name: str
    file: str
    text: str
    replacement: str
    tests: str


MUTANTS = (
    Mutant(
        "the largest size is never tried",
        "autobatch/search.py",
        "range(first_multiple, max_size + 1, multiple_of)",
        "range(first_multiple, max_size, multiple_of)",
        "tests/autobatch/test_search.py",
    ),
    Mutant(
        "a size is certified with an untried one above it",
        "autobatch/search.py",
        "return self.high - self.low == 1",
        "return self.high - self.low <= 2",
        "tests/autobatch/test_search.py",
    ),
    Mutant(
        "a peak equal to the budget does not fit",
        "autobatch/search.py",
        'return "fits" if peak_bytes <= budget_bytes',
        'return "fits" if peak_bytes < budget_bytes',
        "tests/autobatch/test_search.py",
    ),
    Mutant(
        "one tensor of a model is not restored",
        "autobatch/state/contents.py",
        "for tensor in self.tensors:",
        "for tensor in self.tensors[1:]:",
        "tests/autobatch/test_snapshot.py",
    ),
    Mutant(
        "an optimizer's attributes are not restored",
        "autobatch/state/snapshot.py",
        "            self._kept.restore()\n",
        "",
        "tests/autobatch/test_optimizers.py",
    ),
    Mutant(
        "random number generators are not restored",
        "autobatch/state/snapshot.py",
        "        set_rng_state(self._rng, self._device)\n",
        "",
        "tests/autobatch/test_snapshot.py",
    ),
    Mutant(
        "only rank 0's verdict counts",
        "autobatch/ranks/protocol.py",
        "smallest = min(verdicts, key=lambda verdict: verdict.batch_size)",
        "smallest = verdicts[0]",
        "tests/autobatch/test_protocol.py",
    ),
    Mutant(
        "the budget is not read again after a search",
        "autobatch/finder.py",
        "self._set_budget(min(before_bytes, self.memory.budget(fraction, self._limit_bytes)))",
        "pass",
        "tests/autobatch/test_find.py",
    ),
    Mutant(
        "the budget forgets what other processes hold",
        "autobatch/memory/device.py",
        "budget_bytes = int(fraction * self.total_bytes) - self.outside()",
        "budget_bytes = int(fraction * self.total_bytes)",
        "tests/memory/test_device.py",
    ),
    Mutant(
        "a storage that grows in place is not counted",
        "autobatch/memory/storages.py",
        "elif known[2] != storage.nbytes():",
        "elif False:",
        "tests/memory/test_storages.py",
    ),
    Mutant(
        "attention is traced without its kernels",
        "autobatch/predict/cuda_paths.py",
        '    "scaled_dot_product_attention": _attention,\n',
        "",
        "tests/memory/test_trace.py",
    ),
    Mutant(
        "cast parameters are traced anew each time",
        "autobatch/predict/cuda_paths.py",
        "and torch.is_autocast_cache_enabled()",
        "and False",
        "tests/memory/test_trace.py",
    ),
    Mutant(
        "gradient buckets are not traced",
        "autobatch/predict/trace.py",
        "_attach_buckets(state, buckets)\n",
        "pass\n",
        "tests/memory/test_trace.py",
    ),
    Mutant(
        "micro-batches add up in place of being averaged",
        "training/step.py",
        "loss = loss / divisor",
        "pass",
        "tests/training/test_step.py",
    ),
    Mutant(
        "the loss is not scaled for float16",
        "training/step.py",
        "self.scaler.scale(loss).backward()",
        "loss.backward()",
        "tests/training/test_step.py",
    ),
    Mutant(
        "scaled gradients are clipped",
        "training/step.py",
        "is not None:\n            self.scaler.unscale_(self.optimizer)\n",
        "is not None:\n",
        "tests/training/test_step.py",
    ),
    Mutant(
        "a run takes the folder of another one",
        "runtime/run_folder.py",
        "each and each.is_alive(heartbeat_age_s, resumes=resumes)",
        "False",
        "tests/runtime/test_run_folder.py",
    ),
    Mutant(
        "a run writes into a folder that it has lost",
        "runtime/run_folder.py",
        "        if not self.is_mine:\n            holder",
        "        if False:\n            holder",
        "tests/runtime/test_run_folder.py",
    ),
    Mutant(
        "a checkpoint is not flushed to the disk",
        "runtime/files.py",
        "            os.fsync(file.fileno())\n",
        "",
        "tests/runtime/test_files.py tests/training/test_checkpoint.py",
    ),
    Mutant(
        "damage to a shard is not noticed",
        "models/shards.py",
        "zipfile.ZipFile(data).testzip() is not None",
        "False",
        "tests/training/test_sharded_checkpoint.py",
    ),
    Mutant(
        "shards that only the best checkpoint names are deleted",
        "training/checkpoint.py",
        'self.folder.glob("*.pt") if unused',
        "(self.last, self.previous) if unused",
        "tests/training/test_sharded_checkpoint.py",
    ),
    Mutant(
        "moments are not read from shards",
        "training/checkpoint.py",
        "dcp.load(dict(parts)",
        "dcp.load({n: p for n, p in parts.items() if n in own}",
        "tests/training/test_sharded_checkpoint.py",
    ),
    Mutant(
        "a file is written in place",
        "runtime/files.py",
        "    temporary = temporary_name(path)\n    try:",
        "    temporary = path\n    try:",
        "tests/runtime/test_files.py tests/training/test_checkpoint.py",
    ),
    Mutant(
        "the average's number of updates is not restored",
        "training/ema.py",
        '        self.num_updates = state["num_updates"]\n',
        "",
        "tests/training/test_ema.py",
    ),
    Mutant(
        "the warm-up begins one step late",
        "training/schedule.py",
        "min((position + 1) / warmup_steps, 1.0)",
        "min(position / warmup_steps, 1.0)",
        "tests/training/test_schedule.py linnaeus/training/schedule.py",
    ),
    Mutant(
        "a resumed epoch begins at its start",
        "training/trainer.py",
        "self.loaders.train.set_epoch(epoch, skip=samples_done)",
        "self.loaders.train.set_epoch(epoch)",
        "tests/training tests/test_resume.py",
    ),
    Mutant(
        "each rank validates on all samples",
        "data/sampler.py",
        "range(self.rank, self.length, self.world_size)",
        "range(self.length)",
        "tests/data",
    ),
    Mutant(
        "the logged loss is a sum over steps",
        "training/accuracy.py",
        "float(total / count)",
        "float(total)",
        "tests/training",
    ),
    Mutant(
        "a search that finds nothing ends with another code",
        "autobatch/errors.py",
        'a rank fails."""\n\n    exit_code = 3',
        'a rank fails."""\n\n    exit_code = 1',
        "tests/autobatch/test_protocol.py",
    ),
    Mutant(
        "a rank whose process has died is waited for",
        "autobatch/ranks/exchange.py",
        "if self.count == GONE or self.status() != psutil.STATUS_ZOMBIE:",
        "if True:",
        "tests/runtime/test_control.py",
    ),
    Mutant(
        "code that a stranger's run names is started without consent",
        "config/instantiate.py",
        "if named and not trust_code:",
        "if False:",
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "a file calls Python and Linnaeus with consent",
        "config/instantiate.py",
        '"omegaconf", *sys.stdlib_module_names}',
        '"omegaconf"}',
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "a file calls what another package imports from Python",
        "config/instantiate.py",
        'if module.partition(".")[0] in _NEVER:',
        "if False:",
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "a class that is no module is called as a model",
        "config/instantiate.py",
        'if "torch.nn.modules.module.Module" not in bases:',
        "if False:",
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "arguments in a safetensors file are called",
        "models/model_spec.py",
        'if file.suffix == ".safetensors" and (',
        "if False and (",
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "a file names a model to download",
        "models/model_spec.py",
        'and ":" in self.node["NAME"]',
        "and False",
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "texts of a file are interpolations",
        "config/instantiate.py",
        "content = escape(escape(",
        "content = dict(dict(",
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "an evaluation calls the dataset of a run without consent",
        "cli/evaluate/options.py",
        "    check_targets(of_file, Path(base.name), trust_code=options.trust_code)\n",
        "",
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "tags in a run's YAML make objects",
        "cli/runs.py",
        'getattr(yaml, "CSafeLoader", yaml.SafeLoader)',
        "yaml.UnsafeLoader",
        "tests/inference/test_trust.py tests/cli/compare",
    ),
    Mutant(
        "code in a file of weights runs",
        "models/weights.py",
        'path, map_location="cpu", weights_only=True',
        'path, map_location="cpu", weights_only=False',
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "code in a checkpoint runs",
        "training/checkpoint.py",
        'torch.load(path, map_location="cpu", weights_only=True',
        'torch.load(path, map_location="cpu", weights_only=False',
        "tests/inference/test_trust.py",
    ),
    Mutant(
        "code in a list of shards runs",
        "models/shards.py",
        "if is_known or (",
        "if True or (",
        "tests/training/test_sharded_checkpoint.py",
    ),
    Mutant(
        "shards outside a checkpoint's folder are read",
        "models/shards.py",
        "if path.resolve().parent != folder.resolve():",
        "if False:",
        "tests/training/test_sharded_checkpoint.py",
    ),
    Mutant(
        "an image above the limit is read",
        "data/image.py",
        "if num_pixels > decoding.max_pixels:",
        "if False:",
        "tests/data/test_image.py",
    ),
    Mutant(
        "an image file starts a program",
        "data/image.py",
        'frozenset(("EPS",))',
        "frozenset(())",
        "tests/data/test_image.py",
    ),
    Mutant(
        "a link to a folder above it is followed",
        "data/imagefolder.py",
        "if link.is_symlink() and ",
        "if False and ",
        "tests/data/test_imagefolder.py",
    ),
)


def main(words):
    """Try each mutant, and say which test kills it; then see that these tests pass without it."""
    words = words or [""]
    chosen = [mutant for mutant in MUTANTS if any(word in mutant.name for word in words)]
    killers = []
    for mutant in chosen:
        killers.append(first_failure(mutant.tests.split(), mutant))
        print(f"{mutant.name:56} {killers[-1] or 'SURVIVES'}", flush=True)
    killed = [*filter(None, killers)]
    print(f"{len(killed)} of {len(chosen)} mutants are killed")
    broken = first_failure({*killed}) if killed else None
    if broken:
        print(f"{broken} fails in a copy without a mistake too")
    return 1 if killed != killers or broken else 0


def first_failure(tests, mutant=None):
    """The first of the tests that fails in a copy, with the mistake; None if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "site", "build"))
        if mutant is not None:
            file = copy / "linnaeus" / mutant.file
            source = file.read_text()
            assert source.count(mutant.text) == 1, (
                f"{mutant.file} must hold this once: {mutant.text}"
            )
            file.write_text(source.replace(mutant.text, mutant.replacement))
        options = shlex.split("-x -q -m 'not slow' -p no:xdist --ignore=tests/integrations")
        command = [sys.executable, "-m", "pytest", *options, *tests]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
        return failed[1] if failed else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
