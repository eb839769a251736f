"""T5 1.0 and 1.1 against T5ForConditionalGeneration: logits both ways, greedy continuations, twenty training steps."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference.generate import generate
from jaxlm.models.base import Inputs
from jaxlm.models.t5 import T5
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from jaxlm.types import TokenBatch
from tests.params import first_fast, random_params

TOLERANCE = 1e-4
ROWS = 512  # the tokenizer's ids, and a multiple of 128

# Small T5s: 1.0; 1.1 with its own head; 1.1 as Transformers 5 builds it, with a tied head without scaling.
VARIANTS = {
    "1.0": dict(d_model=32, d_kv=6, d_ff=48, num_layers=2, num_heads=5, feed_forward_proj="relu"),
    "1.1": dict(
        d_model=24, d_kv=8, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=2, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, relative_attention_num_buckets=8, relative_attention_max_distance=20,
        decoder_start_token_id=9,
    ),
    "1.1-tied": dict(
        d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, layer_norm_epsilon=1e-5,
    ),
}
OURS = {
    "1.0": T5(hidden_size=20, num_layers=3, num_heads=3, head_dim=8, intermediate_size=36),
    "1.1": T5(
        hidden_size=32, num_layers=1, num_decoder_layers=2, num_heads=4, head_dim=8, intermediate_size=20,
        activation="gated-gelu", tied_head=False, scaled_head=False, relative_buckets=16, relative_max_distance=30,
        start_id=9,
    ),
}


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [" ".join(a + b + c for c in letters[:6]) + f" {a}{b}." for a in letters for b in letters]
    return train_tokenizer(texts, tmp_path_factory.mktemp("spm"), kind="bpe", vocab_size=ROWS)


def torch_t5(variant: str, seed: int = 0, **changes) -> transformers.T5ForConditionalGeneration:
    """Return a model with random weights; unit norms would hide a mix-up."""
    torch.manual_seed(seed)
    ids = dict(vocab_size=ROWS, pad_token_id=0, eos_token_id=3, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**(ids | VARIANTS[variant] | changes))).eval()
    if variant == "1.1":
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: transformers.T5ForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    export(tokenizer, folder, T5.template, 512)
    return folder


def inputs(length: int, targets: int, padded: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return input ids, their mask, and decoder input ids of three rows; with `padded` one row is a single token."""
    rng = np.random.default_rng(seed)
    sizes = np.maximum(1, [length, length // 2, 1]) if padded else np.full(3, length)
    mask = (np.arange(length)[None, :] < sizes[:, None]).astype(np.int64)
    return np.where(mask, rng.integers(1, ROWS, (3, length)), 0), mask, rng.integers(0, ROWS, (3, targets))


def difference(own: T5, params, model, length: int, targets: int, padded: bool) -> float:
    """Return the largest difference of logits."""
    ids, mask, decoder_ids = inputs(length, targets, padded)

    @jax.jit
    def ours(params, ids, mask, decoder_ids):
        hidden = own.decoder_states(params, decoder_ids, own.hidden_states(params, Inputs(ids, mask=mask)), mask)
        return own.predict_tokens(params, hidden)

    with torch.no_grad():
        theirs = model(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask),
            decoder_input_ids=torch.from_numpy(decoder_ids),
        ).logits.numpy()
    assert np.abs(theirs).max() > 0.5  # agreement on zeros would prove nothing
    return float(np.abs(ours(params, *map(jnp.asarray, (ids, mask, decoder_ids))) - theirs).max())


LENGTHS = [(150, 40, False), (150, 40, True)]  # each length compiles anew


@pytest.mark.parametrize("variant", first_fast(VARIANTS))
def test_imported_logits(variant, spm, tmp_path):
    model = torch_t5(variant)
    imported = import_folder(save(model, spm, tmp_path / "hf"))
    config = imported.objective.model
    assert (config.tied_head, config.scaled_head) == (variant != "1.1", variant == "1.0")
    assert (variant == "1.1") == (model.lm_head.weight is not model.shared.weight)
    assert not imported.fresh
    for length, targets, padded in LENGTHS:
        assert difference(config, imported.params, model, length, targets, padded) < TOLERANCE
    # Bound again, as in continued training, the model keeps its rows.
    assert imported.objective.bind(imported.objective.vocabulary, 32).model == config


@pytest.mark.parametrize("version", [pytest.param("1.0", marks=pytest.mark.slow), "1.1"])
def test_exported_logits(version, spm, tmp_path):
    objective = SpanCorruption(model=OURS[version]).bind(spm.vocabulary, 32)
    # A scaled head divides by √20. Scores, which are not scaled, grow with the square, and with them the rounding.
    params = random_params(objective, std=0.3 if version == "1.0" else 0.2)
    folder = export_folder(tmp_path / "out", objective, params, spm, ModelCard())
    model, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is transformers.T5ForConditionalGeneration
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert (model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()) == (version == "1.0")
    assert model.generation_config.decoder_start_token_id == (objective.model.start_id or 0)
    assert model.generation_config.eos_token_id == 3
    for length, targets, padded in LENGTHS:
        assert difference(objective.model, params, model.eval(), length, targets, padded) < TOLERANCE
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abc abd.").input_ids == [*spm.encode("abc abd."), spm.vocabulary.eos]
    assert tokenizer.convert_tokens_to_ids("<extra_id_0>") == spm.vocabulary.sentinel
    # Imported again, bit for bit, after Transformers has saved it under its own flags.
    back = import_folder(save(model, spm, tmp_path / "again"))
    assert back.objective.model == dataclasses.replace(
        objective.model, dropout=objective.model.dropout, attention_dropout=objective.model.dropout
    )
    jax.tree.map(np.testing.assert_array_equal, back.params, params)


@pytest.mark.slow  # test_gpt2.py has a decoder's
@pytest.mark.parametrize("variant", ["1.0", pytest.param("1.1", marks=pytest.mark.slow)])
def test_greedy_continuations_are_theirs(variant, spm, tmp_path):
    # The same number of layers in both stacks: Transformers' cache counts the encoder's.
    model = torch_t5(variant, seed=3, num_decoder_layers=2)
    with torch.no_grad():  # Layers that outweigh the embedding: it alone would repeat one token.
        for name, parameter in model.named_parameters():
            if name.endswith((".wo.weight", ".o.weight")):
                parameter.mul_(6)
    imported = import_folder(save(model, spm, tmp_path / "hf"))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(110, ROWS, size).tolist() for size in (1, 5, 20, 37)]
    ids = np.zeros((4, 38), np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt) + 1] = [*prompt, 3]

    def theirs(stop: int) -> list[list[int]]:
        with torch.no_grad():
            rows = model.generate(
                torch.from_numpy(ids), attention_mask=torch.from_numpy((ids > 0).astype(np.int64)), max_new_tokens=24,
                do_sample=False, num_beams=1, eos_token_id=stop,
            ).tolist()
        # Theirs begin with the start symbol and are padded after the stop.
        return [row[1 : row.index(stop) + 1 if stop in row[1:] else None] for row in rows]

    whole = generate(imported.objective, imported.params, prompts, max_new_tokens=24)
    assert whole == theirs(3)
    assert len({tuple(row) for row in whole}) == 4 and max(len(set(row)) for row in whole) > 5
    stop = next(token for token in whole[1] if token != whole[1][0])
    stopped = generate(imported.objective, imported.params, prompts, max_new_tokens=24, stop_ids=[stop])
    assert stopped == theirs(stop) and 1 < len(stopped[1]) < 24 and stopped[1][-1] == stop


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["1.0", "1.1"])
def test_twenty_steps_of_training_match(variant, spm, tmp_path):
    model = torch_t5(variant, dropout_rate=0.0).train()
    imported = import_folder(save(model, spm, tmp_path / "hf"))
    objective, params = imported.objective.bind(spm.vocabulary, 24), jax.tree.map(jnp.asarray, imported.params)
    decayed, kept = [], []
    for parameter in model.parameters():
        (decayed if parameter.ndim > 1 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": kept, "weight_decay": 0.0}]
    torch_optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.99), eps=1e-6)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            3e-3, b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.05,
            mask=lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", tree),
        ),
    )

    @jax.jit
    def step(params, state, example):
        def loss_of(params):
            return total_loss(objective.loss(params, example, jax.random.key(0), True))

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng, state, corrupt = np.random.default_rng(0), optimizer.init(params), jax.jit(objective.corrupt)
    raw, losses = objective.row_format(24).length, []
    for number in range(20):
        # Half of the rows are short, so that padding has an effect; the last one is empty.
        sizes = np.array([raw, raw, raw, raw, 20, 11, 5, 0])
        real = np.arange(raw)[None, :] < sizes[:, None]
        tokens = np.where(real, 107 + rng.integers(0, 40, (8, raw)) ** 2 % 300, 0)
        batch = TokenBatch(jnp.asarray(tokens, jnp.int32), jnp.asarray(real, jnp.int32))
        example = corrupt(jax.random.key(number), batch)
        params, state, loss = step(params, state, example)
        used = {name: torch.from_numpy(np.array(example[name])).long() for name in example if name != "weights"}
        labels = torch.where(torch.from_numpy(np.array(example["weights"])) > 0, used["labels"], -100)
        # An empty row would be a softmax over nothing; it has no targets, so it may attend to its padding.
        mask = torch.maximum(used["attention_mask"], (used["attention_mask"].sum(1, keepdim=True) == 0).long())
        theirs = model(input_ids=used["input_ids"], attention_mask=mask, labels=labels).loss
        torch_optimizer.zero_grad()
        theirs.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch_optimizer.step()
        losses.append((float(loss), theirs.item()))
    ours, theirs = np.array(losses).T
    assert np.abs(ours - theirs).max() < 1e-3
    assert ours[-1] < ours[0] - 0.5  # the model learns: twenty equal losses would prove little


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.slow
def test_spare_rows_are_never_generated(spm, tmp_path):
    """Published embeddings are padded; here the unused rows would always have the largest logits."""
    model = torch_t5("1.1", vocab_size=ROWS + 64)
    with torch.no_grad():
        model.lm_head.weight[spm.vocabulary.size :] *= 100.0
    imported = import_folder(save(model, spm, tmp_path / "hf"))
    (answer,) = generate(imported.objective, imported.params, [[7, 8, 9]], max_new_tokens=12, stop_ids=[])
    assert max(answer) < spm.vocabulary.size
    assert len(imported.params["shared"]["embedding"]) == ROWS + 64


def test_unsupported_configurations_are_refused(spm, tmp_path):
    folder = save(torch_t5("1.0"), spm, tmp_path / "hf")
    change_config(folder, feed_forward_proj="gated-silu")
    with pytest.raises(UserError, match="feed_forward_proj is 'gated-silu', which jaxlm does not support"):
        import_folder(folder)


def test_an_encoder_alone_and_the_template_of_another_class_are_refused(spm, tmp_path):
    model = torch_t5("1.0")
    whole = save(model, spm, tmp_path / "hf")
    encoder = transformers.T5EncoderModel(model.config)
    encoder.save_pretrained(shutil.copytree(whole, tmp_path / "encoder"))
    with pytest.raises(UserError, match="has the encoder of a T5 alone"):
        import_folder(tmp_path / "encoder")
    content = json.loads((whole / "tokenizer.json").read_text())  # as CodeT5's, which is RoBERTa's
    content["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<pad>", "type_id": 0}})
    content["post_processor"]["special_tokens"]["<pad>"] = {"id": "<pad>", "ids": [0], "tokens": ["<pad>"]}
    (whole / "tokenizer.json").write_text(json.dumps(content))
    change_config(whole, tokenizer_class="RobertaTokenizer")
    with pytest.raises(UserError, match=r"reads a text as .* and jaxlm's T5 as \$A </s>"):
        import_folder(whole)


def test_a_separate_head_with_the_flag_of_a_tied_one_is_refused(spm, tmp_path):
    """A folder published as 1.0, which scales and ties; tying would silently change the logits."""
    model = torch_t5("1.1")
    folder = save(model, spm, tmp_path / "hf")
    change_config(folder, tie_word_embeddings=True, scale_decoder_outputs=True)
    with pytest.raises(UserError, match=r"(lm_head|shared)\.weight that differs"):
        import_folder(folder)
