"""config.json of the Llama line, Nomic BERT and GTE: what is refused, ignored, and read as by the classes."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers

from jaxlm.errors import UserError
from jaxlm.huggingface import import_folder, nomic_bert
from jaxlm.huggingface.families import family_named
from jaxlm.huggingface.family import Source
from tests.huggingface.rotary_models import DELETED, ENCODERS, LLAMA3, PLAIN, POST, changed, torch_loss
from tests.huggingface.support import read_json

YARN = dict(rope_type="yarn", rope_theta=100.0, factor=2.0)
LOCAL = ["full_attention"] * 2 + ["sliding_attention"]
REFUSED = [
    ("llama", dict(rope_parameters=YARN), "rope_parameters"), ("llama", dict(rope_scaling=YARN), "rope_scaling"),
    ("llama", dict(rope_parameters=dict(full_attention=PLAIN)), "rope_parameters"),
    *(("llama", dict(rope_scaling=dict(type=kind, factor=2.0)), kind) for kind in ("ntk", "dynamic", "longrope")),
    ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),  # LLAMA3 reads it
    ("llama", dict(rope_scaling=dict(rope_type="llama3", factor=2.0)), "low_freq_factor, high_freq_factor"),
    ("llama", dict(rope_scaling=LLAMA3 | dict(low_freq_factor=4.0)), "rope_scaling"),
    ("llama", dict(rope_scaling=[8.0]), "rope_scaling"), ("llama", dict(rope_theta="1e4"), "rope_theta"),
    ("llama", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("mistral", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("mistral", dict(sliding_window=0), "window"), ("qwen3", dict(use_sliding_window=True), "use_sliding_window"),
    ("qwen3", dict(layer_types=LOCAL), "layer_types"), ("eurobert", dict(mlp_bias=True), "mlp_bias"),
    ("eurobert", dict(classifier_pooling="max"), "classifier_pooling"),
    ("eurobert", dict(hidden_act="relu6"), "hidden_act"), ("eurobert", dict(hidden_act="relu"), "activation"),
    ("gemma3_text", dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    ("gemma3_text", dict(use_bidirectional_attention=True, sliding_window=7), "sliding_window is 7"),
    ("gemma3_text", dict(use_bidirectional_attention="vision"), "use_bidirectional_attention"),
    ("gemma3_text", dict(layer_types=LOCAL * 2 + LOCAL[:1]), "layer_types"),
    ("gemma3_text", dict(rope_scaling=YARN), "rope_parameters"),
    ("gemma3_text", dict(rope_parameters=dict(sliding_attention=dict(rope_type="linear", factor=2.0))), "rope_type"),
    ("eurobert", dict(num_key_value_heads=4), "num_kv_heads"), ("eurobert", dict(head_dim=7), "head_dim"),
    *(("nomic_bert", {key: True}, f"{key} is True") for key in (
        "prenorm", "causal", "use_rms_norm", "rotary_emb_interleaved", "parallel_block", "qkv_proj_bias",
        "mlp_fc1_bias", "mlp_fc2_bias")),
    ("nomic_bert", dict(rotary_emb_fraction=0.5), "rotary_emb_fraction"),
    ("nomic_bert", dict(num_experts=8), "num_experts"),
    ("nomic_bert", dict(rotary_scaling_factor=2.0), "rotary_scaling_factor"),
    ("nomic_bert", dict(activation_function="gelu"), "activation_function"),
    ("nomic_bert", dict(hidden_act="relu"), "activation"), ("nomic_bert", dict(type_vocab_size=0), "type_vocab_size"),
    *((name, dict(tie_word_embeddings=False), "tie_word_embeddings") for name in POST),
    *((name, dict(head_dim=16), "head_dim") for name in POST),
    *((name, dict(rope_parameters=YARN), "rope_type is 'yarn'") for name in POST),
    ("nomic_bert", dict(rope_scaling=dict(type="dynamic", factor=2.0)), "'dynamic'"),
    ("nomic_bert", dict(rope_parameters=dict(full_attention=PLAIN)), "full_attention"),
    ("gte", dict(rope_theta=20000.0, rope_scaling=dict(type="ntk", factor=8.0)), "rope_type is 'ntk'"),
    ("gte", dict(layer_norm_type="rms_norm"), "layer_norm_type"),
    ("gte", dict(logn_attention_scale=True), "logn_attention_scale"),
    ("gte", dict(position_embedding_type="absolute"), "position_embedding_type"),
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSED)
def test_unsupported_configurations_are_refused_by_name(name, changes, words, pair, tmp_path):
    with pytest.raises(UserError, match=rf"config\.json.*{words}"):
        import_folder(changed(pair(name).folder, tmp_path / "hf", changes))


IGNORED = [
    ("qwen3", dict(partial_rotary_factor=0.5)), ("eurobert", dict(clf_pooling="bos", is_decoder=True, is_causal=True)),
    ("llama", dict(rope_interleaved=True, pretraining_tp=4, use_cache=False, sliding_window=3)),
    ("qwen3", dict(max_window_layers=0, sliding_window=3, mlp_bias=True)),
    ("mistral", dict(attention_bias=True, mlp_bias=True, layer_types=LOCAL)),
    ("gemma3_text", dict(attn_logit_softcapping=1.0, mlp_bias=True, hidden_act="relu", _sliding_window_pattern=2)),
    # The keys of the class win.
    ("nomic_bert", dict(n_embd=6, n_layer=7, rotary_emb_base=9.0, layer_norm_epsilon=1.0, num_key_value_heads=1)),
    *((name, dict(partial_rotary_factor=0.5, is_decoder=True, is_causal=True, sliding_window=3)) for name in POST),
]


@pytest.mark.parametrize(("name", "changes"), IGNORED)
def test_keys_that_the_class_ignores_are_ignored(name, changes, pair, tmp_path):
    theirs, folder, imported = pair(name)
    folder = changed(folder, tmp_path / "hf", changes)
    other = type(theirs).from_pretrained(folder, attn_implementation="eager").eval()
    is_causal = name not in ENCODERS
    np.testing.assert_array_equal(torch_loss(other, is_causal)[1], torch_loss(theirs, is_causal)[1])
    assert import_folder(folder).objective.model == imported.objective.model


OLD = dict(rope_parameters=DELETED)
FORMS = [
    ("llama", OLD | dict(rope_theta=77.0)), ("llama", OLD | dict(rope_theta=77.0, rope_scaling=None)), ("llama", OLD),
    ("llama", OLD | dict(rope_theta=77.0, rope_scaling={"type": "linear", "factor": 3.0})),
    # It replaces rope_parameters, and takes the base from beside it.
    ("llama", dict(rope_theta=77.0, rope_scaling=dict(rope_type="linear", factor=3.0))),
    ("llama", dict(rope_theta=77.0)), ("llama", dict(original_max_position_embeddings=32)),
    ("llama", dict(rope_scaling={k: v for k, v in LLAMA3.items() if not k.startswith("original")})),
    *((name, dict(num_key_value_heads=value, head_dim=value))
      for name in ("llama", "eurobert") for value in (None, DELETED)),
    *((name, dict(num_key_value_heads=value, head_dim=DELETED, num_attention_heads=32, hidden_size=64))
      for name, value in (("qwen3", None), ("qwen3", DELETED), ("mistral", DELETED))),
    *((name, changes) for name in POST for changes in (
        OLD, OLD | dict(rope_theta=77.0), OLD | dict(rope_theta=77.0, rope_scaling=None), dict(rope_theta=77.0),
        dict(rope_theta=77.0, rope_scaling=dict(rope_type="default")),
        dict(rope_theta=77.0, rope_scaling=dict(rope_type="default", rope_theta=33.0)))),
]


@pytest.mark.parametrize(("name", "changes"), FORMS)
def test_old_and_missing_keys_are_read_as_by_the_class(name, changes, pair, tmp_path):
    """Frequencies, and numbers and widths of heads."""
    folder = changed(pair(name).folder, tmp_path / "hf", changes)
    config, content = transformers.AutoConfig.from_pretrained(folder), read_json(folder / "config.json")
    model = family_named(name, "here").read_objective(Source(folder, content, ())).model
    if name not in POST:
        assert (model.num_kv_heads, model.head_dim) == (config.num_key_value_heads, config.head_dim)
    module = importlib.import_module(type(pair(name).theirs).__module__)
    rotary = next(value for key, value in vars(module).items() if key.endswith("RotaryEmbedding"))
    np.testing.assert_allclose(model.stack.rope.frequencies(model.head_dim), rotary(config).inv_freq, rtol=1e-6)


BASES = dict(full_attention=dict(rope_type="default", rope_theta=30.0), sliding_attention=None)
GEMMA_FORMS = [
    dict(rope_parameters=DELETED), dict(rope_parameters=DELETED, rope_theta=30.0, rope_local_base_freq=7.0),
    dict(rope_parameters=DELETED, rope_theta=30.0, rope_scaling=dict(rope_type="linear", factor=8.0)),
    dict(rope_parameters=BASES, rope_local_base_freq=7.0),
    dict(rope_parameters=BASES, rope_scaling=dict(rope_type="linear", factor=8.0)),  # it keeps the base
    dict(layer_types=DELETED), dict(layer_types=DELETED, sliding_window_pattern=3),
    dict(layer_types=DELETED, sliding_window_pattern=9), dict(layer_types=["sliding_attention"] * 7),
    dict(head_dim=DELETED, num_key_value_heads=DELETED, num_attention_heads=4, query_pre_attn_scalar=DELETED),
    dict(sliding_window=DELETED, tie_word_embeddings=DELETED, hidden_activation=DELETED),
]


@pytest.mark.parametrize("changes", GEMMA_FORMS)
def test_keys_of_gemma_are_read_as_by_the_class(changes, pair, tmp_path):
    folder = changed(pair("gemma3_text").folder, tmp_path / "hf", changes)
    config, content = transformers.AutoConfig.from_pretrained(folder), read_json(folder / "config.json")
    model = family_named("gemma3_text", "here").read_objective(Source(folder, content, ())).model
    theirs = (config.num_key_value_heads, config.head_dim, config.query_pre_attn_scalar, config.sliding_window,
              config.tie_word_embeddings)
    assert theirs == (model.num_kv_heads, model.head_dim, model.score_width, model.window, model.tied_head)
    assert model.activation == "gelu_new" and config.hidden_activation == "gelu_pytorch_tanh"
    rotary = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(config)
    for layer, kind in enumerate(config.layer_types):
        own = model.stack.of_layer(layer)
        assert own.band == (model.window if kind == "sliding_attention" else None)
        frequencies = getattr(rotary, f"{kind}_inv_freq", None)
        np.testing.assert_allclose(own.rope.frequencies(model.head_dim), frequencies, rtol=1e-6)


PUBLISHED = dict(
    n_embd=48, n_layer=3, n_head=6, n_inner=64, n_positions=128, layer_norm_epsilon=1e-3, rotary_emb_base=100,
    rotary_emb_fraction=1.0, rotary_emb_interleaved=False, rotary_emb_scale_base=None, rotary_scaling_factor=None,
    activation_function="swiglu", prenorm=False, causal=False, use_rms_norm=False, parallel_block=False,
    qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0,
    type_vocab_size=2, use_flash_attn=True, pad_vocab_size_multiple=64,
)


def test_the_published_keys_of_nomic_are_read(pair, tmp_path):
    """The class ignores them, and would read another model."""
    _, folder, imported = pair("nomic_bert")
    folder, model = Path(shutil.copytree(folder, tmp_path / "hf")), imported.objective.model
    published = PUBLISHED | dict(model_type="nomic_bert", vocab_size=model.vocab_size)
    (folder / "config.json").write_text(json.dumps(published))
    assert transformers.AutoConfig.from_pretrained(folder).hidden_size == 768
    found = import_folder(folder)
    assert found.objective.model == model and not found.fresh


@pytest.mark.parametrize("name", POST)
def test_missing_keys_have_the_values_of_the_class(name):
    config = transformers.AutoConfig.for_model(name)
    model = family_named(name, "here").read_objective(Source(Path(), {"model_type": name}, ())).model
    fields = nomic_bert.GTE if name == "gte" else nomic_bert.FIELDS
    theirs = config.to_dict() | {"rope_theta": config.rope_parameters["rope_theta"]}
    assert {key: theirs[key] for _, (key, _) in fields.items()} == {
        key: getattr(model, ours) for ours, (key, _) in fields.items()}
