"""Soft targets of a teacher: their value, who may teach, resume, ranks, AutoBatch."""

import shutil
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

from linnaeus.config.schema import LossConfig, ModelConfig
from linnaeus.data.bundle import DataBundle, collate_pairs
from linnaeus.data.taxonomy import Level, Taxonomy
from linnaeus.runtime.errors import ConfigError
from linnaeus.size_search.searches import find_sizes
from linnaeus.training.distill import Distillation, build_distillation, check_teacher
from tests.helpers.ledger import limit_with_room_for
from tests.helpers.runs import SMALL, assert_same_bits, weights
from tests.helpers.searches import prepared
from tests.helpers.trained import BIRDS, ONE_LEVEL, PLAIN, save_checkpoint, save_run, spec_of

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """Logits of two levels, from the inputs."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.tensor(scale)), nn.Dropout(0.5)

    def forward(self, inputs):
        return self.drop(inputs[:, :2]) * self.scale, inputs[:, 2:] * self.scale


def by_hand(student, teacher, temperature):
    """The mean over the samples of sum_c q_c (log q_c - log p_c), with q and p written out."""
    q, p = (torch.exp(each / temperature) for each in (teacher, student))
    q, p = (each / each.sum(dim=1, keepdim=True) for each in (q, p))
    return (q * (q / p).log()).sum(dim=1).mean()


def test_the_loss_is_hintons_with_a_weight_per_level():
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    student, teacher = Scaled(1.0), Scaled(2.0)
    loss_node = LossConfig(LEVEL_WEIGHTS=[1.0, 3.0], DISTILL_WEIGHT=0.7, DISTILL_TEMPERATURE=4.0)
    found = Distillation(teacher, PLAIN, loss_node, nn.Identity()).train()
    outputs = student.eval()(inputs)
    total = found(torch.tensor(2.0), outputs, inputs)
    soft = [
        by_hand(own, theirs, 4.0)
        for own, theirs in zip(outputs, teacher.eval()(inputs), strict=True)
    ]
    expected = 0.3 * 2.0 + 0.7 * 16 * (0.25 * soft[0] + 0.75 * soft[1])
    torch.testing.assert_close(total, expected)

    total.backward()
    assert student.scale.grad is not None
    assert teacher.scale.grad is None


def data_of(taxonomy, mean=(0.5, 0.4, 0.3), in_chans=3):
    preprocessing = replace(spec_of().preprocessing, mean=mean)
    return DataBundle(
        None, None, taxonomy, in_chans, (32, 32), collate_pairs, preprocessing=preprocessing
    )


def built(name, data, loss=None):
    return build_distillation(
        ModelConfig("test_resnet", TEACHER=str(name)), loss or LossConfig(), data, CPU
    )


def test_a_run_teaches_on_images_of_its_own_normalisation(tmp_path):
    folder, before = save_run(tmp_path / "run", spec_of()), torch.get_rng_state()
    data = data_of(BIRDS, mean=(0.1, 0.2, 0.6))
    found, _ = built(folder, data)
    assert torch.equal(torch.get_rng_state(), before)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    ours, theirs = (each.preprocessing.normalise()(pixels) for each in (data, spec_of()))
    for soft, expected in zip(found.soft_targets(ours), found.teacher(theirs), strict=True):
        torch.testing.assert_close(soft, expected, rtol=1e-4, atol=1e-4)


def reordered(taxonomy):
    *above, finest = taxonomy.levels
    return Taxonomy((*above, Level(finest.name, finest.classes[::-1])), taxonomy.parents)


@pytest.mark.parametrize(
    ("data", "loss"),
    [
        (data_of(reordered(BIRDS)), None),
        (data_of(None), None),
        (data_of(BIRDS, in_chans=1), None),
        (data_of(BIRDS), {"_target_": "torch.nn.CrossEntropyLoss"}),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(tmp_path, data, loss):
    folder = save_run(tmp_path / "run", spec_of())
    with pytest.raises(ConfigError, match=r"MODEL\.TEACHER"):
        built(folder, data, loss)


def test_a_teacher_runs_no_code_of_its_file(tmp_path):
    node = {"_target_": "pathlib.Path.touch", "self": str(tmp_path / "touched")}
    save_checkpoint(tmp_path / "best.pt", spec_of(node=node), {"model": {"a": torch.ones(1)}})
    with pytest.raises(ConfigError, match=r"MODEL\.TEACHER"):
        built(tmp_path / "best.pt", data_of(BIRDS))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["nowhere/best.pt", "test_resnet.nonsense"])
def test_an_unknown_teacher_is_refused_before_the_data(name):
    with pytest.raises(ConfigError, match=r"MODEL\.TEACHER"):
        check_teacher(name)


def test_a_timm_model_teaches_where_it_names_the_same_classes(tmp_path):
    model = timm.create_model("test_vit", num_classes=3, img_size=32)
    about, sizes = {"label_names": ["cat", "dog", "eel"]}, {"img_size": 32, "num_classes": 3}
    timm.models.save_for_hf(model, tmp_path / "teacher", about, sizes)
    name = f"local-dir:{tmp_path / 'teacher'}"
    found, _ = built(name, data_of(ONE_LEVEL))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(found.soft_targets(images)[0], model.eval()(found.convert(images)))
    with pytest.raises(ConfigError, match=r"MODEL\.TEACHER"):
        built(name, data_of(reordered(ONE_LEVEL)))


TAUGHT = (
    *SMALL,
    "DATA.BATCH_SIZE=32",
    "TRAIN.EPOCHS=1",
    "TRAIN.LOG_EVERY=1",
    "TRAIN.CHECKPOINT_EVERY_STEPS=1",
    "TRAIN.KEEP_CHECKPOINTS=99",
    "TRAIN.AUTO_RESUME=True",
    "MODEL.DROP_RATE=0.2",
)


@pytest.mark.e2e
def test_a_taught_run_resumes_bit_for_bit(run, tmp_path):
    run(*TAUGHT, "EXPERIMENT.NAME=teacher").ok()
    teach = (*TAUGHT, f"MODEL.TEACHER={tmp_path / 'runs/teacher'}")
    assert "teacher: " in run(*teach, "EXPERIMENT.NAME=whole").ok().out
    whole, resumed = tmp_path / "runs/whole", tmp_path / "runs/resumed"
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copy(whole / "checkpoints/step_00000001.pt", resumed / "checkpoints/last.pt")
    run(*teach, "EXPERIMENT.NAME=resumed").ok()
    assert_same_bits(weights(whole), weights(resumed))
    untaught = weights(tmp_path / "runs/teacher")
    assert untaught.keys() == weights(whole).keys()
    assert any(not torch.equal(each, weights(whole)[name]) for name, each in untaught.items())


@pytest.mark.e2e
def test_autobatch_finds_a_smaller_size_beside_a_teacher(tmp_path):
    options = (
        *SMALL,
        "DATA.DATASET.NUM_SAMPLES=2400",
        "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=1.0",
        "DATA.AUTOBATCH.ENABLED_VAL=False",
        "DATA.AUTOBATCH.TOLERANCE=0.1",
    )
    search, _ = prepared(*options, "DATA.AUTOBATCH.MAX_BATCH_SIZE=4")
    find_sizes(search)
    spec = spec_of("resnet18", taxonomy=search.data.taxonomy)
    teacher = f"MODEL.TEACHER={save_run(tmp_path / 'teacher', spec)}"
    del search
    limit = f"DATA.AUTOBATCH.MEMORY_LIMIT_GB={limit_with_room_for(110)}"
    alone, taught = (
        find_sizes(prepared(*options, limit, *more)[0])["train"] for more in ((), (teacher,))
    )
    assert (alone.limited_by, taught.limited_by) == ("memory", "memory")
    assert taught.batch_size < 0.9 * alone.batch_size
