import pytest


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """The files of a test lie in its current folder."""
    monkeypatch.chdir(tmp_path)
