"""Compares systems on the same prompts, and writes a JSON line per answered prompt.

    treeflash bench run --verifier smollm2 --prompts gsm8k.jsonl --limit 64 \\
        --systems ar chain marginal treeflash --nodes 16 64 --temperature 0 1 --seed 0 1 --out results.jsonl

The names of systems are explained in treeflash_jax/bench/README.md. Answers already in --out are not repeated; a file of
other settings, versions or hardware, or that another command writes, is refused and left as it is.
"""

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from treeflash_jax.bench import bench_records, harness, report
from treeflash_jax.bench.bench_records import BenchRecord
from treeflash_jax.bench.harness import Peer, System
from treeflash_jax.bench.prompt_sets import BUNDLED, BenchPrompt, choose_prompts, make_chat
from treeflash_jax.core import files
from treeflash_jax.core.setting_options import add_options, option_values
from treeflash_jax.core.settings import coerce_field, field_names, setting
from treeflash_jax.engine import loading
from treeflash_jax.engine.call.prompts import parse_ids
from treeflash_jax.engine.settings import pairs
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.model_options import ModelOptions, load_arguments

SYSTEMS: dict[str, dict[str, Any]] = {
    "ar": {"builder": "none"},
    "chain": {"builder": "chain", "head": "marginal", "ngrams": 0},
    "marginal": {"head": "marginal", "ngrams": 0},
    "treeflash": {"ngrams": 0},
    "joined": {"ngrams": 8},
}
NAME = re.compile(r"([a-z]+)(?:-(\d+))?(?:@(\d+\.?\d*))?((?::\w+=[^:]+)*)")  # for example treeflash-32@0.7:builder=skeleton

DRAFTER = re.compile(r"(?:([^=/]*)=)?(.*)", flags=re.DOTALL)  # label, which has no slash, and drafter


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Pair, prompts and systems of a comparison."""

    drafter: str | None = setting(
        None,
        "one or more drafters, each as in `treeflash generate` or LABEL=DRAFTER",
        unset="the drafter that ships for the named verifier",
        unit="model",
    )
    prompts: str | None = setting(None, "JSONL files of prompts", unset="a bundled set", unit="file")
    limit: int | None = setting(
        None, "prompts of each file, drawn as in the published benchmarks", least=1, unset="all", unit="prompts"
    )
    prompt_ids: str | None = setting(None, "token ids of one prompt, instead of files", unit="ids")
    systems: str = setting(
        " ".join(SYSTEMS),
        "systems, or a tree like treeflash-32@0.7:builder=skeleton (nodes, drafter temperature, other settings)",
        unit="name",
    )
    other: Sequence[str] = setting(
        (), "another program that decodes greedily, as in bench/peers; may be given several times", unit="name=command"
    )
    out: str = setting(help="JSONL file to which results are appended", unit="file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several = ["drafter", "prompts", "systems", "nodes", "temperature", "seed"]
    add_options(parser, ModelOptions, ["verifier"])
    add_options(parser, RunOptions, several=several, systems=list(SYSTEMS))
    add_options(parser, ModelOptions, ["dtype", "quantize", "thinking", "template"])
    by_name = {"head", "builder", "acceptance", "drafter_temperature"}  # settings that the names of systems choose
    options = {*field_names(GenerateConfig, "drafting", "tree")} - by_name
    options |= {"max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop_ids", "batch_size", "attention", "kernels"}
    defaults = {"nodes": [16], "temperature": [0.0], "seed": [0], "batch_size": 1}
    add_options(parser, GenerateConfig, options, several=several, **defaults)


def parse_systems(names: Sequence[str], nodes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Returns fields of GenerateConfig by system name. A tree without a number of nodes in its name gets each of `nodes`.

    Raises ValueError for an unknown system or setting.
    """
    systems = dict[str, dict[str, Any]]()
    accepted = [name for name in field_names(GenerateConfig, "drafting", "tree") if name != "nodes"]
    for name in names:
        match = NAME.fullmatch(name)
        base, size, temperature, settings = match.groups() if match else (None,) * 4
        is_tree = base in SYSTEMS and "builder" not in SYSTEMS[base]
        if base not in SYSTEMS or (size and not is_tree) or (base == "ar" and name != "ar"):
            raise ValueError(
                f"got unknown system {name!r}, expected one of {', '.join(SYSTEMS)}, or a tree like treeflash-32, or one "
                "with its own drafter temperature and settings like treeflash-32@0.7:builder=skeleton"
            )
        texts = dict(word.split("=", 1) for word in settings.split(":")[1:])
        if temperature:
            texts["drafter_temperature"] = temperature
        system = dict(SYSTEMS[base])
        for key, text in texts.items():
            if key not in accepted:
                raise ValueError(f"got setting {key!r} of a system, expected one of {', '.join(accepted)}")
            system[key] = coerce_field(GenerateConfig, key, text, from_text=True)
        if not is_tree:
            systems[name] = system
            continue
        ending = name.removeprefix(f"{base}-{size}" if size else base)
        for count in [int(size)] if size else nodes:
            systems[f"{base}-{count}{ending}"] = system | {"nodes": count}
    return systems


def run(arguments: argparse.Namespace) -> int:
    """Measures the answers that the output file lacks, then prints the summary of all answers."""
    chosen = parse_systems(arguments.systems, arguments.nodes)
    if arguments.prompt_ids is not None and arguments.prompts:
        raise ValueError("got --prompt-ids and --prompts, expected one of them")
    if arguments.prompt_ids is None:
        prompts = choose_prompts(arguments.prompts or [BUNDLED], arguments.limit)
    else:
        prompts = [BenchPrompt(id="ids", ids=parse_ids(arguments.prompt_ids))]
    temperatures = list(dict.fromkeys(arguments.temperature))
    seeds = list(dict.fromkeys(arguments.seed))
    commands = parse_commands(arguments, chosen)
    out = files.local(arguments.out)
    files.check_output(out)
    with ExitStack() as stack:
        stack.enter_context(files.held(f"{out}.lock", f"--out {out}"))
        records = bench_records.read_records(out) if out.is_file() else []
        measured = load_systems(arguments, chosen)
        base = measured[0]
        for name, command in commands.items():
            program = stack.enter_context(Popen(shlex.split(command), bufsize=0, stdin=PIPE, stdout=PIPE))
            config = replace(base.config, builder="none")
            measured.append(Peer(name=name, model=base.model, config=config, command=command, program=program))
        refuse_mismatches(measured, prompts, records, out)
        files.write(out, "".join(json.dumps(record) + "\n" for record in records))  # drops a cut one
        output = stack.enter_context(open(out, "a", encoding="utf-8"))
        earlier = tuple(records)
        for record in harness.measure(measured, prompts, temperatures=temperatures, seeds=seeds, earlier=earlier):
            records.append(record)
            with files.errors_named(out):
                output.write(json.dumps(record) + "\n")
                output.flush()
    report.show(report.summarise(records))
    return 0


def parse_commands(arguments: argparse.Namespace, chosen: dict[str, Any]) -> dict[str, str]:
    """Returns the commands of other programs, by name."""
    commands = dict[str, str]()
    for option in arguments.other:
        name, _, command = option.partition("=")
        if not name or not command.strip() or name in (*commands, *chosen):
            raise ValueError(f"got --other {option!r}, expected NAME=COMMAND with a name that no other system has")
        commands[name] = command
    if commands and (max(arguments.temperature) > 0 or arguments.batch_size != 1):
        raise ValueError("got --other with a temperature above 0 or a batch, expected greedy decoding of single prompts")
    return commands


def load_systems(arguments: argparse.Namespace, chosen: dict[str, dict]) -> list[System]:
    """Loads the verifier with every drafter, and makes the systems. Systems of a drafter with equal settings become one.

    With several drafters, a system's name ends with its drafter. A drafter gets only the options that it knows. It gets no
    system whose name requires an option that it does not know.
    """
    options = load_arguments(arguments)
    verifier = options["verifier"]
    words = arguments.drafter or [pairs.default_drafter(verifier, pairs.locate(verifier))]
    labels = {label or name: name for label, name in (DRAFTER.fullmatch(word).groups() for word in words)}
    if len(labels) < len(words) or pairs.NO_DRAFTER in labels.values():
        raise ValueError(f"got --drafter {' '.join(words)}, expected one or more drafters of different labels")
    of_each_system = ("nodes", "temperature", "seed")
    shared = {key: value for key, value in option_values(arguments, GenerateConfig).items() if key not in of_each_system}
    systems: dict[str, System] = {}
    for label, drafter in labels.items():
        model = loading.load(**options | {"drafter": drafter})
        for other in systems.values():  # all share one copy of the verifier
            model.weights = model.weights.replace(verifier=other.model.weights.verifier)
        unsupported = {*field_names(GenerateConfig, "drafting")} - {*model.drafter.settings}
        for name, system in chosen.items():
            if len(labels) > 1 and system.get("builder") != "chain" and any(system.get(key) for key in unsupported):
                continue
            settings = {"builder": "best-first"} | shared | system
            dropped = {key for key in settings.keys() & unsupported if len(labels) > 1 or not settings[key]}
            config = GenerateConfig(**{key: value for key, value in settings.items() if key not in dropped})
            ending = f", {label}" if len(labels) > 1 and config.builder != "none" else ""
            new = System(name=name + ending, model=model, config=config)
            systems.setdefault(json.dumps([ending, new.settings()]), new)  # settings without effect raise errors
    return list(systems.values())


def refuse_mismatches(
    systems: Sequence[System], prompts: Sequence[BenchPrompt], earlier: Sequence[BenchRecord], path: Path
) -> None:
    """Refuses settings and prompts that differ from earlier records, and prompts that exceed the verifier's context."""
    for system in systems:
        ours = {"system": system.name, "settings": system.settings(), **bench_records.environment(system.model)}
        bench_records.check_one_run([*earlier, ours], path)
    hashes = {record["prompt_id"]: record["prompt_hash"] for record in earlier}
    model = systems[0].model
    new_tokens = systems[0].config.max_new_tokens
    for prompt in prompts:
        if hashes.get(prompt.id, prompt.hash) != prompt.hash:
            raise ValueError(f"{path}: got another text for prompt {prompt.id!r} than in the file; write to another file")
        last_turn = make_chat(prompt, [""] * (len(prompt.turns) - 1))
        length = len(model.encode(last_turn)) + len(prompt.turns) * new_tokens
        context = model.verifier.max_positions
        if length > context:
            got = f"{length} tokens, {new_tokens} new ones a turn included"
            raise ValueError(f"prompt {prompt.id!r}: got {got}, expected at most {context} (the verifier's context)")
