"""Types of keyword arguments, for editors. `python tests/write_keywords.py` writes this file."""

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
    """Keyword arguments of `generate`, `generate_each`, `stream` and `warmup`: the fields of GenerateConfig."""

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
