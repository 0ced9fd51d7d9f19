import csv
import json

from linnaeus.cli.tables import save_figures


def test_any_text_comes_back_from_a_table(tmp_path):
    rows = [{"name": name, "length": len(name)} for name in ("a\nb", 'a,"b"', "\n", "plain")]
    save_figures(tmp_path / "names.csv", {}, rows)
    with (tmp_path / "names.csv").open(newline="") as file:
        texts = [{name: str(value) for name, value in row.items()} for row in rows]
        assert list(csv.DictReader(file)) == texts
    save_figures(tmp_path / "names.jsonl", {}, rows)
    lines = (tmp_path / "names.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    save_figures(tmp_path / "few.csv", {}, [{"a": 1, "b": None}, {"a": 2.5, "c": True}])
    found = (tmp_path / "few.csv").read_bytes()
    assert found == b"a,b,c\n1,,\n2.5,,True\n", "a whole number stays whole"
