"""Block efficiency of drafters in training, and two questions to a trained pair.

    python -m train.evaluate temperatures --data train.jsonl
    python -m train.evaluate seen --responses runs/responses.jsonl --results greedy.jsonl

`TreeTau` measures real tree decoding on held-out prompts while a drafter trains. `temperatures`: tau over drafter
temperatures on training prompts, never evaluation prompts; the drafter's config stores the best for a greedy verifier.
`seen`: tau of a `treeflash bench run` file apart for rounds whose 16-gram, 8 tokens up to the anchor and the 8 that follow,
stands in the drafter's training answers; rounds near either end of an answer are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax

import treeflash_jax as tf
from train.data import packing
from train.data.records import Source, read
from train.runtime.loop import Evaluating
from train.runtime.training_state import Stage, gather
from treeflash_jax import drafters
from treeflash_jax.bench import harness, report
from treeflash_jax.bench.bench_records import read_jsonl, read_records
from treeflash_jax.bench.harness import System
from treeflash_jax.bench.prompt_sets import BenchPrompt
from treeflash_jax.core import devices
from treeflash_jax.core.checks import bounded, fit
from treeflash_jax.decoding.loops import Weights
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees.shape import Nodes

BEFORE, AFTER = 8, 8
TEMPERATURES = (0.4, 0.55, 0.7, 0.85, 1.0, 1.2)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Tree decoding of held-out prompts during training.

    Attributes:
      prompts: number of held-out prompts; 0 measures no tau.
      new_tokens: tokens generated per prompt.
      nodes: numbers of tree nodes that tau is measured for, root included.
      temperature: sampling temperature of the verifier; 0 is greedy.
      candidates: candidate tokens per depth (M) and children per candidate (K) of the tree.
      batch: prompts decoded together.
    """

    prompts: int = bounded(16, least=0)
    new_tokens: int = bounded(64, least=1)
    nodes: tuple[Nodes, ...] = (16, 64)
    temperature: float = bounded(0.0, least=0)
    candidates: int = bounded(16, least=1)
    batch: int = bounded(8, least=1)


class TreeTau:
    """Tau of the drafter being trained, with every setting that its stage names."""

    def __init__(
        self,
        config: EvaluateConfig,
        systems: Mapping[str, Mapping[str, Any]],
        constant: Collection[str],
        stage: Stage,
        model: ModelConfig,
        drafter: Any,
        corpus: packing.Corpus,
        frozen: Any,
        mesh: jax.sharding.Mesh,
        stop_ids: Sequence[int],
    ):
        self.config, self.frozen = config, frozen
        self.prompts = held_out_prompts(corpus, config.prompts)
        self.model = tf.TreeFlash(model, Weights(frozen["verifier"]), drafter=drafter, stop_ids=stop_ids, mesh=mesh)
        self.cast = devices.jit(lambda params: gather(params, stage.specs, stage.compute_dtype))
        self.systems, self.constant = systems, constant
        module = drafters.of(drafter)
        self.options = {name: config.candidates for name in ("candidates", "children") if hasattr(module.OPTIONS, name)}
        self.names = tuple(module.specs(drafter))
        self.known: dict[str, dict[str, float]] = {}

    def __call__(self, params: Any, report: Evaluating) -> dict[str, float]:
        """Measures tau of these weights by number of nodes; `report` receives the number of finished prompts."""
        if not self.prompts or not self.config.nodes:
            return {}
        parts = self.frozen | self.cast(params)
        self.model.weights = Weights(self.frozen["verifier"], {name: parts.get(name, {}) for name in self.names})
        taus: dict[str, float] = {}
        for name, options in self.systems.items():
            if name not in self.constant or name not in self.known:
                self.known[name] = self._tau(name, options, report)
            taus |= self.known[name]
        return taus

    def _tau(self, name: str, options: Mapping[str, Any], report: Evaluating) -> dict[str, float]:
        config, taus, count = self.config, {}, len(self.prompts)
        settings = " ".join(map(str, options.values()))
        for nodes in config.nodes:
            what = f"prompts with {f'{settings} trees' if settings else 'trees'} of {nodes} nodes"
            report(0, count, what)
            answers = self.model.generate_each(
                self.prompts,
                nodes=nodes,
                **self.options | options,
                temperature=config.temperature,
                max_new_tokens=config.new_tokens,
                batch_size=min(config.batch, count),
            )
            lengths: list[float] = []
            for done, (_, result) in enumerate(answers, start=1):
                lengths += [float(length) for length in result.accept_lengths]
                report(done, count, what)
            taus[f"held_out/{name}_{nodes}"] = mean(lengths)
        return taus


def held_out_prompts(corpus: packing.Corpus, count: int) -> list[list[int]]:
    """Returns at most `count` prompts of held-out documents, spread evenly over all of them."""
    prompts = [packed.prompt(number) for packed in corpus.held_out.values() for number in range(packed.num_documents)]
    prompts = [prompt for prompt in prompts if prompt]
    return [prompts[i] for i in packing.spread(min(count, len(prompts)), len(prompts))]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def temperatures(model: tf.TreeFlash, path: str, prompts: int, seed: int) -> Iterator[dict]:
    """Yields tau at every drafter temperature, by verifier temperature, number of nodes and head."""
    chats = [record.content[0]["content"] for record in read(Source(path=path, limit=prompts), seed)]
    chats = [BenchPrompt(id=str(number), turns=(chat,)) for number, chat in enumerate(chats)]
    heads = (model.drafter.head, "marginal") if hasattr(model.drafter, "head") else (None,)
    for temperature, nodes, head in product((0.0, 1.0), (16, 64), heads):
        settings = {"nodes": nodes, "head": head, "max_new_tokens": 128, "builder": "best-first"}
        configs = {sharpness: tf.GenerateConfig(**settings, drafter_temperature=sharpness, batch_size=prompts)
                   for sharpness in TEMPERATURES}  # fmt: skip
        systems = [System(name=str(sharpness), model=model, config=config) for sharpness, config in configs.items()]
        sampling = {"temperatures": [temperature], "seeds": [3], "is_timed": False, "tell": lambda text: None}
        records = list(harness.measure(systems, chats, **sampling))
        taus = {entry["system"]: round(entry["tau"], 3) for entry in report.summarise(records, resamples=1)["systems"]}
        yield settings | {"temperature": temperature, "seed": 3, "prompts": prompts, "tau": taus}


def grams(answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> set[tuple[int, ...]]:
    """Returns all 16-grams of (prompt, response) pairs that touch the response."""
    size, known = BEFORE + AFTER, set()
    for prompt, response in answers:
        tokens = (*prompt[-(size - 1) :], *response)
        known |= {tokens[first : first + size] for first in range(len(tokens) - size + 1)}
    return known


def by_seen(records: Sequence[dict], known: set[tuple[int, ...]]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns tau of seen and of unseen rounds, and their numbers, by system."""
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    questions = parser.add_subparsers(dest="question", required=True)
    sweep = questions.add_parser("temperatures")
    sweep.add_argument("--data", required=True, help="JSONL file of training chats")
    sweep.add_argument("--verifier", default="tiny", help="pair, folder, GGUF file or Hub id (default: %(default)s)")
    sweep.add_argument("--drafter", help="folder or Hub id")
    sweep.add_argument("--prompts", type=int, default=32)
    sweep.add_argument("--seed", type=int, default=1)
    seen = questions.add_parser("seen")
    seen.add_argument("--responses", type=Path, required=True, help="what train.respond wrote")
    seen.add_argument("--results", type=Path, required=True, help="what `treeflash bench run` wrote")
    args = parser.parse_args(argv)
    if args.question == "temperatures":
        model = tf.load(verifier=args.verifier, drafter=args.drafter)
        for result in temperatures(model, args.data, args.prompts, args.seed):
            print(json.dumps(result), flush=True)
        return
    try:
        known = grams(read_answers(args.responses))
        records, _ = read_records(args.results)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(by_seen([record for record in records if record["system"] != "ar"], known), indent=1))


def read_answers(path: Path) -> list[tuple[list[int], list[int]]]:
    """Reads prompts and responses of a file that `train.respond` wrote.

    Raises:
      ValueError: a file that cannot be read, or a line that is no answer, by its number.
    """
    lines, _ = read_jsonl(path)
    names, kind = ("prompt", "response"), list[int]
    return [tuple(fit(kind, line.get(name), name, where=f"{path}:{number}") for name in names) for number, line in lines]


if __name__ == "__main__":
    main()
