from linnaeus.cli.tables import save_figures


def test_a_whole_number_stays_whole(tmp_path):
    save_figures(tmp_path / "a.csv", {}, [{"a": 1, "b": None}, {"a": 2.5, "c": True}])
    assert (tmp_path / "a.csv").read_bytes() == b"a,b,c\n1,,\n2.5,,True\n"
