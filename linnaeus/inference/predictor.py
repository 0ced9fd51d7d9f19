"""Runs a trained model over any number of images: loaded ahead in threads, in batches that fit."""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from linnaeus.autobatch.api import auto_find_batch_size
from linnaeus.autobatch.memory.oom import is_out_of_memory
from linnaeus.data.batch import Batch
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.errors import DataError, OutOfMemoryError, first_line
from linnaeus.inference.images import ImageLike, Reader
from linnaeus.inference.paths import Unreadable
from linnaeus.inference.prediction import Interpreter, Prediction, Scores
from linnaeus.inference.read_ahead import read_ahead
from linnaeus.training.losses import gives_log_probabilities
from linnaeus.training.precision import Precision

MAX_UNSEARCHED = 32
"""Up to this many images form one batch without a search, which would take longer than they do."""
MAX_BATCH_SIZE = 512
"""Largest batch that is searched for on an accelerator; more samples make it no faster."""
MAX_BATCH_SIZE_CPU = 64
"""Largest batch that is searched for on the CPU, where a trial takes long."""

logger = logging.getLogger("linnaeus.predict")

_Loaded = tuple[str | int, Tensor | Unreadable]


@dataclass
class Predictor:
    """Predicts images, in order.

    Attributes:
        model: in eval mode, on the device of `precision`.
        reader: makes inputs from images.
        taxonomy: levels and classes.
        precision: number format and memory format of the forward pass.
        top, path: see `Interpreter`.
        batch_size: images in a batch; None looks for the largest that fits. Afterwards, the size in use: it
            is halved where memory runs out.
        num_workers: threads that load images; 0 loads them between the batches.
        is_largest: whether the batch size is the result of a search that the number of images did not bound.
    """

    model: nn.Module
    reader: Reader
    taxonomy: Taxonomy
    precision: Precision
    top: int = 5
    path: bool = False
    batch_size: int | None = None
    num_workers: int = 0
    is_largest: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        interpreter = Interpreter(
            self.taxonomy, top=self.top, path=self.path, are_logs=gives_log_probabilities(self.model)
        )
        self._interpreter = interpreter.to(self.precision.device)

    @property
    def _max_batch_size(self) -> int:
        return MAX_BATCH_SIZE_CPU if self.precision.device.type == "cpu" else MAX_BATCH_SIZE

    def run(self, images: Iterable[ImageLike | Unreadable]) -> Generator[Prediction | Unreadable, None, None]:
        """Predictions, and the images that cannot be read, in the order of the images.

        Of images and inputs, about two batches are held at a time.

        Args:
            images: are taken when there is room for them; `Unreadable` ones are passed on.

        Raises:
            AutoBatchError, OutOfMemoryError: not even one image fits.
            LinnaeusError: the model's outputs cannot be used.
        """
        images, limit = self._bound(images)
        loaded = read_ahead(
            self._load, enumerate(images), num_workers=self.num_workers,
            num_ahead=lambda: (self.batch_size or MAX_UNSEARCHED) + 2 * self.num_workers,
        )  # fmt: skip
        if self.batch_size is None:
            loaded = self._find_size(loaded, limit)
        pending: list[_Loaded] = []
        num_inputs = 0
        for item in loaded:
            pending.append(item)
            num_inputs += isinstance(item[1], Tensor)
            # Unreadable images must not pile up either.
            if num_inputs == self.batch_size or len(pending) > 2 * (self.batch_size or 1):
                yield from self._predict(pending)
                pending, num_inputs = [], 0
        yield from self._predict(pending)

    def _bound(
        self, images: Iterable[ImageLike | Unreadable]
    ) -> tuple[Iterable[ImageLike | Unreadable], int]:
        """The images, and the largest useful batch: their number, where that is small."""
        most = self._max_batch_size
        if isinstance(images, Sized):
            return images, max(1, min(most, len(images)))
        rest = iter(images)
        first = list(islice(rest, MAX_UNSEARCHED + 1))
        return chain(first, rest), max(1, len(first)) if len(first) <= MAX_UNSEARCHED else most

    def _load(self, item: tuple[int, ImageLike | Unreadable]) -> _Loaded:
        position, image = item
        source = str(image) if not _is_in_memory(image) else position
        if isinstance(image, Unreadable):
            return image.source, image
        try:
            return source, self.reader(image)
        except DataError as error:  # any other is a fault of the program, and not of an image
            return source, Unreadable(_shown(source), str(error))

    def _find_size(self, loaded: Iterator[_Loaded], limit: int) -> Iterator[_Loaded]:
        """Set the batch size; the search runs on the first image that can be read."""
        if limit <= MAX_UNSEARCHED:
            self.batch_size = limit
            return loaded
        first: list[_Loaded] = []
        for item in loaded:
            first.append(item)
            if isinstance(item[1], Tensor):
                self.batch_size = self._search(item[1], limit)
                break
            if len(first) == MAX_UNSEARCHED:
                self.batch_size = MAX_UNSEARCHED  # no readable image among the first: skip the search
                break
        return chain(first, loaded)

    def _search(self, sample: Tensor, limit: int) -> int:
        def make_batch(size: int) -> Tensor:
            batch = sample.to(self.precision.device).expand(size, *sample.shape)
            layout = torch.channels_last if self._is_channels_last(batch) else torch.contiguous_format
            return batch.contiguous(memory_format=layout)

        result = auto_find_batch_size(
            self._forward, make_batch, state=(self.model,), mode="val", device=self.precision.device,
            max_batch_size=limit, tolerance=0.1, group=False,
        )  # fmt: skip
        self.is_largest = result.batch_size < limit or limit == self._max_batch_size
        return result.batch_size

    def _is_channels_last(self, batch: Tensor) -> bool:
        return self.precision.channels_last and batch.ndim == 4

    def _predict(self, loaded: list[_Loaded]) -> Iterator[Prediction | Unreadable]:
        readable = [(source, item) for source, item in loaded if isinstance(item, Tensor)]
        predictions = iter(self._predict_inputs([source for source, _ in readable], [x for _, x in readable]))
        for _, item in loaded:
            yield item if isinstance(item, Unreadable) else next(predictions)

    def _predict_inputs(self, sources: list[str | int], inputs: list[Tensor]) -> Iterator[Prediction]:
        """Predictions in batches of at most the size in use, which shrinks where memory runs out."""
        start = 0
        while start < len(inputs):
            size = min(self.batch_size or 1, len(inputs) - start)
            part = slice(start, start + size)
            scores = self._scores_or_none(inputs[part])
            if scores is None:
                self._halve(size)
                continue
            yield from self._interpreter.predictions(sources[part], scores)
            start += size

    def _scores_or_none(self, inputs: list[Tensor]) -> Scores | None:
        """The scores of a batch; None where it does not fit into memory."""
        try:
            batch: Any = self.precision.place(Batch(_stacked(inputs), None)).inputs
            return self._forward(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(inputs) == 1:
                raise OutOfMemoryError(
                    "the model needs more memory than there is, even for one image; free some, or name "
                    f"another device (--device cpu): {first_line(error)}"
                ) from error
        gc.collect()  # the traceback held the tensors of the forward pass
        if self.precision.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _halve(self, size: int) -> None:
        self.batch_size = size // 2
        logger.warning("memory ran out with %d images; going on with %d", size, self.batch_size)

    @torch.no_grad()
    def _forward(self, batch: Tensor) -> Scores:
        with self.precision.autocast():
            outputs = self.model(batch)
        return self._interpreter.scores(outputs)


def _stacked(inputs: list[Tensor]) -> Tensor:
    try:
        return torch.stack(inputs)
    except RuntimeError as error:
        shapes = sorted({str(list(tensor.shape)) for tensor in inputs})
        if len(shapes) == 1:
            raise
        raise DataError(f"inputs of one batch differ in shape: {', '.join(shapes[:5])}") from error


def _is_in_memory(image: object) -> bool:
    return not isinstance(image, str | Unreadable) and not hasattr(image, "__fspath__")


def _shown(source: str | int) -> str:
    return source if isinstance(source, str) else f"image {source}"
