"""jaxlm generate PATH PROMPT …: continue a prompt (GPT-2) or answer it (T5)"""

from __future__ import annotations

from jaxlm.commands.common import Parser, start_jax
from jaxlm.errors import UserError
from jaxlm.tokenizers.tokenizer import Tokenizer


def main(arguments: list[str]) -> int:
    parser = Parser("jaxlm generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("path", help="a run folder or a Transformers folder")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens to write at most (64)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token (0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0: from all")
    parser.add_argument("--top-p", type=float, default=0.95, help="draw from the likeliest that add up to p (0.95)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", default=None, help="a symbol to stop at instead of the vocabulary's end symbol")
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
    """The answer as text. It is decoded behind its prompt, since alone it would lose the space that it starts with;
    symbols that mean something (T5's sentinels) are written by name, the end symbol and padding are not."""
    silent = {tokenizer.vocabulary.eos, tokenizer.vocabulary.pad}
    answer = [token for token in answer if token not in silent]
    before = tokenizer.decode(prompt, skip_special=False)
    both = tokenizer.decode([*prompt, *answer], skip_special=False)
    # Bytes of one character may lie on both sides, and then only the whole can be decoded.
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(answer, skip_special=False)
