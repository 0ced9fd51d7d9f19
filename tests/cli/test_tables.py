from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from linnaeus.cli.tables import Figures


class Names(Figures):
    def __init__(self, *names: str) -> None:
        self.names = names

    def scalars(self) -> list[dict[str, Any]]:
        return [{"name": name, "length": len(name)} for name in self.names]

    def as_dict(self) -> dict[str, Any]:
        return {"names": self.names}


def test_any_text_comes_back_from_a_table(tmp_path: Path) -> None:
    names = ["a\nb", 'a,"b"', "\n", "plain"]
    Names(*names).save(tmp_path / "names.csv")
    with (tmp_path / "names.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"name": name, "length": str(len(name))} for name in names
        ]
    Names("a", "b").save(tmp_path / "names.csv")
    assert (tmp_path / "names.csv").read_bytes() == b"name,length\na,1\nb,1\n", (
        "as other text files"
    )
    Names("a\nb", "c").save(tmp_path / "names.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "names.jsonl").read_text().splitlines()]
    assert rows == [{"name": "a\nb", "length": 3}, {"name": "c", "length": 1}]
