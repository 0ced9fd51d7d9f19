"""Every test here needs one of the frameworks, which `make test` does not install."""

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # read when a library of Hugging Face is imported; also by child processes
)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integrations)
