"""Templates of four families."""

from jaxlm.tokenizers.template import Template

BERT = Template(
    single="cls $A sep", pair="cls $A sep $B:1 sep:1", inputs=("input_ids", "token_type_ids", "attention_mask"),
    needs=("pad", "cls", "sep", "mask"),
)
ROBERTA = Template(single="cls $A sep", pair="cls $A sep sep $B sep", needs=("pad", "cls", "sep", "mask"))
GPT2 = Template(needs=("eos",))
T5 = Template(single="$A eos", pair="$A eos $B eos", needs=("pad", "eos"))
