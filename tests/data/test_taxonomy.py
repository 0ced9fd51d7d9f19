from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.data.taxonomy import UNKNOWN, LabelIndex, UnknownClassError, index_labels

NAMES = st.sampled_from(["a", "b", "c", "unknown"])


def test_classes_are_sorted_and_know_their_parents() -> None:
    lineages = [
        ("Plantae", "oak"),
        ("Animalia", "unknown"),
        ("Plantae", "unknown"),
        ("Animalia", "cat"),
    ]
    taxonomy = index_labels(["kingdom", "species"], lineages).taxonomy
    assert taxonomy.names == ("kingdom", "species")
    assert taxonomy.num_classes == {"kingdom": 2, "species": 4}
    assert taxonomy.levels[0].classes == ("Animalia", "Plantae")
    assert taxonomy.levels[1].classes == ("cat", "Animalia/unknown", "oak", "Plantae/unknown")
    assert taxonomy.parents == ((0, 0, 1, 1),)


def test_an_unknown_parent_takes_the_only_class_of_that_name() -> None:
    index = index_labels(
        ["genus", "species"], [("Felis", "catus"), ("Canis", "lupus"), (None, "catus")]
    )
    assert index.encode((None, "catus")) == (UNKNOWN, index.encode(("Felis", "catus"))[1])
    assert index.encode(("Canis", None)) == (0, UNKNOWN)
    assert index.encode((None, None)) == (UNKNOWN, UNKNOWN)


@pytest.mark.parametrize("lineage", [("Felis", "lupus"), ("Ursus", "catus"), (None, "arctos")])
def test_a_class_that_training_lacks_is_an_error(lineage: tuple[str | None, str]) -> None:
    index = index_labels(["genus", "species"], [("Felis", "catus"), ("Canis", "lupus")])
    with pytest.raises(UnknownClassError):
        index.encode(lineage)


def test_selected_levels_skip_to_the_right_ancestor() -> None:
    lineages = [("K", "a", "x"), ("K", "b", "x"), ("L", "c", "y")]
    index = index_labels(["kingdom", "family", "species"], lineages)
    selected = index.select(["kingdom", "species"])
    assert selected.taxonomy.names == ("kingdom", "species")
    assert selected.taxonomy.parents == ((0, 0, 1),)  # a/x and b/x stay two classes
    assert [selected.encode(lineage) for lineage in lineages] == [(0, 0), (0, 1), (1, 2)]
    assert index.select(["species", "kingdom"]).taxonomy.parents == ((UNKNOWN, UNKNOWN),)


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=1))
def test_labels_and_parents_agree(lineages: list[tuple[str, str, str]]) -> None:
    index = index_labels(["r1", "r2", "r3"], lineages)
    labels = [index.encode(lineage) for lineage in lineages]
    assert len(set(labels)) == len(set(lineages))
    for depth, level in enumerate(index.taxonomy.levels):
        assert {label[depth] for label in labels} == set(range(len(level.classes)))
        assert len(set(level.classes)) == len(level.classes) or depth == 0
    for label in labels:
        assert index.taxonomy.parents[0][label[1]] == label[0]
        assert index.taxonomy.parents[1][label[2]] == label[1]


LINEAGES = [
    ("Animalia", "Felis", "catus"),
    ("Animalia", "Canis", "lupus"),
    ("Plantae", "Felis", "x"),
    (None, "Rosa", "canina"),
    ("Plantae", None, "y"),
]


@pytest.mark.parametrize("names", [None, ["kingdom", "species"]])
def test_an_index_comes_back_from_a_file(names: list[str] | None) -> None:
    index = index_labels(["kingdom", "genus", "species"], LINEAGES)
    index = index if names is None else index.select(names)
    again = LabelIndex.from_dict(json.loads(json.dumps(index.as_dict())))
    assert again == index
    assert [again.encode(lineage) for lineage in LINEAGES] == [
        index.encode(line) for line in LINEAGES
    ]
