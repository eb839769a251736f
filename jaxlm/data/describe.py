"""Report of a text: lengths, scripts, characters that the vocabulary lacks, held-out text that is trained on."""

from __future__ import annotations

import collections
import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxlm.data.store import Store
from jaxlm.tokenizers.tokenizer import Tokenizer

_SHOWN = 12
_MOST_OTHERS = 400  # special tokens and bytes
_NGRAM = 13  # tokens, as in the study of GPT-3 (Brown et al. 2020, appendix C)
_MIN_SHARE = 0.8  # share of a document's runs
_MAX_TOKENS = 1 << 22  # held-out tokens that are looked for, some 200 MB of memory
_MOST_SEARCHED = 10**9  # tokens of the training text: some ten minutes
_AT_ONCE = 1 << 20
_MOST_LENGTHS, _LENGTHS_AT_ONCE = 1 << 24, 1 << 14
_ODD = np.random.SeedSequence(0).generate_state(_NGRAM, np.uint64) | 1


def describe_text(
    store: Store, tokenizer: Tokenizer, sample: Iterable[str], stores: Sequence[Store] = ()
) -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        store: token store of the text; the lengths are those of its documents to train on.
        tokenizer: tokenizer of the store.
        sample: text whose characters are counted.
        stores: those of a mixture, which are all trained on.
    """
    offsets, count, step = store.train.offsets, store.train.documents, _LENGTHS_AT_ONCE
    starts = range(0, count or 1, step * (-(-count // _MOST_LENGTHS) or 1))
    lengths = np.concatenate([np.diff(offsets.read(start, min(start + step, count) + 1)) for start in starts])
    longest, of = store.manifest["parts"]["train"]["longest"], f"{len(lengths):,} of " * (len(lengths) < count)
    sizes = [f"{np.percentile(lengths, share):,.0f} ({share} %)" for share in (10, 50, 90)]
    yield f"Tokens of {of}{count:,} documents, at most: {', '.join(sizes)}, {longest:,} (100 %)"
    counts = collections.Counter(itertools.chain.from_iterable(sample))
    scripts: collections.Counter[str] = collections.Counter()
    for character, count in counts.items():
        if character.isalpha():  # the first word of a letter's name is its script, such as LATIN or HANGUL
            scripts[unicodedata.name(character, "unnamed").split()[0].capitalize()] += count
    found = (f"{name} {count / scripts.total():.2%}" for name, count in scripts.most_common(_SHOWN))
    yield f"Scripts of {scripts.total():,} letters: {', '.join(found)}"
    # In WordPiece, a character may be there within words alone; in a byte-level BPE after a space.
    characters = [character for character in counts if not character.isspace()]
    encoded = [tokenizer.encode_arrays([before + c for c in characters]) for before in ("", "a", " ")]
    every = -(-sum(each.train.num_tokens for each in stores or [store]) // _MOST_SEARCHED) or 1
    found, of = count_contained(store, stores, every)
    text = f"1/{every:,} of the training text, in evenly spaced blocks" if every > 1 else "the training text"
    yield f"{found:,} of {of:,} held-out documents have {_MIN_SHARE:.0%} of their {_NGRAM}-grams in {text}"
    unk, used = tokenizer.vocabulary.unk, {i for ids in itertools.chain(*encoded) for i in ids.tolist()}
    is_bytes = tokenizer.to_json()["model"].get("merges") == []  # bytes are no fallback where there is nothing else
    parts = {i for i in used if not is_bytes and "\ufffd" in tokenizer.decode([i])}
    for verb, wanted in (("lacks", {unk}), ("spells in bytes", parts)):
        lacking = {c: counts[c] for c, *each in zip(characters, *encoded, strict=True)
                   if not any(wanted.isdisjoint(ids.tolist()) for ids in each)}
        share, shown = sum(lacking.values()) / max(1, counts.total()), sorted(lacking, key=lacking.get, reverse=True)
        such = f", such as {' '.join(shown[:_SHOWN])}" if shown else ""
        size = 2 * (len(characters) + _MOST_OTHERS)
        flags = f"--data.tokenizer auto --data.vocab-size {size}"
        advice = f"; choose one of its languages, or train one on it ({flags} or more)" if share > 0.05 else ""
        if lacking or verb == "lacks":
            yield (f"The vocabulary {verb} {len(lacking):,} of {len(characters):,} characters, {share:.3%} of the text"
                   f"{such}{advice}")


def count_contained(store: Store, stores: Sequence[Store] = (), every: int = 1) -> tuple[int, int]:
    """Return how many held-out documents have `_MIN_SHARE` of their n-grams in the training text, and how many any.

    The training text is that of `stores`, else of the store alone; of its blocks, one of `every` is searched.
    """
    held_out = store.held_out
    offsets = held_out.offsets.read(0, min(held_out.documents, _MAX_TOKENS) + 1)  # a document has a token
    offsets = offsets[: max(2, np.searchsorted(offsets, _MAX_TOKENS))]
    runs = _runs(held_out.tokens.read(0, int(offsets[-1])))
    document = np.searchsorted(offsets, np.arange(len(runs)), side="right") - 1
    is_inside = np.arange(len(runs)) + _NGRAM <= np.append(offsets, 0)[document + 1]
    wanted, place = np.unique(runs[is_inside], return_inverse=True)
    is_found = np.zeros(len(wanted), bool)
    for train in [each.train for each in stores or [store]] if len(wanted) else []:
        for start in range(0, train.num_tokens - _NGRAM + 1, every * _AT_ONCE):
            runs = _runs(train.tokens.read(start, min(start + _AT_ONCE + _NGRAM - 1, train.num_tokens)))
            near = np.minimum(np.searchsorted(wanted, runs), len(wanted) - 1)
            is_found[near[wanted[near] == runs]] = True
    sizes, found = (np.bincount(document[is_inside], weights) for weights in (None, is_found[place]))
    return int(((sizes > 0) & (found >= _MIN_SHARE * sizes)).sum()), int((sizes > 0).sum())


def _runs(tokens: np.ndarray) -> np.ndarray:
    """Return the hash of each run of `_NGRAM` tokens: uint64 [tokens - _NGRAM + 1]."""
    ids, size = tokens.astype(np.uint64), max(0, len(tokens) - _NGRAM + 1)
    return sum((ids[first : first + size] * factor for first, factor in enumerate(_ODD)), np.zeros(size, np.uint64))
