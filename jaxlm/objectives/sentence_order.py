"""Sentence-order prediction (ALBERT, Lan et al. 2019, section 3.1): do two consecutive segments stand in the order of
the text (0), or have they changed places (1)? A swapped segment is not given away by its topic, as a random one is.

Both segments are whole sentences, as in the original code, so that the place where text breaks off tells nothing. The
original gives a text of a single sentence the start of another document and the label 1, which is next-sentence
prediction; here such a row is cut at the word nearest to its middle, and swapped as often as any other.
"""

from jaxlm.corruption.pairs import ordered_pairs
from jaxlm.objectives.pair_task import PairTask

KINDS = ("segments are IN ORDER (0)", "segments are SWAPPED (1)")
SENTENCE_ORDER = PairTask("sentence_order", "sop", KINDS, ordered_pairs, "is_swapped")
