"""Strategies for inputs that are almost right: JSON with a wrong value in it, files with a wrong byte, odd strings."""

from __future__ import annotations

import bz2
import copy
import gzip
import json
import lzma
import struct
from typing import Any

import zstandard
from hypothesis import strategies as st

ODD_TEXT = (
    "", " ", "\n", "\0", "x", "-1", "0", "3000000000", "1e400", "nan", "None", "[]", "{}", "%s", "---", "-x", "é",
    "\u202e", "\udc80", "\ud800\udc00", "a\udcffb", "a" * 5000, "../..", "~nobody-of-that-name/x", "[MASK]",
    "<extra_id_0>",
)
ODD_NUMBERS = (
    -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 3_000_000_000, 2**63, 10**30, -0.5, 0.5, 1.0, 1e-300, 1e300, float("nan"),
    float("inf"), float("-inf"),
)
ODD_VALUES = (
    None, True, False, [], {}, [[]], {"": None}, [1, "x"], ["[MASK]"], {"type": "Experiment"}, {"type": "Bert"},
    {"type": []}, *ODD_TEXT, *ODD_NUMBERS,
)

odd_text = st.sampled_from(ODD_TEXT) | st.text(max_size=12)
odd_value = st.sampled_from(ODD_VALUES) | st.text(max_size=6) | st.integers() | st.floats()


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A copy of a JSON value in which one to three places hold something else, or are missing."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        holder, key, node = None, None, value
        while isinstance(node, (dict, list)) and node and (holder is None or draw(st.integers(0, 3))):
            holder = node
            key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(min(len(node), 40))))
            node = node[key]
        new = copy.deepcopy(draw(odd_value))  # a later change may be inside of it
        action = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add")))
        if holder is None:
            value = new
        elif action == "remove":
            del holder[key]
        elif action == "add" and isinstance(holder, dict):
            holder[draw(odd_text)] = new
        elif action == "add":
            holder.append(new)
        else:
            holder[key] = new
    return value


def as_json(value: Any) -> bytes:
    """Python's JSON, in which NaN and halves of surrogate pairs can be written."""
    return json.dumps(value).encode()


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """A file that was cut off, has other bytes in it, or was written twice."""
    place = draw(st.integers(0, max(len(data) - 1, 0)))
    kind = draw(st.sampled_from(("cut", "flip", "insert", "twice", "other")))
    if kind == "cut":
        return data[:place]
    if kind == "flip":
        return data[:place] + draw(st.binary(min_size=1, max_size=4)) + data[place + 1 :]
    if kind == "insert":
        return data[:place] + draw(st.sampled_from((b"\0", b"\xff", b"\n", b"[" * 100_000, b"{}"))) + data[place:]
    return data + data if kind == "twice" else draw(st.binary(max_size=40))


@st.composite
def safetensors_file(draw: st.DrawFn, data: bytes) -> bytes:
    """A safetensors file with another header, or with damage anywhere."""
    if draw(st.booleans()):
        return draw(damaged(data))
    (size,) = struct.unpack("<Q", data[:8])
    header = as_json(draw(changed(json.loads(data[8 : 8 + size]))))
    size = draw(st.sampled_from((len(header), len(header), len(header), 0, 2**40, 2**64 - 1)))
    return struct.pack("<Q", size) + header + data[8 + size :] if size < 2**63 else struct.pack("<Q", size) + header


@st.composite
def json_file(draw: st.DrawFn, data: bytes) -> bytes:
    """A JSON file, or one of a value a line, that was changed; now and then one that is damaged."""
    if draw(st.integers(0, 4)) == 0:
        return draw(damaged(data))
    try:
        return as_json(draw(changed(json.loads(data))))
    except json.JSONDecodeError:
        *before, last = data.splitlines()
        return b"\n".join([*before, as_json(draw(changed(json.loads(last))))])


ODD_LINES = (
    "\u3000", "\ufeff", "\x1b[31m", "é" * 3000, "ﷺ", "\u0301" * 50, "\r", "\x0c", "▁", "##", "日本語" * 40,
)
odd_line = st.text(max_size=200) | st.sampled_from(ODD_TEXT) | st.sampled_from(ODD_LINES)


@st.composite
def text_file(draw: st.DrawFn) -> tuple[str, bytes]:
    """(ending of its name, content) of a file of text, whole or damaged, perhaps compressed, perhaps named wrongly."""
    lines = draw(st.lists(odd_line, max_size=30))
    kind = draw(st.sampled_from((".txt", ".jsonl")))
    if kind == ".txt":
        data = draw(st.sampled_from(("\n", "\n\n", "\r\n", "\r"))).join(lines).encode("utf-8", "surrogatepass")
        data = data * draw(st.sampled_from((1, 1, 50)))
    else:
        values = [draw(st.one_of(st.fixed_dictionaries({"text": odd_line | odd_value}), odd_value)) for _ in lines]
        data = b"\n".join(map(as_json, values))
    if draw(st.integers(0, 3)) == 0:
        data = draw(damaged(data))
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress, ".bz2": bz2.compress}
    ending = draw(st.sampled_from(("", "", *pack)))
    data = pack[ending](data)
    if ending and draw(st.booleans()):
        data = draw(damaged(data))
    return kind + draw(st.sampled_from((ending, ending, ending, ".gz"))), data
