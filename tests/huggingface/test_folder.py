"""Whole folders: exported files, refused folders, and that nothing is lost or overwritten."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.huggingface import folder as folder_module
from jaxlm.models.bert import Bert
from jaxlm.models.encoder import Encoder
from jaxlm.objectives.masked_lm import MaskedLM
from tests.huggingface.support import VOCAB, minilm, read_json, save_torch, torch_bert
from tests.params import random_params

SMALL = Bert(
    vocab_size=len(VOCAB), hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=24
)


@pytest.fixture(scope="module")
def params():
    return random_params(MaskedLM(model=SMALL), 0)


@pytest.fixture(scope="module")
def source(tmp_path_factory, vocab_file) -> Path:
    """A folder saved by Transformers; tests that change it take a copy."""
    return save_torch(torch_bert("gelu"), tmp_path_factory.mktemp("source") / "hf", vocab_file)


@pytest.fixture
def copy(source, tmp_path) -> Path:
    return shutil.copytree(source, tmp_path / "copy")


def test_exported_folder_is_complete_and_its_tokenizer_agrees(tmp_path, params, tokenizer):
    out = export_folder(tmp_path / "deep" / "out", MaskedLM(model=SMALL), params, tokenizer, ModelCard())
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json", "tokenizer_config.json"} <= {
        file.name for file in out.iterdir()
    }
    assert list(out.parent.iterdir()) == [out]  # no temporary files remain
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for text in ("the cat sat on the mat .", "unter [MASK]", ""):
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode_with_symbols(text)
    assert theirs.model_max_length == SMALL.max_positions
    assert theirs.mask_token_id == tokenizer.vocabulary.mask
    # The pipeline combines config, weights and tokenizer.
    answers = transformers.pipeline("fill-mask", model=str(out), tokenizer=str(out))("the [MASK] sat .")
    assert len(answers) == 5
    # AutoTokenizer and jaxlm load the same tokenizer.
    again = import_folder(out)
    assert again.tokenizer.encode("the cat sat") == tokenizer.encode("the cat sat")
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_maximum_length_is_that_of_training(tmp_path, params, tokenizer):
    out = export_folder(tmp_path / "out", MaskedLM(model=SMALL), params, tokenizer, ModelCard(), max_length=17)
    assert transformers.AutoTokenizer.from_pretrained(out).model_max_length == 17


def test_private_parameters_are_left_out(tmp_path, params, tokenizer, monkeypatch):
    """The objective declares a head for training only; an undeclared one is an error."""

    @dataclasses.dataclass(frozen=True)
    class WithPrivateHead(MaskedLM):
        def init(self, key):
            return super().init(key) | {"boundary_head": {"kernel": jax.numpy.ones((3, 4))}}

    objective = WithPrivateHead(model=SMALL)
    own = params | {"boundary_head": {"kernel": np.ones((3, 4), np.float32)}}
    message = r"BertForPreTraining of Transformers has no boundary_head/kernel: .* private_params"
    with pytest.raises(UserError, match=message):
        export_folder(tmp_path / "out", objective, own, tokenizer, ModelCard())
    monkeypatch.setattr(WithPrivateHead, "private_params", ("boundary_head",))
    out = export_folder(tmp_path / "own", objective, own, tokenizer, ModelCard())
    assert "| Left out, without a counterpart there | boundary_head |" in (out / "README.md").read_text()
    jax.tree.map(np.testing.assert_array_equal, import_folder(out).params, params)
    pairs = WithPrivateHead(model=SMALL, input_format="sentence-order")  # those of its base class are private, too
    out = export_folder(tmp_path / "pairs", pairs, random_params(pairs), tokenizer, ModelCard())
    assert "| boundary_head, pooler, sop_head |" in (out / "README.md").read_text()


def test_model_card(tmp_path, params, tokenizer):
    rows = {"Data": "a|b.txt", "Batch size": 32, "Started from": ""}
    card = ModelCard(rows, {"eval_loss": 2.34567, "eval_mlm_accuracy": 0.5})
    out = export_folder(tmp_path / "my-bert", MaskedLM(model=SMALL), params, tokenizer, card)
    text = (out / "README.md").read_text(encoding="utf-8")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    for fact in (
        "# my-bert", "BertForPreTraining", f"{count:,}", "2.3457", "eval_mlm_accuracy", r"| Data | a\|b.txt |",
        "| Batch size | 32 |", "AutoModelForPreTraining.from_pretrained('my-bert')", "jaxlm",
    ):
        assert fact in text
    assert "Started from" not in text
    header = text.split("---")[1]
    assert "library_name: transformers" in header and "pipeline_tag: fill-mask" in header
    # The three lines of the model card load the model.
    code = text.split("```python\n")[1].split("```")[0]
    scope: dict = {}
    exec(code.replace("'my-bert'", repr(str(tmp_path / "my-bert"))), scope)
    assert scope["model"].num_parameters() == count


def test_nothing_is_overwritten(tmp_path, params, tokenizer):
    objective = MaskedLM(model=SMALL)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("full", "file", "link"):
        with pytest.raises(UserError, match="there already"):
            export_folder(tmp_path / name, objective, params, tokenizer, ModelCard())
    assert [f.name for f in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    assert (tmp_path / "file").read_text() == "precious"
    export_folder(tmp_path / "empty", objective, params, tokenizer, ModelCard())
    assert (tmp_path / "empty" / "model.safetensors").is_file()
    with pytest.raises(UserError, match="not a local folder"):
        export_folder("gs://bucket/model", objective, params, tokenizer, ModelCard())


@pytest.mark.parametrize(("failure", "sentence"), [
    (OSError(errno.ENOSPC, "No space left on device"), r"out cannot be written \(No space.*; free some space, or"),
    (OSError(errno.EROFS, "Read-only file system"), r"out cannot be written \(Read-only.*\); choose another folder\.$"),
    (KeyboardInterrupt(), None),
])
def test_a_failed_export_leaves_nothing(failure, sentence, tmp_path, params, tokenizer, monkeypatch):
    def fail(*_):
        raise failure

    monkeypatch.setattr(folder_module, "export_tokenizer", fail)
    with pytest.raises(UserError if sentence else KeyboardInterrupt, match=sentence):
        export_folder(tmp_path / "new" / "out", MaskedLM(model=SMALL), params, tokenizer, ModelCard())
    assert list(tmp_path.iterdir()) == []


def test_mismatched_parts_are_refused(tmp_path, params, tokenizer):
    with pytest.raises(UserError, match="it has no embeddings/token_type/embedding, which the table of BertForPre"):
        objective = MaskedLM(model=dataclasses.replace(SMALL, type_vocab_size=0))
        export_folder(tmp_path / "out", objective, random_params(objective, 0), tokenizer, ModelCard())
    with pytest.raises(UserError, match="MaskedLM with the model Encoder has no class in Transformers"):
        export_folder(tmp_path / "out", MaskedLM(model=Encoder()), params, tokenizer, ModelCard())
    assert list(tmp_path.iterdir()) == []


def test_shards_are_written_and_read(tmp_path, params, tokenizer, monkeypatch):
    monkeypatch.setattr("jaxlm.huggingface.weights.SHARD_BYTES", 9_000)
    out = export_folder(tmp_path / "out", MaskedLM(model=SMALL), params, tokenizer, ModelCard())
    shards = sorted(out.glob("model-*-of-*.safetensors"))
    assert len(shards) > 3 and not (out / "model.safetensors").exists()
    assert all(shard.stat().st_size < 9_000 + 3_000 for shard in shards)  # plus the header
    assert {shard.stat().st_mode for shard in shards} == {(out / "config.json").stat().st_mode}
    index = read_json(out / "model.safetensors.index.json")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert index["metadata"] == {"total_parameters": count, "total_size": 4 * count}
    model, report = transformers.AutoModelForPreTraining.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    word = model.bert.embeddings.word_embeddings.weight.detach().numpy()
    np.testing.assert_array_equal(word, params["embeddings"]["word"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, import_folder(out).params, params)


def test_shards_of_transformers_are_read(tmp_path, source, vocab_file):
    sharded = save_torch(torch_bert("gelu"), tmp_path / "hf", vocab_file, max_shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    jax.tree.map(np.testing.assert_array_equal, import_folder(sharded).params, import_folder(source).params)
    broken = next(iter(sorted(sharded.glob("model-*.safetensors"))))
    broken.unlink()
    with pytest.raises(UserError, match=f"{broken.name} does not exist"):
        import_folder(sharded)


@pytest.mark.parametrize("shard", ["../copy/model.safetensors", "/etc/passwd", "pytorch_model.bin", 7])
def test_an_index_cannot_name_files_outside_its_folder(shard, copy):
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"bert.pooler.dense.bias": shard}}))
    with pytest.raises(UserError, match=r"names shards that are no \.safetensors|bias is 7; it must be text"):
        import_folder(copy)


def test_a_pickle_is_never_opened(copy, monkeypatch):
    (copy / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, copy / "pytorch_model.bin")
    monkeypatch.setattr("pickle.load", lambda *_: pytest.fail("opened a pickle"))
    monkeypatch.setattr("torch.load", lambda *_: pytest.fail("opened a pickle"))
    with pytest.raises(UserError, match=r"has no model\.safetensors .*never opened here .*as safetensors"):
        import_folder(copy)


def test_damaged_weights(copy):
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"<html>not found</html>"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors cannot be read \(.*; is it whole"):
            import_folder(copy)


def test_integer_tensors_are_refused(copy):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    tensors["bert.pooler.dense.bias"] = np.zeros(32, np.int64)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError, match=r"bert\.pooler\.dense\.bias is stored as I64"):
        import_folder(copy)


def test_half_a_head_is_refused(copy):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors["cls.predictions.bias"], tensors["bert.encoder.layer.1.output.dense.bias"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks bert\.encoder\.layer\.1\.output\.dense\.bias, cls\.predictions\.bias;"):
        import_folder(copy)


def test_other_families_and_other_folders(copy):
    for content, message in [
        ({"model_type": "qwen2"}, "family 'qwen2', which needs biases of .*; jaxlm imports these families: .*bert"),
        ({"objective": {}, "train": {}}, "or a run that has no checkpoint yet"),
        ({"hidden_size": 3}, 'names no "model_type"'),
        ([], r"config\.json: it is \[\]; it must be an object"),
    ]:
        (copy / "config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            import_folder(copy)
    (copy / "config.json").write_text("{half")
    with pytest.raises(UserError, match=r"config\.json is no JSON from line 1 on"):
        import_folder(copy)
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        import_folder(copy)
    with pytest.raises(UserError, match=r"no folder bert-base-uncased.*downloaded first"):
        import_folder("bert-base-uncased")


@pytest.mark.parametrize(("file", "path", "value", "message"), [
    ("config.json", "architectures", 7, "config.json: architectures is 7; it must be a list; mend it"),
    ("config.json", "architectures", [None], "config.json: architectures.0 is missing; it must be text"),
    ("config.json", "vocab_size", float("nan"), "config.json: vocab_size is nan; it must be a number like 30522"),
    ("config.json", "type_vocab_size", 0, "config.json cannot be read (type_vocab_size is 0"),
    ("tokenizer.json", "model vocab", None, "tokenizer.json: model.vocab is missing; it must be an object or a list"),
    ("tokenizer.json", "model vocab the", "x", "the model of tokenizer.json (FOLDER) cannot be read (its form is unk"),
    ("tokenizer.json", "model type", "Words", "the model of tokenizer.json (FOLDER) cannot be read (its form is"),
    ("tokenizer.json", "added_tokens 0 content", None, "added_tokens.0.content is missing; it must be text"),
    ("tokenizer.json", "added_tokens 0 lstrip", 1, "added_tokens.0.lstrip is 1; it must be a boolean"),
    ("tokenizer.json", "normalizer", ["NFC"], 'tokenizer.json: normalizer is ["NFC"]; it must be an object'),
    ("tokenizer.json", "decoder", {"x": 1}, 'the decoder {"x": 1} of FOLDER/tokenizer.json cannot be read'),
    ("tokenizer.json", "post_processor", {"single": 5}, 'the post_processor {"single": 5} of FOLDER/tokenizer.json'),
    ("tokenizer_config.json", "cls_token", {}, "tokenizer_config.json: cls_token.content is missing; it must be text"),
    ("tokenizer_config.json", "pad_token", 7, "tokenizer_config.json: pad_token is 7; it must be text or an object"),
    ("tokenizer_config.json", "do_lower_case", "yes", 'do_lower_case is "yes"; it must be a boolean'),
])
def test_a_malformed_value_is_named_with_its_file(file, path, value, message, copy):
    content = place = read_json(copy / file)
    *keys, last = [int(key) if key.isdecimal() else key for key in path.split()]
    for key in keys:
        place = place[key]
    place[last] = value
    (copy / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=re.escape(message.replace("FOLDER", str(copy)))):
        import_folder(copy)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", [lambda whole: whole[:-40], lambda _: b"", lambda whole: b"\xff" + whole])
def test_a_damaged_json_file_is_named(file, damage, copy):
    (copy / file).write_bytes(damage((copy / file).read_bytes()))
    with pytest.raises(UserError, match=rf"{copy / file} is no JSON from line \d+ on: it is cut off or damaged"):
        import_folder(copy)


def test_fine_tuned_heads_are_named(tmp_path, vocab_file):
    folder = save_torch(torch_bert("gelu", "BertForSequenceClassification"), tmp_path / "hf", vocab_file)
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForPreTraining"]}))
    with pytest.raises(UserError, match=r"has classifier\.bias, classifier\.weight, which this model lacks"):
        import_folder(folder)


def test_padded_embeddings_keep_their_spare_rows(tmp_path, vocab_file, tokenizer):
    model = torch_bert("gelu", vocab_size=len(VOCAB) + 6)
    imported = import_folder(save_torch(model, tmp_path / "hf", vocab_file))
    assert imported.objective.vocabulary == imported.tokenizer.vocabulary
    assert (imported.objective.vocabulary.size, imported.objective.model.vocab_size) == (len(VOCAB), len(VOCAB) + 6)
    # Exported again with all rows.
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    assert read_json(out / "config.json")["vocab_size"] == len(VOCAB) + 6


def test_a_tokenizer_with_more_ids_than_rows_is_refused(tmp_path, vocab_file):
    model = torch_bert("gelu", vocab_size=len(VOCAB) - 6)
    with pytest.raises(UserError, match=f"{len(VOCAB)} ids but the model only {len(VOCAB) - 6} rows"):
        import_folder(save_torch(model, tmp_path / "hf", vocab_file))


def test_round_trip_of_published_weights(tmp_path):
    from safetensors.numpy import load_file

    imported = import_folder(minilm())
    out = export_folder(tmp_path / "out", imported.objective, imported.params, imported.tokenizer, ModelCard())
    after = load_file(out / "model.safetensors")
    before = load_file(minilm() / "model.safetensors")
    del before["embeddings.position_ids"]
    assert all(np.array_equal(array, after["bert." + name]) for name, array in before.items())
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    text = "Naïve façades, 한국어 🙂 and\tunbelievably long words"
    assert theirs(text)["input_ids"] == transformers.AutoTokenizer.from_pretrained(minilm())(text)["input_ids"]
