"""Every command in the README and the docs does what it says, made small: fewer epochs, smaller images."""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from linnaeus.config.load import load_config
from linnaeus.inference.trained import load_run
from linnaeus.main import cli
from tests.helpers.datasets import write_image
from tests.helpers.fashion import write_fashion_mnist
from tests.helpers.ledger import limit_with_room_for
from tests.helpers.run_files import write_run
from tests.helpers.trained import PLAIN, picture, save_run, spec_of

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
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
PRETRAINED_MODEL = ("MODEL.NAME=local-dir:hub",)  # stands in for the hub

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


def blocks(page):
    """The shell blocks of a page, one command on each line."""
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        yield block.replace("\\\n", " ")


def commands():
    for page in PAGES:
        for block in blocks(page) if page != TUTORIAL else ():
            if not block.startswith("#!"):
                lines = (line for line in block.splitlines() if line.strip() and line[0] != "#")
                yield from ((page.name, line) for line in lines)


COMMANDS = sorted({line.partition("  #")[0].rstrip(): page for page, line in commands()}.items())
"""(command without its comment, the last page that has it)."""


def of_kind(*starts):
    """(page, command)."""
    return [(page, line) for line, page in COMMANDS if line.startswith(starts)]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder with a model as the hub has it, and the checkpoint of a run."""
    path = tmp_path_factory.mktemp("pretrained")
    source = timm.create_model("test_resnet")
    timm.models.save_for_hf(source, path / "hub")
    (path / "birds/checkpoints").mkdir(parents=True)
    state = {f"backbone.{name}": tensor for name, tensor in source.state_dict().items()}
    progress = {"epoch": 12, "samples": 0, "step": 12}
    torch.save(
        {"progress": progress, "state": {"model": state}}, path / "birds/checkpoints/best.pt"
    )
    return path


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    for name in ("my_exp", "birds"):
        (tmp_path / f"{name}.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def desk(tmp_path, experiment, pretrained, monkeypatch):
    """A folder with what the commands speak of."""
    (tmp_path / "my_package.py").write_text(MY_PACKAGE)
    for split, count in (("train", 6), ("val", 2)):
        for species in (
            "Passeriformes/Corvus_corax",
            "Passeriformes/Parus_major",
            "Piciformes/Picus_viridis",
        ):
            for number in range(count):
                write_image(tmp_path / "birds" / split / species / f"{number}.jpg", number)
    (tmp_path / "hub").symlink_to(pretrained / "hub")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/birds").symlink_to(pretrained / "birds")
    shutil.copytree(tmp_path / "birds" / "val", tmp_path / "birds2026")
    table = (
        "image,level1,level2\nbirds/val/Passeriformes/Parus_major/0.jpg,Passeriformes,Parus_major\n"
    )
    (tmp_path / "test.csv").write_text(table)
    birds = sorted((tmp_path / "birds").rglob("*.jpg"))
    rows = (f"{path},{('fox;owl', 'owl', ';')[n % 3]}\n" for n, path in enumerate(birds))
    (tmp_path / "scenes").mkdir()
    (tmp_path / "scenes/train.csv").write_text("image,animal\n" + "".join(rows))
    write_fashion_mnist(tmp_path, 200, 16)
    monkeypatch.setattr("linnaeus.data.builtin.FASHION_FOLDER", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_shown_file_trains_the_run_that_follows(tmp_path):
    page = ROOT / "README.md"
    [shown] = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    file = tmp_path / re.findall(r"\w+\.yaml", shown)[0]
    file.write_text(shown)
    name = load_config(["--cfg", str(file)]).config.EXPERIMENT.NAME
    block = next(block for block in blocks(page) if "linnaeus evaluate" in block)
    assert set(re.findall(r"runs/(\w+)", block)) == {name}


def train_what_is_evaluated(line, desk):
    """Train the run that a command evaluates or learns from; nothing for another command."""
    if {"evaluate", "average"} & {*shlex.split(line)}:
        own = [
            "DATA.DATASET.NAME=imagefolder",
            f"DATA.DATASET.ROOT={desk}/birds",
            "EXPERIMENT.NAME=birds",
        ]
        kept = ("TRAIN.KEEP_CHECKPOINTS=5", "TRAIN.EPOCHS=5")
        assert cli([*own, *SMALLER, *SMALL_MODEL, *(kept if "average" in line else ())]) == 0
        if "average.pt" in line:
            assert cli(["average", "runs/birds"]) == 0
    if "MODEL.TEACHER=runs/birds" in line:
        teacher = line.partition("EXPERIMENT.NAME")[0].split()[2:]
        assert cli([*teacher, *SMALLER, *SMALL_MODEL, "EXPERIMENT.NAME=birds"]) == 0


def tokens_of(line, desk):
    line = line.replace("/data/", f"{desk}/").replace("NUM_SAMPLES=2000", "NUM_SAMPLES=64")
    line = line.replace(
        "--world-size 1,2,8,64", "--world-size 1,2,8"
    )  # the desk has 16 samples to validate
    return shlex.split(line.replace("configs/", f"{ROOT}/configs/"))


def smaller(tokens):
    """The same command on a small scale."""
    if {"--help", "--print-config", "evaluate", "average"}.intersection(tokens):
        return tokens
    own_model = any(token.startswith("MODEL._target_") for token in tokens)
    is_pretrained = "MODEL.PRETRAINED=True" in tokens
    model = () if own_model else PRETRAINED_MODEL if is_pretrained else SMALL_MODEL
    if "MODEL.LORA.RANK=8" in tokens:
        model = ("MODEL.NAME=test_vit", "MODEL.PRETRAINED=False")  # the other has no attention
    steps = (
        () if "--cfg" in tokens else ("DATA.BATCH_SIZE=64",)
    )  # the default data are all the digits
    length = ("TRAIN.MAX_STEPS=3",) if "TRAIN.MAX_STEPS" in tokens else ()
    if "TRAIN.EMA.SWA_EPOCHS" in tokens:
        length = ("TRAIN.EPOCHS=6",)
    if any(token.startswith("DATA.IMG_SIZE_SCHEDULE") for token in tokens):
        length = ("TRAIN.EPOCHS=3", "DATA.IMG_SIZE=null", "TRAIN.EFFECTIVE_BATCH_SIZE=32")
    if "--axis" in tokens:  # sides are tried up to the limit
        length = (f"DATA.AUTOBATCH.MEMORY_LIMIT_GB={limit_with_room_for(400)}",)
    return [*tokens, *SMALLER, *steps, *length, *model]


ON_SLURM = [command for command in of_kind("linnaeus ") if "--launcher slurm" in command[1]]
SWEEPS = [
    command
    for command in of_kind("linnaeus sweep ")
    if command not in ON_SLURM and "--status" not in command[1]  # tests/cli/compare looks at one
]
COMPARISONS = of_kind("linnaeus compare ")
PREDICTIONS, EXPORTS = of_kind("linnaeus predict "), of_kind("linnaeus export ")
OF_ONE_PROCESS = [
    command
    for command in of_kind("linnaeus ")
    if command not in (*SWEEPS, *ON_SLURM, *COMPARISONS, *PREDICTIONS, *EXPORTS)
    and "--status" not in command[1].split()
]


def mark_of(page, line):
    """The slower, the more its page holds; () for what starts no run."""
    if {"--print-config", "--help"} & set(line.split()) or "my_package.MyModel" in line:
        return ()
    pages = ("README.md", "index.md", "training.md", "resuming.md", "finetuning.md")
    return pytest.mark.e2e if page in pages else pytest.mark.slow


@pytest.mark.parametrize(
    ("page", "line"),
    [pytest.param(*command, marks=mark_of(*command)) for command in OF_ONE_PROCESS],
)
def test_a_command_of_one_process_works(page, line, desk, run):
    argv = tokens_of(line, desk)[1:]
    train_what_is_evaluated(line, desk)
    outcome = run(*smaller(argv))
    expected = 3 if "--require" in argv else 0  # the data of the test have fewer samples
    assert outcome.code == expected, outcome.err


@pytest.mark.parametrize(("page", "line"), ON_SLURM)
def test_a_command_for_slurm_makes_a_script(page, line, desk, run):
    """The tests in tests/slurm run such scripts."""
    argv = tokens_of(line, desk)[1:]
    outcome = run(*argv, *([] if "--dry-run" in argv else ["--dry-run"]))
    assert outcome.code == 0, outcome.err
    first = argv[argv.index("--slurm") + 1]
    assert f"#SBATCH --{first}\n" in outcome.out


@pytest.fixture
def trained(tmp_path, monkeypatch):
    for seed, name in enumerate(("birds", "birds_2")):
        save_run(tmp_path / "runs" / name, spec_of(taxonomy=PLAIN), seed=seed)
    (tmp_path / "photos").mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6  # the programs on a page must turn the photo too
    for number in range(2):
        picture(number, (64, 48)).save(tmp_path / "photos" / f"{number}.jpg", exif=turned)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "line"), PREDICTIONS)
def test_a_prediction_works(page, line, trained, run):
    outcome = run(*shlex.split(line)[1:], "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "2" in outcome.err.split()


def test_the_page_about_prediction_shows_what_python_gives(trained, capsys):
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/predict.md").read_text(), re.M | re.S
    )
    exec(compile(program, "predict.md", "exec"), {})
    assert re.findall(
        r"^photos/[01].jpg \('.+', 0\.\d+\) \w+ > .+ %", capsys.readouterr().out, re.M
    )


@pytest.mark.slow
def test_exports_work_and_are_used_without_linnaeus(trained, run):
    """The programs on the page are run as they stand, and name the run's best classes."""
    pytest.importorskip("onnxruntime")
    for _, line in EXPORTS:
        outcome = run(*shlex.split(line)[1:])
        assert outcome.code == 0, outcome.err
    text = (ROOT / "docs/export.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(programs) == 3
    (prediction,) = load_run("runs/birds", device="cpu").predict("photos/0.jpg", top=1)
    best = {level: classes[0] for level, classes in prediction.levels.items()}
    for program in programs:
        assert "linnaeus" not in "".join(re.findall(r"^(?:import|from) .*$", program, re.M))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "export.md", "exec"), {})
        found = dict(line.split(" ", 1) for line in printed.getvalue().strip().splitlines())
        assert set(found) <= set(best)
        for level, shown in found.items():
            name, _, probability = shown.rpartition(" ")
            assert (name, float(probability)) == (
                best[level][0],
                pytest.approx(best[level][1], rel=0.05),
            )


@pytest.mark.parametrize(("page", "line"), COMPARISONS)
def test_a_comparison_works(page, line, desk, run):
    for name in ("one", "other", "lr1", "gap/LR=1"):
        write_run(desk / "runs" / name)
    outcome = run(*shlex.split(line)[1:])
    assert outcome.code == 0, outcome.err


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), SWEEPS)
def test_a_sweep_works(page, line, desk, run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    line = re.sub(r"--trials \d+", "--trials 2", line)
    few = re.sub(
        r"(BATCH_SIZE|SEED)=([^, ]+),[^ ]*", r"\1=\2,9", " ".join(tokens_of(line, desk)[1:])
    ).split()
    smaller_runs = [token for token in smaller(few) if token != "DATA.BATCH_SIZE=4"]
    outcome = run(*smaller_runs)
    assert outcome.code == 0, outcome.out + outcome.err


@pytest.mark.e2e
def test_the_tutorial_works(tmp_path, run, monkeypatch):
    """Its commands in their order, with one epoch of few photographs, and its program."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    text = TUTORIAL.read_text()
    [shown] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "flowers.yaml").write_text(shown.replace("EPOCHS: 15", "EPOCHS: 1"))
    for line in "".join(blocks(TUTORIAL)).splitlines():
        program, first, *rest = shlex.split(line)
        if program == "python":
            command = [sys.executable, str(ROOT / first), *rest, "--number=80"]
            subprocess.run(command, check=True, capture_output=True)
        else:
            assert program == "linnaeus"
            outcome = run(first, *(re.sub(r"EPOCHS=\d+", "EPOCHS=1", word) for word in rest))
            assert outcome.code == 0, outcome.err
    with (tmp_path / "new.csv").open() as table:
        assert {"family_1", "species_1", "certain_level"} <= {*table.readline().strip().split(",")}
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "tutorial.md", "exec"), {})
    best = load_run("runs/finer", device="cpu").predict("new/asters/sunflower/0002.jpg", top=1)[0]
    names = {line.split()[0]: line.split()[1] for line in printed.getvalue().splitlines()}
    assert names == {level: classes[0][0] for level, classes in best.levels.items()}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("page", "line"), of_kind("torchrun"))
def test_a_command_of_several_processes_works(page, line, desk):
    tokens = re.sub(r"--nproc_per_node=\d+", "--standalone --nproc_per_node=2", line)
    train_what_is_evaluated(line, desk)
    command = [sys.executable, "-m", "torch.distributed.run", *smaller(tokens_of(tokens, desk)[1:])]
    done = subprocess.run(
        command, cwd=desk, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


OF_FRAMEWORKS = of_kind(
    *(f"python examples/{name}_" for name in ("lightning", "transformers", "trl", "accelerate"))
)
"""Tested in `tests/integrations`, because they need frameworks that are not installed here."""

SCRIPTS = [command for command in of_kind("python examples/") if command not in OF_FRAMEWORKS]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), SCRIPTS)
def test_a_script_works(page, line, desk):
    _, script, *argv = tokens_of(line, desk)
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *argv],
        cwd=desk,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_script_is_the_same_program_as_its_command(run):
    asked = ["--cfg", "nowhere.yaml", "TRAIN.EPOCH=1", "--fractoins"]
    words = [sys.executable, str(ROOT / "tools/analyze_batch_sizes.py"), *asked]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    outcome = run("analyze", *asked)
    assert (done.returncode, done.stderr) == (outcome.code, outcome.err)
    assert outcome.code == 2


def test_what_the_pages_name_is_there():
    known = (
        "make ",
        "source ",
        "pip ",
        "python examples/",
        "torchrun ",
        "linnaeus ",
    )
    assert [line for line, _ in COMMANDS if not line.startswith(known)] == []
    assert len(of_kind("linnaeus train ")) >= 10
    files, targets = set(), {line.split()[1] for _, line in of_kind("make ")}
    for page in PAGES:
        text = page.read_text()
        files |= {
            ROOT / name
            for name in re.findall(r"benchmarks/(?:results/|research/)?\w+\.(?:py|txt)", text)
        }
        links = re.findall(r"\]\(([^)#:]+\.(?:md|png|svg|html))(?:#[\w-]+)?\)", text)
        files |= {page.parent / target for target in links}
        targets |= set(re.findall(r"`make ([\w-]+)`", text))
    assert len(files) > 20
    assert [file for file in files if not file.is_file()] == []
    assert {"train", "test"} <= targets
    assert [
        target for target in targets if f"\n{target}:" not in (ROOT / "Makefile").read_text()
    ] == []


STRATEGIES = {
    "guided": "guided",
    "bisection": "binary",
    "doubling": "power",
    "doubling, then bisection": "binsearch",
}
"""By the name that the pages give each; the benchmark prints the value."""


def test_the_table_of_strategies_is_what_the_benchmark_printed():
    printed = (ROOT / "benchmarks" / "results" / "search_replay.txt").read_text()
    line = r"^(exact|multiple of 8) +(\w+) +([\d.]+)(?: +\S+){6} +([\d.]+) +\S+$"
    figures = {
        (mode, strategy): rest for mode, strategy, *rest in re.findall(line, printed, re.MULTILINE)
    }
    expected = {}
    for name, strategy in STRATEGIES.items():
        (exact, ratio), (multiple, _) = (
            figures[mode, strategy] for mode in ("exact", "multiple of 8")
        )
        expected[name] = (f"{float(exact):.1f}", f"{float(multiple):.1f}", f"{float(ratio):.2f}")
    row = r"^\| ([a-z, ]+)(?: \(.+\))? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, (ROOT / "docs/finders.md").read_text(), re.MULTILINE)
    assert {name: tuple(found) for name, *found in rows if name in STRATEGIES} == expected


def test_the_yaml_of_every_page_loads(tmp_path, capsys):
    for page in PAGES:
        for number, text in enumerate(
            re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S)
        ):
            file = tmp_path / f"{page.stem}{number}.yaml"
            file.write_text(text)
            assert cli(["--cfg", str(file), "--print-config"]) == 0, capsys.readouterr().err
