import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnaeus.data.taxonomy import (
    UNKNOWN,
    LabelIndex,
    Level,
    Taxonomy,
    UnknownClassError,
    index_labels,
)

NAMES = st.sampled_from(["a", "b", "c", "unknown"])


def test_an_unknown_parent_takes_the_only_class_of_that_name():
    index = index_labels(
        ["genus", "species"], [("Felis", "catus"), ("Canis", "lupus"), (None, "catus")]
    )
    assert index.encode((None, "catus")) == (UNKNOWN, index.encode(("Felis", "catus"))[1])
    assert index.encode(("Canis", None)) == (0, UNKNOWN)
    assert index.encode((None, None)) == (UNKNOWN, UNKNOWN)


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=1))
def test_labels_and_parents_agree(lineages):
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


def test_an_index_comes_back_from_a_file():
    index = index_labels(["kingdom", "genus", "species"], LINEAGES)
    again = LabelIndex.from_dict(json.loads(json.dumps(index.as_dict())))
    assert again == index
    assert [again.encode(lineage) for lineage in LINEAGES] == [
        index.encode(line) for line in LINEAGES
    ]


def test_a_class_under_several_parents_needs_its_parent():
    index = index_labels(["genus", "species"], [("Ficus", "alba"), ("Populus", "alba")])
    assert index.encode(("Populus", "alba")) == (1, 1)
    with pytest.raises(UnknownClassError):
        index.encode((None, "alba"))
    both = LabelIndex.of(
        Taxonomy((Level("a", ("x", "y")), Level("b", ("z", "z"))), ((1, UNKNOWN),))
    )
    assert both.encode(("x", "z")) == (0, 1)
    assert both.encode((None, "z")) == (UNKNOWN, 1)
