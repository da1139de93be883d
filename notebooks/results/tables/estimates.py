"""Tables of what compilers say of programs: memory, launches, estimated times."""

import math

from forms import GIB, TABLES, read, section, shown, table


def compiled(name: str) -> str:
    """Formats the memory of rounds."""
    rows = []
    for result in read(name).values():
        size = {name: count / GIB for name, count in result["bytes_per_device"].items()}
        parts = [size["verifier"], size["drafter"] + size.get("head", 0), size["verifier_cache"] + size["drafter_cache"]]
        parts += [max(size["round"], size["prefill"])]
        total = f"{size['total']:.2f} of {result['bytes_limit'] / GIB:.0f}"
        mesh = "x".join(map(str, result["mesh"].values()))
        rows.append([result["shape"], result["topology"], mesh, *(f"{part:.2f}" for part in parts), total])
    return table("model | topology | mesh | verifier | drafter and head | caches | temporary | total", rows)


@shown
def tpu_estimates() -> str:
    """Formats what the compiler for TPUs estimates for steps and rounds, beside the time of reading their bytes."""
    rows, steps = [], {}
    for result in read("tpu_estimates.json").values():
        times = result["estimate"]
        total, chip = math.fsum(times["milliseconds"].values()), result["topology"].partition(":")[0]
        place = result["shape"], chip
        kind = "step" if result["nodes"] == 1 else f"round of {result['nodes']} nodes"
        if result["nodes"] == 1:
            steps[place] = total  # rounds follow the step of the same forms
        phases = [f"{times['milliseconds'].get(phase, 0):.2f}" for phase in ("draft", "tree", "verify", "accept", "commit")]
        over_step = f"{total / steps[place]:.2f}" if result["nodes"] > 1 else ""
        ratio = f"{total / times['reading']:.2f}"
        what = *place, kind, result["products"]
        rows.append(
            [*what, *phases, f"{total:.2f}", f"{times['reading']:.2f}", ratio, f"{times['copying']:.2f}", over_step]
        )
    names = "draft | tree | verify | accept | commit | total | reading | total / reading | copies | round / step"
    return table(f"model | chip | program | on the matrix unit | {names}", rows)


@shown
def tpu_models() -> str:
    """Formats the compiler's estimates of steps and rounds of other models, beside the time of reading what they read."""
    rows, steps = [], {}
    for result in read("tpu_models.json").values():
        is_step = result["nodes"] == 1
        place, times = (result["shape"], result["topology"], result["batch"]), result["estimate"]
        total = math.fsum(times["milliseconds"].values())
        if is_step:
            steps[place] = total
        mesh = "x".join(map(str, result["mesh"].values()))
        phases = [f"{times['milliseconds'].get(phase, 0):.2f}" for phase in ("draft", "tree", "verify", "accept", "commit")]
        cells = [*place[:2], mesh, place[2], "step" if is_step else f"round of {result['nodes']} nodes", *phases]
        cells += [f"{number:.2f}" for number in (total, times["reading"], total / times["reading"], times["copying"])]
        rows.append([*cells, "" if is_step else f"{total / steps[place]:.2f}"])
    names = "draft | tree | verify | accept | commit | total | reading | total / reading | copies | round / step"
    return table(f"model | topology | mesh | batch | program | {names}", rows)


@shown
def tau_nodes() -> str:
    """Formats the tau of `tiny` and the estimate of a round by nodes, over those of 64 nodes."""
    results, rows = read("tau_nodes.json"), []
    for nodes, result in results.items():
        over = f"{result['tau'] / results['64']['tau']:.2f}"
        rows.append([nodes, f"{result['tau']:.2f}", over, result["round"]["v5e"], result["round"]["v6e"]])
    names = "tau, tiny pair, T = 0 | over 64 nodes | round, v5e, over 64 nodes | round, v6e, over 64 nodes"
    return table(f"nodes | {names}", rows)


@shown
def tpu_nodes() -> str:
    """Formats the compiler's estimates of rounds by sequences and nodes, and tokens per second by the tau of `tiny`."""
    tau = {1: 1.0} | {int(nodes): result["tau"] for nodes, result in read("tau_nodes.json").items()}
    rows, steps = [], {}
    for result in read("tpu_nodes.json").values():
        place = result["topology"].partition(":")[0], result["context"], result["batch"]
        times, nodes = result["estimate"]["milliseconds"], result["nodes"]
        total = math.fsum(times.values())
        step = steps.setdefault(place, total)  # the record of one node comes first
        cells = [f"{times.get(phase, 0):.2f}" for phase in ("draft", "verify", "accept", "commit")] + [f"{total:.2f}"]
        speed = f"{1e3 * result['batch'] * tau[nodes] / total:,.0f}" if nodes in tau else ""
        rows.append([*place, nodes, *cells, f"{total / step:.2f}", speed])
    names = "draft | verify | accept | commit | total | total / step | tokens/s"
    return table(f"chip | positions | sequences | nodes | {names}", rows)


@shown
def gemma_rounds() -> str:
    """Formats memory, launches and the compiler's estimates of steps and rounds of Gemma 4 with its assistants."""
    rows, steps = [], {}
    for result in read("gemma_rounds.json").values():
        size = {name: count / GIB for name, count in result["bytes_per_device"].items()}
        chip, is_step = result["topology"].partition(":")[0], result["nodes"] == 1
        what = [result["shape"], chip, "step" if is_step else f"round of {result['nodes']}"]
        parts = [size["verifier"], size["drafter"], size["verifier_cache"], max(size["round"], size["prefill"])]
        what += [f"{part:.2f}" for part in parts] + [f"{result['launches']:,}"]
        if "estimate" not in result:  # for a GPU
            rows.append([*what, *[""] * 6])
            continue
        times = result["estimate"]["milliseconds"]
        total = math.fsum(times.values())
        if is_step:
            steps[result["shape"]] = total
        what += [f"{times.get(phase, 0):.2f}" for phase in ("draft", "tree", "verify", "other")]
        rows.append([*what, f"{total:.2f}", "" if is_step else f"{total / steps[result['shape']]:.2f}"])
    sizes, names = "verifier | assistant | caches | temporary", "draft | tree | verify | other | total"
    return table(f"model | chip | program | {sizes} | launches | {names} | round / step", rows)


@shown
def four_bit_products() -> str:
    """Formats estimated times of products with weights of four bits, over that of reading the weights in bfloat16."""
    times: dict[tuple[str, ...], dict[int, float]] = {}
    for result in read("four_bit_products.json"):
        place = result["chip"].partition(":")[0], result["form"], str(result["group"] or "")
        times.setdefault(place, {})[result["vectors"]] = result["over_reading_bfloat16"]
    counts = sorted({count for row in times.values() for count in row})
    rows = ([*place, *(f"{row[count]:.2f}" for count in counts)] for place, row in times.items())
    return table("chip | form | inputs of a group | " + " | ".join(f"{count}" for count in counts), rows)


@shown
def hybrid_rounds() -> str:
    """Formats weights, caches and rounds of verifiers with recurrent layers."""
    rows = []
    for _, result in sorted(read("hybrid_rounds.json").items()):
        size = {name: f"{count / GIB:.2f}" for name, count in result["bytes_per_device"].items()}
        mesh = "x".join(map(str, result["mesh"].values()))
        parts = [size[part] for part in ("verifier", "drafter", "verifier_cache", "drafter_cache")]
        total = f"{size['total']} of {result['bytes_limit'] / GIB:.0f}"
        where = result["shape"], result["topology"], mesh, result["nodes"]
        rows.append([*where, *parts, size["round"], total, f"{result['launches']:,}"])
    sizes = "verifier | drafter | verifier's cache | drafter's cache | round | total"
    return table(f"model | topology | mesh | nodes | {sizes} | launches", rows)


@shown
def fits() -> str:
    """Formats weights per device, and the number of tokens whose caches fit beside them in nine tenths of its memory."""
    rows: dict[tuple[str, str], list[str]] = {}
    for result in read("fits.json").values():
        size = result["bytes_per_device"]
        weights = size["verifier"] + size["drafter"]
        per_token = (size["verifier_cache"] + size["drafter_cache"]) / (result["batch"] * result["context"])
        tokens = (0.9 * result["bytes_limit"] - weights) / per_token
        name = result["shape"], result["quantize"] or result["dtype"]
        holds = f"{tokens / 1000:,.0f}k tokens" if tokens > 0 else "too large"
        rows.setdefault(name, [*name]).append(f"{weights / GIB:.1f} GiB, {holds}")
    more = []
    for result in read("fits_h100.json").values():
        size = result["bytes_per_device"]
        summed = sum(size[part] for part in ("verifier", "drafter", "verifier_cache", "drafter_cache"))
        more.append((size["total"] - summed) / GIB)
    note = f"Compiled for one H100, {len(more)} of these requests needed {min(more):.1f} to {max(more):.1f} GiB more."
    return section("model | weights | one H100 | one H200 | v5e-8 | v5p-8", rows.values(), note)


@shown
def drafter_rounds() -> str:
    """Formats the memory of rounds of drafters that are not block drafters."""
    rows = []
    for result in read("drafter_rounds.json").values():
        size = {name: count / GIB for name, count in result["bytes_per_device"].items()}
        parts = [size["drafter"], size["drafter_cache"], max(size["round"], size["prefill"]), size["total"]]
        names = result["drafter"], result["topology"], "x".join(map(str, result["mesh"].values())), result["batch"]
        rows.append([*names, *(f"{part:.2f}" for part in parts), result["depths"]])
    return table("drafter | topology | mesh | batch | drafter | its cache | temporary | total | levels", rows)


TABLES["tpu-rounds"] = lambda: compiled("tpu_rounds.json")
TABLES["experts-rounds"] = lambda: compiled("experts_rounds.json")
