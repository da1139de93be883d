"""Tables that compare drafters, and the library with other programs."""

from functools import partial
from operator import itemgetter
from statistics import median

from forms import TABLES, interval, read, section, shown


@shown
def beside_published() -> str:
    runs, rows = read("speed_b_trained.json"), []
    for key, name in (("tree", "tree"), ("one_token", "one token at a time")):
        for suffix, note in (("", ""), ("_one_thread", ", published code on one thread")):
            speed = runs[key + suffix]
            speeds = [f"{speed[which]:.0f}" for which in ("tokens_per_second", "other_tokens_per_second")]
            rows.append([name + note, *speeds, f"{speed['ratio']:.1f}"])
    header, note = "decoding | this library, tokens/s | published code, tokens/s | ratio", runs["note"]
    return section(header, rows, f"{note.partition('; one_thread')[0]}:", [runs["command"]], "text")


@shown
def beside_published_gpu() -> str:
    runs = read("published_h100.json")
    rows = [[row["name"], f"{row['ms']:.1f}", f"{row['other_ms']:.1f}", f"{row['ratio']:.1f}"] for row in runs["rows"]]
    return section("decoding | this library, ms | published code, ms | ratio", rows, f"{runs['note']}:", runs["commands"])


def beside_peers(drafting: str) -> str:
    """Formats systems of peers_smollm2.json by prompts, with speeds over the first system's."""
    runs, rows = read("peers_smollm2.json")[drafting], []
    for prompts, run in runs["runs"].items():
        plain = next(iter(run["systems"].values()))
        for system, measured in run["systems"].items():
            ratio = median(mine / theirs for mine, theirs in zip(measured["all"], plain["all"], strict=True))
            tau = f"{measured['tau']:.2f}" if "tau" in measured else ""
            same = f"{measured['same']} of {run['prompts']}"
            rows.append([prompts, system, tau, f"{measured['tokens_per_second']:.1f}", f"{ratio:.2f}", same])
    header = "prompts | decoded by | tau | tokens/s | over one-token decoding | same answers"
    return section(header, rows, f"{runs['note']}:", runs["commands"], "text")


@shown
def drafters() -> str:
    runs, rows = read("drafters_tiny.json"), []
    settings, phases = runs["settings"], ("draft", "tree", "verify", "commit", "round")
    plain = next(f"{system['tokens_per_second']:.0f}" for system in runs["systems"] if system["phases_ms"] is None)
    for system in filter(itemgetter("phases_ms"), runs["systems"]):
        times = system["phases_ms"]
        shares = system["acceptance_by_depth"]
        accepted = [f"{share / above:.2f}" for above, share in zip([1.0, *shares], shares[:5], strict=False)]
        pace = [f"{system['tau']:.2f}", f"{system['tokens_per_second']:.0f}"]
        times["draft"] += times.get("expand", 0.0)  # in older results a phase of its own
        costs = [f"{times[phase]:.1f}" for phase in phases]
        rows.append([system["drafter"], system["way"], system["nodes"], *pace, " ".join(accepted), *costs])
    step = median(system["phases_ms"]["step"] for system in runs["systems"] if system["phases_ms"])
    header = f"drafter | way | nodes | tau | tokens/s | accepted at depth 1 to 5 | {' | '.join(phases)}"
    note = (
        f"{settings['prompts']} GSM8K test prompts, greedy, batch 1, {settings['max_new_tokens']} "
        f"new tokens, float32, phases in ms. One token at a time: {plain} tokens/s, {step:.1f} ms a step. 2 CPU cores, jax "
        f"{runs['versions']['jax']}; {runs['note']}:"
    )
    return section(header, rows, note, runs["commands"])


@shown
def heads() -> str:
    """Formats tau of heads on one backbone, by nodes and temperature."""
    runs, rows = read("heads_tiny.json"), {}
    for row in runs["rows"]:
        cells = rows.setdefault((row["head"], row["trained"], row["nodes"]), [])
        cells += [f"{row['tau']:.2f}", interval(row["tau_ratio"])]
    header = "head | trained with | nodes | tau, T = 0 | over the marginal tree | tau, T = 1 | over the marginal tree"
    return section(header, [[*key, *cells] for key, cells in rows.items()], f"{runs['note']}:", runs["commands"])


@shown
def drafters_smollm2() -> str:
    """Formats tau, costs and gains with 8 nodes, over all sets of prompts together and the gain for each."""
    results, rows = read("drafters_smollm2.json"), []

    def total(drafter: str, top: str, bottom: str, prompts: str | None = None) -> float:
        rows = [x for x in results["greedy"] if x["drafter"] == drafter and prompts in (None, x["set"])]
        return sum(x[top] for x in rows) / sum(x[bottom] for x in rows)

    for drafter, times in results["phases_ms"].items():
        pace = partial(total, top="tokens", bottom="seconds")
        gains = [pace(drafter, prompts=name) / pace("none", prompts=name) for name in (None, *results["sets"])]
        cells = total(drafter, "committed", "rounds"), times["round"] / times["step"], *gains
        rows.append([drafter, *(f"{x:.2f}" for x in cells)])
    header = f"drafter | tau | round / step | speedup | {' | '.join(results['sets'].values())}"
    return section(header, rows, f"{results['note']}:", results["commands"])


@shown
def taus_smollm2() -> str:
    """Formats tau by the number of nodes."""
    results, rows = read("drafters_smollm2.json")["by_nodes"], {}
    for row in results["rows"]:
        rows.setdefault(row["drafter"], {})[f"{row['nodes']} nodes"] = f"{row['tau']:.2f}"
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
    return section(f"drafter | {' | '.join(columns)}", cells, f"{results['note']}:", results["commands"])


@shown
def steering() -> str:
    """Formats tau of a language model that was distilled, and of one that was also steered, at equal training time."""
    runs, rows = read("steering.json"), []
    for row in runs["rows"]:
        prompts = f"{row['pair']}, {row['set']}" if row["set"] else row["pair"]
        taus = [f"{row[name]:.2f}" for name in ("tau_distilled", "tau_steered")]
        speedups = [interval(row["speedup"][name]) for name in ("distilled", "steered")]
        rows.append([prompts, f"{row['temperature']:g}", row["way"], *taus, interval(row["tau_ratio"]), *speedups])
    header = "verifier | T | draft | tau, distilled | tau, steered | ratio | speedup, distilled | speedup, steered"
    return section(header, rows, f"{runs['note']}:", runs["commands"])


@shown
def delayed_selector() -> str:
    """Formats tau of selectors beside that of the best tree of their lists."""
    runs, rows = read("delayed_selector.json"), []
    for row in runs["rows"]:
        taus = [f"{row[name]:.2f}" for name in ("tau_best", "tau_selector")]
        rows.append([row["pair"], row["rule"], row["labelled_rounds"], row["best"], *taus, interval(row["tau_ratio"])])
    header = "pair | rule | labelled rounds | best tree | tau, best tree | tau, selector | ratio"
    return section(header, rows, f"{runs['note']}:", runs["commands"])


@shown
def shipped_nodes() -> str:
    """Formats tau of the drafter that ships by tree and temperature, over all sets of prompts."""
    results, rows = read("drafters_smollm2.json")["shipped"], {}
    for row in results["rows"]:
        rows.setdefault((row["tree"], row["nodes"]), {})[row["temperature"]] = row["tau"]
    temperatures = sorted({row["temperature"] for row in results["rows"]})
    cells = [[*key, *(f"{taus[t]:.2f}" for t in temperatures)] for key, taus in rows.items()]
    header = " | ".join(["tree", "nodes", *(f"tau, T = {t:g}" for t in temperatures)])
    return section(header, cells, f"{results['note']}:", results["commands"])


TABLES["peers"] = lambda: beside_peers("ngrams")
TABLES["peers-trained"] = lambda: beside_peers("trained")
TABLES["peers-zen5"] = lambda: beside_peers("zen5")
