"""A thousand inputs that are wrong, or nearly right, to every command: each ends within a minute and in less than 4 GB,
with exit code 0, or with 2 and one sentence. Run it with `./launch/test.sh -m fuzz`; the inputs are the same each time.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxlm.cli import main
from jaxlm.config.presets import load_preset
from jaxlm.fields import settings as fields_of
from tests.fuzz import inputs
from tests.fuzz.runner import Fuzzer, nobody
from tests.training.support import write_preset

MEMORY = 4 << 30
TIMES = int(os.environ.get("JAXLM_FUZZ", "1"))
pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.timeout(3600 * TIMES, method="thread"),  # the signal is the fuzzer's
]
MODELS = {
    "bert": "objective = experiment.objective\n",
    "gpt2": """
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM
objective = CausalLM(Gpt2(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32))
""",
    "t5": """
from jaxlm.models.t5 import T5
from jaxlm.objectives.span_corruption import SpanCorruption
objective = SpanCorruption(T5(hidden_size=16, num_layers=1, num_heads=2, head_dim=8, intermediate_size=32))
""",
    "gpt1": """
from jaxlm.models.gpt1 import Gpt1
from jaxlm.objectives.causal_lm import CausalLM
objective = CausalLM(Gpt1(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=64, max_positions=32))
""",
    "gpt3": """
from jaxlm.models.gpt3 import Gpt3
from jaxlm.objectives.causal_lm import CausalLM
objective = CausalLM(Gpt3(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=32, band=8))
""",
    "roberta": """
from jaxlm.models.roberta import Roberta
from jaxlm.objectives.masked_lm import MaskedLM
objective = MaskedLM(
    Roberta(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32), input_format="document"
)
""",
    "spanbert": """
from jaxlm.objectives.span_boundary import SpanBoundary
objective = SpanBoundary(experiment.objective.model)
""",
    "albert": """
from jaxlm.models.albert import Albert
from jaxlm.objectives.masked_lm import MaskedLM
objective = MaskedLM(
    Albert(embedding_size=8, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=32),
    input_format="sentence-order", longest_ngram=3,
)
""",
    "xlnet": """
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.permutation_lm import PermutationLM
objective = PermutationLM(
    Xlnet(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32), memory_length=24
)
""",
    "distilbert": """
from jaxlm.models.distilbert import Distilbert
from jaxlm.objectives.distillation import Distillation
objective = Distillation(
    Distilbert(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32), teacher="BERT"
)
""",
    "tinybert": """
from jaxlm.objectives.layer_distillation import LayerDistillation
student = dataclasses.replace(experiment.objective.model, hidden_size=8)
objective = LayerDistillation(student, teacher="BERT", teacher_hidden_size=16)
""",
    "elmo": """
from jaxlm.models.elmo import Elmo
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
objective = BidirectionalLM(Elmo(hidden_size=8, cell_size=16, num_highways=1, filter_widths=2), noise_words=64)
""",
    "word2vec": """
from jaxlm.models.word2vec import Word2Vec
from jaxlm.objectives.skip_gram import SkipGram
objective = SkipGram(Word2Vec(hidden_size=8))
""",
    "electra": """
from jaxlm.models.electra import Electra
from jaxlm.objectives.replaced_tokens import ReplacedTokens
objective = ReplacedTokens(Electra(
    embedding_size=16, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, generator_hidden_size=8,
    generator_num_layers=1, generator_num_heads=1, generator_intermediate_size=16, max_positions=32,
))
""",
}
SHORT = """
experiment = dataclasses.replace(
    experiment, objective=objective, train=dataclasses.replace(experiment.train, steps=1)
)
"""
UNEXPORTED = ("gpt3", "elmo", "word2vec")  # which no Transformers class holds
model_name = st.sampled_from(list(MODELS))
transformer_name = st.sampled_from([name for name in MODELS if name not in UNEXPORTED])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """For each model its preset, its run of one step, and that run as a Transformers folder: NAME.py, NAME, NAME-hf."""
    folder = tmp_path_factory.mktemp("models")
    base = write_preset(folder)
    for name, code in MODELS.items():
        preset = folder / f"{name}.py"
        code = code.replace('"BERT"', repr(str(folder / "bert")))
        preset.write_text(f"{base.read_text()}import dataclasses\n{code}{SHORT}")
        assert main(["pretrain", str(preset), "--run-dir", str(folder / name)]) == 0
        if name not in UNEXPORTED:
            assert main(["export", str(folder / name), str(folder / f"{name}-hf")]) == 0
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def fuzzer(tmp_path, record_property) -> Iterator[Fuzzer]:
    """Fails the test with all different failures at the end; what became of the inputs is printed after the tests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, hard))
    found = Fuzzer(tmp_path)
    yield found
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    record_property("fuzzed", dict(found.counts))
    record_property("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if found.failures:
        pytest.fail("\n\n".join(f"{found.counts[k]} x {k}\n{v}" for k, v in found.failures.items()), pytrace=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MEMORY


def cases(number: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable], Callable]:
    """The same `number` inputs each time; JAXLM_FUZZ=10 makes it ten times as many."""
    chosen = settings(
        max_examples=number * TIMES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda function: chosen(given(**strategies)(function))


@cases(120, file=inputs.text_file(), command=st.sampled_from(("show", "tokenizer")),
       kind=st.sampled_from(("unigram", "bpe", "byte-bpe")), size=st.sampled_from((512, 512, 600, 100_000)))
def test_texts(fuzzer, models, file, command, kind, size):
    ending, data = file
    with fuzzer.scratch() as folder:
        path = folder / f"text{ending}"
        path.write_bytes(data)
        if command == "show":
            fuzzer.run("show", models["bert.py"], "--data.source", path, "--data.tokenizer", models["bert"])
        else:
            fuzzer.run("tokenizer", "train", folder / "out", "--data.source", path, "--data.tokenizer-kind", kind,
                       "--data.vocab-size", size)


TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@cases(80, data=st.data(), name=st.sampled_from(TOKENIZERS), model=transformer_name)
def test_tokenizers_of_transformers(fuzzer, models, data, name, model):
    with fuzzer.scratch() as folder:
        for each in TOKENIZERS:
            shutil.copy(min(models[f"{model}-hf"].rglob(each)), folder / each)
        (folder / name).write_bytes(data.draw(inputs.json_file((folder / name).read_bytes())))
        fuzzer.run("show", models[f"{model}.py"], "--data.tokenizer", folder)


WORDPIECE = "[PAD] [UNK] [CLS] [SEP] [MASK] a b c d e f g h ##a ##b ba".replace(" ", "\n").encode()
BYTE_BPE = {"vocab.json": b'{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}', "merges.txt": b"#version: 0.2\na b\n"}


@cases(60, data=st.data(), name=st.sampled_from(("spiece.model", "jaxlm_tokenizer.json", "vocab.txt", *BYTE_BPE)))
def test_tokenizer_files(fuzzer, models, data, name):
    own = {file.name: file.read_bytes() for file in (models["bert"] / "tokenizer").iterdir()}
    with fuzzer.scratch() as folder:
        files = {"vocab.txt": WORDPIECE} if name == "vocab.txt" else BYTE_BPE if name in BYTE_BPE else own
        change = inputs.json_file if name.endswith(".json") else inputs.damaged
        for other, content in (files | {name: data.draw(change(files[name]))}).items():
            (folder / other).write_bytes(content)
        fuzzer.run("show", models["bert.py"], "--data.tokenizer", data.draw(st.sampled_from((folder, folder / name))))


def answering(model: str, path: Path) -> list[object]:
    """The command that asks a model."""
    if model.startswith(("gpt", "t5", "xlnet")):
        return ["generate", path, "a", "--max-new-tokens", 2]
    return ["fill-mask", path, "a [MASK]"]


@cases(200, data=st.data(), model=model_name,
       name=st.sampled_from(("config.json", "config.json", "config.json", "data.json", "metrics.jsonl")),
       command=st.sampled_from(("show", "show", "pretrain", "export", "answer")))
def test_run_folders(fuzzer, models, data, model, name, command):
    with fuzzer.scratch() as folder:
        run = shutil.copytree(models[model], folder / "run")
        (run / name).write_bytes(data.draw(inputs.json_file((run / name).read_bytes())))
        fuzzer.run(*{
            "show": ["show", run], "export": ["export", run, folder / "out"], "answer": answering(model, run),
            "pretrain": ["pretrain", run, "--train.steps", 2],
        }[command])


@pytest.fixture(scope="module")
def cache(models, tmp_path_factory) -> Path:
    """A cache folder with the shards, keys, duplicates and store of a text, whose end is held out."""
    folder = tmp_path_factory.mktemp("cache")
    assert main(["tokenize", *cached(models, folder)]) == 0
    return folder


def cached(models, folder: Path) -> list[str]:
    flags = {"source": models["text.txt"], "tokenizer": models["bert"], "cache-dir": folder, "deduplicate": "near"}
    return [str(models["bert.py"]), *(f"--data.{name}={value}" for name, value in flags.items())]


COMMANDS_OF_STORES = {
    "show": ["show"], "tokenize": ["tokenize", "--report"], "finish": ["tokenize", "--finish"],
    "shard": ["tokenize", "--shard", "0/1"], "pretrain": ["pretrain", "--train.steps", "1"],
}


@cases(300, data=st.data(), command=st.sampled_from(list(COMMANDS_OF_STORES)))
def test_shards_and_stores(fuzzer, models, cache, data, command):
    with fuzzer.scratch() as folder:
        own = shutil.copytree(cache, folder / "cache")
        path = data.draw(st.sampled_from(sorted(file for file in own.rglob("*") if file.is_file())))
        if data.draw(st.integers(0, 5)):
            path.write_bytes(data.draw(inputs.json_file(path.read_bytes()) if path.suffix == ".json" else
                                       inputs.damaged(path.read_bytes())))
        else:
            path.unlink()
        name, *more = COMMANDS_OF_STORES[command]
        fuzzer.run(name, *cached(models, own), *more)


# What a preset may do with a field: set it by a constructor, which looks at values, or past it.
PUT = """
from math import inf, nan
def put(config, path, value, constructed):
    value = put(getattr(config, path[0]), path[1:], value, constructed) if path[1:] else value
    if constructed:
        return dataclasses.replace(config, **{path[0]: value})
    copy = object.__new__(type(config))
    copy.__dict__.update(vars(config) | {path[0]: value})
    return copy
"""


@cases(200, data=st.data(), model=model_name)
def test_presets(fuzzer, models, data, model):
    names = [s.name for s in fields_of(load_preset(str(models[f"{model}.py"]))) if s.name != "objective"]
    path = data.draw(st.sampled_from(names)).split(".")
    value = data.draw(inputs.odd_value.map(repr) | st.sampled_from(("b'x'", "(1, 'x')", "{1}", "1j", "...", "object")))
    with fuzzer.scratch() as folder:
        code = f"{PUT}experiment = put(experiment, {path}, {value}, {data.draw(st.booleans())})\n"
        preset = folder / "preset.py"
        preset.write_bytes((models[f"{model}.py"].read_text() + code).encode("utf-8", "backslashreplace"))
        fuzzer.run("show", preset, "--data.tokenizer", models[model])


@cases(200, data=st.data(), model=transformer_name,
       name=st.sampled_from(("config.json", "config.json", "model.safetensors", *TOKENIZERS)),
       command=st.sampled_from(("import", "answer", "init-from", "export")))
def test_transformers_folders(fuzzer, models, data, model, name, command):
    with fuzzer.scratch() as folder:
        hf = shutil.copytree(models[f"{model}-hf"], folder / "hf")
        file = min(hf.rglob(name))
        change = inputs.safetensors_file if name == "model.safetensors" else inputs.json_file
        file.write_bytes(data.draw(change(file.read_bytes())))
        fuzzer.run(*{
            "import": ["import", hf, folder / "run"], "answer": answering(model, hf),
            "export": ["export", hf, folder / "out"],
            "init-from": ["pretrain", models[f"{model}.py"], "--init-from", hf, "--run-dir", folder / "run"],
        }[command])


# With each command a flag that keeps it short.
COMMANDS = {
    "show": (), "pretrain": ("--train.steps", 1), "plan": ("--topology", "v5e:0x2"), "bench": ("--steps", 0),
}
OPTIONS = {
    "show": ("step", "examples"), "pretrain": ("run-dir", "init-from"), "plan": ("topology", "hlo"),
    "bench": ("steps", "peer", "json"),
}


@cases(240, data=st.data(), model=model_name, command=st.sampled_from(("show", *COMMANDS)))
def test_flags(fuzzer, models, data, model, command):
    preset = models[f"{model}.py"]
    names = [s.name.replace("_", "-") for s in fields_of(load_preset(str(preset)))]
    flag = st.sampled_from([*names, *OPTIONS[command]]).map(lambda name: f"--{name}")
    pair = st.tuples(flag, inputs.odd_text | inputs.odd_value.map(str))
    pair |= st.tuples(flag, st.sampled_from(("1", "2", "16", "0.5", "True", "False", "3000000000")))
    words = data.draw(st.lists(pair, min_size=1, max_size=2) | inputs.odd_text.map(lambda text: [(text,)]))
    with fuzzer.scratch() as folder, contextlib.chdir(folder):
        given_before = (command, preset, *COMMANDS[command], "--data.tokenizer", models[model])
        fuzzer.run(*given_before, *(word for pair in words for word in pair))


PROMPTS = st.sampled_from(("a" * 100_000, "日" * 100_000, "a " * 50_000, "\0" * 9)) | st.text(max_size=60)


@cases(90, prompt=PROMPTS | inputs.odd_text, more=st.sampled_from(("", " [MASK]", "[MASK]" * 40)),
       model=st.sampled_from(("bert", "gpt2", "t5", "xlnet")), value=inputs.odd_text | inputs.odd_value.map(str),
       flag=st.sampled_from((None, "top-k", "max-new-tokens", "temperature", "top-p", "seed", "stop")))
def test_prompts(fuzzer, models, prompt, more, model, flag, value):
    command, flag = ("fill-mask", flag and "top-k") if model == "bert" else ("generate", flag)
    flags = [f"--{flag}={value}"] if flag else []
    fuzzer.run(command, models[model], *flags, "--", prompt + more)


def odd_paths(folder: Path) -> list[str]:
    """Paths that are no file, that may not be read, or that are no paths."""
    locked = folder / "locked"
    (locked / "inside").mkdir(parents=True)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nothing")
    os.mkfifo(folder / "fifo.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "s.txt"))
    (folder / "file").write_text("text")
    (folder / "empty").mkdir()
    locked.chmod(0)
    return [
        "locked/inside", "locked/inside/x.txt", "locked", "loop", "loop/x", "dangling", "fifo.txt", "s.txt", "file",
        "file/x", "file/..", "empty", "*", "[", "**/*.txt", "a[1]", "http://127.0.0.1:9/text.txt",
        "https://127.0.0.1:9/x", "gs://bucket/x.txt", "gs://bucket/run", "s3://bucket/x", "file:///etc", "gs://", "://",
        "tfds:", "tfds:no_such", "tfds:mnist/a/b:c[:1%]", "/dev/null", "/dev/zero", "/proc/self/mem", "/",
        "a/" * 3000, "b" * 300, "*" * 200, "x,y", ",", "python-docs,", ".", "..", "%00", "C:\\x", *inputs.ODD_TEXT,
    ]


PATHS = ("source", "tokenizer", "config", "run-dir", "init-from", "export", "export to", "fill-mask", "import",
         "import to", "train", "train to")


@cases(200, data=st.data(), which=st.sampled_from(PATHS))
def test_paths(fuzzer, models, data, which):
    preset, run, hf, text = models["bert.py"], models["bert"], models["bert-hf"], models["text.txt"]
    with fuzzer.scratch() as folder, contextlib.chdir(folder):
        path = data.draw(st.sampled_from(odd_paths(folder)))
        words = {
            "source": ["show", preset, f"--data.source={path}", "--data.tokenizer", run],
            "tokenizer": ["show", preset, f"--data.tokenizer={path}"], "config": ["show", path],
            "run-dir": ["pretrain", preset, f"--run-dir={path}"],
            "init-from": ["pretrain", preset, f"--init-from={path}", "--run-dir", "new"],
            "export": ["export", "--", path, "out"], "export to": ["export", "--", run, path],
            "fill-mask": ["fill-mask", "--", path, "a [MASK]"], "import": ["import", "--", path, "out"],
            "import to": ["import", "--", hf, path], "train": ["tokenizer", "train", "out", f"--data.source={path}"],
            "train to": ["tokenizer", f"--data.source={text}", "--data.vocab-size", 512, "--", "train", path],
        }[which]
        for above in (folder, *folder.parents, run.parent):  # so that it is `locked` that may not be read
            if above.stat().st_uid == os.geteuid():
                above.chmod(above.stat().st_mode | 0o011)
        with nobody() if "locked" in path else contextlib.nullcontext():
            fuzzer.run(*words)
        (folder / "locked").chmod(0o700)
