"""Apache Beam as an engine: shards, keys and duplicates of a text on the workers of a pipeline.

    parts ─┬─ shards
           └─ keys ─ (key, document) ─ GroupByKey ─ later documents ─ CoGroupByKey part ─ masks

All of it goes to the cache folder, in the same files that the local engine writes; what is there is not made again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from jaxlm.data.arrays import FACTS
from jaxlm.data.duplicates import Keys, finish_masks, write_mask
from jaxlm.data.engine import Work
from jaxlm.data.parts import Part
from jaxlm.data.text import TextData
from jaxlm.errors import UserError, install
from jaxlm.paths import cause, without_queries, write_whole
from jaxlm.tokenizers.tokenizer import Tokenizer

_Numbered = tuple[int, Part]


def run_pipeline(data: TextData, parts: Sequence[Part], tokenizer: Tokenizer, arguments: Sequence[str]) -> None:
    """Make the shards, keys and duplicates of a text that are missing.

    `arguments` are pipeline options of Beam; without `--runner` the pipeline runs in this process. The workers get the
    tokenizer within the pipeline.

    Raises:
        UserError: Beam is not installed or refuses the options; or the sentence of a worker.
    """
    try:
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise UserError(f"--beam needs apache-beam; {install('beam')}.") from error
    # The default of Beam would first try to download another runner. A --runner of the arguments wins.
    options = PipelineOptions(["--runner=FnApiRunner", *arguments])
    try:
        pipeline = apache_beam.Pipeline(options=options)
    except (ImportError, ValueError) as error:
        raise UserError(f"Beam refuses the options after -- ({cause(error)}).") from error
    failure = data.shared_cache / "failures" / secrets.token_hex(8)
    _build(pipeline, data, parts, tokenizer, os.fspath(failure))
    try:
        state = pipeline.run().wait_until_finish()
        end = f"has ended as {state}" if state != "DONE" else ""
    except Exception as error:  # each runner has exceptions of its own
        *_, last = str(error).strip().splitlines() or [type(error).__name__]  # of a traceback
        end = f"has failed ({without_queries(last)})"
    if failure.exists():
        sentence = failure.read_text()
        failure.unlink()
        raise UserError(sentence)
    if end:
        raise UserError(f"the pipeline of Beam {end}; run the command again, which goes on.", exit_code=1)
    if data.deduplicate != "off":
        finish_masks(data.duplicates_folder(parts))


def _build(pipeline: Any, data: TextData, parts: Sequence[Part], tokenizer: Tokenizer, failure: str) -> None:
    """Add the transforms; `failure` names the file for the sentence of a worker's UserError."""
    import apache_beam as beam

    numbered = pipeline | "Parts" >> beam.Create(list(enumerate(parts)), reshuffle=True)
    for work in data.works(tokenizer):
        made = numbered | f"Make {type(work).__name__.lower()}" >> beam.FlatMap(_make, work, failure)
    folder = data.duplicates_folder(parts)
    if data.deduplicate == "off" or (folder / FACTS).exists():
        return
    keyed = made | "Keys" >> beam.FlatMap(_by_key, data.keys)
    later = keyed | "Group by key" >> beam.GroupByKey() | "Later documents" >> beam.FlatMap(_later_ones)
    sizes = made | "Sizes" >> beam.Map(lambda numbered, keys: (numbered[0], keys.num_documents(numbered[1])), data.keys)
    grouped = {"size": sizes, "later": later} | "Group by part" >> beam.CoGroupByKey()
    grouped | "Write masks" >> beam.Map(_write_mask, os.fspath(folder), failure)


def _make(numbered: _Numbered, work: Work, failure: str) -> Iterator[_Numbered]:
    from apache_beam.metrics import Metrics

    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # Beam has a process for each core
    try:
        work.make(numbered[1], Metrics.counter("jaxlm", "bytes_of_text").inc)
    except UserError as error:  # if it went on, a runner would try again, and bury the sentence in a traceback
        if error.exit_code == 1:  # a bucket's failure, which passes
            raise
        write_whole(epath.Path(failure), str(error).encode())
    else:
        yield numbered


def _by_key(numbered: _Numbered, keys: Keys) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Yield each key of each document with the number of the part and the document's place in it."""
    number, part = numbered
    size = keys.num_documents(part)
    for column in range(keys.num_columns):
        for place, key in enumerate(keys.read(part, size, column)):
            yield bytes([column]) + key.tobytes(), (number, place)


def _later_ones(group: tuple[bytes, Iterable[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """Yield all documents of a group but the earliest; they need not fit into memory."""
    documents = iter(group[1])
    earliest = next(documents)
    for document in documents:
        yield max(earliest, document)
        earliest = min(earliest, document)


def _write_mask(group: tuple[int, Mapping[str, Sequence[int]]], folder: str, failure: str) -> None:
    number, found = group
    mask = np.zeros(found["size"][0], bool)
    mask[list(found["later"])] = True
    if not epath.Path(failure).exists():  # then keys are missing
        write_mask(epath.Path(folder), number, mask)
