"""One tiny model for every launcher."""

import pytest

from tests.dist.harness import tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    tiny_model(folder / "model")
    return folder
