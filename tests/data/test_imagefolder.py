import os
import pickle
import re
import shutil

import pytest
import torch

from linnaeus.config.schema import DataConfig, DatasetConfig
from linnaeus.data.datasets import build_data
from linnaeus.inference.evaluation_data import EvaluationRequest, build_evaluation_data
from linnaeus.runtime.errors import DataError
from tests.helpers.datasets import write_image


def build(
    root,
    on_bad_image="raise",
    on_main=lambda read: read(),
    **dataset,
):
    node = DatasetConfig(NAME="imagefolder", ROOT=str(root), **dataset)
    config = DataConfig(DATASET=node, IMG_SIZE=16, ON_BAD_IMAGE=on_bad_image)
    return build_data(config, seed=0, on_main=on_main)


def paths(dataset):
    return [os.fsdecode(dataset.listing.paths[i]) for i in range(len(dataset))]


def num_left_out(bundle):
    """Damaged images, as the report counts them."""
    return sum(int(number) for number in re.findall(r": (\d+) damaged", "\n".join(bundle.report)))


def test_levels_of_folders_are_levels_of_labels(nested):
    bundle = build(nested, VAL_FRACTION=0.4)
    taxonomy = bundle.taxonomy
    assert taxonomy.num_classes == {"level1": 2, "level2": 4}
    assert taxonomy.levels[1].classes == ("cat", "Animalia/unknown", "oak", "Plantae/unknown")
    assert taxonomy.parents == ((0, 0, 1, 1),)
    assert (bundle.in_chans, bundle.img_size) == (3, (16, 16))
    assert len(paths(bundle.train)) == 12
    assert len(paths(bundle.val)) == 8
    assert not set(paths(bundle.train)) & set(paths(bundle.val))
    names = taxonomy.levels[0].classes
    for dataset in (bundle.train, bundle.val):
        for i, path in enumerate(paths(dataset)):
            image, target = dataset[i]
            assert image.shape == (3, 16, 16)
            assert path.startswith(names[target[0]] + "/")


def labels(dataset):
    return {path: dataset.targets[i].tolist() for i, path in enumerate(paths(dataset))}


def test_images_in_a_coarser_folder_have_unknown_finer_labels(nested, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(nested, root / "train")
    write_image(root / "train" / "Plantae" / "some.jpg")
    write_image(root / "val" / "Plantae" / "other.jpg")
    with pytest.raises(DataError, match="level2"):  # there are no finer folders at all
        build(root)
    write_image(root / "val" / "Plantae" / "oak" / "fine.jpg")
    bundle = build(root)
    assert labels(bundle.train)["Plantae/some.jpg"] == [1, -1]
    assert labels(bundle.val)["Plantae/other.jpg"] == [1, -1]
    coarse = [line for line in bundle.report if "unknown for" in line]
    assert [re.findall(r"\d+ of \d+ images?", line) for line in coarse] == [
        ["1 of 21 images"],
        ["1 of 2 images"],
    ]
    node = DatasetConfig(NAME="imagefolder", ROOT=str(root))
    request = EvaluationRequest(
        DataConfig(DATASET=node), bundle.index, bundle.preprocessing, 0, is_run_dataset=True
    )
    assert labels(build_evaluation_data(request).bundle.val) == labels(bundle.val)
    assert [line for line in build(nested).report if "unknown for" in line] == []
    with pytest.raises(DataError, match=r"Plantae/some\.jpg.*ALLOW_COARSE"):
        build(root, ALLOW_COARSE=False)


def test_what_is_hidden_or_no_image_is_ignored_and_links_are_followed(nested, tmp_path):
    expected = paths(build(nested).train)
    write_image(nested / ".trash" / "x" / "0.jpg")
    (nested / "Animalia" / "cat" / "notes.txt").write_text("x")
    assert paths(build(nested).train) == expected
    (tmp_path / "linked").mkdir()
    for folder in nested.iterdir():
        if folder.is_dir():
            (tmp_path / "linked" / folder.name).symlink_to(folder)
    write_image(tmp_path / "far.jpg")
    assert paths(build(tmp_path / "linked").train) == expected
    assert build(tmp_path / "linked").train[0][0].shape == (3, 16, 16)
    (nested / "Animalia" / "cat" / "9.jpg").symlink_to(tmp_path / "far.jpg")
    bundle = build(nested)
    assert "Animalia/cat/9.jpg" in paths(bundle.train) + paths(bundle.val)


def test_a_link_to_a_folder_above_is_an_error(nested):
    (nested / "Animalia" / "cat" / "loop").symlink_to(nested)
    with pytest.raises(DataError, match=str(nested / "Animalia" / "cat" / "loop")):
        build(nested)


INAT = [
    "00000_Animalia_Chordata_Aves_Passeriformes_Corvidae_Corvus_corax",
    "00001_Animalia_Chordata_Aves_Passeriformes_Corvidae_Pica_pica",
    "00002_Animalia_Chordata_Mammalia_Carnivora_Felidae_Felis_catus",
    "00003_Plantae_Tracheophyta_Magnoliopsida_Fagales_Fagaceae_Quercus_alba",
    "00004_Plantae_Tracheophyta_Magnoliopsida_Fabales_Fabaceae_Robinia_alba",
]


@pytest.fixture
def inat(tmp_path):
    for i, folder in enumerate(INAT):
        for j in range(3):
            write_image(tmp_path / "inat" / folder / f"{j}.jpg", seed=10 * i + j)
    return tmp_path / "inat"


def test_folder_names_of_inaturalist_are_seven_levels(inat):
    levels = ["kingdom", "phylum", "class", "order", "family", "genus", "species"]
    bundle = build(inat, LEVELS=levels)
    numbers = [2, 2, 3, 4, 4, 5, 5]
    assert bundle.taxonomy.num_classes == dict(zip(levels, numbers, strict=True))
    for i, path in enumerate(paths(bundle.train)):
        pairs = zip(bundle.taxonomy.levels, bundle.train[i][1].tolist(), strict=True)
        names = [level.classes[label] for level, label in pairs]
        assert "_".join([*names[:-1], names[-1].split(" ")[1]]) == path.split("/")[0][6:]
    assert [*build(inat).taxonomy.num_classes.values()] == numbers
    write_image(inat / "others" / "0.jpg")
    with pytest.raises(DataError, match="others"):
        build(inat, ALLOW_COARSE=False)


def test_rank_0_alone_reads_and_others_get_the_same(nested):
    """Large arrays travel beside the pickle."""
    (nested / "Plantae/oak/1.jpg").write_bytes(b"")
    sent = []

    def as_rank_0(read):
        buffers = []
        sent.append((pickle.dumps(read(), 5, buffer_callback=buffers.append), buffers))
        return pickle.loads(sent[0][0], buffers=buffers)

    main = build(nested, on_bad_image="skip", on_main=as_rank_0)
    (packed, buffers) = sent.pop()
    other = build(
        nested / "nowhere", "skip", on_main=lambda _: pickle.loads(packed, buffers=buffers)
    )
    assert main.report == other.report
    assert num_left_out(other) == 1
    for one, two in ((main.train, other.train), (main.val, other.val)):
        assert paths(one) == paths(two)
        assert torch.equal(one.targets, two.targets)
    assert other.train[0][0].shape == (3, 16, 16)


def test_damaged_images_are_left_out_counted_and_reported(nested):
    whole = build(nested, on_bad_image="skip")
    assert num_left_out(whole) == 0
    bad = ["Animalia/cat/0.jpg", "Plantae/oak/1.jpg", "Plantae/oak/2.jpg"]
    for path, data in zip(bad, [b"", b"text", (nested / bad[2]).read_bytes()[:-50]], strict=True):
        (nested / path).write_bytes(data)
    bundle = build(nested, on_bad_image="skip")
    assert paths(bundle.train) == [path for path in paths(whole.train) if path not in bad]
    assert paths(bundle.val) == [path for path in paths(whole.val) if path not in bad]
    report = " ".join(bundle.report)
    assert all(path in report for path in bad)
    assert num_left_out(bundle) == 3
    for dataset in (bundle.train, bundle.val):
        for i in range(len(dataset)):
            dataset[i]
