"""Count the functions that a reader of `jaxlm pretrain` follows from the shell to the program of the train step.

    python launch/count_opening.py CONFIG [flags of jaxlm pretrain]

They are those of the rooms that open a run (`cli`, `commands`, `runs`) which call another one of them, and `Program`. A
function that calls none of the others is one step, which its name tells; it is listed, too, with a dash. A function
within a function and a property count as parts of theirs. The run stops at `Program`, before anything is compiled.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import jaxlm
from jaxlm import cli

ROOT = Path(jaxlm.__file__).parent
ROOMS = ("cli.py", "commands", "runs")


class Reached(Exception):
    """The program is about to be built."""


def opened(arguments: list[str]) -> dict[str, bool]:
    """Return "file: function" of every function up to `Program`, and whether it calls another one."""
    found: dict[str, bool] = {}

    def name_of(frame: FrameType) -> str | None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if not code.co_flags & inspect.CO_NEWLOCALS or "<" in code.co_qualname or not path.is_relative_to(ROOT):
            return None  # a class, a lambda, a comprehension or a nested function, or no function of jaxlm
        is_property = isinstance(getattr(type(frame.f_locals.get("self")), code.co_name, None), property)
        name = path.relative_to(ROOT)
        is_counted = name.parts[0] in ROOMS or code.co_qualname == "Program.__init__"
        return f"{name}: {code.co_qualname}" if is_counted and not is_property else None

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (name := name_of(frame)) is None:
            return
        found.setdefault(name, False)
        caller = frame.f_back
        while caller is not None and (name_of(caller) or name) == name:
            caller = caller.f_back
        if caller is not None:
            found[name_of(caller)] = True
        if name.endswith("Program.__init__"):
            found[name] = True
            sys.setprofile(None)
            raise Reached

    sys.setprofile(profile)
    try:
        cli.main(["pretrain", *arguments])
    except Reached:
        return found
    finally:
        sys.setprofile(None)
    raise SystemExit("the run has not come to its program; see the message above")


def main() -> None:
    """Print the functions and their number."""
    found = opened(sys.argv[1:])
    for name, calls_another in found.items():
        print(name if calls_another else f"  - {name}")
    followed = [name for name, calls_another in found.items() if calls_another]
    files = {name.partition(":")[0] for name in followed}
    print(f"{len(followed)} functions in {len(files)} files; with single steps {len(found)}")


if __name__ == "__main__":
    main()
