"""The notes below the table of a plan."""

from __future__ import annotations

from linnaeus.commands.plan.output import notes, spanned
from linnaeus.commands.plan.results import Goal, Plan, Row

RATES = {8: 500.0, 16: 970.0, 32: 1000.0}
"""Samples per second by size: 16 is the smallest fast one."""


def plan(goal: Goal, warnings: dict[int, tuple[str, ...]] | None = None) -> Plan:
    return Plan(
        goal,
        rows=[
            Row(goal, size, 1, rate, learning_rate=0.1, warnings=(warnings or {}).get(size, ()))
            for size, rate in RATES.items()
        ],
    )


GOAL = Goal(num_samples=1000, epochs=60)


def warnings_of(**texts: str) -> list[str]:
    found = notes(plan(GOAL, {int(name[1:]): (text,) for name, text in texts.items()}))
    assert "DATA.BATCH_SIZE=16" in found[-1]
    return found[:-1]


def test_warnings_that_differ_in_numbers_alone_are_one_line() -> None:
    text = "{}, {}% of 96, {}; TRAIN.X bf16 16"
    [line] = warnings_of(
        _8=text.format(8, 8, 1e-05), _16=text.format(16, 17, 0.002), _32=text.format(32, 33, 0.1)
    )
    assert line.endswith(f": {text.format('8 to 32', '8% to 33', '1e-05 to 0.1')}")


def test_warnings_that_differ_in_words_or_in_the_remedy_are_not_merged() -> None:
    for texts in (("8 few; more", "16 many; more"), ("130 no; 128", "130 no; 96")):
        lines = warnings_of(_8=texts[0], _16=texts[1])
        assert [line.partition(": ")[2] for line in lines] == [*texts]


def test_digits_within_a_word_are_no_numbers() -> None:
    assert spanned(["bf16 16x16 v1.2.3: 7", "bf16 16x16 v1.2.3: 9"]) == "bf16 16x16 v1.2.3: 7 to 9"
