"""Compare predictions with peaks that others have measured, and with what others have predicted for them.

    python benchmarks/research/prediction_truth.py [--gpumemnet FOLDER] [--source NAME ...] \\
        [--cache FILE] [--rows]

Rows lie in `benchmarks/data/truth/`; its README names their sources. GPUMemNet's tables state no licence:
FOLDER is a clone of https://github.com/itu-rad/GPUMemNet. Without it, these sources are left out.
transformers, torchvision, timm and peft are needed; no weights are downloaded.

A row is in the part `fit` if the SHA-256 of "MODEL BATCH_SIZE" begins with an even byte, else in `held`; of
timm, if that of MODEL does. What the device holds beside the allocator is one constant for each source:
the median of measured less predicted over `fit`, at least 0. Bytes of torch's allocator get no constant.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import logging
import random
import re
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import prediction_accuracy
import torch
from prediction_accuracy import BASE_BYTES, LOADED_BATCHES, is_fitted, quantile
from search_replay import CURVES, read_curves
from torch import Tensor, nn
from torch.nn import functional

from linnaeus.autobatch.predict.allocator import MIB
from linnaeus.autobatch.predict.prediction import Prediction, predict
from linnaeus.autobatch.predict.recorder import CONV_WORKSPACE, Event

TABLES = Path(__file__).parents[1] / "data" / "truth"
COVER = 1.15
CONTEXT_MIB = 400
"""Of a GPU that the allocator cannot have. It matters only where a run nearly fills the GPU."""

MODELS = json.loads((TABLES / "models.json").read_text())
"""Library or family of a model, its name or task there, and options."""

GENERATED = {
    ("gpumemnet-mlp", "input"): (
        "Datasets/MLP/mlp_data_step2.csv",
        r"([a-z]+):(.+?)(?=_[a-z]+:|\.out$)",
    ),
    ("gpumemnet-transformers", "seq_length"): (
        "Assets/Estimator_Transformer/03-trans_for_trans/trans_data.csv",
        r"_?([a-z_]+):(\d+(?:\.\d+)?)",
    ),
}
IGNORED = ("batch", "batch_size", "num_samples", "dropout_rate")
PAPER = {
    "gpumemnet-paper": "Results_plotter_for_paper/data.csv",
    "gpumemnet-paper2": "Assets/Results_plotter_for_paper/data.csv",
}
GPUMEMNET_CARD_MIB = 40_507

ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "gelu": nn.GELU,
    "identity": nn.Identity,
}


@dataclass(frozen=True)
class Job:
    """A step that was measured; README.md beside the tables explains the fields."""

    source: str
    model: str
    size: int = 0
    optimizer: str = "Adam"
    zero_grad: str = "forward"
    dtype: str = "float32"
    autocast: str = ""
    lora: str = ""
    transformers: str = ""


@dataclass(frozen=True)
class Row:
    """A measured run of a job: at what batch size, on what GPU (0: not known), and what others predicted."""

    job: Job
    batch_size: int
    measured: str
    measured_mib: float
    card_mib: int = 0
    peers: dict[str, float] = field(default_factory=dict, hash=False)

    @property
    def is_fitted(self) -> bool:
        """Whether the row is in the part `fit`."""
        return hashlib.sha256(f"{self.job.model} {self.batch_size}".encode()).digest()[0] % 2 == 0


class Built(NamedTuple):
    """What `predict` takes."""

    state: tuple[Any, ...]
    step: Callable[[Any], None]
    make_batch: Callable[[int], Any]


# --- rows ---


def is_image(model: str) -> bool:
    return model in MODELS and MODELS[model][0] in ("torchvision", "timm")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one of our tables."""
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            settings = {key: line[key] for key in Job.__dataclass_fields__ if line.get(key)}
            job = Job(**{**settings, "size": int(line["size"])})  # type: ignore[arg-type]
            peers = dict(part.split("=") for part in line["peers"].split(";") if part)
            yield Row(
                job,
                int(line["batch_size"]),
                line["measured"],
                float(line["measured_mib"]),
                int(line["card_mib"] or 0),
                {name: float(mib) for name, mib in peers.items()},
            )


def read_gpumemnet(folder: Path) -> Iterator[Row]:
    """The rows of GPUMemNet's MLPs, of its transformers and of its paper, of those files that are there."""
    csv.field_size_limit(1 << 30)
    for (source, width), (name, pattern) in GENERATED.items():
        for line in _lines(folder / name):
            parts = dict(re.findall(pattern, line["Filename"]))
            if line.get("Status", "SUCCESSFUL") == "SUCCESSFUL":
                named = (f"{key}={value}" for key, value in parts.items() if key not in IGNORED)
                job = Job(source, ":".join(named), int(parts[width]))
                mib = float(line["Max GPU Memory (MiB)"])
                yield Row(job, int(line["Batch Size"]), "device", mib, GPUMEMNET_CARD_MIB)
    for source, name in PAPER.items():
        model = ""
        for line in _lines(folder / name):
            model = line[""] or model
            size = (299 if model == "inception" else 224) if is_image(model) else 512
            job = Job(source, model, size, *(() if is_image(model) else ("AdamW", "end")))
            peers = {
                key.strip(): float(mib) for key, mib in list(line.items())[3:] if mib.strip("- ")
            }
            mib = float(line["Actual GPU memory"])
            yield Row(job, int(line["batch_size"]), "device", mib, GPUMEMNET_CARD_MIB, peers)


def _lines(path: Path) -> Iterator[dict[str, str]]:
    if path.is_file():
        with path.open(newline="") as file:
            yield from csv.DictReader(file)


# --- steps ---


def optimizer_of(job: Job, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, made as on a machine with a GPU: Adagrad makes its counters at once, on the host."""
    with torch.device("cpu"):
        return getattr(torch.optim, job.optimizer)(list(parameters), lr=1e-3)  # type: ignore[no-any-return]


def update(job: Job, optimizer: torch.optim.Optimizer, forward: Callable[[], Tensor]) -> None:
    """Forward, backward and update, with the gradients cleared where the source did."""
    if job.zero_grad == "forward":
        optimizer.zero_grad()
    loss = forward()
    if job.zero_grad == "backward":
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if job.zero_grad == "end":
        optimizer.zero_grad()


def classifier(
    job: Job, model: nn.Module, make_inputs: Callable[[int], Tensor], num_classes: int = 2
) -> Built:
    """A step with cross entropy, binary for one class; of a second output too, where a model has one."""
    optimizer = optimizer_of(job, model.parameters())
    is_binary = num_classes == 1
    loss = functional.binary_cross_entropy_with_logits if is_binary else functional.cross_entropy

    def step(batch: tuple[Tensor, Tensor]) -> None:
        def forward() -> Tensor:
            outputs = model(batch[0])
            if isinstance(outputs, Tensor):
                return loss(outputs, batch[1])
            return loss(outputs[0], batch[1]) + 0.4 * loss(outputs[1], batch[1])

        update(job, optimizer, forward)

    def make_batch(n: int) -> tuple[Tensor, Tensor]:
        return make_inputs(n), torch.zeros(n, 1) if is_binary else torch.zeros(n, dtype=torch.long)

    return Built((model, optimizer), step, make_batch)


def image_model(job: Job) -> Built:
    library, name, options = MODELS[job.model]
    if library == "timm":
        import timm

        model = timm.create_model(name, **options)
    else:
        import torchvision

        # RegNet's constructor reads values of a tensor
        with torch.device("cpu" if job.model.startswith("RegNet") else "meta"):
            model = torchvision.models.get_model(name, weights=None, **options)
    return classifier(job, model.train(), lambda n: torch.empty(n, 3, job.size, job.size))


def mlp(job: Job) -> Built:
    """GPUMemNet's generator of MLPs: widths shrink by halves, by equal steps, or not at all."""
    parts = dict(part.split("=") for part in job.model.split(":"))
    width, num_classes, depth = job.size, int(parts["output"]), int(parts["depth"])
    step_down, layers = (width - num_classes) // depth, list[nn.Module]()
    for _ in range(depth + (parts["arch"] == "bottleneck")):
        previous = width
        if parts["arch"] != "uniform":
            width = max(
                width - step_down if parts["arch"] == "gradual" else width // 2, num_classes
            )
        layers.append(nn.Linear(previous, width))
        if parts["batchnorm"] == "True":
            layers.append(nn.BatchNorm1d(width))
        layers.append(ACTIVATIONS[parts["act"]]())
        if parts["dropout"] == "True":
            layers.append(nn.Dropout(0.1))
    layers += [
        nn.Linear(width, num_classes),
        nn.Sigmoid() if num_classes == 1 else nn.Softmax(dim=1),
    ]
    return classifier(job, nn.Sequential(*layers), lambda n: torch.empty(n, job.size), num_classes)


class EncoderClassifier(nn.Module):
    """GPUMemNet's transformer: embedding, learned positions, encoder, mean over the tokens, linear head."""

    def __init__(self, num_tokens: int, parts: dict[str, str]) -> None:
        super().__init__()
        width = int(parts["embedding_size"])
        self.embedding = nn.Embedding(int(parts["input_size"]), width)
        self.positions = nn.Parameter(torch.zeros(1, num_tokens, width))
        layer = nn.TransformerEncoderLayer(
            width, int(parts["num_heads"]), int(parts["ff_hidden_size"]), 0.2, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, int(parts["num_layers"]))
        self.head = nn.Linear(width, int(parts["num_classes"]))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(
            self.encoder(self.embedding(tokens) + self.positions).mean(dim=1)
        )
        return logits


def encoder(job: Job) -> Built:
    model = EncoderClassifier(job.size, dict(part.split("=") for part in job.model.split(":")))
    return classifier(job, model, lambda n: torch.zeros(n, job.size, dtype=torch.long))


def shifted_loss(upcasts: bool) -> Callable[..., Tensor]:
    """The loss of transformers before 4.50, which copied the logits without the last token."""

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        logits = logits.float() if upcasts else logits
        kept = logits[..., :-1, :].contiguous()
        return functional.cross_entropy(kept.view(-1, vocab_size), labels[..., 1:].reshape(-1))

    return loss


def language_model(job: Job) -> Built:
    """xMem's loop of padded text, trl's of packed text (fms), or GPUMemNet's."""
    import transformers

    family, kind, settings = MODELS[job.model]
    config = getattr(transformers, f"{family}Config")(**settings, use_cache=False)
    # Without fused attention before transformers 5, where the runs were measured
    attention = "eager" if family in ("T5", "GPTNeo", "XLNet") else "sdpa"
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(
        config, attn_implementation=attention
    )
    base = model.to(getattr(torch, job.dtype))
    is_fms, is_padded = job.source == "fms", job.source.startswith("xmem")
    keeps_outputs = is_padded or family == "GPTBigCode"
    if (
        family == "Mistral" and job.transformers < "4.40"
    ):  # each layer had a table of cosines and of sines
        width = config.hidden_size // config.num_attention_heads
        shape = 2, config.num_hidden_layers, config.max_position_embeddings, width
        model.register_buffer("rotary", torch.empty(shape, dtype=base.dtype))
    if job.lora:
        import peft

        rank, targets = re.fullmatch(r"r=(\d+) ?(.*)", job.lora).groups()  # type: ignore[union-attr]
        adapter = peft.LoraConfig(
            r=int(rank),
            lora_dropout=0.1,
            task_type="CAUSAL_LM",
            target_modules=targets.split() or None,
        )
        model = peft.get_peft_model(model, adapter)
    if is_fms:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if job.lora:
            model.enable_input_require_grads()
    if kind == "CausalLM" and (is_fms or is_padded):
        makes_float32 = (
            is_fms and family != "GPTBigCode" and not job.transformers.startswith("4.48")
        )
        if makes_float32:  # the model then did; later the loss does
            base.lm_head.register_forward_hook(lambda module, inputs, output: output.float())
        base.loss_function = shifted_loss(upcasts=family != "GPTBigCode" and not makes_float32)
    model.train()
    optimizer = optimizer_of(job, (each for each in model.parameters() if each.requires_grad))
    kept: dict[str, Any] = {}
    if is_fms:
        optimizer.register_step_pre_hook(lambda *_: kept.clear())

    def make_batch(n: int) -> dict[str, Tensor]:
        tokens = torch.zeros(n, job.size, dtype=torch.long)
        labels = (
            torch.zeros(n, dtype=torch.long) if kind == "SequenceClassification" else tokens.clone()
        )
        masks = {"attention_mask": torch.ones_like(tokens)} if is_padded else {}
        return {"input_ids": tokens, "labels": labels, **masks}

    def step(batch: dict[str, Tensor]) -> None:
        def forward() -> Tensor:
            dtype = getattr(torch, job.autocast or "bfloat16")
            with torch.autocast("cuda", dtype, enabled=bool(job.autocast)):
                outputs = model(**batch)
            # xMem's loop keeps them until the next forward pass ends; accelerate makes autocast's float32
            if keeps_outputs:
                kept["outputs"] = outputs.logits.float() if job.autocast else outputs
            loss: Tensor = outputs.loss
            return loss

        update(job, optimizer, forward)

    return Built((model, optimizer), step, make_batch)


def built(job: Job) -> Built:
    """The step of a job, on `meta`."""
    builders = {"gpumemnet-mlp": mlp, "gpumemnet-transformers": encoder}
    with torch.device("meta"):
        return builders.get(job.source, image_model if is_image(job.model) else language_model)(job)


# --- predictions ---


def peak_of_tensors(events: Iterable[Event], with_workspaces: bool) -> int:
    """The most bytes of storages that exist at once, in blocks of 512: what torch counts as allocated."""
    sizes: dict[int, int] = {}
    live = peak = 0
    for kind, storage, num_bytes, label, _ in events:
        if kind == "allocate" and (with_workspaces or label not in ("cublas", CONV_WORKSPACE)):
            sizes[storage] = -(-num_bytes // 512) * 512
            live += sizes[storage]
            peak = max(peak, live)
        elif kind == "release":
            live -= sizes.pop(storage, 0)
    return peak


def figures_of(job: Job, points: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """MiB of each batch size and card by method, `BATCH CARD`; seconds of the prediction; or the problem."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        start, rest_bytes = time.process_time(), dict.fromkeys((n for n, _ in points), 0)
        if job.source == "timm":
            num_elements, traces = prediction_accuracy.traces_of(job.model)
            rest_bytes = {n: int(LOADED_BATCHES * 4 * n * num_elements) for n in rest_bytes}
            prediction = Prediction.of(*traces, base_bytes=BASE_BYTES)
        else:
            made = built(job)
            prediction = predict(made.step, made.make_batch, state=made.state, base_bytes=0)
        prediction.peak_bytes(points[0][0])
        seconds, found = time.process_time() - start, {}
        for n, card_mib in points:
            events = list(prediction._events(n))
            rest = rest_bytes[n]
            reserved = prediction.peak_bytes(n) + rest
            limit = (card_mib - (0 if job.source == "timm" else CONTEXT_MIB)) * MIB - rest
            sizes = {
                "prediction": reserved,
                "with the card": (prediction.peak_within(n, limit) or reserved - rest) + rest,
                "allocated": peak_of_tensors(events, True),
                "live tensors": peak_of_tensors(events, False),
            }
            found[f"{n} {card_mib}"] = {name: size / MIB for name, size in sizes.items()}
    except Exception as error:  # the table says which rows have no prediction, and why
        return {"problem": f"{type(error).__name__}: {error}".splitlines()[0][:150]}
    return {"seconds": seconds, "points": found}


def all_figures(
    rows: Sequence[Row], cache: Path | None, num_jobs: int
) -> dict[Job, dict[str, Any]]:
    """The figures of each job; those in the cache, if they are of the same code, are not computed again."""
    code = sorted(Path(sys.modules[Prediction.__module__].__file__ or "").parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()[:16]
    points: dict[Job, set[tuple[int, int]]] = defaultdict(set)
    for row in rows:
        points[row.job].add((row.batch_size, row.card_mib))
    keys = {json.dumps([digest, asdict(job), sorted(points[job])]): job for job in points}
    lines = cache.read_text().splitlines() if cache is not None and cache.is_file() else []
    known = {key: value for key, value in map(json.loads, lines) if key in keys}
    missing = [key for key in keys if key not in known]
    with ProcessPoolExecutor(num_jobs) as pool:
        jobs = [keys[key] for key in missing]
        found = pool.map(figures_of, jobs, [sorted(points[job]) for job in jobs])
        for number, (key, value) in enumerate(zip(missing, found, strict=True), 1):
            known[key] = value
            print(
                f"{number} of {len(missing)}: {keys[key].source} {keys[key].model}", file=sys.stderr
            )
            if cache is not None:
                with cache.open("a") as file:
                    print(json.dumps([key, value]), file=file)
    return {job: known[key] for key, job in keys.items()}


# --- the table ---


def line(
    name: str, part: str, pairs: Sequence[tuple[float, float]], base_mib: float | None = None
) -> str:
    """One method on one part: its predicted and measured MiB."""
    errors = [predicted / measured - 1 for predicted, measured in pairs]
    absolute = [abs(error) for error in errors]
    covered = sum(measured < COVER * predicted for predicted, measured in pairs) / len(pairs)
    figures = (
        statistics.median(absolute),
        quantile(absolute, 0.9),
        statistics.median(errors),
        covered,
    )
    percents = "".join(f"{100 * figure:>9.1f}" for figure in figures)
    base = "" if base_mib is None else f"{base_mib:>9.0f}"
    return f"  {name:<26}{part:<6}{len(pairs):>5}{percents}{base}"


def report(
    rows: Sequence[Row], figures: dict[Job, dict[str, Any]], shows_rows: bool
) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.job.source, row.measured].append(row)
    for (source, measured), members in sorted(groups.items()):
        found = {row: each for row in members if (each := figures[row.job]).get("points")}
        columns = "".join(f"{name:>9}" for name in ("median", "p90", "bias", "<1.15", "base"))
        yield f"\n{f'{source}, {measured}':<34}{'rows':>5}{columns}"
        yield from table(found, measured, shows_rows)
        seconds = [figures[job].get("seconds", 0.0) for job in {row.job for row in found}]
        if seconds:
            yield f"  seconds of a prediction: {statistics.median(seconds):.1f}, {max(seconds):.1f} at most"
        problems = defaultdict(list)
        for row in set(members) - set(found):
            problems[figures[row.job].get("problem", "")].append(row)
        for problem, those in problems.items():
            yield f"  no prediction of {len(those)}, such as {those[0].job.model}: {problem}"


def table(found: dict[Row, dict[str, Any]], measured: str, shows_rows: bool) -> Iterator[str]:
    """The methods of one source, each with its constant, and then what others predicted."""

    def mib(row: Row, method: str) -> float:
        at: dict[str, float] = found[row]["points"][f"{row.batch_size} {row.card_mib}"]
        if method == "prediction" and measured == "allocated":
            return at["allocated"]
        return at.get(method, 0.0) or at["prediction"]

    parts = {
        part: [row for row in found if row.is_fitted == (part == "fit")] for part in ("fit", "held")
    }
    if (
        measured == "run"
    ):  # of timm: its constants are in the prediction, its parts those of the models
        parts, methods = {"held": list(found)}, ["prediction", "with the card"]
    elif measured == "allocated":
        methods = ["prediction", "live tensors"]
    else:
        methods = ["prediction", "with the card", "live tensors"]
    base_mib = 0.0
    for method in methods:
        if measured == "device" and parts["fit"]:
            rest = statistics.median(row.measured_mib - mib(row, method) for row in parts["fit"])
            base_mib = max(0.0, rest)
        for part, those in parts.items():
            pairs = [(mib(row, method) + base_mib, row.measured_mib) for row in those]
            if pairs:
                yield line(method, part, pairs, base_mib)
        if shows_rows and method == "with the card":
            for row in sorted(found, key=lambda row: (row.job.model, row.batch_size)):
                error = (mib(row, method) + base_mib) / row.measured_mib - 1
                yield (
                    f"    {row.job.model[:40]:<41}{row.batch_size:>5} {row.job.optimizer:<9}"
                    f"{row.measured_mib:>8.0f}{100 * error:>+7.1f} %  {'fit' if row.is_fitted else 'held'}"
                )
    for peer in sorted({name for row in found for name in row.peers}):
        for part, those in parts.items():
            pairs = [(row.peers[peer], row.measured_mib) for row in those if peer in row.peers]
            if pairs:
                yield line(f"{peer} (published)", part, pairs)


LEGEND = """\
median, p90: of the absolute relative error, percent. bias: median of the relative error, percent
<1.15: percent of the rows that need less than 1.15 times the prediction. base: MiB, fitted on `fit`
with the card: replayed with the card as the limit. live tensors: what tensors alone add up to
published: what the authors of the table, or of other tools in it, predicted for the same rows"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpumemnet", type=Path, help="clone of GPUMemNet's repository")
    parser.add_argument("--source", action="append", help="only this source; may be given again")
    parser.add_argument(
        "--limit", type=int, default=300, help="most rows of a source, drawn at random"
    )
    parser.add_argument(
        "--models", type=int, default=120, help="timm models of the part `held`, at random"
    )
    parser.add_argument("--seed", type=int, default=1, help="of both draws")
    parser.add_argument(
        "--cache", type=Path, help="file of predictions, reused until the predicting code changes"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rows", action="store_true", help="print each row with its error")
    options = parser.parse_args(arguments)
    rows = [row for path in sorted(TABLES.glob("*.csv")) for row in read_rows(path)]
    if options.gpumemnet is None:
        print(
            "GPUMemNet is left out: name a clone of its repository with --gpumemnet",
            file=sys.stderr,
        )
    else:
        rows += read_gpumemnet(options.gpumemnet)
    curves = {name: runs for name, runs in read_curves(CURVES).items() if not is_fitted(name)}
    for name in sorted(
        random.Random(options.seed).sample(sorted(curves), min(options.models, len(curves)))
    ):
        rows += [
            Row(Job("timm", name), n, "run", mib, GPUMEMNET_CARD_MIB) for n, mib in curves[name]
        ]
    sources = sorted({row.job.source for row in rows})
    if not set(options.source or ()) <= set(sources):
        print(
            f"--source {' '.join(options.source)}: the sources are {' '.join(sources)}",
            file=sys.stderr,
        )
        return 2
    drawn: list[Row] = []
    for source in options.source or sources:
        those = [row for row in rows if row.job.source == source]
        is_whole = source == "timm" or len(those) <= options.limit
        drawn += those if is_whole else random.Random(options.seed).sample(those, options.limit)
    figures = all_figures(drawn, options.cache, options.jobs)
    print(*report(drawn, figures, options.rows), "", LEGEND, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
