"""A simple entity linker, for text without mentions: names and aliases from a table.

It takes the longest name that it finds at each word, whatever its case and white space, without overlaps. It knows
nothing of context: a name of several entities always means the one that comes first in the table. Names that are
common words should not be in the table. Text without spaces (Chinese, Japanese, Thai) is not divided into words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from jaxlm.data.mentions import Mention
from jaxlm.data.readers import read_lines
from jaxlm.errors import UserError

# With the marks of Indic and other scripts, which Python's \w leaves out.
_MARKS = "".join(char for char in map(chr, range(0x300, 0x1F000)) if unicodedata.category(char)[0] == "M")
_token = re.compile(rf"[\w{_MARKS}]+|[^\w\s]")


class Linker:
    """Entities by their names."""

    def __init__(self, path: str) -> None:
        """Read a table with lines `entity<TAB>name<TAB>alias…`."""
        self._entities: dict[str, str] = {}
        self._longest: dict[str, int] = {}  # largest number of tokens of the names that begin with a token
        for place, line in read_lines(path):
            if not line.strip():
                continue
            entity, *names = (column.strip() for column in line.split("\t"))
            if not entity or not any(names):
                raise UserError(f"{place} is {line.strip()[:60]!r}; it must be an entity, a tab and a name.")
            for tokens in ([token.casefold() for token in _token.findall(name)] for name in names if name):
                self._entities.setdefault(" ".join(tokens), entity)
                self._longest[tokens[0]] = max(len(tokens), self._longest.get(tokens[0], 0))
        if not self._entities:
            raise UserError(f"{path} holds no names; write lines of an entity, a tab and a name.")

    def link(self, text: str) -> Iterator[Mention]:
        """Yield the mentions in a text, from left to right."""
        spans = [(match.start(), match.end(), match[0].casefold()) for match in _token.finditer(text)]
        words = [word for _, _, word in spans]
        place = 0
        while place < len(words):
            largest = min(self._longest.get(words[place], 0), len(words) - place)
            for size in range(largest, 0, -1):
                entity = self._entities.get(" ".join(words[place : place + size]))
                if entity is not None:
                    yield Mention(spans[place][0], spans[place + size - 1][1], entity)
                    place += size - 1
                    break
            place += 1
