"""Continue a prompt (decoders) or answer it (T5). A masked diffusion model fills the prompt's [MASK]s, or continues it.

jaxlm generate PATH PROMPT …
"""

from __future__ import annotations

import sys

from jaxlm.commands.common import Parser, mesh_of, mesh_options, start_jax


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = Parser("jaxlm generate", __doc__)
    parser.add_argument("path", help="a run folder, a Transformers folder or hf:ORG/NAME[@REVISION]")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="maximum number of new tokens (64)")
    parser.add_argument("--temperature", type=float, default=None,
                        help="sampling temperature; 0: greedy (0.8; with beams 0)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k most likely tokens; 0: from all")
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus sampling probability (0.95)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beams", type=int, default=1, help="number of beams; 1 means no beam search (1)")
    parser.add_argument("--length-penalty", type=float, default=1.0,
                        help="beams are compared by log-probability / length ** this (1.0)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT",
                        help="text or symbol that ends a continuation, besides the vocabulary's; may be repeated")
    parser.add_argument("--steps", type=int, default=1024, help="denoising steps of a masked diffusion model (1024)")
    parser.add_argument("--logprobs", action="store_true", help="list each new token with its log-probability")
    mesh_options(parser)
    options = parser.parse_args(arguments or ["--help"])
    start_jax()
    import jax

    import jaxlm

    temperature = options.temperature
    if temperature is None:
        temperature = 0.8 if options.beams == 1 else 0.0
    loaded, prompts = jaxlm.load(options.path, to_answer=True, mesh=mesh_of(options)), options.prompts
    is_terminal = sys.stdout.isatty()
    # A continuation follows its prompt, which is bold in a terminal; an answer has a line of its own.
    shown = [f"\033[1m{prompt}\033[0m" if is_terminal else prompt for prompt in prompts]
    if denoises := loaded.objective.denoises:  # the answers contain the prompts
        shown = [""] * len(prompts)
    elif loaded.objective.scores_rows or loaded.objective.model.has_encoder:
        shown = [f"{prompt}\n" for prompt in shown]
    is_main = jax.process_index() == 0
    # Of several processes all must take the same steps, and their terminals may differ.
    is_single = len(prompts) == 1 and options.beams == 1 and jax.process_count() == 1
    streams = is_terminal and is_single and not denoises
    if streams:
        _show(shown[0])
    answers = loaded.generate(
        prompts, options.stop, _show if streams else None, max_new_tokens=options.max_new_tokens,
        temperature=temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed, beams=options.beams,
        length_penalty=options.length_penalty, steps=options.steps,
    )
    for number, (prompt, answer) in enumerate(zip(shown, answers, strict=True), 1) if is_main else ():
        if len(prompts) > 1:
            print(f"prompt {number} of {len(prompts)}:")
        print("" if streams else f"{prompt}{answer.text}")
        if options.logprobs:
            for piece, log_prob in zip(loaded.tokenizer.pieces(answer.ids), answer.log_probs, strict=True):
                print(f"{log_prob:10.4f}  {piece}")
            print(f"{sum(answer.log_probs):10.4f}  together, {len(answer.ids)} tokens")


def _show(text: str) -> None:
    print(text, end="", flush=True)
