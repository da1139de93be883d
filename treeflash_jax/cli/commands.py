"""The command line. `python -m treeflash_jax` is the same as `treeflash`."""

import argparse
import inspect
import json
import os
import sys
import textwrap
from collections import Counter
from typing import Any

import jax

from treeflash_jax import __version__
from treeflash_jax.bench import latency, memory, report, run
from treeflash_jax.bench.check import FAIL, IDENTICAL, ROUNDING, check, conclude, meaning
from treeflash_jax.cli import demo
from treeflash_jax.cli.arguments import Parser, add_prompts, add_settings, parse_prompts
from treeflash_jax.cli.chat import ChatOptions, converse, ending
from treeflash_jax.core import programs
from treeflash_jax.core.checks import LONGEST_PATH, UnknownSetting, clipped
from treeflash_jax.core.settings import add_options, field_names, option_values
from treeflash_jax.core.terminal import Console, show
from treeflash_jax.engine import pairs
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.engine.loading import load_model
from treeflash_jax.engine.results import Chunk
from treeflash_jax.formats import dialects, gguf_reader, model_files


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status. Bad input ends with one line on stderr and status 2."""
    arguments = parser().parse_args(argv)
    if "float64" in (getattr(arguments, "dtype", None) or ()):  # a name, or the names that `bench run` compares
        jax.config.update("jax_enable_x64", True)
    programs.keep_on_disk()
    try:
        status = arguments.run(arguments)
    except BrokenPipeError:  # the program that reads the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except (ValueError, UnknownSetting, OSError) as error:
        print(f"treeflash: error: {clipped(error)}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    return status


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; `parse_args(words).run` is the function that runs the chosen one."""
    top = Parser(prog="treeflash", description="Lossless speculative decoding with draft trees.")
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__} (jax {jax.__version__})")
    suites = _add_commands(top, "command", COMMANDS).add_parser("bench", help="run benchmarks, and report their results")
    _add_commands(suites, "suite", SUITES)
    return top


def _add_commands(parser: argparse.ArgumentParser, metavar: str, commands: dict[str, tuple]) -> Any:
    """Adds subcommands to a parser, which prints its help text if none is given; returns argparse's group of them."""
    parser.set_defaults(run=lambda _: parser.print_help() or 0)
    group = parser.add_subparsers(metavar=metavar, parser_class=Parser)
    for name, (help, describe_options, run_command) in commands.items():
        described = inspect.cleandoc(describe_options.__doc__ or inspect.getmodule(describe_options).__doc__)
        paragraphs = [text if text.startswith(" ") else textwrap.fill(text, 79) for text in described.split("\n\n")]
        text = {"help": help, "description": "\n\n".join(paragraphs)}
        command = group.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **text)
        describe_options(command)
        command.set_defaults(run=run_command)
    return group


def _generate_options(parser: Parser) -> None:
    """Answers prompts, by default with smollm2 if present, otherwise with tiny."""
    add_prompts(parser)
    output = add_settings(parser)
    help = "print one JSON object per answer, with all results; only it shows those of --log-probs and --expected-lengths"
    output.add_argument("--json", action="store_true", help=help)


def _chat_options(parser: Parser) -> None:
    """Starts a conversation; answers are printed as they are decoded, up to the context's end."""
    replaced = field_names(ChatOptions)
    output = add_settings(parser, without=("samples", "batch_size", "log_probs", "expected_lengths", *replaced))
    add_options(output, ChatOptions)


def _check_options(parser: Parser) -> None:
    """Decodes every prompt with and without drafting and compares the outputs.

    Two answers are identical, or equal up to rounding: they first differ at a near-tie, two tokens with logits so nearly
    equal that rounding decides between them. Any other difference is an error; the exit status is then 1.
    """
    add_prompts(parser)
    output = add_settings(parser, without=("samples", "log_probs", "expected_lengths"))
    output.add_argument("--json", action="store_true", help="print one JSON object per prompt")


def _convert_options(parser: argparse.ArgumentParser) -> None:
    """Writes a GGUF file as a Hugging Face folder, or a drafter in another layout.

    Weights stay unchanged, unless --dtype rounds those of a GGUF file.
    """
    parser.add_argument("source", help="a GGUF file or, with --to, a DFlash or TreeFlash drafter: its name, path or Hub id")
    parser.add_argument("target", help="folder to write; it must not exist")
    help = "dtype of the weights of a GGUF file (default: float32, which is exact)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=help)
    parser.add_argument("--to", choices=dialects.written(), help="layout in which to write a drafter")
    parser.add_argument("--drop-head", action="store_true", help="do not write a trained head; the DFlash layout has none")


PRINTED = "text ids builder accept_lengths cut tau tokens_per_second compile_seconds finished".split()
PRINTED += ["log_probs", "expected_lengths"]  # of answers that have them


def _generate(arguments: argparse.Namespace) -> int:
    settings, prompts = option_values(arguments, GenerateConfig), parse_prompts(arguments)
    model = load_model(arguments)
    is_streamed = len(prompts) == 1 and settings.get("samples", 1) == 1 and model.tokenizer and not arguments.json
    status = 0
    for result in model.stream(prompts, **settings) if is_streamed else model.generate(prompts, **settings):
        if isinstance(result, Chunk):
            show(result.text, end="")
            continue
        status = 130 if result.finished == "interrupted" else status
        if arguments.json:
            values = {name: getattr(result, name) for name in PRINTED}
            print(json.dumps({name: value for name, value in values.items() if value is not None}))
            continue
        if is_streamed:
            print()
        else:
            show(" ".join(map(str, result.ids)) if result.text is None else result.text)
        print(
            f"[{len(result.ids)} tokens in {len(result.accept_lengths)} rounds, tau {result.tau:.2f}, "
            f"{result.tokens_per_second:.0f} tokens/s in {model.dtype.name}, compiled in {result.compile_seconds:.1f} s, "
            f"{ending(result, model.verifier.max_positions)}]",
            file=sys.stderr,
        )
    return status


def _chat(arguments: argparse.Namespace) -> int:
    converse(load_model(arguments), Console(), **option_values(arguments, GenerateConfig))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    settings, prompts = option_values(arguments, GenerateConfig), parse_prompts(arguments)
    model = load_model(arguments)
    cases = check(model, prompts, **settings)
    for index, case in enumerate(cases):
        print(json.dumps(case.record(model)) if arguments.json else f"prompt {index}: {case.describe(model)}")
    verdicts = Counter(case.verdict for case in cases)
    if not arguments.json:
        counts = len(cases), verdicts[IDENTICAL], verdicts[ROUNDING], sum(case.tokens for case in cases)
        print(f"{conclude(*counts, model.dtype)}; {meaning(model.quantize)}")
    return 1 if verdicts[FAIL] else 0


def _convert(arguments: argparse.Namespace) -> int:
    source = pairs.locate(arguments.source, "drafter" if arguments.to else "verifier")
    is_gguf = gguf_reader.is_gguf(source)
    if is_gguf and (arguments.to or arguments.drop_head):
        raise ValueError("got --to or --drop-head with a GGUF file, expected them with a drafter folder only")
    if not is_gguf and (arguments.to is None or arguments.dtype):
        known = " or ".join(f"--to {name}" for name in dialects.written())
        got = f"{clipped(arguments.source, LONGEST_PATH)} without --to, or with --dtype"
        raise ValueError(f"got {got}; expected a GGUF file, or a drafter folder with {known} alone")
    if is_gguf:
        model_files.convert_gguf(source, arguments.target, arguments.dtype or "float32")
    else:
        model_files.convert_drafter(source, arguments.target, arguments.to, drop_head=arguments.drop_head)
    show(f"wrote {arguments.target}")
    return 0


# By name: the line of help, a function that adds the options and describes the command, and the function that runs it.
COMMANDS = {
    "generate": ("answer prompts", _generate_options, _generate),
    "chat": ("talk to a model", _chat_options, _chat),
    "check": ("check that drafting does not change the output", _check_options, _check),
    "convert": ("convert a GGUF file or a drafter to another format", _convert_options, _convert),
    "demo": ("compare answers decoded one token at a time and with drafting", demo.add_arguments, demo.run),
}
SUITES = {
    "run": ("compare systems on prompts: tokens per round and per second, time by phase", run.add_arguments, run.run),
    "report": ("print the tables of a results file", report.add_arguments, report.run),
    "latency": ("time every phase of a round", latency.add_arguments, latency.run),
    "memory": ("compute the memory that a request needs on each device", memory.add_arguments, memory.run),
}
