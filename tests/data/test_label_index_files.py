"""A label index written to a file and read back."""

from __future__ import annotations

import json

import pytest

from linnaeus.data.taxonomy import LabelIndex, Level, Taxonomy, index_labels

LINEAGES = [
    ("Animalia", "Felis", "catus"), ("Animalia", "Canis", "lupus"), ("Plantae", "Felis", "x"),
    (None, "Rosa", "canina"), ("Plantae", None, "y"),
]  # fmt: skip


@pytest.mark.parametrize("names", [None, ["kingdom", "species"], ["species"]])
def test_an_index_comes_back_from_a_file(names: list[str] | None) -> None:
    index = index_labels(["kingdom", "genus", "species"], LINEAGES)
    index = index if names is None else index.select(names)
    again = LabelIndex.from_dict(json.loads(json.dumps(index.as_dict())))
    assert again == index
    assert [again.encode(lineage) for lineage in LINEAGES] == [index.encode(line) for line in LINEAGES]


def test_an_index_of_display_names_needs_no_lookup() -> None:
    taxonomy = Taxonomy((Level("a", ("x", "y")), Level("b", ("u", "v", "w"))), ((0, -1, 1),))
    index = LabelIndex.of(taxonomy)
    assert index.as_dict().keys() == {"levels"}
    assert LabelIndex.from_dict(index.as_dict()) == index
    assert index.encode(("x", "u")) == (0, 0)
