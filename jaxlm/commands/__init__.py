"""One file per command of the command line: it reads arguments, calls the other rooms, prints."""
