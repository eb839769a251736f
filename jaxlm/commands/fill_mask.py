"""Predict the tokens behind each [MASK].

jaxlm fill-mask PATH TEXT …
"""

from __future__ import annotations

from jaxlm.commands.common import Parser, mesh_of, mesh_options, start_jax


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = Parser("jaxlm fill-mask", __doc__)
    parser.add_argument("path", help="a run folder, a Transformers folder or hf:ORG/NAME[@REVISION]")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a text with one [MASK] or more")
    parser.add_argument("--top-k", type=int, default=5, help="candidates for each mask (5)")
    mesh_options(parser)
    options = parser.parse_args(arguments or ["--help"])
    start_jax()
    import jax

    import jaxlm

    model = jaxlm.load(options.path, to_answer=True, mesh=mesh_of(options))
    answers = model.fill(options.texts, options.top_k)
    if jax.process_index() > 0:
        return
    for text, masks in zip(options.texts, answers, strict=True):
        print(text)
        for candidates in masks:
            print("   " + "   ".join(f"{piece} {probability:.1%}" for piece, probability in candidates))
