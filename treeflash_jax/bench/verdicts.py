"""Verdicts of a benchmark: whether drafted answers equal one-token answers, up to near-ties."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import treeflash_jax as tf
from treeflash_jax.bench.records import Record
from treeflash_jax.check import divergence, explanation
from treeflash_jax.planning import Row


def differences(
    model: tf.TreeFlash, record: Record, others: Iterable[Record], rows: Sequence[Row]
) -> dict[str, dict[str, Any]]:
    """Compares drafted with one-token answers, and prints how they differ. Part of the later record of each pair.

    Args:
      others: earlier answers of other systems to its prompt, with its temperature and seed.
      rows: prompt and sampling settings of every turn of the answer.

    Returns:
      By system, {"turn", "near_tie"} and the fields of `check.Divergence`; systems with the same answer are left out.
    """
    differing = {}
    for other in others:
        if are_comparable(record, other) and record["ids"] != other["ids"]:
            turn = next(i for i, (a, b) in enumerate(zip(record["ids"], other["ids"], strict=True)) if a != b)
            pair = record["ids"][turn], other["ids"][turn]
            apart = divergence(model, rows[turn], *(pair[::-1] if record["settings"]["builder"] == "none" else pair))
            differing[other["system"]] = {"turn": turn, "near_tie": apart.is_near_tie(), **asdict(apart)}
            verdict = "PASS" if apart.is_near_tie() else "FAIL"
            where = f"prompt {record['prompt_id']}, {record['system']} and {other['system']} from token {apart.index} on"
            print(f"{verdict}: {where}: {explanation(apart, model.dtype)}", file=sys.stderr)
    return differing


def summarise(pairs: Sequence[tuple[Record, Record]]) -> dict[str, Any]:
    """Sums up the answers of a system.

    Args:
      pairs: its answers, each with the one-token answer to the same prompt.

    Returns:
      {"compared", "identical", "compared_tokens", "near_ties", "verdict"}: numbers of answers, and of tokens up to the
      first difference. The last three are None for older files and for rules that draw other samples.
    """
    differing = [(drafted, plain) for drafted, plain in pairs if drafted["ids"] != plain["ids"]]
    summary = {"compared": len(pairs), "identical": len(pairs) - len(differing)}
    summary |= dict.fromkeys(("compared_tokens", "near_ties", "verdict"))
    known = [
        drafted.get("differences", {}).get(plain["system"]) or plain.get("differences", {}).get(drafted["system"])
        for drafted, plain in differing
    ]
    if pairs and all(known) and all(are_comparable(*pair) for pair in pairs):
        tokens = sum(sum(map(len, plain["ids"])) for drafted, plain in pairs if drafted["ids"] == plain["ids"])
        for apart, (_, plain) in zip(known, differing, strict=True):
            tokens += sum(map(len, plain["ids"][: apart["turn"]])) + apart["index"] + 1
        near_ties = sum(apart["near_tie"] for apart in known)
        verdict = "PASS" if near_ties == len(known) else "FAIL"
        summary |= {"compared_tokens": tokens, "near_ties": near_ties, "verdict": verdict}
    return summary


def are_comparable(record: Record, other: Record) -> bool:
    """Tells whether one record is a one-token answer and the other one that drafting must not change."""
    ours, theirs = record["settings"], other["settings"]
    rules = {settings.get("acceptance") for settings in (ours, theirs)} - {None, "sample-and-match"}
    return (ours["builder"] == "none") != (theirs["builder"] == "none") and not (rules and ours["temperature"] > 0)
