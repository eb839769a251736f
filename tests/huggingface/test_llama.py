"""Llama, Qwen 3, Mistral, Gemma 3, EuroBERT, Nomic BERT and GTE against Transformers: logits, gradients, round trips.

Matrices are drawn with a standard deviation of 0.15: at the classes' own initialization a wrong base of rotary
positions moves EuroBERT's logits by 2e-3 only. Two of six heads are key/value heads, since with one or six their order
would not matter; the base is small, so that all frequencies turn within 40 positions.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.families import family_of
from jaxlm.huggingface.family import Source
from jaxlm.inference.fill_mask import fill_mask
from jaxlm.inference.generate import generate
from jaxlm.inference.score import Pair as ScoredPair
from jaxlm.inference.score import score
from jaxlm.models.llama import EuroBert
from jaxlm.objectives.base import with_options
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tasks.classification import Classification
from jaxlm.training.program import Program, corruption_key
from jaxlm.types import TokenBatch
from tests.huggingface import test_modernbert
from tests.huggingface.rotary_models import (
    CASES,
    DECODERS,
    ENCODERS,
    LENGTH,
    MODELS,
    POST,
    SYMBOLS,
    TOLERANCE,
    changed,
    difference,
    example,
    forward_and_backward,
    rows,
    save,
    torch_loss,
)
from tests.huggingface.support import TorchAdamW
from tests.params import first_fast, random_params

each_case = pytest.mark.parametrize("name", CASES)


@pytest.mark.parametrize("name", first_fast(["gemma3_text", *ENCODERS, *DECODERS[:-1]], 5))
def test_logits_loss_and_all_gradients(name, pair):
    theirs, _, imported = pair(name)
    is_causal, model = name not in ENCODERS, imported.objective.model
    assert type(model) is MODELS[name] and not imported.fresh
    given = example(is_causal, getattr(model, "type_vocab_size", 1) or 1)
    (loss, logits), gradients = forward_and_backward(imported.objective, imported.params, given)
    theirs.zero_grad()
    expected, other = torch_loss(theirs, is_causal)
    assert 0.7 < other.std() < 3.0  # agreement on zeros would prove nothing
    layers = len(theirs.base_model.layers)
    assert difference(logits, other) < TOLERANCE * layers / 3  # rounding adds up: Gemma's seven are 1.1e-5 off
    assert float(loss) == pytest.approx(expected.item(), abs=TOLERANCE)
    expected.backward()
    weights = revert_weight_conversion(theirs, {key: leaf.grad for key, leaf in theirs.named_parameters()})
    table = family_of(imported.objective).models(imported.objective)[0].table
    found = dict(table.to_transformers(jax.device_get(gradients)))
    assert found.keys() == weights.keys()
    padding = theirs.config.pad_token_id
    for key, gradient in found.items():
        wanted = weights[key].numpy()
        if key == "model.embed_tokens.weight" and not model.tied_head:  # theirs is never trained at the padding symbol
            assert not wanted[padding].any()
            gradient, wanted = (np.delete(x, padding, 0) for x in (gradient, wanted))
        assert np.abs(wanted).max() > 1e-4, key
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=TOLERANCE, err_msg=key)


BOTH = "use_bidirectional_attention"
BIDIRECTIONAL = [
    ("mistral", dict(is_causal=False), 6), ("gemma3_text", {BOTH: True}, 3), ("gemma3_text", dict(is_causal=False), 6),
    ("gemma3_text", {BOTH: True, "is_causal": False}, 4), ("llama", dict(is_causal=False), None),
    ("llama", dict(is_causal=None), None), ("llama_biased", dict(is_causal=False), None),
    ("qwen3", dict(is_causal=False), None),
]
"""Family, keys of config.json, and number of tokens that a local one attends to on either side."""


def load_torch(folder: Path, kind=transformers.AutoModelForCausalLM) -> torch.nn.Module:
    """Return their model of a folder that has all of its tensors and no others."""
    model, report = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize(("name", "keys", "reach"), first_fast(BIDIRECTIONAL))
def test_bidirectional_attention(name, keys, reach, pair, tmp_path):
    """Their decoders read the key; so do imports, and exports have it."""
    folder = changed(pair(name).folder, tmp_path / "hf", keys)
    theirs, imported = load_torch(folder), import_folder(folder)
    model = imported.objective.model
    assert not model.is_causal and type(model) is MODELS[name] and getattr(model, "window", None) == reach
    (loss, logits), gradients = forward_and_backward(imported.objective, imported.params, example(False))
    expected, other = torch_loss(theirs, False)
    expected.backward()
    assert difference(torch_loss(pair(name).theirs, True)[1], other) > 1  # causal logits
    assert difference(logits, other) < TOLERANCE * model.num_layers / 3
    assert float(loss) == pytest.approx(expected.item(), abs=TOLERANCE)
    table = family_of(imported.objective).models(imported.objective)[0].table
    weights, padding = dict(theirs.named_parameters()), theirs.config.pad_token_id
    for key, gradient in table.to_transformers(jax.device_get(gradients)):
        wanted = weights[key].grad.numpy()
        if key == "model.embed_tokens.weight" and not model.tied_head:
            gradient, wanted = (np.delete(x, padding, 0) for x in (gradient, wanted))
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=TOLERANCE, err_msg=key)
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)
    assert difference(torch_loss(load_torch(out), False)[1], other) < 1e-6
    assert import_folder(out).objective.model == model
    for change in (-1, 1) if reach else ():
        wrong = dataclasses.replace(imported.objective, model=dataclasses.replace(model, window=reach + change))
        assert difference(forward_and_backward(wrong, imported.params, example(False))[0][1], other) > 0.5


@pytest.mark.parametrize("name", first_fast(["llama", "llama_biased", "qwen3", "mistral", "gemma3_text"]))
def test_a_decoder_becomes_an_encoder_and_one_again(name, pair, tmp_path):
    """By Transformers' class with `is_causal` false; a Llama's is EuroBERT's where it has all parts."""
    _, folder, imported = pair(name)
    theirs = load_torch(changed(folder, tmp_path / "hf", dict(is_causal=False)))
    found, v = imported.in_direction(False), imported.tokenizer.vocabulary
    model, new = found.objective.model, found.tokenizer.vocabulary
    assert type(model) is (EuroBert if name == "llama" else MODELS[name]) and not model.is_causal
    assert (new.mask, new.cls, new.sep, new.size) == (v.size, v.bos, v.eos, v.size + 1) == (272, 270, 271, 273)
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params["encoder"], imported.params["encoder"]))
    table, old = (each.params["embeddings"]["word"]["embedding"] for each in (found, imported))
    assert model.vocab_size == len(table) == 273 and np.array_equal(table[:272], old)
    np.testing.assert_allclose(table[272], old.mean(0), atol=1e-6)
    objective = MaskedLM(model=model, input_format="document").bind(new, LENGTH)
    logits = forward_and_backward(objective, found.params, example(False))[0][1]
    other = torch_loss(theirs, False)[1]
    assert difference(logits[..., :272], other) < TOLERANCE * model.num_layers / 3
    out = export_folder(tmp_path / "out", objective, found.params, found.tokenizer, ModelCard())
    kind = transformers.AutoModelForMaskedLM if name == "llama" else transformers.AutoModelForCausalLM
    assert difference(logits, torch_loss(load_torch(out, kind), False)[1]) < TOLERANCE * model.num_layers / 3
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(out), "the cat [MASK] on the mat"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.mask_token == "[MASK]" and (ids[0], ids[-1], ids.count(272)) == (v.bos, v.eos, 1)
    assert ids == [v.bos, *found.tokenizer.encode_with_symbols(text), v.eos]
    assert ids[ids.index(272) - 1] != 220  # it takes the space before it
    again = import_folder(out)
    assert again.objective.model == model and again.objective.text_template.num_symbols(pair=False) == 2
    back = again.in_direction(True)
    assert back.objective.model == dataclasses.replace(imported.objective.model, vocab_size=273)
    logits = forward_and_backward(imported.objective, imported.params, example(True))[0][1]
    causal = CausalLM(model=back.objective.model).bind(new, LENGTH)
    again = forward_and_backward(causal, back.params, example(True))[0][1][..., :272]
    np.testing.assert_allclose(again, logits, atol=TOLERANCE)


def test_a_mask_is_predicted_by_the_state_before_it(pair, tmp_path):
    """Loss, filled masks, scores and config.json (LLM2Vec's masked next-token prediction)."""
    imported = pair("llama").ours.in_direction(False)
    objective = MaskedLM(model=imported.objective.model, input_format="document", predicts_next=True)
    objective = objective.bind(imported.tokenizer.vocabulary, LENGTH)
    out = export_folder(tmp_path / "out", objective, imported.params, imported.tokenizer, ModelCard())
    assert "predicted at the position before them" in (out / "README.md").read_text()
    loaded, theirs = import_folder(out), load_torch(out, transformers.AutoModelForMaskedLM)
    assert loaded.objective.predicts_next and not pair("llama").ours.objective.predicts_next
    loss = forward_and_backward(objective, imported.params, example(False))[0][0]
    logits, labels = torch.tensor(torch_loss(theirs, False)[1]), torch.tensor([2, 5, 6] * 3)
    expected = torch.nn.functional.cross_entropy(logits[:, [1, 4, 5]].flatten(0, 1), labels)
    assert float(loss) == pytest.approx(expected.item(), abs=TOLERANCE)
    ids = torch.tensor([objective.text_template.build(objective.vocabulary, imported.tokenizer.encode_with_symbols(
        "the cat[MASK] on the mat")).input_ids.tolist()]).long()
    (at,) = (ids[0] == 272).nonzero()[0]
    with torch.no_grad():
        wanted = theirs(input_ids=ids).logits[0, at - 1].softmax(-1).sort(descending=True)
    filled = fill_mask(loaded, ["the cat [MASK] on the mat"], 4)[0][0]
    np.testing.assert_allclose([p for _, p in filled], wanted[0][:4], atol=1e-5)
    text = imported.tokenizer.encode(" sat")
    with torch.no_grad():
        masked = torch.tensor([[270, 272, 271]] if len(text) == 1 else [[270, 272, *text[1:], 271]])
        first = theirs(input_ids=masked).logits[0, 0].log_softmax(-1)[text[0]]
    assert score(loaded, [ScoredPair([], text)])[0].log_probs[0] == pytest.approx(first.item(), abs=1e-4)
    batch = TokenBatch(np.full((400, LENGTH - 2), 7, np.int32), np.ones((400, LENGTH - 2), np.int32))
    made = jax.jit(objective.corrupt)(jax.random.key(0), batch)
    assert np.asarray(made["masked_positions"])[np.asarray(made["masked_weights"]) > 0].min() == 1


@pytest.mark.parametrize("name", ["mistral", "eurobert", "nomic_bert"])
def test_padding_in_front(name, pair):
    """As embedders made of decoders have it; positions count the padding on both sides."""
    theirs, _, imported = pair(name)
    ids, mask = (x[:, ::-1].copy() for x in rows())
    given = example(name not in ENCODERS) | {"input_ids": ids}
    given["segment_ids" if name == "mistral" else "attention_mask"] = mask
    (_, logits), _ = forward_and_backward(imported.objective, imported.params, given)
    with torch.no_grad():
        other = theirs(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long()).logits.numpy()
    assert np.abs(np.asarray(logits)[mask > 0] - other[mask > 0]).max() < TOLERANCE


@each_case
def test_round_trip(name, pair, tmp_path):
    theirs, folder, imported = pair(name)
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)
    again, report = type(theirs).from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, other = again.config.to_dict(), theirs.config.to_dict()
    assert {key: value for key, value in other.items() if ours.get(key) != value and key != "_name_or_path"} == {}
    assert import_folder(out).objective.model == imported.objective.model


@pytest.mark.parametrize("name", first_fast(DECODERS, 1))
def test_cached_logits_and_continuations(name, pair):
    """Prompts of several lengths, padded on the left, longer than the window."""
    theirs, _, imported = pair(name)
    model, ids = imported.objective.model, rows()[0]
    (_, whole), _ = forward_and_backward(imported.objective, imported.params, example(True))
    sizes = np.array([30, 20, 3])
    prompts = np.stack([np.pad(row[:size], (30 - size, 0)) for row, size in zip(ids, sizes, strict=True)])
    is_text, decode = np.arange(30) >= 30 - sizes[:, None], jax.jit(model.decode)
    out, state = jax.jit(model.prefill, static_argnums=3)(imported.params, prompts, is_text, 5)
    assert jax.tree.leaves(state.caches)[0].shape == (3, 35, 2, model.head_dim)  # few heads
    for step in range(4):
        found = [whole[row, size + step - 1] for row, size in enumerate(sizes)]
        np.testing.assert_allclose(out, found, atol=2 * TOLERANCE)  # of two ways of computing with seven layers
        out, state = decode(imported.params, np.array([ids[row, size + step] for row, size in enumerate(sizes)]), state)
    with torch.no_grad():
        wanted = theirs.generate(
            torch.tensor(prompts).long(), attention_mask=torch.tensor(is_text).long(), max_new_tokens=12,
            do_sample=False, eos_token_id=999, pad_token_id=0,
        )[:, 30:].tolist()
    assert len({tuple(row) for row in wanted}) == 3  # the prompts have an effect
    texts = [row[:size].tolist() for row, size in zip(ids, sizes, strict=True)]
    assert generate(imported.objective, imported.params, texts, max_new_tokens=12, stop_ids=[]) == wanted


@pytest.mark.parametrize("pooling", ["late", "mean", "bos"])
def test_pooling_of_the_classifier(pooling, pair, tmp_path):
    _, _, imported = pair("eurobert")
    model = dataclasses.replace(imported.objective.model, classifier_pooling=pooling)
    assert with_options(model, EuroBert()) == model, "a preset does not replace it"
    task = Classification(model=model, labels=("a", "b", "c")).bind(imported.tokenizer.vocabulary, LENGTH)
    params, (ids, mask) = random_params(task), rows()
    out = export_folder(tmp_path / "out", task, params, imported.tokenizer, ModelCard())
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert theirs.config.classifier_pooling == pooling
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long()).logits.numpy()
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids), "row": np.arange(3)}
    found = jax.jit(task.predict)(params, given)["logits"]
    assert np.abs(wanted).max() > 0.3
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    assert import_folder(out).objective.model == task.model


@pytest.mark.parametrize("name", first_fast(["qwen3", "gemma3_text"]))
def test_classes_of_texts_by_an_encoder_with_a_decoders_layers(name, pair, tmp_path):
    """The last token is read, as by the class; texts stand between the begin and the end symbol."""
    imported = pair(name).ours.in_direction(False)
    v = imported.tokenizer.vocabulary
    task = Classification(model=imported.objective.model, labels=("a", "b", "c")).bind(v, LENGTH)
    template = task.fine_tuning.template
    assert template.build(v, np.array([5, 6]), np.array([7])).input_ids.tolist() == [v.bos, 5, 6, v.eos, 7, v.eos]
    params, (ids, mask) = random_params(task), rows()
    out = export_folder(tmp_path / "out", task, params, imported.tokenizer, ModelCard())
    theirs = load_torch(out, transformers.AutoModelForSequenceClassification)
    for closes in (False, True):  # rows of tasks end in the end symbol, which is also the padding: neither reads it
        ids[np.arange(3), mask.sum(1) - 1] = v.eos if closes else 7
        padded = torch.tensor(np.where(mask, ids, v.pad)).long()  # their class finds the last token by it
        with torch.no_grad():
            wanted = theirs(input_ids=padded, attention_mask=torch.tensor(mask).long()).logits.numpy()
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids), "row": np.arange(3)}
        assert np.abs(wanted).max() > 0.3
        # Scales around 1 are around 2 in Gemma, whose seven layers round more.
        np.testing.assert_allclose(jax.jit(task.predict)(params, given)["logits"], wanted, atol=1e-4)
    assert import_folder(out).objective.model == task.model


@pytest.mark.parametrize("name", ["eurobert", "qwen3", *POST])
def test_a_folder_of_the_bare_model(name, pair, tmp_path):
    """Its names have no prefix. A head of its own is initialized, a tied one is there."""
    theirs, _, imported = pair(name)
    bare = Path(shutil.copytree(pair(name).folder, tmp_path / "bare"))
    theirs.base_model.save_pretrained(bare)
    found = import_folder(bare)
    assert found.fresh == {"eurobert": ("lm_head",), "qwen3": ()}.get(name, ("mlm_head",))
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params["encoder"], imported.params["encoder"]))
    assert found.objective.model == imported.objective.model


@pytest.mark.parametrize(("name", "field"), [
    ("mistral", "attention_bias"), ("mistral", "mlp_bias"), ("qwen3", "mlp_bias"), ("eurobert", "mlp_bias"),
])
def test_biases_that_the_class_lacks_are_not_exported(name, field, pair, tmp_path):
    imported = pair(name).ours
    model = dataclasses.replace(imported.objective.model, **{field: True})
    objective = dataclasses.replace(imported.objective, model=model)
    with pytest.raises(UserError, match=f"{field} has no counterpart in Transformers' {name}"):
        export_folder(tmp_path / "out", objective, imported.params, imported.tokenizer, ModelCard())


def test_a_second_matrix_beside_a_tied_one_is_refused(pair, tmp_path):
    """Transformers reads such a folder with two matrices, whatever its config.json says."""
    folder = Path(shutil.copytree(pair("qwen3").folder, tmp_path / "hf"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    assert import_folder(folder).objective.model.tied_head
    save_file(tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight; this model ties them"):
        import_folder(folder)


@pytest.mark.parametrize("name", POST)
def test_names_of_the_class_and_of_older_files(name, pair, tmp_path):
    """Also of a fine-tuned model, which has a pooler."""
    theirs, folder, imported = pair(name)
    task = transformers.AutoModelForSequenceClassification.from_config(theirs.config)
    for model, kind in ((theirs, "masked"), (task, "task")):
        files = {form: Path(shutil.copytree(folder, tmp_path / f"{kind}_{form}")) for form in ("new", "class", "old")}
        model.save_pretrained(files["new"])
        model.save_pretrained(files["class"], save_original_format=False)
        model.save_pretrained(files["old"])
        file, prefix = files["old"] / "model.safetensors", {"nomic_bert": "bert.", "gte": "new."}[name]
        tensors = {key.replace(f"{name}.", prefix): value for key, value in load_file(file).items()}
        save_file(tensors, file)
        assert f"{name}.layers.2.self_attn.q_proj.weight" in load_file(files["class"] / "model.safetensors")
        assert any(key.startswith(prefix) for key in tensors)
        first, *others = (import_folder(path) for path in files.values())
        for other in others:
            assert other.objective.model == imported.objective.model and not other.fresh
            assert jax.tree.all(jax.tree.map(np.array_equal, first.params, other.params))


@pytest.mark.slow  # the suite has the logits
@pytest.mark.parametrize("name", POST)
def test_masks_are_filled_as_by_the_class(name, pair, tmp_path):
    imported, mask = pair(name).ours, SYMBOLS[name][0]["mask"]
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (pair(name).folder, out))
    texts = [f"the cat {mask} on the mat", f"{mask} ran", f"under the {mask}, then it ran under the tree"]
    assert before(texts).data == after(texts).data and before(*texts[:2]).data == after(*texts[:2]).data
    assert ("token_type_ids" in after(texts).data) == (name == "nomic_bert")
    library = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out), top_k=3)
    for text, answers in zip(texts, fill_mask(imported, texts, 3), strict=True):
        np.testing.assert_allclose([p for _, p in answers[0]], [each["score"] for each in library(text)], atol=1e-5)


@pytest.mark.slow  # the suite has the loss and gradients of one step
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_twenty_steps_as_in_pytorch(name, tmp_path):
    theirs = save(name, tmp_path).train()
    theirs.get_input_embeddings().padding_idx = None  # EuroBERT's end symbol, which ends our rows, is its padding too
    imported, steps, count = import_folder(tmp_path), 20, 8
    objective = imported.objective.bind(imported.tokenizer.vocabulary, LENGTH)
    optimizer, mesh = OptimizerConfig(learning_rate=3e-3, warmup_steps=5), make_mesh(MeshConfig(), jax.devices()[:1])
    program = Program(objective, TrainConfig(steps=steps, batch_size=count, seed=3), optimizer, mesh)
    state = program.init_state(jax.tree.map(jnp.asarray, imported.params))
    # The names of the class, in which its parameters are.
    family = family_of(objective)
    source = Source(tmp_path, {}, dict(theirs.named_parameters()))
    models = family.stored_models(objective, source) if family.stored_models else family.models(objective)
    table = models[0].table
    entries = [dataclasses.replace(entry, theirs=entry.theirs.replace("lm_head.norm", "lm_head.layer_norm"))
               for entry in table.entries]
    table = dataclasses.replace(table, entries=tuple(entries))
    adamw, ours, reference = TorchAdamW(theirs, table, state.params, optimizer, steps), [], []
    corrupt = jax.jit(objective.corrupt)
    for step in range(steps):
        length, is_full = objective.row_format(LENGTH).length, objective.is_causal
        given = test_modernbert.rows(objective.vocabulary, length, count, step, is_full)
        loss = test_modernbert.torch_loss(theirs, corrupt(corruption_key(3, step), given))
        adamw.step(loss)
        reference.append(loss.item())
        state, terms = program.train_step(state, given, ())
        ours.append(float(terms["loss"].total))
    assert reference[0] - min(reference) > 0.1, "the model learns, or the comparison says little"
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("types", "pair_of_texts"), first_fast([
    (2, "cls $A sep $B:1 sep:1"), (0, "cls $A sep sep $B sep"), (1, "cls $A sep sep $B sep"),
]))
def test_segment_types_of_gte(types, pair_of_texts, tmp_path):
    """None in gte-base-en, one in the multilingual models, BERT's two in gte-large-en."""
    theirs = save("gte", tmp_path, type_vocab_size=types)
    imported = import_folder(tmp_path)
    assert imported.objective.model.template.pair == pair_of_texts
    given = example(False, types or 1)
    (_, logits), _ = forward_and_backward(imported.objective, imported.params, given)
    assert difference(logits, torch_loss(theirs, False)[1]) < TOLERANCE
