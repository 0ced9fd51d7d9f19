import itertools
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from linnaeus.autobatch.state.rng import rng_state
from linnaeus.data.batch import Batch
from linnaeus.data.image_files import ImageFiles, Listing
from linnaeus.data.mixing import DeviceTransform
from linnaeus.data.taxonomy import UNKNOWN, Level, Taxonomy
from linnaeus.inference import predictor
from linnaeus.inference.paths import Unreadable
from linnaeus.inference.prediction import predictions_of
from linnaeus.inference.trained import load_run
from linnaeus.runtime.errors import DataError, OutOfMemoryError
from linnaeus.training.step import ValidationStep
from tests.helpers.trained import BIRDS, picture, save_run, spec_of, write_images


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return load_run(save_run(tmp_path_factory.mktemp("runs") / "birds", spec_of()), device="cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("photos"), 7)


def test_predictions_are_those_of_validation_bit_for_bit(birds, photos):
    preprocessing = birds.spec.preprocessing
    listing = Listing.of("", Path(), map(str, photos), [()] * len(photos))
    labels = torch.zeros(1, len(birds.classes), dtype=torch.int64)
    dataset = ImageFiles(listing, labels, 3, transform=preprocessing.transform())
    outputs = []
    step = ValidationStep(
        birds.model,
        lambda *_: torch.zeros(()),
        replace(birds.precision, transform=DeviceTransform(preprocessing.normalise())),
        lambda out, *_: outputs.append(out),
    )
    for batch in torch.utils.data.DataLoader(dataset, 3):
        step(Batch(*batch))
    found = birds.predict(photos, batch_size=3)
    assert [prediction.source for prediction in found] == [str(path) for path in photos]
    for level, parts in zip(BIRDS.levels, zip(*outputs, strict=True), strict=True):
        logs = torch.cat([part.log_softmax(1) for part in parts])
        best = logs.topk(min(5, len(level.classes)), dim=1)
        for prediction, labels, logs in zip(found, best.indices.tolist(), best.values, strict=True):
            names = [level.classes[label] for label in labels]
            expected = list(zip(names, logs.exp().tolist(), strict=True))
            assert prediction.levels[level.name] == expected


def test_every_form_of_an_image(birds, photos, tmp_path):
    image = picture(0)
    array = np.asarray(image)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    (expected,) = birds.predict(photos[0])
    for form in (str(photos[0]), image, array, tensor):
        (found,) = birds.predict(form)
        assert found.levels == expected.levels
    assert len(birds.predict(torch.stack([tensor, tensor]))) == 2
    assert [found.source for found in birds.predict([photos[0], array])] == [str(photos[0]), 1]
    grey = Image.fromarray(array[:, :, 0])
    assert birds.predict(grey)[0].levels == birds.predict(array[:, :, 0])[0].levels
    assert birds.predict(tensor[:1])[0].levels == birds.predict(grey)[0].levels != expected.levels
    (tmp_path / "cut.png").write_bytes(photos[0].read_bytes()[:300])
    with Image.open(tmp_path / "cut.png") as late, pytest.raises(DataError):
        birds.predict(late)  # it is decoded only now


@pytest.mark.parametrize("error", [TypeError("x"), torch.OutOfMemoryError("x")])
def test_a_fault_of_the_program_is_no_unreadable_image(birds, monkeypatch, error):
    failing = predictor.Predictor([birds], batch_size=2, num_workers=0)
    (reader,) = failing._readers.values()
    monkeypatch.setattr(reader, "_transform", Mock(side_effect=[RuntimeError("no size"), error]))
    assert [type(found) for found in failing.run([picture(0)])] == [Unreadable]
    with pytest.raises(type(error)):
        list(failing.run([picture(0)]))


def test_top_and_texts(birds, photos):
    (found,) = birds.predict(photos[0], top=2, path=True)
    assert [len(classes) for classes in found.levels.values()] == [2, 2]
    assert all(word in repr(found) for word in (str(photos[0]), "order: ", " %"))
    assert len(birds.predict(photos[0], top=9)[0].levels["species"]) == 5
    for named, images, options in (
        ("top", photos, {"top": 0}),
        ("images", None, {}),
        ("device: .*tta", photos, {"device": "nonsense"}),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{named}"):
            birds.predict(images, **options)
    assert birds.predict([]) == []


PARTLY_KNOWN = Taxonomy(
    (Level("a", ("a0", "a1", "a2")), Level("b", tuple("pqrs")), Level("c", tuple("uvwxyz"))),
    ((0, 1, UNKNOWN, 2), (0, 0, 1, UNKNOWN, 2, 3)),
)


def test_the_path_is_the_best_of_all_paths():
    torch.manual_seed(0)
    taxonomy = PARTLY_KNOWN
    logits = [2 * torch.randn(40, len(level.classes)) for level in taxonomy.levels]
    logs = [level.log_softmax(1) for level in logits]
    found = predictions_of(logs, range(40), taxonomy, top=1, path=True)
    probabilities = [level.softmax(1) for level in logits]
    paths = [
        path
        for path in itertools.product(*(range(len(level.classes)) for level in taxonomy.levels))
        if all(
            row[low] in (high, UNKNOWN)
            for row, high, low in zip(taxonomy.parents, path, path[1:], strict=False)
        )
    ]
    differ = set()
    for i, prediction in enumerate(found):
        products = {
            path: math.prod(float(p[i, n]) for p, n in zip(probabilities, path, strict=True))
            for path in paths
        }
        best = max(products, key=products.__getitem__)
        names = [level.classes[label] for level, label in zip(taxonomy.levels, best, strict=True)]
        assert list(prediction.path.classes.values()) == names
        assert prediction.path.probability == pytest.approx(products[best], rel=1e-4)
        assert prediction.path.differs == (best != tuple(int(p[i].argmax()) for p in probabilities))
        differ.add(prediction.path.differs)
    assert differ == {True, False}


def test_a_marginal_head_predicts_its_own_probabilities(tmp_path):
    """A class without a known parent and classes without children: no level adds up to 1."""
    spec = spec_of(taxonomy=PARTLY_KNOWN, HEAD="marginal")
    run = load_run(save_run(tmp_path / "run", spec, seed=1), device="cpu")
    images = [picture(seed) for seed in range(6)]
    with torch.no_grad():
        outputs = run.model(torch.stack([run.transform(image) for image in images]))
    for i, prediction in enumerate(run.predict(images, top=9, path=True)):
        for level, logs in zip(PARTLY_KNOWN.levels, outputs, strict=True):
            expected = dict(zip(level.classes, logs[i].exp().tolist(), strict=True))
            assert dict(prediction.levels[level.name]) == pytest.approx(expected, rel=1e-4)
        path = prediction.path
        end = (path.classes["c"], path.probability)
        assert end == prediction.levels["c"][0], "a path is as its end"
        b, c = (level.classes.index(path.classes[level.name]) for level in PARTLY_KNOWN.levels[1:])
        assert PARTLY_KNOWN.parents[1][c] in (b, UNKNOWN)
    assert outputs[0].exp().sum(1).min() < 0.99, "a softmax would give something else"


def test_a_run_on_tensors_takes_tensors(tmp_path):
    run = load_run(save_run(tmp_path / "tensors", spec_of(is_of_files=False)), device="cpu")
    inputs = torch.randn(2, 3, 32, 32)
    found = [prediction.levels["order"][0][1] for prediction in run.predict(inputs)]
    expected = run.model(inputs)[0].softmax(1).max(1).values.tolist()
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_batch_that_does_not_fit_is_halved(birds, photos, caplog):
    sizes = []

    def model(images):
        sizes.append(len(images))
        if len(images) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return birds.model(images)

    most, full = 2, replace(birds, model=model)
    found = full.predict(photos, batch_size=7)
    assert sizes == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    assert [prediction.source for prediction in found] == [str(path) for path in photos]
    assert "7" in caplog.text
    most = 0
    with pytest.raises(OutOfMemoryError):
        full.predict(photos)
    failing = Mock(side_effect=RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="multiplied"):
        replace(birds, model=failing).predict(photos, batch_size=7)
    assert failing.call_count == 1


def test_the_batch_size_is_searched_for_once_and_only_for_many(birds, monkeypatch):
    run = replace(birds)
    search = Mock(side_effect=predictor.auto_find_batch_size)
    monkeypatch.setattr(predictor, "auto_find_batch_size", search)
    images = [picture(seed, (8, 8)) for seed in range(3)]
    before = rng_state(torch.device("cpu"))["torch"]
    run.predict(images)
    search.assert_not_called()
    assert len(run.predict(images * 12)) == 36
    assert len(list(run.stream(iter(images * 30)))) == 90
    search.assert_called_once()
    assert torch.equal(before, rng_state(torch.device("cpu"))["torch"])


def test_images_are_taken_as_they_are_needed(birds):
    taken = itertools.count()
    stream = birds.stream((picture(number % 5, (8, 8)) for number in taken), batch_size=4)
    assert len(list(itertools.islice(stream, 50))) == 50
    stream.close()
    assert next(taken) < 50 + 60
