"""torchrun without its own traceback: a worker has already said what is wrong.

`python -m megamem.platform.elastic TORCHRUN_ARGUMENTS` behaves like torchrun and ends with the exit status of the first
worker that failed.
"""

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: list[str] | None = None) -> int:
    """Run torchrun; the exit status of the job."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if status != 2:  # 2: the worker has printed what the user can mend
            sys.stderr.write(f"megamem: rank {rank} failed with status {status}\n")
        return status if 0 < status < 256 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
