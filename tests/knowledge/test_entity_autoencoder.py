"""The denoising entity autoencoder against its formulas in PyTorch, and its place among models, folders and lines."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder
from jaxlm.knowledge import entity_vectors
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.knowledge.knowledge_graph import Vectors, read_vectors, write_vectors
from jaxlm.models.bert import Bert
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.runs.load import load_model
from jaxlm.runs.pretrain import unshared
from jaxlm.runs.resolve import resolve
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

ENTITIES, WIDTH, LENGTH = 30, 12, 23
VOCABULARY = Vocabulary.stand_in(160)
SIZES = dict(
    hidden_size=16, num_heads=2, intermediate_size=20, max_positions=LENGTH, dropout=0.0, attention_dropout=0.0
)
MODEL = Ernie(**SIZES, num_layers=4, num_text_layers=1, entity_hidden_size=WIDTH, entity_num_heads=3)


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    vectors = np.random.default_rng(0).normal(size=(ENTITIES, WIDTH)).astype(np.float32)
    write_vectors(folder, "entity", Vectors(tuple(f"Q{i}" for i in range(ENTITIES)), vectors))
    return folder


def no_model(path: str) -> PretrainedModel:
    raise AssertionError("nothing is learnt from another model")


def bound(graph: Path, **changes) -> EntityAutoencoder:
    objective = EntityAutoencoder(model=MODEL, entities=str(graph), **changes).bind(VOCABULARY, LENGTH)
    return objective.with_constants(jax.tree.map(jnp.asarray, objective.load_constants(objective.vocabulary, no_model)))


def rows(objective, count: int = 6, seed: int = 0) -> TokenBatch:
    rng, raw = np.random.default_rng(seed), objective.row_format(LENGTH).length
    real = np.arange(raw) < np.array([raw, *rng.integers(4, raw, count - 2), 0])[:, None]
    tokens = np.where(real, rng.integers(107, 160, real.shape), 0).astype(np.int32)
    entities = np.where(real & (rng.random(real.shape) < 0.2), rng.integers(0, ENTITIES, real.shape), -1)
    documents = np.where(real, 1 + np.arange(count)[:, None], 0).astype(np.int32)
    return TokenBatch(tokens, documents, entities.astype(np.int32))


def torch_attention(p, x, mask, heads):
    def split(name):
        y = x @ p[name]["kernel"] + p[name]["bias"]
        return y.reshape(*x.shape[:2], heads, -1).transpose(1, 2)

    q, k, v = (split(name) for name in ("query", "key", "value"))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + (1 - mask[:, None, None, :]) * -10000.0
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
    return y @ p["out"]["kernel"] + p["out"]["bias"]


def torch_norm(p, x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], 1e-12)


def linear(p, x):
    return x @ p["kernel"] + p["bias"]


def torch_losses(params, example, table):
    """Zhang et al. 2019, section 3, as knowledge_bert/modeling.py has it."""
    gelu, ids, mask = torch.nn.functional.gelu, example["input_ids"].long(), example["attention_mask"].float()
    embedded = params["embeddings"]
    x = embedded["word"]["embedding"][ids] + embedded["position"]["embedding"][: ids.shape[1]]
    x = torch_norm(embedded["norm"], x + embedded["token_type"]["embedding"][example["token_type_ids"].long()])
    e, entity_mask = table[example["entities"].long() + 1], (example["entities"] >= 0).float()
    entity_mask[:, 0] = 1
    for layer in range(4):
        token = torch.utils._pytree.tree_map(lambda leaf, i=layer: leaf[i], params["encoder"]["layers"])
        x = torch_norm(token["attention_norm"], x + torch_attention(token["attention"], x, mask, 2))
        h = linear(token["mlp"]["wi"], x)
        if layer >= 1:
            side = params["entity_encoder"]["first"] if layer == 1 else torch.utils._pytree.tree_map(
                lambda leaf, i=layer - 2: leaf[i], params["entity_encoder"]["layers"]
            )
            if layer > 1:
                attended = torch_attention(side["attention"], e, entity_mask, 3)
                e = torch_norm(side["attention_norm"], e + attended)
            e = e * entity_mask[..., None]
            h = gelu(h + linear(side["mlp"]["wi"], e))
            e = torch_norm(side["mlp_norm"], e + linear(side["mlp"]["wo"], h))
        else:
            h = gelu(h)
        x = torch_norm(token["mlp_norm"], x + linear(token["mlp"]["wo"], h))

    def labels(name, weights):
        full = torch.full(ids.shape, -1)
        for row, slot in zip(*torch.nonzero(example[weights], as_tuple=True), strict=True):
            full[row, int(example[f"{name}_positions"][row, slot])] = int(example[f"{name}_labels"][row, slot])
        return full

    def loss(logits, target):
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten().long(), ignore_index=-1)

    head = params["mlm_head"]
    tokens = torch_norm(head["norm"], gelu(linear(head["dense"], x))) @ embedded["word"]["embedding"].T + head["bias"]
    entity_head = params["entity_head"]
    candidates = table[example["candidates"][example["candidates"] > -2].long() + 1]
    entities = torch_norm(entity_head["norm"], gelu(linear(entity_head["dense"], x))) @ candidates.T
    pairs = linear(params["nsp_head"], torch.tanh(linear(params["pooler"], x[:, 0])))
    is_next = torch.where(example["next_sentence_weights"] > 0, example["next_sentence_labels"], -1)
    return {
        "mlm_loss": loss(tokens, labels("masked", "masked_weights")), "nsp_loss": loss(pairs, is_next),
        "dea_loss": loss(entities, labels("entity", "entity_weights")),
    }


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_torch(graph):
    objective = bound(graph)
    rng, shapes = np.random.default_rng(1), jax.eval_shape(objective.init, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: rng.normal(path[-1].key == "scale", 0.2, leaf.shape).astype(np.float32), shapes
    )
    example = jax.jit(objective.corrupt)(jax.random.key(0), rows(objective))

    @jax.jit
    def ours(params, example):
        def loss(params):
            terms = objective.loss(params, example, jax.random.key(0), False)
            return total_loss(terms), terms

        return jax.value_and_grad(loss, has_aux=True)(params)

    (total, terms), gradients = jax.device_get(ours(params, example))
    theirs = jax.tree.map(lambda leaf: torch.from_numpy(leaf.copy()).double().requires_grad_(), params)
    arrays = {name: torch.from_numpy(np.array(array)) for name, array in example.items()}
    table = torch.from_numpy(np.array(objective.constants["vectors"])).double()
    expected = torch_losses(theirs, arrays, table)
    for name, value in expected.items():
        assert float(terms[name].total / terms[name].weight) == pytest.approx(value.item(), abs=1e-5), name
    sum(expected.values()).backward()
    assert float(total) == pytest.approx(sum(expected.values()).item(), abs=1e-5)
    assert terms["dea_loss"].weight > 10 and terms["nsp_loss"].weight >= 4  # a row without a partner has no label
    for (path, own), other in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(theirs), strict=True
    ):
        given = np.zeros(own.shape) if other.grad is None else other.grad.numpy()
        np.testing.assert_allclose(own, given, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    last = gradients["entity_encoder"]["layers"]  # the last output of the entity stream is read by nothing
    assert not any(np.any(leaf[-1]) for leaf in jax.tree.leaves((last["mlp"]["wo"], last["mlp_norm"])))
    assert all(np.any(leaf[0]) for leaf in jax.tree.leaves(last))


@pytest.mark.slow
def test_entities_follow_their_tokens(graph):
    """Also into the second segments of other rows; the entity of a token here is given by its id."""
    objective = bound(graph, random_entity_share=0.0, dropped_entity_share=0.0, mask_rate=0.01, max_entities=LENGTH)
    batch = rows(objective, 12)
    batch = batch._replace(entities=np.where(batch.tokens > 130, batch.tokens - 131, -1))
    swapped, corrupt = 0, jax.jit(objective.corrupt)
    for seed in range(5):
        example = jax.device_get(corrupt(jax.random.key(seed), batch))
        ids = example["input_ids"].copy()
        used = example["masked_weights"] > 0
        ids[np.nonzero(used)[0], example["masked_positions"][used]] = example["masked_labels"][used]
        np.testing.assert_array_equal(example["entities"], np.where(ids > 130, ids - 131, -1))
        swapped += example["next_sentence_labels"].sum()
    assert swapped > 5
    plain = jax.device_get(corrupt(jax.random.key(0), batch._replace(entities=None)))
    assert not plain["entity_weights"].any() and (plain["entities"] == -1).all()


@pytest.mark.slow
def test_a_bert_gives_the_token_side_and_the_heads(graph):
    bert = MaskedLM(model=Bert(**SIZES, num_layers=4, vocab_size=160))
    source = PretrainedModel(bert, jax.jit(bert.init)(jax.random.key(5)), path="bert")
    objective = EntityAutoencoder(model=dataclasses.replace(MODEL, num_layers=9, hidden_size=8, dropout=0.3))
    objective = objective.with_pretrained_model(source).bind(VOCABULARY, LENGTH)
    assert objective.model == dataclasses.replace(MODEL, vocab_size=160, dropout=0.3)
    fresh = jax.jit(objective.init)(jax.random.key(1))
    params = objective.merge_pretrained(fresh, source)
    for name, tree in source.params.items():
        jax.tree.map(np.testing.assert_array_equal, params[name], tree)
    assert unshared(fresh, source) == "; randomly initialized: entity_encoder, entity_head"
    small = PretrainedModel(MaskedLM(model=Bert(**SIZES, num_layers=2)), {}, path="bert")
    with pytest.raises(UserError, match="bert has 2 layers; give --init-from a BERT of 3 layers or more"):
        objective.with_pretrained_model(small)
    # An ERNIE's own run, whose vectors are the default.
    own = PretrainedModel(bound(graph), fresh, path="ernie")
    assert EntityAutoencoder().with_pretrained_model(own).entities == str(graph)


@pytest.mark.parametrize(("layers", "flags", "text_layers"), [
    (12, ["entity-hidden-size", "128"], 5), (12, ["num-text-layers", "6"], 6), (6, [], 4), (3, [], 1),
])
def test_an_ernie_from_a_bert_has_the_sizes_of_its_own_that_flags_give(layers, flags, text_layers):
    source = PretrainedModel(MaskedLM(model=Bert(num_layers=layers)).bind_unchecked(VOCABULARY), {}, path="bert")
    found = resolve("ernie_base", flags and [f"--objective.model.{flags[0]}", flags[1]], pretrained=source)
    model = found.experiment.objective.model
    assert (model.num_layers, model.num_text_layers) == (layers, text_layers)
    assert model.entity_hidden_size == (128 if "128" in flags else 100)
    with pytest.raises(UserError, match=r"weights of bert were trained with --objective\.model\.hidden-size 768"):
        resolve("ernie_base", ["--objective.model.hidden-size", "384"], pretrained=source)


def test_the_vectors_are_read_once_until_their_files_change(graph, tmp_path, monkeypatch):
    folder, reads = shutil.copytree(graph, tmp_path / "graph"), []
    monkeypatch.setattr(
        entity_vectors, "read_vectors", lambda path: (reads.append(path), read_vectors(path))[1]
    )
    objective = EntityAutoencoder(model=MODEL, entities=str(folder))
    first = objective.entity_table()
    assert dataclasses.replace(objective, max_entities=3).entity_table() is first and len(reads) == 1
    write_vectors(folder, "entity", Vectors(*read_vectors(folder)[:1], first["vectors"][1:] + 1))
    np.testing.assert_array_equal(objective.entity_table()["vectors"][1:], first["vectors"][1:] + 1)
    assert len(reads) == 2


def test_bad_folders_of_vectors(graph, tmp_path):
    with pytest.raises(UserError, match=r"objective\.entities is empty; give --objective\.entities"):
        EntityAutoencoder(model=MODEL).load_constants(VOCABULARY, no_model)
    with pytest.raises(UserError, match=r"has vectors of 12 numbers, but objective\.model\.entity_hidden_size is 100"):
        EntityAutoencoder(entities=str(graph)).load_constants(VOCABULARY, no_model)
    with pytest.raises(UserError, match=r"entity2id\.txt does not exist"):
        EntityAutoencoder(entities=str(tmp_path)).load_constants(VOCABULARY, no_model)
    with pytest.raises(UserError, match="must sum to at most 1"):
        EntityAutoencoder(random_entity_share=0.9, dropped_entity_share=0.2)
    # A plan has shapes without a folder, those of the paper.
    shapes = EntityAutoencoder().constant_shapes(VOCABULARY, no_model)
    assert shapes["vectors"].shape == (5_040_987, 100)
    assert bound(graph).constant_shapes(VOCABULARY, no_model)["vectors"].shape == (ENTITIES + 1, WIDTH)


@pytest.mark.slow
def test_the_lines_of_show_name_every_entity_and_its_fate(graph):
    objective = bound(graph, random_entity_share=0.4)
    batch = rows(objective, 12)
    example = jax.device_get(jax.jit(objective.corrupt)(jax.random.key(2), batch))
    titles = []
    for row in range(12):
        slots = int(example["entity_weights"][row].sum())
        lines = objective.describe(batch, example, row)
        titles += [line.title for line in lines[-slots:]] if slots else []
    fates = [title.partition(", ")[2].split()[0] for title in titles]
    assert len(titles) == example["entity_weights"].sum() and set(fates) == {"kept", "dropped", "now"}
    assert all(title.startswith("Q") for title in titles)
    without = dataclasses.replace(objective, entities="").describe(batch, example, 0)
    assert "--objective.entities" in without[-1].title


@pytest.mark.slow
def test_an_export_has_the_official_names_of_every_parameter(graph, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", *(f"##{c}" for c in "abcdefgh")]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    objective = EntityAutoencoder(model=MODEL, entities=str(graph)).bind(tokenizer.vocabulary, LENGTH)
    params = jax.device_get(jax.jit(objective.init)(jax.random.key(0)))
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    tensors = load_file(out / "model.safetensors")
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in jax.tree.leaves(params))
    first, entity = (params["entity_encoder"][part] for part in ("first", "layers"))
    for name, array in {
        "bert.encoder.layer.1.intermediate.dense_ent.weight": first["mlp"]["wi"]["kernel"].T,
        "bert.encoder.layer.3.attention.self_ent.query.weight": entity["attention"]["query"]["kernel"][1].T,
        "bert.encoder.layer.2.attention.output_ent.LayerNorm.bias": entity["attention_norm"]["bias"][0],
        "bert.encoder.layer.3.output.dense_ent.bias": entity["mlp"]["wo"]["bias"][1],
        "cls.predictions_ent.transform.dense.weight": params["entity_head"]["dense"]["kernel"].T,
    }.items():
        np.testing.assert_array_equal(tensors[name], array)
    assert "bert.encoder.layer.1.attention.self_ent.query.weight" not in tensors
    config = json.loads((out / "ernie_config.json").read_text())
    assert config["layer_types"] == ["sim", "mix", "norm", "norm"] and config["num_hidden_layers"] == 4
    assert (out / "vocab.txt").read_text().splitlines() == words and str(graph) in (out / "README.md").read_text()
    # The state dict of the official class also has the decoder, whose matrix is the word embedding.
    tied = tensors["bert.embeddings.word_embeddings.weight"]
    save_file(tensors | {"cls.predictions.decoder.weight": tied}, out / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_model(out).params, params)
    save_file(tensors | {"cls.predictions.decoder.weight": tied + 1}, out / "model.safetensors")
    with pytest.raises(UserError, match="differs from"):
        load_model(out)
