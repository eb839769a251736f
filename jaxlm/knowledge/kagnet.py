"""KagNet (Lin et al. 2019): multiple choice with the paths between concepts in a knowledge graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlm.data.cache import cached_arrays
from jaxlm.data.labelled import Arrays, EncodedExample, LabelledSource, Record
from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.keys import Purpose, purpose_key
from jaxlm.knowledge.concept_graph import open_graph
from jaxlm.knowledge.grounding import lemmatizer, statement
from jaxlm.knowledge.kagnet_network import KagNetwork, Scores
from jaxlm.knowledge.schema_graph import GraphSizes, Knowledge, build_graphs, describe_path, empty
from jaxlm.objectives.base import Line, Term, Terms
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.parallel.checksums import checksums, digest
from jaxlm.tasks.base import Answer
from jaxlm.tasks.multiple_choice import MultipleChoice
from jaxlm.tasks.pooled import flat_inputs
from jaxlm.tokenizers.tokenizer import Tokenizer
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.trees import merge_params
from jaxlm.types import Params, SchemaGraph

_SHOWN = 5
"""Paths of a choice that `jaxlm show` and predictions list."""


@dataclasses.dataclass(frozen=True)
class KagNet(MultipleChoice):
    """loss = mean over the wrong choices of max(0, margin - σ(right score) + σ(wrong score)), or cross-entropy.

    The vector of a statement (question and choice as one sentence, see `grounding.statement`) is that of any
    pretrained encoder, which stays as it is unless `train_encoder` is set. `KagNetwork` scores it by the graph. The
    published statement vectors come from the pooler of a BERT-large that was first fine-tuned on the task.

    Parameters: those of the encoder, and `knowledge`. The arrays of a row, besides those of its texts: the arrays of
    `jaxlm.knowledge.schema_graph.SchemaGraph`, int [choices, …].
    """

    graph: str = field("", resumable=True)
    """File of the knowledge graph: triples (head TAB relation TAB tail), or ConceptNet's assertions (.csv); also .gz,
    .xz or .zst. Empty: no graph, so that statements are scored by their vectors alone."""
    vectors: str = field("", resumable=True)
    """Folder of TransE vectors of the graph, from which its table begins and by which paths are pruned; empty: random
    vectors, and all paths."""
    graph_fingerprint: str = field("", weights=True)
    """Hash of the graph and its vectors; set when training begins."""
    encoder: str = field("", resumable=True)
    """Folder of a frozen encoder, set by --init-from: the vectors of all statements are computed once and kept in the
    cache folder. Empty: each step computes them, with the run's own copy of the encoder."""
    encoder_fingerprint: str = field("", weights=True)
    """Hash of the frozen encoder's parameters; set by --init-from."""
    sizes: GraphSizes = GraphSizes()
    network: KagNetwork = field(KagNetwork(), weights=True)
    train_encoder: bool = False
    """Train the encoder, too; otherwise it computes statement vectors without dropout and without a gradient."""
    criterion: Literal["margin", "cross-entropy"] = "margin"
    """Margin ranking of sigmoid scores (as published), or cross-entropy over the choices."""
    margin: float = field(0.2, range="(0, 1]")
    """Margin between the scores of the right choice and of a wrong one."""

    name = "kagnet"
    shows_predictions = True
    num_texts = 5
    """As in CommonsenseQA; the FLOPs of rows with other numbers of choices are in proportion."""

    @property
    def frozen_params(self) -> tuple[str, ...]:
        """Names of parameters that are not trained: the encoder's, unless `train_encoder`."""
        return () if self.train_encoder else tuple(jax.eval_shape(self.model.init_task, jax.random.key(0)))

    @property
    def stores_vectors(self) -> bool:
        """Whether rows have the vectors of their statements: `statement`, float32 [choices, width]."""
        return bool(self.encoder) and not self.train_encoder

    def with_pretrained_model(self, source: PretrainedModel) -> Self:
        task = super().with_pretrained_model(source)
        # New symbols (GPT-1) get vectors that only the run has.
        has_symbols = source.tokenizer.with_symbols(task.symbols) is source.tokenizer
        is_stored = has_symbols and not self.train_encoder
        fingerprint = _fingerprint(source) if is_stored else ""
        return dataclasses.replace(
            task, encoder=source.path if has_symbols else "", encoder_fingerprint=fingerprint
        )

    def texts(self, record: Record) -> list[tuple[str, ...]]:
        return [(statement(_question(record), choice),) for choice in record.values["choices"]]

    def with_labels(self, records: Sequence[Record], names: Sequence[str] = ()) -> Self:
        if not self.graph:
            network = dataclasses.replace(self.network, num_concepts=0, num_relations=0)
            return dataclasses.replace(self, network=network, graph_fingerprint="")
        knowledge = Knowledge.open(self.graph, self.vectors)
        sizes = {"num_concepts": len(knowledge.graph.concepts), "num_relations": len(knowledge.graph.relations)}
        if knowledge.concepts is not None and knowledge.concepts.shape[1] != self.network.concept_size:
            raise UserError(
                f"{self.vectors} has vectors of width {knowledge.concepts.shape[1]}; set "
                f"--objective.network.concept-size {knowledge.concepts.shape[1]}."
            )
        network = dataclasses.replace(self.network, **sizes)
        return dataclasses.replace(self, network=network, graph_fingerprint=knowledge.fingerprint)

    def require_packages(self) -> None:
        if self.graph:
            lemmatizer()

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        if self.lm_coefficient:
            raise UserError("KagNet has no language-model loss; set --objective.lm-coefficient 0.")
        super().check(vocabulary, length)

    def encode(self, records: Sequence[Record], tokenizer: Tokenizer, length: int) -> list[EncodedExample]:
        examples = super().encode(records, tokenizer, length)
        if self.graph:
            rows = [(_question(record), record.values["choices"]) for record in records]
            graphs = build_graphs(rows, self._knowledge(), self.sizes)
        else:
            graphs = empty(self._sizes, len(records), len(records[0].values["choices"]) if records else 0)
        arrays = graphs._asdict()
        if self.stores_vectors and records:
            arrays["statement"] = self._statements(records, tokenizer, length)
        return [
            example._replace(arrays=example.arrays | {name: array[number] for name, array in arrays.items()})
            for number, example in enumerate(examples)
        ]

    def _statements(
        self, records: Sequence[Record], tokenizer: Tokenizer, length: int
    ) -> Float[np.ndarray, "records choices width"]:
        """Return the encoder's vectors of all statements, from the cache if it has them."""
        try:
            source = self.load(self.encoder)
        except UserError as error:
            raise UserError(
                f"the encoder {self.encoder} cannot be read ({str(error).rstrip('.')}); give its new place with "
                "--objective.encoder, or '' there to use the run's own copy."
            ) from error
        fingerprint = _fingerprint(source)
        if self.encoder_fingerprint not in ("", fingerprint):
            raise UserError(
                f"the encoder {self.encoder} has changed since the model was trained with it; bring the old one back, "
                "or give --objective.encoder '' to use the run's own copy."
            )
        encoder_only = dataclasses.replace(self, graph="", graph_fingerprint="", encoder="", network=KagNetwork())

        def compute() -> dict[str, np.ndarray]:
            print(f"Computing the vectors of the statements of {len(records):,} rows")
            rows = LabelledSource(tokenizer, {"held_out": list(records)}, buckets=True)
            key = purpose_key(0, Purpose.INITIALIZATION)
            params = merge_params(jax.jit(encoder_only.init)(key), encoder_only.select_params(source))
            outputs = encoder_only.run(params, rows, length, batch_size=16)
            return {"statement": np.stack([output["statement"] for output in outputs])}

        facts = [fingerprint, repr(encoder_only.model), tokenizer.fingerprint, length, *map(self.texts, records)]
        return cached_arrays("statements", facts, compute)["statement"]

    def synthetic(self, rows: int, length: int) -> Arrays:
        shapes = empty(self._sizes, rows, self.num_texts)
        arrays = super().synthetic(rows, length) | {name: np.zeros_like(x) for name, x in shapes._asdict().items()}
        if self.stores_vectors:
            arrays["statement"] = np.zeros((rows, self.num_texts, self.model.width), np.float32)
        return arrays

    @property
    def _sizes(self) -> GraphSizes:
        return self.sizes if self.graph else GraphSizes(nodes=2, edges=1, pairs=1, paths=1)

    def _knowledge(self) -> Knowledge:
        """Return the graph that the model was trained with; raise UserError for another one."""
        knowledge = Knowledge.open(self.graph, self.vectors)
        if self.graph_fingerprint not in ("", knowledge.fingerprint):
            raise UserError(
                f"{self.graph} or {self.vectors or 'its vectors'} has changed since the model was trained with it; "
                "bring the old files back, or give their places with --objective.graph and --objective.vectors."
            )
        return knowledge

    def init(self, key: jax.Array) -> Params:
        key_model, key_network = jax.random.split(key)
        network = self.network.init(key_network, self.model.width)
        return self.model.init_task(key_model) | {"knowledge": network}

    def select_params(self, source: PretrainedModel) -> Params:
        """Return the encoder's parameters of `source`, and those of a KagNet with the same graph and sizes."""
        params, pretrained = super().select_params(source), source.objective
        if isinstance(pretrained, KagNet):
            options = {"dropout": self.network.dropout, "published_padding": self.network.published_padding}
            network = dataclasses.replace(pretrained.network, **options)
            same = (network, pretrained.graph_fingerprint) == (self.network, self.graph_fingerprint)
            params = params if same else {name: tree for name, tree in params.items() if name != "knowledge"}
        return params

    def merge_pretrained(self, params: Params, source: PretrainedModel | None) -> Params:
        """Return the parameters of step 0: the tables from the vectors, inverse relations as copies."""
        initial = super().merge_pretrained(params, source)
        if not self.graph or not self.vectors or (source is not None and "knowledge" in source.params):
            return initial
        knowledge = self._knowledge()
        tables = {"concept": knowledge.concepts, "relation": np.tile(knowledge.relations, (2, 1))}
        network = dict(initial["knowledge"])
        for name, rows in tables.items():
            fresh = network[name]["embedding"]
            has_vector = np.any(rows, axis=1, keepdims=True)
            network[name] = {"embedding": fresh.at[1:].set(jnp.where(has_vector, rows, fresh[1:]))}
        return initial | {"knowledge": network}

    def statements(
        self, params: Params, example: Arrays, key: jax.Array | None
    ) -> Float[Array, "batch choices width"]:
        """Return the vectors of all statements; a key turns dropout on."""
        if self.stores_vectors:
            return example["statement"]
        inputs = self.model.complete_inputs(flat_inputs(example), self.vocabulary)
        vectors = self.model.summary(params, inputs, key=key if self.train_encoder else None)
        vectors = vectors.reshape(*example["input_ids"].shape[:2], -1).astype(jnp.float32)
        return vectors if self.train_encoder else jax.lax.stop_gradient(vectors)

    def scores(
        self, params: Params, example: Arrays, statements: Float[Array, "batch choices width"], key: jax.Array | None
    ) -> Scores:
        """Return the scores of all choices, [batch, choices]; a key turns dropout on."""
        def flat(x: Array) -> Array:
            return x.reshape(-1, *x.shape[2:])

        graph = SchemaGraph(*(flat(example[name]).astype(jnp.int32) for name in SchemaGraph._fields))
        scores = self.network(params["knowledge"], graph, flat(statements), key)
        return jax.tree.map(lambda x: x.reshape(*statements.shape[:2], *x.shape[1:]), scores)

    def loss(self, params: Params, example: Arrays, key: jax.Array, train: bool) -> Terms:
        key_encoder, key_network = jax.random.split(key) if train else (None, None)
        logits = self.scores(params, example, self.statements(params, example, key_encoder), key_network).logit
        return self.label_terms(logits, example["label"], self.weights(example))

    def label_terms(
        self, logits: Float[Array, "batch choices"], label: Array, weights: Float[Array, " batch"]
    ) -> Terms:
        terms = super().label_terms(logits, label, weights)
        if self.criterion == "cross-entropy":
            return terms
        scores, is_right = jax.nn.sigmoid(logits), jax.nn.one_hot(label, logits.shape[1])
        right = jnp.sum(scores * is_right, axis=1, keepdims=True)
        losses = jnp.sum((1 - is_right) * jax.nn.relu(self.margin - right + scores), axis=1) / (logits.shape[1] - 1)
        return terms | {"task_loss": Term.of(losses, weights, 1.0)}

    def predict(self, params: Params, example: Arrays) -> Arrays:
        statements = self.statements(params, example, None)
        scores = self.scores(params, example, statements, None)
        # β of a path's pair times its α. The index -1 of padding has an attention of 0.
        pair = jnp.take_along_axis(scores.pair_attention, example["path_pairs"].astype(jnp.int32), axis=-1)
        return {"logits": scores.logit, "attention": pair * scores.path_attention, "statement": statements}

    def answer(self, record: Record, parts: Sequence[tuple[EncodedExample, Arrays]]) -> Answer:
        """Return the answer, with the best paths of each choice and the attention on them."""
        (example, outputs), = parts
        answer = super().answer(record, parts)
        paths = [
            [{"path": text, "attention": round(weight, 4)} for weight, text in choice]
            for choice in self._paths(example.arrays, outputs["attention"])
        ]
        return answer._replace(scores=answer.scores | {"paths": paths})

    def _paths(
        self, arrays: Arrays, attention: Float[np.ndarray, "choices paths"] | None
    ) -> list[list[tuple[float, str]]]:
        """Return the paths of each choice with their attention, the most attended first; without attention, 0."""
        if not self.graph:
            return [[] for _ in arrays["path_pairs"]]
        graph, found = open_graph(self.graph), []
        for choice, pairs in enumerate(arrays["path_pairs"]):
            row = SchemaGraph(*(arrays[name][choice] for name in SchemaGraph._fields))
            weights = np.zeros(len(pairs)) if attention is None else attention[choice]
            best = [k for k in np.argsort(-weights, kind="stable") if pairs[k] >= 0][:_SHOWN]
            found.append([(float(weights[k]), describe_path(graph, row, k)) for k in best])
        return found

    def describe(self, batch: Arrays, example: Arrays, row: int) -> list[Line]:
        """Return the statements of a row, each with its paths, and the attention on them if `example` has it."""
        statements = super().describe(batch, example, row)
        attention = example["attention"][row] if "attention" in example else None
        paths = self._paths({name: example[name][row] for name in SchemaGraph._fields}, attention)
        lines = []
        for number, (line, choice) in enumerate(zip(statements, paths, strict=True)):
            shown = [text if attention is None else f"{weight:.3f}  {text}" for weight, text in choice]
            if shown:
                shown.insert(0, self._pairs(example["concepts"][row, number], example["pairs"][row, number]))
            lines += [line, *(Line(f"{'':>14}{text}", [], []) for text in shown)]
        return lines

    def _pairs(self, concepts: np.ndarray, pairs: np.ndarray) -> str:
        """Return the concepts of a question and of a choice that paths link, as text."""
        graph, ends = open_graph(self.graph), concepts[pairs[pairs[:, 0] >= 0]].T
        return " | ".join(", ".join(graph.concepts[concept] for concept in dict.fromkeys(side)) for side in ends)

    def as_text(self, record: Record) -> tuple[str, str]:
        raise UserError("KagNet scores choices by a graph and writes no text; give an encoder, without --as-text.")

    def flops(self, length: int) -> float:
        # A training step is counted as three forward passes; a frozen encoder does one or, with stored vectors, none.
        encoder = self.model.forward_flops(length) * (1 if self.train_encoder else 0 if self.stores_vectors else 1 / 3)
        return self.num_texts * (encoder + self.network.flops(empty(self._sizes), self.model.width))


def _fingerprint(source: PretrainedModel) -> str:
    """Return a hash of a model's parameters."""
    return digest(checksums(jax.tree.map(jnp.asarray, source.params))[0])


def _question(record: Record) -> str:
    return " ".join(filter(None, (record.values["text"], record.values["question"])))

