"""torchrun without its own traceback: a worker has already said what is wrong.

`python -m megamem.platform.elastic TORCHRUN_ARGUMENTS` behaves like torchrun and ends with the exit status of the first
worker that failed, or with 75 after a signal that it handed on to the workers: they save, and the job is run again.
"""

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megamem.errors import RUN_AGAIN


def main(arguments: list[str] | None = None) -> int:
    """Run torchrun; the exit status of the job."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if status not in (2, RUN_AGAIN):  # the worker has said why
            sys.stderr.write(f"megamem: rank {rank} failed with status {status}\n")
        return status if 0 < status < 256 else 1
    except SignalException:
        return RUN_AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(main())
