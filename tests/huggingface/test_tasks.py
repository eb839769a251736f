"""Fine-tuned models against the classes of Transformers, in both directions."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxlm import systems
from jaxlm.data.labelled import LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface.families import family_of
from jaxlm.huggingface.tasks import pretraining_objective
from jaxlm.models.albert import Albert
from jaxlm.models.bert import Bert
from jaxlm.models.deberta import Deberta
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import ElectraEncoder
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.llama import EuroBert, Gemma3, Llama, Mistral, Qwen3
from jaxlm.models.modernbert import ModernBert, ModernBertDecoder
from jaxlm.models.roberta import Roberta
from jaxlm.models.rotary_bert import Gte, NomicBert
from jaxlm.models.t5 import T5
from jaxlm.models.xlm_roberta import XlmRoberta
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.base import class_of, total_loss
from jaxlm.tasks.answers import Answers
from jaxlm.tasks.classification import Classification
from jaxlm.tasks.distillation import DistilledClassification
from jaxlm.tasks.multiple_choice import MultipleChoice
from jaxlm.tasks.tagging import Tagging
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.huggingface.support import read_json
from tests.params import first_fast, random_params

TOLERANCE = 1e-4
LENGTH = 37
SIZES = dict(hidden_size=24, num_layers=2, num_heads=2, intermediate_size=40)
MODELS = {
    Bert: Bert(**SIZES, max_positions=37),
    Roberta: Roberta(**SIZES, max_positions=37, activation="gelu_new"),
    XlmRoberta: XlmRoberta(**SIZES, max_positions=37),
    Albert: Albert(**SIZES, max_positions=37, embedding_size=12),
    Distilbert: Distilbert(**SIZES, max_positions=37),
    ElectraEncoder: ElectraEncoder(**SIZES, max_positions=37, embedding_size=12),
    Deberta: Deberta(**SIZES, max_positions=37, position_buckets=8),
    Xlnet: Xlnet(**SIZES),
    Gpt1: Gpt1(**SIZES | dict(intermediate_size=96), max_positions=37),
    Gpt2: Gpt2(**SIZES, max_positions=37),
    ModernBert: ModernBert(**SIZES, max_positions=37, local_attention=6, classifier_pooling="mean"),
    ModernBertDecoder: ModernBertDecoder(**SIZES, max_positions=37, local_attention=6),
    EuroBert: EuroBert(**SIZES, max_positions=37, num_kv_heads=1, head_dim=12),
    NomicBert: NomicBert(**SIZES, max_positions=37),
    Gte: Gte(**SIZES, max_positions=37, activation="gelu", type_vocab_size=1),
    Llama: Llama(**SIZES, max_positions=37, num_kv_heads=1, head_dim=12),
    Qwen3: Qwen3(**SIZES, max_positions=37, num_kv_heads=1, head_dim=12),
    Mistral: Mistral(**SIZES, max_positions=37, num_kv_heads=1, head_dim=12, window=6),
    Gemma3: Gemma3(**SIZES, max_positions=37, num_kv_heads=1, head_dim=12, window=6, global_period=2),
}
SETTINGS = {
    Classification: dict(labels=("1", "fair", "good")), MultipleChoice: {},
    Tagging: dict(labels=("B-x", "I-x", "O"), metric="entities"),
    Answers: dict(no_answer=True, null_threshold=1.5, max_answer=7),
}
CASES = {
    head.architecture: (kind, model)
    for model in MODELS for kind in SETTINGS
    for name, head in family_of(pretraining_objective(Classification(model=MODELS[model]))).heads.items()
    if name == systems.task_of(kind()).head
}
"""Class of Transformers → our task and model."""
TEXTS = ("ak", "bks the tree, lb as a tree", "cm")
PAIRS = ("the tree, dn and eo", "fp", "then a tree, or the gq or the hr")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    texts = [" ".join(f"{a}{b}s the tree, {b}{a}" for a in "abcdefgh") + "." for b in "klmnopqrst"]
    made = train_tokenizer(texts, tmp_path_factory.mktemp("bpe"), kind="byte-bpe", vocab_size=420)
    return made.with_symbols(("[START]", "[DELIMITER]", "[EXTRACT]"))


def task_of(kind, model, tokenizer, **changes):
    return kind(model=MODELS[model], **(SETTINGS[kind] | changes)).bind(tokenizer.vocabulary, LENGTH)


def records(kind) -> list[Record]:
    """Return rows of very different lengths, each with two texts."""
    found = []
    for number, (text, other) in enumerate(zip(TEXTS, PAIRS, strict=True)):
        values = {
            Classification: {"text": text, "text_pair": other, "label": "1"},
            MultipleChoice: {"text": text, "question": "", "choices": [other, text], "label": 0},
            Tagging: {"words": other.split(), "tags": ["O"] * len(other.split())},
            Answers: {"question": text, "passage": other, "answers": [], "start": -1, "text": "",
                      "kind": "unknown"},
        }[kind]
        found.append(Record(str(number), "here", values, (text, other)))
    return found


def batch_of(task, tokenizer):
    rows = records(class_of(task))
    source = LabelledSource(tokenizer, {"held_out": rows}, False)
    (batch,) = source.batches("held_out", 3, task.row_format(LENGTH), 0).evaluation(3, 1)
    return batch


@functools.partial(jax.jit, static_argnums=0)
def our_logits(task, params, batch):
    """Return logits [batch, outputs], or [batch, length, outputs]."""
    return task.token_logits(params, batch, None) if isinstance(task, Tagging) else task.predict(params, batch)


def theirs_of(model, batch) -> np.ndarray:
    """Return their logits [batch, ...], or [tokens, outputs] of all tokens without padding."""
    with torch.no_grad():
        found = model(**{name: torch.tensor(array).long() for name, array in batch.items()})
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits], -1)[batch["attention_mask"] > 0].numpy()
    return (found.logits[batch["attention_mask"] > 0] if found.logits.ndim == 3 else found.logits).numpy()


def ours_of(task, params, batch) -> np.ndarray:
    found = our_logits(task, params, batch)
    if isinstance(task, Answers):
        found = np.stack([found["start"], found["end"]], -1)
    elif not isinstance(task, Tagging):
        return np.asarray(found["logits"])
    return np.asarray(found)[batch["attention_mask"] > 0]


def auto_class(kind):
    return getattr(transformers, f"AutoModelFor{systems.task_of(kind()).head}")


def compare(task, params, folder, tokenizer) -> None:
    """Compare logits of rows that their side encodes with the folder's own tokenizer."""
    model, info = auto_class(class_of(task)).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    batch = batch_of(task, tokenizer)
    ours = ours_of(task, params, batch)
    theirs = theirs_of(model.eval(), their_inputs(task, folder, batch))
    assert np.abs(theirs).max() > 100 * TOLERANCE  # agreement on zeros would prove nothing
    assert np.abs(ours - theirs).max() < TOLERANCE


def their_inputs(task, folder, batch):
    """Return their tokenizer's encoding of a batch; words of a sentence are our tokens."""
    template = task.template
    if isinstance(task, Tagging):
        inputs = {name: batch[name] for name in template.inputs}
        if template.padding_side == "left":
            sizes = batch["attention_mask"].sum(axis=1)
            inputs = {name: np.stack([np.roll(row, LENGTH - size) for row, size in zip(array, sizes, strict=True)])
                      for name, array in inputs.items()}
        return inputs
    texts = [(TEXTS[row], PAIRS[row]) for row in batch["row"]]
    if isinstance(task, MultipleChoice):
        texts = [pair for text, other in texts for pair in ((text, other), (text, text))]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    if isinstance(task, Answers) and template.padding_side == "left":  # run_qa.py gives the passage first
        texts = [pair[::-1] for pair in texts]
    firsts, seconds = map(list, zip(*texts, strict=True))
    inputs = dict(theirs(firsts, seconds, padding="max_length", max_length=LENGTH, return_tensors="np"))
    assert inputs.keys() == set(template.inputs)
    for name, array in inputs.items():  # the same tokens and segments as ours
        own, mask = (batch[name].reshape(-1, LENGTH) for name in (name, "attention_mask"))
        assert array[inputs["attention_mask"] > 0].tolist() == own[mask > 0].tolist()
    if isinstance(task, MultipleChoice):
        inputs = {name: array.reshape(3, 2, LENGTH) for name, array in inputs.items()}
    return inputs


def test_all_models_have_heads():
    assert len(CASES) == 54 and {model for _, model in CASES.values()} == MODELS.keys()


# The table of names is one for each kind of head: BERT has every kind, GPT-2 reads its last token, EuroBERT the mean
# after the dense layer.
@pytest.mark.parametrize("architecture", [
    pytest.param(name, marks=() if model is Bert or (kind is Classification and model in (Gpt2, EuroBert))
                 else pytest.mark.slow) for name, (kind, model) in CASES.items()
])
def test_logits_in_both_directions(architecture, tokenizer, tmp_path):
    kind, model = CASES[architecture]
    task = task_of(kind, model, tokenizer)
    params = random_params(task, 0)
    out = export_folder(tmp_path / "out", task, params, tokenizer, ModelCard())
    assert read_json(out / "config.json")["architectures"] == [architecture]
    compare(task, params, out, tokenizer)

    # A model of theirs with the same configuration and other weights.
    torch.manual_seed(1)
    theirs = auto_class(kind).from_config(transformers.AutoConfig.from_pretrained(out))
    assert type(theirs).__name__ == architecture
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(out)
    imported = import_folder(out)
    assert not imported.fresh
    assert imported.objective == dataclasses.replace(task, vocabulary=imported.objective.vocabulary)
    assert all(getattr(imported.objective, name) == value for name, value in SETTINGS[kind].items())
    compare(task, imported.params, out, tokenizer)


@pytest.mark.slow
def test_a_modernbert_that_reads_its_first_token(tokenizer, tmp_path):
    """The other pooling than in `MODELS`; the same weights give other logits."""
    mean = task_of(Classification, ModernBert, tokenizer)
    task = dataclasses.replace(mean, model=dataclasses.replace(mean.model, classifier_pooling="cls"))
    params = random_params(task, 0)
    out = export_folder(tmp_path / "out", task, params, tokenizer, ModelCard())
    compare(task, params, out, tokenizer)
    imported = import_folder(out)
    assert imported.objective.model == task.model
    compare(imported.objective, imported.params, out, tokenizer)
    batch = batch_of(task, tokenizer)
    assert np.abs(ours_of(task, params, batch) - ours_of(mean, params, batch)).max() > 10 * TOLERANCE


def test_a_distilled_model_is_imported_as_a_plain_classifier(tokenizer, tmp_path):
    task = task_of(Classification, Bert, tokenizer)
    distilled = DistilledClassification(model=task.model, labels=task.labels, layer_weight=1.0, teacher="T")
    distilled = distilled.bind_unchecked(task.vocabulary)
    params = random_params(distilled, 0)
    assert "projection_to_teacher" in params
    imported = import_folder(export_folder(tmp_path / "out", distilled, params, tokenizer, ModelCard()))
    assert class_of(imported.objective) is Classification and imported.objective.labels == task.labels
    compare(task, imported.params, tmp_path / "out", tokenizer)


@pytest.mark.slow
def test_a_numeric_target_is_a_regression(tokenizer, tmp_path):
    task = task_of(Classification, Bert, tokenizer, labels=(), target="number")
    params = random_params(task, 0)
    out = export_folder(tmp_path / "out", task, params, tokenizer, ModelCard())
    compare(task, params, out, tokenizer)
    theirs = transformers.AutoConfig.from_pretrained(out)
    assert (theirs.problem_type, theirs.num_labels) == ("regression", 1)
    assert import_folder(out).objective.target == "number"


@pytest.mark.slow
@pytest.mark.parametrize("model", first_fast([Bert, Gpt2]))
def test_several_labels_are_their_multi_label_classification(model, tokenizer, tmp_path):
    """Logits, loss and gradients of rows of several labels, of one and of none; the threshold stays with the model."""
    plain = dataclasses.replace(MODELS[model], dropout=0.0, attention_dropout=0.0)
    task = Classification(model=plain, target="labels", labels=("1", "fair", "good"), threshold=0.25,
                          classifier_dropout=0.0).bind(tokenizer.vocabulary, LENGTH)
    rows = [row._replace(values=row.values | {"label": label})
            for row, label in zip(records(Classification), (["good", "1"], ["fair"], []), strict=True)]
    source = LabelledSource(tokenizer, {"held_out": rows}, False)
    (batch,) = source.batches("held_out", 3, task.row_format(LENGTH), 0).evaluation(3, 1)
    params = random_params(task, 0)
    out = export_folder(tmp_path / "out", task, params, tokenizer, ModelCard())
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.problem_type, config.label2id) == ("multi_label_classification", {"1": 0, "fair": 1, "good": 2})
    assert "| Predicted labels | those with a sigmoid above 0.25 |" in (out / "README.md").read_text()

    theirs = auto_class(Classification).from_pretrained(out).eval()  # no dropout
    inputs = {name: torch.tensor(array).long() for name, array in their_inputs(task, out, batch).items()}
    wanted = [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    found = theirs(**inputs, labels=torch.tensor([wanted[row] for row in batch["row"]]))
    found.loss.backward()
    logits = ours_of(task, params, batch)
    assert np.abs(logits).max() > 0.05 and np.abs(logits - found.logits.detach().numpy()).max() < 1e-5
    step = jax.jit(jax.value_and_grad(lambda p, b: total_loss(task.loss(p, b, jax.random.key(0), False))))
    loss, grads = step(params, batch)
    assert float(loss) == pytest.approx(found.loss.item(), abs=1e-5)
    (table,) = (each.table for each in family_of(task).models(task))
    named, seen = dict(theirs.named_parameters()), 0
    for name, grad in table.to_transformers(jax.device_get(grads)):
        other = named[name].grad
        np.testing.assert_allclose(grad, np.zeros(grad.shape) if other is None else other.numpy(), atol=1e-5)
        seen += float(np.abs(grad).max()) > 1e-4
    assert seen > 20

    imported = import_folder(out).objective
    assert (imported.target, imported.labels, imported.threshold) == ("labels", task.labels, 0.25)
    scores = 1 / (1 + np.exp(-logits.astype(float)))
    answers = [task.answer(rows[row], [(None, {"logits": logits[at]})]) for at, row in enumerate(batch["row"])]
    assert [answer.prediction for answer in answers] == [
        [name for name, score in zip(task.labels, row, strict=True) if score > 0.25] for row in scores
    ]
    one = dataclasses.replace(task, labels=("x",))  # which without a problem type would be a number
    single = export_folder(tmp_path / "one", one, random_params(one, 0), tokenizer, ModelCard())
    assert import_folder(single).objective.labels == ("x",)


@pytest.mark.parametrize("model", [T5(hidden_size=16, num_layers=1, num_heads=2, head_dim=8, intermediate_size=24),
                                   MODELS[Gpt2]], ids=["t5", "gpt2"])
def test_text_to_text_is_exported_as_it_was_pretrained(model, tokenizer, tmp_path):
    kind = Classification(labels=("a", "b"), label_words=("a=no",))
    task = TextToText(model=model, kind=kind, prefix="mine ", max_target=7).bind(tokenizer.vocabulary, LENGTH)
    params = random_params(task, 0)
    out = export_folder(tmp_path / "out", task, params, tokenizer, ModelCard())
    imported, card = import_folder(out), (out / "README.md").read_text()
    end = " =>" * (type(imported.objective).__name__ == "CausalLM")
    assert f"| Prompt | mine sentence: {{text}}{end} |" in card and "| Answers | no, b |" in card
    wanted = transformers.GenerationConfig.from_pretrained(out)
    assert wanted.max_new_tokens == 7 and wanted.num_beams in (None, 1)
    searched = dataclasses.replace(task, beams=4, length_penalty=0.6)  # test_beams.py: both mean the same there
    out = export_folder(tmp_path / "beams", searched, params, tokenizer, ModelCard())
    kind = transformers.AutoModelForCausalLM if end else transformers.AutoModelForSeq2SeqLM
    wanted = kind.from_pretrained(out).generation_config
    assert (wanted.max_new_tokens, wanted.num_beams, wanted.length_penalty) == (7, 4, 0.6)
    assert type(imported.objective).__name__ in ("SpanCorruption", "CausalLM")
    assert jax.tree.all(jax.tree.map(np.array_equal, imported.params, params))


@pytest.mark.parametrize(("kind", "separator"), [("unigram", " =>"), ("byte-bpe", " =>"), ("byte-bpe", "s =>")])
def test_a_decoder_learns_the_tokens_that_it_is_asked_with(kind, separator, tmp_path):
    """Those of the whole prompt, in which a separator may share a token with the text; of a long one the beginning."""
    texts = [" ".join(f"{a}{b}s the trees, {b}{a} => {a}" for a in "abcdefgh") + "." for b in "klmnopqrst"]
    made = train_tokenizer(texts, tmp_path / "made", kind=kind, vocab_size=500)
    task = TextToText(model=MODELS[Gpt2], max_target=7, separator=separator).bind(made.vocabulary, LENGTH)
    out = export_folder(tmp_path / "out", task, random_params(task, 0), made, ModelCard())
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    sources = ["the tree", "ka the tree" * LENGTH]
    rows = [Record("", "", {"source": text, "targets": ["ab"]}, ()) for text in sources]
    short, cut = (example.notes.tolist() for example in task.encode(rows, made, LENGTH))
    assert short == theirs(sources[0] + separator).input_ids == made.encode_with_symbols(sources[0] + separator)
    assert len(cut) == LENGTH - task.max_target and made.decode(cut).endswith(separator)
    assert cut[:20] == made.encode(sources[1])[:20]


@pytest.mark.parametrize("kind", ["unigram", "byte-bpe"])
def test_the_card_of_tags_says_how_their_tokenizer_reads_words(kind, tmp_path):
    texts = [" ".join(f"{a}{b}s the trees, {b}{a} => {a}" for a in "abcdefgh") + "." for b in "klmnopqrst"]
    made = train_tokenizer(texts, tmp_path / "made", kind=kind, vocab_size=500)
    task = Tagging(model=MODELS[Bert], labels=("A", "O")).bind(made.vocabulary, LENGTH)
    out = export_folder(tmp_path / "out", task, random_params(task, 0), made, ModelCard())
    card, theirs = (out / "README.md").read_text(), transformers.AutoTokenizer.from_pretrained(out)
    words = texts[0].split()[:6]
    row = Record("", "", {"words": words, "tags": None}, ())
    ids = task.encode([row], made, LENGTH)[0].arrays["input_ids"].tolist()
    assert "| Words | joined by single spaces; " in card and theirs(" ".join(words)).input_ids == ids
    differs = theirs(words, is_split_into_words=True).input_ids != ids
    assert differs == ("`is_split_into_words` gives other tokens" in card) == (kind == "byte-bpe")


@pytest.mark.slow
def test_the_language_model_beside_choices_is_their_double_head(tokenizer, tmp_path):
    """Texts of one length, since their loss is a mean over all tokens."""
    task = task_of(MultipleChoice, Gpt1, tokenizer, lm_coefficient=0.5, classifier_dropout=0.0)
    task = dataclasses.replace(task, model=dataclasses.replace(task.model, dropout=0.0, attention_dropout=0.0))
    params = random_params(task, 0)
    one_logit = task_of(Classification, Gpt1, tokenizer, labels=(), target="number")
    out = export_folder(tmp_path / "out", one_logit, params, tokenizer, ModelCard())
    theirs = transformers.OpenAIGPTDoubleHeadsModel.from_pretrained(out).eval()
    with torch.no_grad():
        theirs.multiple_choice_head.summary.weight.copy_(torch.tensor(np.asarray(params["classifier"]["kernel"]).T))
        theirs.multiple_choice_head.summary.bias.zero_()
        batch = task.synthetic(3, LENGTH) | {"label": np.array([2, 0, 3], np.int32)}
        ids, label = (torch.tensor(batch[name]).long() for name in ("input_ids", "label"))
        last = torch.full(ids.shape[:2], LENGTH - 1)
        found = theirs(ids, mc_token_ids=last, labels=ids, mc_labels=label)
    terms = jax.jit(lambda p, b: task.loss(p, b, jax.random.key(0), True))(params, batch)
    ours = {name: float(terms[name].total / terms[name].weight) for name in ("lm_loss", "task_loss")}
    wanted = {"lm_loss": found.loss.item(), "task_loss": found.mc_loss.item()}
    assert ours == pytest.approx(wanted, rel=1e-4) and terms["lm_loss"].coefficient == 0.5


def test_tasks_without_a_class_are_refused(tokenizer, tmp_path):
    for task, named in (
        (task_of(Tagging, Gpt1, tokenizer), "Tagging with a Gpt1 has no class"),
        (task_of(MultipleChoice, Gpt2, tokenizer), "MultipleChoice with a Gpt2 has no class"),
        (task_of(Classification, Bert, tokenizer, both_orders=True), "reads a pair in both orders has no class"),
    ):
        with pytest.raises(UserError, match=named):
            export_folder(tmp_path / "out", task, {}, tokenizer, ModelCard())


def test_the_answer_kinds_of_coqa_are_left_out(tokenizer, tmp_path):
    task = task_of(Answers, Bert, tokenizer, kinds=True, null_threshold=0.0)
    params = random_params(task, 0)
    imported = import_folder(export_folder(tmp_path / "out", task, params, tokenizer, ModelCard()))
    assert not imported.objective.kinds and imported.params.keys() == params.keys() - {"kind_classifier"}
    assert "| Left out, without a counterpart there | kind_classifier |" in (tmp_path / "out" / "README.md").read_text()


def test_classes_without_names_and_the_dropout_of_a_class(tokenizer, tmp_path):
    task = task_of(Classification, Distilbert, tokenizer, labels=("0", "1", "2"), classifier_dropout=0.3)
    out = export_folder(tmp_path / "out", task, random_params(task, 0), tokenizer, ModelCard())
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    assert theirs.config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"} and theirs.dropout.p == 0.3
    found = import_folder(out).objective
    assert found.labels == ("0", "1", "2") and found.classifier_dropout == 0.3
    (out / "config.json").write_text(json.dumps(read_json(out / "config.json") | {"problem_type": "regression"}))
    with pytest.raises(UserError, match="problem_type regression has 3 labels"):
        import_folder(out)


def test_the_dropout_of_classifiers_of_tokens(tokenizer, tmp_path):
    for model in (Albert, Bert):
        task = task_of(Tagging, model, tokenizer, classifier_dropout=0.3)
        out = export_folder(tmp_path / model.__name__, task, random_params(task, 0), tokenizer, ModelCard())
        assert transformers.AutoModelForTokenClassification.from_pretrained(out).dropout.p == 0.3
        assert import_folder(out).objective.classifier_dropout == 0.3


def test_an_older_albert_of_tags_has_a_pooler(tokenizer, tmp_path):
    task = task_of(Tagging, Albert, tokenizer)
    out = export_folder(tmp_path / "out", task, random_params(task, 0), tokenizer, ModelCard())
    pooler = {"albert.pooler.weight": np.ones((24, 24), np.float32), "albert.pooler.bias": np.ones(24, np.float32)}
    save_file(load_file(out / "model.safetensors") | pooler, out / "model.safetensors", {"format": "pt"})
    assert class_of(import_folder(out).objective) is Tagging


@pytest.mark.parametrize(("changes", "message"), [
    ({"problem_type": "token_classification"}, "problem_type is 'token_classification'"),
    ({"summary_activation": "relu"}, "summary_activation is 'relu'"),
])
def test_other_heads_are_refused(changes, message, tokenizer, tmp_path):
    task = task_of(Classification, Xlnet, tokenizer)
    out = export_folder(tmp_path / "out", task, random_params(task, 0), tokenizer, ModelCard())
    (out / "config.json").write_text(json.dumps(read_json(out / "config.json") | changes))
    with pytest.raises(UserError, match=message):
        import_folder(out)
