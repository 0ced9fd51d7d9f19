"""Mistakes in a configuration: what must be in each problem, and in one file the whole sentences."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from linnaeus.commands.train.options import read
from linnaeus.config.instantiate import call_target
from linnaeus.config.load import load_config
from linnaeus.errors import ConfigError
from tests.helpers.configs import problems, write
from tests.helpers.messages import Golden, error_of

COMMAND_LINES = {
    # options
    "--print_config": "--print-config",
    "-x": "-x",
    "--DATA.BATCH_SIZE=8": "DATA.BATCH_SIZE",
    "--help=yes": "--help",
    "--cfg --print-config": "--cfg",
    "--config-dir": "--config-dir",
    "--config-name": "--config-name",
    "my_exp.yaml": "--cfg my_exp.yaml",
    "resnet50": "'resnet50'",
    "DATA..BATCH_SIZE=8": "DATA..BATCH_SIZE",
    "--cfg none.yaml": "none.yaml",
    "--cfg .": "--cfg",
    "--config-dir nowhere": "nowhere --config-dir",
    "--config-name base": "base --config-dir",
    # keys
    "EXPERIMENT.NAME DATA.BATCH_SIZE=8": "EXPERIMENT.NAME",
    "DATA.FOO=1": "DATA.FOO",
    "~DATA.FOO": "~DATA.FOO",
    "~MODEL.KWARGS.foo": "~MODEL.KWARGS.foo",
    "TRAIN.AMP=bf16 ~TRAIN.AMP=fp16": "~TRAIN.AMP 'fp16'",
    "DATA.BATCHSIZE=8": "DATA.BATCHSIZE DATA.BATCH_SIZE",
    "data.batch_size=8": "data.batch_size DATA.BATCH_SIZE",
    "LR=1": "OPTIMIZER.LR",
    "TRAIN.EPOCH=1": "TRAIN.EPOCHS",
    "DATA.AUTOBATCH={ENABLE:true}": "DATA.AUTOBATCH.ENABLED",
    "DATA.BATCH_SIZE.x=8": "DATA.BATCH_SIZE",
    "DATA=8": "DATA",
    "DATA._target_=x.Y": "DATA._target_",
    "MODEL.width=8": "MODEL.width MODEL._target_",
    "LOSS.LABEL_SMOTHING=0.1": "LOSS.LABEL_SMOTHING LOSS.LABEL_SMOOTHING",
    "MODEL=mlp": "model=mlp",
    "DATA.AUGMENT=strong": "data/augment=strong",
    "MODEL.KWARGS.x=[1,2] MODEL.KWARGS.x.0=5": "MODEL.KWARGS.x",
    "MODEL._target_=3": "MODEL._target_",
    "MODEL._target_='a..b'": "MODEL._target_",
    # groups
    "modl=resnet50": "modl model",
    "~modl": "modl model",
    "model=resnet51": "'resnet51' resnet50",
    "model=../data/digits": "'../data/digits'",
    "~optimizer=slg": "optimizer 'slg' sgd",
    "optimizer=sgd ~optimizer=adamw": "~optimizer 'adamw' 'sgd'",
    "+model=resnet18 +model=resnet50": "+model=[resnet18,resnet50]",
    "model@MODEL.encoder=resnet18 MODEL._target_=my.Model": "model@MODEL.encoder 'resnet18'",
    # values
    "DATA.BATCH_SIZE=many": "DATA.BATCH_SIZE 'many'",
    "DATA.BATCH_SIZE=5/2": "DATA.BATCH_SIZE '5/2' 2.5",
    "DATA.BATCH_SIZE=2**3": "DATA.BATCH_SIZE '2**3' + - * /",
    "DATA.BATCH_SIZE=__import__('os')": "DATA.BATCH_SIZE __import__",
    "DATA.BATCH_SIZE=1/0": "DATA.BATCH_SIZE '1/0'",
    "DATA.BATCH_SIZE=nan": "DATA.BATCH_SIZE 'nan'",
    "DATA.BATCH_SIZE=null": "DATA.BATCH_SIZE 'null'",
    "DATA.BATCH_SIZE=0": "DATA.BATCH_SIZE 1",
    "DATA.BATCH_SIZE=[8]": "DATA.BATCH_SIZE [8]",
    "DATA={BATCH_SIZE:true}": "DATA.BATCH_SIZE True",
    "DATA.BATCH_SIZE=???": "DATA.BATCH_SIZE",
    "OPTIMIZER.LR=1e308*1e308": "OPTIMIZER.LR",
    "OPTIMIZER.LR=x": "OPTIMIZER.LR 'x'",
    "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION=0": "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION 0 1",
    "DATA.AUTOBATCH.STRATEGY=Guided": "'Guided' guided",
    "DATA.AUTOBATCH.MIN_BATCH_SIZE=600": "MIN_BATCH_SIZE 600 MAX_BATCH_SIZE 512",
    "DATA.AUTOBATCH.MAX_BATCH_SIZE_VAL=4 DATA.AUTOBATCH.MIN_BATCH_SIZE_VAL=5": "5 MAX_BATCH_SIZE_VAL 4",
    "TRAIN.COMPILE=maybe": "TRAIN.COMPILE 'maybe'",
    "TRAIN.COMPILE=null": "TRAIN.COMPILE 'null'",
    "TRAIN.AMP=bf61": "TRAIN.AMP 'bf61' off bf16 fp16",
    "DATA.AUGMENT.MEAN=[0.5,x]": "DATA.AUGMENT.MEAN 'x'",
    "DATA.AUGMENT.CROP_SCALE=0,1": "DATA.AUGMENT.CROP_SCALE 0 1",
    "DATA.AUGMENT.CROP_SCALE=1,0.5": "DATA.AUGMENT.CROP_SCALE",
    "DATA.DATASET.NUM_CLASSES=[]": "DATA.DATASET.NUM_CLASSES",
    "DATA.IMG_SIZE=[1,2,3]": "DATA.IMG_SIZE",
    "DATA.IMG_SIZE=0": "DATA.IMG_SIZE",
    "MODEL.KWARGS=3": "MODEL.KWARGS",
    "MODEL.KWARGS={1:2}": "MODEL.KWARGS",
    "EXPERIMENT.NAME=": "EXPERIMENT.NAME ''",
    "EXPERIMENT.NAME=../x": "EXPERIMENT.NAME EXPERIMENT.OUTPUT_DIR",
    "EXPERIMENT.NAME=null": "EXPERIMENT.NAME",
    "EXPERIMENT.NAME=a\0b": "EXPERIMENT.NAME",
    "EXPERIMENT.NAME=a\udc80": "EXPERIMENT.NAME",
    # interpolations
    "DATA.IMG_SIZE=${TRAIN.EPOCH}": "DATA.IMG_SIZE TRAIN.EPOCH TRAIN.EPOCHS",
    "DATA.BATCH_SIZE_VAL=${DATA.BATCH_SIZE_VAL}": "DATA.BATCH_SIZE_VAL",
    "DATA.BATCH_SIZE_VAL=${TRAIN.EPOCHS}/0": "DATA.BATCH_SIZE_VAL",
    "DATA.BATCH_SIZE_VAL=${TRAIN.AMP}": "DATA.BATCH_SIZE_VAL",
    "DATA.BATCH_SIZE_VAL=${x": "DATA.BATCH_SIZE_VAL",
    "EXPERIMENT.OUTPUT_DIR=${oc.env:LINNAEUS_NONE}": "EXPERIMENT.OUTPUT_DIR LINNAEUS_NONE",
    "EXPERIMENT.OUTPUT_DIR=${hydra:job.num}": "hydra:job.num hydra:runtime.cwd",
    "EXPERIMENT.OUTPUT_DIR=${hydra:runtime.choices.model}": "model",
    "EXPERIMENT.NAME=${hydra:job.name}": "EXPERIMENT.NAME hydra:job.name",
    # what Hydra's users type
    "--multirun": "sweep",
    "-m": "sweep",
    "--cfg=job": "--cfg --print-config",
    "--info": "--origin",
    "--resolve": "--resolve",
    "--package DATA": "--print-config",
    "--run": "--run",
    "--hydra-help": "--help",
    "--config-path conf": "--config-dir",
    "--shell-completion": "--install-completion",
    "--experimental-rerun x": "--cfg",
    "hydra.run.dir=/x": "EXPERIMENT.OUTPUT_DIR EXPERIMENT.NAME",
    "++hydra.job.name=x": "EXPERIMENT.NAME",
    "~hydra.job_logging=x": "logs/",
    "hydra/launcher=joblib": "sweep",
    "hydra.nothing.known=1": "hydra.nothing.known",
    "hydra.searchpath=[conf]": "--config-dir",
    "DATA.BATCH_SIZE=8,16": "sweep DATA.BATCH_SIZE=8,16",
    "model=resnet18,resnet50": "sweep model=resnet18,resnet50",
    "TRAIN.EPOCHS=range(1,4)": "sweep TRAIN.EPOCHS=range(1,4)",
}
"""Words that the only problem of a command line holds."""

FILES = {
    "DATA:\n  BATCHSIZE: 8": "2 DATA.BATCHSIZE DATA.BATCH_SIZE",
    "DATA.BATCH_SIZE: 8": "1 DATA.BATCH_SIZE",
    "DATA:\n  BATCH_SIZE: many": "2 DATA.BATCH_SIZE 'many'",
    "DATA:\n  BATCH_SIZE:": "2 DATA.BATCH_SIZE null",
    "DATA:\n  BATCH_SIZE: {x: 8}": "2 DATA.BATCH_SIZE",
    "EXPERIMENT:\n  NAME: [a]": "2 EXPERIMENT.NAME ['a']",
    "DATA: [3]": "1 DATA",
    "MODEL: resnet50": "1 MODEL.NAME",
    "MODEL:\n  KWARGS: {_target_: my.Thing}": "2 MODEL.KWARGS._target_",
    "DATA:\n  DATASET:\n    ROOT: ???": "3 DATA.DATASET.ROOT",
    "DATA:\n  BATCH_SIZE: 8\n  BATCH_SIZE: 9": "3 DATA.BATCH_SIZE",
    "MODEL:\n  KWARGS: {a: 1, a: 2}": "2 MODEL.KWARGS.a",
    "DATA:\n  BATCH_SIZE: 8\n - x: [": "3 YAML",
    "DATA:\n\tBATCH_SIZE: 8": "2 YAML",
    "a: &x\n  b: *x": "1 alias",
    "? [a]\n: 3": "1 key",
    "MODEL:\n  KWARGS: {x: !!python/name:os.system a}": "2 YAML",
    "DATA: {}\n---\nDATA: {}": "2",
    "- a": "list",
    "x: \"\\0\"\n\0": "YAML",
    "hydra:\n  run:\n    dir: /x": "3 hydra.run.dir EXPERIMENT.NAME",
    "defaults: [override hydra/job_logging: disabled]": "1 hydra/job_logging",
    "defaults: base": "defaults",
    "defaults: [base]": "1 'base'",
    "defaults: [model]": "1 'model'",
    "defaults:\n  - model: resnet51": "2 'resnet51' resnet50",
    "defaults: [modl: resnet50]": "1 modl model",
    "defaults:\n  - optimizer: ???": "2 optimizer",
    "defaults: [model: {a: 1}]": "1",
    "defaults: [_self_, _self_]": "1 _self_",
    "defaults: [model: resnet50, model: resnet18]": "1 model",
    "defaults: [my]": "1 defaults",
    "defaults: [{model: '${nothing}'}]": "1 ${nothing}",
}  # fmt: skip
"""The line (a number) and the words in the only problem of a file."""

TREES: dict[str, tuple[dict[str, str], str]] = {
    "--cfg=my.yaml": ({"my": "defaults: [a]", "a": "defaults:\n  - b", "b": "defaults:\n  - a"},
    "a.yaml b.yaml"),
    "--cfg=two.yaml": ({"two": "defaults: [c, d]", "c": "defaults: [{model: resnet50}]",
                        "d": "defaults: [{model: resnet18}]"}, "model c.yaml d.yaml"),
    "--cfg=late.yaml": ({"late": "defaults: [exp: a, model: resnet18]",
                         "exp/a": "defaults: [override /model: vit_tiny]"}, "model exp/a.yaml late.yaml"),
    "--config-dir=. model=z": ({"model/z": "defaults: [override /model: z]\nNAME: resnet18"},
                               "model/z.yaml /model@_global_"),
    "--config-dir=. model=own": ({"model/own": "NAME: x\nDROP: 0.1"}, "MODEL.DROP model/own.yaml 2"),
    "--config-dir=. +extra=[one,tow]": ({"extra/one": ""}, "extra 'tow' one"),
    "--config-dir=. experiments=birds": ({"experiment/birds": "", "data/augment/strong": ""},
                                           "experiments data/augment experiment"),
    "--config-dir=. --config-name=bas": ({"base": ""}, "bas base"),
    "--config-dir=base.yaml": ({"base": ""}, "base.yaml"),
    "--cfg=left.yaml ~extra=[one]": ({"left": "defaults: [{extra: [one, two]}]", "extra/one": "",
                                      "extra/two": ""}, "~extra left.yaml 'two'"),
}  # fmt: skip
"""By the command line: the files, and words in the only problem."""


def thing(*args: Any, size: Any = None, facts: Any = None, inner: Any = None) -> None:
    """A user's function."""


def strict(size: int) -> None:
    try:
        {}[size]
    except KeyError as error:
        raise ValueError(f"size {size} is not supported") from error


STRICT = {"_target_": f"{__name__}.strict", "size": 5}
TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "no package": ({"_target_": "no_such.Model"}, "MODEL._target_ 'no_such.Model'"),
    "no attribute": ({"_target_": f"{__name__}.thingy"}, "MODEL._target_ thingy'"),
    "no callable": ({"_target_": f"{__name__}.FILES"}, "MODEL._target_ FILES'"),
    "empty": ({"_target_": ""}, "MODEL._target_ ''"),
    "unknown argument": ({"colour": 1}, "thing TypeError 'colour'"),
    "misspelled argument": ({"fatcs": 1}, "'fatcs' MODEL.facts"),
    "argument in capitals": ({"SIZE": 1}, "'SIZE' MODEL.size"),
    "error of the function": (STRICT, "strict ValueError 5"),
    "error of a nested node": ({"inner": STRICT}, "thing ValueError 5"),
    "nested target": ({"inner": [{"_target_": "math.nothing"}]},
    "thing MODEL.inner.0._target_ 'math.nothing'"),
    "nested special key": ({"inner": {"_target_": "math.sqrt", "_args_": 1}}, "thing MODEL.inner._args_ 1"),
    "_partial_": ({"_partial_": "perhaps"}, "MODEL._partial_ 'perhaps'"),
    "_recursive_": ({"_recursive_": 2}, "MODEL._recursive_ 2"),
    "_args_": ({"_args_": "ab"}, "MODEL._args_ 'ab'"),
    "_convert_": ({"_convert_": "some"}, "MODEL._convert_ 'some' none partial object all"),
}  # fmt: skip
"""Keys of a node, and words in the only problem of calling it."""


def batches() -> list[list[str]]:
    """Command lines that are loaded together, as a load takes longer than a mistake: their keys differ."""
    found: list[dict[str, str]] = []
    for line in COMMAND_LINES:
        key = re.split("[=@]", line.lstrip("+~-"))[0]
        alone = " " in line or "{" in line or "_target_" in line or ("." not in key and key.isupper())
        alone |= line.startswith("--config-")
        batch = next((batch for batch in found if not {key, "alone"} & batch.keys() and not alone), None)
        if batch is None:
            found.append(batch := {})
        batch["alone" if alone else key] = line
    return [list(batch.values()) for batch in found]


@functools.cache
def problem_of(line: str, text: str | None = None) -> str:
    """The only problem of a command line, which the file `my.yaml` may precede."""
    if text is not None:
        Path("my.yaml").write_bytes(text.encode())
    (problem,) = problems(*line.split(" "))
    return problem


@functools.cache
def problems_of(*lines: str) -> dict[str, str]:
    """The problem of each line of a batch: the one that begins with its key."""
    listed = problems(*" ".join(lines).split(" "))
    assert len(listed) == len(lines), listed
    found = {}
    for line in lines:
        begins = {line.replace("=", " "), repr(line), line.split("=")[0].lstrip("+~"), line.split("=")[0]}
        (found[line],) = [text for text in listed if len(lines) == 1 or text.partition(": ")[0] in begins]
    return found


def problem_of_tree(line: str) -> str:
    write(TREES[line][0])
    return problem_of(line)


def problem_of_target(title: str) -> str:
    with pytest.raises(ConfigError) as caught:
        call_target({"_target_": f"{__name__}.thing", **TARGETS[title][0]}, "MODEL")
    (problem,) = caught.value.problems
    return re.sub(r"line \d+", "line N", problem)


def assert_holds(words: str, problem: str) -> None:
    assert [word for word in words.split() if word not in problem] == []
    assert "\n" not in problem
    assert len(problem) < 400


@pytest.mark.parametrize("lines", batches(), ids=lambda lines: f"{len(lines)} {lines[0]}")
def test_mistakes_on_the_command_line_are_named(lines: list[str]) -> None:
    for line, problem in problems_of(*lines).items():
        assert_holds(COMMAND_LINES[line], problem)


@pytest.mark.parametrize("text", FILES)
def test_a_mistake_in_a_file_is_named_with_its_line(text: str) -> None:
    line, *words = FILES[text].split()
    problem = problem_of("--cfg=my.yaml", text)
    assert_holds(" ".join(words), problem)
    assert f"my.yaml, line {line}" in problem if line.isdigit() else "my.yaml" in problem


@pytest.mark.parametrize("line", TREES)
def test_a_mistake_among_several_files_is_named(line: str) -> None:
    assert_holds(TREES[line][1], problem_of_tree(line))


@pytest.mark.parametrize("title", TARGETS)
def test_a_mistake_in_a_node_with_a_target_is_named(title: str) -> None:
    assert_holds(TARGETS[title][1], problem_of_target(title))


def test_messages(
    golden: Golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {f"`{line}`": text for lines in batches() for line, text in problems_of(*lines).items()}
    found |= {f"file `{text[:99]}`": problem_of("--cfg=my.yaml", text) for text in FILES}
    found |= {f"`{line}`, in its files": problem_of_tree(line) for line in TREES}
    found |= {f"_target_: {title}": problem_of_target(title) for title in TARGETS}
    found["several problems"] = error_of(load_config, ["DATA.FOO=1", "TRAIN.AMP=" + "\nx" * 400])
    found["values without a bottom"] = error_of(load_config, ["MODEL.KWARGS.x=" + "[" * 300 + "]" * 300])
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    found["no text"] = error_of(load_config, ["--cfg=binary.yaml"])
    write({"wins": "MODEL:\n  NAME: test_resnet\nOPTIMIZER: {KWARGS: {x: '${TRAIN.EPOCHS}'}}"})
    origins = read(
        ["--print-config", "--origin", "--cfg=wins.yaml", "model=resnet18", "TRAIN.LOG_EVERY=1 * 2"]
    )
    found["a file beats a group"] = capsys.readouterr().err
    told = [str(row) for row in str(origins).splitlines() if "default" not in row.partition("# ")[2]]
    found["origins"] = "\n".join(told)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as srun sets it
    found["`${now:}` of several machines"] = error_of(load_config, ["EXPERIMENT.NAME=${now:%Y}"])
    by_title = {title.encode("unicode_escape").decode(): text for title, text in found.items()}
    golden("config", by_title)


def test_a_file_without_a_bottom_is_a_mistake() -> None:
    assert "my.yaml" in problem_of("--cfg=my.yaml", "[" * 400 + "]" * 400)
