"""ELECTRA's loss token by token in PyTorch (Clark et al. 2020, section 2), with its gradients."""

from __future__ import annotations

import jax
import numpy as np
import torch
import transformers

from jaxlm.models.electra import Electra
from jaxlm.objectives.replaced_tokens import ReplacedTokens


def names(model: Electra, network: str) -> dict[str, str]:
    """Return the parameter names of Transformers' class for a network and our paths; their kernels are transposed."""
    shared = model.share_embeddings or network == "discriminator"
    embeddings = "embeddings" if shared else "generator/embeddings"
    found = {
        f"electra.embeddings.{theirs}_embeddings.weight": f"{embeddings}/{ours}/embedding"
        for theirs, ours in (("word", "word"), ("position", "position"), ("token_type", "token_type"))
    }

    def add(theirs: str, ours: str, kernel: str = "kernel") -> None:
        found.update({f"{theirs}.weight": f"{ours}/{kernel}", f"{theirs}.bias": f"{ours}/bias"})

    own = getattr(model, network)
    add("electra.embeddings.LayerNorm", f"{embeddings}/norm", "scale")
    if own.hidden_size != model.embedding_size:
        add("electra.embeddings_project", f"{network}/projection")
    for i in range(own.num_layers):
        theirs, ours = f"electra.encoder.layer.{i}", f"{network}/encoder/layers/{i}"
        for name in ("query", "key", "value"):
            add(f"{theirs}.attention.self.{name}", f"{ours}/attention/{name}")
        add(f"{theirs}.attention.output.dense", f"{ours}/attention/out")
        add(f"{theirs}.attention.output.LayerNorm", f"{ours}/attention_norm", "scale")
        add(f"{theirs}.intermediate.dense", f"{ours}/mlp/wi")
        add(f"{theirs}.output.dense", f"{ours}/mlp/wo")
        add(f"{theirs}.output.LayerNorm", f"{ours}/mlp_norm", "scale")
    if network == "generator":
        add("generator_predictions.dense", "generator/mlm_head/dense")
        add("generator_predictions.LayerNorm", "generator/mlm_head/norm", "scale")
        found["generator_lm_head.bias"] = "generator/mlm_head/bias"
    else:
        add("discriminator_predictions.dense", "rtd_head/dense")
        add("discriminator_predictions.dense_prediction", "rtd_head/score")
    return found


def unstacked(params) -> dict[str, np.ndarray]:
    """Return path → parameter, with stacked layers as "layers/0/…", "layers/1/…"."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        before, layers, after = "/".join(key.key for key in path).partition("/layers/")
        found |= {f"{before}{layers}{i}/{after}": own for i, own in enumerate(leaf)} if layers else {before: leaf}
    return found


def turned(array: np.ndarray, path: str) -> np.ndarray:
    return array.T if path.endswith("kernel") else array


def slow_loss(objective: ReplacedTokens, example, samples, params):
    """Compute the loss with Transformers' networks, which share one embedding module unless each has its own.

    `samples` [batch, slots] replace what the generator draws.

    Returns:
        The loss, the facts for the metrics, and the gradients as a tree like `params`.
    """
    m = objective.model
    flat = unstacked(params)
    networks = []
    for network, architecture in (
        ("discriminator", transformers.ElectraForPreTraining), ("generator", transformers.ElectraForMaskedLM)
    ):
        own = getattr(m, network)
        module = architecture(transformers.ElectraConfig(
            vocab_size=m.vocab_size, embedding_size=m.embedding_size, hidden_size=own.hidden_size,
            num_hidden_layers=own.num_layers, num_attention_heads=own.num_heads,
            intermediate_size=own.intermediate_size, max_position_embeddings=m.max_positions, layer_norm_eps=m.norm_eps,
        )).eval()
        state = {theirs: torch.tensor(turned(flat[ours], ours)) for theirs, ours in names(m, network).items()}
        missing, unexpected = module.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"generator_lm_head.weight"}
        networks.append(module)
    discriminator, generator = networks
    if m.share_embeddings:
        generator.electra.embeddings = discriminator.electra.embeddings
    generator.generator_lm_head.weight = generator.electra.embeddings.word_embeddings.weight

    def run(network, ids):
        return network(
            input_ids=torch.tensor(ids), token_type_ids=torch.tensor(example["token_type_ids"]),
            attention_mask=torch.tensor(example["attention_mask"]),
        ).logits

    rows, length = example["input_ids"].shape
    log_p = torch.log_softmax(run(generator, example["input_ids"].astype(np.int64)), -1)
    ids = example["original_ids"].astype(np.int64)
    facts = {"slots": 0, "guessed": 0, "written": set()}
    generator_terms, predicted = [], set()
    for r in range(rows):
        for s in range(example["masked_positions"].shape[1]):
            if example["masked_weights"][r, s]:
                p, label = int(example["masked_positions"][r, s]), int(example["masked_labels"][r, s])
                generator_terms.append(-log_p[r, p, label])
                facts["guessed"] += int(log_p[r, p].argmax()) == label
                ids[r, p] = samples[r, s]
                predicted.add((r, p))
    facts["slots"] = len(generator_terms)
    scores = run(discriminator, ids)
    discriminator_terms, suspected, replaced = [], [], []
    for r in range(rows):
        for p in range(length):
            if (r, p) in predicted or (objective.judge == "all" and example["attention_mask"][r, p]):
                fake = int(ids[r, p]) != int(example["original_ids"][r, p])
                probability = torch.sigmoid(scores[r, p])
                discriminator_terms.append(-torch.log(probability if fake else 1 - probability))
                suspected.append(scores[r, p].item() > 0)
                replaced.append(fake)
    facts |= {
        "generator_loss": sum(generator_terms).item() / len(generator_terms),
        "discriminator_loss": sum(discriminator_terms).item() / len(discriminator_terms),
        "tokens": len(replaced),
        "right": sum(a == b for a, b in zip(suspected, replaced, strict=True)),
        "both": sum(a and b for a, b in zip(suspected, replaced, strict=True)),
        "suspected": sum(suspected), "replaced": sum(replaced),
    }
    loss = objective.generator_weight * sum(generator_terms) / len(generator_terms)
    loss = loss + objective.discriminator_weight * sum(discriminator_terms) / len(discriminator_terms)
    loss.backward()

    gradients = {}
    for network, module in (("discriminator", discriminator), ("generator", generator)):
        named = dict(module.named_parameters(remove_duplicate=False))
        for theirs, ours in names(m, network).items():
            grad = named[theirs].grad
            gradients[ours] = np.zeros_like(flat[ours]) if grad is None else turned(grad.numpy(), ours)
    assert gradients.keys() == flat.keys()

    def of_path(path, leaf):
        before, layers, after = "/".join(key.key for key in path).partition("/layers/")
        if not layers:
            return gradients[before]
        return np.stack([gradients[f"{before}{layers}{i}/{after}"] for i in range(leaf.shape[0])])

    return loss.item(), facts, jax.tree_util.tree_map_with_path(of_path, params)
