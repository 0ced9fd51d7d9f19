"""Predictions of a trained run, from Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from linnaeus.autobatch.rng import rng_state
from linnaeus.data.batch import Batch
from linnaeus.data.image_files import ImageFiles
from linnaeus.data.taxonomy import UNKNOWN, Level, Taxonomy
from linnaeus.errors import DataError, OutOfMemoryError
from linnaeus.inference.paths import Unreadable
from linnaeus.inference.prediction import Interpreter
from linnaeus.inference.trained import TrainedRun, load_run
from linnaeus.training.step import ValidationStep
from tests.helpers.trained import BIRDS, ONE_RANK, picture, save_run, spec_of, write_images


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return load_run(save_run(tmp_path_factory.mktemp("runs") / "birds", spec_of()), device="cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_images(tmp_path_factory.mktemp("photos"), 7)


def validation_outputs(run: TrainedRun, paths: list[Path], batch_size: int) -> Iterator[Any]:
    """What the run's validation computes for files."""
    preprocessing = run.spec.preprocessing
    assert preprocessing is not None
    targets = torch.zeros(len(paths), len(run.classes), dtype=torch.int64)
    names = [str(path) for path in paths]
    dataset = ImageFiles(Path(), names, targets, preprocessing.channels, preprocessing.transform())
    found: list[Any] = []
    step = ValidationStep(
        run.model, lambda *_: torch.zeros(()), run.precision, lambda out, *_: found.append(out)
    )
    for start in range(0, len(paths), batch_size):
        part = [dataset[index] for index in range(start, min(start + batch_size, len(paths)))]
        step(Batch(torch.stack([image for image, _ in part]), torch.stack([target for _, target in part])))
    return iter(found)


def test_predictions_are_those_of_validation_bit_for_bit(birds: TrainedRun, photos: list[Path]) -> None:
    found = birds.predict(photos, batch_size=3)
    assert [prediction.source for prediction in found] == [str(path) for path in photos]
    position = 0
    for outputs in validation_outputs(birds, photos, 3):
        for level, logits in zip(BIRDS.levels, outputs, strict=True):
            best = logits.log_softmax(1).topk(min(5, len(level.classes)), dim=1)
            for i, (labels, logs) in enumerate(zip(best.indices.tolist(), best.values, strict=True)):
                expected = [
                    (level.classes[label], p) for label, p in zip(labels, logs.exp().tolist(), strict=True)
                ]
                assert found[position + i].levels[level.name] == expected
        position += len(outputs[0])
    assert position == 7


def test_the_batch_size_does_not_matter(birds: TrainedRun, photos: list[Path]) -> None:
    expected = birds.predict(photos, batch_size=7)
    assert len({str(prediction.levels) for prediction in expected}) == 7, "images differ"
    for size in (1, 2, None):
        for a, b in zip(birds.predict(photos, batch_size=size), expected, strict=True):
            for level in a.levels:
                assert [name for name, _ in a.levels[level]] == [name for name, _ in b.levels[level]]
                for (_, p), (_, q) in zip(a.levels[level], b.levels[level], strict=True):
                    assert p == pytest.approx(q, rel=1e-5)


def test_every_form_of_an_image(birds: TrainedRun, photos: list[Path]) -> None:
    image = picture(0)
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    (expected,) = birds.predict(photos[0])
    for form in (str(photos[0]), image, array, tensor):
        (found,) = birds.predict(form)
        assert found.levels == expected.levels
    assert len(birds.predict(torch.stack([tensor, tensor]))) == 2
    assert [found.source for found in birds.predict([photos[0], array])] == [str(photos[0]), 1]
    (fractions,) = birds.predict(tensor / 255)
    for (name, p), (other, q) in zip(fractions.levels["species"], expected.levels["species"], strict=True):
        assert (name, p) == (other, pytest.approx(q, rel=0.02))
    grey = Image.fromarray(array[:, :, 0])
    assert birds.predict(grey)[0].levels == birds.predict(array[:, :, 0])[0].levels
    assert birds.predict(tensor[:1])[0].levels == birds.predict(grey)[0].levels != expected.levels


@pytest.mark.parametrize("error", [RuntimeError("no size"), TypeError("x"), torch.OutOfMemoryError("x")])
def test_a_fault_of_the_program_is_no_unreadable_image(
    birds: TrainedRun, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    predictor = birds.predictor(batch_size=2, num_workers=0)

    def transform(_: Any) -> Any:
        raise error

    monkeypatch.setattr(predictor.reader, "_transform", transform)
    if isinstance(error, TypeError | torch.OutOfMemoryError):
        with pytest.raises(type(error)):
            list(predictor.run([picture(0)]))
    else:
        (found,) = predictor.run([picture(0)])
        assert isinstance(found, Unreadable)
        assert found.reason.endswith(str(error))


def test_a_pillow_image_is_decoded_late(birds: TrainedRun, photos: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(photos[0].read_bytes()[:300])
    with Image.open(tmp_path / "cut.png") as image, pytest.raises(DataError):
        birds.predict(image)


def test_top_and_texts(birds: TrainedRun, photos: list[Path]) -> None:
    (found,) = birds.predict(photos[0], top=2, path=True)
    assert {level: len(classes) for level, classes in found.levels.items()} == {"order": 2, "species": 2}
    assert found.path is not None
    assert [word for word in (str(photos[0]), "order: ", " %") if word not in repr(found)] == []
    assert len(birds.predict(photos[0], top=9)[0].levels["species"]) == 5
    with pytest.raises(ValueError, match="1"):
        birds.predict(photos[0], top=0)
    with pytest.raises(TypeError, match=r"^batch_size .* 2\.5"):
        birds.predict(photos[0], batch_size=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"images .* None"):
        birds.predict(None)  # type: ignore[arg-type]
    assert birds.predict([]) == []


PARTLY_KNOWN = Taxonomy(
    (Level("a", ("a0", "a1", "a2")), Level("b", tuple("pqrs")), Level("c", tuple("uvwxyz"))),
    ((0, 1, UNKNOWN, 2), (0, 0, 1, UNKNOWN, 2, 3)),
)


@pytest.mark.parametrize(
    "taxonomy", [BIRDS, PARTLY_KNOWN, ONE_RANK], ids=["birds", "partly known", "one rank"]
)
def test_the_path_is_the_best_of_all_paths(taxonomy: Taxonomy) -> None:
    torch.manual_seed(0)
    logits = tuple(2 * torch.randn(40, len(level.classes)) for level in taxonomy.levels)
    interpreter = Interpreter(taxonomy, top=1, path=True)
    found = interpreter.predictions(range(40), interpreter.scores(logits))
    probabilities = [level.softmax(1) for level in logits]
    paths = [
        path
        for path in product(*(range(len(level.classes)) for level in taxonomy.levels))
        if all(
            row[low] in (high, UNKNOWN)
            for row, high, low in zip(taxonomy.parents, path, path[1:], strict=False)
        )
    ]
    num_different = 0
    for i, prediction in enumerate(found):
        products = [
            math.prod(float(p[i, label]) for p, label in zip(probabilities, path, strict=True))
            for path in paths
        ]
        best = paths[int(np.argmax(products))]
        assert prediction.path is not None
        assert list(prediction.path.classes.values()) == [
            level.classes[label] for level, label in zip(taxonomy.levels, best, strict=True)
        ]
        assert prediction.path.probability == pytest.approx(max(products), rel=1e-4)
        argmax = tuple(int(p[i].argmax()) for p in probabilities)
        assert prediction.path.differs == (argmax != best)
        num_different += argmax != best
    assert (num_different > 0) == (len(taxonomy.levels) > 1)


def test_a_marginal_head_predicts_its_own_probabilities(tmp_path: Path) -> None:
    """A class without a known parent and classes without children: no level adds up to 1."""
    run = load_run(
        save_run(tmp_path / "run", spec_of(taxonomy=PARTLY_KNOWN, HEAD="marginal"), seed=1), device="cpu"
    )
    images = [picture(seed) for seed in range(6)]
    inputs = torch.stack([run.transform(image) for image in images])
    with torch.no_grad():
        outputs = run.model(inputs)
    num_other = 0
    for i, prediction in enumerate(run.predict(images, top=9, path=True)):
        for level, logs in zip(PARTLY_KNOWN.levels, outputs, strict=True):
            expected = dict(zip(level.classes, logs[i].exp().tolist(), strict=True))
            assert dict(prediction.levels[level.name]) == pytest.approx(expected, rel=1e-4)
            normalised = dict(zip(level.classes, logs[i].softmax(0).tolist(), strict=True))
            num_other += dict(prediction.levels[level.name]) != pytest.approx(normalised, rel=1e-3)
        path = prediction.path
        assert path is not None
        assert (path.classes["c"], path.probability) == prediction.levels["c"][0], "a path is as its end"
        b = PARTLY_KNOWN.levels[1].classes.index(path.classes["b"])
        c = PARTLY_KNOWN.levels[2].classes.index(path.classes["c"])
        assert PARTLY_KNOWN.parents[1][c] in (b, UNKNOWN)
    assert num_other > 0, "a softmax would give something else"


def test_a_run_on_tensors_takes_tensors(tmp_path: Path) -> None:
    run = load_run(save_run(tmp_path / "tensors", spec_of(is_of_files=False)), device="cpu")
    inputs = torch.randn(2, 3, 32, 32)
    found = run.predict(inputs)
    expected = run.model(inputs)[0].softmax(1).max(1).values.tolist()
    assert [prediction.levels["order"][0][1] for prediction in found] == pytest.approx(expected, rel=1e-5)


class Full(torch.nn.Module):
    """Runs out of memory with more than `most` images."""

    def __init__(self, model: torch.nn.Module, most: int) -> None:
        super().__init__()
        self.model, self.most = model, most
        self.sizes: list[int] = []

    def forward(self, images: torch.Tensor) -> Any:
        self.sizes.append(len(images))
        if len(images) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return self.model(images)


def with_model(run: TrainedRun, model: torch.nn.Module) -> TrainedRun:
    return TrainedRun(
        run.checkpoint, run.folder, run.spec, model, run.device, run.content, run.criterion_state
    )


def test_a_batch_that_does_not_fit_is_halved(
    birds: TrainedRun, photos: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    full = Full(birds.model, 2)
    found = with_model(birds, full).predict(photos, batch_size=7)
    assert full.sizes == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    assert [prediction.source for prediction in found] == [str(path) for path in photos]
    assert "7" in caplog.text
    with pytest.raises(OutOfMemoryError):
        with_model(birds, Full(birds.model, 0)).predict(photos)


def test_other_errors_of_the_model_are_no_lack_of_memory(birds: TrainedRun) -> None:
    with pytest.raises(RuntimeError, match="multiplied"):
        with_model(birds, torch.nn.Linear(2, 2)).predict(picture(0))


def test_the_batch_size_is_searched_for_once_and_only_for_many(
    birds: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_model(birds, birds.model)
    module = "linnaeus.inference.predictor"
    searches: list[int] = []
    real = __import__(module, fromlist=["auto_find_batch_size"]).auto_find_batch_size

    def search(*arguments: Any, **options: Any) -> Any:
        searches.append(options["max_batch_size"])
        return real(*arguments, **options)

    monkeypatch.setattr(f"{module}.auto_find_batch_size", search)
    images = [picture(seed, (8, 8)) for seed in range(3)]
    before = rng_state(torch.device("cpu"))["torch"]
    run.predict(images)
    assert searches == []
    assert len(run.predict(images * 12)) == 36
    for _ in range(2):
        assert len(list(run.stream(iter(images * 30)))) == 90
    assert searches == [36, 64], "what was bounded by the number of images says nothing about more"
    assert torch.equal(before, rng_state(torch.device("cpu"))["torch"])


def test_images_are_taken_as_they_are_needed(birds: TrainedRun) -> None:
    taken: list[int] = []

    def endless() -> Iterator[Image.Image]:
        while True:
            taken.append(1)
            yield picture(len(taken) % 5, (8, 8))

    stream = birds.stream(endless(), batch_size=4)
    for _ in range(50):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(taken) < 50 + 60
