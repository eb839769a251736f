"""Exceptions that end a command with an exit code of their own."""

from pathlib import Path


def install(extra: str) -> str:
    """Return how an extra of jaxlm is installed, for the sentence of a UserError."""
    is_clone = (Path(__file__).parents[1] / "setup.cfg").exists()
    return f"in the clone, run `pip install -e '.[{extra}]'`" if is_clone else f"run `pip install 'jaxlm[{extra}]'`"


class UserError(Exception):
    """Mistake of the user: one sentence that says what is wrong and what to do.

    The command line prints the sentence on standard error, without a traceback, and exits with `exit_code`: 1 for a
    failure that may pass, such as a bucket's, upon which a launcher starts again.
    """

    exit_code = 2

    def __init__(self, sentence: str, exit_code: int | None = None) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code or self.exit_code


def outage(path: object, reason: object, done: str = "read") -> UserError:
    """Return the error of storage that fails now and may work later."""
    return UserError(f"{path} cannot be {done} now ({reason}); run the same command again.", exit_code=1)


class Stopped(Exception):
    """Training was stopped by a signal and saved. The command line exits with 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}; saved")
        self.exit_code = 128 + number
