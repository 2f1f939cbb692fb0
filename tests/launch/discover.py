"""Print what this process learns about itself under a launcher; run by tests with a real one."""

import dataclasses
import json
import os
import sys

from megamem.errors import UserError
from megamem.platform.launch import discover_ranks

try:
    # One write: lines of several processes must not mix.
    sys.stdout.write(json.dumps(dataclasses.asdict(discover_ranks(os.environ))) + "\n")
except UserError as error:
    sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
