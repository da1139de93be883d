"""Types of keyword arguments, for editors and `help`. `python tests/write_keywords.py` writes this file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from jax.sharding import Mesh

# Names that editors offer. Type checkers accept any other text, too: programs can register kinds of their own.
QuantizeChoice = Literal[
    "int8",
    "fp8",
    "int4",
    "mxfp4",
    "none",
]
SamplingChoice = Literal["model"]
HeadChoice = Literal[
    "marginal",
    "mlp",
    "linear",
    "lowrank",
    "lowrank-gated",
    "lowrank-rnn",
    "gru",
    "selector",
    "lilicorr",
]
DraftVocabularyChoice = Literal[
    "frequent",
    "all",
]
BuilderChoice = Literal[
    "none",
    "best-first",
    "walk",
    "chain",
    "paths",
    "delayed",
    "without-replacement",
    "skeleton",
]
AcceptanceChoice = Literal[
    "sample-and-match",
    "rejection",
    "recursive",
    "naive-tree",
    "k-sequential",
    "block",
    "traversal",
    "multi-path-block",
]
AttentionChoice = Literal[
    "xla",
    "streamed",
    "blocked",
    "pallas-gpu",
    "mosaic-gpu",
]
KernelsChoice = Literal[
    "mosaic-gpu",
    "pallas-tpu",
]


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load`, whose docstring describes them."""

    drafter: str | Path | None
    revision: str | None
    drafter_revision: str | None
    local_files_only: bool
    dtype: Any
    quantize: QuantizeChoice | str | None
    mesh: Mesh | str | None
    thinking: bool
    template: Mapping[str, Any] | None


class GenerateSettings(TypedDict, total=False):
    """Keyword arguments of `generate`, `generate_each`, `stream` and `warmup`: the fields of GenerateConfig.

    Attributes:
      max_new_tokens: largest number of tokens in an answer, the stop token
        included (default: 128).
      temperature: sampling temperature of the verifier; 0 is greedy (default:
        0.0).
      top_k: sample from the k most likely tokens; 0 keeps all (default: 0).
      top_p: sample from the most likely tokens of this total probability
        (default: 1.0).
      seed: random seed; a prompt draws from it and from its index in the call,
        or from its own seed if there is a list (default: 0).
      samples: answers per prompt; the first is the answer that samples=1 gives
        (default: 1).
      stop: text that ends an answer and is not part of it.
      builder: kind of draft: a tree of the most likely nodes (best-first) or of
        sampled nodes (paths, delayed, without-replacement, skeleton); one path
        (walk: the most likely token after each token; chain: DFlash's, the most
        likely token of each depth); or none, one token at a time, whatever the
        other drafting settings are (one of none, best-first, walk, chain,
        paths, delayed, without-replacement, skeleton; default: best-first; none
        without a drafter, or if drafting is not expected to pay and no drafting
        setting is given).
      nodes: tree nodes verified per round, the root (the last token of the
        text) included (default: for one path its full length; for a tree the
        drafter's number (usually 16), at least 64 on TPUs, at most 8 on a CPU
        not using amx_bf16; fewer in batches on accelerators).
      batch_size: sequences decoded together; with fewer prompts, the unused
        slots decode padding. Every size is compiled once (default: the number
        of answers rounded up to 1, 2, 4 or 8; 8 for more).

    Advanced attributes:
      min_p: sample from tokens at least this many times as likely as the
        likeliest (default: 0.0).
      repetition_penalty: divides positive logits, and multiplies negative ones,
        of tokens in the prompt or the answer (default: 1.0).
      presence_penalty: subtracted from the logits of tokens in the answer
        (default: 0.0).
      frequency_penalty: subtracted from the logits of tokens for every time
        that they are in the answer (default: 0.0).
      logit_bias: numbers that are added to the logits of tokens, by token id
        (default: none).
      min_new_tokens: smallest number of tokens in an answer; a stop string, or
        a constraint that allows only the end, ends it earlier (default: 0).
      stop_ids: ids of the tokens that end an answer; the model's own ids also
        end an answer with a constraint (default: the model's own).
      schema: JSON schema that the answer follows: a dictionary, JSON text or a
        pydantic model (default: none).
      schema_depth: levels of arrays and objects that an answer may have
        wherever its schema sets no form, or contains itself (default: 6).
      pattern: regular expression that the whole answer matches (default: none).
      choices: texts; the answer is one of them (default: none).
      structural_tag: structure of the answer, such as text around a schema, in
        xgrammar's JSON: a dictionary or JSON text (default: none).
      processor: function of logits and `decoding.processors.History` that
        returns logits, in Python only (default: none).
      sampling: model: take temperature (if do_sample is true), filters and
        repetition penalty from generation_config.json, unless they are given as
        keywords or differ from the defaults (one of model; default: greedy, or
        as given).
      head: head of a block drafter, which conditions a token on those before
        it; marginal turns it off (one of marginal, mlp, linear, lowrank,
        lowrank-gated, lowrank-rnn, gru, selector, lilicorr; default: the
        drafter's own).
      block_size: length of a block drafter's block, the last token of the text
        included, at most the drafter's; shorter blocks make rounds faster and
        trees shallower (default: the drafter's, but at most the number of nodes
        on a CPU not using amx_bf16).
      depths: deepest level of the tree, or length of the chain, for drafters
        whose network runs once per level (default: the drafter's, but at most 4
        in trees of up to 8 nodes on a CPU not using amx_bf16).
      candidates: most likely tokens per depth of a block drafter, from which
        trees are built (M in the TreeFlash paper) (default: the drafter's: 16,
        or 64 if its head follows the path; on a CPU not using amx_bf16 8).
      children: most likely next tokens kept for every candidate (K in the
        TreeFlash paper) (default: 16).
      shortlist: number of likely tokens of each depth that a head scores, those
        of all depths together; 0: the whole vocabulary (default: 0; on a CPU 32
        if the vocabulary has 16,384 tokens or more).
      draft_vocabulary: tokens that a block drafter may draft: the frequent ones
        that its folder lists, or all (one of frequent, all; default: frequent
        if there is a list).
      ngrams: prompt lookup: number of earlier places in the text with the same
        last tokens; what followed there joins the tree (default: 0; for trees
        on a CPU 8).
      acceptance: rule that accepts nodes; with sample-and-match, the answer
        also equals one-token decoding with the same seed (one of sample-and-
        match, rejection, recursive, naive-tree, k-sequential, block, traversal,
        multi-path-block; default: sample-and-match, but block for one sampled
        path and traversal for other sampled trees).
      branches: number of sampled paths, or largest number of sampled children
        of a node (default: 2).
      trunk: nodes before the first branching of a delayed tree (default: 2).
      selector: folder of a tree selector (`python -m train.selector`), a small
        network that chooses the trunk of a delayed tree, its branches and their
        length, for every answer and round (default: none).
      skeleton: share of a skeleton tree's nodes that best-first search chooses
        (default: 0.25).
      leaves: let sampled trees contain tokens that the drafter cannot continue.
      drafter_temperature: temperature of the draft (default: the larger of the
        drafter's own and min(sampling temperature, 1)).
      lanes: nodes per level that a best-first tree may expand; as many as
        children give EAGLE-2's tree (default: all if the drafter drafts all
        levels in one pass; otherwise the drafter's, but 2 in trees of up to 8
        nodes on a CPU not using amx_bf16).
      schema_states: automaton states for which the programs of constraints have
        room; a larger constraint compiles its own programs. A thousand states
        take 2 MiB for each sequence (default: 4096).
      attention: implementation of attention: xla reads whole caches; streamed,
        blocked, pallas-gpu and mosaic-gpu only their filled part. pallas-gpu is
        the default on H100 and H200 in bfloat16; mosaic-gpu never ran there,
        and needs jax 0.12 (one of xla, streamed, blocked, pallas-gpu, mosaic-
        gpu; default: chosen by device and dtype).
      kernels: kernels for other operations of the verifier, none of which ever
        ran on its device: mosaic-gpu for recurrent layers, FP8 weights and,
        with attention mosaic-gpu, norms and additions on H100 and H200 (jax
        0.12); pallas-tpu for recurrent layers (one of mosaic-gpu, pallas-tpu;
        default: XLA's operations).
      log_probs: also return the verifier's log-probability of every token.
      top_log_probs: also return this many of the likeliest tokens at every
        position (default: 0).
      prompt_log_probs: also return the log-probabilities of the prompt's
        tokens; max_new_tokens may then be 0.
      expected_lengths: also return the expected number of tokens that each
        round commits, given its tree.
    """

    max_new_tokens: int | Sequence[int]
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    seed: int | Sequence[int]
    samples: int
    repetition_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None
    min_new_tokens: int | Sequence[int]
    stop: Sequence[str] | Sequence[Sequence[str]]
    stop_ids: Sequence[int] | Sequence[Sequence[int]] | None
    schema: str | Sequence[str | None] | None
    schema_depth: int
    pattern: str | Sequence[str | None] | None
    choices: Sequence[str] | Sequence[Sequence[str] | None] | None
    structural_tag: str | Sequence[str | None] | None
    processor: Callable[..., Any] | None
    sampling: SamplingChoice | str | None
    head: HeadChoice | str | None
    block_size: int | None
    depths: int | None
    candidates: int | None
    children: int
    shortlist: int | None
    draft_vocabulary: DraftVocabularyChoice | str | None
    ngrams: int | None
    builder: BuilderChoice | str | None
    nodes: int | None
    acceptance: AcceptanceChoice | str | None
    branches: int
    trunk: int
    selector: str | Path | None
    skeleton: float
    leaves: bool
    drafter_temperature: float | None
    lanes: int | None
    schema_states: int
    batch_size: int | None
    attention: AttentionChoice | str | None
    kernels: KernelsChoice | str | None
    log_probs: bool
    top_log_probs: int
    prompt_log_probs: bool
    expected_lengths: bool
