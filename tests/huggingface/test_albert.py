"""ALBERT against AlbertForPreTraining and AlbertForMaskedLM: both directions, twenty steps of LAMB, published sizes."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.config.presets import load_preset
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.families import family_of
from jaxlm.models.albert import Albert
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.sentence_order import SENTENCE_ORDER
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training.optimizers import make_schedule
from jaxlm.training.program import Program, corruption_key
from jaxlm.types import TokenBatch
from tests.huggingface.support import VOCAB, batch, read_json, real, save_torch, torch_outputs
from tests.params import first_fast, random_params

TOLERANCE = 1e-4
# One group and several, also of unequal sizes; embeddings narrower than the layers and as wide.
CONFIGS = {
    "shared": dict(embedding_size=8, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
                   max_position_embeddings=40, hidden_act="gelu_new"),
    "groups": dict(embedding_size=24, hidden_size=24, num_hidden_layers=5, num_hidden_groups=2, num_attention_heads=2,
                   intermediate_size=40, max_position_embeddings=33, hidden_act="gelu", layer_norm_eps=1e-6),
}


def torch_albert(name: str, architecture: str = "AlbertForPreTraining") -> torch.nn.Module:
    """Return a model with random weights; zero biases and unit norms would hide a mix-up."""
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**(CONFIGS[name] | dict(vocab_size=len(VOCAB), bos_token_id=2, eos_token_id=3)))
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(model, sentence_order, params, inputs):
    hidden = model.hidden_states(params, Inputs.of(inputs))
    order = SENTENCE_ORDER.predict(model, params, hidden) if sentence_order else None
    return model.predict_tokens(params, hidden), order


def difference(objective: MaskedLM, params, theirs: torch.nn.Module, length: int, padded: bool) -> float:
    inputs = batch(objective.model, length, padded, seed=length)
    has_order = objective.input_format == "sentence-order"
    logits, order = run(objective.model, has_order, params, inputs)
    outputs = torch_outputs(theirs, inputs)
    expected = outputs.prediction_logits if has_order else outputs.logits
    pairs = [(real(logits, inputs), real(expected.numpy(), inputs))]
    if has_order:
        pairs.append((np.asarray(order), outputs.sop_logits.numpy()))
    assert all(np.abs(b).max() > 0.1 for _, b in pairs)  # agreement on zeros would prove nothing
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize("architecture", first_fast(["AlbertForPreTraining", "AlbertForMaskedLM"]))
@pytest.mark.parametrize("name", first_fast(CONFIGS))
def test_imported_logits_and_exported_tensors(name, architecture, tmp_path, vocab_file):
    theirs = torch_albert(name, architecture)
    source = save_torch(theirs, tmp_path / "hf", vocab_file)
    imported = import_folder(source)
    assert not imported.fresh
    assert imported.objective.model.num_groups == CONFIGS[name].get("num_hidden_groups", 1)
    assert (imported.objective.input_format == "sentence-order") == (architecture == "AlbertForPreTraining")
    for length, padded in ((31, True), (31, False)):
        assert difference(imported.objective, imported.params, theirs, length, padded) < TOLERANCE
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("sentence_order", first_fast([True, False]))
def test_exported_logits(sentence_order, tmp_path, tokenizer: Tokenizer):
    model = Albert(
        embedding_size=12, hidden_size=32, num_layers=4, num_groups=2, num_heads=2, intermediate_size=48,
        max_positions=40,
    )
    objective = MaskedLM(model=model, input_format="sentence-order" if sentence_order else "document")
    objective = objective.bind(tokenizer.vocabulary, 40)
    params = random_params(objective, 1)
    out = export_folder(tmp_path / "out", objective, params, tokenizer, ModelCard())
    auto = transformers.AutoModelForPreTraining if sentence_order else transformers.AutoModelForMaskedLM
    theirs, report = auto.from_pretrained(out, output_loading_info=True)
    assert type(theirs).__name__ == ("AlbertForPreTraining" if sentence_order else "AlbertForMaskedLM")
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for length, padded in ((33, True), (33, False)):
        assert difference(objective, params, theirs.eval(), length, padded) < TOLERANCE
    v, config = tokenizer.vocabulary, read_json(out / "config.json")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (v.cls, v.sep, v.pad)
    a, b = tokenizer.encode("the cat sat"), tokenizer.encode("it was old")
    encoded = transformers.AutoTokenizer.from_pretrained(out)("the cat sat", "it was old")
    assert encoded["input_ids"] == [v.cls, *a, v.sep, *b, v.sep]
    assert encoded["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    imported = import_folder(out)
    assert imported.objective.model == objective.model
    jax.tree.map(np.testing.assert_array_equal, imported.params, params)


def test_heads_without_a_counterpart_are_left_out(tmp_path, tokenizer: Tokenizer):
    """Next sentence on an ALBERT and sentence order on a BERT are exported as masked language models."""
    small = dict(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=40)
    for number, objective in enumerate((
        MaskedLM(model=Albert(**small)),
        MaskedLM(model=Bert(**small), input_format="sentence-order"),
    )):
        objective = objective.bind(tokenizer.vocabulary, 40)
        params = random_params(objective, 1)
        out = export_folder(tmp_path / str(number), objective, params, tokenizer, ModelCard())
        assert read_json(out / "config.json")["architectures"][0].endswith("ForMaskedLM")


def test_repeated_inner_layers_are_refused(tmp_path, vocab_file):
    CONFIGS["inner"] = CONFIGS["shared"] | dict(inner_group_num=2)
    source = save_torch(torch_albert("inner"), tmp_path / "hf", vocab_file)
    del CONFIGS["inner"]
    with pytest.raises(UserError, match="inner_group_num is 2"):
        import_folder(source)


LENGTH, ROWS, STEPS = 32, 8, 20


def tokens(step: int) -> TokenBatch:
    """Return rows of all lengths, with sentence ends by id."""
    draw = np.random.default_rng(step)
    real = np.arange(LENGTH - 3) < draw.integers(4, LENGTH - 2, ROWS)[:, None]
    ids = np.where(real, draw.integers(107, 160, real.shape), 0).astype(np.int32)
    return TokenBatch(ids, np.where(real, 1 + np.arange(ROWS)[:, None], 0).astype(np.int32))


def torch_lamb(named: list[tuple[str, torch.nn.Parameter]], state: dict, rate: float) -> None:
    """Take one step of the original LAMB: uncorrected moments, trust ratio for matrices only."""
    torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
    with torch.no_grad():
        for name, p in named:
            m, v = state.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
            m.mul_(0.9).add_(0.1 * p.grad)
            v.mul_(0.999).add_(0.001 * p.grad**2)
            update = m / (v.sqrt() + 1e-6)
            if name.endswith("weight") and "LayerNorm" not in name and "layer_norm" not in name:
                update = update + 0.01 * p
                update = update * p.norm() / update.norm()
            p.sub_(rate * update)
            p.grad = None


@pytest.mark.slow
def test_twenty_steps_of_lamb_as_in_pytorch():
    model = Albert(
        embedding_size=16, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_positions=LENGTH,
        dropout=0.0, attention_dropout=0.0,
    )
    objective = MaskedLM(
        model=model, input_format="sentence-order", longest_ngram=3, short_rate=0.0
    ).bind(Vocabulary.stand_in(160), LENGTH)
    optimizer = OptimizerConfig(name="lamb", learning_rate=0.02, warmup_steps=5, bias_correction=False)
    train = TrainConfig(steps=STEPS, batch_size=ROWS, seed=3)
    program = Program(objective, train, optimizer, make_mesh(MeshConfig(), jax.devices()[:1]))
    state = program.init_state(program.init_params(0))
    # Second moments and parameters exist once for all layers that share them.
    assert state.params["encoder"]["layers"]["mlp"]["wi"]["kernel"].shape[0] == 1
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) < 2 * size + 10

    (counterpart,) = family_of(objective).models(objective)
    theirs = transformers.AlbertForPreTraining(
        transformers.AlbertConfig(**counterpart.config, attn_implementation="eager")
    ).train()
    weights = counterpart.table.to_transformers(jax.device_get(state.params))
    loaded = theirs.load_state_dict({name: torch.tensor(np.array(value)) for name, value in weights}, strict=False)
    assert not loaded.unexpected_keys and all("decoder" in name for name in loaded.missing_keys), loaded.missing_keys
    moments, rate, ours, reference = {}, make_schedule(optimizer, STEPS), [], []
    corrupt = jax.jit(objective.corrupt)
    for step in range(STEPS):
        example = jax.device_get(corrupt(corruption_key(3, step), tokens(step)))
        labels = np.full(example["input_ids"].shape, -100, np.int64)
        rows, slots = np.nonzero(example["masked_weights"])
        labels[rows, example["masked_positions"][rows, slots]] = example["masked_labels"][rows, slots]
        inputs = {name: torch.tensor(example[name].astype(np.int64))
                  for name in ("input_ids", "token_type_ids", "attention_mask")}
        order = torch.tensor(example["sentence_order_labels"].astype(np.int64))
        loss = theirs(**inputs, labels=torch.tensor(labels), sentence_order_label=order).loss
        loss.backward()
        torch_lamb(list(theirs.named_parameters()), moments, float(rate(step)))
        reference.append(loss.item())
        state, terms = program.train_step(state, tokens(step), ())
        ours.append(float(terms["loss"].total))
    assert reference[0] - min(reference) > 0.3, "the model learns, or the comparison says little"
    np.testing.assert_allclose(ours, reference, atol=1e-3)


# AlbertForMaskedLM, AlbertForPreTraining and AlbertModel; published as 12M, 18M, 60M, 235M (Lan et al. 2019, table 1).
@pytest.mark.parametrize(
    ("size", "masked_lm", "pretraining", "bare"),
    first_fast([
        ("base", 11_221_680, 11_813_810, 11_683_584), ("large", 16_795_824, 17_847_474, 17_683_968),
        ("xlarge", 54_821_040, 59_021_490, 58_724_864), ("xxlarge", 206_368_944, 223_158_450, 222_595_584),
    ]),
)
def test_published_recipes(size, masked_lm, pretraining, bare):
    experiment = load_preset(str(Path(__file__).parents[2] / "configs" / f"albert_{size}.py"))
    objective, o, t = experiment.objective, experiment.optimizer, experiment.train

    def count(objective, *without: str) -> int:
        shapes = jax.eval_shape(objective.init, jax.random.key(0))
        return sum(leaf.size for name, tree in shapes.items() if name not in without for leaf in jax.tree.leaves(tree))

    assert count(objective) == pretraining
    assert count(objective, "pooler", "sop_head") == masked_lm
    assert count(objective, "mlm_head", "sop_head") == bare
    # google-research/albert, README: the pretraining command.
    assert (o.name, o.learning_rate, o.warmup_steps, o.schedule) == ("lamb", 0.00176, 3125, "linear")
    assert (o.b1, o.b2, o.eps, o.weight_decay, o.clip_norm, o.bias_correction) == (0.9, 0.999, 1e-6, 0.01, 1.0, False)
    assert (t.steps, t.batch_size, experiment.data.length, experiment.data.vocab_size) == (125_000, 4096, 512, 30_000)
    assert (objective.whole_word, objective.longest_ngram, objective.num_slots(512)) == (True, 3, 20)
    assert (objective.input_format, objective.short_rate) == ("sentence-order", 0.1)
