"""Every command in the README and the docs does what it says, made small: fewer epochs, smaller images."""

import contextlib
import io
import re
import shlex
import shutil

import pytest
import timm
from PIL import Image

from linnaeus.inference.trained import load_run
from linnaeus.main import cli
from tests.helpers import children
from tests.helpers.children import ROOT
from tests.helpers.datasets import write_image
from tests.helpers.fashion import write_fashion_mnist
from tests.helpers.ledger import limit_with_room_for
from tests.helpers.run_files import write_run
from tests.helpers.trained import PLAIN, picture, save_run, spec_of

README, TUTORIAL = ROOT / "README.md", ROOT / "docs/tutorial.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALLER = (
    "EXPERIMENT.DEVICE=cpu",
    "TRAIN.EPOCHS=1",
    "DATA.IMG_SIZE=32",
    "DATA.BATCH_SIZE=4",
    "DATA.NUM_WORKERS=1",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE=64",
    "DATA.AUTOBATCH.MEMORY_LIMIT_GB=null",  # the process of the tests may hold more than an example's limit
)
SMALL_MODEL = ("MODEL.NAME=test_resnet",)

EXPERIMENT = """\
DATA:
  DATASET:
    NAME: synthetic
    NUM_SAMPLES: 32
    NUM_SAMPLES_VAL: 16
    LEVELS: [order, species]
"""
MY_PACKAGE = """\
import torch
from torch import nn
from torch.utils.data import Dataset

class MyModel(nn.Module):
    def __init__(self, num_classes, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 8 * 8, width), nn.ReLU(), nn.Linear(width, num_classes)
        )

    def forward(self, images):
        return self.layers(images)

class MyDataset(Dataset):
    num_classes = 3

    def __init__(self, split):
        self.images = torch.rand(24 if split == "train" else 9, 3, 8, 8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index % 3
"""


def blocks(page, language):
    """The blocks of a page in a language; of the shell with one command on each line."""
    found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)
    return [block.replace("\\\n", " ") if language == "bash" else block for block in found]


def commands():
    """Each command without its comment, with the last page that has it."""
    found = {}
    for page in PAGES:
        for block in blocks(page, "bash"):
            if page != TUTORIAL and not block.startswith("#!"):
                lines = (line for line in block.splitlines() if line.strip() and line[0] != "#")
                found |= {line.partition("  #")[0].rstrip(): page.name for line in lines}
    return sorted(found.items())


COMMANDS = commands()


def of_kind(*starts):
    return [(line, page) for line, page in COMMANDS if line.startswith(starts)]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with what the commands speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_exp", "birds"):
        (tmp_path / f"{name}.yaml").write_text(EXPERIMENT)
    (tmp_path / "my_package.py").write_text(MY_PACKAGE)
    for split, count in (("train", 6), ("val", 2)):
        for species in ("Passeriformes/Corvus", "Passeriformes/Parus_major", "Piciformes/Picus"):
            for number in range(count):
                write_image(tmp_path / "birds" / split / species / f"{number}.jpg", number)
    shutil.copytree(tmp_path / "birds/val", tmp_path / "birds2026")
    parus = "Passeriformes/Parus_major"
    (tmp_path / "test.csv").write_text(
        f"image,level1,level2\nbirds/val/{parus}/0.jpg,{parus.replace('/', ',')}\n"
    )
    birds = sorted((tmp_path / "birds").rglob("*.jpg"))
    rows = (f"{path},{('fox;owl', 'owl', ';')[n % 3]}\n" for n, path in enumerate(birds))
    (tmp_path / "scenes").mkdir()
    (tmp_path / "scenes/train.csv").write_text("image,animal\n" + "".join(rows))
    write_fashion_mnist(tmp_path, 200, 16)
    monkeypatch.setattr("linnaeus.data.builtin.FASHION_FOLDER", str(tmp_path))
    timm.models.save_for_hf(timm.create_model("test_resnet"), tmp_path / "hub")
    for seed, name in enumerate(("birds", "birds_2")):
        save_run(tmp_path / "runs" / name, spec_of(taxonomy=PLAIN), seed=seed)
    for name in ("one", "other", "lr1", "gap/LR=1"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "photos").mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6  # the programs on a page must turn the photo too
    for number in range(2):
        picture(number, (64, 48)).save(tmp_path / "photos" / f"{number}.jpg", exif=turned)
    return tmp_path


def train_what_is_used(line, desk):
    """Train the run that a command evaluates or learns from; nothing for another command."""
    if {"evaluate", "average"} & {*shlex.split(line)}:
        own = ["DATA.DATASET.NAME=imagefolder", f"DATA.DATASET.ROOT={desk}/birds"]
        kept = ["TRAIN.KEEP_CHECKPOINTS=5", "TRAIN.EPOCHS=5"] if "average" in line else []
        assert cli([*own, *SMALLER, *SMALL_MODEL, *kept, "EXPERIMENT.NAME=birds"]) == 0
        if "average.pt" in line:
            assert cli(["average", "runs/birds"]) == 0
    if "MODEL.TEACHER=runs/birds" in line:
        teacher = line.partition("EXPERIMENT.NAME")[0].split()[2:]
        assert cli([*teacher, *SMALLER, *SMALL_MODEL, "EXPERIMENT.NAME=birds"]) == 0


def smaller(line, desk):
    """The words of a command, on a small scale."""
    for text, replacement in (
        ("/data/", f"{desk}/"),
        ("NUM_SAMPLES=2000", "NUM_SAMPLES=64"),
        ("--world-size 1,2,8,64", "--world-size 1,2,8"),  # the desk has 16 samples to validate
        ("configs/", f"{ROOT}/configs/"),
    ):
        line = line.replace(text, replacement)
    line = re.sub(r"--trials \d+", "--trials 2", line)
    _, *words = shlex.split(line)
    if "sweep" in words:
        grid = re.compile("(BATCH_SIZE|SEED)=([^, ]+),.*")
        words = [grid.sub(r"\1=\2,9", word) for word in words]
    if "slurm" in words:
        return [*words, "--dry-run"]
    if "predict" in words:
        return [*words, "--device=cpu"]
    if {"--help", "--print-config", "evaluate", "average", "compare"} & {*words}:
        return words
    more = [*SMALLER]
    if "sweep" in words:
        more.remove("DATA.BATCH_SIZE=4")
    elif "--cfg" not in words:
        more.append("DATA.BATCH_SIZE=64")  # the default data are all the digits
    if "MODEL.PRETRAINED=True" in words:
        more.append("MODEL.NAME=local-dir:hub")  # stands in for the hub
    elif "my_package" not in line:
        more += SMALL_MODEL
    if "MODEL.LORA.RANK=8" in words:
        more += ["MODEL.NAME=test_vit", "MODEL.PRETRAINED=False"]  # the other has no attention
    if "TRAIN.MAX_STEPS" in words:
        more.append("TRAIN.MAX_STEPS=3")
    if "TRAIN.EMA.SWA_EPOCHS" in words:
        more.append("TRAIN.EPOCHS=6")
    if "DATA.IMG_SIZE_SCHEDULE" in line:
        more += ["TRAIN.EPOCHS=3", "DATA.IMG_SIZE=null", "TRAIN.EFFECTIVE_BATCH_SIZE=32"]
    if "--axis" in words:  # sides are tried up to the limit
        more.append(f"DATA.AUTOBATCH.MEMORY_LIMIT_GB={limit_with_room_for(400)}")
    return [*words, *more]


def mark_of(line, page):
    """`e2e` for the pages named here, `slow` for others; () for what starts no run."""
    words = {*line.split()}
    if {"--print-config", "--help", "slurm", "predict", "compare"} & words or "MyModel" in line:
        return ()
    pages = ("README.md", "index.md", "training.md", "resuming.md", "finetuning.md")
    return pytest.mark.e2e if page in pages else pytest.mark.slow


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=mark_of(line, page))
        for line, page in of_kind("linnaeus ")
        if "--status" not in line and " export " not in line
    ],
)
def test_a_command_works(line, desk, run):
    """The jobs of scripts for SLURM are run in tests/slurm, --status in tests/cli/compare."""
    train_what_is_used(line, desk)
    outcome = run(*smaller(line, desk))
    expected = 3 if "--require" in line else 0  # the data of the test have fewer samples
    assert outcome.code == expected, outcome.out + outcome.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        line
        for line, _ in of_kind("torchrun", "python examples/")
        if not re.search("examples/(lightning|transformers|trl|accelerate)_", line)
    ],
)
def test_a_program_works(line, desk):
    """Examples with frameworks are tested in tests/integrations."""
    _, *words = shlex.split(line)
    if line.startswith("torchrun"):
        train_what_is_used(line, desk)
        line = re.sub(r"--nproc_per_node=\d+", "--standalone --nproc_per_node=2", line)
        words = ["-m", "torch.distributed.run", *smaller(line, desk)]
    else:
        words[0] = ROOT / words[0]
    children.python(*words, cwd=desk).ok()


def printed_by(program):
    """The lines that a program prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "page.md", "exec"), {})
    return printed.getvalue().splitlines()


def test_the_page_about_prediction_shows_what_python_gives(desk):
    [program] = blocks(ROOT / "docs/predict.md", "python")
    shown = "\n".join(printed_by(program))
    assert re.search(r"photos/[01].jpg \('.+', 0\.\d+\) \w+ > .+ %", shown)


@pytest.mark.slow
def test_exports_work_and_are_used_without_linnaeus(desk, run):
    """The programs on the page are run as they stand, and name the run's best classes."""
    pytest.importorskip("onnxruntime")
    for line, _ in of_kind("linnaeus export "):
        run(*shlex.split(line)[1:]).ok()
    programs = blocks(ROOT / "docs/export.md", "python")
    assert len(programs) == 3
    [prediction] = load_run("runs/birds", device="cpu").predict("photos/0.jpg", top=1)
    for program in programs:
        assert "linnaeus" not in "".join(re.findall(r"^(?:import|from) .*$", program, re.M))
        for line in printed_by(program):
            level, shown = line.split(" ", 1)
            name, _, probability = shown.rpartition(" ")
            [best] = prediction.levels[level]
            assert (name, float(probability)) == (best[0], pytest.approx(best[1], rel=0.05))


@pytest.mark.e2e
def test_the_tutorial_works(tmp_path, run):
    """Its commands in their order, with one epoch of few photographs, and its program."""
    pytest.importorskip("onnxruntime")
    [shown] = blocks(TUTORIAL, "yaml")
    (tmp_path / "flowers.yaml").write_text(shown.replace("EPOCHS: 15", "EPOCHS: 1"))
    for line in "".join(blocks(TUTORIAL, "bash")).splitlines():
        program, first, *rest = shlex.split(line)
        if program == "python":
            children.python(ROOT / first, *rest, "--number=80", cwd=tmp_path).ok()
        else:
            assert program == "linnaeus"
            run(first, *(re.sub(r"EPOCHS=\d+", "EPOCHS=1", word) for word in rest)).ok()
    header, *_ = (tmp_path / "new.csv").read_text().splitlines()
    assert {"family_1", "species_1", "certain_level"} <= {*header.split(",")}
    [program] = blocks(TUTORIAL, "python")
    [best] = load_run("runs/finer", device="cpu").predict("new/asters/sunflower/0002.jpg", top=1)
    names = {line.split()[0]: line.split()[1] for line in printed_by(program)}
    assert names == {level: classes[0][0] for level, classes in best.levels.items()}


def test_what_the_pages_name_is_there():
    known = ("make ", "source ", "pip ", "python examples/", "torchrun ", "linnaeus ")
    assert [line for line, _ in COMMANDS if not line.startswith(known)] == []
    assert len(of_kind("linnaeus train ")) >= 10
    files, targets = set(), {line.split()[1] for line, _ in of_kind("make ")}
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"benchmarks/(?:results/|research/)?\w+\.(?:py|txt)", text)
        links = re.findall(r"\]\(([^)#:]+\.(?:md|png|svg|html))(?:#[\w-]+)?\)", text)
        files |= {ROOT / name for name in named} | {page.parent / link for link in links}
        targets |= {*re.findall(r"`make ([\w-]+)`", text)}
    assert len(files) > 20
    assert [file for file in files if not file.is_file()] == []
    assert {"train", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_the_yaml_of_every_page_loads(tmp_path, capsys):
    for page in PAGES:
        for number, text in enumerate(blocks(page, "yaml")):
            file = tmp_path / f"{page.stem}{number}.yaml"
            file.write_text(text)
            assert cli(["--cfg", str(file), "--print-config"]) == 0, capsys.readouterr().err


def test_the_shown_file_names_the_run_that_follows():
    [name] = re.findall(r"(\w+)\.yaml", blocks(README, "yaml")[0])
    assert f"linnaeus evaluate runs/{name}\n" in README.read_text()
