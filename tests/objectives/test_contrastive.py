"""Contrastive losses against sentence-transformers, their rows, and gradient caching."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxlm.analysis import search as searching
from jaxlm.analysis.step import open_stand_in
from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.errors import UserError
from jaxlm.fields import with_value
from jaxlm.models.bert import Bert
from jaxlm.models.elmo import Elmo
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.contrastive import excluded_passages, text_codes
from jaxlm.objectives.self_contrastive import SelfContrastive
from jaxlm.parallel.mesh import MeshConfig
from jaxlm.tasks.contrastive import Contrastive
from jaxlm.tasks.rerank import Rerank
from jaxlm.tasks.text_groups import TextGroups
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.huggingface.conftest import tokenizer, vocab_file  # noqa: F401 - fixtures
from tests.params import first_fast, random_params

ROWS, WIDTH, LENGTH = 7, 12, 24
VOCABULARY = Vocabulary.stand_in(200)
BERT = Bert(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=LENGTH, dropout=0.0,
            attention_dropout=0.0)


@dataclasses.dataclass(frozen=True)
class OfVectors(Contrastive):
    """The same loss of vectors, which stand in the place of the parameters."""

    def encode_texts(self, params, example, key):
        return params["vectors"]


class Given(torch.nn.Module):
    """A model of sentence-transformers whose inputs are the vectors of texts."""

    def forward(self, features):
        return dict(features)

    def get_embedding_dimension(self) -> int:
        return WIDTH


def drawn(num_texts: int, rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    """Return rows of different texts."""
    ids = np.random.default_rng(seed).integers(10, 190, (rows, num_texts, LENGTH), np.int32)
    return {"row": np.arange(rows, dtype=np.int32), "input_ids": ids, "attention_mask": np.ones_like(ids)}


def ours(objective: Contrastive, vectors: np.ndarray, example: dict) -> tuple[float, np.ndarray, dict]:
    example = jax.tree.map(jnp.asarray, example)

    def loss(vectors):
        terms = objective.loss({"vectors": vectors}, example, jax.random.key(0), True)
        return total_loss(terms), terms

    (value, terms), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(vectors)
    return float(value), np.asarray(gradient), {name: float(t.total / t.weight) for name, t in terms.items()}


@pytest.mark.parametrize(("negatives", "symmetric", "normalize", "widths"), first_fast([
    (2, True, True, (3, 8)), (1, False, False, ()),
    (0, False, True, ()), (1, False, True, ()), (2, False, True, ()), (0, True, True, ()), (1, True, True, ()),
    (0, False, True, (3, 8)), (1, True, False, (3, 8)),
], 2))
def test_info_nce_is_that_of_sentence_transformers(negatives, symmetric, normalize, widths):
    vectors = np.random.default_rng(1).normal(size=(ROWS, 2 + negatives, WIDTH)).astype(np.float32)
    objective = OfVectors(negatives=negatives, symmetric=symmetric, normalize=normalize, widths=widths, temperature=0.2)
    value, gradient, _ = ours(objective, vectors, drawn(2 + negatives))

    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
    from sentence_transformers.util import cos_sim, dot_score

    loss = MultipleNegativesRankingLoss(
        Given(), scale=5.0, similarity_fct=cos_sim if normalize else dot_score, partition_mode="per_direction",
        directions=("query_to_doc", *["doc_to_query"] * symmetric),
    )
    if widths:
        loss = MatryoshkaLoss(loss.model, loss, [*widths, WIDTH])
    texts = torch.tensor(vectors, requires_grad=True)
    theirs = loss([{"sentence_embedding": texts[:, place]} for place in range(2 + negatives)], None)
    theirs.backward()
    assert value == pytest.approx(theirs.item(), rel=1e-6)
    # Sums in another order: a few units of the precision of the largest, 1.6.
    np.testing.assert_allclose(gradient, texts.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("widths", [(), (3, 8)])
@pytest.mark.parametrize("labels", [[0.1, 0.5, 0.5, 2, 0.1, 0, 1], [1] * 7], ids=["ties", "equal"])
def test_cosent_is_that_of_sentence_transformers(labels, widths):
    vectors = np.random.default_rng(2).normal(size=(ROWS, 2, WIDTH)).astype(np.float32)
    objective = OfVectors(criterion="cosent", widths=widths)
    value, gradient, terms = ours(objective, vectors, drawn(2) | {"score": np.array(labels, np.float32)})
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MatryoshkaLoss

    loss = CoSENTLoss(Given())
    if widths:
        loss = MatryoshkaLoss(loss.model, loss, [*widths, WIDTH])
    texts = torch.tensor(vectors, requires_grad=True)
    theirs = loss([{"sentence_embedding": texts[:, place]} for place in (0, 1)], torch.tensor(labels))
    theirs.backward()
    assert value == pytest.approx(theirs.item(), rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(gradient, texts.grad.numpy(), rtol=1e-6, atol=1e-6)
    cosines = np.sum(vectors[:, 0] * vectors[:, 1], -1) / np.prod(np.linalg.norm(vectors, axis=-1), axis=-1)
    pairs = [(i, j) for i in range(ROWS) for j in range(ROWS) if labels[i] > labels[j]]
    if pairs:
        assert terms["order_accuracy"] == pytest.approx(np.mean([cosines[i] > cosines[j] for i, j in pairs]))


def test_scores_of_padding_have_no_pairs():
    vectors = np.random.default_rng(2).normal(size=(ROWS, 2, WIDTH)).astype(np.float32)
    scores = np.arange(ROWS, dtype=np.float32)
    example = drawn(2) | {"score": scores}
    example["row"] = np.array([0, 1, 2, 3, 4, -1, -1], np.int32)
    value, gradient, _ = ours(OfVectors(criterion="cosent"), vectors, example)
    cut = {name: array[:5] for name, array in example.items()}
    assert value == pytest.approx(ours(OfVectors(criterion="cosent"), vectors[:5], cut)[0], rel=1e-6)
    assert not gradient[5:].any()


def test_texts_that_are_no_negatives_by_hand():
    """The formula written out, over the pairs that are left."""
    example, vectors = drawn(3), np.random.default_rng(3).normal(size=(ROWS, 3, WIDTH)).astype(np.float32)
    ids, mask = example["input_ids"], example["attention_mask"]
    ids[1, 0] = ids[0, 0]  # two rows of one query
    ids[2, 1] = ids[3, 1]  # two rows of one positive
    ids[4, 2] = ids[3, 1]  # a hard negative that is the positive of other rows
    ids[5, 2], mask[5, 2] = 0, 0  # a row without one
    example["row"][6] = -1
    left_out = {(0, 1, 1), (1, 0, 1), (2, 3, 1), (3, 2, 1), (2, 4, 2), (3, 4, 2)}
    left_out |= {(i, 5, 2) for i in range(ROWS)}
    left_out |= {(i, 6, k) for i in range(6) for k in (1, 2)} | {(6, j, k) for j in range(6) for k in (1, 2)}
    found = np.asarray(excluded_passages(example))
    assert {(i, j, k + 1) for i, j, k in np.argwhere(found).tolist()} - {(6, 6, 2)} == left_out

    z = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    s = np.einsum("id,jkd->ijk", z[:, 0], z) / 0.05
    losses, right, negatives = [], [], []
    for i in range(6):
        kept = [s[i, j, k] for j in range(ROWS) for k in (1, 2) if (i, j, k) not in left_out]
        others = [s[j, i, 1] for j in range(ROWS) if (j, i, 1) not in left_out]
        forward, backward = (np.log(np.sum(np.exp(each))) - s[i, i, 1] for each in (kept, others))
        losses.append((forward + backward) / 2)
        right.append(s[i, i, 1] >= max(kept))
        negatives += [s[i, j, k] * 0.05 for j in range(ROWS) for k in (1, 2)
                      if (i, j, k) not in left_out | {(i, i, 1)}]
    value, gradient, terms = ours(OfVectors(negatives=1, symmetric=True), vectors, example)
    assert value == pytest.approx(np.mean(losses), rel=1e-5)
    assert terms["accuracy"] == pytest.approx(np.mean(right))
    assert terms["positive_cosine"] == pytest.approx(np.mean([s[i, i, 1] for i in range(6)]) * 0.05, rel=1e-5)
    assert terms["negative_cosine"] == pytest.approx(np.mean(negatives), abs=1e-6)
    assert not gradient[6].any() and not gradient[5, 2].any() and gradient[:6, :2].any()


def test_accuracy_is_of_the_queries_with_negatives():
    """A row alone has none, nor has a query whose rows are all of its own positive."""
    vectors = jnp.asarray(np.random.default_rng(3).normal(size=(3, 2, WIDTH)), jnp.float32)
    for rows, wanted in ((1, 0), (3, 3)):
        example = jax.tree.map(jnp.asarray, drawn(2, rows))
        terms = OfVectors().loss({"vectors": vectors[:rows]}, example, jax.random.key(0), False)
        assert terms["accuracy"].weight == wanted and terms["contrastive_loss"].weight == rows  # as in the peer's loss
    example["input_ids"] = example["input_ids"].at[1:].set(example["input_ids"][0])
    terms = OfVectors().loss({"vectors": vectors}, example, jax.random.key(0), False)
    assert terms["accuracy"].weight == 0


def test_the_hash_is_that_of_the_text():
    draw = np.random.default_rng(0)
    ids = np.unique(draw.integers(0, 50_000, (20_000, 8), np.int32), axis=0)
    ids = np.concatenate([ids, np.sort(ids, axis=1)[:2_000]])  # the same ids in another order
    ones = np.ones_like(ids)
    codes = np.asarray(text_codes(jnp.asarray(ids), jnp.asarray(ones)))
    assert len(np.unique(codes)) >= len(np.unique(ids, axis=0)) - 1  # 0.06 pairs are expected to collide
    wider = np.pad(ids, ((0, 0), (0, 5)), constant_values=3)
    mask = jnp.pad(jnp.asarray(ones), ((0, 0), (0, 5)))
    np.testing.assert_array_equal(codes, text_codes(jnp.asarray(wider), mask))
    assert (codes != np.asarray(text_codes(jnp.asarray(wider), mask.at[:, 7].set(0)))).all()


def bound(**changes) -> Contrastive:
    return Contrastive(**dict(model=BERT, negatives=1) | changes).bind(VOCABULARY, LENGTH)


def gradients(objective: Contrastive, params, example: dict, train: bool = True):
    example = jax.tree.map(jnp.asarray, example)

    def loss(params):
        return total_loss(objective.loss(params, example, jax.random.key(3), train))

    return jax.jit(jax.value_and_grad(loss))(params)


def assert_close(one, other, tolerance: float = 1e-6):
    (value, grads), (expected, expected_grads) = one, other
    assert float(value) == pytest.approx(float(expected), rel=tolerance)
    scale = float(optax.tree.norm(expected_grads))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance * scale), grads, expected_grads)


def short_queries() -> dict[str, np.ndarray]:
    example = drawn(3, rows=8)
    example["attention_mask"][:, 0, 6:] = 0
    return example


@pytest.mark.parametrize(("query_length", "chunks"), [
    (8, 4), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((0, 2), (0, 8), (8, 2), (8, 8)))
])
def test_chunks_change_neither_loss_nor_gradient(query_length, chunks):
    params, example = random_params(bound()), short_queries()
    whole = gradients(bound(query_length=query_length), params, example)
    assert_close(gradients(bound(chunks=chunks, query_length=query_length), params, example), whole)


@pytest.mark.slow
def test_a_query_in_fewer_columns_is_the_same_and_a_mean_over_chunks_is_not():
    params, example = random_params(bound()), short_queries()
    whole = gradients(bound(query_length=8), params, example)
    assert_close(whole, gradients(bound(), params, example), 1e-5)
    # The mean of the losses of chunks is another objective.
    parts = [{name: array[place::2] for name, array in example.items()} for place in range(2)]
    mean = np.mean([float(gradients(bound(), params, part)[0]) for part in parts])
    assert abs(mean - float(whole[0])) > 0.05


@pytest.mark.slow
def test_chunks_with_dropout_are_the_parts_read_one_by_one():
    """Of the plain formula without `lax.map` and `jax.checkpoint`, with a key for each chunk."""
    example, chunks = jax.tree.map(jnp.asarray, drawn(3, rows=8)), 4
    objective = bound(model=dataclasses.replace(BERT, dropout=0.3, attention_dropout=0.3), chunks=chunks)
    params, key = random_params(objective), jax.random.key(3)
    whole = dataclasses.replace(objective, chunks=1)

    def loss(params):
        vectors = jnp.zeros((8, 3, 16))
        for c in range(chunks):
            part = {name: array[c::chunks] for name, array in example.items()}
            vectors = vectors.at[c::chunks].set(whole.encode_texts(params, part, jax.random.fold_in(key, c)))
        return total_loss(OfVectors(negatives=1).loss({"vectors": vectors}, example, key, True))

    expected = jax.jit(jax.value_and_grad(loss))(params)
    assert_close(gradients(objective, params, example), expected)
    assert abs(float(expected[0]) - float(gradients(objective, params, example, False)[0])) > 0.01


@pytest.mark.slow
def test_chunks_take_less_memory():
    def peak(chunks: int) -> int:
        objective = bound(chunks=chunks, negatives=0)
        shapes = jax.eval_shape(objective.init, jax.random.key(0))
        example = jax.tree.map(jnp.asarray, objective.synthetic(128, LENGTH))

        def loss(params):
            return total_loss(objective.loss(params, example, jax.random.key(0), True))

        return jax.jit(jax.grad(loss)).lower(shapes).compile().memory_analysis().temp_size_in_bytes

    assert peak(8) < 0.4 * peak(1)


def test_microbatches_are_refused_and_chunks_are_searched():
    def experiment(**train) -> Experiment:
        return Experiment(Contrastive(model=BERT), TextGroups(length=LENGTH), OptimizerConfig(),
                          TrainConfig(steps=2, batch_size=64, **train))

    with pytest.raises(UserError, match=r"train.accumulate 2 would compare only .* objective.chunks to 2"):
        experiment(accumulate=2).validate()
    with pytest.raises(UserError, match=r"train.batch_size is 1; Contrastive needs 2 or more"):
        with_value(experiment(), "train.batch_size", 1).validate()
    with_value(with_value(experiment(), "train.batch_size", 1), "objective.negatives", 1).validate()
    found = [flags for _, flags in searching.variants(open_stand_in(experiment()), MeshConfig(), 16)]
    assert [flags["objective.chunks"] for flags in found if "objective.chunks" in flags] == [2, 4, 4]
    assert not any("train.accumulate" in flags for flags in found)


SHORT = {"query": "the cat", "positive": "a cat sat on the mat"}


def rows_of(folder, name: str, text: str, **fields) -> list:
    file = folder / name
    file.write_text(text)
    return list(TextGroups(**fields).read(str(file)))


def test_rows_of_every_format(tmp_path):
    def values(*arguments, **fields):
        return [row.values for row in rows_of(tmp_path, *arguments, **fields)]

    wanted = [SHORT | {"negatives": ["dog", "tree"]}, SHORT | {"negatives": []}]
    lines = "".join(json.dumps(row) + "\n" for row in wanted)
    lacking = json.dumps(SHORT) + "\n"
    assert values("a.jsonl", lines + lacking) == [*wanted, wanted[1]]
    table = "query,positive,one,two\nthe cat,a cat sat on the mat,dog,tree\nthe cat,a cat sat on the mat,,\n"
    assert values("a.csv", table, negative_fields=("one", "two")) == wanted
    scored = "the cat\ta cat sat on the mat\t3.5\n"
    numbers = dict(query_field="1", positive_field="2", score_field="3")
    assert values("a.tsv", scored, **numbers) == [SHORT | {"negatives": [], "label": 3.5}]
    (bad,) = rows_of(tmp_path, "b.tsv", "x\ty\thigh\n", **numbers)
    assert "the field '3' is 'high', no number" in str(bad)
    for cell in ('["dog", "tree"]', "[]", " [ 'dog']"):
        (bad,) = rows_of(tmp_path, "b.csv", f"query;positive;negatives\nthe cat;a cat;{cell}\n")
        assert "negatives holds a list as text; write lists in JSON lines" in str(bad)
    quoted = SHORT | {"negatives": ['["x"] is JSON', "[1]"]}
    assert values("q.jsonl", json.dumps(quoted) + "\n") == [quoted]
    nested = json.dumps(SHORT | {"wrong": {"texts": ["dog"]}}) + "\n"
    assert values("n.jsonl", nested, negative_fields=("wrong.texts",)) == [SHORT | {"negatives": ["dog"]}]
    with pytest.raises(UserError, match="no column 'two'; perhaps 'Two' is meant"):
        rows_of(tmp_path, "d.csv", "query,positive,Two\nx,y,z\n", negative_fields=("two",))
    (bad,) = rows_of(tmp_path, "b.csv", "query,positive\nthe cat, \n")
    assert "line 2 has no positive" in str(bad)
    with pytest.raises(UserError, match=r"no column 'query'.*--data.query-field"):
        rows_of(tmp_path, "c.csv", "a,b\nx,y\n")


def test_rows_are_encoded_with_prompts(tokenizer, tmp_path):  # noqa: F811
    lines = [SHORT | {"negatives": ["dog", "tree", "mat"]}, SHORT | {"negatives": []}]
    data = TextGroups(source=str(tmp_path / "a.jsonl"), held_out=0.0)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    objective = Contrastive(
        model=BERT, negatives=2, query_prompt="the dog ran ", passage_prompt="it ", query_length=8,
    ).bind(tokenizer.vocabulary, 9)
    source = data.open(tokenizer)
    first, second = (example.arrays for example in source.examples("train", objective, 9))

    def texts(arrays) -> list[str]:
        return [" ".join(tokenizer.pieces(ids[mask > 0])) for ids, mask in
                zip(arrays["input_ids"], arrays["attention_mask"], strict=True)]

    shared = ["[CLS] the dog ran the cat [SEP]", "[CLS] it a cat sat on the mat [SEP]"]
    assert texts(first) == [*shared, "[CLS] it dog [SEP]", "[CLS] it tree [SEP]"]
    assert texts(second) == [*shared, "", ""]
    assert objective.remarks(source, 9) == [
        "2 of 2 rows reach --data.length 9; longer texts are cut there",
        "Rows have up to 3 hard negatives; --objective.negatives is 2",
    ]
    cut = dataclasses.replace(objective, query_length=7).remarks(source, 9)
    assert cut[1] == "2 queries reach --objective.query-length 7; longer are cut there"
    assert objective.with_labels_of(source, data) == objective
    with pytest.raises(UserError, match=r"score-field is for --objective.criterion cosent"):
        objective.with_labels_of(source, dataclasses.replace(data, score_field="score"))
    alone = dataclasses.replace(objective, negatives=0)
    pairs = dataclasses.replace(data, source=str(tmp_path / "b.jsonl"))
    others = [{}], [{}, {}], [{}, {"positive": "x"}], [{}, {"query": "x"}], [{}, {"query": "x", "positive": "x"}]
    for rows in others:
        (tmp_path / "b.jsonl").write_text("".join(json.dumps(SHORT | row) + "\n" for row in rows))
        with contextlib.nullcontext() if rows == others[-1] else pytest.raises(UserError, match=(
            r"b.jsonl has one pair, or pairs of one text, and so no negatives"
        )):
            alone.with_labels_of(pairs.open(tokenizer), pairs)
    scored, cosent = dataclasses.replace(pairs, score_field="score"), dataclasses.replace(alone, criterion="cosent")
    for last in (1, 2):
        (tmp_path / "b.jsonl").write_text("".join(json.dumps(SHORT | {"score": one}) + "\n" for one in (1, 1, last)))
        with contextlib.nullcontext() if last == 2 else pytest.raises(UserError, match="the same score, so there"):
            cosent.with_labels_of(scored.open(tokenizer), scored)
    (tmp_path / "a.jsonl").write_text(json.dumps(SHORT) + "\n")
    with pytest.raises(UserError, match="no row has hard negatives in negatives; name their columns"):
        objective.with_labels_of(data.open(tokenizer), data)
    short = dataclasses.replace(objective, query_length=0, query_prompt="the dog ran and then it ")
    assert texts(short.encode(source.records["train"], tokenizer, 9)[0].arrays)[0] == (
        "[CLS] the dog ran and then it the [SEP]"
    )
    with pytest.raises(UserError, match="query_prompt has 6 tokens and leaves no room"):
        dataclasses.replace(short, query_length=8).encode(source.records["train"], tokenizer, 9)
    assert objective.num_examples(source, 9) == 2  # of an epoch
    batch = source.batches("train", 3, objective.row_format(9), 0).batch(0)
    assert batch["input_ids"].shape == (3, 4, 9)
    with pytest.raises(UserError, match=r"line 1 has no score; .*--data.score-field"):
        Contrastive(model=BERT, criterion="cosent").bind(tokenizer.vocabulary, 9).encode(
            source.records["train"], tokenizer, 9
        )
    titles = [line.title for line in objective.describe(batch, batch, 0)]
    assert titles[:4] == ["query", "positive", "negative", "negative"]
    assert titles[4] == "not negatives of this query: passages of rows 1, 2"


def test_one_of_several_positives_is_drawn_each_step(tokenizer, tmp_path):  # noqa: F811
    """BGE's rows, {"query": …, "pos": […], "neg": […]}: every positive as often, the others at each step."""
    rows = [{"query": "the cat", "pos": ["dog", "tree", "mat"], "neg": ["it ran"]},
            {"query": "the dog", "pos": ["cat"], "neg": ["tree"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = TextGroups(source=str(tmp_path / "a.jsonl"), held_out=0.0, positive_field="pos", negative_fields=("neg",))
    objective = Contrastive(model=BERT, negatives=1).bind(tokenizer.vocabulary, 16)
    source = data.open(tokenizer)
    (batch,) = source.batches("train", 3, objective.row_format(16), 0).evaluation(3, 1)
    draw, found = jax.jit(objective.corrupt), collections.Counter()
    for step in range(300):
        example = jax.device_get(draw(jax.random.key(step), batch))
        assert example["input_ids"].shape[:2] == (3, 3)
        first, second = (int(np.flatnonzero(example["row"] == row)[0]) for row in (0, 1))
        left_out = excluded_passages(example)  # "tree" is no negative of "the cat", whichever positive is drawn
        assert left_out[first, second].tolist() == [False, True] and not left_out[second, first].any()
        for ids, mask, row in zip(example["input_ids"], example["attention_mask"], example["row"], strict=True):
            texts = [" ".join(tokenizer.pieces(each[real > 0])[1:-1]) for each, real in zip(ids, mask, strict=True)]
            if row < 0:
                assert texts == [""] * 3
                continue
            assert (texts[0], texts[2]) == (rows[row]["query"], rows[row]["neg"][0])
            found[texts[1]] += 1
    assert found["cat"] == 300 and sum(found.values()) == 600
    assert all(60 < found[text] < 140 for text in rows[0]["pos"])  # 5 standard deviations around 100
    assert objective.remarks(source, 16) == [
        "1 rows have several positives, of which each step draws one (of the first 32)"]
    key = jax.random.key(0)
    assert jax.eval_shape(lambda example: objective.loss(objective.init(key), example, key, True), example)
    plain = Contrastive(model=BERT).bind(tokenizer.vocabulary, 16)
    for held_out, told in ((1, True), (2, False)):
        source.records["held_out"] = source.records["train"][:1] * held_out
        assert any(line.startswith("1 row is held out") for line in plain.remarks(source, 16)) == told
    assert not any("held out" in line for line in objective.remarks(source, 16))
    rerank = Rerank(model=BERT).bind(tokenizer.vocabulary, 16)
    assert rerank.remarks(source, 16)[-1] == "1 rows have several positives, of which the first is read"
    (bad,) = rows_of(tmp_path, "b.jsonl", json.dumps({"query": "a", "positive": ["b", "c"], "score": 1}) + "\n",
                     score_field="score")
    assert "positive has 2 texts for one score" in str(bad)
    (bad,) = rows_of(tmp_path, "b.csv", "query;positive\nthe cat;['a', 'b']\n")
    assert "positive holds a list as text; write lists in JSON lines" in str(bad)
    (bad,) = rows_of(tmp_path, "b.jsonl", json.dumps({"query": "a", "positive": []}) + "\n")
    assert "line 1 has no positive" in str(bad)


@pytest.mark.parametrize(("kind", "fields", "words"), [
    (SelfContrastive, {}, "draws dropout twice, and the model has none; set --objective.model.dropout 0.1"),
    (SelfContrastive, dict(model=ModernBert()), "draws dropout twice"),
    (SelfContrastive, dict(query_length=8), "reads a text twice"),
    (SelfContrastive, dict(model=Gpt2(max_positions=64), positives="cloze"), "cloze reads no rows of a Gpt2"),
    (Contrastive, dict(criterion="cosent", negatives=1), "cosent compares pairs"),
    (Contrastive, dict(widths=(16,)), r"widths has 16; it must be in \[1, 15\]"),
    (Contrastive, dict(widths=(0,)), "widths has 0"),
    (Contrastive, dict(query_length=5), "leaves no room for a query"),
    (Contrastive, dict(model=Elmo(), pooling="cls"), "Elmo has no summary token"),
    (Contrastive, dict(model=dataclasses.replace(BERT, max_positions=10)), "more than the model's 10 positions"),
])
def test_refusals(kind, fields, words):
    with pytest.raises(UserError, match=words):
        kind(**dict(model=BERT) | fields).check(VOCABULARY, LENGTH)


def test_dropout_of_the_feed_forward_alone_makes_two_views():
    SelfContrastive(model=ModernBert(mlp_dropout=0.1)).check(VOCABULARY, LENGTH)
