"""Compares systems on the same prompts, one JSON line per answered prompt: `treeflash bench run --out results.jsonl`.

    treeflash bench run --prompts gsm8k.jsonl --format math --limit 64 --systems ar chain marginal treeflash \\
        --nodes 16 64 --temperature 0 1 --seed 0 1 --out results.jsonl

The names of systems are explained in treeflash_jax/bench/README.md. Answers already in --out are not repeated; a file of
other settings, versions or hardware is refused and left as it is.
"""

import argparse
import json
import re
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import treeflash_jax as tf
from treeflash_jax.acceptance import RULES
from treeflash_jax.bench import bench_records, harness, report
from treeflash_jax.bench.bench_records import Record
from treeflash_jax.bench.harness import Peer, System
from treeflash_jax.bench.phases import Bench, check_sizes
from treeflash_jax.bench.prompt_sets import BenchPrompt, PromptSet, chosen_prompts, empty_chat
from treeflash_jax.core.checks import fit
from treeflash_jax.core.clock import slow
from treeflash_jax.core.settings import add_options, field_names, fit_field, option_values
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.engine.model_options import ModelOptions
from treeflash_jax.engine.pairs import NO_DRAFTER
from treeflash_jax.engine.prompts import parse_ids
from treeflash_jax.trees import branching

REPEATS = 9  # timed samples of a phase
SYSTEMS: dict[str, dict[str, Any]] = {
    "ar": {"builder": "none"},
    "chain": {"builder": "chain", "head": "marginal", "ngrams": 0},
    "marginal": {"head": "marginal", "ngrams": 0},
    "treeflash": {"ngrams": 0},
    "joined": {"ngrams": 8},
}
# Builders that a name may add, as fields of GenerateConfig.
BRANCHING = {name: {"builder": name} for name in branching()} | {"one-path": {"builder": "paths", "branches": 1}}
NAME = re.compile(r"([a-z]+)(?:-(\d+))?(?:\+([a-z-]+)(?:\+([a-z-]+))?)?(?:@(\d+\.?\d*))?((?::\w+=.+)?)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    names, help = ("VERIFIER", "[LABEL=]DRAFTER"), "verifier and one or more drafters: folders, Hub ids or names"
    model.add_argument("--pair", nargs="+", metavar=names, default=["tiny", "tiny"], help=f"{help} (default: tiny tiny)")
    help = "dtypes, each of which adds its own systems (default: bfloat16, but float32 on a CPU without it)"
    model.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float64"), default=[None], help=help)
    add_options(model, ModelOptions, ["quantize", "thinking", "template"])
    prompts = parser.add_argument_group("prompts")
    add_options(prompts, PromptSet, several=["prompts"])
    prompts.add_argument("--prompt-ids", metavar="IDS", help="token ids of one prompt, instead of files")
    chosen = parser.add_argument_group("systems")
    help = ", ".join(SYSTEMS) + ", or a tree like treeflash-32+hybrid+traversal@0.7:skeleton=0.5 (nodes, builder, "
    help += "rule, drafter temperature, other settings)"
    chosen.add_argument("--systems", nargs="+", metavar="NAME", default=list(SYSTEMS), help=f"{help} (default: all)")
    help = "another program that decodes greedily, as in bench/peers; may be given several times"
    chosen.add_argument("--other", action="append", default=[], metavar="NAME=COMMAND", help=help)
    by_name = {"head", "builder", "acceptance", "drafter_temperature"}  # what the names of systems choose
    options = {*field_names(GenerateConfig, "drafting", "tree")} - by_name
    add_options(chosen, GenerateConfig, options, several=["nodes"], nodes=[16])
    sampling = parser.add_argument_group("sampling and output")
    options = "max_new_tokens temperature top_k top_p seed stop_ids batch_size expected_lengths attention".split()
    several, defaults = ("temperature", "seed"), {"temperature": [0.0], "seed": [0], "batch_size": 1}
    add_options(sampling, GenerateConfig, options, several=several, **defaults)
    help = "also time the phases of a round, after this number of tokens"
    sampling.add_argument("--phases", type=int, metavar="CONTEXT", help=help)
    sampling.add_argument("--out", required=True, metavar="FILE", help="JSONL that results are appended to")


def parse_systems(names: Sequence[str], nodes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Returns fields of GenerateConfig by system name; trees whose name gives no number of nodes get each of `nodes`.

    Raises ValueError for an unknown system or setting.
    """
    systems = dict[str, dict[str, Any]]()
    known = [name for name in field_names(GenerateConfig, "drafting", "tree") if name != "nodes"]
    for name in names:
        match = NAME.fullmatch(name)
        base, size, builder, rule, temperature, settings = match.groups() if match else (None,) * 6
        system = SYSTEMS.get(base)
        is_tree = system is not None and "builder" not in system
        is_known = is_tree or (system is not None and size is builder is None)
        is_known &= builder in (None, *BRANCHING) and rule in (None, *RULES)
        if not is_known or (base == "ar" and (temperature or settings)) or (temperature and not float(temperature)):
            raise ValueError(
                f"got unknown system {name!r}, expected one of {', '.join(SYSTEMS)}, or a tree like treeflash-32, "
                "or one with its own builder, rule and drafter temperature like treeflash-32+hybrid+traversal@0.7"
            )
        system = system | (BRANCHING[builder] | {"acceptance": rule} if builder else {})
        system |= {"drafter_temperature": float(temperature)} if temperature else {}
        for setting, value in re.findall(r":(\w+)=(.+?)(?=:\w+=|$)", settings):
            if setting not in known:
                raise ValueError(f"got setting {setting!r} of a system, expected one of {', '.join(known)}")
            system[setting] = fit_field(GenerateConfig, setting, value, from_text=True)
        if not is_tree:
            systems[name] = system
            continue
        ending = name.removeprefix(base if size is None else f"{base}-{size}")
        for count in nodes if size is None else [int(size)]:
            systems[f"{base}-{count}{ending}"] = system | {"nodes": count}
    return systems


def run(arguments: argparse.Namespace) -> int:
    """Measures the answers that the output file lacks, then prints the summary of all of them."""
    chosen, ids = parse_systems(arguments.systems, arguments.nodes), arguments.prompt_ids
    if ids is not None and arguments.prompts:
        raise ValueError("got --prompt-ids and --prompts, expected one of them")
    if ids is not None and not ids.strip():
        raise ValueError("got --prompt-ids without ids, expected token ids")
    prompts = [BenchPrompt(id="ids", ids=parse_ids(ids))] if ids else chosen_prompts(arguments)
    temperatures, seeds = (list(dict.fromkeys(values)) for values in (arguments.temperature, arguments.seed))
    if arguments.other and (max(temperatures) > 0 or arguments.batch_size != 1):
        raise ValueError("got --other with a temperature above 0 or a batch, expected greedy decoding of single prompts")
    others: dict[str, str] = {}
    for other in arguments.other:
        name, _, command = other.partition("=")
        if not name or not command.strip() or name in (*others, *chosen):
            raise ValueError(f"got --other {other!r}, expected NAME=COMMAND with a name that no other system has")
        others[name] = command
    fit(int | None, arguments.phases, "--phases", least=1)
    with ExitStack() as stack:
        stack.enter_context(bench_records.held(arguments.out))
        records, size = bench_records.read_results(arguments.out)
        measured = load_systems(arguments, chosen)
        base = measured[0]
        for name, command in others.items():
            peer = Peer(name=name, model=base.model, config=base.config, pair=base.pair, command=command)
            measured.append(stack.enter_context(peer))
        sampling = {"temperature": temperatures, "seed": seeds}
        for system in measured:
            system.model.plan(system.config.updated(**sampling))
        check(measured, prompts, arguments.format, records, arguments.out)
        phases = {record["system"]: record["phases"] for record in records if record.get("phases")}
        if arguments.phases is not None:
            known = {name for name, times in phases.items() if times["context"] == arguments.phases}
            phases |= time_phases(measured, arguments.phases, temperatures[0], known)
            records = [record | {"phases": phases.get(record["system"])} for record in records]
            size = bench_records.rewrite(arguments.out, records)
        output = stack.enter_context(bench_records.open_results(arguments.out, size))
        settings = {"format": arguments.format, "temperatures": temperatures, "seeds": seeds}
        for record in harness.measure(measured, prompts, known=tuple(records), **settings):
            records.append(record | {"phases": phases.get(record["system"])})
            output.write(json.dumps(records[-1]).encode() + b"\n")
            output.flush()
    report.show(report.summarise(records))
    return 0


def load_systems(arguments: argparse.Namespace, chosen: dict[str, dict]) -> list[System]:
    """Loads the verifier with every drafter in every dtype, and makes the systems; those of equal settings only once.

    With several drafters, a system's name ends with its drafter; with several dtypes, with its dtype. Each of several
    drafters gets the options that it has; options that are off need not be known to it.
    """
    verifier, *words = arguments.pair
    labels = {label or name: name for label, _, name in (word.rpartition("=") for word in words)}
    if not words or len(labels) < len(words) or NO_DRAFTER in labels.values():
        raise ValueError(f"got --pair {' '.join(arguments.pair)}, expected a verifier and drafters of different labels")
    listed, shared = ("nodes", "temperature", "seed"), option_values(arguments, GenerateConfig)
    shared = {name: value for name, value in shared.items() if name not in listed}
    loaded: dict[str, tuple[bool, System]] = {}
    for dtype, (label, drafter) in product(arguments.dtype, labels.items()):
        with slow(f"loading {verifier} and {drafter}"):
            model = tf.load(verifier, drafter=drafter, **option_values(arguments, ModelOptions) | {"dtype": dtype})
        for _, other in loaded.values():
            if other.model.dtype == model.dtype:  # keeps one copy of the verifier
                model.weights = Weights(other.model.weights.verifier, model.weights.drafter)
        known, options = set(field_names(GenerateConfig, "drafting")), {*model.drafter.settings}
        for name, system in chosen.items():
            settings = {"builder": "best-first"} | shared | system
            dropped = {key for key in settings.keys() & known - options if len(labels) > 1 or not settings[key]}
            settings = {key: value for key, value in settings.items() if key not in dropped}
            config = GenerateConfig().updated(**settings)
            model.plan(config)  # refused before anything is measured
            ends = [label] * (len(labels) > 1 and config.builder != "none") + [dtype] * (len(arguments.dtype) > 1)
            source = {} if label == drafter else {"drafter_source": drafter}
            new = System(name=", ".join([name, *ends]), model=model, config=config, pair=(verifier, label), **source)
            key = json.dumps(new.settings() | ({"drafter": None} if config.builder == "none" else {}))
            is_reduced = any(system.get(option) for option in dropped)
            if key not in loaded or is_reduced < loaded[key][0]:  # of equal systems, one that this drafter supports in full
                loaded[key] = is_reduced, new
    return [system for _, system in loaded.values()]


def time_phases(
    measured: Sequence[System], context: int, temperature: float, known: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Times the phases of a round of every system that drafts, except those in `known`.

    Returns {"context", "ms"} by system: tokens in the cache, and median times by phase; "step" is that of one token.
    """
    groups: dict[Any, dict[str, DecodePlan]] = {}  # systems that differ in nodes alone
    times = {}
    for system in measured:
        plan = system.model.plan(system.config)
        if plan.drafts and not isinstance(system, Peer) and system.name not in known:
            groups.setdefault((system.model, replace(plan, num_nodes=1)), {})[system.name] = plan
    sizes = {"batch": measured[0].config.batch_size, "context": context}
    for (model, _), plans in groups.items():
        several = list({plan.num_nodes: plan for plan in plans.values()}.values())
        check_sizes(several, [sizes["batch"]], [context], model.mesh)
        with slow(f"timing the phases of {', '.join(plans)}"):
            medians = Bench(model, several, temperature=temperature, **sizes).sample(REPEATS)
        for name, plan in plans.items():
            ms = {phase: 1e3 * seconds for (phase, nodes), seconds in medians.items() if nodes in (None, plan.num_nodes)}
            times[name] = {"context": context, "ms": ms}
    return times


def check(
    measured: Sequence[System], prompts: Sequence[BenchPrompt], format: str, earlier: Sequence[Record], path: str
) -> None:
    """Refuses prompts that the pair does not support, and settings and prompts that differ from earlier records."""
    for system in measured:
        settings = system.settings() | {"format": format}
        ours = {"system": system.name, "settings": settings, **harness.environment(system.model)}
        for record in earlier:
            if change := bench_records.difference(ours, record):
                raise ValueError(f"{path}: {change} in the file; write to another file")
    hashes = {record["prompt_id"]: record["prompt_hash"] for record in earlier}
    new_tokens, most = measured[0].config.max_new_tokens, measured[0].model.verifier.max_positions
    for prompt in prompts:
        if hashes.get(prompt.id, prompt.hash) != prompt.hash:
            raise ValueError(f"{path}: got another text for prompt {prompt.id!r} than in the file; write to another file")
        if format == "raw" and (len(prompt.turns) > 1 or prompt.system is not None):
            got = "a system message" if prompt.system is not None else f"{len(prompt.turns)} turns"
            raise ValueError(f"prompt {prompt.id!r}: got {got}, expected one turn alone with the format raw")
        length = len(measured[0].model.encode(empty_chat(prompt, format))) + len(prompt.turns) * new_tokens
        if length > most:
            got = f"{length} tokens, {new_tokens} new ones a turn included"
            raise ValueError(f"prompt {prompt.id!r}: got {got}, expected at most {most} (the verifier's context)")
