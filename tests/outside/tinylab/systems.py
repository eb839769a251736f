"""The entry point `jaxlm.systems`: what the package adds."""

from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.systems import System, TaskSystem, register
from tinylab.gated import GatedBert
from tinylab.odd import OddWord, WordRows
from tinylab.shuffled import Shuffled
from tinylab.smoothed import ReviewRows, Smoothed

register(
    System(MaskedLM, GatedBert, "tinylab.table"),
    System(Shuffled, GatedBert, "tinylab.table", export_only=True),
    TaskSystem(Smoothed, ReviewRows, "SequenceClassification", "text-classification"),
    TaskSystem(OddWord, WordRows, "TokenClassification", "token-classification"),
)
