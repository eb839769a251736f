"""word2vec's text format: a line with the number of words and the width, then a line per word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.objectives.skip_gram import SkipGram
from jaxlm.tokenizers.tokenizer import Tokenizer

NAME = "vectors.txt"
README = f"""# Word vectors

`{NAME}` has {{count:,}} words with {{width}} numbers each, in word2vec's text format:

```python
from gensim.models import KeyedVectors
vectors = KeyedVectors.load_word2vec_format("{NAME}")
```
"""


def write(folder: Path, objective: SkipGram, params: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write the vectors of all words, without special tokens and [UNK], and a README.md on how to load them."""
    vectors = np.asarray(objective.model.vectors(params), np.float32)
    v = tokenizer.vocabulary
    words = [(i, piece) for i, piece in enumerate(v.pieces)
             if piece and not v.special[i] and i != v.unk and not any(char.isspace() for char in piece)]
    with (folder / NAME).open("w", encoding="utf-8", newline="\n") as file:
        file.write(f"{len(words)} {vectors.shape[1]}\n")
        for number, piece in words:
            file.write(f"{piece} {' '.join(map(repr, vectors[number].tolist()))}\n")
    (folder / "README.md").write_text(README.format(count=len(words), width=vectors.shape[1]), encoding="utf-8")
