"""One text field out of a JSON object too large to hold: read block by block, given out chunk by chunk."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

from jaxlm.errors import UserError

_BODY = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_STEP = 1 << 18  # characters


def text_of_long_object(blocks: Iterator[bytes], text_field: str, place: str) -> Iterator[str]:
    """Yields the value of the top-level string field `text_field`, in order, in chunks.

    Raises UserError if the blocks are not one JSON object, or if it has no such field, or if it holds no string.
    """
    reader = _Reader(blocks, place)
    reader.expect("{")
    fields: list[str] = []
    found = False
    while True:
        name = "".join(reader.string())
        reader.expect(":")
        if name == text_field:
            if found:
                raise reader.error(f"the field {text_field!r} comes twice")
            found = True
            if reader.peek() != '"':
                raise UserError(f"{place}: the field {text_field!r} is not text; choose one with --data.text-field.")
            yield from reader.string()
        else:
            fields.append(name)
            reader.skip_value()
        if reader.expect(",}") == "}":
            break
    if reader.peek():
        raise reader.error("something follows the object")
    if not found:
        names = ", ".join(map(repr, fields[:12])) or "none"
        raise UserError(
            f"{place} has no field {text_field!r}; name the right one with --data.text-field (here: {names})."
        )


class _Reader:
    """A cursor over JSON text, of which it holds a block or two."""

    def __init__(self, blocks: Iterator[bytes], place: str) -> None:
        self._blocks = blocks
        self._place = place
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._ended = False

    def error(self, what: str) -> UserError:
        return UserError(f"{self._place}: this is not JSON ({what}); every line must be one JSON object.")

    def _fill(self) -> bool:
        """Appends a block; false at the end."""
        if self._ended:
            return False
        block = next(self._blocks, b"")
        self._ended = not block
        try:
            text = self._utf8.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            raise UserError(f"{self._place}: this is not UTF-8 text ({error.reason}); convert the file.") from error
        self._text, self._at = self._text[self._at :] + text, 0
        return not self._ended

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n\ufeff":
                    return self._text[self._at]
                self._at += 1
            if not self._fill():
                return ""

    def expect(self, characters: str) -> str:
        found = self.peek()
        if not found or found not in characters:
            raise self.error(f"expected one of {characters!r}, found {found or 'the end of the line'!r}")
        self._at += 1
        return found

    def string(self) -> Iterator[str]:
        """The contents of the string that begins here, in chunks; a pair of surrogates is never split."""
        self.expect('"')
        held = ""  # a high surrogate that waits for its low one
        while True:
            while self._at + 6 > len(self._text) and self._fill():  # room for an escape
                pass
            body = _BODY.match(self._text, self._at, min(len(self._text), self._at + _STEP)).group()
            if body:
                self._at += len(body)
                text = held + json.loads(f'"{body}"')
                held = text[-1] if "\ud800" <= text[-1] <= "\udbff" else ""
                yield _joined(text.removesuffix(held) if held else text)
            elif self._at == len(self._text):
                raise self.error("a string does not end")
            elif self._text[self._at] == '"':
                self._at += 1
                if held:
                    yield _joined(held)
                return
            else:
                raise self.error(f"a string holds {self._text[self._at : self._at + 2]!r}")

    def skip_value(self) -> None:
        depth = 0
        while True:
            character = self.peek()
            if character == '"':
                for _ in self.string():
                    pass
            elif character and character in "{[":
                self._at += 1
                depth += 1
            elif character and character in "}]" and depth:
                self._at += 1
                depth -= 1
            elif character and character in ",:" and depth:
                self._at += 1
            else:
                scalar = _SCALAR.match(self._text, self._at)
                if scalar is None:
                    raise self.error(f"expected a value, found {character or 'the end of the line'!r}")
                self._at = scalar.end()
                while self._at == len(self._text) and self._fill():
                    rest = _SCALAR.match(self._text, self._at)
                    self._at = rest.end() if rest else self._at
            if depth == 0:
                return


def _joined(text: str) -> str:
    """Surrogate pairs made characters, lone surrogates made U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
