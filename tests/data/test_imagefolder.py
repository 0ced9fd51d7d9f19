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
from tests.helpers.layouts import build, paths


def build_skipping(root, on_main=lambda read: read()):
    """The data without damaged images."""
    node = DatasetConfig(NAME="imagefolder", ROOT=str(root))
    config = DataConfig(DATASET=node, IMG_SIZE=16, ON_BAD_IMAGE="skip")
    return build_data(config, seed=0, on_main=on_main)


def test_levels_of_folders_are_levels_of_labels(nested):
    bundle = build(nested, VAL_FRACTION=0.4)
    taxonomy = bundle.taxonomy
    assert taxonomy.names == ("level1", "level2")
    assert taxonomy.levels[1].classes == ("cat", "Animalia/unknown", "oak", "Plantae/unknown")
    assert taxonomy.parents == ((0, 0, 1, 1),)
    assert (bundle.in_chans, bundle.img_size) == (3, (16, 16))
    assert (len(bundle.train), len(bundle.val)) == (12, 8)
    for dataset in (bundle.train, bundle.val):
        for i, path in enumerate(paths(dataset)):
            image, target = dataset[i]
            assert image.shape == (3, 16, 16)
            assert path.startswith(taxonomy.levels[0].classes[target[0]] + "/")


def labels(dataset):
    return dict(zip(paths(dataset), dataset.targets.tolist(), strict=True))


def test_images_in_a_coarser_folder_have_unknown_finer_labels(nested, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(nested, root / "train")
    write_image(root / "train/Plantae/some.jpg")
    write_image(root / "val/Plantae/other.jpg")
    with pytest.raises(DataError, match="level2"):  # there are no finer folders at all
        build(root)
    write_image(root / "val/Plantae/oak/fine.jpg")
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


def test_links_to_folders_and_files_are_followed(nested, tmp_path):
    write_image(tmp_path / "far.jpg")
    (nested / "Animalia/cat/9.jpg").symlink_to(tmp_path / "far.jpg")
    (tmp_path / "linked").mkdir()
    for name in ("Animalia", "Plantae"):
        (tmp_path / "linked" / name).symlink_to(nested / name)
    bundle = build(tmp_path / "linked")
    assert paths(bundle.train) == paths(build(nested).train)
    assert bundle.train[0][0].shape == (3, 16, 16)
    assert "Animalia/cat/9.jpg" in paths(bundle.train) + paths(bundle.val)


def test_a_link_to_a_folder_above_is_an_error(nested):
    (nested / "Animalia/cat/loop").symlink_to(nested)
    with pytest.raises(DataError, match=str(nested / "Animalia/cat/loop")):
        build(nested)


INAT = (
    "00000_Animalia_Chordata_Aves_Passeriformes_Corvidae_Corvus_corax",
    "00001_Animalia_Chordata_Aves_Passeriformes_Corvidae_Pica_pica",
    "00002_Animalia_Chordata_Mammalia_Carnivora_Felidae_Felis_catus",
    "00003_Plantae_Tracheophyta_Magnoliopsida_Fagales_Fagaceae_Quercus_alba",
    "00004_Plantae_Tracheophyta_Magnoliopsida_Fabales_Fabaceae_Robinia_alba",
)


def test_folder_names_of_inaturalist_are_seven_levels(tmp_path):
    for i in range(15):
        write_image(tmp_path / INAT[i % 5] / f"{i}.jpg", seed=i)
    levels = ["kingdom", "phylum", "class", "order", "family", "genus", "species"]
    bundle = build(tmp_path, LEVELS=levels)
    assert [*bundle.taxonomy.num_classes.items()] == [
        *zip(levels, [2, 2, 3, 4, 4, 5, 5], strict=True)
    ]
    label = next(each for path, each in labels(bundle.train).items() if path.startswith("00003_"))
    names = [level.classes[i] for level, i in zip(bundle.taxonomy.levels, label, strict=True)]
    assert names == [*INAT[3].split("_")[1:7], "Quercus alba"]
    write_image(tmp_path / "others/0.jpg")
    with pytest.raises(DataError, match="others"):
        build(tmp_path, ALLOW_COARSE=False)


def test_rank_0_alone_reads_and_others_get_the_same(nested):
    """Large arrays travel beside the pickle."""
    (nested / "Plantae/oak/1.jpg").write_bytes(b"")
    sent = []

    def as_rank_0(read):
        buffers = []
        sent.append((pickle.dumps(read(), 5, buffer_callback=buffers.append), buffers))
        return pickle.loads(sent[0][0], buffers=buffers)

    main = build_skipping(nested, as_rank_0)
    (packed, buffers) = sent.pop()
    other = build_skipping(nested / "nowhere", lambda _: pickle.loads(packed, buffers=buffers))
    assert main.report == other.report
    assert [line for line in main.report if "1 damaged" in line and "Plantae/oak/1.jpg" in line]
    for one, two in ((main.train, other.train), (main.val, other.val)):
        assert paths(one) == paths(two)
        assert torch.equal(one.targets, two.targets)
        assert "Plantae/oak/1.jpg" not in paths(one)
        for position in range(len(two)):
            assert two[position][0].shape == (3, 16, 16)
