"""Sentence-order prediction (ALBERT, Lan et al. 2019, section 3.1).

Label 0: two consecutive segments are in the order of the text; label 1: they are swapped. The topic does not reveal a
swapped segment, as it reveals a random one.

Both segments are whole sentences, as in the original code, so that the place where text breaks off reveals nothing. The
original gives a text of a single sentence the start of another document and the label 1, which is next-sentence
prediction; here such a row is split at the word nearest to its middle and swapped with the usual probability.
"""

from jaxlm.corruption.pairs import ordered_pairs
from jaxlm.objectives.pair_task import PairTask

LABEL_NAMES = ("segments are IN ORDER (0)", "segments are SWAPPED (1)")
SENTENCE_ORDER = PairTask("sentence_order", "sop", LABEL_NAMES, ordered_pairs)
