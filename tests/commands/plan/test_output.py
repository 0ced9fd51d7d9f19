"""The notes below the table of a plan."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from linnaeus.commands.plan import output
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
    assert found[-1].startswith("recommended: DATA.BATCH_SIZE=16")
    return found[:-1]


def test_the_examples_in_the_docstrings() -> None:
    found = doctest.testmod(output)
    assert (found.failed, found.attempted > 0) == (0, True)


def test_warnings_that_differ_in_numbers_alone_are_one_line() -> None:
    text = "a batch of {} is {}% of the 96 samples, at a rate of {}; lower TRAIN.X or use bf16 for 16 of them"
    assert warnings_of(
        _8=text.format(8, 8, 1e-05), _16=text.format(16, 17, 0.002), _32=text.format(32, 33, 0.1)
    ) == [
        "batch size 8, 16, 32: a batch of 8 to 32 is 8% to 33% of the 96 samples, at a rate of 1e-05 to 0.1; "
        "lower TRAIN.X or use bf16 for 16 of them"
    ]


def test_warnings_that_differ_in_words_or_in_the_remedy_are_not_merged() -> None:
    assert warnings_of(_8="8 samples are few; use more", _16="16 samples are many; use more") == [
        "batch size 8: 8 samples are few; use more",
        "batch size 16: 16 samples are many; use more",
    ]
    assert warnings_of(_8="130 is not possible; 128 would do", _16="130 is not possible; 96 would do") == [
        "batch size 8: 130 is not possible; 128 would do",
        "batch size 16: 130 is not possible; 96 would do",
    ]


def test_digits_within_a_word_are_no_numbers() -> None:
    assert spanned(["bf16 and 16x16 and v1.2.3: 7", "bf16 and 16x16 and v1.2.3: 9"]) == (
        "bf16 and 16x16 and v1.2.3: 7 to 9"
    )


@pytest.mark.parametrize(
    ("budget_s", "expected"),
    [
        (None, None),
        (62.0, None),  # 16 takes 61.9 s
        (60.0, "the run takes 1 m 2 s with the recommended size, more than 1 m 0 s; it ends in time with 32"),
        (59.0, "no size ends the run within 59 s: the fastest, batch size 32, takes 1 m 0 s; fewer "),
    ],
)
def test_a_time_budget_that_is_not_met(budget_s: float | None, expected: str | None) -> None:
    *others, _ = notes(plan(replace(GOAL, time_budget_s=budget_s)))
    assert len(others) == (expected is not None)
    assert all(text.startswith(expected or "") for text in others)
