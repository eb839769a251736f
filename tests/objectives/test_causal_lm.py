"""Causal LM over packed documents: targets, isolation of documents, and training beside PyTorch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.data.base import RowFormat
from jaxlm.errors import UserError
from jaxlm.models.base import Inputs, document_positions
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.layers.stack import unstack
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

VOCABULARY = Vocabulary.stand_in(180)
EOS, TEXT = VOCABULARY.eos, 110
MODEL = Gpt2(hidden_size=32, num_layers=1, num_heads=4, intermediate_size=64, max_positions=64)


def objective(**changes) -> CausalLM:
    return CausalLM(model=MODEL, **changes).bind(VOCABULARY, 32)


def packed(documents: list[list[int]], length: int) -> TokenBatch:
    """Return one row: documents with their end symbols, then padding."""
    tokens, segments = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
    start = 0
    for number, document in enumerate(documents, start=1):
        tokens[0, start : start + len(document)] = document
        segments[0, start : start + len(document)] = number
        start += len(document)
    return TokenBatch(jnp.asarray(tokens), jnp.asarray(segments))


def random_batch(rows: int = 4, length: int = 33, seed: int = 0) -> TokenBatch:
    rng = np.random.default_rng(seed)
    segments = 1 + np.cumsum(rng.random((rows, length)) < 0.1, axis=1)
    tokens = rng.integers(TEXT, VOCABULARY.size, (rows, length))
    ends = np.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)))
    return TokenBatch(jnp.asarray(np.where(ends, EOS, tokens), jnp.int32), jnp.asarray(segments, jnp.int32))


def random_params(o: CausalLM, seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(o.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32), shapes)


KEY = jax.random.key(0)


def jitted_loss(o: CausalLM):
    """Return a jitted (params, example) -> terms."""
    return jax.jit(lambda params, example: o.loss(params, example, KEY, False))


def value_and_gradients(o: CausalLM):
    """Return a jitted (params, example) -> (loss, terms), gradients."""
    def loss(params, example):
        terms = o.loss(params, example, KEY, True)
        return total_loss(terms), terms

    return jax.value_and_grad(loss, has_aux=True)


def test_what_is_asked():
    batch = packed([[120, 121, EOS], [130, EOS], [140, 141, 142]], 10)
    example = objective().corrupt(KEY, batch)
    assert example["input_ids"].tolist() == [[120, 121, EOS, 130, EOS, 140, 141, 142, 0]]
    assert example["labels"].tolist() == [[121, EOS, 130, EOS, 140, 141, 142, 0, 0]]
    # The end symbol is a target; the first token of the next document and padding are not.
    assert example["weights"].tolist() == [[1, 1, 0, 1, 0, 1, 1, 0, 0]]
    plain = objective(plain_stream=True).corrupt(KEY, batch)
    assert plain["weights"].tolist() == [[1, 1, 1, 1, 1, 1, 1, 0, 0]]


def test_every_token_is_asked_for_once_in_whole_rows():
    """Of `length` labels, all but the first tokens of documents are targets."""
    batch = random_batch()
    example = objective().corrupt(KEY, batch)
    borders = int(jnp.sum(batch.segment_ids[:, 1:] != batch.segment_ids[:, :-1]))
    assert borders > 0 and float(example["weights"].sum()) == 4 * 32 - borders
    assert objective().row_format(32) == RowFormat("packed-text", 33)


@pytest.mark.slow  # the slow way has them
def test_packed_documents_have_the_losses_they_have_alone():
    o = objective()
    params = random_params(o)
    rng = np.random.default_rng(1)
    documents = [[*rng.integers(TEXT, VOCABULARY.size, n).tolist(), EOS] for n in (7, 1, 12, 4)]

    loss = jitted_loss(o)

    def total_and_count(batch):
        term = loss(params, o.corrupt(KEY, batch))["lm_loss"]
        return float(term.total), float(term.weight)

    alone = [total_and_count(packed([document], 33)) for document in documents]
    together = total_and_count(packed(documents, 33))
    assert together[1] == sum(count for _, count in alone) == 7 + 1 + 12 + 4
    assert together[0] == pytest.approx(sum(total for total, _ in alone), rel=1e-5)
    # Document by document, with zero weights for the others.
    example = o.corrupt(KEY, packed(documents, 33))
    for number, (total, _) in enumerate(alone, start=1):
        own = example | {"weights": example["weights"] * (example["segment_ids"] == number)}
        assert float(loss(params, own)["lm_loss"].total) == pytest.approx(total, rel=1e-5)
    stream = objective(plain_stream=True)
    other = jitted_loss(stream)(params, stream.corrupt(KEY, packed(documents, 33)))["lm_loss"]
    assert abs(float(other.total) - together[0]) > 1.0


@pytest.mark.parametrize(("plain_stream", "chunk"), [
    (False, 5), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((False, 0), (True, 0)))
])
def test_loss_and_gradients_equal_the_slow_way(plain_stream, chunk):
    o = objective(plain_stream=plain_stream, loss_chunk=chunk)
    params, batch = random_params(o), random_batch()
    example = o.corrupt(KEY, batch)

    # Every row split into its documents, padded on the right, where causal attention hides the padding.
    documents = []
    for tokens, segments in zip(np.asarray(batch.tokens), np.asarray(batch.segment_ids), strict=True):
        documents += [tokens] if plain_stream else [tokens[segments == s] for s in np.unique(segments)]
    padded = jnp.asarray(np.stack([np.pad(d, (0, 33 - len(d))) for d in documents]))
    asked = jnp.arange(32) < jnp.array([len(d) - 1 for d in documents])[:, None]
    assert len(documents) == 4 if plain_stream else len(documents) > 8

    def slow(params):
        """Sum -log p of every next token over documents that pass through the model alone."""
        hidden = o.model.hidden_states(params, Inputs(padded[:, :-1]))
        chances = jax.nn.softmax(hidden @ params["embeddings"]["word"]["embedding"].T, axis=-1)
        of_next = jnp.take_along_axis(chances, padded[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(asked, jnp.log(of_next), 0.0)) / jnp.sum(asked)

    (ours, terms), gradients = jax.jit(value_and_gradients(o))(params, example)
    theirs, their_gradients = jax.jit(jax.value_and_grad(slow))(params)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    assert float(terms["lm_loss"].total / terms["lm_loss"].weight) == pytest.approx(float(ours), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), gradients, their_gradients)


def test_accuracy_counts_the_likeliest_tokens():
    o = objective()
    params, example = random_params(o), o.corrupt(KEY, random_batch())
    scores = jax.jit(lambda p, e: o.model.predict_tokens(p, o.hidden(p, e)))(params, example)
    # Some labels are the predicted ones, so that the count is not zero by chance.
    example["labels"] = jnp.where(jnp.arange(32) % 3 == 0, jnp.argmax(scores, axis=-1), example["labels"])
    right = np.argmax(scores, axis=-1) == np.asarray(example["labels"])
    got, weight, coefficient = jitted_loss(o)(params, example)["lm_accuracy"]
    assert coefficient == 0
    assert float(got) == np.sum(right * np.asarray(example["weights"])) > 30
    assert float(weight) == float(example["weights"].sum())


@pytest.mark.slow
def test_rows_of_padding_carry_no_loss():
    o = objective()
    params, batch = random_params(o), random_batch()
    empty = TokenBatch(jnp.full((2, 33), -1, jnp.int32), jnp.zeros((2, 33), jnp.int32))  # a vocabulary without padding
    both = TokenBatch(*(jnp.concatenate([a, b]) for a, b in zip(batch[:2], empty[:2], strict=True)))
    loss = jitted_loss(o)
    one, two = loss(params, o.corrupt(KEY, batch)), loss(params, o.corrupt(KEY, both))
    assert float(total_loss(one)) == pytest.approx(float(total_loss(two)), rel=1e-6)
    assert float(one["lm_loss"].weight) == float(two["lm_loss"].weight)
    nothing = loss(params, o.corrupt(KEY, TokenBatch(*(jnp.concatenate([x, x]) for x in empty[:2]))))
    assert float(total_loss(nothing)) == 0.0


def test_flops_are_those_of_the_table():
    for size, figure in (("small", 291.6e9), ("xl", 3.507e12)):
        assert CausalLM(model=Gpt2.published(size)).flops(1024) == pytest.approx(figure, rel=2e-4)


def test_describe_shows_documents_and_what_follows():
    o = objective()
    batch = packed([[120, 121, EOS], [130, 131, 132]], 7)
    lines = o.describe(batch, o.corrupt(KEY, batch), 0)
    assert [(line.title, line.ids) for line in lines] == [
        ("document 1", [120, 121, EOS]), ("predict 2", [121, EOS]),
        ("document 2", [130, 131, 132]), ("predict 2", [131, 132]),
    ]
    assert lines[0].marks == ["", "", "special"] and lines[1].marks == ["target"] * 2


def transformers_gpt2(params) -> dict[str, np.ndarray]:
    """Return the parameters under Transformers' names; GPT-2's matrices are [in, out]."""
    state = {f"transformer.{theirs}.weight": params["embeddings"][ours]["embedding"]
             for theirs, ours in (("wte", "word"), ("wpe", "position"))}

    def add(theirs, *layers):
        for name, ours in (("weight", "scale" if "scale" in layers[0] else "kernel"), ("bias", "bias")):
            state[f"transformer.{theirs}.{name}"] = np.concatenate([layer[ours] for layer in layers], axis=-1)

    for i, layer in enumerate(unstack(params["decoder"]["layers"])):
        add(f"h.{i}.ln_1", layer["attention_norm"])
        add(f"h.{i}.attn.c_attn", *(layer["attention"][name] for name in ("query", "key", "value")))
        add(f"h.{i}.attn.c_proj", layer["attention"]["out"])
        add(f"h.{i}.ln_2", layer["mlp_norm"])
        add(f"h.{i}.mlp.c_fc", layer["mlp"]["wi"])
        add(f"h.{i}.mlp.c_proj", layer["mlp"]["wo"])
    add("ln_f", params["decoder"]["final_norm"])
    return state


@pytest.mark.slow
def test_twenty_steps_beside_pytorch():
    """Same initialization and batches, AdamW (0.9, 0.95), float32: losses within 1e-3 at every step."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    o = objective()
    params = random_params(o, seed=3)
    config = dict(vocab_size=o.model.vocab_size, n_positions=64, n_embd=32, n_layer=1, n_head=4, n_inner=64)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    state = {name: torch.tensor(array) for name, array in transformers_gpt2(jax.device_get(params)).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    model.tie_weights()
    model.train()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    torch_optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=3e-3, betas=(0.9, 0.95), eps=1e-8,
    )
    optimizer = optax.adamw(
        3e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1,
        mask=lambda tree: jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key in ("kernel", "embedding"), tree
        ),
    )
    moments = optimizer.init(params)

    @jax.jit
    def step(params, moments, example):
        (loss, _), gradients = value_and_gradients(o)(params, example)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    ours, theirs = [], []
    for number in range(20):
        batch = random_batch(rows=3, seed=number % 4)
        example = o.corrupt(KEY, batch)
        params, moments, loss = step(params, moments, example)
        ours.append(float(loss))

        segments = torch.tensor(np.array(example["segment_ids"]))
        causal = torch.ones(32, 32, dtype=torch.bool).tril()
        allowed = (segments[:, None, :, None] == segments[:, None, None, :]) & causal
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        positions = torch.tensor(np.array(document_positions(example["segment_ids"])))
        logits = model(torch.tensor(np.array(example["input_ids"])), attention_mask=mask, position_ids=positions).logits
        labels = torch.tensor(np.array(example["labels"])).long()
        labels[torch.tensor(np.array(example["weights"])) == 0] = -100
        torch_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        torch_optimizer.zero_grad()
        torch_loss.backward()
        torch_optimizer.step()
        theirs.append(torch_loss.item())
    assert theirs[-1] < theirs[0] - 0.3  # the model learns
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize(("vocabulary", "length", "words"), [
    (VOCABULARY, 65, "data.length 65 is more than the model's 64 positions"),
    (VOCABULARY, 1, "too short to predict"),
    (dataclasses.replace(VOCABULARY, eos=-1), 32, "has no </s>, which causal language modelling needs"),
])
def test_bind_refuses(vocabulary, length, words):
    with pytest.raises(UserError, match=words):
        CausalLM(model=MODEL).bind(vocabulary, length)


def test_refuses_a_negative_chunk():
    with pytest.raises(UserError, match="loss_chunk is -1"):
        CausalLM(loss_chunk=-1)
