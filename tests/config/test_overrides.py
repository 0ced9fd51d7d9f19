"""The command line, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.config.hydra_equivalents import TAKE_VALUES, is_hydra_key
from linnaeus.config.keys import KEYS, closest, dotted
from linnaeus.config.overrides import FLAGS, CommandLine, Override, parse_command_line


def parse(*argv: str) -> CommandLine:
    """Parse tokens that hold no problem."""
    line = parse_command_line(argv)
    assert line.problems == []
    return line


def only_problem(*argv: str) -> str:
    (problem,) = parse_command_line(argv).problems
    return problem


def pairs(line: CommandLine) -> list[tuple[str, str | None]]:
    return [(override.key, override.text) for override in line.overrides]


def test_nothing() -> None:
    assert parse() == CommandLine()


def test_forms_mix_and_keep_their_order() -> None:
    line = parse("DATA.BATCH_SIZE", "8", "TRAIN.EPOCHS=3", "--opts", "DATA.BATCH_SIZE=9", "TRAIN.AMP", "bf16")
    expected = [
        ("DATA.BATCH_SIZE", "8"),
        ("TRAIN.EPOCHS", "3"),
        ("DATA.BATCH_SIZE", "9"),
        ("TRAIN.AMP", "bf16"),
    ]
    assert pairs(line) == expected


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_prefixes_that_set(prefix: str) -> None:
    assert parse(f"{prefix}MODEL.KWARGS.x=1").overrides == [Override("MODEL.KWARGS.x", "1")]


def test_tilde_deletes() -> None:
    expected = [Override("TRAIN.EPOCHS", None, delete=True), Override("TRAIN.AMP", "bf16", delete=True)]
    assert parse("~TRAIN.EPOCHS", "~TRAIN.AMP=bf16").overrides == expected


def test_flags() -> None:
    line = parse("--cfg", "a b.yaml", "--print-config", "-h")
    assert (line.named("--cfg"), line.print_config, line.show_help) == (["a b.yaml"], True, True)
    assert parse("--cfg=x=y.yaml").named("--cfg") == ["x=y.yaml"]
    assert parse("--help").show_help


def test_presets_last_wins_and_moves_to_the_end() -> None:
    line = parse("model=resnet18", "data=digits", "+model=resnet50")
    assert list(line.presets.items()) == [("data", "digits"), ("model", "resnet50")]
    assert parse("model=resnet18", "~model").presets == {}


@pytest.mark.parametrize(
    "value", ["-1", "-1e-3", "-.5", "--strange", "a=b", "=", "", " ", "x.yaml", "FOO=1", "é"]
)
def test_the_token_after_a_bare_key_is_its_value(value: str) -> None:
    assert pairs(parse("EXPERIMENT.NAME", value)) == [("EXPERIMENT.NAME", value)]


@pytest.mark.parametrize(
    "following",
    [[], *[[flag] for flag in FLAGS if flag != "--cfg"], ["--cfg=a.yaml"], ["DATA.BATCH_SIZE=8"],
     ["DATA.BATCH_SIZE", "8"], ["+MODEL.KWARGS.x=1"], ["MODEL._target_=my.Model"]],
)  # fmt: skip
def test_key_without_a_value(following: list[str]) -> None:
    line = parse_command_line(["EXPERIMENT.NAME", *following])
    assert line.problems == ["EXPERIMENT.NAME: key without a value (command line)"]
    assert "EXPERIMENT.NAME" not in dict(pairs(line))


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("--print_config", "did you mean --print-config?"),
        ("--confg", "no such option"),
        ("-x", "no such option"),
        ("--DATA.BATCH_SIZE=8", "keys have no dashes: DATA.BATCH_SIZE"),
        ("--help=yes", "takes no value"),
        ("--cfg=", "needs a file"),
        ("my_exp.yaml", "did you mean --cfg my_exp.yaml?"),
        ("resnet50", "neither KEY VALUE"),
        ("-1", "neither KEY VALUE"),
        ("DATA..BATCH_SIZE=8", "neither KEY VALUE"),
        ("=8", "neither KEY VALUE"),
        ("", "neither KEY VALUE"),
    ],
)
def test_tokens_that_cannot_be_used(token: str, expected: str) -> None:
    problem = only_problem(token)
    name = repr(token) if "neither" in problem else token.partition("=")[0]
    assert problem.startswith(f"{name}: ")
    assert expected in problem


def test_cfg_needs_a_file_each_time() -> None:
    assert only_problem("--cfg") == "--cfg: needs a file"
    assert only_problem("--cfg", "--print-config") == "--cfg: needs a file"
    assert parse("--cfg", "a.yaml", "--cfg=b.yaml").named("--cfg") == ["a.yaml", "b.yaml"]


def test_sources_keep_their_order() -> None:
    line = parse("--config-dir", "conf", "--cfg=a.yaml", "-cn", "base", "--config-dir=more", "model=mine")
    assert line.sources == [
        ("--config-dir", "conf"), ("--cfg", "a.yaml"), ("--config-name", "base"), ("--config-dir", "more"),
    ]  # fmt: skip
    assert only_problem("--config-dir") == "--config-dir: needs a folder"
    assert only_problem("--config-name", "--cfg=a.yaml") == "--config-name: needs the name of a file"


def test_groups_may_be_nested_and_have_packages() -> None:
    line = parse("data/augment=strong", "+model@MODEL.encoder=mine", "data/augment=weak", "~optimizer=sgd")
    assert line.presets == {"model@MODEL.encoder": "mine", "data/augment": "weak"}
    assert line.left_out == {"optimizer": "sgd"}
    assert line.source_tokens() == ["~optimizer=sgd"]
    assert parse("~model", "model=mine").left_out == {}
    assert parse("model=null", "~data").left_out == {"model": None, "data": None}


def test_every_problem_is_listed() -> None:
    line = parse_command_line(["--foo", "stray", "TRAIN.EPOCHS=3", "DATA.BATCH_SIZE"])
    assert len(line.problems) == 3
    assert pairs(line) == [("TRAIN.EPOCHS", "3")]


@given(st.text())
def test_key_equals_any_text(value: str) -> None:
    assert pairs(parse(f"EXPERIMENT.NAME={value}")) == [("EXPERIMENT.NAME", value)]


known_keys = st.sampled_from(sorted(dotted(path) for path in KEYS))
values = st.text(max_size=12).filter(lambda text: text.partition("=")[0] not in FLAGS)


@given(st.lists(st.tuples(known_keys, values, st.booleans())))
def test_any_mix_of_spellings_keeps_order_and_text(settings: list[tuple[str, str, bool]]) -> None:
    argv = [t for key, value, joined in settings for t in ([f"{key}={value}"] if joined else [key, value])]
    assert pairs(parse(*argv)) == [(key, value) for key, value, _ in settings]


KINDS = (
    "MODEL.KWARGS.x{}=1",
    "~MODEL.KWARGS.y{}",
    "a{}=b",
    "~c{}=d",
    "--cfg={}",
    "--no{}",
    "a b{}",
    "hydra.x{}=1",
)


@given(st.lists(st.sampled_from(KINDS), max_size=8))
def test_each_token_is_found_once(kinds: list[str]) -> None:
    line = parse_command_line([kind.format(number) for number, kind in enumerate(kinds)])
    found = [line.overrides, line.presets, line.left_out, line.sources, line.problems]
    expected = [{0, 1}, {2}, {3}, {4}, {5, 6, 7}]
    assert [len(part) for part in found] == [
        sum(KINDS.index(kind) in numbers for kind in kinds) for numbers in expected
    ]


@given(st.lists(st.text(max_size=12), max_size=8))
def test_no_token_raises_or_disappears(argv: list[str]) -> None:
    line = parse_command_line(argv)
    taken = sum(2 if override.key in argv else 1 for override in line.overrides)
    taken += 2 * len(line.sources) + len(line.left_out)
    with_value = [token for token in argv if token in TAKE_VALUES or is_hydra_key(token.lstrip("+~"))]
    found = taken + len(line.presets) + len(line.problems) + len(with_value)
    assert found >= len(argv) or set(argv) & {*FLAGS} or line.presets


@pytest.mark.parametrize(
    ("wrong", "real"),
    [
        ("DATA.BATCHSIZE", "DATA.BATCH_SIZE"),
        ("BATCH_SIZE", "DATA.BATCH_SIZE"),
        ("data.batch_size", "DATA.BATCH_SIZE"),
        ("DATA.AUTOBATCH.ENABLE", "DATA.AUTOBATCH.ENABLED"),
        ("AUTOBATCH.ENABLED", "DATA.AUTOBATCH.ENABLED"),
        ("TRAIN.LR", "OPTIMIZER.LR"),
        ("LR", "OPTIMIZER.LR"),
        ("TRAIN.EPOCH", "TRAIN.EPOCHS"),
        ("DATA.AUTOBATCH.TARGET_MEMORY", "DATA.AUTOBATCH.TARGET_MEMORY_FRACTION"),
        ("DATA.FOO", None),
        ("zzz", None),
    ],
)
def test_closest_key(wrong: str, real: str | None) -> None:
    assert closest(wrong) == real


def test_every_key_is_closest_to_itself() -> None:
    names = [dotted(path) for path in KEYS]
    assert [closest(name) for name in names] == names
    assert [closest(name.lower()) for name in names] == names
