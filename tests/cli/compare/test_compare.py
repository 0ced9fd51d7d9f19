"""Runs of all kinds side by side, from the files that they leave."""

import json
from pathlib import Path
from xml.etree import ElementTree

from linnaeus.cli.plots import draw_runs
from linnaeus.cli.runs import compared, read_run
from linnaeus.runtime.run_folder import CLAIMS, Claim, Holder, move_aside
from tests.helpers.consoles import plain_console
from tests.helpers.run_files import config_text, planned_sweep, write_run, write_validations


def lines_with(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def comparison(tmp_path, *names):
    return compared([read_run(tmp_path / name) for name in names], names)


def table_of(runs, width=200):
    console, output = plain_console()
    console.width = width
    runs.show(console)
    return output.getvalue()


def texts_of(picture):
    texts = ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text")
    return {(text.text or "").strip() for text in texts}


def test_runs_started_by_hand_side_by_side(run, tmp_path):
    write_run(tmp_path / "runs/slow", "OPTIMIZER.LR=0.1")
    write_run(tmp_path / "runs/fast", "OPTIMIZER.LR=0.2", "EXPERIMENT.SEED=1", values=(0.5, 0.875))
    outcome = run("compare", "runs", "--output", "a.json", "--plot", "a.svg", "--sort", "metric")
    assert (outcome.code, outcome.err) == (0, "")
    [heading] = lines_with(outcome.out, "LR", "SEED")
    assert "AMP" not in heading
    first, second = lines_with(outcome.out, "finished")
    cells = [cell.strip() for cell in first.strip("│").split("│")]
    assert "|".join(cells) == "fast|1|0.2|16|0.8750|0.8750 @2|12.5|finished"
    assert lines_with(second, "slow", "0.5000 │ 0.7500 @2")

    content = json.loads((tmp_path / "a.json").read_text())
    assert content["differences"] == ["EXPERIMENT.SEED", "OPTIMIZER.LR"]
    assert content["metric"] == "top1/kind"
    expected = {
        "run": "slow",
        "epoch": 3,
        "OPTIMIZER.LR": "0.1",
        "best top1/kind": 0.75,
        "best top1/kind epoch": 2,
        "curve": [[1, 0.25], [2, 0.75], [3, 0.5]],
    }
    assert expected.items() <= content["runs"][1].items()
    drawn = {"slow", "fast", "learning curves", "best top1/kind", "training time (s)"}
    assert drawn <= texts_of("a.svg")


def test_runs_are_found_below_folders_by_patterns_and_once(run, tmp_path):
    """One that a later run moved aside is left out, unless it was named so or its folder is named."""
    for name in ("birds", "lr/LR=10", "lr/LR=2.5", "moths.2"):
        write_run(tmp_path / "runs" / name, f"EXPERIMENT.NAME={Path(name).name}")
    move_aside(Claim(tmp_path / "runs/birds"))
    write_run(tmp_path / "runs/birds", "EXPERIMENT.NAME=birds")
    Path("runs/conf").mkdir()
    Path("runs/conf/config.yaml").write_text("TRAIN.EPOCHS: 3")  # somebody's, not a run's

    def compared_runs(*names):
        run("compare", *names, "--output", "a.json").ok()
        content = json.loads((tmp_path / "a.json").read_text())
        return [row["run"] for row in content["runs"]], "runs/birds.1" in str(content["notes"])

    rates = ["lr/LR=10", "lr/LR=2.5"]
    assert compared_runs("runs") == (["birds", *rates, "moths.2"], True)
    patterns = ("runs/moths.2", "runs/[lm]*", "runs/lr/LR=2.5")
    assert compared_runs(*patterns) == (["moths.2", *rates], False)
    assert compared_runs("runs/birds.1", "runs/moths.2") == (["birds.1", "moths.2"], False)


def test_rows_are_sorted(tmp_path):
    runs = {"c": ("0.3", (0.1, 0.2, 0.3)), "a": ("0.1", (0.5, 0.1)), "b": ("0.2", (0.75,))}
    for name, (rate, values) in runs.items():
        write_run(tmp_path / name, f"OPTIMIZER.LR={rate}", values=values)
    found = comparison(tmp_path, *runs)
    for key, expected in (("metric", "bac"), ("-metric", "cab"), ("LR", "abc"), ("epoch", "bac")):
        found.sort(key)
        assert "".join(row.name for row in found.rows) == expected


def test_keys_that_do_not_fit_are_named_below_the_table(run, tmp_path):
    """Without a terminal, in 120 columns; as many keys as fit are whole columns, and files have all."""
    write_run(tmp_path / "runs/a", "EXPERIMENT.SEED=1", "OPTIMIZER.LR=0.2")
    other = "TRAIN.AMP=bf16 OPTIMIZER.NAME=sgd MODEL.NAME=resnet50 TRAIN.SYNC_BATCHNORM=True"
    switches = ("COMPILE", "CHANNELS_LAST", "GRADIENT_CHECKPOINTING")
    write_run(tmp_path / "runs/b", *other.split(), *(f"TRAIN.{key}=True" for key in switches))
    outcome = run("compare", "runs", "--output", "a.json")
    assert (outcome.code, outcome.err) == (0, "")
    keys = json.loads((tmp_path / "a.json").read_text())["differences"]
    assert len(keys) > 8
    [heading] = lines_with(outcome.out, "┃", "status")
    [hidden] = lines_with(outcome.out, "not shown: ")
    named = hidden.partition(": ")[2].split(", ")
    shown = [cell.strip() for cell in heading.split("┃")[2:-1]]
    shown = shown[: shown.index("batch")]
    for key, name in zip(keys, [*shown, *named], strict=True):
        assert key.endswith(name)
    assert len(heading) <= 120 < len(heading) + len(named[0]) + 3, "the next one does not fit"
    assert "not shown" not in table_of(comparison(tmp_path / "runs", "a", "b"), 300), "all fit"


def test_the_status_of_a_sweep_is_the_comparison_of_its_runs(run, tmp_path):
    folders = [tmp_path / f"runs/rates/OPTIMIZER.LR=0.{number}" for number in (1, 2, 3, 4)]
    planned_sweep("EXPERIMENT.NAME=rates", "OPTIMIZER.LR=0.1,0.2,0.3,0.4")
    for folder in folders:
        write_run(folder, folder.name, finished=folder == folders[0])
    for folder, code in zip(folders[1:3], (130, 143), strict=True):
        claim = Claim(folder)
        claim.begin()
        claim.end(code, "stopped by SIGINT", pruned=code == 143)
        claim.release()
    (folders[3] / CLAIMS).mkdir()
    holder = {**vars(Holder.this_process()), "host": "node7", "boot": "", "pid": 12}
    (folders[3] / CLAIMS / "1").write_text(json.dumps(holder))
    status = run("sweep", "--status", "runs/rates")
    assert (status.code, status.err, status.out) == (0, "", run("compare", "runs/rates").out)
    for number, text in enumerate(("finished", "interrupted", "pruned", "running"), 1):
        assert text in lines_with(status.out, f"│ 0.{number} ")[0]
    assert lines_with(status.out, "0.2", "SIGINT")
    assert lines_with(status.out, "0.4", "12", "node7")


def picture_of(tmp_path, *names):
    draw_runs(comparison(tmp_path, *names), tmp_path / "a.svg")
    return texts_of(tmp_path / "a.svg")


def test_names_in_tables_and_pictures_are_as_they_are(tmp_path):
    """What rich takes for markup, and matplotlib for mathematics or for a line without a label."""
    names = ["[a] :cat:", "[/b]", "_c", "$d$ $e$"]
    for name in names:
        write_run(tmp_path / name, f"MODEL.FREEZE=[heads.{len(name)}]")
    table = table_of(comparison(tmp_path, *names))
    assert not [name for name in [*names, '["heads.4"]'] if name not in table]
    assert {*names} <= picture_of(tmp_path, *names)


def test_a_picture_draws_runs_of_several_seeds_as_one(tmp_path):
    """A run without the metric stands in it too, and says so."""
    for seed in (0, 1):
        write_run(tmp_path / f"s{seed}", f"EXPERIMENT.SEED={seed}", "OPTIMIZER.LR=0.5")
    write_run(tmp_path / "alone", values=(), finished=False)
    write_validations(tmp_path / "other", [0.5], metric="top1/species")
    (tmp_path / "other/config.yaml").write_text(config_text("MODEL.NAME=vit"))
    texts = picture_of(tmp_path, "s0", "s1", "alone", "other")
    assert {"alone", "other", "not measured"} <= texts
    assert any("LR=0.5" in text for text in texts)
    assert any("2\N{NO-BREAK SPACE}seeds" in text for text in texts)
    assert "a" in picture_of(tmp_path, *[write_run(tmp_path / name).name for name in "ab"])
