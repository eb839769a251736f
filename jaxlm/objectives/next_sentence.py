"""Next-sentence prediction (BERT, Devlin et al. 2018, section 3.1, Task #2): does the second segment of a row follow
the first one in the text (0), or is it of another document (1)?"""

from jaxlm.corruption.pairs import sentence_pairs
from jaxlm.objectives.pair_task import PairTask

KINDS = ("second segment is NEXT (0)", "second segment is RANDOM (1)")
NEXT_SENTENCE = PairTask("next_sentence", "nsp", KINDS, sentence_pairs, "is_random")
