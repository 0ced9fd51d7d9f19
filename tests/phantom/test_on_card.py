"""The dry run of `benchmarks/on_card.sh`, which shows on a real GPU what no phantom can."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.phantom import is_on
from tests.phantom.build import ROOT

PARTS = ["device", "tests", "truth", "finders", "ddp", "bf16", "overhead"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(not is_on(), reason="a real GPU takes the whole script")
def test_all_parts_of_the_script_for_a_gpu_run(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "benchmarks/on_card.sh", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"SMALL": "1", "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    rows = (tmp_path / "summary.txt").read_text().splitlines()
    assert [row.split()[0] for row in rows] == PARTS, done.stdout + done.stderr
    assert [row.split()[3] for row in rows] == ["0"] * len(PARTS), done.stdout
    assert done.returncode == 0
