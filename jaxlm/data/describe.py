"""Report of a text: lengths of its documents, scripts, and the characters that the vocabulary lacks."""

from __future__ import annotations

import collections
import itertools
import unicodedata
from collections.abc import Iterable, Iterator

import numpy as np

from jaxlm.data.store import Store
from jaxlm.tokenizers.tokenizer import Tokenizer

_SHOWN = 12


def describe_text(store: Store, tokenizer: Tokenizer, sample: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        store: token store of the text; the lengths are those of its documents to train on.
        tokenizer: tokenizer of the store.
        sample: text whose characters are counted.
    """
    lengths = np.diff(store.train.offsets.read(0, store.train.documents + 1))
    sizes = (f"{np.percentile(lengths, share):,.0f} ({share} %)" for share in (10, 50, 90, 100))
    yield f"Tokens of {len(lengths):,} documents, at most: {', '.join(sizes)}"
    counts = collections.Counter(itertools.chain.from_iterable(sample))
    scripts: collections.Counter[str] = collections.Counter()
    for character, count in counts.items():
        if character.isalpha():  # the first word of a letter's name is its script, such as LATIN or HANGUL
            scripts[unicodedata.name(character, "unnamed").split()[0].capitalize()] += count
    found = (f"{name} {count / scripts.total():.2%}" for name, count in scripts.most_common(_SHOWN))
    yield f"Scripts of {scripts.total():,} letters: {', '.join(found)}"
    # In WordPiece, a character may be there within words alone.
    characters = [character for character in counts if not character.isspace()]
    encoded = zip(*(tokenizer.encode_arrays([before + c for c in characters]) for before in ("", "a")), strict=True)
    unk = tokenizer.vocabulary.unk
    lacking = {c: counts[c] for c, pair in zip(characters, encoded, strict=True) if all(unk in ids for ids in pair)}
    share, shown = sum(lacking.values()) / max(1, counts.total()), sorted(lacking, key=lacking.get, reverse=True)
    such = f", such as {' '.join(shown[:_SHOWN])}" if shown else ""
    yield f"The vocabulary lacks {len(lacking):,} of {len(characters):,} characters, {share:.3%} of the text{such}"
