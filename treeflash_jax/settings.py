"""Settings of a call: each is declared once, with its type, default, unit, limits and help.

Signatures, docstrings, command lines, records and the table of options in README.md are derived from the fields.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from treeflash_jax.acceptance import RULES
from treeflash_jax.checks import basic_first, bounded, documented, quoted
from treeflash_jax.drafters.block import HEADS
from treeflash_jax.suggest import suggesting
from treeflash_jax.trees import BUILDERS, TreeShape
from treeflash_jax.trees.shape import MOST_NODES
from treeflash_jax.verifiers.attention import CHOICES

Function = TypeVar("Function", bound=Callable[..., Any])
Group = TypeVar("Group")
MOST_ROWS = 2**16  # answers of a prompt, or decoded together; more is a slip
# Named so that asking for them is an answer, not a silent difference.
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
METHODS = {"tree": "best-first", "walk": "walk", "chain": "chain", "ar": "none"}  # what `builder` was in the first edition
logger = logging.getLogger("treeflash_jax")


OF_LOAD = "verifier drafter dtype quantize mesh revision local_files_only budget".split()  # no settings of a call


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, or those of a record, whose `method` of the first edition is turned into `builder`."""
    rest = dict(settings)
    method = rest.pop("method", None)
    if method is None:
        return rest
    builder = METHODS.get(method) if isinstance(method, str) else None
    if builder is None:
        raise ValueError(f"got method {quoted(method)}, expected one of {tuple(METHODS)}; it is called builder now")
    if method != "tree" or rest.get("builder") is None:
        rest["builder"] = builder
    return rest


def without_method(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a call with `builder` for `method`, which works for one more release and says so."""
    found = renamed(settings)
    if settings.get("method") is not None:
        if settings.get("builder") not in (None, found["builder"]):
            raise ValueError(
                f"got builder {quoted(settings['builder'])} and method {settings['method']!r}, expected one of them"
            )
        logger.warning(
            f"method {settings['method']!r} is now builder {found['builder']!r}; the old name ends with the next release"
        )
    return found


def takes_method(cls: type) -> type:
    """A class of settings that also accepts `method`."""
    init = cls.__init__

    @wraps(init)
    def made(self: Any, **settings: Any) -> None:
        init(self, **without_method(settings))

    cls.__init__ = made
    return cls


# What a setting changes: the text that is sampled; only how fast it comes; or what the program computes besides.
answer, speed, program = (partial(bounded, kind=kind) for kind in ("answer", "speed", "program"))
# Help and tables list these before the advanced ones.
basic_answer, basic_speed = partial(answer, basic=True), partial(speed, basic=True)
_NODES = {"least": 1, "most": MOST_NODES, "unit": "nodes"}


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are sampled, and where an answer ends. Numbers that may be lists have one value, or one per prompt."""

    max_new_tokens: int = basic_answer(128, "most tokens of an answer, the stop token included", least=1, unit="tokens")
    temperature: float | Sequence[float] = basic_answer(0.0, "sampling temperature of the verifier; 0 is greedy", least=0)
    top_k: int | Sequence[int] = basic_answer(
        0, "sample from the k most likely tokens; 0 keeps all", least=0, unit="tokens"
    )
    top_p: float | Sequence[float] = basic_answer(
        1.0, "sample from the most likely tokens of this total probability", above=0, most=1, unit="probability"
    )
    seed: int | Sequence[int] = basic_answer(
        0, "random seed; prompt i uses the key fold_in(seed, i)", least=0, most=2**32 - 1
    )
    samples: int = basic_answer(
        1,
        "answers per prompt; answer 0 uses the prompt's key, answer j fold_in(prompt's key, j)",
        least=1,
        most=MOST_ROWS,
        unit="answers",
    )
    stop: Sequence[str] = basic_answer(
        (), "text that ends an answer and is not part of it", nonempty=True, says="strings that are not empty", unit="text"
    )
    stop_ids: Sequence[int] | None = answer(
        None, "ids of the tokens that end an answer", unset="the model's own", least=0, unit="ids"
    )


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What the drafter proposes."""

    head: str | None = speed(
        None,
        "second stage of the drafter, which conditions a token on those before it; marginal turns it off",
        unset="the drafter's own",
        choices=lambda: tuple(HEADS),
    )
    block_size: int | None = speed(
        None,
        "length of the drafted block, the last token of the text included, at most the drafter's; shorter blocks make "
        "rounds faster and trees shallower",
        unset="the drafter's",
        least=2,
        unit="tokens",
    )
    depths: int | None = speed(
        None,
        "deepest level of the tree, or length of the chain, for drafters whose network runs once per level",
        unset="the drafter's",
        least=1,
        most=MOST_NODES - 1,
        unit="levels",
    )
    candidates: int | None = speed(
        None,
        "most likely tokens per depth: the candidates that trees are built from (M in the paper)",
        unset="16; on a CPU without matrix instructions 8",
        least=1,
        unit="tokens",
    )
    children: int = speed(16, "most likely next tokens kept for every candidate (K in the paper)", least=1, unit="tokens")
    shortlist: int | None = speed(
        None,
        "tokens per depth that the second stage of a conditional head scores, chosen over all depths together; 0 "
        "scores the whole vocabulary",
        unset="0; on a CPU 32 if the vocabulary has 16,384 tokens or more",
        least=0,
        unit="tokens",
    )
    drafter_temperature: float | None = speed(
        None,
        "temperature of the draft",
        unset="the larger of the drafter's own temperature and min(sampling temperature, 1)",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """What tree is verified in a round, and which of its nodes are kept."""

    builder: str | None = basic_speed(
        None,
        "what is drafted: a tree (best-first; or paths, delayed, without-replacement or hybrid, whose nodes are "
        "sampled), one path (walk is greedy, chain is that of the DFlash paper), or nothing: one token at a time (none)",
        unset="none without a drafter or, unless another drafting setting is given, on a CPU where drafting does not pay; "
        "otherwise best-first, or hybrid at temperatures measured to be better with the drafter",
        choices=lambda: ("none", *BUILDERS),
    )
    nodes: int | Literal["auto"] | None = basic_speed(
        None,
        "tree nodes verified per round, the root (the last token of the text) included; auto verifies as many as are "
        "fastest according to `treeflash calibrate` and pauses drafting while it does not pay",
        unset="for a tree the drafter's, but at most 8 on a CPU without matrix instructions; for a chain the whole block",
        says=f"at least 1 (the root counts) and at most {MOST_NODES:,}, or 'auto'",
        **_NODES,
    )
    acceptance: str | None = speed(
        None,
        "rule that decides which nodes are kept; with sample-and-match, the answer is also that of one-token decoding with "
        "the same seed",
        unset="sample-and-match, but block for one sampled path and traversal for other sampled trees",
        choices=lambda: tuple(RULES),
    )
    branches: int = speed(TreeShape.branches, "number of sampled paths, or most sampled children of a node", **_NODES)
    trunk: int | Literal["auto"] = speed(
        TreeShape.trunk,
        "nodes before the first branching of a delayed tree; auto branches where recent rounds of the same sequence "
        "ended on average",
        says=f"at least 0 and at most {MOST_NODES:,}, or 'auto'",
        **_NODES | {"least": 0},
    )
    selector: str | None = speed(
        None,
        "file of a selector (`python -m train.selector`), which chooses branches and trunk of a delayed tree in every "
        "round",
        unset="none",
        unit="file",
    )
    skeleton: float = speed(
        TreeShape.skeleton,
        "share of the nodes of a hybrid tree that best-first search chooses",
        least=0,
        most=1,
        unit="share",
    )
    leaves: bool = speed(TreeShape.leaves, "let sampled trees contain tokens that the drafter cannot continue")
    lanes: int | None = speed(
        TreeShape.lanes,
        "nodes per level that a best-first tree may expand; a small number gives EAGLE-2's tree",
        unset="the drafter's; all nodes if it drafts every level in one pass",
        **_NODES,
    )


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How the programs run, and what they return besides the answers."""

    batch_size: int | None = basic_speed(
        None,
        "sequences decoded together; with fewer prompts, the unused slots decode padding",
        unset="all, at most 8",
        least=1,
        most=MOST_ROWS,
        unit="sequences",
    )
    attention: str | None = speed(
        None,
        "how caches are read: xla reads whole caches; streamed, pallas-gpu and pallas-tpu only their filled part. The "
        "Pallas kernels were never run on an accelerator",
        unset="chosen by device and dtype",
        choices=lambda: CHOICES,
    )
    log_probs: bool = program(False, "also return the verifier's log-probability of every token")
    expected_lengths: bool = program(False, "also return how many tokens each round was expected to commit, given its tree")


GROUPS = {
    "sampling": SamplingConfig,
    "drafting (affects the speed, never the distribution of the output)": DraftConfig,
    "tree (affects the speed, never the distribution of the output)": TreeConfig,
    "running": RuntimeConfig,
}


@takes_method
@suggesting
@documented
@dataclass(frozen=True, kw_only=True)
class GenerateConfig(RuntimeConfig, TreeConfig, DraftConfig, SamplingConfig):
    """Settings of a call to `generate`, `generate_each`, `stream` or `warmup`.

    Settings of drafting affect the speed, never the distribution of the output.

    Example:
      >>> model.generate(prompts, GenerateConfig(temperature=0.7, top_p=0.9), max_new_tokens=256)
    """

    def group(self, cls: type[Group]) -> Group:
        """The settings of one group: `config.group(TreeConfig)`."""
        return cls(**{one.name: getattr(self, one.name) for one in fields(cls)})


class Settings(TypedDict, total=False):
    """The fields of GenerateConfig as keyword arguments: type checkers and editors read them here.

    `python notebooks/results/tables.py` writes them.
    """

    # fields
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
    drafter_temperature: float | None
    builder: str | None
    nodes: int | Literal["auto"] | None
    acceptance: str | None
    branches: int
    trunk: int | Literal["auto"]
    selector: str | None
    skeleton: float
    leaves: bool
    lanes: int | None
    batch_size: int | None
    attention: str | None
    log_probs: bool
    expected_lengths: bool
    # end


def takes_settings(function: Function) -> Function:
    """Shows the fields of GenerateConfig in the signature of a function that takes them as **settings.

    `help` and the completion of notebooks read that signature; calls are not affected.
    """
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    kinds = get_type_hints(GenerateConfig)
    settings = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[field.name])
        for field in basic_first(GenerateConfig)
    ]
    function.__signature__ = signature.replace(parameters=own + settings)
    return function
