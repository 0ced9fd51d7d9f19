import json
import logging
import math
from contextlib import suppress

import psutil
import pytest
import torch

from linnaeus.runtime.distributed import World
from linnaeus.runtime.errors import ConfigError, LinnaeusError
from linnaeus.runtime.log import SHOWN_ELSEWHERE, close_logging, set_up_logging
from linnaeus.runtime.run_folder import Claim, RunFolder
from linnaeus.training.metrics_file import MetricsFile
from tests.helpers.consoles import plain_console
from tests.helpers.run_files import names
from tests.runtime.test_files import full_disk

ALONE = World(torch.device("cpu"))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_every_rank_has_its_file_and_rank_0_the_console(tmp_path, rank):
    logger = logging.getLogger("linnaeus.trainer")
    for name in ("first", "logs", "logs"):  # of another run; a resumed run appends
        console, output = plain_console()
        set_up_logging(tmp_path / name, rank=rank, console=console)
        logger.info("epoch %d", 7)
    logger.debug("detail")
    logger.info("row", extra=SHOWN_ELSEWHERE)
    assert names(tmp_path / "logs") == {f"rank{rank}.log"}
    text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
    assert [text.count(word) for word in ("epoch 7", "detail", "row")] == [2, 1, 1]
    assert f"[rank {rank}] linnaeus.trainer: epoch" in text
    assert output.getvalue().endswith(" epoch 7\n") if rank == 0 else output.getvalue() == ""
    assert output.getvalue().count("\n") <= 1
    close_logging()
    assert not [
        file for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))
    ]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_run_that_has_not_begun_leaves_nothing_behind(tmp_path, begins, keep):
    earlier, new = tmp_path / "r1", tmp_path / "group/new"
    earlier.mkdir()
    (earlier / "result.json").touch()
    for folder in (earlier, new):
        with suppress(ZeroDivisionError), RunFolder(folder, ALONE, keep=keep) as run_folder:
            logging.getLogger("linnaeus.run").info("early")
            with pytest.raises(ConfigError):  # another start of this name
                Claim(folder)
            if begins:
                run_folder.begin()
            raise ZeroDivisionError
    if not begins:
        assert (names(tmp_path), names(earlier)) == ({"r1"}, {"result.json"})
        return
    assert names(tmp_path) == ({"r1", "group"} if keep else {"r1", "r1.1", "group"})
    assert names(earlier) == {"logs", "run.json"} | ({"result.json"} if keep else set())
    assert "early" in (new / "logs/rank0.log").read_text()


def test_metrics_are_written_promptly_one_json_object_per_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(step=20, epoch=0, split="train", values={"loss": 0.5, "lr": 1e-3})
        values = {"top1/species": 0.25, "a": math.nan, "b": -math.inf}
        file.write(step=40, epoch=1, split="val", values=values)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0].pop("time") <= lines[1].pop("time")
    assert lines == [
        {"step": 20, "epoch": 0, "split": "train", "loss": 0.5, "lr": 1e-3},
        {"step": 40, "epoch": 1, "split": "val", "top1/species": 0.25}
        | dict.fromkeys("ab"),  # JSON has no such numbers
    ]


@pytest.mark.parametrize(
    "line",
    [b"{}", b'{"step": NaN, "split": "val"}', b"\xff\xfe{}", b"[" * 100_000],
)
@pytest.mark.parametrize("at_end", [False, True])
def test_a_line_that_is_no_record_is_dropped_on_resuming(tmp_path, line, at_end):
    path = tmp_path / "metrics.jsonl"
    records = [
        json.dumps({"step": step, "split": "train", "größe\u2028": 1}, ensure_ascii=False).encode()
        for step in (1, 2)
    ]
    path.write_bytes(b"\n".join([*records, line] if at_end else [records[0], line, records[1]]))
    with MetricsFile(path, last_step=2) as file:
        file.write(step=3, epoch=0, split="train", values={})
    *kept, last = path.read_bytes().split(b"\n")[:-1]
    assert kept == records
    assert json.loads(last)["step"] == 3


def test_metrics_that_a_full_disk_refuses_are_one_clear_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with full_disk(4096), MetricsFile(path) as file:
        file.write(step=1, epoch=0, split="train", values={"loss": 1.0})
        with pytest.raises(LinnaeusError, match=str(path)):
            file.write(step=2, epoch=0, split="train", values={"x" * 4096: 1.0})
    with full_disk(8), pytest.raises(LinnaeusError, match=str(path)):
        MetricsFile(path, last_step=1)
    assert json.loads(path.read_text().splitlines()[0])["step"] == 1, "what was there is not lost"


def test_a_log_file_on_a_full_disk_is_given_up_with_one_line(tmp_path, capfd):
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    console, output = plain_console()
    set_up_logging(tmp_path, rank=0, console=console)
    for number in range(3):
        logging.getLogger("linnaeus.run").info("line %d", number)
    close_logging()
    lines = [line[9:] for line in output.getvalue().splitlines()]  # without the time
    assert str(tmp_path / "rank0.log") in lines.pop(1)
    assert lines == ["line 0", "line 1", "line 2"]
    assert capfd.readouterr() == ("", "")
