"""Shared command-line helpers: argument parser, resolved configuration, start of jax."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jaxlm.errors import UserError
from jaxlm.hub import PREFIX, pin
from jaxlm.paths import any_path, in_bucket, is_run_folder, real_path, run_path

if TYPE_CHECKING:
    from etils import epath

    from jaxlm.config.experiment import Resolved


class Parser(argparse.ArgumentParser):
    """Argument parser that takes exact names of options and raises UserError."""

    def __init__(self, command: str, description: str | None, **options: Any) -> None:
        """Create the parser; `description` keeps its line breaks."""
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(command, description=description, allow_abbrev=False, formatter_class=raw, **options)
        self.add_argument("--preset", type=_run_preset, action="append", metavar="FILE", help=(
            "a preset (a .py file) whose own classes a run or folder has; may be repeated"))

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].lower()}{message[1:]}; see `{self.prog} --help`.")


def _run_preset(path: str) -> str:
    """Register the classes of a preset and return its path."""
    from jaxlm.config.presets import run_preset

    run_preset(path)
    return path


def config_parser(command: str, description: str | None) -> Parser:
    """Return a parser of `COMMAND CONFIG [options] [--any.field VALUE …]`, for `resolve_config`."""
    fields = f"Every field of the configuration is a flag: {command} CONFIG --help lists them."
    parser = Parser(command, description, add_help=False, epilog=fields)
    parser.set_defaults(init_from=None, as_text=False)  # for commands without these options
    parser.add_argument("config", help="a preset (a name such as bert_base or sst2, or a .py file) or a run folder")
    return parser


def output_option(parser: argparse.ArgumentParser, flag: str, text: str) -> None:
    """Add the option of a file to write, for `jaxlm.paths.check_output`, and --overwrite."""
    parser.add_argument(flag, default=None, metavar="FILE", help=text)
    parser.add_argument("--overwrite", action="store_true", help=f"let {flag} replace a file that is there already")


def count(text: str) -> int:
    """Return the value of an option that is a number from 0."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def vector_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of text vectors."""
    parser.add_argument("--pooling", choices=("cls", "mean", "last"), default=None, help=(
        "cls: vector of the summary token; mean: mean over all tokens; last: vector of the last token; by default as a "
        "folder of sentence-transformers says, else mean"))
    parser.add_argument("--length", type=count, default=None, help=(
        "longest text in tokens, the rest is cut; by default as in training; of streams (ELMo, XLNet) 512; at most "
        "512 of a folder whose vectors were not trained"))
    parser.add_argument("--prompt", default=None, help=(
        "text before each text, such as 'query: '; by default that of the model"))


def remark_length(length: int | None, model: Any) -> None:
    """Say so, on process 0, if a model reads fewer tokens of a text than --length."""
    import jax

    most = model.objective.model.text_model.max_length
    if most and (length or 0) > most and jax.process_index() == 0:
        log_line(f"The model reads at most {most:,} tokens of a text; --length {length} changes nothing beyond.")


def mesh_options(parser: argparse.ArgumentParser) -> None:
    """Add the axes of the mesh of a trained model, for `mesh_of`."""
    text = "devices on this axis; by default as in training if they suffice, else fsdp; data for a Transformers folder"
    for axis in ("data", "fsdp", "tensor"):
        parser.add_argument(f"--mesh.{axis}", type=int, default=argparse.SUPPRESS, help=text, metavar="N")


def mesh_of(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the axes that are given, for `jaxlm.load`."""
    return {name.removeprefix("mesh."): size for name, size in vars(options).items() if name.startswith("mesh.")}


def bootstrap_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of confidence intervals."""
    parser.add_argument("--bootstrap", type=count, default=0, metavar="N",
                        help="resample groups of rows N times for 95 %% confidence intervals of the metrics (say 1000)")


def phase_option(parser: argparse.ArgumentParser) -> None:
    """Add --phase, the phase of `train.phases` whose step is planned or timed."""
    parser.add_argument("--phase", type=count, metavar="N", help="phase of train.phases; default: the last one")


def run_folder(options: argparse.Namespace) -> epath.Path:
    """Return the folder of --run-dir; by default CONFIG if that is a run, else runs/NAME_OF_PRESET."""
    config = any_path(options.config)
    return run_path(options.run_dir or (config if is_run_folder(config) else f"runs/{config.stem}"))


def require_resumable(options: argparse.Namespace, folder: epath.Path) -> None:
    """Raise UserError for a run as CONFIG with another run folder and no --init-from: it would begin from nothing."""
    config = any_path(options.config)
    if is_run_folder(config) and options.init_from is None and real_path(folder) != real_path(config):
        raise UserError(
            f"{config} is a run and {folder} is another folder, which would begin from fresh parameters; pass "
            f"--init-from {config} to begin from the run's, or leave out --run-dir (--seeds, --sweep) to resume it."
        )


def standard_output(options: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which --json leaves standard output to the JSON object of the end."""
    return contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()


def task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that open a task."""
    parser.add_argument("--init-from", default=None, metavar="RUN_OR_HF_DIR", help=(
        "the pretrained model of a task: a run folder, a Transformers folder or hf:ORG/NAME[@REVISION]"))
    parser.add_argument("--as-text", action="store_true",
                        help="let a decoder write the answer (T5 always does); flags --objective.… are then those of "
                             "the preset text_to_text, and the task's own are --objective.kind.…")


def parse_options(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's own options and the remaining arguments, for `resolve_config`.

    Without CONFIG, print the options and exit.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        raise SystemExit(0)
    return parser.parse_known_args(arguments)


def resolve_config(
    parser: Parser, options: argparse.Namespace, flags: list[str], pretrained: Any = None, start: bool = True
) -> Resolved:
    """Resolve CONFIG with the flags and the model of --init-from; `--help` prints options and fields and exits.

    `pretrained` is that model, a `PretrainedModel`, if it is loaded already. jax is started, too: to load the model,
    else at the end if `start`.
    """
    if {"-h", "--help"} & set(flags):
        from jaxlm.config.presets import describe_preset

        print(parser.format_help(), describe_preset(options.config), sep="\n")  # the fields follow
    loads_model = options.init_from and pretrained is None
    if loads_model:
        start_jax()
    if loads_model and options.init_from.startswith(PREFIX):
        _pin_init_from(options)
    from jaxlm.runs.resolve import resolve

    command = f"{parser.prog} {options.config}"
    try:
        resolved = resolve(options.config, flags, options.init_from, options.as_text, command, pretrained)
    except UserError as error:
        if not loads_model or not (run := _begun_from(options, str(error))):
            raise
        sentence = f"{str(error).rstrip('.')}; {run} has parameters of its own: resume it with `{parser.prog} {run}`."
        raise UserError(sentence, error.exit_code) from error
    if start and not loads_model:
        start_jax()
    return resolved


def _begun_from(options: argparse.Namespace, said: str) -> epath.Path | None:
    """Return the run of --run-dir if it began from --init-from, of which an error says something; else None."""
    from jaxlm.runs.folder import RunFolder, split_steps

    is_about = split_steps(options.init_from)[0] in said and "leave the flag out" not in said
    if not hasattr(options, "run_dir") or not is_about:
        return None
    run = RunFolder.read(run_folder(options))
    source = run.metadata.get("imported_from") if run.saved_steps else None
    return run.path if source and real_path(source) == real_path(options.init_from) else None


def _pin_init_from(options: argparse.Namespace) -> None:
    """Give the model of --init-from its commit on the hub: the one that the run began from, if any."""
    from jaxlm.config.presets import load_preset
    from jaxlm.parallel.hosts import main_first
    from jaxlm.runs.folder import RunFolder

    load_preset(options.config)  # whose own classes the run has
    root = run_folder(options) if hasattr(options, "run_dir") else None
    runs = [file.parent for pattern in ("", "*/", "*/*/") for file in root.glob(f"{pattern}data.json")] if root else ()
    stored = RunFolder.read(runs[0]).metadata.get("imported_from") if runs else None
    options.init_from = main_first(lambda: pin(options.init_from, stored), "download the model")


def log_line(line: str) -> None:
    """Print a progress message on standard error."""
    print(line, file=sys.stderr, flush=True)


def start_jax(alone: str = "") -> None:
    """Join the processes of a cluster and turn on the persistent compilation cache.

    Raises:
        UserError: The devices cannot start, or several processes run the command `alone`, which is for one.
    """
    import jax

    from jaxlm.data.cache import compilation_cache
    from jaxlm.parallel.hosts import CLUSTER, join_processes, start_devices

    # For inference too, as `GPU_OPTIONS` for steps: the search for Triton's products takes a minute for each shape.
    flags = os.environ.get("XLA_FLAGS", "")
    if os.path.exists("/dev/nvidiactl") and "xla_gpu_enable_triton_gemm" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_triton_gemm=false"
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", compilation_cache())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        join_processes()
        start_devices()
    except (AssertionError, RuntimeError, ValueError) as error:
        # An assertion without a text means that there is no plugin for these platforms.
        why = str(error) or f"JAX_PLATFORMS={jax.config.jax_platforms} has no plugin; install jaxlm's extra for it."
        raise UserError(f"jax cannot start its devices: {why.splitlines()[0]}") from error
    if alone and jax.process_count() > 1:
        raise UserError(f"`{alone}` is for one process; run it on one host, with {CLUSTER}=0.")


def update_curves(run: epath.Path, token_losses: Sequence[str] = ()) -> None:
    """Draw the run's curves.png again, unless it is newer than the metrics of a run on a disk."""
    curves, metrics = run / "curves.png", run / "metrics.jsonl"
    if not metrics.exists():
        return
    if not in_bucket(run) and curves.exists() and os.path.getmtime(curves) >= os.path.getmtime(metrics):
        return
    from jaxlm.analysis.curves import draw_curves

    if draw_curves(run, log_line, token_losses):
        print(f"Curves: {curves}")
