"""What the shell is told at the cursor of a command line."""

import os
import subprocess
import sys

import pytest

CODE = "from linnaeus.main import console; raise SystemExit(console())"


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
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_COMP_WORDBREAKS": "\"'><;|&(",
    }
    command, env = [sys.executable, "-c", CODE], {**os.environ, **asked}
    subprocess.run(command, env=env, cwd=tmp_path, check=True)
    found = sorted(word.strip() for word in (tmp_path / "answer").read_text().split("\n") if word)
    assert [word.rpartition("=")[2] or word for word in found] == expected
