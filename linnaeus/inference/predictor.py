"""Runs a trained model over any number of images: loaded ahead in threads, in batches that fit."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linnaeus.autobatch.api import auto_find_batch_size
from linnaeus.autobatch.memory.oom import is_out_of_memory
from linnaeus.data.batch import Batch
from linnaeus.data.loader import num_cores
from linnaeus.inference.images import ImageLike
from linnaeus.inference.paths import Unreadable
from linnaeus.inference.prediction import Prediction, log_probabilities_of, predictions_of
from linnaeus.models.hierarchical import HierarchicalClassifier
from linnaeus.runtime.errors import ConfigError, DataError, OutOfMemoryError, first_line
from linnaeus.runtime.words import several
from linnaeus.training.losses import gives_log_probabilities

if TYPE_CHECKING:
    from linnaeus.inference.trained import TrainedRun

MAX_UNSEARCHED = 32
"""Up to this many images form one batch without a search, which would take longer than they do."""
MAX_BATCH_SIZE = 512
"""Largest batch that is searched for on an accelerator; more samples make it no faster."""
MAX_BATCH_SIZE_CPU = 64
"""Largest batch that is searched for on the CPU, where a trial takes long."""

logger = logging.getLogger("linnaeus.predict")

_Inputs = tuple[Tensor, ...]
_Loaded = tuple[str | int, _Inputs | Unreadable]


@dataclass
class Predictor:
    """Predicts images, in order, with one run or with the mean probabilities of several.

    Attributes:
        runs: with equal taxonomies, on one device.
        top: number of classes of each level; None is 5, or all where images have several labels.
        path, threshold: see `predictions_of`.
        tta: `flip` averages the probabilities of each image and its mirror image.
        features: give each prediction the embedding before the head; with `tta`, the mean of both.
        batch_size: images in a batch; None looks for the largest that fits. Afterwards, the size in use: it
            is halved where memory runs out.
        num_workers: threads that load images; 0 loads them between the batches; None is one for each CPU
            core, at most 8.
        has_searched: whether the batch size is the result of a search.

    Raises:
        ConfigError: the runs do not go together, or an option does not suit them.
        DataError: a run has no classes.
        ValueError: an argument that cannot be used.
    """

    runs: Sequence[TrainedRun]
    top: int | None = None
    path: bool = False
    threshold: float | None = None
    tta: str | None = None
    features: bool = False
    batch_size: int | None = None
    num_workers: int | None = None
    has_searched: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for name in ("top", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.tta not in (None, "flip"):
            raise ValueError(f"tta must be 'flip' or None, not {self.tta!r}")
        first = self.runs[0]
        for run in self.runs:
            if run.taxonomy is None:
                raise DataError(
                    f"{run.checkpoint}: the run's dataset declared no classes, so there is no class to "
                    "predict; run.model gives the model's outputs"
                )
            if run.taxonomy != first.taxonomy:
                different = sorted(_classes_of(run) ^ _classes_of(first))
                raise ConfigError(
                    f"RUN: {run.checkpoint} and {first.checkpoint} have different classes ("
                    f"{several(different) if different else 'in order, or by parent'}); an ensemble needs "
                    "runs of the same taxonomy"
                )
            if self.tta and run.spec.preprocessing is None:
                raise ConfigError(
                    f"tta={self.tta}: the dataset of {run.checkpoint} gave tensors, which may not be images; "
                    "leave it out"
                )
        assert first.taxonomy is not None
        self.taxonomy = first.taxonomy
        if self.taxonomy.is_multilabel and self.path:
            raise ConfigError(
                "path=True: the run has several labels for an image and no path; leave it out"
            )
        if self.features and len(self.runs) > 1:
            raise ConfigError(
                "features=True: takes one run, because each run has its own embeddings"
            )
        if self.features and not isinstance(first.model, HierarchicalClassifier):
            raise ConfigError(
                "features=True: Linnaeus does not know the head of your own model; leave it out"
            )
        if self.top is None and not self.taxonomy.is_multilabel:
            self.top = 5
        self.num_workers = min(8, num_cores()) if self.num_workers is None else self.num_workers
        # Runs that read images alike share an input.
        specs = [
            (run.spec.preprocessing, run.spec.in_chans, run.spec.img_size) for run in self.runs
        ]
        self._input_of = [specs.index(spec) for spec in specs]
        self._readers = {number: self.runs[number].transform for number in self._input_of}

    def run(
        self, images: Iterable[ImageLike | Unreadable]
    ) -> Generator[Prediction | Unreadable, None, None]:
        """Predictions, and the images that cannot be read, in the order of the images.

        Of images and inputs, about two batches are held at a time.

        Args:
            images: are taken when there is room for them; `Unreadable` ones are passed on.

        Raises:
            AutoBatchError, OutOfMemoryError: not even one image fits.
            LinnaeusError: the model's outputs cannot be used.
        """
        images = iter(images)
        if self.batch_size is None:
            first = list(islice(images, MAX_UNSEARCHED + 1))
            images = chain(first, images)
            if len(first) <= MAX_UNSEARCHED:
                self.batch_size = max(1, len(first))
        loaded = self._load_ahead(images)
        if self.batch_size is None:
            loaded = self._find_size(loaded)
        pending: list[_Loaded] = []
        num_inputs = 0
        for item in loaded:
            pending.append(item)
            num_inputs += isinstance(item[1], tuple)
            # Unreadable images must not pile up either.
            if num_inputs == self.batch_size or len(pending) > 2 * (self.batch_size or 1):
                yield from self._predict(pending)
                pending, num_inputs = [], 0
        yield from self._predict(pending)

    def _load_ahead(self, images: Iterable[ImageLike | Unreadable]) -> Iterator[_Loaded]:
        """Load images in threads, in order. They are taken in this thread, about a batch ahead."""
        items = enumerate(images)
        if not self.num_workers:
            yield from map(self._load, items)
            return
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="load images")
        pending: deque[Future[_Loaded]] = deque()
        try:
            while True:
                room = (self.batch_size or MAX_UNSEARCHED) + 2 * self.num_workers - len(pending)
                pending.extend(
                    pool.submit(self._load, item) for item in islice(items, max(0, room))
                )
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _load(self, item: tuple[int, ImageLike | Unreadable]) -> _Loaded:
        position, image = item
        if isinstance(image, Unreadable):
            return image.source, image
        source = str(image) if isinstance(image, str) or hasattr(image, "__fspath__") else position
        try:
            found = {number: reader(image) for number, reader in self._readers.items()}
            return source, tuple(found[number] for number in self._input_of)
        except DataError as error:  # any other is a fault of the program, and not of an image
            return source, Unreadable(
                source if isinstance(source, str) else f"image {source}", str(error)
            )

    def _find_size(self, loaded: Iterator[_Loaded]) -> Iterator[_Loaded]:
        """Set the batch size by a search on the first image that can be read; the items of `loaded`."""
        first: list[_Loaded] = []
        for item in islice(loaded, MAX_UNSEARCHED):
            first.append(item)
            if isinstance(item[1], tuple):
                break
        sample = first[-1][1]
        self.batch_size = MAX_UNSEARCHED  # unless an image can be read
        if isinstance(sample, tuple):
            device = self.runs[0].device
            self.batch_size = auto_find_batch_size(
                lambda inputs: self._forward(inputs, range(len(inputs))),
                lambda size: [sample] * size,
                state=tuple(run.model for run in self.runs),
                mode="val",
                device=device,
                tolerance=0.1,
                group=False,
                max_batch_size=MAX_BATCH_SIZE_CPU if device.type == "cpu" else MAX_BATCH_SIZE,
            ).batch_size
            self.has_searched = True
        return chain(first, loaded)

    def _predict(self, loaded: Sequence[_Loaded]) -> Iterator[Prediction | Unreadable]:
        readable = [(source, item) for source, item in loaded if isinstance(item, tuple)]
        predictions = self._in_batches(*zip(*readable, strict=True)) if readable else iter(())
        for _, item in loaded:
            yield item if isinstance(item, Unreadable) else next(predictions)

    def _in_batches(
        self, sources: Sequence[str | int], inputs: Sequence[_Inputs]
    ) -> Iterator[Prediction]:
        """Predictions in batches of at most the size in use, which is halved where memory runs out."""
        start = 0
        while start < len(inputs):
            size = min(self.batch_size or 1, len(inputs) - start)
            part = slice(start, start + size)
            try:
                found = self._forward(inputs[part], sources[part])
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    raise OutOfMemoryError(
                        "the model needs more memory than there is, even for one image; free some, or name "
                        f"another device (device=cpu): {first_line(error)}"
                    ) from error
                found = None
            if found is None:
                gc.collect()  # the traceback held the tensors of the forward pass
                if self.runs[0].device.type == "cuda":
                    torch.cuda.empty_cache()
                self.batch_size = size // 2
                logger.warning(
                    "memory ran out with %d images; continuing with %d", size, self.batch_size
                )
                continue
            yield from found
            start += size

    @torch.no_grad()
    def _forward(self, inputs: Sequence[_Inputs], sources: Sequence[str | int]) -> list[Prediction]:
        outputs = list[list[Tensor]]()
        features = list[Tensor]()
        for run, images in zip(self.runs, zip(*inputs, strict=True), strict=True):
            precision, are_logs = run.precision, gives_log_probabilities(run.model)
            placed, _ = precision.place(Batch(torch.stack(images), None))
            for view in (placed, placed.flip(-1)) if self.tta else (placed,):
                with precision.autocast(), _captured(run, features if self.features else None):
                    found = run.model(view)
                outputs.append(log_probabilities_of(found, self.taxonomy, are_logs=are_logs))
        logs = outputs[0]
        if len(outputs) > 1:
            logs = [
                torch.stack(level).logsumexp(0) - log(len(outputs))
                for level in zip(*outputs, strict=True)
            ]
        predictions = predictions_of(
            logs,
            sources,
            self.taxonomy,
            top=self.top,
            path=self.path,
            threshold=self.threshold,
            are_logs=all(gives_log_probabilities(run.model) for run in self.runs),
        )
        if not features:
            return predictions
        rows = torch.stack(features).float().mean(0).cpu()
        return [replace(each, features=row) for each, row in zip(predictions, rows, strict=True)]


@contextmanager
def _captured(run: TrainedRun, features: list[Tensor] | None) -> Iterator[None]:
    """Context in which the inputs of the run's head are added to `features`, unless it is None."""
    if features is None:
        yield
        return
    head: Any = run.model.heads
    hook = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    try:
        yield
    finally:
        hook.remove()


def _classes_of(run: TrainedRun) -> set[str]:
    return {f"{level} {name}" for level, names in run.classes.items() for name in names}
