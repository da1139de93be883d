"""Writes the drafter of a run as a Hugging Face folder with a model card.

    python -m train.export run=runs/head out=my-drafter step=best

RUN/model already holds the drafter of the last step. This command is for other checkpoints, dialects and dtypes, and for
the card. It loads the new folder, measures tau on a few held-out prompts, and stores it.
"""

import dataclasses
import json
import shlex
import statistics
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import treeflash_jax as tf
from train.data import packing
from train.runtime import picture, run_config, watch
from train.runtime.checkpoint import Checkpoints
from train.runtime.frozen_inputs import FrozenInputs
from train.runtime.run_config import LoopConfig
from train.stages.drafting import DraftingStage, read_drafter_config, read_inputs, read_stored, read_verifier
from train.stages.evaluation import assemble, held_out_prompts
from train.stages.registry import read_stage
from treeflash_jax.core import files, parameters, sharding, terminal
from treeflash_jax.core.dtypes import dtype_setting
from treeflash_jax.core.error_text import clipped
from treeflash_jax.core.json_files import read_json
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters.protocol import Drafter
from treeflash_jax.engine.settings.defaults import PLAIN_CPU
from treeflash_jax.engine.settings.pairs import HUB_IDS
from treeflash_jax.formats import draft_vocabulary, hub, model_files, storage
from treeflash_jax.formats.tokenizer import Tokenizer

TAU_PROMPTS, TAU_TOKENS = 8, 64
# The default tree of a CPU may also have fewer depths, lanes and candidates.
TAU_NODES, TAU_NGRAMS = PLAIN_CPU.nodes, PLAIN_CPU.ngrams


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of this stage."""

    run: str = setting(help="folder of a run of any stage that trains a drafter, local or gs://")
    out: str = setting(help="new folder, local or gs://")
    step: str = setting("last", '"last", "best" (by the run\'s `loop.best`), or a number')
    dialect: str = setting(
        "",
        "form of the files, one of `formats.dialects`; empty: the default of this kind of drafter (treeflash for block "
        "drafters; dflash holds a backbone alone)",
        min_length=0,
    )
    dtype: str = dtype_setting("bfloat16", "dtype of the weights on disk", "bfloat16", "float32")
    licence: str = setting("apache-2.0", "licence of the weights, for the model card")
    drafter_temperature: float = setting(
        0.0, "default stored with the drafter, as `treeflash bench run` measures it; 0 keeps the run's", least=0
    )
    tau: float = setting(
        0.0,
        "mean tokens per round of a CPU's default tree (8 nodes, joined with n-grams), greedy, as `treeflash bench run` "
        "measures it on typical prompts. CPUs use it to decide whether to draft by default; 0 stores the tau that is "
        "measured here, on a few held-out prompts",
        least=0,
    )
    overwrite: bool = setting(False, "replace the files of an earlier export in `out`; any other files are an error")


def main(settings: ExportConfig) -> None:
    files.check_folder(settings.out, overwrite=settings.overwrite)
    old = files.absolute(settings.out)
    if old.exists() and not files.is_empty(old) and not storage.is_own(old / "model.safetensors"):
        raise ValueError(f"{settings.out} holds files that treeflash_jax did not write; give a new folder")
    path = files.absolute(settings.run) / "settings.toml"
    if not path.exists():
        raise ValueError(f"{settings.run}: got no settings.toml, expected the run= of a stage that trains a drafter")
    trained = read_stage(path)
    _, verifier, tokenizer = read_verifier(trained)
    drafter = read_drafter_config(trained, verifier)
    temperature = settings.drafter_temperature or drafter.drafter_temperature
    drafter = dataclasses.replace(drafter, drafter_temperature=temperature, tau=settings.tau or None)
    dialect = settings.dialect or drafter.dialect
    model_files.writable(dialect).to_hf(drafter)  # raises before weights are read
    specs = {name: tree for name, tree in drafter.specs().items() if name in trained.trains}
    step, params = read_params(settings, trained.loop, specs, read_inputs(trained, drafter))
    whole = assemble(drafter, read_stored(trained, drafter) | params)
    with files.filled(settings.out, overwrite=settings.overwrite) as out:
        model_files.save_drafter(out, drafter, whole, dialect=dialect, dtype=jnp.dtype(settings.dtype))
        listed = files.absolute(settings.run) / "model" / draft_vocabulary.NAME
        if listed.exists():
            files.write(out / draft_vocabulary.NAME, listed.read_bytes())
        tau, line = measure_tau(trained, tokenizer, out)
        if tau and not settings.tau:
            drafter = dataclasses.replace(drafter, tau=round(tau, 2))
            raw = read_json(out / "config.json") | model_files.writable(dialect).to_hf(drafter)
            files.write(out / "config.json", json.dumps(raw, indent=2) + "\n")
        stored = model_files.read_drafter_config(out).fitted(verifier)
        lines = [line for line in watch.read_log(settings.run) if line["step"] <= step]
        if lines:
            files.write(out / picture.NAME, picture.draw(lines))
        files.write(out / "README.md", card(settings, trained, stored, dialect, step, lines))
    terminal.show(f"wrote {settings.out} from step {step}\n{line}")


def read_params(settings: ExportConfig, loop: LoopConfig, specs: Any, inputs: FrozenInputs) -> tuple[int, Any]:
    """Returns the chosen step and its trained weights, unsharded. Raises the ValueErrors of `Checkpoints.load`."""
    abstract = parameters.abstract(specs, jnp.float32, sharding.make_mesh(devices=jax.devices()[:1]))
    with closing(Checkpoints(settings.run, loop, inputs=inputs)) as checkpoints:
        step = choose_step(checkpoints.metrics(), settings.step, loop)
        return step, checkpoints.load(step, {"params": abstract}, in_part=True)["params"]


def measure_tau(trained: DraftingStage, tokenizer: Tokenizer | None, folder: Path) -> tuple[float | None, str]:
    """Returns the tau of the drafter in a folder on a few held-out prompts (or None), and a text about it to print."""
    try:
        sampled_sources = []  # a random sample, because reading all records may take minutes
        for source in trained.sources:
            limit = TAU_PROMPTS * source.hold_out
            if source.format != "text" and limit:
                sampled_sources.append(dataclasses.replace(source, limit=min(source.limit or limit, limit)))
        prompts = []
        if sampled_sources:
            corpus = packing.load_corpus(sampled_sources, trained.data, tokenizer, trained.loop.seed)
            prompts = held_out_prompts(corpus, TAU_PROMPTS)
        if not prompts:
            raise ValueError("the sources hold out no prompt")
        model = tf.load(verifier=trained.verifier, drafter=folder, thinking=bool(trained.data.thinking))
        answers = model.generate_each(
            prompts, builder="best-first", nodes=TAU_NODES, ngrams=TAU_NGRAMS, max_new_tokens=TAU_TOKENS
        )
        tau = statistics.fmean([length for _, result in answers for length in result.accept_lengths])
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:  # data, verifier or memory are missing
        return None, f"tau was not measured: {clipped(error)}"
    how = f"{len(prompts)} held-out prompts, greedy, {TAU_TOKENS} new tokens, trees of {TAU_NODES} nodes with n-grams"
    return tau, f"tau {tau:.2f} of the folder loaded again: {how}"


def choose_step(saved: dict[int, dict[str, float]], requested: str, loop: LoopConfig) -> int:
    """Returns the step that "last", "best" or a number names. Raises ValueError if it was not saved."""
    if not saved:
        steps = f"loop.save_every = {loop.save_every} steps"
        raise ValueError(f"got a run without checkpoints, expected one that trained for {steps}; continue it")
    if requested == "best":
        scores = {step: metrics[loop.best] for step, metrics in saved.items() if loop.best in metrics}
        if not scores:
            hint = "give step=last (and, with under 50 documents, sources.0.hold_out=4)"
            raise ValueError(f"{loop.best} was never measured; {hint}")
        return (min if loop.best_mode == "min" else max)(scores, key=scores.get)
    if requested == "last":
        return max(saved)
    if not requested.isdecimal() or int(requested) not in saved:
        raise ValueError(f"got step {requested!r}, expected last, best or one of {[*saved]}")
    return int(requested)


def card(
    settings: ExportConfig,
    trained: DraftingStage,
    drafter: Drafter,
    dialect: str,
    step: int,
    lines: list[watch.StepMetrics],
) -> str:
    """Returns a model card with the drafter, the settings of its run, and the last held-out metrics in the log's lines.

    Its title and commands have only the last part of local paths.
    """
    verifier, folder = trained.verifier, Path(settings.out).resolve().name
    places = f"`{folder}` stands for the path of this folder"
    if Path(verifier).exists():
        verifier = Path(verifier).resolve().name
        places += f", and `{verifier}` for that of its verifier"
    header = f"license: {json.dumps(settings.licence)}\n"  # JSON is YAML
    base_model = HUB_IDS.get(trained.verifier, trained.verifier)
    if hub.is_hub_id(base_model) and not Path(base_model).exists():
        header += f"base_model: {json.dumps(base_model)}\n"
    log_picture = f"\n![Loss and tau by step]({picture.NAME})\n" if lines else ""
    return f"""---
{header}library_name: treeflash-jax
tags: [speculative-decoding, {json.dumps(dialect)}]
---

# A {drafter.kind} drafter for {verifier}

Drafts continuations for lossless speculative decoding: it changes the speed of its verifier, never its output. Trained with
treeflash_jax. Below, {places}.

    import treeflash_jax as tf
    model = tf.load(verifier={json.dumps(verifier)}, drafter={json.dumps(folder)})

or, on the command line:

    treeflash generate --verifier {shlex.quote(verifier)} --drafter {shlex.quote(folder)} --chat "Hello"

| drafter | |
|---|---|
| reads verifier layers | {", ".join(map(str, drafter.taps))} |
| depths | {drafter.num_depths} |
| drafter temperature | {drafter.drafter_temperature} |
| tau of {TAU_NODES} nodes | {drafter.tau or "not stored"} |
| trained with thinking | {"not known" if trained.data.thinking is None else trained.data.thinking} |

## Held out, at step {step}

| metric | value |
|---|---|
{held_out_rows(lines)}

`top1`, `overlap`: per slot, given the right token before it. `tau_n`: tokens committed per round, trees of n nodes (root
included).
{log_picture}
## Settings of the run

```toml
{run_config.dump(trained).strip()}
```
"""


def held_out_rows(lines: list[watch.StepMetrics]) -> str:
    """Returns the rows of a table with the last held-out metrics in the log's lines."""
    last: dict[str, Any] = {}
    for line in lines:
        last |= {name: value for name, value in line.items() if name.startswith("held_out/") and value is not None}
    rows = []
    for name, value in last.items():
        values = value if isinstance(value, list) else [value]
        shown = ("-" if x is None else f"{x:.3f}" for x in values)
        rows.append(f"| {name.removeprefix('held_out/')} | {' '.join(shown)} |")
    return "\n".join(rows) or "| none was measured | |"


if __name__ == "__main__":
    run_config.run_command(main, ExportConfig, __doc__)
