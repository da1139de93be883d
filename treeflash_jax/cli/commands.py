"""The commands of `treeflash`: their options, and the functions that run them (`COMMANDS`, `main`)."""

import argparse
import inspect
import json
import logging
import os
import sys
import textwrap
from collections import Counter
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import jax

from treeflash_jax import __version__
from treeflash_jax.bench import latency, memory, report, run, verdicts
from treeflash_jax.cli import demo
from treeflash_jax.cli.arguments import Parser, add_settings, note_single_choice
from treeflash_jax.cli.chat import ChatOptions, converse, ending, format_statistics
from treeflash_jax.cli.chat_commands import NOT_IN_CHAT
from treeflash_jax.cli.prompt_options import add_prompts, describe_prompt, parse_prompts
from treeflash_jax.core import files, programs
from treeflash_jax.core.dtypes import dtype_name
from treeflash_jax.core.error_text import LONGEST_PATH, clipped, logger
from treeflash_jax.core.exit_status import exit_status
from treeflash_jax.core.setting_options import add_options, option_values
from treeflash_jax.core.settings import field_names
from treeflash_jax.core.terminal import Console, show
from treeflash_jax.engine import loading
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.engine.call.prompts import Prompt
from treeflash_jax.engine.comparison import FAIL, IDENTICAL, ROUNDING, compare_decodings
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.settings import pairs
from treeflash_jax.engine.settings.generate_config import RETURNED, GenerateConfig
from treeflash_jax.engine.settings.model_options import load_arguments
from treeflash_jax.formats import dialects, gguf_reader, hub, model_files
from treeflash_jax.serve.options import ServeOptions


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status. Bad input ends it with one line on stderr and status 2."""
    return exit_status(partial(_run_command, argv), "treeflash")


def _run_command(argv: list[str] | None) -> int:
    arguments = parser().parse_args(argv)
    if getattr(arguments, "dtype", None) == "float64":
        jax.config.update("jax_enable_x64", True)
    programs.keep_programs()
    logger.setLevel(logging.INFO)  # shows the line about compiling
    logging.lastResort.setLevel(logging.INFO)  # if no handler is configured, this one prints lines on stderr
    note_single_choice(getattr(arguments, "choices", ()))
    return arguments.run(arguments)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. `parse_args(words).run` is the function that runs the chosen command."""
    top = Parser(prog="treeflash", description="Lossless speculative decoding with draft trees.")
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__} (jax {jax.__version__})")
    suites = _add_commands(top, "command", COMMANDS).add_parser("bench", help="run benchmarks, and report their results")
    _add_commands(suites, "suite", SUITES)
    return top


def _add_commands(parser: argparse.ArgumentParser, metavar: str, commands: dict[str, tuple]) -> Any:
    """Adds subcommands to a parser, which prints help if no subcommand is given. Returns argparse's group of them."""
    parser.set_defaults(run=lambda _: parser.print_help() or 0)
    group = parser.add_subparsers(metavar=metavar, parser_class=Parser)
    for name, (help, describe_options, run_command) in commands.items():
        described = inspect.cleandoc(describe_options.__doc__ or inspect.getmodule(describe_options).__doc__)
        paragraphs = [text if text.startswith(" ") else textwrap.fill(text, 79) for text in described.split("\n\n")]
        command = group.add_parser(
            name,
            help=help,
            description="\n\n".join(paragraphs),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        describe_options(command)
        command.set_defaults(run=run_command)
    return group


def _generate_options(parser: Parser) -> None:
    """Answers prompts, by default with smollm2 if present, otherwise with tiny."""
    add_prompts(parser)
    output = add_settings(parser)
    output.add_argument("--json", action="store_true", help="print one JSON object per answer, with all results")


def _chat_options(parser: Parser) -> None:
    """Starts a conversation; answers are printed as they are decoded, up to the context's end."""
    output = add_settings(parser, without=(*NOT_IN_CHAT, *field_names(ChatOptions)))
    add_options(output, ChatOptions)


def _check_options(parser: Parser) -> None:
    """Decodes every prompt with and without drafting and compares the outputs.

    Two answers are identical, or equal up to rounding: they first differ at a near-tie, two tokens with logits so nearly
    equal that rounding decides between them. Any other difference is an error; the exit status is then 1.
    """
    add_prompts(parser)
    output = add_settings(parser, without=("samples", *RETURNED))
    output.add_argument("--json", action="store_true", help="print one JSON object per prompt")


def _convert_options(parser: argparse.ArgumentParser) -> None:
    """Writes a GGUF file as a Hugging Face folder, or a drafter in another layout.

    Weights stay unchanged, unless --dtype rounds the weights of a GGUF file.
    """
    parser.add_argument("source", help="a GGUF file or, with --to, a DFlash or TreeFlash drafter: its name, path or Hub id")
    parser.add_argument("target", help="folder to write; it must not exist")
    help = "dtype of the weights of a GGUF file (default: float32, which is exact)"
    parser.add_argument("--dtype", type=dtype_name, choices=("float32", "bfloat16"), help=help)
    parser.add_argument("--to", choices=dialects.written(), help="layout in which to write a drafter")
    parser.add_argument("--drop-head", action="store_true", help="do not write a trained head; the DFlash layout has none")


def _serve_options(parser: Parser) -> None:
    """Serves a model over HTTP with OpenAI's and Anthropic's APIs, by default at http://127.0.0.1:8000/v1.

    Requests are decoded together; each has its own sampling settings, by default the model's recommended ones.
    """
    server_settings = [*field_names(GenerateConfig, "drafting", "tree", "running"), "schema_depth"]
    request_settings = [name for name in field_names(GenerateConfig) if name not in server_settings]
    output = add_settings(parser, without=[*request_settings, "batch_size", "schema_states"])  # serve defines the last
    output.title = "server"
    add_options(output, ServeOptions)


def _generate(arguments: argparse.Namespace) -> int:
    settings = option_values(arguments, GenerateConfig)
    prompts = parse_prompts(arguments)
    model = loading.load(**load_arguments(arguments))
    if arguments.json:
        results = model.generate(prompts, **settings)
        for (prompt, sample), result in zip(number_answers(prompts, results), results, strict=True):
            values = {field.name: getattr(result, field.name) for field in fields(Result) if field.repr}
            present_values = {name: value for name, value in values.items() if value is not None}
            print(json.dumps({"prompt": prompt, "sample": sample, **present_values, "tau": result.tau}, default=asdict))
    elif len(prompts) == 1 and settings.get("samples", 1) == 1 and model.tokenizer:
        results = [_stream(model, prompts, settings)]
    else:
        results = model.generate(prompts, **settings)
        _print_answers(model, prompts, results)
    return 130 if any(result.finished == "interrupted" for result in results) else 0


def _stream(model: TreeFlash, prompts: list[Prompt], settings: dict[str, Any]) -> Result:
    """Prints one answer while it is decoded, then its statistics."""
    for piece in model.stream(prompts, **settings):
        if isinstance(piece, Chunk):
            show(piece.text, end="")
    print()
    _print_note(f"{format_statistics(piece)}, {_format_speed(model, piece)}, {ending(piece, model.verifier.max_positions)}")
    return piece


def _print_answers(model: TreeFlash, prompts: list[Prompt], results: list[Result]) -> None:
    """Prints answers under numbered headings, each with its statistics, and the speed of the whole call."""
    for (prompt, sample), result in zip(number_answers(prompts, results), results, strict=True):
        if len(results) > 1:
            place = f"prompt {prompt}, sample {sample}" if len(results) > len(prompts) else f"prompt {prompt}"
            show(f"--- {place}: {describe_prompt(prompts[prompt])}")
        show(result.text if model.tokenizer else " ".join(map(str, result.ids)))
        speed = "" if len(results) > 1 else f"{_format_speed(model, result)}, "
        _print_note(f"{format_statistics(result)}, {speed}{ending(result, model.verifier.max_positions)}")
    if len(results) > 1:
        tokens = sum(len(result.ids) for result in results)
        _print_note(f"{len(results)} answers, {tokens} tokens, {_format_speed(model, results[0])}")


def number_answers(prompts: list[Prompt], results: list[Result]) -> list[tuple[int, int]]:
    """Returns, for each answer, the numbers of its prompt and of its sample."""
    samples = len(results) // len(prompts)
    return [divmod(number, samples) for number in range(len(results))]


def _format_speed(model: TreeFlash, result: Result) -> str:
    """Returns the speed of the call that gave a result; all results of the call share it."""
    return f"{result.tokens_per_second:.0f} tokens/s in {model.dtype.name}, compiled in {result.compile_seconds:.1f} s"


def _print_note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr)


def _chat(arguments: argparse.Namespace) -> int:
    model = loading.load(**load_arguments(arguments))
    converse(model, Console(), arguments.system, **option_values(arguments, GenerateConfig))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from treeflash_jax.serve.process import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"got no package {error.name}, expected those of `pip install '.[serve]'` in a clone") from None
    options = ServeOptions(**option_values(arguments, ServeOptions))
    load = partial(loading.load, **load_arguments(arguments))
    return serve(load, GenerateConfig(**option_values(arguments, GenerateConfig)), options)


def _check(arguments: argparse.Namespace) -> int:
    settings = option_values(arguments, GenerateConfig)
    prompts = parse_prompts(arguments)
    model = loading.load(**load_arguments(arguments))
    comparisons = compare_decodings(model, prompts, **settings)
    counts = Counter(comparison.verdict for comparison in comparisons)
    if arguments.json:
        for comparison in comparisons:
            print(json.dumps(verdicts.make_record(comparison, model)))
    else:
        tokens = sum(comparison.tokens for comparison in comparisons)
        numbers = len(comparisons), counts[IDENTICAL], counts[ROUNDING], tokens
        print(verdicts.describe_verdict(comparisons))
        print(f"{verdicts.describe_counts(*numbers, model.dtype)}; {verdicts.describe_reference(model.quantize)}")
        print(verdicts.describe_ends(model))
        for number, comparison in enumerate(comparisons):
            print(f"prompt {number}: {verdicts.describe_difference(comparison, model)}")
    return 1 if counts[FAIL] else 0


def _convert(arguments: argparse.Namespace) -> int:
    files.check_folder(arguments.target)  # before a download
    name, part = arguments.source, "drafter" if arguments.to else "verifier"
    is_on_hub = hub.is_hub_id(name) and not os.path.exists(name) and not gguf_reader.is_gguf(name)
    source = None if is_on_hub else pairs.locate(name, part)  # Hub ids are downloaded after all checks
    is_gguf = source is not None and gguf_reader.is_gguf(source)
    if is_gguf and (arguments.to or arguments.drop_head):
        raise ValueError("got --to or --drop-head with a GGUF file, expected them with a drafter folder only")
    if not is_gguf and (arguments.to is None or arguments.dtype):
        layouts = " or ".join(f"--to {layout}" for layout in dialects.written())
        got = f"{clipped(name, LONGEST_PATH)} without --to, or with --dtype"
        raise ValueError(f"got {got}; expected a GGUF file, or a drafter folder with {layouts} alone")
    if is_gguf:
        model_files.convert_gguf(source, arguments.target, arguments.dtype or "float32")
    else:
        model_files.convert_drafter(
            source or pairs.locate(name, part), arguments.target, arguments.to, drop_head=arguments.drop_head
        )
    show(f"wrote {arguments.target}")
    return 0


# By name: the line of help, the function that adds options and whose docstring is the description, the function to run.
COMMANDS = {
    "generate": ("answer prompts", _generate_options, _generate),
    "chat": ("talk to a model", _chat_options, _chat),
    "serve": ("serve a model over HTTP with OpenAI's and Anthropic's APIs", _serve_options, _serve),
    "check": ("check that drafting does not change the output", _check_options, _check),
    "convert": ("convert a GGUF file or a drafter to another format", _convert_options, _convert),
    "demo": ("compare answers decoded one token at a time and with drafting", demo.add_arguments, demo.run),
}
SUITES = {
    "run": ("compare systems on prompts: tokens per round and per second", run.add_arguments, run.run),
    "report": ("print the tables of a results file", report.add_arguments, report.run),
    "latency": ("time every phase of a round", latency.add_arguments, latency.run),
    "memory": ("compute the memory that a request needs on each device", memory.add_arguments, memory.run),
}
