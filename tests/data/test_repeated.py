"""Documents that are held out leave the training text of every source, against the texts themselves."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest

from jaxlm.data.text import TextData


def text_of(draw, size):
    return " ".join("".join(map(chr, draw.integers(97, 123, 6))) for _ in range(size))


def write(path, documents):
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    return str(path)


@pytest.fixture
def config(tmp_path):
    return TextData(tokenizer_kind="bytes", cache_dir=str(tmp_path / "cache"), length=32)


def documents_of(tokenizer, split):
    ends, ids = split.offsets.read(0, split.documents + 1), split.tokens.read(0, split.num_tokens)
    return [tokenizer.decode(ids[start:end].tolist()) for start, end in itertools.pairwise(ends)]


def splits_of(config):
    """Return the documents of each store of a text, to train on and held out."""
    tokenizer = config.prepare_tokenizer(list)
    source = config.open(tokenizer, list)
    return [[documents_of(tokenizer, getattr(store, split)) for split in ("train", "held_out")]
            for store in getattr(source, "stores", {"": source}).values()]


def test_no_source_of_a_mixture_trains_on_what_another_holds_out(config, tmp_path):
    """The small source holds out a tenth, the large one less; what each holds out alone stays as it is."""
    draw = np.random.default_rng(0)
    shared = [text_of(draw, 60) for _ in range(150)]
    sources = [write(tmp_path / "large.jsonl", [*(text_of(draw, 60) for _ in range(900)), *shared]),
               write(tmp_path / "small.jsonl", [*shared, text_of(draw, 60)])]
    alone = [splits_of(dataclasses.replace(config, source=source))[0] for source in sources]
    held_out = {text for _, texts in alone for text in texts}
    leaking = [[text for text in train if text in held_out] for train, _ in alone]
    assert len(leaking[0]) > 3 and not set(leaking[0]) & set(alone[0][1])
    mixed, lines = dataclasses.replace(config, source=f"{sources[0]}@0.9,{sources[1]}@0.1"), []
    expected = [[[text for text in train if text not in held_out], texts] for train, texts in alone]
    assert splits_of(mixed) == expected
    mixed.open(mixed.prepare_tokenizer(list), lines.append)
    assert [line for line in lines if line.startswith("Left out")] == [
        f"Left out of the training text of {source}, as held out: {len(left):,} documents"
        for source, left in zip(sources, leaking, strict=True) if left
    ]


def test_the_report_compares_the_sources(config, tmp_path):
    """Documents of one source that stand within longer ones of another, which have other hashes."""
    draw = np.random.default_rng(1)
    shared = [text_of(draw, 60) for _ in range(60)]
    sources = [write(tmp_path / "a.jsonl", [f"{text} {text_of(draw, 5)}" for text in shared]),
               write(tmp_path / "b.jsonl", shared)]
    mixed, lines = dataclasses.replace(config, source=f"{sources[0]}@1,{sources[1]}@1"), []
    mixed.describe(mixed.prepare_tokenizer(list), lines.append)
    (_, (train, _)), ((_, held_out), _) = splits_of(mixed), splits_of(mixed)
    contained = sum(any(text[:300] in each for each in train) for text in held_out)
    said = f"{sources[0]}: {contained} of {len(held_out)} held-out documents have 80% of their 13-grams"
    assert contained > 0 and any(line.startswith(said) for line in lines)


@pytest.mark.parametrize("is_divided", [False, True])
def test_the_tail_of_a_text_repeats_no_document_before_it(config, tmp_path, is_divided):
    """Also one that the beginning of the tail divides, whose own first part stays."""
    draw = np.random.default_rng(2)
    texts = [text_of(draw, 100) for _ in range(6)]
    last = text_of(draw, 600) if is_divided else text_of(draw, 20)
    source = write(tmp_path / "few.jsonl", [texts[0], last, *texts[1:], last])
    ((train, held_out),) = splits_of(dataclasses.replace(config, source=source, held_out=0.1))
    assert last not in train and held_out and (last in held_out) == (not is_divided)
    if is_divided:
        assert [*train[:-1], train[-1] + held_out[0]] == [*texts, last] and len(train[-1]) > 100
    else:
        assert "".join([*train, *held_out]) == "".join([*texts, last])


def test_a_text_of_copies_stays(config, tmp_path):
    source = write(tmp_path / "copies.jsonl", ["the same words as in every other document"] * 50)
    ((train, held_out),) = splits_of(dataclasses.replace(config, source=source))
    assert len(train) + len(held_out) in (50, 51) and len(train) > 40 and held_out
