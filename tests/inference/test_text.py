"""Continuations as text: stop strings, streaming, and the command."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import jaxlm
from jaxlm.commands import generate as command
from jaxlm.errors import UserError
from jaxlm.huggingface import ModelCard, export_folder, import_folder
from jaxlm.inference import text as module
from jaxlm.inference.generate import Settings
from jaxlm.inference.text import Completion, generate_text, stable_length
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.runs import load
from jaxlm.runs.load import load_model
from jaxlm.runs.model import TrainedModel
from jaxlm.runs.resolve import resolve
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.training import train_tokenizer
from tests.params import random_params


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory) -> Tokenizer:
    """Return byte-level BPE with few merges, so that a Korean syllable is three tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder = tmp_path_factory.mktemp("bpe")
    pieces = [*sorted(ByteLevel.alphabet()), "th", "the", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n", encoding="utf-8")
    return Tokenizer.load(folder)


class Parrot(Gpt2):
    """Model that writes a fixed text token by token for any prompt; its state is the number of tokens."""

    script: tuple[int, ...] = ()

    @property
    def max_length(self):
        return None

    def _logits(self, index, rows):
        token = jax.numpy.asarray([*self.script, 0])[jax.numpy.minimum(index, len(self.script))]
        return jax.numpy.tile(jax.nn.one_hot(token, self.vocab_size) * 9, (rows, 1))

    def prefill(self, params, prompts, mask, new_tokens, start=0):
        return self._logits(0, prompts.shape[0]), jax.numpy.int32(1)

    def decode(self, params, tokens, state):
        return self._logits(state, tokens.shape[0]), state + 1


def parrot(tokenizer: Tokenizer, text: str) -> CausalLM:
    kind = type("Parrot", (Parrot,), {"script": tuple(tokenizer.encode(text))})
    return CausalLM(model=kind(num_layers=1, hidden_size=8, num_heads=1)).bind(tokenizer.vocabulary, 8)


def say(tokenizer: Tokenizer, text: str, stop=(), stream=None, **options):
    prompt = tokenizer.encode("It is")
    loaded = PretrainedModel(parrot(tokenizer, text), {}, tokenizer)
    (answer,) = generate_text(loaded, [prompt], Settings(**options), stop, stream)
    return answer


def test_text_ends_before_the_first_stop_string(bytes_tokenizer):
    text = " the sea.\nQ: and then the end"
    assert say(bytes_tokenizer, text, max_new_tokens=len(bytes_tokenizer.encode(text))).text == text
    for stop, wanted in (
        (["\nQ:"], " the sea."), (["Q", "\n"], " the sea."), (["and t"], " the sea.\nQ: "), ([" "], " the"),
        (["xyz"], text), (["he s", "ea"], " t"),
    ):
        answer = say(bytes_tokenizer, text, stop, max_new_tokens=len(bytes_tokenizer.encode(text)))
        assert answer.text == wanted
        # The tokens are those up to the stop, and none that was written before it was seen.
        found, before = (bytes_tokenizer.decode(ids) for ids in (answer.ids, answer.ids[:-1]))
        assert text.startswith(found) and len(answer.ids) == len(answer.log_probs)
        assert wanted == text or (found.startswith(wanted) and not any(s in before.lstrip(" ") for s in stop))


def test_a_stop_string_ends_the_text_as_the_vocabulary_spells_it(tmp_path):
    """NFKC takes Thai ำ apart and makes ？ a plain question mark, so that a text never has them."""
    tokenizer = train_tokenizer(["คำถาม? คำตอบ! It is"] * 9, tmp_path / "t", kind="bpe", vocab_size=500)
    for stop in ("คำถาม", "？"):
        assert say(tokenizer, "abc คำถาม? x", [stop], max_new_tokens=40).text == " abc " + "คําถาม" * (stop == "？")
    assert say(tokenizer, "abc คำถาม? x", ["\u200b", " \n"], max_new_tokens=40).text == " abc คําถาม? x"


def test_a_stop_ends_the_loop_early(bytes_tokenizer, monkeypatch):
    seen = []
    real = module.continuations
    monkeypatch.setattr(module, "continuations", lambda *args: seen.append(found := real(*args)) or found)
    say(bytes_tokenizer, " a\n" + "b" * 200, ["\n"], max_new_tokens=200)
    assert len(seen[0][0].ids) <= 2 * module.CHECK_EVERY


def test_a_special_symbol_is_one_stop(bytes_tokenizer):
    objective = parrot(bytes_tokenizer, "ab")
    end = bytes_tokenizer.vocabulary.eos
    type(objective.model).script = (*bytes_tokenizer.encode(" on"), end, *bytes_tokenizer.encode("off"))
    for settings in (Settings(max_new_tokens=9), Settings(max_new_tokens=9, stop_ids=[])):
        (answer,) = generate_text(PretrainedModel(objective, {}, bytes_tokenizer), [[5]], settings, ["<|endoftext|>"])
        assert answer.text == " on" and answer.ids[-1] == end


def test_text_grows_by_whole_characters(bytes_tokenizer):
    text, pieces = " 옛날에 🙂 the end.\nQ", []
    answer = say(bytes_tokenizer, text, ["\nQ"], pieces.append, max_new_tokens=60)
    assert "".join(pieces) == answer.text == " 옛날에 🙂 the end."
    shown = [piece for piece in pieces if piece]
    assert len(shown) > 12 and not any("\N{REPLACEMENT CHARACTER}" in piece or "\n" in piece for piece in shown)
    # What stays broken is shown at last.
    pieces.clear()
    answer = say(bytes_tokenizer, " 옛날에", (), pieces.append, max_new_tokens=5)
    assert "".join(pieces) == answer.text == " 옛\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("text", "stop", "count"), [
    ("abc", [], 3), ("abc\N{REPLACEMENT CHARACTER}", [], 3), ("abc\n", ["\nQ:"], 3), ("abc\nQ", ["\nQ:"], 3),
    ("abcQ", ["\nQ:"], 4), ("aab", ["aabaac"], 0), ("xaaba", ["aabaac", "ba"], 1), ("", ["x"], 0),
])
def test_stable_length(text, stop, count):
    assert stable_length(text, stop) == count


def test_equal_prompts_of_two_batches_are_sampled_independently(bytes_tokenizer, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 2)
    settings = Settings(max_new_tokens=9, temperature=5.0)
    answers = generate_text(PretrainedModel(parrot(bytes_tokenizer, "the"), {}, bytes_tokenizer), [[5]] * 4, settings)
    assert len({tuple(answer.ids) for answer in answers}) == 4


def test_beams_end_at_tokens_that_hold_a_stop_string(bytes_tokenizer):
    answer = say(bytes_tokenizer, " the sea.\nQ: and", ["\n"], beams=2, max_new_tokens=14)
    assert answer.text == " the sea." and answer.ids == bytes_tokenizer.encode(" the sea.\n")


def test_mistakes_are_refused(bytes_tokenizer):
    with pytest.raises(UserError, match="a stop string is empty"):
        say(bytes_tokenizer, "a", [""])
    with pytest.raises(UserError, match="needs one prompt and no beam search"):
        say(bytes_tokenizer, "a", [], print, beams=2)


@pytest.fixture(scope="module")
def folder(bytes_tokenizer, tmp_path_factory) -> str:
    model = Gpt2(num_layers=1, hidden_size=16, num_heads=2, intermediate_size=16, max_positions=64)
    objective = CausalLM(model=model).bind(bytes_tokenizer.vocabulary, 64)
    params = random_params(objective, 0, 0.3)
    path = tmp_path_factory.mktemp("models") / "gpt2"
    export_folder(path, objective, params, bytes_tokenizer, ModelCard())
    return str(path)


def test_loaded_weights_are_on_the_device(folder):
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(load_model(folder).params))


def test_weights_to_begin_from_are_not_copied(folder, monkeypatch):
    read = []
    monkeypatch.setattr(load, "import_folder", lambda path: read.append(import_folder(path)) or read[0])
    found = resolve("gpt2_tiny", init_from=folder).pretrained.params
    assert all(map(np.shares_memory, jax.tree.leaves(found), jax.tree.leaves(read[0].params)))


def test_command(folder, capsys, monkeypatch):
    options = [folder, "the sea", "--max-new-tokens", "9"]
    greedy = [*options, "--temperature", "0"]
    command.main(greedy)
    plain = capsys.readouterr().out
    written = jaxlm.load(folder).generate(["the sea"], max_new_tokens=9, temperature=0.0)[0].text
    assert plain == f"the sea{written}\n"
    # On a terminal the same comes piece by piece, and the prompt is bold.
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    command.main(greedy)
    assert capsys.readouterr().out == plain.replace("the sea", "\033[1mthe sea\033[0m", 1)
    command.main([*options, "--beams", "3", "--length-penalty", "0.6", "--logprobs"])
    *tokens, total = capsys.readouterr().out.rstrip("\n").split("\n")[-10:]
    assert total.endswith("together, 9 tokens")
    numbers = [float(line.split()[0]) for line in tokens]
    assert len(numbers) == 9 and max(numbers) < 0
    assert sum(numbers) == pytest.approx(float(total.split()[0]), abs=1e-3)


def test_command_streams_from_one_process_only(folder, monkeypatch):
    """The others, without a terminal, would run one loop to the end beside the steps of the first."""
    found = []
    monkeypatch.setattr(TrainedModel, "generate", lambda self, prompts, stop, on_text, **_: found.append(on_text) or [
        Completion("", [], [])])
    monkeypatch.setattr(command, "start_jax", lambda: None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for count in (1, 2):
        monkeypatch.setattr(jax, "process_count", lambda count=count: count)
        command.main([folder, "the"])
    assert found[0] is not None and found[1] is None


def test_command_refuses_beams_with_a_temperature(folder):
    with pytest.raises(UserError, match="beam search does not sample"):
        command.main([folder, "the", "--beams", "2", "--temperature", "0.7"])
    with pytest.raises(UserError, match="beams is 0"):
        command.main([folder, "the", "--beams", "0"])
