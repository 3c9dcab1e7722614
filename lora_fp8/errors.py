"""The errors that end a command: what the user gave is wrong, or the run failed or was stopped."""


class UserError(Exception):
    """Something the user gave is wrong: one clear line, exit code 2, no traceback."""


class UserErrors(UserError):
    """Several things are wrong; all are reported at once.

    Args:
        problems: one line each.
        where: the file (or other source) that they were found in.
    """

    def __init__(self, problems: list[str], where: str = ""):
        self.problems, self.where = problems, where
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{where}: {count}" if where else count, *(f"  {p}" for p in problems)]))


class RunFailure(Exception):
    """The run failed while running, through no typing mistake of the user: exit code 3."""


class Stopped(Exception):
    """The run was asked to stop, has saved, and can be resumed: exit code 75 (EX_TEMPFAIL)."""
