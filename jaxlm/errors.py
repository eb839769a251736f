"""Exceptions that end a command with an exit code of their own."""

from pathlib import Path


def install(extra: str) -> str:
    """Return how an extra of jaxlm is installed, for the sentence of a UserError."""
    is_clone = (Path(__file__).parents[1] / "setup.cfg").exists()
    return f"in the clone, run `pip install -e '.[{extra}]'`" if is_clone else f"run `pip install 'jaxlm[{extra}]'`"


class UserError(Exception):
    """Mistake of the user: one sentence that says what is wrong and what to do.

    The command line prints the sentence on standard error, without a traceback, and exits with 2, or with the
    `exit_code` of a subclass.
    """

    exit_code = 2


class Stopped(Exception):
    """Training was stopped by a signal and saved. The command line exits with 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}; saved")
        self.exit_code = 128 + number
