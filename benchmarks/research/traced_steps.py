"""Which ordinary training steps a prediction can follow, and how exact it is for them.

    python -m benchmarks.research.traced_steps                                    trace each step
    python -m tests.phantom python -m benchmarks.research.traced_steps --compare  and run it on a phantom GPU

Each step is one that people write: the loops of the public examples of torch, timm, transformers and TRL,
built anew with small models. With `--compare`, three steps at `SIZE` samples run through torch's own CUDA
allocator; the difference is that of the predicted from the real peak of reserved memory.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_map_only

from linnaeus import predict_memory
from linnaeus.autobatch.predict.trace import UntraceableError
from tests.phantom import is_on

SIZE = 24
LENGTH = 64
CLASSES = 10
Job = tuple[Any, Callable[[Any], object], Callable[[int], Any]]
"""State, step and make_batch."""
STEPS: dict[str, Callable[[], Job]] = {}


def named(name: str) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    def add(build: Callable[[], Job]) -> Callable[[], Job]:
        STEPS[name] = build
        return build

    return add


# --- images ---


def images(n: int, side: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, side, side), torch.arange(n) % CLASSES


def network(width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * width, CLASSES),
    )


def classifying(
    model: nn.Module | None = None,
    optimizer: Any = torch.optim.SGD,
    after: Any = None,
    loss: Any = F.cross_entropy,
    **options: Any,
) -> Job:
    """The loop of an image classifier; `after` sees outputs, targets and loss before backward."""
    model = network() if model is None else model
    chosen = optimizer(model.parameters(), **{"lr": 0.01, **options})

    def step(batch: Any) -> None:
        inputs, targets = batch
        outputs = model(inputs)
        value = loss(outputs, targets)
        if after is not None:
            changed = after(outputs, targets, value)
            value = value if changed is None else changed
        chosen.zero_grad()
        value.backward()
        chosen.step()

    return (model, chosen), step, images


class Meter:
    """A running mean, as in torch's ImageNet example."""

    def __init__(self) -> None:
        self.total = self.count = 0.0

    def update(self, value: float, n: int) -> None:
        self.total, self.count = self.total + value * n, self.count + n


def meters(outputs: Tensor, targets: Tensor, loss: Tensor) -> None:
    losses, top = Meter(), Meter()
    _, found = outputs.topk(5, 1, True, True)
    right = found.t().eq(targets.view(1, -1).expand(5, -1))
    losses.update(loss.item(), len(targets))
    top.update(
        right[:5].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / len(targets))[0].item(), 1
    )
    print(f"loss {losses.total / losses.count:.4f} top5 {top.total:.1f}", file=sys.stderr)


def formatted(outputs: Tensor, targets: Tensor, loss: Tensor) -> None:
    right = (outputs.argmax(1) == targets).sum().item()
    print(f"{loss:.3f} {100.0 * right / len(targets):.1f} %", file=sys.stderr)


def kept_on_host(outputs: Tensor, targets: Tensor, loss: Tensor) -> None:
    history = [loss.detach().cpu(), outputs.detach().argmax(1).cpu()]
    print(history[0].item(), history[1].tolist()[:1], file=sys.stderr)


def hard_examples(outputs: Tensor, targets: Tensor, loss: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none").topk(len(targets) // 2).values.mean()


def chosen_classes(outputs: Tensor, targets: Tensor, loss: Tensor) -> Tensor:
    chosen = targets != 3
    return F.cross_entropy(outputs[chosen], targets[chosen]) if chosen.any() else loss


def confident(outputs: Tensor, targets: Tensor, loss: Tensor) -> Tensor:
    return F.cross_entropy(
        outputs[outputs.max(1).values > 0.9], targets[outputs.max(1).values > 0.9]
    )


def stops_at_nan(outputs: Tensor, targets: Tensor, loss: Tensor) -> None:
    if not math.isfinite(loss.item()):
        raise SystemExit(f"loss is {loss}")


STEPS |= {
    "MNIST example, loss.item() printed": lambda: classifying(after=formatted),
    "ImageNet example with meters": lambda: classifying(
        after=meters, momentum=0.9, weight_decay=1e-4
    ),
    "losses and predictions kept on the host": lambda: classifying(after=kept_on_host),
    "stop at a loss that is not finite": lambda: classifying(after=stops_at_nan),
    "hard examples by top-k": lambda: classifying(after=hard_examples),
    "some classes by a mask of labels": lambda: classifying(after=chosen_classes),
    "confident examples by their scores": lambda: classifying(after=confident),
    "label smoothing, AdamW": lambda: classifying(
        optimizer=torch.optim.AdamW, loss=nn.CrossEntropyLoss(label_smoothing=0.1)
    ),
    "Adafactor of torch": lambda: classifying(optimizer=torch.optim.Adafactor),
    "Adagrad": lambda: classifying(optimizer=torch.optim.Adagrad),
    "ASGD": lambda: classifying(optimizer=torch.optim.ASGD),
    "RMSprop with momentum": lambda: classifying(optimizer=torch.optim.RMSprop, momentum=0.9),
    "channels last": lambda: classifying(network().to(memory_format=torch.channels_last)),
}


@named("timm ViT with mixup and drop path")
def _() -> Job:
    import timm
    from timm.loss import SoftTargetCrossEntropy

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, num_classes=CLASSES, drop_path_rate=0.1
    )
    optimizer = torch.optim.AdamW(model.parameters())
    loss = SoftTargetCrossEntropy()

    def step(batch: Any) -> None:
        inputs, targets = batch
        soft = F.one_hot(targets, CLASSES).float()
        inputs = 0.3 * inputs + 0.7 * inputs.flip(0)
        loss(model(inputs), 0.3 * soft + 0.7 * soft.flip(0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return (model, optimizer), step, images


@named("timm ConvNeXt with EMA")
def _() -> Job:
    import timm
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = timm.create_model("convnext_atto", num_classes=CLASSES)
    with torch.device("cpu"):  # its counter needs a value
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    state, inner, batches = classifying(model, torch.optim.AdamW)

    def step(batch: Any) -> None:
        inner(batch)
        average.update_parameters(model)

    return (*state, average), step, batches


@named("float16 with a scaler, unscaled and clipped")
def _() -> Job:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("meta" if device_of(model) == "meta" else "cuda")

    def step(batch: Any) -> None:
        inputs, targets = batch
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"{norm:.2f}", file=sys.stderr)

    return (model, optimizer, scaler), step, images


@named("accumulation over micro-batches")
def _() -> Job:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: Any) -> None:
        for _ in range(4):
            (F.cross_entropy(model(batch[0]), batch[1]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return (model, optimizer), step, images


@named("distillation from a frozen teacher")
def _() -> Job:
    teacher, model = network(128).requires_grad_(False).eval(), network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        with torch.no_grad():
            wanted = teacher(batch[0]).softmax(1)
        F.kl_div(model(batch[0]).log_softmax(1), wanted, reduction="batchmean").backward()
        optimizer.step()
        optimizer.zero_grad()

    return (model, teacher, optimizer), step, images


@named("DCGAN with two optimizers")
def _() -> Job:
    net = nn.Sequential(
        nn.ConvTranspose2d(100, 128, 8),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.ConvTranspose2d(128, 3, 8, 8),
    )
    critic = nn.Sequential(network(), nn.Linear(CLASSES, 1))
    first, second = torch.optim.Adam(net.parameters()), torch.optim.Adam(critic.parameters())

    def step(batch: Any) -> None:
        real, loss = batch[0], nn.BCEWithLogitsLoss()
        critic.zero_grad()
        loss(critic(real), torch.ones(len(real), 1, device=real.device)).backward()
        fake = net(torch.randn(len(real), 100, 1, 1, device=real.device))
        error = loss(critic(fake.detach()), torch.zeros(len(real), 1, device=real.device))
        error.backward()
        second.step()
        net.zero_grad()
        found = critic(fake)
        loss(found, torch.ones_like(found)).backward()
        first.step()
        print(f"{error.item():.4f} {found.mean().item():.4f}", file=sys.stderr)

    return (net, critic, first, second), step, images


@named("variational autoencoder")
def _() -> Job:
    encoder, decoder = (
        nn.Sequential(nn.Flatten(), nn.Linear(12288, 400), nn.ReLU(), nn.Linear(400, 40)),
        nn.Linear(20, 12288),
    )
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])

    def step(batch: Any) -> None:
        mean, spread = encoder(batch[0]).chunk(2, 1)
        found = decoder(mean + torch.randn_like(spread) * (0.5 * spread).exp())
        loss = F.mse_loss(found, batch[0].flatten(1), reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item() / len(batch[0]), file=sys.stderr)

    return (encoder, decoder, optimizer), step, images


@named("SimCLR's contrastive loss")
def _() -> Job:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        views = F.normalize(model(torch.cat([batch[0], batch[0].flip(3)])), dim=1)
        n = len(views)
        scores = (views @ views.t())[~torch.eye(n, dtype=torch.bool, device=views.device)].view(
            n, n - 1
        )
        wanted = (torch.arange(n, device=views.device) + n // 2 - 1).clamp(max=n - 2)
        optimizer.zero_grad()
        F.cross_entropy(scores / 0.1, wanted).backward()
        optimizer.step()

    return (model, optimizer), step, images


@named("segmentation with ignored pixels")
def _() -> Job:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 21, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(batch: Any) -> None:
        inputs, labels = batch
        outputs = model(inputs).permute(0, 2, 3, 1)
        kept = labels != 255
        optimizer.zero_grad()
        F.cross_entropy(outputs[kept], labels[kept]).backward()
        optimizer.step()

    def make(n: int) -> Any:
        labels = torch.zeros(n, 64, 64, dtype=torch.long)
        labels[:, :8] = 255
        return torch.randn(n, 3, 64, 64), labels

    return (model, optimizer), step, make


@named("hooks that log activations and gradients")
def _() -> Job:
    model, seen = network(), dict[str, float]()
    model[3].register_forward_hook(
        lambda layer, given, out: seen.update(out=out.detach().abs().mean().item())
    )
    model[3].register_full_backward_hook(
        lambda layer, given, out: seen.update(grad=out[0].norm().item())
    )
    model[3].weight.register_hook(lambda grad: seen.update(norm=grad.norm().item()))
    return classifying(model)


@named("optimizer steps in backward")
def _() -> Job:
    model = network()
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()
    }

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return (
        (model, *optimizers.values()),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]).backward(),
        images,
    )


@named("LBFGS with a closure")
def _() -> Job:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12288, 10))
    optimizer = torch.optim.LBFGS(model.parameters())

    def step(batch: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)

    return (model, optimizer), step, images


@named("accuracy by torchmetrics")
def _() -> Job:
    from torchmetrics.classification import MulticlassAccuracy

    model = network()
    metric = MulticlassAccuracy(CLASSES, validate_args=False).to(device_of(model))
    state, step, batches = classifying(
        model, after=lambda out, targets, loss: metric.update(out, targets)
    )
    return (*state, metric), step, batches


# --- sequences ---


class WordModel(nn.Module):
    """The LSTM of torch's word language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = (
            nn.Embedding(5000, 200),
            nn.LSTM(200, 200, 2, dropout=0.2),
            nn.Linear(200, 5000),
        )

    def forward(self, ids: Tensor, hidden: Any = None) -> Any:
        out, hidden = self.lstm(self.words(ids), hidden)
        return self.head(out), hidden


def words(n: int) -> Tensor:
    return torch.arange(n * LENGTH).view(LENGTH, n) % 5000


@named("word language model, LSTM with clipping")
def _() -> Job:
    model = WordModel()

    def step(ids: Tensor) -> None:
        model.zero_grad()
        out, _ = model(ids)
        loss = F.cross_entropy(out.view(-1, 5000), ids.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-20)
        print(math.exp(loss.item()), file=sys.stderr)

    return (model,), step, words


@named("packed sequences by their lengths")
def _() -> Job:
    model = WordModel()
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: Any) -> None:
        ids, lengths = batch
        longest = int(lengths.max())
        out, _ = model(ids[:longest])
        mask = torch.arange(longest, device=ids.device)[:, None] < lengths
        optimizer.zero_grad()
        F.cross_entropy(out[mask], ids[:longest][mask]).backward()
        optimizer.step()

    return (model, optimizer), step, lambda n: (words(n), torch.arange(n) % 8 + LENGTH - 8)


@named("nn.Transformer with a padding mask")
def _() -> Job:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    body, first, head = (
        nn.TransformerEncoder(layer, 2),
        nn.Embedding(5000, 128),
        nn.Linear(128, 5000),
    )
    model = nn.ModuleList([body, first, head])
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        ids, padding = batch
        out = head(body(first(ids), src_key_padding_mask=padding))
        optimizer.zero_grad()
        F.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()

    def make(n: int) -> Any:
        ids = words(n).t().contiguous()
        return ids, ids % 100 == 99

    return (model, optimizer), step, make


@named("CTC of speech")
def _() -> Job:
    model = nn.Sequential(nn.Linear(80, 256), nn.ReLU(), nn.Linear(256, 30))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        sounds, texts = batch
        log = model(sounds).log_softmax(2).transpose(0, 1)
        sizes = torch.full((len(sounds),), LENGTH, dtype=torch.long)
        F.ctc_loss(log, texts, sizes, torch.full_like(sizes, 20)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return (
        (model, optimizer),
        step,
        lambda n: (torch.randn(n, LENGTH, 80), torch.ones(n, 20, dtype=torch.long)),
    )


@named("experts chosen by scores, in a loop")
def _() -> Job:
    experts = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
    router = nn.Linear(128, 4)
    model = nn.ModuleList([experts, router])
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> None:
        weights, places = router(x).softmax(1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            rows, which = torch.where(places == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, which, None])
        optimizer.zero_grad()
        out.sum().backward()
        optimizer.step()

    return (model, optimizer), step, lambda n: torch.randn(64 * n, 128)


# --- transformers, peft and TRL ---


def hub(name: str, head: str = "ForCausalLM", **settings: Any) -> nn.Module:
    """A model of transformers by its type, with a small configuration."""
    import transformers

    small = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 5000,
        "n_embd": 128,
        "n_layer": 2,
        "n_head": 4,
        "d_model": 128,
        "d_ff": 256,
        "d_kv": 32,
        "num_layers": 2,
        "num_heads": 4,
        "ffn_dim": 256,
        "word_embed_proj_dim": 128,
        "n_layers": 2,
        "n_heads": 4,
        "dim": 128,
        "hidden_dim": 256,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    kind = type(transformers.AutoConfig.for_model(name))
    known = kind().to_dict()
    config = kind(**{key: value for key, value in small.items() if key in known} | settings)
    model: nn.Module = getattr(transformers, f"AutoModel{head}").from_config(config)
    return model.train()


def texts(n: int, mask: bool = True, **more: Any) -> dict[str, Tensor]:
    ids = torch.arange(n * LENGTH).view(n, LENGTH) % 5000
    batch = {"input_ids": ids, "labels": ids.clone(), **more}
    if mask:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][: n // 2, -8:] = 0
        batch["labels"][: n // 2, -8:] = -100
    return batch


def tuned(
    model: nn.Module, batches: Any = texts, optimizer: Any = torch.optim.AdamW, **options: Any
) -> Job:
    chosen = optimizer(
        [p for p in model.parameters() if p.requires_grad], **{"lr": 1e-3, **options}
    )

    def step(batch: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
        chosen.zero_grad()
        print({"loss": round(loss.item(), 4)}, file=sys.stderr)

    return (model, chosen), step, batches


def checkpointed(model: Any) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model  # type: ignore[no-any-return]


def adafactor(parameters: Any, **options: Any) -> Any:
    from transformers import Adafactor

    return Adafactor(parameters, relative_step=False, **options)


STEPS |= {
    f"{name} with an attention mask": lambda name=name: tuned(hub(name))
    for name in (
        "llama",
        "qwen3",
        "mistral",
        "gemma2",
        "gpt2",
        "gpt_neox",
        "opt",
        "mixtral",
        "bloom",
        "phi",
    )
} | {
    "llama without a mask": lambda: tuned(hub("llama"), unmasked),
    "llama, use_cache off, no mask": lambda: tuned(hub("llama", use_cache=False), unmasked),
    "gpt2 with checkpointing": lambda: tuned(checkpointed(hub("gpt2"))),
    "llama with checkpointing, no mask": lambda: tuned(checkpointed(hub("llama")), unmasked),
    "bert, masked words": lambda: tuned(hub("bert", "ForMaskedLM")),
    "roberta, masked words": lambda: tuned(hub("roberta", "ForMaskedLM", pad_token_id=1)),
    "distilbert, classification": lambda: tuned(
        hub("distilbert", "ForSequenceClassification"), labelled
    ),
    "t5 with an attention mask": lambda: tuned(hub("t5", "ForSeq2SeqLM", decoder_start_token_id=0)),
    "bart with an attention mask": lambda: tuned(hub("bart", "ForSeq2SeqLM")),
    "opt, Adafactor of transformers": lambda: tuned(hub("opt"), optimizer=adafactor),
}


def unmasked(n: int) -> dict[str, Tensor]:
    return texts(n, mask=False)


def labelled(n: int) -> dict[str, Tensor]:
    return {**texts(n), "labels": torch.arange(n) % 2}


@named("clip's contrastive loss")
def _() -> Job:
    from transformers import CLIPConfig, CLIPModel

    small = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = CLIPModel(
        CLIPConfig(
            text_config={**small, "vocab_size": 5000}, vision_config={**small, "image_size": 64}
        )
    )

    def make(n: int) -> Any:
        batch = texts(n)
        del batch["labels"]
        return {**batch, "pixel_values": torch.randn(n, 3, 64, 64), "return_loss": True}

    return tuned(model, make)


@named("llama with LoRA and checkpointing")
def _() -> Job:
    import peft

    model = checkpointed(hub("llama").to(torch.bfloat16))
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=8, task_type="CAUSAL_LM", lora_dropout=0.1)
    )
    model.enable_input_require_grads()
    return tuned(model)


def log_probabilities(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of each sequence, of the words that count, as DPO sums them."""
    logits, labels = (
        model(**{**batch, "labels": None}).logits[:, :-1],
        batch["labels"][:, 1:].clone(),
    )
    kept = labels != -100
    labels[~kept] = 0
    return (logits.log_softmax(-1).gather(2, labels[..., None]).squeeze(2) * kept).sum(-1)


@named("preferences (DPO) with a reference model")
def _() -> Job:
    model, reference = hub("llama"), hub("llama").requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        found = log_probabilities(model, batch)
        with torch.no_grad():
            before = log_probabilities(reference, batch)
        good, bad = (found - before).chunk(2)
        loss = -F.logsigmoid(0.1 * (good - bad)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print((good > bad).float().mean().item(), file=sys.stderr)

    return (model, reference, optimizer), step, lambda n: texts(2 * n)


@named("supervised fine-tuning of answers only")
def _() -> Job:
    model = hub("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(batch: Any) -> None:
        answers = batch["labels"] != -100
        num = answers.sum()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = (
            F.cross_entropy(
                logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum"
            )
            / num
        )
        found = logits.argmax(-1)[answers]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(
            (found == batch["labels"][answers]).float().mean().item(), num.item(), file=sys.stderr
        )

    return (model, optimizer), step, texts


# --- the table ---


def device_of(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def predicted(name: str) -> tuple[int, float]:
    """Reserved bytes of a step with `SIZE` samples, and seconds of the prediction."""
    with torch.device("meta"):
        state, step, make = STEPS[name]()
    begin = time.perf_counter()
    with torch.device("cpu"):
        found = predict_memory(step, make, state=state)
    return found.reserved_bytes(SIZE), time.perf_counter() - begin


def measured(name: str) -> int:
    """Reserved bytes of three real steps, in a process that has run nothing else."""
    state, step, make = STEPS[name]()
    for part in state:
        if isinstance(part, nn.Module):
            part.cuda()
        elif isinstance(part, torch.optim.Optimizer):
            part.load_state_dict(part.state_dict())  # its state goes where its parameters are
    for _ in range(3):
        step(tree_map_only(Tensor, lambda tensor: tensor.cuda(), make(SIZE)))
    del state
    return torch.cuda.max_memory_reserved()


def quietly(work: Callable[[str], Any], name: str) -> Any:
    """What a step prints goes nowhere."""
    with contextlib.redirect_stderr(io.StringIO()):
        return work(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compare", action="store_true", help="run each step, on a CUDA device or a phantom one"
    )
    parser.add_argument("--only", default="", help="steps whose names have this part")
    parser.add_argument("--run", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(measured(options.run))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    num_traced = 0
    chosen = [name for name in STEPS if options.only in name]
    for name in chosen:
        try:
            num_bytes, seconds = quietly(predicted, name)
            num_traced += 1
            text = f"{num_bytes / 2**20:8.0f} MiB {seconds:6.1f} s"
            if options.compare:
                values = ["-m", "tests.phantom.values"] if is_on() else ["-m"]
                command = [
                    sys.executable,
                    *values,
                    "benchmarks.research.traced_steps",
                    "--run",
                    name,
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    text += f" failed: {[*done.stderr.splitlines(), done.returncode][-1]}"
                else:
                    real = int(done.stdout)
                    text += f" {real / 2**20:8.0f} MiB measured {num_bytes / real - 1:+7.1%}"
        except UntraceableError as error:
            text = f" refused: {error}"
        except Exception as error:
            text = f" {type(error).__name__}: {str(error).splitlines()[0][:150]}"
        print(f"{name:44}{text}", flush=True)
    print(f"{num_traced} of {len(chosen)} steps traced")


if __name__ == "__main__":
    main()
