"""Mixtures: the order of rows against its definition, shares, epochs, vocabulary, and mistakes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm.data import mixture
from jaxlm.data.base import RowFormat
from jaxlm.data.mixture import MixedBatches, Mixture, describe_draws, parse_mixture, quotas, shares_of, weights_of_phase
from jaxlm.data.permutation import permute
from jaxlm.data.store import Store
from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from tests.data.stand_ins import store_of
from tests.data.test_text import prepare, write_words

PACKINGS = ("document", "packed", "packed-eos", "packed-room")
SEED = 11


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Three sources whose tokens tell them apart: long, short and few documents."""
    folder, sizes = tmp_path_factory.mktemp("stores"), {"a": (30, 25), "m": (50, 7), "z": (3, 40)}
    return {
        name: store_of(folder / name, [name * (size + i % 3) for i in range(count)], held_out=0.2)
        for name, (count, size) in sizes.items()
    }


@pytest.fixture(scope="module")
def mixed(stores):
    return Mixture(stores, [5, 3, 2], 0.0)


def sources_of(tokens):
    """The source of each row, by its largest token: letters are larger than the symbols of the vocabulary."""
    return [chr(token - 16) for token in tokens.max(axis=1)]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(mixture, "BLOCK", 32)


def batches_of(mixed, packing="document", rows=4, length=8, split="train", seed=SEED):
    return mixed.batches(split, rows, RowFormat(packing, length), seed)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_block_has_exactly_its_quotas(mixed, small_blocks, packing):
    """By enumeration, also in tokens: the rows' mean lengths times the quotas are the shares, up to rounding a row."""
    batches = batches_of(mixed, packing)
    for block in range(5):
        rows = np.concatenate([batches.batch(step).tokens for step in range(8 * block, 8 * block + 8)])
        assert tuple(collections.Counter(sources_of(rows))[name] for name in "amz") == batches.quotas
    assert sum(batches.quotas) == 32
    lengths = [part.table.mean_length for part in batches.parts.values()]
    tokens = np.array(batches.quotas) * lengths
    assert np.abs(tokens - np.array([0.5, 0.3, 0.2]) * tokens.sum()).max() <= 2 * max(lengths)


@pytest.mark.parametrize("block", [32, 1 << 14])
def test_each_source_gives_its_own_shuffled_epochs_without_gaps(mixed, monkeypatch, block):
    """The rows of a source, wherever the mixture stops, are the first ones of its batches alone."""
    monkeypatch.setattr(mixture, "BLOCK", block)
    batches = batches_of(mixed, rows=10)
    rows = np.concatenate([batches.batch(step).tokens for step in range(37)])
    for name, part in batches.parts.items():
        own = rows[np.array(sources_of(rows)) == name]
        steps = -(-len(own) // 10)
        alone = np.concatenate([part.batch(step).tokens for step in range(steps)])
        np.testing.assert_array_equal(own, alone[: len(own)])
        assert batches.drawn(370)[name] == len(own)
    # Every row once per epoch, by the numbers that are read.
    numbers, ends = batches.shuffled(np.arange(370)), np.cumsum([part.num_rows for part in batches.parts.values()])
    for end, part in zip(ends, batches.parts.values(), strict=True):
        own = numbers[(end - part.num_rows <= numbers) & (numbers < end)]
        assert len(own) >= part.num_rows
        for start in range(0, len(own) - part.num_rows + 1, part.num_rows):
            assert sorted(own[start : start + part.num_rows]) == list(range(end - part.num_rows, end))


def test_the_order_is_mixed_and_depends_on_the_seed(mixed):
    """No long runs of one source: as many changes as independent draws have, within 4 standard deviations."""
    orders = []
    for seed in (1, 2):
        batches = batches_of(mixed, rows=1000, seed=seed)
        label = np.array(sources_of(batches.batch(0).tokens))
        orders.append(label)
        share = np.array([(label == name).mean() for name in "amz"])
        changes, expected = (label[1:] != label[:-1]).mean(), 1 - (share**2).sum()
        assert abs(changes - expected) < 4 * math.sqrt(expected * (1 - expected) / 999)
    assert (orders[0] != orders[1]).mean() > 0.4


@pytest.mark.parametrize("packing", PACKINGS)
def test_any_step_on_any_number_of_hosts(mixed, small_blocks, packing):
    """A fresh object that begins at any step, reading slices of the batch, reads the same."""
    whole = [batches_of(mixed, packing, rows=12).batch(step) for step in range(9)]
    for step, hosts in itertools.product(range(9), (1, 2, 4)):
        mixture._block.cache_clear()
        fresh, size = batches_of(mixed, packing, rows=12), 12 // hosts
        parts = [next(fresh.stream(step, slice(i * size, (i + 1) * size))) for i in range(hosts)]
        for field in ("tokens", "segment_ids"):
            found = np.concatenate([getattr(part, field) for part in parts])
            np.testing.assert_array_equal(found, getattr(whole[step], field))


def test_a_far_step_costs_one_block(mixed, monkeypatch):
    calls = []
    monkeypatch.setattr(mixture, "permute", lambda *args: calls.append(args[1:]) or permute(*args))
    mixture._block.cache_clear()
    batches_of(mixed, rows=8).batch(10**9)
    assert calls == [(mixture.BLOCK, SEED, 8 * 10**9 // mixture.BLOCK)]


def test_documents_of_two_sources_have_different_numbers(mixed, stores):
    """Next-sentence prediction takes its partners from other documents by these numbers."""
    rows = [batches_of(mixed, rows=60).batch(step) for step in range(4)]
    numbers = collections.defaultdict(set)
    for batch in rows:
        for name, segments in zip(sources_of(batch.tokens), batch.segment_ids, strict=True):
            numbers[name] |= set(segments[segments > 0].tolist())
    assert all(not one & other for one, other in itertools.combinations(numbers.values(), 2))
    assert len(numbers["m"]) == stores["m"].train.documents


def test_mean_lengths_are_those_of_the_rows(stores):
    for store, packing, length in itertools.product(stores.values(), PACKINGS, (5, 8, 30)):
        batches = store.batches("train", 1, RowFormat(packing, length), 0)
        real = batches.table.read(np.arange(batches.num_rows)).segment_ids > 0
        # What a packed row drops at the end of the text, or has more of an end's room, is part of a document.
        error = 0 if packing != "packed-room" else length / batches.num_rows
        assert abs(batches.table.mean_length - real.sum(axis=1).mean()) <= error + 1e-9, (packing, length)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=9), st.integers(1, 1 << 14))
def test_quotas_are_the_largest_remainders(weights, size):
    """Hamilton's method: floors, and one more for the largest remainders."""
    exact = [Fraction(weight * size, sum(weights)) for weight in weights]
    counts = quotas(np.array(weights, float), size)
    assert counts.sum() == size
    more = [int(count) - math.floor(value) for count, value in zip(counts, exact, strict=True)]
    assert set(more) <= {0, 1}
    given_up = [value % 1 for value, extra in zip(exact, more, strict=True) if not extra]
    got = [value % 1 for value, extra in zip(exact, more, strict=True) if extra]
    assert not got or not given_up or min(got) >= max(given_up) - Fraction(1, 10**6)


def test_shares_of_a_temperature():
    """Equation 1 of XLM-R: p^0.3, renormalized; T 1 gives the sizes, infinity equal shares."""
    sizes = [55_608, 300, 1]
    p = np.array(sizes) / sum(sizes)
    np.testing.assert_allclose(shares_of([], sizes, 1 / 0.3), p**0.3 / (p**0.3).sum(), atol=1e-11)
    np.testing.assert_allclose(shares_of([], sizes, 1.0), p, atol=1e-11)
    np.testing.assert_allclose(shares_of([], sizes, math.inf), np.full(3, 1 / 3), atol=1e-11)
    np.testing.assert_allclose(shares_of([7, 2, 1], sizes, 0.0), [0.7, 0.2, 0.1], atol=1e-11)


def test_a_phase_has_other_shares_and_goes_on_with_each_source(stores, small_blocks):
    """One source comes in late; no row is read twice within an epoch, whatever the shares were before."""
    items = [f"{name}.txt" for name in stores]
    run = Mixture(stores, [5, 3, 2], 0.0)
    sizes = np.array([stores[name].train.num_tokens for name in "am"])
    early = run.of_phase(weights_of_phase(items, "a.txt,m.txt", 2.0))
    np.testing.assert_allclose([early.shares[name] for name in "am"], sizes**0.5 / (sizes**0.5).sum())
    assert early.shares["z"] == 0
    alone = run.of_phase(weights_of_phase(items, "m.txt", 2.0))
    assert list(alone.shares.values()) == [0, 1, 0]
    first, second = batches_of(early), batches_of(run)
    second = second.after(0, 4).after_draws([(first, 24)])
    rows = [batch.tokens for batches, steps in ((first, 6), (second, 40)) for batch in map(batches.batch, range(steps))]
    rows = np.concatenate(rows)
    assert set(sources_of(rows[:24])) == {"a", "m"} and set(sources_of(rows[24:])) == {"a", "m", "z"}
    for name in "amz":
        own = rows[np.array(sources_of(rows)) == name]
        expected = batches_of(run).parts[name]
        expected = np.concatenate([expected.batch(step).tokens for step in range(-(-len(own) // 4))])
        np.testing.assert_array_equal(own, expected[: len(own)])


@pytest.mark.parametrize(("source", "items", "said"), [
    ("a.txt@0.5,c.txt@0.5", ["a.txt", "b.txt"], "has c.txt, which is no source of the run; give some of a.txt, b.txt"),
    ("a.txt", ["a.txt"], "are for a mixture of texts"),
])
def test_a_phase_with_another_text_is_refused(source, items, said):
    with pytest.raises(UserError, match=said):
        weights_of_phase(items, source, 0.0)


def test_statistics_are_those_of_the_mixture(mixed, stores):
    """Frequencies are the shares' means of the sources' frequencies."""
    expected = np.zeros(272)
    for name, share in zip("amz", (0.5, 0.3, 0.2), strict=True):
        expected[ord(name) + 16] = share
    counts = mixed.statistics.token_counts
    np.testing.assert_allclose(counts / counts.sum(), expected, atol=3 / counts.sum())
    expected = expected[expected > 0]
    assert mixed.statistics.unigram_entropy == pytest.approx(-(expected * np.log(expected)).sum())
    size = mixed.statistics.held_out_bytes / mixed.statistics.held_out_counts.sum()
    each = [stores[name].held_out for name in "amz"]
    assert size == pytest.approx(np.dot([0.5, 0.3, 0.2], [part.text_bytes / part.num_tokens for part in each]))
    longest = max(s * stores[n].statistics.longest_document for n, s in zip("amz", (0.5, 0.3, 0.2), strict=True))
    assert mixed.statistics.longest_document == pytest.approx(longest)


def test_evaluation_has_each_source_apart(mixed, stores):
    held_out = batches_of(mixed, split="held_out")
    assert isinstance(held_out, MixedBatches)
    assert dict(held_out.shares) == pytest.approx({"a": 0.5, "m": 0.3, "z": 0.2})
    for name in "amz":
        rows = np.concatenate([batch.tokens for batch in held_out.parts[name].evaluation(4, 10**6)])
        assert set(sources_of(rows[rows[:, 0] > 0])) == {name}
        assert (rows[:, 0] > 0).sum() == stores[name].batches("held_out", 4, RowFormat("document", 8), 0).num_rows
    assert {"a", "m"} <= set(sources_of(next(held_out.evaluation(60, 1)).tokens))


def test_sources_without_held_out_text_do_not_count(tmp_path, stores):
    empty = store_of(tmp_path / "e", ["e" * 30] * 5)
    held_out = batches_of(Mixture(stores | {"e": empty}, [5, 3, 2, 10], 0.0), split="held_out")
    assert dict(held_out.shares) == pytest.approx({"a": 0.5, "m": 0.3, "z": 0.2})


def test_draws_and_epochs_are_told(mixed):
    batches = batches_of(mixed, rows=4)
    lines = describe_draws([(batches, 400), (batches, 200)])
    part = batches.parts["z"]
    epochs = (batches.drawn(400)["z"] + batches.drawn(200)["z"]) / part.num_rows
    tokens = {name: (batches.drawn(400)[name] + batches.drawn(200)[name]) * batches.parts[name].table.mean_length
              for name in "amz"}
    share = tokens["z"] / sum(tokens.values())
    assert epochs > 4 and len(lines) == 3
    assert lines[2].startswith(f"Drawn of z: {share:.2%} of the tokens, {epochs:,.2f} epochs; beyond 4 repeated text")
    assert not any("beyond" in line for line in describe_draws([(batches, 40)]))
    plain = mixed.stores["a"].batches("train", 4, RowFormat("document", 8), 0)
    assert describe_draws([(plain, 10**6)]) == [], "one source is no mixture"


def test_a_share_below_one_row_of_a_block_is_refused(stores):
    with pytest.raises(UserError, match=r"^z would get less than one of 16,384 rows; raise its weight"):
        _ = batches_of(Mixture(stores, [1, 1, 1e-7], 0.0)).quotas


def test_an_empty_source_is_named(tmp_path, stores):
    empty = store_of(tmp_path / "e", ["e", "e"])  # without a name
    with pytest.raises(UserError, match=r"^: no document to train on"):
        batches_of(Mixture(stores | {"e": empty}, [1, 1, 1, 1], 0.0))


@pytest.mark.parametrize(
    ("source", "temperature", "expected"),
    [
        ("wiki.jsonl.zst@0.7,books/*.txt@0.3", 0, {"wiki": ("wiki.jsonl.zst", 0.7), "books": ("books/*.txt", 0.3)}),
        ("a.txt@7, b.txt@3e0", 0, {"a": ("a.txt", 7), "b": ("b.txt", 3)}),
        ("en/train.txt,de/train.txt", 3.3, {"en_train": ("en/train.txt", 0), "de_train": ("de/train.txt", 0)}),
        ("tfds:wiki/en@1,python-docs@2", 0, {"en": ("tfds:wiki/en", 1), "python-docs": ("python-docs", 2)}),
        ("x@home.txt@2,y.csv.gz@1", 0, {"x@home": ("x@home.txt", 2), "y": ("y.csv.gz", 1)}),
        ("*.txt@1,**/*.jsonl@2", 0, {"txt": ("*.txt", 1), "jsonl": ("**/*.jsonl", 2)}),
        ("texts/en*@0.7,texts/ko*@0.3", 0, {"en": ("texts/en*", 0.7), "ko": ("texts/ko*", 0.3)}),
        ("t/*/en.txt.gz@1,t/*/ko.txt@1", 0, {"en": ("t/*/en.txt.gz", 1), "ko": ("t/*/ko.txt", 1)}),
        ("a/*/x?.txt@1,b/*/x*.txt@1", 0, {"a": ("a/*/x?.txt", 1), "b": ("b/*/x*.txt", 1)}),
        ("a/[0-4]*@1,a/[5-9]*@1", 0, {"0_4": ("a/[0-4]*", 1), "5_9": ("a/[5-9]*", 1)}),
        ("a/x?@1,a/x*@1", 0, {"a_x_1": ("a/x?", 1), "a_x_2": ("a/x*", 1)}),
        ("a.txt@0.7", 0, {"": ("a.txt", 1)}),
        ("a.txt,b.txt", 0, {"": ("a.txt,b.txt", 1)}),
        ("me@home/a.txt,b.txt", 0, {"": ("me@home/a.txt,b.txt", 1)}),
    ],
)
def test_what_a_source_names(source, temperature, expected):
    assert parse_mixture(source, temperature) == expected


def test_a_file_with_the_whole_name_has_no_weight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes@2").mkdir()
    assert parse_mixture("notes@2") == {"": ("notes@2", 1.0)}
    assert parse_mixture("notes@2@3,b.txt@1") == {"notes@2": ("notes@2", 3.0), "b": ("b.txt", 1.0)}


@pytest.mark.parametrize(
    ("source", "temperature", "says"),
    [
        ("a.txt@1,b.txt", 0, r"needs a weight for each source, as a\.txt@0\.7, or for none\."),
        ("a.txt@0,b.txt@1", 0, r"weight of a\.txt in --data\.source is 0; give a number above 0"),
        ("a.txt@-1,b.txt@1", 0, "is -1"),
        ("a.txt@1e999,b.txt@1", 0, "is 1e999"),
        ("a.txt@nan,b.txt@1", 0, "needs a weight for each source"),
        ("a.txt@1,b.txt@1", 2, r"two or more sources without weights, since --data\.temperature is 2 "),
        ("a.txt", 2, "needs two or more sources without weights"),
        ("a.txt@1,a.txt@2", 0, r"names a\.txt twice; give it once"),
    ],
)
def test_mistakes(source, temperature, says):
    with pytest.raises(UserError, match=says):
        parse_mixture(source, temperature)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate("ab"):
        write_words(path / f"{name}.txt", 120 - 80 * seed, seed)
    return path


@pytest.fixture(scope="module")
def config(folder):
    cache = str(folder / "cache")
    return TextData(source=str(folder / "a.txt"), cache_dir=cache, vocab_size=600, held_out=0.05, length=32)


def test_a_single_source_is_that_of_today(config, folder):
    """Also with a weight: the same tokenizer, store and batches; and several sources without weights."""
    both = f"{config.source},{folder / 'b.txt'}"
    plain, weighted = prepare(config, list), prepare(dataclasses.replace(config, source=f"{config.source}@0.5"), list)
    assert isinstance(weighted.store, Store) and weighted.store.folder == plain.store.folder
    assert weighted.tokenizer == plain.tokenizer
    joined = prepare(dataclasses.replace(config, source=both), list)
    assert isinstance(joined.store, Store)
    assert joined.store.train.documents + joined.store.held_out.documents == 160


def test_a_mixture_has_one_vocabulary_and_a_fingerprint_of_its_weights(config, folder):
    found = []
    for weights in ((0.7, 0.3), (7, 3), (1, 1)):
        source = f"{config.source}@{weights[0]},{folder / 'b.txt'}@{weights[1]}"
        found.append(prepare(dataclasses.replace(config, source=source), list))
    one, same, other = found
    assert isinstance(one.store, Mixture) and one.store.shares == {"a": 0.7, "b": 0.3}
    assert same.tokenizer == one.tokenizer and same.store.fingerprint == one.store.fingerprint
    assert other.store.fingerprint != one.store.fingerprint
    vocabulary = one.tokenizer.vocabulary.size
    assert all(store.vocab_size == vocabulary for store in one.store.stores.values())
    a, b = (f"{store.train.num_tokens:,} tokens to train on, {store.held_out.num_tokens:,} held out"
            for store in one.store.stores.values())
    assert re.fullmatch(rf"Mixture of a 70\.0% \({a}[^)]*\), b 30\.0% \({b}[^)]*\)", one.store.summary)
    assert other.tokenizer == one.tokenizer, "all weights take all of a small text"
    heat = dataclasses.replace(config, source=f"{config.source},{folder / 'b.txt'}", temperature=2.0)
    store = prepare(heat, list).store
    sizes = [each.train.num_tokens for each in store.stores.values()]
    assert list(store.shares.values()) == pytest.approx(np.sqrt(sizes) / np.sqrt(sizes).sum())


def test_the_vocabulary_sees_the_sources_by_their_shares(config, folder, monkeypatch):
    seen = []
    monkeypatch.setattr("jaxlm.data.text._SAMPLE", 10_000)
    monkeypatch.setattr("jaxlm.data.text.train_tokenizer", lambda texts, *_, **__: seen.extend(texts))
    source = f"{config.source}@0.8,{folder / 'b.txt'}@0.2"
    with pytest.raises(UserError):  # nothing was trained
        dataclasses.replace(config, source=source, cache_dir=str(folder / "seen")).prepare_tokenizer(list)
    text = (folder / "a.txt").read_text()
    sizes = collections.Counter()
    for each in seen:
        sizes[each in text] += len(each.encode())
    assert sizes[True] / sum(sizes.values()) == pytest.approx(0.8, abs=0.05)


def test_a_file_in_two_sources_is_refused(config, folder):
    (folder / "more").mkdir()
    (folder / "more" / "a.txt").symlink_to(folder / "a.txt")
    source = f"{config.source}@1,{folder / 'more'}@1"
    with pytest.raises(UserError, match=r"^a and more of --data\.source both have .*a\.txt; leave it out of one"):
        dataclasses.replace(config, source=source).prepare_tokenizer(list)


def test_a_stream_of_a_mixture_is_refused(config, folder):
    stream = RowFormat("stream", 32, stride=32)
    config.check_format(stream)
    with pytest.raises(UserError, match="reads a text in its order; leave weights"):
        dataclasses.replace(config, source=f"{config.source}@1,{folder / 'b.txt'}@1").check_format(stream)


def test_shards_give_the_stores_of_one_process(config, folder, tmp_path):
    source = f"{config.source}@1,{folder / 'b.txt'}@1"
    one = dataclasses.replace(config, source=source)
    tokenizer = one.prepare_tokenizer(list)
    other = dataclasses.replace(one, cache_dir=str(tmp_path))
    for shard in range(4):
        other.tokenize(tokenizer, shard, 4, list)
    assert other.open(tokenizer, list).fingerprint == one.open(tokenizer, list).fingerprint
    assert json.loads((next((tmp_path / "stores").iterdir()) / "manifest.json").read_text())["format"]
