"""Runs a trained model over any number of images: loaded ahead in threads, in batches that fit."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor, nn

from linnaeus.autobatch.api import auto_find_batch_size
from linnaeus.autobatch.memory.oom import is_out_of_memory
from linnaeus.data.batch import Batch
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.inference.images import ImageLike, Reader
from linnaeus.inference.paths import Unreadable
from linnaeus.inference.prediction import Prediction, predictions_of
from linnaeus.runtime.errors import DataError, OutOfMemoryError, first_line
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
        top, path, threshold: see `predictions_of`.
        batch_size: images in a batch; None looks for the largest that fits. Afterwards, the size in use: it
            is halved where memory runs out.
        num_workers: threads that load images; 0 loads them between the batches.
        has_searched: whether the batch size is the result of a search.
    """

    model: nn.Module
    reader: Reader
    taxonomy: Taxonomy
    precision: Precision
    top: int | None = 5
    path: bool = False
    threshold: float | None = None
    batch_size: int | None = None
    num_workers: int = 0
    has_searched: bool = field(default=False, init=False)

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
            num_inputs += isinstance(item[1], Tensor)
            # Unreadable images must not pile up either.
            if num_inputs == self.batch_size or len(pending) > 2 * (self.batch_size or 1):
                yield from self._predict(pending)
                pending, num_inputs = [], 0
        yield from self._predict(pending)

    def _load_ahead(self, images: Iterable[ImageLike | Unreadable]) -> Iterator[_Loaded]:
        """Load images in threads, in order. They are taken in this thread, about a batch ahead."""
        items = enumerate(images)
        if self.num_workers == 0:
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
            return source, self.reader(image)
        except DataError as error:  # any other is a fault of the program, and not of an image
            return source, Unreadable(
                source if isinstance(source, str) else f"image {source}", str(error)
            )

    def _find_size(self, loaded: Iterator[_Loaded]) -> Iterator[_Loaded]:
        """Set the batch size by a search on the first image that can be read; the items of `loaded`."""
        first: list[_Loaded] = []
        for item in islice(loaded, MAX_UNSEARCHED):
            first.append(item)
            if isinstance(item[1], Tensor):
                break
        sample = first[-1][1]
        self.batch_size = MAX_UNSEARCHED  # unless an image can be read
        if isinstance(sample, Tensor):
            device = self.precision.device
            self.batch_size = auto_find_batch_size(
                lambda inputs: self._forward(inputs, range(len(inputs))),
                lambda size: [sample] * size,
                state=(self.model,),
                mode="val",
                device=device,
                tolerance=0.1,
                group=False,
                max_batch_size=MAX_BATCH_SIZE_CPU if device.type == "cpu" else MAX_BATCH_SIZE,
            ).batch_size
            self.has_searched = True
        return chain(first, loaded)

    def _predict(self, loaded: Sequence[_Loaded]) -> Iterator[Prediction | Unreadable]:
        readable = [(source, item) for source, item in loaded if isinstance(item, Tensor)]
        predictions = self._in_batches(*zip(*readable, strict=True)) if readable else iter(())
        for _, item in loaded:
            yield item if isinstance(item, Unreadable) else next(predictions)

    def _in_batches(
        self, sources: Sequence[str | int], inputs: Sequence[Tensor]
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
                        f"another device (--device cpu): {first_line(error)}"
                    ) from error
                found = None
            if found is None:
                gc.collect()  # the traceback held the tensors of the forward pass
                if self.precision.device.type == "cuda":
                    torch.cuda.empty_cache()
                self.batch_size = size // 2
                logger.warning(
                    "memory ran out with %d images; going on with %d", size, self.batch_size
                )
                continue
            yield from found
            start += size

    @torch.no_grad()
    def _forward(self, inputs: Sequence[Tensor], sources: Sequence[str | int]) -> list[Prediction]:
        placed, _ = self.precision.place(Batch(torch.stack(list(inputs)), None))
        with self.precision.autocast():
            outputs = self.model(placed)
        return predictions_of(
            outputs,
            sources,
            self.taxonomy,
            top=self.top,
            path=self.path,
            threshold=self.threshold,
            are_logs=gives_log_probabilities(self.model),
        )
