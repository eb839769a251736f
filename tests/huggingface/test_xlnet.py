"""XLNet against XLNetLMHeadModel: logits with memory, orders and segments; the same greedy continuations."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxlm.analysis.recipes import RECIPES
from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.config.presets import load_preset
from jaxlm.data.labelled import Record
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.xlnet import FAMILY
from jaxlm.inference.generate import generate
from jaxlm.models.base import Inputs
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tasks.answers import Answers
from jaxlm.tokenizers.export import export
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.program import Program, corruption_key, gradients
from jaxlm.types import TokenBatch
from tests.huggingface.support import TorchAdamW, load_into, read_json
from tests.params import first_fast

TOLERANCE = 1e-4
CONFIGS = {
    "a": dict(d_model=32, n_layer=2, n_head=4, d_inner=64, ff_activation="gelu", mem_len=24),
    "b": dict(d_model=24, n_layer=3, n_head=3, d_inner=40, ff_activation="gelu_new", layer_norm_eps=1e-5, mem_len=5),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    texts = [" ".join(f"{a}{b}s the tree, {b}{a}" for a in "abcdefgh") + "." for b in "klmnopqrst"]
    return train_tokenizer(texts, tmp_path_factory.mktemp("bpe"), kind="byte-bpe", vocab_size=420)


def torch_xlnet(name: str, tokenizer: Tokenizer, seed: int = 0, **changes) -> transformers.XLNetLMHeadModel:
    """Return a model with random weights; zero biases and unit norms would hide a mix-up."""
    torch.manual_seed(seed)
    v = tokenizer.vocabulary
    symbols = dict(pad_token_id=v.pad, bos_token_id=v.bos, eos_token_id=v.eos)
    config = transformers.XLNetConfig(**(CONFIGS[name] | symbols | dict(vocab_size=v.size, dropout=0.0) | changes))
    model = transformers.XLNetLMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: torch.nn.Module, folder: Path, tokenizer: Tokenizer) -> Path:
    model.save_pretrained(folder)
    export(tokenizer, folder, Xlnet.template, 40)
    return folder


def rows(vocabulary, length: int, memory: int, model: Xlnet, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random ids, segments, orders, predicted positions, and a memory of every layer."""
    rng = np.random.default_rng(seed)
    rank = rng.integers(0, length, (3, length))
    return {
        "input_ids": rng.integers(0, vocabulary.size, (3, length)),
        "token_type_ids": np.sort(rng.integers(0, 3, (3, length)), axis=1),
        "rank": rank, "limit": rank + rng.integers(0, 2, (3, length)),
        "positions": np.stack([rng.permutation(length)[:4] for _ in range(3)]),
        "memory": rng.normal(size=(3, model.num_layers, memory, model.hidden_size)).astype(np.float32)
        if memory else None,
    }


@functools.partial(jax.jit, static_argnums=0)
def ours(model, params, inputs):
    rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "token_type_ids")}
    streams = model.streams(params, Inputs.of(inputs), **rest)
    return model.predict_tokens(params, streams.query), model.predict_tokens(params, streams.content), streams.entered


def compare(model: Xlnet, params, theirs, vocabulary, length: int, memory: int) -> None:
    """Compare the logits of both streams, and the hidden states for the memory."""
    inputs = rows(vocabulary, length, memory, model)
    query, content, states = ours(model, params, inputs)
    fed = dict(
        input_ids=torch.tensor(inputs["input_ids"]), token_type_ids=torch.tensor(inputs["token_type_ids"]),
        perm_mask=torch.tensor(inputs["rank"][:, None, :] >= inputs["limit"][:, :, None]).float(),
        mems=None if inputs["memory"] is None else list(torch.tensor(inputs["memory"]).permute(1, 2, 0, 3)),
        use_mems=True,
    )
    mapping = torch.tensor(np.eye(length, dtype=np.float32)[inputs["positions"]])
    with torch.no_grad():
        two, one = theirs(**fed, target_mapping=mapping), theirs(**fed)
    assert two.logits.abs().max() > 0.3  # agreement on zeros would prove nothing
    assert np.abs(query - two.logits.numpy()).max() < TOLERANCE
    assert np.abs(content - one.logits.numpy()).max() < TOLERANCE
    for mine, new in zip(states, two.mems, strict=True):
        kept = min(length, theirs.config.mem_len)
        np.testing.assert_allclose(mine[:, length - kept :], new[-kept:].transpose(0, 1), atol=TOLERANCE)


@pytest.mark.parametrize("name", first_fast(CONFIGS))
def test_imported_logits(name, tokenizer, tmp_path):
    theirs = torch_xlnet(name, tokenizer)
    imported = import_folder(save(theirs, tmp_path / "hf", tokenizer))
    assert not imported.fresh
    assert imported.objective.memory_length == CONFIGS[name]["mem_len"]
    for length, memory in ((7, 0), (10, 24)):
        compare(imported.objective.model, imported.params, theirs, tokenizer.vocabulary, length, memory)
    # Exported again, as a folder that Transformers loads.
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    again, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(again) is transformers.XLNetLMHeadModel
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert import_folder(out).objective.model == imported.objective.model


@pytest.mark.parametrize("is_backward", first_fast([0, 1]))
def test_rows_of_both_directions_are_the_halves_of_their_bidirectional_batch(is_backward, tokenizer, tmp_path):
    """With `bi_data` the second half of a batch has negated distances."""
    theirs = torch_xlnet("a", tokenizer)
    imported = import_folder(save(theirs, tmp_path / "hf", tokenizer))
    theirs.transformer.bi_data = True
    ids = np.random.default_rng(0).integers(0, tokenizer.vocabulary.size, (4, 9))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    flags = np.repeat([0, 1], 2)
    _, content, _ = ours(imported.objective.model, imported.params, dict(
        input_ids=ids, is_backward=flags, positions=np.zeros((4, 1), int)
    ))
    assert np.abs(content - expected)[flags == is_backward].max() < TOLERANCE


@pytest.mark.slow
def test_the_loss_and_gradients_of_a_training_step_are_theirs(tokenizer, tmp_path):
    """Two rows of a stream, one per direction, after a memory that is not empty."""
    theirs = torch_xlnet("a", tokenizer).train()
    theirs.transformer.bi_data = True
    imported = import_folder(save(theirs, tmp_path / "hf", tokenizer))
    objective = PermutationLM(model=imported.objective.model, memory_length=24).bind(tokenizer.vocabulary, 32)
    rng = np.random.default_rng(0)
    tokens = rng.integers(120, tokenizer.vocabulary.size - 110, (2, objective.row_format(32).length)).astype(np.int32)
    example = objective.corrupt(jax.random.key(0), TokenBatch(tokens, np.ones_like(tokens)))
    memory = rng.normal(size=objective.initial_memory(2).shape).astype(np.float32)
    example = jax.device_get(example)
    found, terms, carried = jax.jit(functools.partial(gradients, objective))(
        imported.params, example, memory, key=jax.random.key(0)
    )
    output = theirs(
        input_ids=torch.tensor(example["input_ids"]), token_type_ids=torch.tensor(example["token_type_ids"]).long(),
        perm_mask=torch.tensor(example["rank"][:, None, :] >= example["limit"][:, :, None]).float(),
        target_mapping=torch.tensor(np.eye(32, dtype=np.float32)[example["positions"]] * example["weights"][..., None]),
        labels=torch.tensor(np.where(example["weights"] > 0, example["labels"], -100)).long(),
        mems=list(torch.tensor(memory).permute(1, 2, 0, 3)), use_mems=True,
    )
    output.loss.backward()
    assert float(terms["loss"].total) == pytest.approx(float(output.loss.detach()), abs=TOLERANCE)
    table = FAMILY.models(objective)[0].table
    named = dict(theirs.named_parameters())
    for name, gradient in table.to_transformers(jax.device_get(found)):
        np.testing.assert_allclose(gradient, named[name].grad.numpy(), atol=TOLERANCE, err_msg=name)
    # Without reuse_len theirs holds the last 24 of all 32 tokens; ours appends the first 16 to the old memory.
    for mine, new, old in zip(carried.swapaxes(0, 1), output.mems, memory.swapaxes(0, 1), strict=True):
        np.testing.assert_array_equal(mine[:, :8], old[:, 16:])
        np.testing.assert_allclose(mine[:, 16:], new[:8].transpose(0, 1), atol=TOLERANCE)


@pytest.mark.slow
def test_the_peer_of_a_benchmark_has_the_same_loss(tokenizer, tmp_path):
    theirs = torch_xlnet("a", tokenizer).train()
    imported = import_folder(save(theirs, tmp_path / "hf", tokenizer))
    objective = PermutationLM(model=imported.objective.model, memory_length=8).bind(tokenizer.vocabulary, 32)
    tokens = np.random.default_rng(0).integers(120, 300, (4, 29)).astype(np.int32)
    example = objective.corrupt(jax.random.key(0), TokenBatch(tokens, np.ones_like(tokens)))
    run = jax.jit(functools.partial(objective.stream_loss, key=jax.random.key(0), train=False))
    terms, _ = run(imported.params, example, objective.initial_memory(4))
    recipe = RECIPES["permutation_lm"]
    recipe.share(objective, [theirs])
    inputs = recipe.inputs(objective, jax.device_get(example))
    found = recipe.loss(objective, [theirs], {name: torch.tensor(x.astype(np.int64)) for name, x in inputs.items()})
    assert float(found.detach()) == pytest.approx(float(total_loss(terms)), abs=TOLERANCE)


@pytest.mark.slow
def test_twenty_steps_of_a_stream_as_in_pytorch():
    """Both directions, with the memory of earlier steps and its `reuse_len`, without dropout."""
    length, count, steps = 32, 8, 20
    model = Xlnet(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, dropout=0.0, attention_dropout=0.0)
    objective = PermutationLM(model=model, memory_length=24).bind(Vocabulary.stand_in(160), length)
    optimizer = OptimizerConfig(learning_rate=0.01, warmup_steps=5)
    train = TrainConfig(steps=steps, batch_size=count, seed=3)
    program = Program(objective, train, optimizer, make_mesh(MeshConfig(), jax.devices()[:1]))
    state = program.init_state(program.init_params(0))
    (counterpart,) = FAMILY.models(objective)
    config = transformers.XLNetConfig(**(counterpart.config | dict(reuse_len=length // 2, bi_data=True)))
    theirs = load_into(transformers.XLNetLMHeadModel(config), counterpart.table, state.params).train()
    adamw = TorchAdamW(theirs, counterpart.table, state.params, optimizer, steps)
    # Their batch has the backward rows after the forward ones.
    order = np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)])
    mems = [torch.zeros(24, count, 32) for _ in range(2)]
    text = np.random.default_rng(0).choice(np.arange(110, 160), (count, 400), p=np.arange(1, 51) / 1275)
    ours, reference, corrupt, raw = [], [], jax.jit(objective.corrupt), objective.row_format(length).length
    for step in range(steps):
        start = np.where(np.arange(count) % 2, 370 - step * 16 - raw, step * 16)[:, None]
        tokens = np.take_along_axis(text, start + np.arange(raw), axis=1).astype(np.int32)
        given = TokenBatch(tokens, np.ones_like(tokens))
        example = jax.device_get(corrupt(corruption_key(3, step), given))
        example = {name: value[order] for name, value in example.items()}
        used = example["weights"] > 0
        output = theirs(
            input_ids=torch.tensor(example["input_ids"]), token_type_ids=torch.tensor(example["token_type_ids"]).long(),
            perm_mask=torch.tensor(example["rank"][:, None, :] >= example["limit"][:, :, None]).float(),
            # Zeros in unused slots: their class adds up the queries of slots at one position.
            target_mapping=torch.tensor(np.eye(length, dtype=np.float32)[example["positions"]] * used[..., None]),
            labels=torch.tensor(np.where(used, example["labels"], -100)).long(), mems=mems, use_mems=True,
        )
        mems = output.mems
        adamw.step(output.loss)
        reference.append(output.loss.item())
        state, terms = program.train_step(state, given, ())
        ours.append(float(terms["loss"].total))
    assert reference[0] - min(reference) > 0.3, "the model learns, or the comparison says little"
    np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-5)
    for mine, other in zip(state.memory.swapaxes(0, 1), mems, strict=True):
        np.testing.assert_allclose(np.asarray(mine)[order], other.transpose(0, 1), atol=1e-4)


@pytest.mark.slow
def test_greedy_continuations_are_theirs(tokenizer, tmp_path):
    theirs = torch_xlnet("a", tokenizer, seed=2)
    imported = import_folder(save(theirs, tmp_path / "hf", tokenizer))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, tokenizer.vocabulary.size, n).tolist() for n in (3, 9, 1, 14)]
    wanted = []
    for prompt in prompts:
        with torch.no_grad():
            out = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=6, do_sample=False, use_mems=False, eos_token_id=None,
            )
        wanted.append(out[0, len(prompt) :].tolist())
    assert len({tuple(row) for row in wanted}) > 2  # the prompts have an effect
    assert generate(imported.objective, imported.params, prompts, max_new_tokens=6, stop_ids=()) == wanted


def test_tokenizer(tokenizer, tmp_path):
    """`A <sep> <cls>`, `A <sep> B <sep> <cls>`, padded on the left, as in XLNetTokenizer."""
    objective = PermutationLM(model=Xlnet(hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8))
    objective = objective.bind(tokenizer.vocabulary, 32)
    params = jax.device_get(jax.jit(objective.init)(jax.random.key(0)))
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    theirs, v = transformers.AutoTokenizer.from_pretrained(out), tokenizer.vocabulary
    first, second = "aks the tree,", "ka"
    a, b = tokenizer.encode(first), tokenizer.encode(second)
    assert theirs(first)["input_ids"] == [*a, v.sep, v.cls]
    pair = theirs(first, second)
    assert pair["input_ids"] == [*a, v.sep, *b, v.sep, v.cls]
    assert pair["token_type_ids"] == [0] * (len(a) + 1) + [1] * (len(b) + 1) + [2]
    assert theirs([first, second], padding=True)["input_ids"][1][0] == v.pad


def test_answers_read_the_passage_first(tokenizer, tmp_path):
    """Passage, sep, question, sep, cls, in segments 0, 1 and 2, as the official run_squad.py."""
    task = Answers(model=Xlnet(hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8))
    task, v = task.bind(tokenizer.vocabulary, 48), tokenizer.vocabulary
    passage, question = "aks the tree,", "ka"
    a, b = tokenizer.encode(passage), tokenizer.encode(question)
    for start, text, kind in (4, "the", "span"), (-1, "", "unknown"):
        values = {"passage": passage, "question": question, "start": start, "text": text, "kind": kind}
        (example,) = task.encode([Record("0", "here", values, ())], tokenizer, 48)
        ids, span = example.arrays["input_ids"].tolist(), slice(example.arrays["start"], example.arrays["end"] + 1)
        assert ids == [*a, v.sep, *b, v.sep, v.cls]
        assert example.arrays["token_type_ids"].tolist() == [0] * (len(a) + 1) + [1] * (len(b) + 1) + [2]
        assert text in tokenizer.decode(ids[span]) if text else ids[span] == [v.cls]
    export(tokenizer, tmp_path, task.text_template, 48)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(passage, question)["input_ids"] == ids


@pytest.mark.parametrize("key, value", [
    ("attn_type", "uni"), ("same_length", True), ("clamp_len", 5), ("d_head", 3), ("reuse_len", 8),
])
def test_unsupported_configurations_are_refused(key, value, tmp_path, tokenizer):
    folder = save(torch_xlnet("a", tokenizer), tmp_path / "hf", tokenizer)
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | {key: value}))
    with pytest.raises(UserError, match=key):
        import_folder(folder)


# Published sizes; parameters of XLNetLMHeadModel.
@pytest.mark.parametrize(("size", "parameters"), first_fast([("base", 116_750_336), ("large", 360_300_800)]))
def test_published_recipes(size, parameters):
    experiment = load_preset(str(Path(__file__).parents[2] / "configs" / f"xlnet_{size}.py"))
    shapes = jax.eval_shape(experiment.objective.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
    o, t, objective = experiment.optimizer, experiment.train, experiment.objective
    assert (o.name, o.schedule, o.weight_decay, o.clip_norm, o.bias_correction) == ("adamw", "linear", 0.01, 1.0, False)
    assert (experiment.data.length, objective.memory_length, objective.row_format(512).stride) == (512, 384, 256)
    assert round(objective.predict_share * 512) == 85 and not t.phases
