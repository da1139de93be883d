"""Names of the systems that `treeflash bench run` compares.

"ar" decodes one token at a time, "chain" drafts one path, "marginal" and "treeflash" are trees without and with the
drafter's head, and "joined" is "treeflash" with n-grams of the text. A tree's name may add its nodes, a builder, an
acceptance rule and a drafter temperature: "treeflash-32", "treeflash-auto" (the number of nodes that `treeflash calibrate`
found best), "treeflash-32+hybrid", "marginal+paths+traversal", "treeflash-16@0.7". A tree without nodes in its name is
measured for every number of --nodes.
Settings of the drafter or the tree may follow as ":name=value", such as "treeflash-16+delayed:branches=2:trunk=auto".
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from treeflash_jax.acceptance import RULES
from treeflash_jax.core.checks import field_checks
from treeflash_jax.drafters import draft_options
from treeflash_jax.engine.settings import TreeConfig, settings_class
from treeflash_jax.trees import BUILDERS, TreeShape, branching

SYSTEMS: dict[str, dict[str, Any]] = {
    "ar": {"builder": "none"},
    "chain": {"builder": "chain", "head": "marginal", "ngrams": 0},
    "marginal": {"head": "marginal", "ngrams": 0},
    "treeflash": {"ngrams": 0},
    "joined": {"ngrams": 8},
}
# Builders that a name may add, as fields of GenerateConfig.
BRANCHING = {name: {"builder": name} for name in branching()} | {"one-path": {"builder": "paths", "branches": 1}}
NAME = re.compile(r"([a-z]+)(?:-(\d+|auto))?(?:\+([a-z-]+)(?:\+([a-z-]+))?)?(?:@(\d+\.?\d*))?((?::\w+=.+)?)")


def lossless_pairs() -> list[str]:
    """Returns "+builder+rule" for every pair that leaves the verifier's distribution untouched."""
    pairs = []
    for name, settings in BRANCHING.items():
        shape = TreeShape(branches=settings.get("branches", TreeShape.branches))
        distribution = BUILDERS[settings["builder"]].distribution_for(shape)
        pairs += [f"+{name}+{rule}" for rule in RULES if distribution in RULES[rule].DISTRIBUTIONS]
    return pairs


# Options that a preset sets if the command line does not.
PRESETS: dict[str, dict[str, Any]] = {
    "rules": {
        "systems": [head + pair for head in ("marginal", "treeflash") for pair in lossless_pairs()],
        "nodes": [16, 64],
        "temperature": [1.0],
        "batch_size": 8,
        "expected_lengths": True,
    }
}


class Preset(argparse.Action):
    """Sets the options of a preset that still have their defaults."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, value)
        for name, preset in PRESETS[value].items():
            if getattr(namespace, name) == parser.get_default(name):
                setattr(namespace, name, preset)


def parse_systems(names: Sequence[str], nodes: Sequence[int | str]) -> dict[str, dict[str, Any]]:
    """Returns fields of GenerateConfig by system name; trees whose name gives no number of nodes get each of `nodes`.

    Raises ValueError for an unknown system or setting.
    """
    checks, systems = field_checks(settings_class()), dict[str, dict[str, Any]]()
    known = [field.name for group in (draft_options(), TreeConfig) for field in fields(group) if field.name != "nodes"]
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
            system[setting] = checks[setting](value, from_text=True)
        if not is_tree:
            systems[name] = system
            continue
        ending = name.removeprefix(base if size is None else f"{base}-{size}")
        for count in nodes if size is None else [size if size == "auto" else int(size)]:
            systems[f"{base}-{count}{ending}"] = system | {"nodes": count}
    return systems
