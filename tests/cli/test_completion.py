"""What the shell is told at the cursor of a command line."""

import os
import subprocess
import sys

import pytest

from tests.helpers.children import ROOT

CODE = "from linnaeus.main import console; raise SystemExit(console())"


def answer(line, folder):
    """The words that the shell is offered for the last one of a line."""
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "answer"),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_COMP_WORDBREAKS": "\"'><;|&(",
    }
    env = {**os.environ, **asked, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, cwd=folder, check=False)
    assert done.returncode == 0
    return sorted(word.strip() for word in (folder / "answer").read_text().split("\n") if word)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("linnaeus ana", ["analyze"]),
        ("linnaeus train DATA.AUTOBATCH.STRATEGY=b", ["binary", "binsearch"]),
        ("linnaeus train DATA.AUTOBATCH.STRATEG", ["DATA.AUTOBATCH.STRATEGY="]),
        ("linnaeus train --cfg a.yaml model=vit_t", ["vit_tiny"]),
        ("linnaeus analyze DATA.BATCH_SIZE=3 --sharding hy", ["hybrid"]),
        ("linnaeus compare TRAIN.AM", []),
        ("linnaeus train --cfg my_ex", ["my_experiment.yaml"]),
    ],
)
def test_what_may_follow(line, expected, tmp_path):
    (tmp_path / "my_experiment.yaml").touch()
    found = answer(line, tmp_path)
    assert [word.rpartition("=")[2] or word for word in found] == expected
