"""ELECTRA's loss token by token in PyTorch, by the recipe of the paper's section 2, with its gradients."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from jaxlm.huggingface.electra import parts
from jaxlm.huggingface.table import get, paths, put
from jaxlm.objectives.replaced_tokens import Electra


def slow_loss(objective: Electra, example, samples, params):
    """The two networks are Transformers', with one embedding module unless each has its own; `samples` [batch, slots]
    stand for what the generator draws. Returns (loss, facts for the metrics, gradients as a tree like `params`)."""
    discriminator_part, generator_part = parts(objective)
    networks = []
    for part, architecture in (
        (discriminator_part, transformers.ElectraForPreTraining), (generator_part, transformers.ElectraForMaskedLM)
    ):
        network = architecture(transformers.ElectraConfig(**part.config)).eval()
        state = {name: torch.tensor(np.array(array)) for name, array in part.table.to_transformers(params)}
        missing = network.load_state_dict(state, strict=False).missing_keys
        assert set(missing) <= {"generator_lm_head.weight"}
        networks.append(network)
    discriminator, generator = networks
    if objective.model.share_embeddings:
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
    generator_terms = []
    for r in range(rows):
        for s in range(example["masked_positions"].shape[1]):
            if example["masked_weights"][r, s]:
                p, label = int(example["masked_positions"][r, s]), int(example["masked_labels"][r, s])
                generator_terms.append(-log_p[r, p, label])
                facts["guessed"] += int(log_p[r, p].argmax()) == label
                ids[r, p] = samples[r, s]
    facts["slots"] = len(generator_terms)
    scores = run(discriminator, ids)
    discriminator_terms, suspected, replaced = [], [], []
    for r in range(rows):
        for p in range(length):
            if example["attention_mask"][r, p]:
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
    for network, part in ((discriminator, discriminator_part), (generator, generator_part)):
        named = dict(network.named_parameters(remove_duplicate=False))
        stored = {name: tuple(p.shape) for name, p in named.items()}

        def read(name, named=named):
            grad = named[name].grad
            return np.zeros(named[name].shape, np.float32) if grad is None else grad.numpy()

        own, _ = part.table.from_transformers(stored, read, params, "PyTorch")
        for path in paths(own):
            put(gradients, path, get(own, path))
    return loss.item(), facts, gradients
