"""Export of an objective's parameters to a Transformers folder, and import of such a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError

from jaxlm.errors import UserError
from jaxlm.huggingface.card import ModelCard, render
from jaxlm.huggingface.families import family_named, family_of, writer_of
from jaxlm.huggingface.family import Source, TransformersModel, read_config
from jaxlm.huggingface.sentence_transformers import read as read_vectors
from jaxlm.huggingface.sentence_transformers import read_module, write_reranker
from jaxlm.huggingface.sentence_transformers import write as write_vectors
from jaxlm.huggingface.table import listed
from jaxlm.huggingface.tasks import SETTINGS_KEY
from jaxlm.huggingface.weights import INDEX, SINGLE, Weights, write_weights
from jaxlm.inference.score import text_begin
from jaxlm.keys import Purpose, purpose_key
from jaxlm.objectives.base import Bound, Objective
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.hosts import log
from jaxlm.paths import cause, local_folder, read_json, reading, remedy, without_empty_folders
from jaxlm.tasks.rerank import Rerank
from jaxlm.tasks.tagging import Tagging
from jaxlm.tasks.text_to_text import TextToText
from jaxlm.tokenizers.classes import GENERIC, read_class, read_length, templates
from jaxlm.tokenizers.export import export as export_tokenizer
from jaxlm.tokenizers.template import parts, symbol_id
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.trees import get, leaves, nest, subtrees, within
from jaxlm.types import FolderSettings, Params, Vectors

RELATIVE_LENGTH = 512
"""Length for tokenizers of models with relative positions and none of their own: that of T5 and XLNet."""

SAMPLING = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "num_beams",
    "length_penalty", "early_stopping", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens",
)
"""Fields of generation_config.json that say how Transformers generates, without those of tokens."""


def export_folder(
    out: str | os.PathLike[str],
    objective: Objective,
    params: Params,
    tokenizer: Tokenizer,
    card: ModelCard,
    *,
    max_length: int | None = None,
    vectors: Vectors | None = None,
    stop_ids: Sequence[int] = (),
    sampling: Sequence[tuple[str, Any]] = (),
    settings: Mapping[str, Any] = {},
    step: int = 1,
) -> Path:
    """Write a folder that `AutoModel….from_pretrained` and `AutoTokenizer.from_pretrained` load, and return its path.

    The folder has config.json, model.safetensors (or shards), the tokenizer's files, README.md, and
    generation_config.json for generative models. A model without a Transformers class is written in its own format, if
    it has one. All files are written to a temporary folder beside `out`, which is renamed at the end, so that `out` is
    either complete or absent.

    Args:
        out: folder to write.
        objective: objective or task of the parameters.
        params: parameters.
        tokenizer: tokenizer of the model.
        card: rows of README.md.
        max_length: longest text, with special tokens, for the tokenizer; by default that of `vectors` or of the model.
        vectors: if given, the folder is also one of sentence-transformers.
        stop_ids: tokens that end a generated text; by default the end token.
        sampling: further fields of generation_config.json; not for a task, whose answers are those of its evaluation.
        settings: what no file of Transformers has, for `import_folder`: `fresh`, the parameters that are not trained,
            and `rows`, the fields of the format of rows.
        step: training step of the parameters; 0 for those of an import, whose begin token stays.

    Raises:
        UserError: `out` exists and is not empty, the disk is full, the objective has no Transformers class, or
            parameters or tokenizer do not fit it.
    """
    out = local_folder(out, "Transformers folders").absolute()
    if write := writer_of(objective):
        with _new_folder(out) as temporary:
            write(temporary, objective, params, tokenizer)
        return out
    family = family_of(objective)
    if not isinstance(objective, Bound):
        objective = objective.bind_unchecked(tokenizer.vocabulary)
    objective = _with_begin(PretrainedModel(objective, params, tokenizer, step=step))
    models = family.models(objective)
    params = family.export_params(objective, params) if family.export_params else params
    template = _template(objective)
    exported, private = _exported_paths(objective, template, models)
    most = objective.model.max_length
    length = max_length or (vectors and vectors.length) or most or RELATIVE_LENGTH
    length = min(length, most or length)
    generation = {} if isinstance(objective, TextToText) else dict(sampling)
    if stop_ids:
        generation["eos_token_id"] = [*stop_ids] if len(stop_ids) > 1 else stop_ids[0]
    with _new_folder(out) as temporary:
        for model in models:
            _write_model(temporary / model.folder, model, objective, params, tokenizer, length, generation, settings)
        if vectors is not None:
            own = vectors.length or length
            write_vectors(temporary, objective, vectors._replace(length=min(own, most or own)), params)
        if isinstance(objective, Rerank) and objective.query_prompt:
            write_reranker(temporary, objective.query_prompt)
        written = vectors and vectors.similarity == "maxsim"  # the projection, as a module of sentence-transformers
        left_out = "" if written else listed(sorted(private & params.keys()))
        remarks = _remarks(objective, left_out, settings.get("rows", {}), tokenizer)
        card = dataclasses.replace(card, rows={**card.rows, **remarks})
        parameters = sum(int(np.prod(get(template, path).shape)) for path in exported)
        text = render(card, objective, models, parameters, out.name, vectors)
        (temporary / "README.md").write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files
    return out


def _with_begin(loaded: PretrainedModel) -> Bound:
    """Return the objective whose begin token is the one before a text of its plain stream, if it has one."""
    objective = loaded.objective
    if not getattr(objective, "plain_stream", False) or objective.vocabulary.eos < 0:
        return objective
    vocabulary = dataclasses.replace(objective.vocabulary, bos=text_begin(loaded))
    return dataclasses.replace(objective, vocabulary=vocabulary)


def _remarks(objective: Objective, left_out: str, rows: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Return rows of a model card about an export; a row without text is not shown."""
    place = "predicted at the position before them" * objective.predicts_next
    prompt, answers = objective.prompt_form(rows) if isinstance(objective, TextToText) else ("", "")
    words = ""
    if isinstance(objective, Tagging):
        words = 'joined by single spaces; a word has the tag of its first token (`aggregation_strategy="first"`)'
        if tokenizer.encode("a a") != 2 * tokenizer.encode("a"):  # words after a space have other tokens than alone
            words += "; `is_split_into_words` gives other tokens"
    return {"Left out, without a counterpart there": left_out, "Masked tokens": place, "Prompt": prompt,
            "Answers": answers, "Words": words}


def _read_tokenizer(folder: Path, objective: Objective, in_lower_case: bool) -> Tokenizer:
    """Return the tokenizer of a folder, with the special tokens around a text that the model takes from it."""
    tokenizer, model = Tokenizer.load(folder), objective.model.text_model
    if in_lower_case:
        tokenizer = _in_lower_case(tokenizer)
    around = templates(folder) if model.template.is_default or model.is_causal else None
    if around and (model.template.is_default or "#" in "".join(around)):
        tokenizer = tokenizer.with_settings(single=around[0], pair=around[1])
    smaller = tokenizer.without_spare(objective.model.vocab_size)
    if spare := sorted(tokenizer.vocabulary.symbols.keys() - smaller.vocabulary.symbols.keys()):
        # Gemma 3's text models share their tokenizer with those that read images.
        log(f"{folder}: the model has no rows for the special tokens {listed(spare)}; they are left out.")
        tokenizer = smaller
    _check_tokenizer(folder, objective, tokenizer.vocabulary)
    return tokenizer


def _in_lower_case(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with texts in lower case, as sentence-transformers' `do_lower_case` has them."""
    content = tokenizer.to_json()
    steps = [{"type": "Lowercase"}, *filter(None, [content.get("normalizer")])]
    return tokenizer.with_json(content | {"normalizer": {"type": "Sequence", "normalizers": steps}})


def _write_model(
    folder: Path, model: TransformersModel, objective: Objective, params: Params, tokenizer: Tokenizer, length: int,
    generation: Mapping[str, Any], settings: Mapping[str, Any],
) -> None:
    """Write the configuration, the weights and the tokenizer of a Transformers model."""
    folder.mkdir(exist_ok=True)
    new = {name: value for name, value in {"predicts_next": objective.predicts_next, **settings}.items() if value}
    own = {**model.config.get(SETTINGS_KEY, {}), **new}
    config = {"architectures": [model.architecture], "dtype": "float32", **model.config}
    config |= {SETTINGS_KEY: own} if own else {}
    _write_json(folder / "config.json", config)
    if model.generation_config is not None:
        _write_json(folder / "generation_config.json", {**model.generation_config, **generation})
    write_weights(folder, model.table.to_transformers(params))
    export_tokenizer(tokenizer, folder, objective.text_template, length, objective.vocabulary.bos)


def import_folder(hf_dir: str | os.PathLike[str], *, seed: int = 0) -> PretrainedModel:
    """Read a folder that Transformers saved; config.json tells its family.

    Weights in half precision become float32.

    `seed` is that of the heads that the folder lacks.

    Raises:
        UserError: the folder is missing or damaged, its family or configuration is not supported, it has no
            safetensors weights, or tensors are missing, unknown or of another shape.
    """
    root = local_folder(hf_dir, "Transformers folders")
    folder, module = read_module(root)
    _check_adapter(folder)
    config = read_config(folder)
    own = config.get(SETTINGS_KEY) or {}
    shapes = Weights(folder).shapes
    with reading(folder / "config.json"):
        architecture = next(iter(config.get("architectures") or [""]))
        family = family_named(config["model_type"], str(folder), architecture)
        source = Source(folder, config, shapes)
        try:
            objective = family.read_objective(source)
            if objective.model.text_model.is_causal:
                source.require(is_causal=True, use_bidirectional_attention=False)
            if own.get("predicts_next") and "predicts_next" in vars(objective):
                objective = dataclasses.replace(objective, predicts_next=True)
        except UserError as error:
            if not str(error).startswith("objective."):
                raise
            raise UserError(f"{folder / 'config.json'} has a model that jaxlm does not support: {error}") from error
    tokenizer = _read_tokenizer(folder, objective, bool(module.get("do_lower_case")))
    objective = objective.bind_unchecked(tokenizer.vocabulary)
    _check_template(folder, objective, tokenizer)
    template = _template(objective)
    params: dict[str, np.ndarray] = {}
    for model in family.stored_models(objective, source) if family.stored_models else family.models(objective):
        if not (folder / model.folder).is_dir():
            continue
        weights = Weights(folder / model.folder)
        new = model.table.from_transformers(weights.shapes, weights.read, template, str(weights.folder))
        for path in new.keys() & params.keys():
            if not np.array_equal(params[path], new[path], equal_nan=True):
                raise UserError(f"{weights.folder} has {path} that differs from the other model's; both must share it.")
        params |= new
    params = family.import_params(params) if family.import_params else params
    fresh = sorted(set(leaves(template)) - params.keys())
    untrained = [path for path in params if any(within(path, subtree) for subtree in own.get("fresh") or ())]
    initialized = subtrees({*fresh, *untrained}, params)
    params |= _initialize(objective, fresh, seed)
    nested = nest({path: params[path] for path in leaves(template)})
    settings, length = _read_settings(root, folder, config, tokenizer.vocabulary.size), read_length(folder)
    return PretrainedModel(objective, nested, tokenizer, tuple(initialized), str(root), 0, length, settings)


def _read_settings(root: Path, folder: Path, config: Mapping[str, Any], size: int) -> FolderSettings:
    """Return settings: vectors, those of generation_config.json or config.json, and format of rows."""
    vectors, file = None, folder / "generation_config.json"
    try:
        vectors = read_vectors(root)
    except UserError as error:  # which `encode` raises; everything else can use the model
        log(f"{error} Its settings of vectors are not kept.")
    generation = read_json(file, dict) if file.is_file() else config  # as in Transformers
    sampling = tuple((name, value) for name in SAMPLING if isinstance(value := generation.get(name), (int, float)))
    found = generation.get("eos_token_id")
    found = config.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [found]
    rows = (config.get(SETTINGS_KEY) or {}).get("rows") or {}
    fields = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in rows.items())
    stop_ids = tuple(i for i in ids if isinstance(i, int) and 0 <= i < size)
    return FolderSettings(vectors, stop_ids, rows=fields, sampling=sampling)


def _check_adapter(folder: Path) -> None:
    """Raise UserError if the folder holds only an adapter of PEFT, and remark on one beside a model."""
    if (folder / "adapter_config.json").is_file():
        text = f"{folder} has an adapter (adapter_config.json), which is not read; merge it (PEFT's merge_and_unload)."
        if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
            raise UserError(text)
        log(text)


def _template(objective: Objective) -> Params:
    """Return the shapes of the objective's parameters."""
    return jax.eval_shape(objective.init, jax.random.key(0))


def _check_tokenizer(folder: Path, objective: Objective, vocabulary: Vocabulary) -> None:
    """Raise UserError if the tokenizer does not belong to the model.

    It may have fewer ids than embedding rows: published embeddings are often padded, and rows without a token are never
    generated.
    """
    rows = objective.model.vocab_size
    if vocabulary.size > rows:
        raise UserError(f"{folder}: its tokenizer has {vocabulary.size} ids but the model only {rows} rows; replace it "
                        "by the tokenizer that the model was trained with (a T5 without sentinels has extra_ids 0 in "
                        "tokenizer_config.json).")
    if objective.model.for_vocabulary(dataclasses.replace(vocabulary, preserve_rows=True)) != objective.model:
        raise UserError(
            f"{folder}: its tokenizer and config.json differ in the id of a special token that the model depends on "
            "(padding); replace it by the tokenizer that the model was trained with."
        )


def _check_template(folder: Path, objective: Objective, tokenizer: Tokenizer) -> None:
    """Raise UserError if the folder's tokenizer puts other special tokens around a text than the family does.

    Decoders follow their tokenizer; the class of another encoder's tokenizer has rules of its own.
    """
    v, model = tokenizer.vocabulary, objective.model.text_model
    found = templates(folder) if model.has_encoder or read_class(folder) in GENERIC else None
    if found is None or model.is_causal or model.template.is_default:
        return
    around, ours = ([name if name == "$A" else tokenizer.pieces([symbol_id(v, name)])[0] for name, _ in parts(text)]
                    for text in (found[0], objective.text_template.single or "$A"))
    if around != ours:
        raise UserError(
            f"{folder}: its tokenizer.json reads a text as {' '.join(around)}, and jaxlm's {type(model).__name__} as "
            f"{' '.join(ours)}; if the model was trained with these, change post_processor, else choose another model."
        )


def _exported_paths(
    objective: Objective, template: Params, models: tuple[TransformersModel, ...]
) -> tuple[set[str], set[str]]:
    """Return the paths of the parameters that the models have, and the names of private ones, which they lack.

    Raises:
        UserError: Their tables do not cover all others.
    """
    named = {path for model in models for entry in model.table.entries for path in entry.ours}
    private = {name for kind in type(objective).__mro__ for name in vars(kind).get("private_params", ())}
    private -= {path.partition("/")[0] for path in named}
    wanted = {path for path in leaves(template) if not any(within(path, subtree) for subtree in private)}
    name, extra, lacking = models[0].architecture, sorted(wanted - named), sorted(named - wanted)
    faults = [f"{name} of Transformers has no {listed(extra)}: name heads for training only in private_params of the "
              "objective; what the hidden states need has to be in the table of a class of your own"] * bool(extra)
    faults += [f"it has no {listed(lacking)}, which the table of {name} names: give it these, or a table of its own"
               ] * bool(lacking)
    if faults:
        raise UserError(f"This model cannot be exported: {'; and '.join(faults)}.")
    return named, private


def _initialize(objective: Objective, wanted: list[str], seed: int) -> dict[str, np.ndarray]:
    """Return fresh values of some parameters; jit removes the work for the others."""
    if not wanted:
        return {}

    def chosen(key: jax.Array) -> dict[str, jax.Array]:
        params = objective.init(key)
        return {path: get(params, path) for path in wanted}

    return {path: np.asarray(leaf) for path, leaf in jax.jit(chosen)(purpose_key(seed, Purpose.INITIALIZATION)).items()}


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out` that is renamed to `out` on success and removed on failure."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out} is there already and is not a folder; choose another name.")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is there already and is not empty; nothing was written, choose another folder.")
    temporary = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"
    with without_empty_folders(out.parent):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            os.rename(temporary, out)  # replaces an empty folder, and fails on any other
        except (OSError, SafetensorError) as error:
            raise UserError(f"{out} cannot be written ({cause(error)}); {remedy(error, out)}.") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
