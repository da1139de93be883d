"""What generation hands back: answers with their statistics, pieces of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

from treeflash_jax.checks import whole
from treeflash_jax.draw import DrawnTree


@dataclass(frozen=True, kw_only=True)
class Result:
    """One answer.

    Attributes:
      prompt_ids: what was read.
      ids: generated ids, the stop token included.
      text: decoded without special tokens, up to a stop string; None where there is no tokenizer.
      builder: how it was drafted, as GenerateConfig.builder; "none" where nothing was drafted.
      accept_lengths: tokens that every round added to the answer, bonus included. The token that prefill yields is in no
        entry, so that `1 + sum(accept_lengths) == len(ids)`.
      cut: tokens that the last round accepted beyond the end of the answer, at a stop or at `max_new_tokens`. Published
        counts of acceptance include them; `accept_lengths` and `tau` do not.
      finished: "stop" (a stop id or string), "length", or "interrupted" (Ctrl-C).
      seconds: decoding time of the call, prefill included, compilation excluded; from `generate_each`, until this answer.
      compile_seconds: spent compiling until this answer.
      tokens_per_second: generated tokens of the call over `seconds`; from `generate_each` and `stream`, of this answer.
      log_probs: of every generated token under the verifier (temperature 1, no filters), if asked for.
      expected_lengths: tokens every round was expected to accept, given its tree and before any cut, if asked for.
      nodes: rows that each round verified, where rounds chose them; 1 where nothing was drafted.
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str | None
    builder: str
    accept_lengths: list[int]
    finished: str
    seconds: float
    compile_seconds: float
    tokens_per_second: float
    log_probs: list[float] | None = None
    expected_lengths: list[float] | None = None
    nodes: list[int] | None = None
    cut: int = 0
    draft_again: Callable[[int], DrawnTree] | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def unanswered(prompt_ids: list[int], *, has_text: bool) -> Result:
        """What a prompt gets that Ctrl-C left waiting: no tokens, marked "interrupted"."""
        rest = {"seconds": 0.0, "compile_seconds": 0.0, "tokens_per_second": 0.0, "builder": "none"}
        return Result(
            prompt_ids=prompt_ids, ids=[], text="" if has_text else None, accept_lengths=[], finished="interrupted", **rest
        )

    @property
    def method(self) -> str:
        """What `builder` was called in the first edition: "tree", "walk", "chain" or "ar"."""
        return {"none": "ar", "walk": "walk", "chain": "chain"}.get(self.builder, "tree")

    @property
    def tau(self) -> float:
        """Block efficiency: mean tokens that a round added to the answer, bonus included; 1 where there was no round."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 1.0

    @property
    def accepted_before_cut(self) -> list[int]:
        """`accept_lengths` with the last round in full, as published code counts it and as `expected_lengths` means it."""
        return [*self.accept_lengths[:-1], self.accept_lengths[-1] + self.cut] if self.accept_lengths else []

    def _repr_html_(self) -> str:
        """As notebooks show it: the answer, and its statistics below."""
        answer = self.text if self.text is not None else " ".join(map(str, self.ids))
        about = {"tokens": len(self.ids), "rounds": len(self.accept_lengths), "tau": f"{self.tau:.2f}"}
        about |= {"tokens/s": f"{self.tokens_per_second:.0f}", "builder": self.builder, "finished": self.finished}
        heads = "".join(f"<th>{escape(name)}</th>" for name in about)
        values = "".join(f"<td>{escape(str(value))}</td>" for value in about.values())
        return (
            f'<div><pre style="white-space: pre-wrap">{escape(answer)}</pre>'
            f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{values}</tr></tbody></table></div>"
        )

    def tree(self, round_index: int) -> DrawnTree:
        """The draft tree of one round, drafted again from the same prefix; `print` draws it.

        Raises:
          ValueError: a round this answer did not have, or an answer without draft trees.
        """
        if self.draft_again is None:
            raise ValueError("this answer was decoded one token at a time: it has no draft trees")
        if not self.accept_lengths:
            raise ValueError("this answer has no rounds: its only token came from the prefill")
        return self.draft_again(whole(round_index, "round", most=len(self.accept_lengths) - 1))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """New tokens of one row while streaming: `ids` since the last chunk, `text` where it is already certain."""

    ids: list[int]
    text: str
    rounds: int
