"""A trained model under `mteb.evaluate` and under the evaluators of sentence-transformers, without export.

model = Encoder(jaxlm.load("runs/embedder"))
mteb.evaluate(model, mteb.get_tasks(["STSBenchmark"]))
EmbeddingSimilarityEvaluator(texts, others, scores)(model)
"""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.errors import UserError, install
from jaxlm.inference.embed import BATCH
from jaxlm.parallel.checksums import checksums, digest
from jaxlm.runs.model import TrainedModel


class Encoder:
    """The part of `SentenceTransformer`'s interface, and of mteb's `EncoderProtocol`, that evaluators call."""

    def __init__(self, model: TrainedModel) -> None:
        """Wrap a model; raise UserError if it has no vectors, or sentence-transformers is not installed."""
        try:
            import torch
            from sentence_transformers.util import SimilarityFunction
        except ImportError as error:
            raise UserError(f"sentence-transformers is not installed; {install('mteb')}.") from error
        if model.vectors.similarity == "maxsim":
            raise UserError(f"{model.path} has a vector per token; export it, and give MultiVectorEncoder(FOLDER).")
        self.model, self.similarity_fn_name = model, model.vectors.similarity or "cosine"
        self.similarity = SimilarityFunction.to_similarity_fn(self.similarity_fn_name)
        self.similarity_pairwise = SimilarityFunction.to_similarity_pairwise_fn(self.similarity_fn_name)
        self._to_tensor = torch.from_numpy
        # Evaluators write their metrics into a model's card.
        self.model_card_data = types.SimpleNamespace(set_evaluation_metrics=lambda *_: None)

    @property
    def mteb_model_meta(self) -> Any:
        """Name and revision, by which mteb keeps results; a model with other weights has another revision."""
        from mteb.models import ModelMeta

        facts = {"weights": checksums(self.model.params)[0], "vectors": list(self.model.vectors)}
        name = f"jaxlm/{Path(self.model.path).name}"
        return ModelMeta.create_empty({"name": name, "revision": digest(facts)[:16]})

    def encode(
        self, inputs: Any, *, batch_size: int = BATCH, prompt: str | None = None, prompt_name: str | None = None,
        prompt_type: Any = None, truncate_dim: int | None = None, precision: str | None = None,
        normalize_embeddings: bool = False, convert_to_tensor: bool = False, **_: Any,
    ) -> Any:
        """Return the vectors of texts, or of batches of mteb's loader, as an array or a tensor of PyTorch."""
        prompts = dict(self.model.vectors.prompts)
        if prompt is None and prompt_name is not None:
            if prompt_name not in prompts:
                raise UserError(f"{self.model.path} has no prompt {prompt_name!r}; it has {sorted(prompts)}.")
            prompt = prompts[prompt_name]
        if precision not in (None, "float32"):
            raise UserError(f"vectors are float32; leave out the precision {precision}.")
        is_loader = hasattr(inputs, "dataset")
        texts = [text for batch in inputs for text in batch["text"]] if is_loader else inputs
        role = str(getattr(prompt_type, "value", prompt_type or ""))
        if prompt is None and not role:
            prompt = self.model.vectors.prompt or ""  # as SentenceTransformer.encode: the default one, or none
        normalize = normalize_embeddings or None
        found = self.model.encode(texts, normalize=normalize, prompt=prompt, role=role, batch_size=batch_size)
        found = found[:, :truncate_dim]
        if normalize_embeddings and truncate_dim:
            found = found / np.linalg.norm(found, axis=1, keepdims=True).clip(1e-12)
        return self._to_tensor(found) if convert_to_tensor else found

    encode_query = functools.partialmethod(encode, prompt_type="query")
    encode_document = functools.partialmethod(encode, prompt_type="document")
