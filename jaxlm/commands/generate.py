"""jaxlm generate PATH PROMPT …: continues a prompt (GPT-2) or answers it (T5)"""

from __future__ import annotations

from jaxlm.commands.common import Parser, start_jax
from jaxlm.errors import UserError
from jaxlm.tokenizers.tokenizer import Tokenizer


def main(arguments: list[str]) -> int:
    parser = Parser("jaxlm generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("path", help="a run folder or a Transformers folder")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="maximum number of new tokens (64)")
    parser.add_argument("--temperature", type=float, default=0.8, help="sampling temperature; 0: greedy (0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k most likely tokens; 0: from all")
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus sampling probability (0.95)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", default=None, help="special symbol that ends the text, instead of the vocabulary's")
    options = parser.parse_args(arguments or ["--help"])
    start_jax()
    import jaxlm
    from jaxlm.inference.generate import generate

    loaded = jaxlm.load(options.path, to_answer=True)
    stop_ids = None
    if options.stop is not None:
        stop_ids = loaded.tokenizer.encode_with_symbols(options.stop)
        if len(stop_ids) != 1:
            raise UserError(
                f"--stop {options.stop!r} is no symbol of this vocabulary (it is {len(stop_ids)} tokens); give one, "
                "such as </s>."
            )
    prompts = [loaded.tokenizer.encode_with_symbols(prompt) for prompt in options.prompts]
    answers = generate(
        loaded.objective, loaded.params, prompts, max_new_tokens=options.max_new_tokens,
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed, stop_ids=stop_ids,
    )
    for text, prompt, answer in zip(options.prompts, prompts, answers, strict=True):
        print(f"{text}|{continuation(loaded.tokenizer, prompt, answer)}")
    return 0


def continuation(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """The answer as text, with special symbols by name (T5's sentinels) except for the end symbol and padding. It is
    decoded together with its prompt, since alone it would lose a leading space."""
    left_out = {tokenizer.vocabulary.eos, tokenizer.vocabulary.pad}
    answer = [token for token in answer if token not in left_out]
    before = tokenizer.decode(prompt, skip_special=False)
    both = tokenizer.decode([*prompt, *answer], skip_special=False)
    # A character whose bytes are on both sides can only be decoded as a whole.
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(answer, skip_special=False)
