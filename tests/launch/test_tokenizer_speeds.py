"""The table of the speeds of tokenizers."""

import re
import sys
from pathlib import Path

from tests.training.support import write_text

sys.path.insert(0, str(Path(__file__).parents[2] / "launch" / "tables"))
import tokenizer_speeds


def test_each_kind_has_a_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokenizer_speeds, "KINDS", ("bytes", "words"))
    text = write_text(tmp_path / "text.txt")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    tokenizer_speeds.main([str(text), str(tmp_path / "vocab.txt")])
    rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"\| {text.stat().st_size / 1e6:,.1f} MB of {text} \| MB/s a core \|", rows[0])
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        "| bytes, 258 ids", rows[3].split(" | ")[0], f"| {tmp_path / 'vocab.txt'}", "| keys of exact duplicates",
        "| keys of near duplicates"]
    assert all(float(row.split(" | ")[1].removesuffix(" |")) >= 0 for row in rows[2:])
