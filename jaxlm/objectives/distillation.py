"""Distillation of a masked language model into a shallower one (DistilBERT, Sanh et al. 2019)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import AtEnd, Inputs
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.encoder import Encoder
from jaxlm.models.layers.stack import at_positions
from jaxlm.objectives.base import Example, Objective, Term, Terms
from jaxlm.objectives.chunked_loss import chunked_cross_entropy, chunked_divergence
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.pretrained import PretrainedModel
from jaxlm.objectives.teacher import Mismatch, require_teacher, size_mismatches
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.trees import leaves, merge_params
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class Distillation(MaskedLM):
    """Train a student on the output distribution of its teacher at every token.

    Loss: 5 · T² KL(teacher ‖ student) at temperature T + 2 · masked-LM cross-entropy + (1 - cosine of the last hidden
    states). The student is initialized with layers of its teacher.

    Rare tokens are masked more often: each row has as many masks as in BERT, drawn in proportion to count^-0.7. (The
    original draws them over all rows of a batch together.)
    """

    model: Encoder = field(Distilbert(), weights=True)
    """The student. It has the teacher's hidden size, unless `copy_layers` is False and `cosine_weight` 0."""
    teacher: str = field("", resumable=True)
    """Run folder, Transformers folder or `hf:ORG/NAME[@REVISION]` of a masked language model with the student's
    tokenizer."""
    temperature: float = field(2.0, range="(0, inf)")
    """Softmax temperature of both models."""
    soft_weight: float = field(5.0, range="[0, inf)")
    """Weight of the divergence from the teacher's distribution."""
    mlm_weight: float = field(2.0, range="[0, inf)")
    """Weight of the masked-LM cross-entropy."""
    cosine_weight: float = field(1.0, range="[0, inf)")
    """Weight of the cosine loss of the last hidden states."""
    rarity: float = field(0.7, range="[0, inf)")
    """Exponent of masking: a token with count n is masked in proportion to n^-rarity; 0 masks uniformly."""
    copy_layers: bool = True
    """Begin with the teacher's embeddings, head and evenly spaced layers; False: with random weights; the
    teacher may then be of any family with a masked-LM head."""
    input_format: Literal["document", "full-sentences"] = field("document", weights=True)
    """Rows of one segment: text of one document, or full rows across documents, separated by the end symbol."""
    short_rate: float = field(0.0, range="[0, 1]")
    """Share of rows cut to a random shorter length."""

    token_losses = ()  # rare tokens are predicted more often, so the unigram entropy is no baseline

    def check(self, vocabulary: Vocabulary, length: int) -> None:
        if self.rarity and (self.whole_word or self.longest_ngram > 1):
            raise UserError(
                "objective.rarity masks single tokens; set it to 0, or leave out whole_word and longest_ngram."
            )
        if self.predicts_next:
            raise UserError("objective.predicts_next is for masked LM without a teacher; leave it out.")
        super().check(vocabulary, length)

    @property
    def never_masked(self) -> Bool[np.ndarray, " vocab"]:
        """Special tokens, and [UNK] too, as in the released code."""
        return self.vocabulary.special | (np.arange(self.vocabulary.size) == self.vocabulary.unk)

    @property
    def preference(self) -> Float[Array, " vocab"] | None:
        """Relative probability of masking each token: that of rare ones is higher; None for uniform."""
        if self.statistics is None or not self.rarity:
            return None
        return jnp.asarray(np.maximum(self.statistics.token_counts, 1.0) ** -self.rarity, jnp.float32)

    def load_constants(self, vocabulary: Vocabulary, load: Callable[[str], PretrainedModel]) -> PretrainedModel:
        return require_teacher(self, vocabulary, load, self._mismatches, predicts=True)

    def _mismatches(self, teacher: Objective) -> Iterator[Mismatch]:
        """Yield what the loss, or initialization from the teacher's layers, does not bear."""
        theirs, ours = teacher.model, self.model.for_vocabulary(teacher.vocabulary)
        if teacher.answer_kind != "masks" or teacher.predicts_next or theirs.is_causal:
            yield Mismatch("no predictions of masked tokens at their own positions", "")
        names = ["vocab_size", "hidden_size", "num_heads", "intermediate_size"]
        names = names if self.copy_layers else names[: 1 + bool(self.cosine_weight)]
        if self.copy_layers and theirs.max_positions > ours.max_positions:
            names.append("max_positions")
        if self.copy_layers and theirs.num_layers < ours.num_layers:
            names.append("num_layers")
        yield from (found := list(size_mismatches(theirs, ours, *names)))
        if self.copy_layers and not found and theirs.max_positions >= ours.max_positions:
            yield from _other_parameters(theirs, ours)

    def merge_pretrained(self, params: Params, source: PretrainedModel | None) -> Params:
        """Initialize the student with the teacher's embeddings, head and evenly spaced layers.

        Six layers of twelve are 0, 2, 4, 7, 9 and 11, as in the released code.
        """
        if source is not None or not self.copy_layers:
            return super().merge_pretrained(params, source)
        teacher = self.constants
        last = teacher.objective.model.num_layers - 1
        teacher_layers = np.linspace(0, last, self.model.num_layers).round().astype(int)
        layers = jax.tree.map(lambda leaf: leaf[teacher_layers], teacher.params["encoder"]["layers"])
        return merge_params(params, teacher.params | {"encoder": teacher.params["encoder"] | {"layers": layers}})

    def loss(self, params: Params, example: Example, key: jax.Array, train: bool) -> Terms:
        teacher, teacher_params = self.constants.objective.model, self.constants.params
        inputs = Inputs(example["input_ids"], mask=example["attention_mask"], padding=AtEnd())
        teacher_hidden = jax.lax.stop_gradient(teacher.hidden_states(teacher_params, inputs))
        student_hidden = self.model.hidden_states(params, inputs, key=key if train else None)
        features, (table, bias) = self.model.token_features(params, student_hidden), self.model.output_matrix(params)
        token_weights, weights = inputs.mask.astype(jnp.float32), example["masked_weights"]
        tokens = chunked_cross_entropy(
            at_positions(features, self.positions(example)), table, example["masked_labels"], weights, bias=bias
        )
        soft = chunked_divergence(
            (features, table, bias),
            (teacher.token_features(teacher_params, teacher_hidden), *teacher.output_matrix(teacher_params)),
            token_weights, self.temperature,
        )
        terms = tokens.terms("mlm", weights, self.mlm_weight)
        terms["soft_loss"] = Term(soft, jnp.sum(token_weights), self.soft_weight)
        if self.cosine_weight:
            errors = 1.0 - cosine(student_hidden, teacher_hidden)
            terms["cosine_loss"] = Term.of(errors, token_weights, self.cosine_weight)
        return terms

    def flops(self, length: int) -> float:
        # The head runs at every token for the divergence, and again at the masked ones.
        return self.model.forward_flops(length, length + self.num_slots(length))

    def constants_flops(self, length: int) -> float:
        return self.constants.objective.model.forward_flops(length, length)


def _other_parameters(teacher: Encoder, student: Encoder) -> Iterator[Mismatch]:
    """Yield the first parameter of the student that the teacher lacks or has with another shape."""
    theirs, ours = (leaves(jax.eval_shape(model.init, jax.random.key(0))) for model in (teacher, student))
    shapes = {path: leaf.shape for path, leaf in theirs.items()}
    for path, leaf in ours.items():
        shape = leaf.shape
        if path.startswith("encoder/layers/"):  # some of all layers are copied
            shape = (teacher.num_layers, *shape[1:])
        is_fresh = path.startswith("embeddings/token_type/") and path not in shapes  # a DistilBERT has no segments
        if shapes.get(path) != shape and not is_fresh:
            yield Mismatch(f"no {path} of the student's shape", "--objective.copy-layers False")
            return


def cosine(a: Float[Array, "*shape hidden"], b: Float[Array, "*shape hidden"]) -> Float[Array, "*shape"]:
    """Return the cosine similarity along the last axis, float32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    squares = (jnp.sum(a * a, -1) + 1e-12) * (jnp.sum(b * b, -1) + 1e-12)
    return jnp.sum(a * b, -1) * jax.lax.rsqrt(squares)
