import pytest

from tests.helpers.datasets import write_image


@pytest.fixture
def nested(tmp_path):
    """Two levels of class folders, five images in each of four; `unknown` stands under both parents."""
    for i, folder in enumerate(
        ["Animalia/cat", "Animalia/unknown", "Plantae/oak", "Plantae/unknown"]
    ):
        for j in range(5):
            write_image(tmp_path / "images" / folder / f"{j}.jpg", seed=10 * i + j)
    return tmp_path / "images"
