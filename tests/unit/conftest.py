"""What several files of unit tests need."""

import pytest

from megamem.platform.device import resolve_device
from megamem.platform.groups import process_groups
from megamem.platform.launch import Ranks


@pytest.fixture(scope="module")
def groups():
    """A grid of one process."""
    with process_groups(Ranks(0, 1, 0, None, "single process"), resolve_device("auto", 0), 1, 1) as grid:
        yield grid
