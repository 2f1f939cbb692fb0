"""What every parity test runs on."""

import pytest

from megamem.platform.device import resolve_device
from megamem.platform.groups import process_groups
from megamem.platform.launch import Ranks


@pytest.fixture
def groups():
    """A grid of one process. Per test (0.1 s), because `verify` starts and ends its own."""
    with process_groups(Ranks(0, 1, 0, None, "single process"), resolve_device("auto", 0), 1, 1) as grid:
        yield grid
