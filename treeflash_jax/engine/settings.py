"""Settings of a call: each is declared once, with its type, default, unit, limits and help.

Signatures, docstrings, command lines, records and the table of options in README.md are derived from the fields.
"""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypedDict, TypeVar, get_type_hints

from annotated_types import Interval

from treeflash_jax.acceptance import RULES
from treeflash_jax.core.checks import NonNegative, Probability, basic_first, bounded, default_text, suggesting
from treeflash_jax.drafters.options import DraftOptions
from treeflash_jax.models.attention import CHOICES
from treeflash_jax.trees import BUILDERS, TreeShape
from treeflash_jax.trees.shape import MAX_NODES, Nodes

Function = TypeVar("Function", bound=Callable[..., Any])
Group = TypeVar("Group")
MAX_SEQUENCES = 2**16  # limit on samples per prompt and on the batch size; larger values are typos
Index, Seed = Annotated[int, Interval(ge=0, lt=2**31)], Annotated[int, Interval(ge=0, lt=2**32)]
Trunk = Annotated[int, Interval(ge=0, le=MAX_NODES)]
# Settings of other libraries, rejected with an explanation.
REFUSED = {
    "repetition_penalty": "penalties change the verifier's distribution with every token",
    "presence_penalty": "penalties change the verifier's distribution with every token",
    "frequency_penalty": "penalties change the verifier's distribution with every token",
    "num_beams": "beam search does not sample from the verifier",
    "grammar": "constrained decoding needs a mask per tree node",
    "min_p": "only temperature, top-k and top-p are implemented",
    "raw": 'text to be continued is given as tf.Text("...") in Python, and with --prompt on the command line',
}
NO_DRAFTER = "no drafter is loaded"

# Effect of a setting: on the sampled text, on the speed only, or on what else the program computes.
answer, speed, program = (partial(bounded, kind=kind) for kind in ("answer", "speed", "program"))
# Listed before the advanced settings in help and tables.
basic_answer, basic_speed = partial(answer, basic=True), partial(speed, basic=True)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of tokens and ends of answers. A list has one value per prompt."""

    max_new_tokens: int = basic_answer(128, "most tokens of an answer, the stop token included", least=1, unit="tokens")
    temperature: NonNegative | Sequence[NonNegative] = basic_answer(
        0.0, "sampling temperature of the verifier; 0 is greedy"
    )
    top_k: Index | Sequence[Index] = basic_answer(0, "sample from the k most likely tokens; 0 keeps all", unit="tokens")
    top_p: Probability | Sequence[Probability] = basic_answer(
        1.0, "sample from the most likely tokens of this total probability", unit="probability"
    )
    seed: Seed | Sequence[Seed] = basic_answer(0, "random seed; prompt i uses the key fold_in(seed, i)")
    samples: int = basic_answer(
        1,
        "answers per prompt; answer 0 uses the prompt's key, answer j fold_in(prompt's key, j)",
        least=1,
        most=MAX_SEQUENCES,
        unit="answers",
    )
    stop: Sequence[str] = basic_answer((), "text that ends an answer and is not part of it", unit="text")
    stop_ids: Sequence[Index] | None = answer(
        None, "ids of the tokens that end an answer", unset="the model's own", unit="ids"
    )


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """Trees that rounds verify, and the rule that accepts nodes."""

    builder: str | None = basic_speed(
        None,
        "kind of draft: a tree (best-first; or paths, delayed, without-replacement or hybrid, whose nodes are "
        "sampled), one path (the greedy walk, or chain, that of the DFlash paper), or none",
        unset="none without a drafter or where drafting does not pay, unless another drafting setting is given; otherwise "
        "best-first, or hybrid at temperatures measured to be better",
        choices=lambda: ("none", *BUILDERS),
    )
    nodes: Nodes | None = basic_speed(
        None,
        "tree nodes verified per round, the root (the last token of the text) included",
        unset="for a tree the drafter's, but at most 8 on a CPU not using amx_bf16; for a chain the whole block; fewer for "
        "large batches on known accelerators",
        unit="nodes",
    )
    acceptance: str | None = speed(
        None,
        "rule that accepts nodes; with sample-and-match, the answer is also that of one-token decoding with the same seed",
        unset="sample-and-match, but block for one sampled path and traversal for other sampled trees",
        choices=lambda: tuple(RULES),
    )
    branches: Nodes = speed(TreeShape.branches, "number of sampled paths, or most sampled children of a node", unit="nodes")
    trunk: Trunk = speed(
        TreeShape.trunk,
        "nodes before the first branching of a delayed tree",
        unit="nodes",
    )
    skeleton: float = speed(
        TreeShape.skeleton,
        "share of the nodes of a hybrid tree that best-first search chooses",
        least=0,
        most=1,
        unit="share",
    )
    leaves: bool = speed(TreeShape.leaves, "let sampled trees contain tokens that the drafter cannot continue")
    drafter_temperature: float | None = speed(
        None,
        "temperature of the draft",
        unset="the larger of the drafter's own temperature and min(sampling temperature, 1)",
        above=0,
    )
    lanes: Nodes | None = speed(
        TreeShape.lanes,
        "nodes per level that a best-first tree may expand; the number of children gives EAGLE-2's tree",
        unset="the drafter's (2 for the default tree on a CPU not using amx_bf16); all nodes if it drafts every "
        "level in one pass",
        unit="nodes",
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Running of the programs, and further results."""

    batch_size: int | None = basic_speed(
        None,
        "sequences decoded together; with fewer prompts, the unused slots decode padding",
        unset="all, at most 8",
        least=1,
        most=MAX_SEQUENCES,
        unit="sequences",
    )
    attention: str | None = speed(
        None,
        "implementation of attention: xla reads whole caches; streamed and pallas-gpu only their filled part. "
        "pallas-gpu is the default on H100 and H200 in bfloat16",
        unset="chosen by device and dtype",
        choices=lambda: CHOICES,
    )
    log_probs: bool = program(False, "also return the verifier's log-probability of every token")
    expected_lengths: bool = program(
        False, "also return the expected number of tokens that each round commits, given its tree"
    )


def groups() -> dict[str, type]:
    """Returns the dataclasses of all settings by their titles in the help text."""
    return {
        "sampling": SamplingConfig,
        "drafting (affects the speed, never the distribution of the output)": DraftOptions,
        "tree (affects the speed, never the distribution of the output)": TreeConfig,
        "running": RuntimeConfig,
    }


def documented(cls: type[Group]) -> type[Group]:
    """Adds the help of the fields of a dataclass to its docstring, basic fields first."""
    lines, heading = [inspect.cleandoc(cls.__doc__ or "")], ""
    for setting in basic_first(cls):
        title = "Attributes:" if setting.metadata["basic"] else "Advanced attributes:"
        lines += [] if title == heading else ["", title]
        heading, default = title, default_text(setting)
        text = f"{setting.name}: {setting.metadata['help']}" + (f" (default: {default})." if default else ".")
        lines += textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ")
    cls.__doc__ = "\n".join(lines)
    return cls


@suggesting
@documented
@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RuntimeConfig, TreeConfig, DraftOptions, SamplingConfig):
    """Settings of a call to `generate`, `generate_each`, `stream` or `warmup`.

    Settings of drafting affect the speed, never the distribution of the output.

    Example:
      >>> model.generate(prompts, GenerateConfig(temperature=0.7, top_p=0.9), max_new_tokens=256)
    """


def settings_class() -> type[GenerateConfig]:
    return GenerateConfig


class Settings(TypedDict, total=False):
    """The fields of GenerateConfig as keyword arguments, for type checkers and editors, which cannot derive them."""

    max_new_tokens: int
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    seed: int | Sequence[int]
    samples: int
    stop: Sequence[str]
    stop_ids: Sequence[int] | None
    head: str | None
    block_size: int | None
    depths: int | None
    candidates: int | None
    children: int
    shortlist: int | None
    draft_vocabulary: str | None
    ngrams: int | None
    drafter_temperature: float | None
    builder: str | None
    nodes: int | None
    acceptance: str | None
    branches: int
    trunk: int
    skeleton: float
    leaves: bool
    lanes: int | None
    batch_size: int | None
    attention: str | None
    log_probs: bool
    expected_lengths: bool


def takes_settings(function: Function) -> Function:
    """Replaces **settings in the signature of a function, as read by `help` and notebooks, by GenerateConfig's fields."""
    signature = inspect.signature(function)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    kinds = get_type_hints(GenerateConfig)
    settings = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[field.name])
        for field in basic_first(GenerateConfig)
    ]
    function.__signature__ = signature.replace(parameters=named + settings)
    return function
