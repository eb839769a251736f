"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """A mistake in what the user gave us: one sentence saying what is wrong, where, and what to do.

    The command line prints the sentence on standard error, without a traceback, and exits with 2.
    """
