"""`GenerateConfig`: the settings of a call, each declared once, with its type, default, limits and help."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from treeflash_jax.acceptance import RULES
from treeflash_jax.constraints.compilation import SCHEMA_DEPTH, as_json
from treeflash_jax.constraints.compile_bytes import MOST_STATES
from treeflash_jax.core.checks import expect, refuse_unknown
from treeflash_jax.core.setting_tables import describe
from treeflash_jax.core.settings import changed, field_names, setting, validate
from treeflash_jax.drafters.block.block_drafter import VOCABULARIES
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.engine.settings.defaults import LARGE_VOCABULARY, PLAIN_CPU, TPU
from treeflash_jax.engine.settings.keywords import GenerateSettings
from treeflash_jax.engine.settings.model_options import ModelOptions
from treeflash_jax.models.attention import IMPLEMENTATIONS
from treeflash_jax.models.kernels import KERNEL_SETS
from treeflash_jax.trees import BUILDERS
from treeflash_jax.trees.tree_inputs import MAX_NODES, TreeShape

MAX_SEQUENCES = 2**16  # limit on samples per prompt and on the batch size; larger values are typos
MAX_DEPTH = 16
MAX_TOP_LOG_PROBS = 20
MAX_TEMPERATURE = 10**6  # every token is then equally likely; noise times 1e38 would leave float32
REFUSED = {  # settings of other libraries, rejected with an explanation
    "num_beams": "is not supported: beam search does not sample from the verifier",
    "grammar": "is not supported: answers can follow a schema, pattern, choices, structural tag or a processor of your own",
    "raw": 'is not supported: text to be continued is given as tf.Text("...") in Python, with --prompt on command lines',
}
ON_PLAIN_CPU = "on a CPU not using amx_bf16"  # the device of the table PLAIN_CPU
SECTIONS = {  # titles in help texts
    "sampling": "sampling",
    "drafting": "drafting (affects the speed, never the distribution of the output)",
    "tree": "tree (affects the speed, never the distribution of the output)",
    "running": "running",
    "returned": "results on request (shown by --json)",
}
LIST_SETTINGS = ("stop", "stop_ids", "choices")  # settings whose value for one prompt is a list
sampling_setting = partial(setting, section="sampling")
number_setting = partial(sampling_setting, dtype=float)
penalty_setting = partial(number_setting, 0.0, least=-2, most=2, unit="logits")
constraint_setting = partial(sampling_setting, None, unset="none")
drafting_setting = partial(setting, section="drafting")
tree_setting = partial(setting, section="tree")
nodes_setting = partial(tree_setting, least=1, most=MAX_NODES, unit="nodes")
running_setting = partial(setting, section="running")
returned_setting = partial(setting, section="returned")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Settings of a call to `generate`, `generate_each`, `stream` or `warmup`, described by `help(tf.GenerateSettings)`.

    Settings of drafting affect the speed, never the distribution of the output. A list gives one value per prompt. `stop`,
    `stop_ids` and `choices` are lists themselves; a list of lists gives them one value per prompt.

    Example:
      >>> model.generate(prompts, GenerateConfig(temperature=0.7, top_p=0.9), max_new_tokens=256)
    """

    max_new_tokens: int | Sequence[int] = sampling_setting(
        128, "largest number of tokens in an answer, the stop token included", least=0, unit="tokens", basic=True
    )
    temperature: float | Sequence[float] = number_setting(
        0.0, "sampling temperature of the verifier; 0 is greedy", least=0, most=MAX_TEMPERATURE, basic=True
    )
    top_k: int | Sequence[int] = sampling_setting(
        0, "sample from the k most likely tokens; 0 keeps all", least=0, unit="tokens", basic=True, dtype=int
    )
    top_p: float | Sequence[float] = number_setting(
        1.0, "sample from the most likely tokens of this total probability", above=0, most=1, unit="probability", basic=True
    )
    min_p: float | Sequence[float] = number_setting(
        0.0, "sample from tokens at least this many times as likely as the likeliest", least=0, most=1, unit="fraction"
    )
    seed: int | Sequence[int] = sampling_setting(
        0,
        "random seed; a prompt draws from it and from its index in the call, or from its own seed if there is a list",
        least=0,
        most=2**32 - 1,
        basic=True,
    )
    samples: int = sampling_setting(
        1,
        "answers per prompt; the first is the answer that samples=1 gives",
        least=1,
        most=MAX_SEQUENCES,
        unit="answers",
        basic=True,
    )
    repetition_penalty: float | Sequence[float] = number_setting(
        1.0,
        "divides positive logits, and multiplies negative ones, of tokens in the prompt or the answer",
        above=0,
        most=100,
        unit="factor",
    )
    presence_penalty: float | Sequence[float] = penalty_setting("subtracted from the logits of tokens in the answer")
    frequency_penalty: float | Sequence[float] = penalty_setting(
        "subtracted from the logits of tokens for every time that they are in the answer"
    )
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None = sampling_setting(
        None, "numbers that are added to the logits of tokens, by token id", unset="none", unit="JSON"
    )
    min_new_tokens: int | Sequence[int] = sampling_setting(
        0,
        "smallest number of tokens in an answer; a stop string, or a constraint that allows only the end, ends it earlier",
        least=0,
        unit="tokens",
    )
    stop: Sequence[str] | Sequence[Sequence[str]] = sampling_setting(
        (), "text that ends an answer and is not part of it", unit="text", basic=True
    )
    stop_ids: Sequence[int] | Sequence[Sequence[int]] | None = sampling_setting(
        None,
        "ids of the tokens that end an answer; the model's own ids also end an answer with a constraint",
        least=0,
        unset="the model's own",
        unit="ids",
    )

    schema: str | Sequence[str | None] | None = constraint_setting(
        "JSON schema that the answer follows: a dictionary, JSON text or a pydantic model", spelled=as_json
    )
    schema_depth: int = sampling_setting(
        SCHEMA_DEPTH,
        "levels of arrays and objects that an answer may have wherever its schema sets no form, or contains itself",
        least=1,
        most=MAX_DEPTH,
        unit="levels",
    )
    pattern: str | Sequence[str | None] | None = constraint_setting(
        "regular expression that the whole answer matches", unit="regex"
    )
    choices: Sequence[str] | Sequence[Sequence[str] | None] | None = constraint_setting(
        "texts; the answer is one of them", unit="text", min_length=1
    )
    structural_tag: str | Sequence[str | None] | None = constraint_setting(
        "structure of the answer, such as text around a schema, in xgrammar's JSON: a dictionary or JSON text",
        unit="JSON",
        spelled=as_json,
    )
    processor: Callable[..., Any] | None = constraint_setting(
        "function of logits and `decoding.processors.History` that returns logits, in Python only"
    )
    sampling: str | None = sampling_setting(
        None,
        "model: take temperature (if do_sample is true), filters and repetition penalty from generation_config.json, "
        "unless they are given as keywords or differ from the defaults",
        unset="greedy, or as given",
        choices=lambda: ("model",),
    )

    head: str | None = drafting_setting(
        None,
        "head of a block drafter, which conditions a token on those before it; marginal turns it off",
        unset="the drafter's own",
        choices=lambda: tuple(HEADS),
    )
    block_size: int | None = drafting_setting(
        None,
        "length of a block drafter's block, the last token of the text included, at most the drafter's; shorter blocks "
        "make rounds faster and trees shallower",
        unset=f"the drafter's, but at most the number of nodes {ON_PLAIN_CPU}",
        least=2,
        unit="tokens",
    )
    depths: int | None = drafting_setting(
        None,
        "deepest level of the tree, or length of the chain, for drafters whose network runs once per level",
        unset=f"the drafter's, but at most {PLAIN_CPU.depths} in trees of up to {PLAIN_CPU.nodes} nodes {ON_PLAIN_CPU}",
        least=1,
        most=MAX_NODES - 1,
        unit="levels",
    )
    candidates: int | None = drafting_setting(
        None,
        "most likely tokens per depth of a block drafter, from which trees are built (M in the TreeFlash paper)",
        unset="the drafter's: the number in its files, or else 64 for DSpark files and heads that follow the path, 16 for "
        f"others; {ON_PLAIN_CPU} {PLAIN_CPU.candidates}",
        least=1,
        unit="tokens",
    )
    children: int = drafting_setting(
        16, "most likely next tokens kept for every candidate (K in the TreeFlash paper)", least=1, unit="tokens"
    )
    shortlist: int | None = drafting_setting(
        None,
        "number of likely tokens of each depth that a head scores, those of all depths together; 0: the whole vocabulary",
        unset=f"0; on a CPU {PLAIN_CPU.shortlist} if the vocabulary has {LARGE_VOCABULARY:,} tokens or more",
        least=0,
        unit="tokens",
    )
    draft_vocabulary: str | None = drafting_setting(
        None,
        "tokens that a block drafter may draft: the frequent ones that its folder lists, or all",
        unset="frequent if there is a list",
        choices=lambda: VOCABULARIES,
    )
    ngrams: int | None = drafting_setting(
        None,
        "prompt lookup: number of earlier places in the text with the same last tokens; what followed there joins the tree",
        unset=f"0; for trees on a CPU {PLAIN_CPU.ngrams}",
        least=0,
        unit="matches",
    )

    builder: str | None = tree_setting(
        None,
        "kind of draft: a tree of the most likely nodes (best-first) or of sampled nodes (paths, delayed, "
        "without-replacement, skeleton); one path (walk: the most likely token after each token; chain: DFlash's, the most "
        "likely token of each depth); or none, one token at a time, whatever the other drafting settings are",
        unset="best-first; none without a drafter, or if drafting is not expected to pay and no drafting setting is given",
        choices=lambda: ("none", *BUILDERS),
        basic=True,
    )
    nodes: int | None = nodes_setting(
        None,
        "tree nodes verified per round, the root (the last token of the text) included",
        unset="for one path its full length; for a tree the drafter's number (usually 16), at least "
        f"{TPU.fewest_nodes} on TPUs, at most {PLAIN_CPU.nodes} {ON_PLAIN_CPU}; fewer in batches on accelerators",
        basic=True,
    )
    acceptance: str | None = tree_setting(
        None,
        "rule that accepts nodes; with sample-and-match, the answer also equals one-token decoding with the same seed",
        unset="sample-and-match, but block for one sampled path and traversal for other sampled trees",
        choices=lambda: tuple(RULES),
    )
    branches: int = nodes_setting(
        TreeShape.branches, "number of sampled paths, or largest number of sampled children of a node"
    )
    trunk: int = nodes_setting(TreeShape.trunk, "nodes before the first branching of a delayed tree", least=0)
    selector: str | Path | None = tree_setting(
        None,
        "folder of a tree selector (`python -m train.selector`), a small network that chooses the trunk of a delayed tree, "
        "its branches and their length, for every answer and round",
        unset="none",
        unit="folder",
    )
    skeleton: float = tree_setting(
        TreeShape.skeleton, "share of a skeleton tree's nodes that best-first search chooses", least=0, most=1, unit="share"
    )
    leaves: bool = tree_setting(TreeShape.leaves, "let sampled trees contain tokens that the drafter cannot continue")
    drafter_temperature: float | None = tree_setting(
        None, "temperature of the draft", unset="the larger of the drafter's own and min(sampling temperature, 1)", above=0
    )
    lanes: int | None = nodes_setting(
        None,
        "nodes per level that a best-first tree may expand; as many as children give EAGLE-2's tree",
        unset="all if the drafter drafts all levels in one pass; otherwise the drafter's, but "
        f"{PLAIN_CPU.lanes} in trees of up to {PLAIN_CPU.nodes} nodes {ON_PLAIN_CPU}",
    )

    schema_states: int = running_setting(
        4096,
        "automaton states for which the programs of constraints have room; a larger constraint compiles its own programs. "
        "A thousand states take 2 MiB for each sequence",
        least=1,
        most=MOST_STATES,
        unit="states",
    )
    batch_size: int | None = running_setting(
        None,
        "sequences decoded together; with fewer prompts, the unused slots decode padding. Every size is compiled once",
        unset="the number of answers rounded up to 1, 2, 4 or 8; 8 for more",
        least=1,
        most=MAX_SEQUENCES,
        unit="sequences",
        basic=True,
    )
    attention: str | None = running_setting(
        None,
        "implementation of attention: xla reads whole caches; streamed, blocked, pallas-gpu and mosaic-gpu only their "
        "filled part. pallas-gpu is the default on H100 and H200 in bfloat16 with heads of up to 128 numbers; mosaic-gpu "
        "never ran there, and needs jax 0.12",
        unset="chosen by device and dtype",
        choices=lambda: IMPLEMENTATIONS,
    )
    kernels: str | None = running_setting(
        None,
        "kernels for other operations of the verifier, none of which ever ran on its device: mosaic-gpu for recurrent "
        "layers, FP8 weights and, with attention mosaic-gpu, norms and additions on H100 and H200 (jax 0.12); pallas-tpu "
        "for recurrent layers",
        unset="XLA's operations",
        choices=lambda: KERNEL_SETS,
    )
    log_probs: bool = returned_setting(False, "also return the verifier's log-probability of every token")
    top_log_probs: int = returned_setting(
        0, "also return this many of the likeliest tokens at every position", least=0, most=MAX_TOP_LOG_PROBS, unit="tokens"
    )
    prompt_log_probs: bool = returned_setting(False, "also return log-probabilities of the prompt; max_new_tokens may be 0")
    expected_lengths: bool = returned_setting(False, "also return how many tokens each round is expected to commit")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        validate(self)
        new = self.max_new_tokens
        is_empty = new == 0 or (isinstance(new, Sequence) and 0 in new)
        expect(self.prompt_log_probs or not is_empty, "max_new_tokens", new, "at least 1 (0 only scores a prompt)")

    @property
    def wants_log_probs(self) -> bool:
        """True if log-probabilities of tokens, of an answer or a prompt, are requested."""
        return self.log_probs or self.prompt_log_probs or self.top_log_probs > 0

    def __repr__(self) -> str:
        return f"GenerateConfig({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"


# For `help` and the reference of the API. Editors show no text of keyword arguments, so the generated class has none.
GenerateSettings.__doc__ = f"""{GenerateSettings.__doc__}

Attributes:
{describe(GenerateConfig, field_names(GenerateConfig, basic=True))}

Advanced attributes:
{describe(GenerateConfig, field_names(GenerateConfig, basic=False))}
"""

RETURNED = field_names(GenerateConfig, "returned")  # settings that only add fields to results


def with_settings(config: GenerateConfig | None, settings: Mapping[str, Any]) -> GenerateConfig:
    """Returns settings of a call with some replaced; None: the defaults. Raises UnknownSetting for an unknown name."""
    elsewhere = dict.fromkeys(field_names(ModelOptions), "is an argument of tf.load")
    config = config or GenerateConfig()
    refuse_unknown(settings, field_names(type(config)), REFUSED | elsewhere)
    return replace(config, **settings)


def number_types(config: type[GenerateConfig] = GenerateConfig) -> dict[str, type]:
    """Returns the settings that give every request a number, each with its type.

    These are the settings with a `dtype`. A new one needs only its arithmetic (`decoding.processors.PROCESSORS`): servers
    then accept a field of its name, and `decoding.state.Sampling` has an array of its numbers.
    """
    return {field.name: field.metadata["dtype"] for field in fields(config) if field.metadata["dtype"]}
