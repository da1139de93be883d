"""Tables of answers: their lengths per round, their speeds, and whether they equal one-token decoding."""

from collections.abc import Iterable
from typing import Any

from forms import interval, read, section, shown, table

SYSTEMS = {
    "ar": "one token at a time",
    "chain": "chain (DFlash)",
    "marginal": "marginal tree (DDTree)",
    "treeflash": "TreeFlash tree",
}
TREES = {
    "joined-8": "8 nodes, joined with n-grams",
    "joined-5:block_size=5": "5 nodes, joined with n-grams",
    "treeflash-8": "8 nodes",
}


@shown
def tau() -> str:
    runs, rows = read("tau_gsm8k.json"), []
    sampled = {row["system"].partition("@")[0]: row for row in runs["sampled"]["rows"]}
    for greedy in runs["greedy"]["rows"]:
        system = greedy["system"].partition("@")[0]
        name, measured = SYSTEMS[system.partition("-")[0]], (greedy, sampled[system])
        taus = [f"{row['tau']:.2f}" for row in measured]
        ratios = [interval(row["tau_ratio"]) if "TreeFlash" in name else "" for row in measured]
        rows.append([name, greedy["nodes"] or "", taus[0], ratios[0], taus[1], ratios[1]])
        assert all(row["identical"] == row["responses"] for row in measured), "the caption says so"
    settings, where, versions = (runs["greedy"][key] for key in ("settings", "hardware", "versions"))
    caption = (
        f"{runs['greedy']['rows'][0]['prompts']} prompts, at most {settings['max_new_tokens']} new tokens, "
        f"{settings['dtype']} on {where['cores']} CPU cores, batch {settings['batch_size']}, jax {versions['jax']}; "
        "all answers equal those of one-token decoding; "
        "commands in [tau_gsm8k.json](tau_gsm8k.json)."
    )
    header = "drafted by | nodes | tau, T = 0 | over the marginal tree | tau, T = 1 | over the marginal tree"
    return section(header, rows, caption)


@shown
def speeds() -> str:
    """Formats tokens per second on several devices, beside llama.cpp if it was measured."""
    peers, tiny, rows = read("peers_smollm2.json"), read("drafters_tiny.json"), []
    for drafting, dtype, model, device in (
        ("trained", "bfloat16", "SmolLM2-135M", "2 CPU cores, amx_bf16"),
        ("zen5", "bfloat16", "SmolLM2-135M", "2 CPU cores, avx512_bf16"),
        ("ngrams", "float32", "SmolLM2-135M, n-grams alone", "2 CPU cores, float32"),
    ):
        systems = peers[drafting]["runs"]["mixed"]["systems"]
        names = f"one token, {dtype}", f"drafted, {dtype}", "llama.cpp, Q4_1"
        rows.append([model, device, *(f"{systems[name]['tokens_per_second']:.1f}" for name in names)])
    ways = {(system["drafter"], system["way"], system["nodes"]): system["tokens_per_second"] for system in tiny["systems"]}
    paces = [f"{ways[key]:.0f}" for key in (("none", "one token", None), ("TreeFlash", "tree", 16))]
    rows.append(["`tiny`", "2 CPU cores, float32", *paces, "-"])
    note = (
        "- Tokens/s, prompts included: greedy, batch 1, 64 new tokens\n"
        "- Drafted: 8 nodes in bfloat16, 16 in float32; drafting slows toy `tiny`\n"
        "- 4-bit weights: fewer bytes, other answers\n"
        "- Commands: [SmolLM2](notebooks/results/peers_smollm2.md), [tiny](notebooks/results/drafters_tiny.md)"
    )
    return section("model | device | one token at a time | drafted | llama.cpp, 4-bit", rows, note)


@shown
def tau_smollm2() -> str:
    runs, rows = read("tau_smollm2.json"), []
    for prompts, name in runs["names"].items():
        measured = {(row["temperature"], row["system"]): row for row in runs["run"]["systems"] if row["set"] == prompts}
        for temperature in sorted({temperature for temperature, _ in measured}):
            marginal, tree = (measured[temperature, system] for system in runs["systems"])
            taus = [f"{row['tau']:.2f}" for row in (marginal, tree)]
            rows.append([name, f"{temperature:g}", *taus, interval(tree["tau_ratio"])])
    header = "prompts | T | marginal tree (DDTree) | tree with the head | with the head over without"
    return section(header, rows, f"{runs['note']}:", [runs["command"]])


def _speed_smollm2() -> Iterable[tuple[str, dict[str, dict[str, Any]]]]:
    """Yields every set of prompts with its systems by name."""
    runs = read("speed_smollm2.json")
    for prompts, name in runs["names"].items():
        yield name, {row["system"]: row for row in runs["run"]["systems"] if row["set"] == prompts}


@shown
def speed_smollm2() -> str:
    rows = []
    for prompts, systems in _speed_smollm2():
        plain, (tree, *others) = systems["ar"], [systems[name] for name in TREES]
        speeds = [f"{row['tokens_per_second']:.1f}" for row in (plain, tree)]
        rows.append([prompts, f"{tree['tau']:.2f}", *speeds, *(interval(row["speedup"]) for row in (tree, *others))])
    header = "prompts | tau | one token, tokens/s | drafted, tokens/s | speedup"
    runs = read("speed_smollm2.json")
    return section(f"{header} | 5 nodes of blocks of 5 | 8 nodes, no n-grams", rows, f"{runs['note']}:", [runs["command"]])


@shown
def batches_smollm2() -> str:
    """Formats the speedup of trees by the number of sequences decoded together."""
    runs, names, rows = read("speed_smollm2.json")["batches"], read("speed_smollm2.json")["names"], []
    for run in runs["runs"]:
        speedups = {(row["system"], row["set"]): f"{row['speedup']['value']:.2f}" for row in run["systems"]}
        for system in sorted({system for system, _ in speedups} - {"ar"}):
            cells = [speedups[system, prompts] for prompts in names]
            rows.append([run["sequences"], run["dtype"], system.removeprefix("joined-"), *cells])
    return section(f"sequences | dtype | nodes | {' | '.join(names.values())}", rows, f"{runs['note']}:", [runs["command"]])


@shown
def near_ties() -> str:
    rows = []
    for prompts, systems in _speed_smollm2():
        trees = [systems[name] for name in TREES]
        often = [f"one in {tree['compared_tokens'] / tree['near_ties']:.0f} tokens" for tree in trees]
        equal = [f"{tree['identical']} of {tree['compared']}" for tree in trees]
        rows.append([prompts, *(f"{which}; {rate}" for which, rate in zip(equal, often, strict=True))])
    return table(f"prompts | {' | '.join(TREES.values())}", rows)


@shown
def sampled_trees() -> str:
    runs = read("sampled_tiny.json")
    plain = {(row["temperature"], row["system"]): row["tau"] for row in runs["rows"]}
    rows = []
    for row in filter(lambda row: row["against"], runs["rows"]):
        taus = [f"{tau:.2f}" for tau in (plain[row["temperature"], row["against"]], row["tau"])]
        way = f"{row['builder']} + {row['acceptance']}"
        rows.append([f"{row['temperature']:g}", row["nodes"], way, *taus, interval(row["tau_ratio"])])
    header = "T | nodes | builder + rule | tau, best-first tree | tau | ratio"
    return section(header, rows, f"{runs['note']}:", runs["command"])


@shown
def served() -> str:
    """Formats the tokens per second that clients of servers get together."""
    runs = read("serve_smollm2.json")["clients"]
    clients = sorted({row["clients"] for row in runs["rows"]})
    speeds = {(row["server"], row["clients"]): f"{row['tokens_per_second']:.1f}" for row in runs["rows"]}
    names = dict.fromkeys(row["server"] for row in runs["rows"])
    rows = [[name, *(speeds[name, count] for count in clients)] for name in names]
    header = " | ".join(["server", *(f"{count} client{'s' * (count > 1)}" for count in clients)])
    return section(header, rows, f"{runs['note']}:", runs["commands"])


@shown
def long_prompts() -> str:
    """Formats pauses of a stream while another client's long prompt is read."""
    runs = read("serve_smollm2.json")["long_prompt"]
    keys = "words", "server", "alone", "beside", "long_prompt"
    header = "words | server | longest pause of the stream alone, s | beside the prompt, s | time to the prompt's answer, s"
    return section(header, ([row[key] for key in keys] for row in runs["rows"]), runs["note"] + ":", runs["commands"])


@shown
def schemas() -> str:
    """Formats answers that follow schemas, with drafts that obey them and drafts that do not."""
    runs = read("serve_smollm2.json")["schemas"]
    rows = [[row["schema"], row["decoded"], f"{row['tau']:.2f}", f"{row['tokens_per_second']:.1f}"] for row in runs["rows"]]
    return section("schema | decoded by | tau | tokens/s", rows, runs["note"])
