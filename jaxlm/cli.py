"""The `jaxlm` command. Heavy imports are left to the commands, so that --help is instant."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from jaxlm import __version__

COMMANDS = {
    "pretrain": ("jaxlm.commands.pretrain", "train a preset, or resume if the run folder has a checkpoint"),
    "show": ("jaxlm.commands.show", "print examples before and after corruption"),
    "plan": ("jaxlm.commands.plan", "compile the train step for TPUs or GPUs: does it fit, what does it cost"),
    "check": ("jaxlm.commands.check", "whether this machine's devices compute what a CPU does"),
    "bench": ("jaxlm.commands.bench", "time the train step on this machine, optionally beside PyTorch's"),
    "finetune": ("jaxlm.commands.finetune", "train a task from a pretrained model, and evaluate it"),
    "evaluate": ("jaxlm.commands.evaluate", "score a fine-tuned model on rows, or any model on prompts"),
    "fill-mask": ("jaxlm.commands.fill_mask", "predict masked tokens"),
    "generate": ("jaxlm.commands.generate", "continue a prompt"),
    "embed": ("jaxlm.commands.embed", "vectors of texts"),
    "export": ("jaxlm.commands.export", "write a run as a Transformers folder"),
    "import": ("jaxlm.commands.import_", "make a run from a Transformers folder"),
    "tokenizer": ("jaxlm.commands.tokenizer", "train a tokenizer, or give a model's the words of a text"),
    "tokenize": ("jaxlm.commands.tokenize", "tokenize a corpus beforehand, also in shards on several machines"),
}
WORKING = ("pretrain", "finetune", "tokenize")
"""Commands that fail where the reader of their output has ended: their work may not be done."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    The code is 0 for success, 2 for the user's mistake (one sentence on standard error), 3 for a device that computes
    one step in two ways, and 128 + the number of a signal by which training was stopped and saved.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"jaxlm {__version__}")
        return 0
    _choose_cpu_without_accelerator()
    for stream in (sys.stdout, sys.stderr):
        # File names need not be UTF-8, and a log is read while it is written.
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    code, failure = 1, None
    try:
        code = _run(arguments)
    except Exception as error:
        failure = error
        raise
    finally:
        if code and "jax" in sys.modules:
            from jaxlm.parallel.hosts import exit_process

            exit_process(code, failure)
    return code


def _run(arguments: list[str]) -> int:
    """Run one command and return its exit code; print the sentence of a mistake."""
    from jaxlm.errors import UserError

    try:
        if arguments[0] not in COMMANDS:
            raise UserError(f"there is no command {arguments[0]!r}; the commands are {', '.join(COMMANDS)}.")
        module = importlib.import_module(COMMANDS[arguments[0]][0])
        return module.main(arguments[1:]) or 0
    except UserError as error:
        lines = (" ".join(line.split()) for line in str(error).split("\n  "))  # one for each wrong row
        print("jaxlm: " + "\n  ".join(lines), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(arguments[0] in WORKING)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # which rich answers by itself
            return int(arguments[0] in WORKING)
        raise
    except OSError as error:  # of a file that was not checked before
        if error.filename is None:
            raise
        print(f"jaxlm: {error.filename} cannot be read or written ({error.strerror}).", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:  # numpy's, or XLA's
        words = ("RESOURCE_EXHAUSTED", "Out of memory")  # the latter where a CPU finds it when a result is read
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in words):
            raise
        what = str(error).partition("\n")[0][:200]
        advice = ("lower --train.batch-size or the model's size, raise --train.accumulate (for text vectors "
                  "--objective.chunks), or shorten a prompt")
        print(f"jaxlm: out of memory ({what}); {advice}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxlm: interrupted.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Skip Python's shutdown, which crashes: it frees memory that threads of XLA and TensorStore may still use.
        os._exit(130)


def _choose_cpu_without_accelerator() -> None:
    """Set JAX_PLATFORMS to cpu if libtpu is installed (`plan` compiles with it) but there is no accelerator.

    Otherwise jax would search for a TPU, also on the network, and warn. An environment that names a platform stays.
    """
    devices = ("accel*", "vfio/[0-9]*", "nvidia*", "kfd", "dxg")
    is_set = any(name.startswith(("JAX_PLATFORM", "TPU_", "PJRT_")) for name in os.environ)
    if is_set or sys.platform != "linux" or importlib.util.find_spec("libtpu") is None:
        return
    if not any(path for pattern in devices for path in Path("/dev").glob(pattern)):
        os.environ["JAX_PLATFORMS"] = "cpu"


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([
        "usage: jaxlm COMMAND …      (jaxlm COMMAND --help for its own options)",
        "",
        "Pretrains language models in JAX, from raw text to a Transformers checkpoint.",
        "",
        *lines,
        "",
        "first steps:  jaxlm pretrain bert_tiny --run-dir runs/first",
        "              jaxlm fill-mask runs/first \"a list is a mutable [MASK] .\"",
        "              jaxlm export runs/first exported",
    ])


if __name__ == "__main__":
    sys.exit(main())
