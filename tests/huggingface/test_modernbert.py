"""ModernBERT and Ettin against Transformers: logits, losses, all gradients and training steps; tokenizer.

Matrices are drawn with a standard deviation of 0.1. At the classes' own initialization a wrong base of rotary positions
moves the logits by 1e-5 only, and a wrong window by 1e-3.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file

from jaxlm.cli import main
from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder, modernbert
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.inference.generate import generate
from jaxlm.models.base import Inputs
from jaxlm.models.llama import Mistral
from jaxlm.models.modernbert import ModernBert, ModernBertDecoder
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.runs.model import load_trained
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.training.program import Program, corruption_key
from jaxlm.types import TokenBatch
from tests.huggingface.support import TorchAdamW, batch, load_into, read_json, real, torch_outputs
from tests.params import first_fast, random_params
from tests.tokenizers.test_llama_forms import save as save_tokenizer
from tests.training.support import write_text

CONFIGS = Path(__file__).parents[2] / "configs"
TOLERANCE = 1e-4
LENGTH = 33
# Seven layers: 0, 3 and 6 are global. A local token of the encoder sees 4 tokens to either side, rows have 33.
SIZES = dict(hidden_size=32, num_hidden_layers=7, num_attention_heads=4, intermediate_size=48, local_attention=8,
             max_position_embeddings=40)
CLASSES = {"encoder": transformers.ModernBertForMaskedLM, "decoder": transformers.ModernBertDecoderForCausalLM}


@pytest.fixture(scope="module")
def their_tokenizer(tmp_path_factory) -> Path:
    """A folder with a tokenizer of ModernBERT's form: byte-level BPE, special tokens at the end."""
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    texts = [" ".join(f"{a}{b}s the tree, {b}{a}" for a in "abcdefgh") + "." for b in "klmnopqrst"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_special_tokens([tokenizers.AddedToken("[MASK]", lstrip=True)])
    ids = [("[CLS]", tokenizer.token_to_id("[CLS]")), ("[SEP]", tokenizer.token_to_id("[SEP]"))]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]",
        mask_token=transformers.AddedToken("[MASK]", lstrip=True, special=True), eos_token="[SEP]", bos_token="[CLS]",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)
    return folder


def save(name: str, folder: Path, their_tokenizer: Path, **changes) -> tuple[torch.nn.Module, Path]:
    """Save a model with random weights; unit norms would hide a mix-up."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(their_tokenizer)
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "cls", "sep", "bos", "eos")}
    architecture = CLASSES[name]
    config = architecture.config_class(**(SIZES | ids | dict(vocab_size=len(tokenizer)) | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = architecture(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = float(parameter.ndim == 1 and parameter is not model.decoder.bias)
            parameter.copy_(scale + 0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, folder


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params, ids, mask):
    return model.predict_tokens(params, model.hidden_states(params, Inputs(ids, mask=mask)))


def difference(model, params, theirs: torch.nn.Module, length: int = LENGTH, padded: bool = True) -> float:
    """Return the largest difference of logits at tokens of three rows."""
    inputs = batch(dataclasses.replace(theirs.config, type_vocab_size=1), length, padded)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    expected = real(torch_outputs(theirs, inputs).logits.numpy(), inputs)
    assert np.abs(expected).max() > 0.3  # agreement on zeros would prove nothing
    return float(np.abs(real(logits(model, params, *inputs.values()), inputs) - expected).max())


MUTANTS = [
    dict(local_attention=6), dict(local_attention=10), dict(global_theta=10_000.0), dict(local_theta=160_000.0),
    dict(global_period=2), dict(activation="gelu_new", norm_eps=1e-2),
]


@pytest.mark.slow  # the suite has loss and gradients
@pytest.mark.parametrize("name", first_fast(CLASSES))
def test_logits_in_both_directions(name, tmp_path, their_tokenizer):
    theirs, folder = save(name, tmp_path / "hf", their_tokenizer)
    imported = import_folder(folder)
    model, params = imported.objective.model, imported.params
    assert type(model) is {"encoder": ModernBert, "decoder": ModernBertDecoder}[name] and not imported.fresh
    assert difference(model, params, theirs) < TOLERANCE
    # Exported again, every tensor is unchanged.
    out = export_folder(tmp_path / "out", imported.objective, params, imported.tokenizer, ModelCard())
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)
    again, report = CLASSES[name].from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert difference(model, params, again.eval()) < TOLERANCE
    ours, other = again.config.to_dict(), theirs.config.to_dict()
    assert all(ours[key] == other[key] for key in ("rope_parameters", "layer_types", "local_attention", "eos_token_id"))
    assert import_folder(out).objective.model == model


@pytest.mark.slow
def test_a_decoder_with_bidirectional_attention_is_the_encoder(tmp_path, their_tokenizer):
    """`is_causal` false in its config.json; in a folder of the encoder the other names hold the same."""
    _, folder = save("decoder", tmp_path / "hf", their_tokenizer)
    config = folder / "config.json"
    config.write_text(json.dumps(read_json(config) | {"is_causal": False}))
    theirs, imported = CLASSES["decoder"].from_pretrained(folder, attn_implementation="eager"), import_folder(folder)
    decoder, params = imported.objective.model, imported.params
    assert difference(decoder, params, theirs.eval()) < TOLERANCE
    for window in (6, 10):
        assert difference(dataclasses.replace(decoder, local_attention=window), params, theirs) > 100 * TOLERANCE
    causal = dataclasses.replace(decoder, is_causal=True)
    encoder = causal.in_direction(False)
    assert type(encoder) is ModernBert and encoder.in_direction(True) == causal
    assert difference(encoder, params, theirs) < TOLERANCE < difference(causal, params, theirs)
    objectives = imported.objective, dataclasses.replace(imported.objective, model=encoder)
    for objective, auto in zip(objectives, (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM),
                               strict=True):
        out = export_folder(tmp_path / auto.__name__, objective, params, imported.tokenizer, ModelCard())
        again, report = auto.from_pretrained(out, attn_implementation="eager", output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert difference(encoder, params, again.eval()) < TOLERANCE
        assert import_folder(out).objective.model == objective.model


@pytest.mark.slow
@pytest.mark.parametrize("name", first_fast(CLASSES))
def test_the_stored_window_decides(name, tmp_path, their_tokenizer):
    config = save(name, folder := tmp_path / "hf", their_tokenizer)[1] / "config.json"
    config.write_text(json.dumps(read_json(config) | {"sliding_window": 2}))
    theirs, imported = CLASSES[name].from_pretrained(folder, attn_implementation="eager"), import_folder(folder)
    assert imported.objective.model.local_attention == 4
    assert difference(imported.objective.model, imported.params, theirs.eval()) < TOLERANCE


def test_a_tokenizer_with_another_template_or_dropout_is_refused(tmp_path, their_tokenizer):
    _, folder = save("encoder", tmp_path / "hf", their_tokenizer)
    content = read_json(folder / "tokenizer.json")
    symbols, single = (content["post_processor"][name] for name in ("special_tokens", "single"))
    ids = [(name, symbols[name]["ids"][0]) for name in ("[SEP]", "[CLS]")]

    def opens(**changes):
        (folder / "tokenizer.json").write_text(json.dumps(content | changes))
        return import_folder(folder)

    bert = {"type": "BertProcessing", "sep": ids[0], "cls": ids[1]}
    assert opens(post_processor=bert) and opens(post_processor={"type": "Sequence", "processors": [bert]})
    for changed, theirs in ((None, r"\$A"), (content["post_processor"] | {"single": single[:2]}, r"\[CLS\] \$A"),
                            (bert | {"cls": ids[0]}, r"\[SEP\] \$A \[SEP\]")):
        with pytest.raises(UserError, match=rf"reads a text as {theirs}, and jaxlm's ModernBert as \[CLS\] "):
            opens(post_processor=changed)
    with pytest.raises(UserError, match=r"merges pieces at random .*set it to null"):
        opens(model=content["model"] | {"dropout": 0.1})


@pytest.mark.slow  # compiles seven models
@pytest.mark.parametrize("name", first_fast(CLASSES))
def test_each_choice_moves_the_logits(name, tmp_path, their_tokenizer):
    theirs, folder = save(name, tmp_path / "hf", their_tokenizer)
    imported = import_folder(folder)
    for length, padded in ((7, True), (LENGTH, False)):
        assert difference(imported.objective.model, imported.params, theirs, length, padded) < TOLERANCE
    for mutant in MUTANTS:
        model = dataclasses.replace(imported.objective.model, **mutant)
        assert difference(model, imported.params, theirs) > 10 * TOLERANCE, mutant


OLD = dict(global_attn_every_n_layers=2, global_rope_theta=80_000.0, local_rope_theta=20_000.0)


@pytest.mark.parametrize("name", first_fast(CLASSES))
def test_keys_of_older_files(name, tmp_path, their_tokenizer):
    theirs, folder = save(name, tmp_path / "hf", their_tokenizer, num_hidden_layers=4, **OLD)
    config = read_json(folder / "config.json")
    del config["rope_parameters"], config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config | OLD))
    imported = import_folder(folder)
    model = imported.objective.model
    assert (model.global_period, model.global_theta, model.local_theta) == (2, 80_000.0, 20_000.0)
    assert difference(model, imported.params, theirs) < TOLERANCE


@pytest.mark.parametrize(("key", "value"), [
    ("layer_types", ["full_attention"] * 2 + ["sliding_attention"] * 5), ("norm_bias", True), ("mlp_dropout", 0.1),
    ("rope_parameters", {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}), ("hidden_activation", "mish"),
    ("rope_parameters", [1e4]), ("rope_parameters", {"full_attention": 1e4}),
    ("rope_theta", {"full_attention": {"rope_theta": "1e4"}}),
    ("tie_word_embeddings", False), ("global_attn_every_n_layers", 0), ("classifier_pooling", "max"),
])
def test_unsupported_configurations_are_refused(key, value, tmp_path, their_tokenizer):
    _, folder = save("encoder", tmp_path / "hf", their_tokenizer)
    config = read_json(folder / "config.json") | {key.replace("theta", "parameters"): value}
    if key == "global_attn_every_n_layers":
        del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"/config\.json: .*{key}"):
        import_folder(folder)


def rows(vocabulary, length: int, count: int = 6, seed: int = 0, full: bool = False) -> TokenBatch:
    """Return rows of a document each, of several lengths."""
    draw = np.random.default_rng(seed)
    sizes = np.full(count, length) if full else draw.integers(length // 2, length + 1, count)
    is_real = np.arange(length) < sizes[:, None]
    ids = np.where(is_real, draw.integers(0, vocabulary.size - 5, (count, length)), 0)
    return TokenBatch(*(jnp.asarray(x.astype(np.int32)) for x in (ids, is_real)))


def torch_loss(model: torch.nn.Module, example) -> torch.Tensor:
    """Return their loss of a corrupted example."""
    if "labels" in example:
        ids = torch.tensor(np.asarray(example["input_ids"])).long()
        labels = torch.tensor(np.asarray(example["labels"])).long()
        return torch.nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())
    example = jax.device_get(example)
    labels = np.full(example["input_ids"].shape, -100, np.int64)
    at, slots = np.nonzero(example["masked_weights"])
    labels[at, example["masked_positions"][at, slots]] = example["masked_labels"][at, slots]
    inputs = {name: torch.tensor(example[name]).long() for name in ("input_ids", "attention_mask")}
    return model(**inputs, labels=torch.tensor(labels)).loss


TABLES = {"encoder": modernbert.TABLE, "decoder": modernbert.DECODER}


@pytest.mark.parametrize("name", first_fast(CLASSES))
def test_loss_and_all_gradients(name, tmp_path, their_tokenizer):
    theirs, folder = save(name, tmp_path / "hf", their_tokenizer)
    imported = import_folder(folder)
    objective = imported.objective.bind(imported.tokenizer.vocabulary, LENGTH)
    given = rows(objective.vocabulary, objective.row_format(LENGTH).length, full=name == "decoder")
    example = jax.jit(objective.corrupt)(jax.random.key(3), given)

    @jax.jit
    @jax.value_and_grad
    def value_and_gradients(params):
        return total_loss(objective.loss(params, example, jax.random.key(0), True))

    loss, gradients = value_and_gradients(imported.params)
    expected = torch_loss(theirs, example)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), abs=1e-5)
    weights = dict(theirs.named_parameters())
    ours = dict(TABLES[name].to_transformers(jax.device_get(gradients)))
    assert ours.keys() == weights.keys()
    for key, gradient in ours.items():
        assert np.abs(gradient).max() > 1e-4, key
        np.testing.assert_allclose(gradient, weights[key].grad.numpy(), rtol=1e-3, atol=1e-5, err_msg=key)


@pytest.mark.slow  # the suite has the loss and gradients of one step
@pytest.mark.parametrize("name", first_fast(CLASSES))
def test_twenty_steps_as_in_pytorch(name, tmp_path, their_tokenizer):
    theirs, folder = save(name, tmp_path / "hf", their_tokenizer)
    imported, steps, count = import_folder(folder), 20, 8
    objective = imported.objective.bind(imported.tokenizer.vocabulary, LENGTH)
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=5)
    program = Program(
        objective, TrainConfig(steps=steps, batch_size=count, seed=3), optimizer,
        make_mesh(MeshConfig(), jax.devices()[:1]),
    )
    state = program.init_state(jax.tree.map(jnp.asarray, imported.params))
    theirs = load_into(theirs, TABLES[name], state.params).train()
    adamw, ours, reference = TorchAdamW(theirs, TABLES[name], state.params, optimizer, steps), [], []
    corrupt = jax.jit(objective.corrupt)
    for step in range(steps):
        given = rows(objective.vocabulary, objective.row_format(LENGTH).length, count, step, name == "decoder")
        loss = torch_loss(theirs, corrupt(corruption_key(3, step), given))
        adamw.step(loss)
        reference.append(loss.item())
        state, terms = program.train_step(state, given, ())
        ours.append(float(terms["loss"].total))
    assert reference[0] - min(reference) > 0.1, "the model learns, or the comparison says little"
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-3)


@pytest.mark.slow  # compiles six models
@pytest.mark.parametrize("changes", [dict(loop_layers=True), dict(remat="full")])
def test_loops_and_remat_change_nothing(changes):
    """Eight layers: the first one, two periods, and one more; the last one is local. Two layers: no whole period."""
    sizes = dict(vocab_size=50, hidden_size=16, num_heads=2, intermediate_size=24, local_attention=4, init_std=0.2)

    def gradients(num_layers, **changes):
        model = ModernBert(num_layers=num_layers, dropout=0.1, **sizes, **changes)
        params, at = jax.jit(model.init)(jax.random.key(0)), jnp.array([[1, 9]])

        def loss(params):
            ids = jnp.arange(12)[None]
            return jnp.sum(model.hidden_states(params, Inputs(ids), key=jax.random.key(1), at=at) ** 3)

        return jax.jit(jax.grad(loss))(params)

    for num_layers in (2, 8):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), gradients(num_layers, **changes),
            gradients(num_layers),
        )


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "period"), [(2, 1), (2, 3), (3, 3)])
def test_a_loop_without_a_whole_period(num_layers, period):
    """The first layer and the last one at positions run by themselves, and too few are left for a step of the loop."""
    model = ModernBert(vocab_size=50, hidden_size=16, num_heads=2, num_layers=num_layers, intermediate_size=24,
                       local_attention=4, global_period=period, loop_layers=True)

    def states(key):
        return model.hidden_states(model.init(key), Inputs(jnp.arange(12)[None]), at=jnp.array([[3, 0]]))

    assert jax.eval_shape(states, jax.random.key(0)).shape == (1, 2, 16)


SMALL = dict(vocab_size=50, hidden_size=16, num_heads=2, intermediate_size=24, local_attention=4, init_std=0.2)


def test_a_single_layer_is_refused():
    """Its stack would have an empty array of norms before attention, which no checkpoint can hold."""
    with pytest.raises(UserError, match="num_layers"):
        ModernBert(num_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("model", [
    ModernBert(**SMALL, num_layers=4), ModernBert(**SMALL, num_layers=3), ModernBertDecoder(**SMALL, num_layers=4),
    Mistral(vocab_size=50, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24, num_layers=2,
            window=2, init_std=0.3, is_causal=False),
], ids=["global", "local", "causal", "mistral"])
def test_the_last_layer_at_positions_changes_nothing(model):
    """It is computed there only if it attends to all tokens."""
    ids, at = jnp.arange(12)[None], jnp.array([[3, 11, 0]])

    @jax.jit
    def states(key):
        params = model.init(key)
        return model.hidden_states(params, Inputs(ids)), model.hidden_states(params, Inputs(ids), at=at)

    all_states, some = states(jax.random.key(0))
    np.testing.assert_allclose(some, all_states[:, at[0]], atol=1e-5)


@pytest.mark.slow
def test_greedy_continuations_are_theirs(tmp_path, their_tokenizer):
    """Prompts of several lengths, padded on the left, longer than the window."""
    theirs, folder = save("decoder", tmp_path / "hf", their_tokenizer)
    imported = import_folder(folder)
    draw, eos, pad = np.random.default_rng(5), imported.tokenizer.vocabulary.eos, imported.tokenizer.vocabulary.pad
    prompts = [draw.integers(4, 290, size).tolist() for size in (12, 3, 7, 9)]
    ids = torch.tensor([[pad] * (12 - len(prompt)) + prompt for prompt in prompts])
    with torch.no_grad():
        out = theirs.generate(
            ids, attention_mask=(ids != pad).long(), max_new_tokens=16, do_sample=False, eos_token_id=eos,
            pad_token_id=pad,
        )
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in out[:, 12:].tolist()]
    assert len({tuple(row) for row in expected}) > 2  # the prompts have an effect
    assert generate(imported.objective, imported.params, prompts, max_new_tokens=16, stop_ids=[eos]) == expected


def test_tokenizer_in_both_directions_and_filled_masks(tmp_path, their_tokenizer):
    """[MASK] takes the space before it, so that predictions may begin with one."""
    _, folder = save("encoder", tmp_path / "hf", their_tokenizer)
    imported = import_folder(folder)
    v = imported.tokenizer.vocabulary
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (their_tokenizer, out))
    texts = ["aks the [MASK], ka", "aks the[MASK], ka", "[MASK]", "옛날에 🙂  ka\n", "ａ ﬁ é", ""]
    for text in texts:
        expected = before(text)["input_ids"]
        assert [v.cls, *imported.tokenizer.encode_with_symbols(text), v.sep] == expected == after(text)["input_ids"]
    assert before(texts[0])["input_ids"] == before(texts[1])["input_ids"]
    assert before(texts[0], texts[3]).data == after(texts[0], texts[3]).data
    assert "token_type_ids" not in after(texts[0])
    answers = fill_mask(imported, texts[:1], 3)[0]
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)(texts[0])
    np.testing.assert_allclose([p for _, p in answers[0]], [entry["score"] for entry in library], atol=1e-5)
    assert [piece for piece, _ in answers[0]] == imported.tokenizer.pieces([entry["token"] for entry in library])


@pytest.fixture(scope="module")
def mmbert(tmp_path_factory) -> Path:
    """As mmBERT's: it names no [CLS] and no [SEP], and the cls_token_id of its config.json is the end symbol's."""
    folder = tmp_path_factory.mktemp("mmbert")
    made = save_tokenizer("mmbert", folder / "tokenizer")
    save("encoder", folder, made, cls_token_id=1, sep_token_id=1, classifier_pooling="mean", local_rope_theta=160_000.0)
    for file in made.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def compare_mmbert(loaded: PretrainedModel, folder: Path, out: Path) -> None:
    """Compare ids, roles and filled masks of an export with those of the published folder."""
    v = loaded.tokenizer.vocabulary
    assert (v.pad, v.eos, v.sep, v.bos, v.cls, v.mask) == (0, 1, 1, 2, 2, 4)
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, out))
    texts, config = ["the <mask> 옛날에", "<mask>", "  x==y"], read_json(out / "config.json")
    assert [config[f"{role}_token_id"] for role in ("pad", "bos", "eos", "cls", "sep")] == [0, 2, 1, 2, 1]
    assert before(texts, texts[::-1]).data == after(texts, texts[::-1]).data
    for text in texts:
        expected = [v.bos, *loaded.tokenizer.encode_with_symbols(text), v.eos]
        assert before(text)["input_ids"] == expected == after(text)["input_ids"]
    _, report = CLASSES["encoder"].from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)(texts[0])
    answers = fill_mask(loaded, texts[:1], 3)[0]
    np.testing.assert_allclose([p for _, p in answers[0]], [entry["score"] for entry in library], atol=1e-5)


@pytest.mark.slow
def test_a_folder_with_gemmas_tokenizer(mmbert, tmp_path):
    theirs = CLASSES["encoder"].from_pretrained(mmbert, attn_implementation="eager").eval()
    assert theirs.config.cls_token_id == 1
    imported = import_folder(mmbert)
    model, v = imported.objective.model, imported.tokenizer.vocabulary
    assert model.classifier_pooling == "mean" and difference(model, imported.params, theirs) < TOLERANCE
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    compare_mmbert(imported, mmbert, out)
    objective = imported.objective.bind(v, LENGTH)
    example = jax.jit(objective.corrupt)(jax.random.key(3), rows(v, LENGTH - 2))
    ids, last = np.asarray(example["input_ids"]), np.asarray(example["attention_mask"]).sum(1) - 1
    assert (ids[:, 0] == v.bos).all() and (ids[np.arange(len(ids)), last] == v.eos).all() and (ids == v.mask).any()


@pytest.mark.slow  # compiles a run
def test_pretraining_goes_on_with_gemmas_tokenizer(mmbert, tmp_path):
    text, run, out = write_text(tmp_path / "text.txt", documents=40), tmp_path / "run", tmp_path / "out"
    assert main(["pretrain", "configs/modernbert_tiny.py", "--init-from", str(mmbert), "--data.source", str(text),
                 "--run-dir", str(run), "--data.length", "32", "--train.steps", "2", "--train.phases=",
                 "--train.batch-size", "4", "--train.tracker", "none"]) == 0
    assert main(["export", str(run), str(out)]) == 0
    compare_mmbert(load_trained(run), mmbert, out)


@pytest.mark.slow
def test_parameters_of_random_exports(tmp_path, their_tokenizer):
    """A model trained here, with a vocabulary without a begin symbol, exports and loads."""
    tokenizer = Tokenizer.load(their_tokenizer)
    model = ModernBertDecoder(hidden_size=32, num_layers=4, num_heads=4, intermediate_size=48, max_positions=40,
                              vocab_size=len(tokenizer), local_attention=8)
    objective = CausalLM(model=model).bind(tokenizer.vocabulary, 20)
    params = random_params(objective, 1)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    assert difference(model, params, theirs) < TOLERANCE
