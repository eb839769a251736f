"""The pages: every command line parses, every flag exists, every link leads somewhere, every module can be imported."""

from __future__ import annotations

import argparse
import ast
import configparser
import functools
import importlib
import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlm.cli import COMMANDS
from jaxlm.commands.common import Parser
from jaxlm.config.flags import override
from jaxlm.config.presets import load_preset, preset_files
from jaxlm.fields import settings

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(page for folder in ("configs", "jaxlm", "launch")
                                      for page in (ROOT / folder).rglob("*.md"))])
PRESETS = sorted([*ROOT.glob("configs/*.py"), *ROOT.glob("configs/tasks/*.py")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
NEW = "mine_tiny"
"""A preset that the pages on objectives have their reader write."""
FOREIGN = {"--include_path", "--model", "--partof", "--objective.rate", "--extra_package", "--requirements_file",
           "--runner", "--sdk_container_image"}
"""Flags of lm_eval and Beam in inline code, a relation of a graph, and a field of an objective that a reader writes."""
each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


class Parsed(Exception):
    """A command has made its parser."""


@pytest.fixture(autouse=True)
def stop_after_parser(monkeypatch):
    def stop(parser, arguments=None, namespace=None):
        raise Parsed(parser, arguments)

    monkeypatch.setattr(Parser, "parse_known_args", stop)
    monkeypatch.setattr("jaxlm.commands.common._run_preset", str)  # --preset names a file of the reader's


def segments(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command in a shell snippet."""
    for line in text.replace("\\\n", " ").splitlines():
        if not re.search(r"jaxlm|launch/|python", line):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        for is_operator, words in itertools.groupby(lexer, lambda word: set(word) <= set("|&;")):
            if not is_operator:
                yield [word for word in words if word != "…"]


def snippets(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command on a page, in fences and in inline code."""
    text = page.read_text(encoding="utf-8")
    for language, code in FENCE.findall(text):
        if not language:
            yield from segments(code)
    for code in CODE.findall(FENCE.sub("", text)):
        if re.match(r"(\S*/)?(jaxlm|python3?) |(\./)?launch/", code):
            yield from segments(code)


def invocations(words: list[str]) -> Iterator[list[str]]:
    """Yield the arguments of jaxlm in a simple command; scripts of launch/ start it, too."""
    for place, word in enumerate(words):
        if (word == "jaxlm" and words[place - 1] != "--model") or word.endswith("/jaxlm"):
            yield words[place + 1 :]
        elif word.endswith("slurm.sbatch") and words[place + 1 :]:
            yield ["pretrain", *words[place + 1 :]]
        elif word.startswith("COMMAND="):
            yield shlex.split(word.removeprefix("COMMAND="))
        elif word == "--" and "--beam" not in words:
            yield words[place + 1 :]


def parser_of(command: str, arguments: list[str]) -> tuple[Parser, list[str]]:
    with pytest.raises(Parsed) as made:
        importlib.import_module(COMMANDS[command][0]).main(arguments)
    return made.value.args


@functools.cache
def fields() -> set[str]:
    """The flags of all presets."""
    experiments = [load_preset(str(path)) for path in PRESETS]
    names = {setting.name for experiment in experiments for setting in settings(experiment)}
    return {f"--{name.replace('_', '-')}" for name in names}


@each_page
def test_commands_parse(page, tmp_path, monkeypatch):
    """The command, its options and its preset exist, and so do the fields that it sets, with values of their types."""
    monkeypatch.chdir(ROOT)
    presets: dict[str, str] = {}  # run folder → preset, from the commands before
    own = [code for _, code in FENCE.findall(page.read_text(encoding="utf-8")) if "\nexperiment = " in code]
    for code in own:
        (tmp_path / f"{NEW}.py").write_text(code)
    for command, *arguments in (found for words in snippets(page) for found in invocations(words)):
        line = f"{command} {shlex.join(arguments)}"
        assert command in COMMANDS or line.strip() == "--help", line
        if not arguments or "--help" in arguments:
            continue
        parser, given = parser_of(command, arguments)
        options, flags = argparse.ArgumentParser.parse_known_args(parser, given)
        config = getattr(options, "config", None)
        if config is None and command != "evaluate":
            assert not flags, line
            continue
        config = config or options.model
        if NEW in config:
            config = str(tmp_path / f"{NEW}.py") if own else "configs/bert_tiny.py"
        if getattr(options, "run_dir", None):
            presets[options.run_dir] = config
        config = presets.get(config, config)
        if config.endswith(".py") or config in preset_files():
            override(load_preset(config), flags, "")
        else:  # a placeholder
            assert {flag for flag in flags if flag.startswith("--")} <= fields(), line


@each_page
def test_scripts_and_modules_exist(page):
    for words in snippets(page):
        for place, word in enumerate(words):
            if re.match(r"(\./)?launch/", word):
                assert (ROOT / word).is_file(), word
                own = itertools.takewhile(lambda other: other != "--", words[place + 1 :])
                flags = {FLAG.match(other)[0] for other in own if FLAG.match(other)}
                if word.endswith(".py"):
                    assert all(f'"{flag}"' in (ROOT / word).read_text() for flag in flags), words
            if word == "-m" and re.match(r"python", Path(words[place - 1]).name):
                assert importlib.util.find_spec(words[place + 1]), words


@functools.cache
def options() -> set[str]:
    """The options of all commands, as their help says, and of the scripts of launch/."""
    commands = [*((command, "CONFIG") for command in COMMANDS), ("tokenizer", "extend")]
    helps = [parser_of(command, [argument])[0].format_help() for command, argument in commands]
    texts = [*helps, *(script.read_text() for script in (ROOT / "launch").rglob("*.py"))]
    return {flag for text in texts for flag in FLAG.findall(text)}


@each_page
def test_flags_in_the_text_exist(page):
    known = fields() | options() | FOREIGN
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    unknown = {flag for code in CODE.findall(text) for flag in FLAG.findall(code)} - known
    # `--objective.kind.FIELD`, and the model of a task, which is a placeholder in its preset
    assert not {flag for flag in unknown if not flag.startswith(("--objective.kind", "--objective.model."))}


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links_lead_somewhere(page):
    folder = ROOT / "configs" if page.name == "heading.md" else page.parent  # which becomes part of CLAIMS.md
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))):
        path, _, anchor = link.partition("#")
        if not link.startswith("https://"):
            target = folder / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in headings(target), link


@each_page
def test_python_and_extras(page):
    """Python compiles, and its imports and the extras of the package exist."""
    text = page.read_text(encoding="utf-8")
    for language, code in FENCE.findall(text):
        for node in ast.walk(ast.parse(code)) if language == "python" else ():
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = {extra for found in re.findall(r"\.\[([\w,]+)\]", text) for extra in found.split(",")}
    assert extras <= set(config["options.extras_require"])


def test_tables_name_all_presets():
    def names(code: str) -> Iterator[str]:
        """Expand `bert_{tiny,base}`."""
        head, brace, rest = code.partition("{")
        inner, _, tail = rest.partition("}")
        yield from (f"{head}{part}{tail}" for part in inner.split(",") if part != "…") if brace else [code]

    table = (ROOT / "configs" / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    presets = {path.stem for path in ROOT.glob("configs/*.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == presets
    systems = re.search(r"^## Systems\n(.*?)^## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[1]
    named = {name for row in systems.splitlines() if row.startswith("|")
             for code in CODE.findall(row.split("|")[-2]) for name in names(code)}
    assert all((ROOT / "configs" / f"{name}.py").is_file() for name in named)
    assert {name for name in presets - named if not name.startswith("gpt3_")} == set()
