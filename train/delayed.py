"""Compares delayed trees on prompts: fixed trunks, trunk="auto", and a selector trained by `train.selector`.

    python -m train.delayed selector=runs/tiny/selector/selector.safetensors prompts=prompts.jsonl out=delayed.json

All systems answer every prompt, batch 1, in turns, beside one-token decoding. Tables and the JSON file are those of
`treeflash bench report`; ratios are over trunk="auto".
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import treeflash_jax as tf
from train.runtime import run_config, watch
from treeflash_jax.bench import harness, report
from treeflash_jax.bench.harness import System
from treeflash_jax.bench.prompt_sets import draw, read_prompts
from treeflash_jax.core import files
from treeflash_jax.core.checks import AtLeast0, AtLeast1, Positive, bounded


@dataclass(frozen=True, kw_only=True)
class DelayedStage:
    """Settings of this command.

    Attributes:
      verifier, drafter: name of a pair, folder, GGUF file or Hub id.
      thinking, template: arguments of the chat template, as in `train.respond`.
      selector: file of a selector for this pair.
      prompts: JSONL file of prompts, of which the first turn is used.
      out: JSON file of results.
      limit: number of prompts, spread over the file.
      new_tokens: tokens of each answer.
      nodes, branches, trunks: sizes of the fixed trees, and of trunk="auto".
      fewer: further numbers of nodes for trunk="auto".
      depths: deepest level drafted, for drafters with this option; 0: the drafter's default.
      temperatures: sampling temperatures.
      seed: random seed of the answers.
    """

    verifier: str = "tiny"
    drafter: str | None = None
    thinking: bool = False
    template: dict[str, Any] = field(default_factory=dict)
    selector: str
    prompts: str
    out: str
    limit: int = bounded(48, least=2)
    new_tokens: int = bounded(96, least=2)
    nodes: int = bounded(16, least=2)
    branches: int = bounded(2, least=1)
    trunks: tuple[AtLeast0, ...] = (0, 1, 2, 3)
    fewer: tuple[AtLeast1, ...] = ()
    depths: int = bounded(0, least=0)
    temperatures: tuple[Positive, ...] = (0.6, 1.0)
    seed: int = bounded(0, least=0)


def main(settings: DelayedStage) -> None:
    files.check_output(settings.out, files.json_with("settings", "command", "systems"))
    model = tf.load(
        verifier=settings.verifier, drafter=settings.drafter, thinking=settings.thinking, template=settings.template
    )
    prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in draw(read_prompts(settings.prompts), settings.limit)]
    systems, temperatures = make_systems(model, settings), settings.temperatures
    records: list[dict[str, Any]] = []
    with watch.Bar("answers", len(prompts) * len(systems) * len(temperatures)) as bar, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tau is")  # a drafter that accepts little is a result here
        sampling = {"temperatures": temperatures, "seeds": [settings.seed], "tell": lambda text: None}
        for record in harness.measure(systems, prompts, **sampling):
            records.append(record)
            bar.show(len(records))
    command = " ".join(["python -m train.delayed", *sys.argv[1:]])
    summary = report.summarise(records, against="trunk auto")
    result = summary | {"settings": summary["settings"] | run_config.to_dict(settings), "command": command}
    files.write(settings.out, json.dumps(result, indent=1) + "\n")
    report.show(summary)


def make_systems(model: tf.TreeFlash, settings: DelayedStage) -> list[System]:
    """Makes one-token decoding, trees of every fixed trunk, trunk="auto" of every size, and the selector."""
    delayed: dict[str, Any] = {"builder": "delayed"} | ({"depths": settings.depths} if settings.depths else {})
    sized = delayed | {"nodes": settings.nodes, "branches": settings.branches}
    systems: dict[str, dict[str, Any]] = {"one token": {"builder": "none"}}
    systems |= {f"trunk {trunk}": sized | {"trunk": trunk} for trunk in settings.trunks}
    systems |= {f"trunk auto, {nodes} nodes": sized | {"trunk": "auto", "nodes": nodes} for nodes in settings.fewer}
    systems |= {"trunk auto": sized | {"trunk": "auto"}, "selector": delayed | {"selector": settings.selector}}
    shared = {"max_new_tokens": settings.new_tokens, "batch_size": 1}
    pair = settings.verifier, settings.drafter
    return [
        System(name=name, model=model, config=tf.GenerateConfig(**shared, **options), pair=pair)
        for name, options in systems.items()
    ]


if __name__ == "__main__":
    run_config.run(main, DelayedStage, __doc__)
