"""Mistakes in a configuration, each of which is one problem that `tests/messages/config.txt` holds."""

import re
from contextlib import chdir
from pathlib import Path

import pytest

from linnaeus.cli.train import read
from linnaeus.config.instantiate import call_target
from linnaeus.config.load import load_config
from linnaeus.runtime.errors import ConfigError
from tests.helpers.children import ROOT
from tests.helpers.configs import write
from tests.helpers.messages import error_of

COMMAND_LINES = """
--print_config
-x
--DATA.BATCH_SIZE=8
--help=yes
--cfg --print-config
my_exp.yaml
resnet50
DATA..BATCH_SIZE=8
--cfg none.yaml
--cfg .
--config-dir nowhere
--config-name base
EXPERIMENT.NAME DATA.BATCH_SIZE=8
DATA.FOO=1
~DATA.FOO
~TRAIN.COMPILE=true
DATA.BATCHSIZE=8
data.batch_size=8
LR=1
DATA.AUTOBATCH={ENABLE:true}
DATA.BATCH_SIZE.x=8
model.width=8
TRAIN.EPOCHS = 5
DATA._target_=x.Y
MODEL.width=8
MODEL=mlp
DATA.AUGMENT=strong
MODEL._target_=3
MODEL._target_='a..b'
modl=resnet50
model=resnet51
model=../data/digits
~optimizer=sgd
DATA.BATCH_SIZE=many
DATA.BATCH_SIZE=5/2
DATA.BATCH_SIZE=2**3
DATA.BATCH_SIZE=__import__('os')
DATA.BATCH_SIZE=null
DATA.BATCH_SIZE=0
DATA={BATCH_SIZE:true}
DATA.BATCH_SIZE=???
OPTIMIZER.LR=1e308*1e308
OPTIMIZER.LR=inf
DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=0
DATA.AUTOBATCH.STRATEGY=Guided
DATA.AUTOBATCH.MIN_BATCH_SIZE=600
DATA.AUTOBATCH.FIT=[none,chekpointing]
DATA.AUTOBATCH.FIT=[]
TRAIN.COMPILE=maybe
DATA.AUGMENT.MEAN=[0.5,x]
EXPERIMENT.WANDB.TAGS=[[a]]
DATA.IMG_SIZE_SCHEDULE=[1,32]
DATA.IMG_SIZE_SCHEDULE=[[2,32],[3,48]]
DATA.AUGMENT.CROP_SCALE=0,1
DATA.AUGMENT.CROP_SCALE=1,0.5
DATA.DATASET.NUM_CLASSES=[]
DATA.IMG_SIZE=[1,2,3]
MODEL.KWARGS=3
MODEL.KWARGS={1:2}
EXPERIMENT.NAME=
EXPERIMENT.NAME=../x
EXPERIMENT.NAME=a\udc80
DATA.IMG_SIZE=${TRAIN.EPOCH}
DATA.BATCH_SIZE_VAL=${DATA.BATCH_SIZE_VAL}
DATA.BATCH_SIZE_VAL=${TRAIN.EPOCHS}/0
DATA.BATCH_SIZE_VAL=${TRAIN.AMP}
DATA.BATCH_SIZE_VAL=${x
EXPERIMENT.OUTPUT_DIR=${oc.env:LINNAEUS_NONE}
EXPERIMENT.OUTPUT_DIR=${hydra:job.num}
--cfg=job
--info
--origin
--config-path conf
hydra.run.dir=/x
hydra/launcher=joblib
DATA.BATCH_SIZE=8,16
model=resnet18,resnet50
TRAIN.EPOCHS=range(1,4)
"""
"""Command lines with one problem."""

FILES = (
    "DATA.BATCH_SIZE: 8",
    "DATA:\n  BATCH_SIZE: {x: 8}",
    "EXPERIMENT:\n  NAME: [a]",
    "MODEL: resnet50",
    "EXPERIMENT:\n  NAME: 1.10",
    "MODEL:\n  KWARGS: {_target_: my.Thing}",
    "DATA:\n  DATASET:\n    ROOT: ???",
    "DATA:\n  BATCH_SIZE: 8\n  BATCH_SIZE: 9",
    "DATA:\n  BATCH_SIZE: 8\n - x: [",
    "a: &x\n  b: *x",
    "? [a]\n: 3",
    "MODEL:\n  KWARGS: {x: !!python/name:os.system a}",
    "DATA: {}\n---\nDATA: {}",
    "- a",
    "hydra:\n  run:\n    dir: /x",
    "defaults: base",
    "defaults: [base]",
    "defaults:\n  - model: resnet51",
    "defaults:\n  - optimizer: ???",
    "defaults: [model: resnet50, model: resnet18]",
    "defaults: [my]",
)
"""Files with one problem."""

TREES = {
    "--cfg=near.yaml": {"near": "defaults: [bsae]", "base": ""},
    "--cfg=deep.yaml": {"deep": "defaults: [c]", "c": "defaults: [d]", "d": "DATA: {BATCH_SIZ: 8}"},
    "--cfg=late.yaml": {
        "late": "defaults: [exp: a, model: resnet18]",
        "exp/a": "defaults: [override /model: vit_tiny]",
    },
    "--config-dir=. model=own": {"model/own": "DROP: 0.1"},
    "--config-dir=. +extra=[one,tow]": {"extra/one": ""},
    "--config-dir=. experiments=birds": {"experiment/birds": "", "data/augment/strong": ""},
    "--config-dir=. --config-name=bas": {"base": ""},
}
"""The files of a command line with one problem."""


def thing(*args, size=None, facts=None, inner=None):
    """A user's function."""


def strict(size):
    try:
        {}[size]
    except KeyError as error:
        raise ValueError(f"size {size} is not supported") from error


STRICT = {"_target_": f"{__name__}.strict", "size": 5}
TARGETS = {
    "no package": {"_target_": "no_such.Model"},
    "no attribute": {"_target_": f"{__name__}.thingy"},
    "no callable": {"_target_": f"{__name__}.FILES"},
    "misspelled argument": {"fatcs": 1},
    "argument in capitals": {"SIZE": 1},
    "error of the function": STRICT,
    "error of a nested node": {"inner": STRICT},
    "nested target": {"inner": [{"_target_": "math.nothing"}]},
    "_args_": {"_args_": 1},
}
"""Keys of a node that cannot be called."""


def problem_of(line, files=()):
    """The only problem of a command line, before which these files are written."""
    write(dict(files))
    with pytest.raises(ConfigError) as caught:
        read(line.split(" "))
    (problem,) = caught.value.problems
    return problem


def problem_of_tree(line):
    folder = Path(f"tree{[*TREES].index(line)}")
    folder.mkdir()
    with chdir(folder):
        return problem_of(line, TREES[line])


def problem_of_target(title):
    with pytest.raises(ConfigError) as caught:
        call_target({"_target_": f"{__name__}.thing", **TARGETS[title]}, "MODEL")
    (problem,) = caught.value.problems
    return re.sub(r"line \d+", "line N", problem)


def test_messages(golden, monkeypatch):
    found = {f"`{line}`": problem_of(line) for line in COMMAND_LINES.split("\n")[1:-1]}
    found |= {f"file `{text}`": problem_of("--cfg=my.yaml", {"my": text}) for text in FILES}
    found |= {f"`{line}`, in its files": problem_of_tree(line) for line in TREES}
    found |= {f"_target_: {title}": problem_of_target(title) for title in TARGETS}
    assert max(map(len, found.values())) < 400
    assert not any("\n" in text for text in found.values()), "each is a line"
    found["several problems"] = error_of(load_config, ["DATA.FOO=1", "TRAIN.AMP=" + "\nx" * 400])
    found["values without a bottom"] = error_of(
        load_config, ["MODEL.KWARGS.x=" + "[" * 300 + "]" * 300]
    )
    found["a file without a bottom"] = problem_of("--cfg=my.yaml", {"my": "[" * 400 + "]" * 400})
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    found["no text"] = error_of(load_config, ["--cfg=binary.yaml"])
    monkeypatch.setenv("WORLD_SIZE", "2")  # as srun sets it
    found["`${now:}` of several machines"] = error_of(load_config, ["EXPERIMENT.NAME=${now:%Y}"])
    by_title = {title.encode("unicode_escape").decode(): text for title, text in found.items()}
    golden("config", by_title, root=ROOT, here=Path.cwd())
