"""Synthetic datasets and model measurements for the claims in configs/claims.

    python launch/tables/claim_measures.py NAME … --out FOLDER --seed N

Prints one JSON object of metrics. Generated files go to FOLDER.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gzip
import json
import lzma
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PAIRS = {
    "capitals": """france paris germany berlin italy rome spain madrid russia moscow japan tokyo china beijing
        greece athens egypt cairo poland warsaw austria vienna portugal lisbon ireland dublin norway oslo
        sweden stockholm finland helsinki denmark copenhagen hungary budapest cuba havana iraq baghdad iran tehran""",
    "plurals": """city cities country countries year years day days river rivers king kings song songs book books
        film films game games player players church churches school schools child children man men woman women
        species species war wars town towns village villages bird birds animal animals""",
    "past": """play played work worked move moved become became begin began take took give gave know knew
        make made see saw win won lose lost write wrote lead led hold held leave left find found die died
        live lived include included""",
    "adverbs": """usual usually final finally general generally original originally recent recently
        common commonly current currently large largely main mainly direct directly rapid rapidly
        official officially frequent frequently particular particularly special specially""",
}
"""Pairs of words with the same relation."""

TYPES = {"mammal", "bird", "fish", "arthropod", "reptile", "produce", "beverage", "meat", "dish", "baked goods"}
"""Classes of Open English WordNet below animal and food that are types of words."""


def copies(out: Path, seed: int, lines: int, length: int) -> dict[str, float]:
    """Write text.txt: lines in each of which a random word of `length` letters comes twice."""
    draw = np.random.default_rng(seed)
    letters = np.array(list(string.ascii_lowercase))
    with (out / "text.txt").open("w") as file:
        for _ in range(lines):
            word = "".join(draw.choice(letters, length))
            file.write(f"{word}|{word}\n\n")
    return {"lines": lines}


def homes(out: Path, seed: int, animals: int) -> dict[str, float]:
    """Write a graph of where invented animals live, vectors of its concepts, and questions.

    A fifth of the animals are only in dev.jsonl. The vectors are random, so that they say nothing of the places.
    """
    from jaxlm.knowledge.knowledge_graph import Vectors, write_vectors

    draw = np.random.default_rng(seed)
    places = ["river", "house", "tree", "road", "shop", "bed", "cave", "field", "lake", "garden", "tower", "bridge"]
    parts = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aiou"]
    known = sorted({"".join(draw.choice(parts, 3)) + "x" for _ in range(2 * animals)})[:animals]
    draw.shuffle(known)
    home = {animal: str(draw.choice(places)) for animal in known}
    (out / "graph.tsv").write_text("".join(f"{animal}\tAtLocation\t{place}\n" for animal, place in home.items()))
    for kind, names in (("entity", [*known, *places]), ("relation", ["AtLocation", "PartOf"])):
        write_vectors(out, kind, Vectors(tuple(names), draw.normal(size=(len(names), 100)).astype(np.float32)))
    for name, chosen in (("train", known[animals // 5:]), ("dev", known[:animals // 5])):
        with (out / f"{name}.jsonl").open("w") as file:
            for number, animal in enumerate(4 * chosen):
                others = draw.choice([place for place in places if place != home[animal]], 2, replace=False)
                shown = draw.permutation([home[animal], *others]).tolist()
                choices = [{"label": label, "text": place} for label, place in zip("ABC", shown, strict=True)]
                file.write(json.dumps({
                    "id": f"{name}{number}", "answerKey": "ABC"[shown.index(home[animal])],
                    "question": {"stem": f"Where does the {animal} live?", "choices": choices},
                }) + "\n")
    return {"animals": animals}


def stories(out: Path, seed: int, documents: int) -> dict[str, float]:
    """Write text.txt: documents of invented words, in which both a topic and an order of sentences can be recognized.

    Each document has one of 20 topics, whose 30 words make up most of its sentences, and each sentence names a time of
    day, which never goes back within a document. So topics tell consecutive sentences from those of another document,
    and times tell the order of two consecutive parts.
    """
    draw = np.random.default_rng(seed)
    parts = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    invented = sorted({"".join(draw.choice(parts, 2)) for _ in range(3000)})
    topics = draw.permutation(invented)[:600].reshape(20, 30)
    times = ["dawn", "morning", "noon", "afternoon", "evening", "dusk", "night", "midnight"]
    with (out / "text.txt").open("w") as file:
        for _ in range(documents):
            topic, hours = draw.choice(topics), np.sort(draw.integers(len(times), size=8))
            for hour in hours:
                sentence = [*draw.choice(topic, 4), times[hour]]
                file.write(" ".join(draw.permutation(sentence)) + ".\n")
            file.write("\n")
    return {"documents": documents}


def words(out: Path, seed: int, data: Path) -> dict[str, float]:
    """Write names of ConceptNet-100K, and sentences of Wikipedia with words of it that are animals or foods.

    names.tsv, the names that come more than once, is what `--data.entity-names` reads. A row of train.json or dev.json
    has a sentence, the place of a word, its types by WordNet's hypernyms, and the word as its entity. A quarter of the
    words are only in dev.json. Words with fewer than 3 sentences are dropped; each word contributes at most 12
    sentences.
    """
    with gzip.open(data / "conceptnet100k" / "train.txt.gz", "rt") as file:
        concepts = collections.Counter(concept for line in file for concept in line.rstrip("\n").split("\t")[::2])
    (out / "names.tsv").write_text("".join(f"{name}\t{name}\n" for name, n in sorted(concepts.items()) if n > 1))
    types = word_types(data / "oewn", set(concepts))
    longest_first = sorted(map(re.escape, types), key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(longest_first)})s?\b")
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    with lzma.open(data / "pretrain" / "wiki_en.jsonl.xz", "rt") as file:
        for line in file:
            for sentence in re.split(r"(?<=[.!?]) |\n", json.loads(line)["text"]):
                for match in pattern.finditer(sentence) if 40 < len(sentence) < 220 else ():
                    word, start, end = match[1], *match.span(1)
                    if len(found[word]) < 12:
                        found[word].append({
                            "id": f"{word}-{len(found[word])}", "sent": sentence, "start": start, "end": end,
                            "labels": sorted(types[word]), "ents": [[word, start, end, 0.9]],
                        })
    draw = np.random.default_rng(seed)
    known = draw.permutation(sorted(word for word, rows in found.items() if len(rows) >= 3)).tolist()
    for name, chosen in (("dev", known[: len(known) // 4]), ("train", known[len(known) // 4:])):
        rows = [row for word in chosen for row in found[word]]
        (out / f"{name}.json").write_text(json.dumps([rows[i] for i in draw.permutation(len(rows))]))
    return {"words": len(known)}


def word_types(wordnet: Path, words: set[str]) -> dict[str, set[str]]:
    """Return the types of those words that are animals or foods, of all their senses."""
    import yaml

    senses: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for kind in ("animal", "food"):
        with gzip.open(wordnet / f"noun.{kind}.yaml.gz") as file:
            found = yaml.safe_load(file)
        senses |= found
        kinds |= dict.fromkeys(found, kind)

    @functools.cache
    def above(sense: str) -> frozenset[str]:
        names = {senses[sense]["members"][0]}
        return frozenset(names.union(*(above(h) for h in senses[sense].get("hypernym", []) if h in senses)))

    types: dict[str, set[str]] = collections.defaultdict(set)
    for sense, entry in senses.items():
        for member in entry["members"]:
            word = member.lower().replace("_", " ")
            if word in words and above(sense) & TYPES:
                types[word] |= (above(sense) & TYPES) | {kinds[sense]}
    return types


def reversible(seed: int, stored: bool) -> dict[str, float]:
    """Return the relative gradient error against stored activations, and the memory per additional layer in MB."""
    import jax
    import jax.numpy as jnp

    from jaxlm.models import reformer
    from jaxlm.models.base import Inputs

    recomputed = reformer.run_reversible

    def with_stored(*arguments: Any) -> Any:
        return reformer.reversible_forward(*arguments)[0]

    def gradient(layers: int, run: Callable[..., Any]) -> tuple[jax.Array, int]:
        """Return the gradient as one vector, and the bytes that computing it takes."""
        reformer.run_reversible = run
        model = reformer.Reformer(
            hidden_size=128, num_layers=layers, num_heads=2, head_dim=64, intermediate_size=512, axial_shape=(16, 16),
            axial_widths=(64, 64), local_chunk_size=32, lsh_chunk_size=32, num_hashes=2, buckets=(16,), dropout=0.1,
            attention_types=("local", "lsh"),
        )
        keys = jax.random.split(jax.random.key(seed), 4)
        ids = jax.random.randint(keys[0], (16, 256), 0, model.vocab_size)
        cotangent = jax.random.normal(keys[1], (16, 256, 256))
        loss = lambda params, ids: jnp.sum(model.hidden_states(params, Inputs(ids), key=keys[2]) * cotangent)  # noqa: E731
        params = model.init(keys[3])
        compiled = jax.jit(jax.grad(loss)).lower(params, ids).compile()
        flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(compiled(params, ids))])
        return flat, compiled.memory_analysis().temp_size_in_bytes

    run = with_stored if stored else recomputed
    (few, few_bytes), (_, many_bytes) = gradient(2, run), gradient(10, run)
    expected, _ = gradient(2, with_stored)
    return {
        "error": float(jnp.linalg.norm(few - expected) / jnp.linalg.norm(expected)),
        "megabytes_a_layer": (many_bytes - few_bytes) / 8 / 1e6,
    }


def analogies(model: Path) -> dict[str, float]:
    """Accuracy of a : b = c : ? over all pairs of pairs of a relation, by 3CosAdd without the three words."""
    from jaxlm.runs.load import load_run

    loaded = load_run(model)
    vectors = np.asarray(loaded.objective.model.vectors(loaded.params), np.float32)
    vectors = vectors / (np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-9)
    vocabulary: dict[str, int] = {}
    for i, piece in enumerate(loaded.tokenizer.vocabulary.pieces):
        vocabulary.setdefault(piece.lstrip("▁").lower(), i)  # of several spellings the most frequent
    right, asked, figures = 0, 0, {}
    for relation, words in PAIRS.items():
        listed = words.split()
        pairs = [(vocabulary[a], vocabulary[b]) for a, b in zip(listed[::2], listed[1::2], strict=True)
                 if a != b and a in vocabulary and b in vocabulary]
        hits = [answer(vectors, a, b, c) == d for a, b in pairs for c, d in pairs if (a, b) != (c, d)]
        figures[relation] = float(np.mean(hits)) if hits else 0.0
        right, asked = right + sum(hits), asked + len(hits)
    return figures | {"accuracy": right / max(asked, 1), "questions": asked}


def answer(vectors: np.ndarray, a: int, b: int, c: int) -> int:
    """Return the word nearest to b − a + c."""
    scores = vectors @ (vectors[b] - vectors[a] + vectors[c])
    scores[[a, b, c]] = -np.inf
    return int(scores.argmax())


def repeats(model: Path, rows: int = 256, length: int = 60) -> dict[str, float]:
    """Loss of held-out tokens after other tokens, and after the same tokens, in nats.

    Both times `length` tokens of context precede them, so that the gain is that of the repetition alone.
    """
    import jax
    import jax.numpy as jnp

    from jaxlm.models.base import Inputs
    from jaxlm.runs.folder import RunFolder
    from jaxlm.runs.load import load_run

    loaded, run = load_run(model), RunFolder.read(model)
    text = run.experiment.data.open(loaded.tokenizer, lambda line: None)
    tokens = text.held_out.tokens.read(0, rows * length).astype(np.int32).reshape(-1, length)
    others = np.roll(tokens, 1, axis=0)
    net, params = loaded.objective.model, loaded.params

    @jax.jit
    def losses(ids: jax.Array) -> jax.Array:
        features = net.token_features(params, net.hidden_states(params, Inputs(ids)))
        table, bias = net.output_matrix(params)
        logits = features @ table.T if bias is None else features @ table.T + bias
        log_p = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        return -jnp.take_along_axis(log_p, ids[:, 1:, None], axis=2)[..., 0]

    def mean_loss(context: np.ndarray) -> float:
        ids = jnp.asarray(np.concatenate([context, tokens], axis=1))
        parts = np.array_split(ids, max(1, len(ids) // 32))
        return float(np.concatenate([np.asarray(losses(part))[:, length:] for part in parts]).mean())

    first, second = mean_loss(others), mean_loss(tokens)
    return {"first": first, "second": second, "gain": first - second}


def main() -> None:
    """Run the measure that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("copies", "homes", "stories", "words", "reversible", "analogies", "repeats"))
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--length", type=int, default=60)
    parser.add_argument("--animals", type=int, default=400)
    parser.add_argument("--documents", type=int, default=20000)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--stored", action="store_true")
    options = parser.parse_args()
    print(json.dumps({
        "copies": lambda: copies(options.out, options.seed, options.lines, options.length),
        "homes": lambda: homes(options.out, options.seed, options.animals),
        "stories": lambda: stories(options.out, options.seed, options.documents),
        "words": lambda: words(options.out, options.seed, options.data),
        "reversible": lambda: reversible(options.seed, options.stored),
        "analogies": lambda: analogies(options.model),
        "repeats": lambda: repeats(options.model),
    }[options.name]()))


if __name__ == "__main__":
    main()
