"""The one exception a user is meant to read.

Everything that is wrong because of what a user wrote or brought (a key, a file, a number of processes) is raised as
`UserError` with a message of one or two lines that names the thing, its value and what is allowed. The command line
prints it without a traceback and exits with status 2. Our own invariants stay `assert`.
"""


class UserError(ValueError):
    """A mistake the user can mend; the message says how."""


class RankError(UserError):
    """A mistake that only this process knows of (its GPU, its node), so it tells it itself, whatever its rank."""


RUN_AGAIN = 75
"""Exit status of a run that was asked to stop and has saved (EX_TEMPFAIL of sysexits.h): start it again."""
