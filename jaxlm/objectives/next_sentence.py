"""Next-sentence prediction (BERT, Devlin et al. 2018, section 3.1, Task #2).

Label 0: the second segment follows the first one in the text; label 1: it comes from another document.
"""

from jaxlm.corruption.pairs import sentence_pairs
from jaxlm.objectives.pair_task import PairTask

LABEL_NAMES = ("second segment is NEXT (0)", "second segment is RANDOM (1)")
NEXT_SENTENCE = PairTask("next_sentence", "nsp", LABEL_NAMES, sentence_pairs)
