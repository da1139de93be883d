"""The systems that `treeflash bench run` compares, by name.

"ar" decodes one token at a time, "chain" drafts one path, "marginal" and "treeflash" are trees without and with the
drafter's head. A tree's name may add its nodes, a builder, an acceptance rule and a drafter temperature: "treeflash-32",
"treeflash-auto" (as many nodes as pay best by `treeflash calibrate`), "treeflash-32+hybrid", "marginal+paths+traversal",
"treeflash-16@0.7". A tree without nodes in its name is measured once for every number of --nodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from treeflash_jax.acceptance import RULES
from treeflash_jax.trees import BUILDERS, TreeShape, branching

SYSTEMS: dict[str, dict[str, Any]] = {
    "ar": {"builder": "none"},
    "chain": {"builder": "chain", "head": "marginal"},
    "marginal": {"head": "marginal"},
    "treeflash": {},
}


def builders() -> dict[str, dict[str, Any]]:
    """Builders that a name may add, as fields of GenerateConfig."""
    return {name: {"builder": name} for name in branching()} | {"one-path": {"builder": "paths", "branches": 1}}


def lawful(chosen: Sequence[str] | None = None, rules: Sequence[str] = tuple(RULES)) -> list[str]:
    """Names of trees of every lossless pair of these builders (None: all) and rules, without and with the drafter's head.

    What they are compared with, the best-first tree with sample-and-match, is always among them.
    """

    def is_lawful(builder: str, rule: str) -> bool:
        fields = {"branches": TreeShape.branches} | builders()[builder]
        law = BUILDERS[fields["builder"]].law_of(TreeShape(branches=fields["branches"]))
        return law in RULES[rule].LAWS and (rule in rules or (builder, rule) == ("best-first", "sample-and-match"))

    names = dict.fromkeys(("best-first", *(builders() if chosen is None else chosen)))
    pairs = [f"+{builder}+{rule}" for builder in names for rule in RULES if is_lawful(builder, rule)]
    return [head + pair for head in ("marginal", "treeflash") for pair in pairs]


# Options that a preset sets where the command line does not.
PRESETS: dict[str, dict[str, Any]] = {
    "rules": {
        "systems": lawful(),
        "nodes": [16, 64],
        "temperature": [1.0],
        "batch_size": 8,
        "expected_lengths": True,
    }
}


class Preset(argparse.Action):
    """Sets the options of a preset that still have their defaults."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        for name, preset in PRESETS[value].items():
            if getattr(namespace, name) == parser.get_default(name):
                setattr(namespace, name, preset)


def parse_systems(names: Sequence[str], nodes: Sequence[int | str]) -> dict[str, dict[str, Any]]:
    """Fields of GenerateConfig by system name, for names as this module describes them.

    Raises:
      ValueError: an unknown system, or fewer nodes than one.
    """
    systems: dict[str, dict[str, Any]] = {}
    for name in names:
        whole, at, sharpness = name.partition("@")
        sized, plus, sampled = whole.partition("+")
        base, dash, size = sized.partition("-")
        builder, _, rule = sampled.partition("+")
        fields = SYSTEMS.get(base)
        is_tree = fields is not None and "builder" not in fields
        is_known = fields is not None and (is_tree or not (dash or plus)) and rule in ("", *RULES)
        is_known &= (not dash or size.isdecimal() or size == "auto") and (not plus or builder in builders())
        if not is_known or (at and (base == "ar" or not _is_positive(sharpness))):
            raise ValueError(
                f"got unknown system {name!r}, expected one of {', '.join(SYSTEMS)}, or a tree like treeflash-32, "
                "or one with its own builder, rule and drafter temperature like treeflash-32+hybrid+traversal@0.7"
            )
        if plus:
            fields = fields | builders()[builder] | {"acceptance": rule or None}
        if at:
            fields = fields | {"drafter_temperature": float(sharpness)}
        if not is_tree:
            systems[base + at + sharpness] = fields
            continue
        for count in [int(size) if size.isdecimal() else size] if size else nodes:
            if count != "auto" and count < 1:
                raise ValueError(f"got nodes {count}, expected at least 1 (the root counts)")
            systems[f"{base}-{count}{plus}{sampled}{at}{sharpness}"] = fields | {"nodes": count}
    return systems


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
