"""Two questions to a trained pair, behind numbers of its model card.

    python -m train.evaluate temperatures --data DIR
    python -m train.evaluate seen --responses runs/responses.jsonl --results greedy.jsonl

`temperatures`: tau over drafter temperatures on training prompts, never evaluation prompts; the drafter's config stores the
best for a greedy verifier. `seen`: tau of a `treeflash bench run` file apart for rounds whose 16-gram, 8 tokens up to the
anchor and the 8 that follow, stands in the drafter's training answers; rounds near either end of an answer are left out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import treeflash_jax as tf
from train import data

BEFORE, AFTER = 8, 8
TEMPERATURES = (0.4, 0.55, 0.7, 0.85, 1.0, 1.2)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def temperatures(folder: Path, prompts: int, seed: int) -> Iterator[dict]:
    """One row per verifier temperature, budget and head: tau at every drafter temperature."""
    model = tf.load("tiny")
    messages = data.conversations(folder, "gsm8k_train")
    random.Random(seed).shuffle(messages)
    chats = [conversation[:1] for conversation in messages[:prompts]]
    for temperature in (0.0, 1.0):
        for nodes in (16, 64):
            for head in (model.drafter.head, "marginal"):
                settings = {"temperature": temperature, "nodes": nodes, "head": head, "max_new_tokens": 128, "seed": 3}
                taus = {}
                for sharpness in TEMPERATURES:
                    results = model.generate(chats, batch_size=prompts, drafter_temperature=sharpness, **settings)
                    taus[sharpness] = round(mean([length for r in results for length in r.accept_lengths]), 3)
                yield settings | {"prompts": prompts, "tau": taus}


def grams(answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> set[tuple[int, ...]]:
    """All 16-grams of (prompt, response) pairs that touch the response."""
    size, found = BEFORE + AFTER, set()
    for prompt, response in answers:
        tokens = (*prompt[-(size - 1) :], *response)
        found |= {tokens[at : at + size] for at in range(len(tokens) - size + 1)}
    return found


def by_seen(records: Sequence[dict], known: set[tuple[int, ...]]) -> dict[str, dict[str, dict[str, float]]]:
    """Per system, mean accepted length of seen and of unseen rounds, and how many there are."""
    lengths: dict[str, dict[str, list[int]]] = defaultdict(lambda: {"seen": [], "unseen": []})
    for record in records:
        for ids, accepted in zip(record["ids"], record["accept_lengths"], strict=True):
            anchor = 0
            for length in accepted:
                gram = tuple(ids[anchor + 1 - BEFORE : anchor + 1 + AFTER]) if anchor + 1 >= BEFORE else ()
                if len(gram) == BEFORE + AFTER:
                    lengths[record["system"]]["seen" if gram in known else "unseen"].append(length)
                anchor += length
    return {
        system: {kind: {"tau": round(mean(rounds), 3), "rounds": len(rounds)} for kind, rounds in kinds.items() if rounds}
        for system, kinds in lengths.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    questions = parser.add_subparsers(dest="question", required=True)
    sweep = questions.add_parser("temperatures")
    sweep.add_argument("--data", type=Path, required=True, help="folder of training JSONL files")
    sweep.add_argument("--prompts", type=int, default=32)
    sweep.add_argument("--seed", type=int, default=1)
    seen = questions.add_parser("seen")
    seen.add_argument("--responses", type=Path, required=True, help="what train.respond wrote")
    seen.add_argument("--results", type=Path, required=True, help="what `treeflash bench run` wrote")
    args = parser.parse_args()
    if args.question == "temperatures":
        for row in temperatures(args.data, args.prompts, args.seed):
            print(json.dumps(row), flush=True)
        return
    answers = [json.loads(line) for line in args.responses.open(encoding="utf-8")]
    records = [json.loads(line) for line in args.results.open(encoding="utf-8")]
    known = grams([(answer["prompt"], answer["response"]) for answer in answers])
    print(json.dumps(by_seen([record for record in records if record["system"] != "ar"], known), indent=1))


if __name__ == "__main__":
    main()
