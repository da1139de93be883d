"""The base of the stages that train block drafters: their backbone, their head or both."""

import dataclasses
from dataclasses import dataclass
from functools import partial

from train.data.packing import Corpus
from train.runtime.training_state import SumsFunction
from train.stages import choices
from train.stages.drafting import DraftingStage
from train.stages.objective import ObjectiveConfig, drafting_sums
from treeflash_jax.core.error_text import quoted
from treeflash_jax.core.settings import setting
from treeflash_jax.drafters.block.block_drafter import BlockDrafter
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.config import ModelConfig

WITH_HEAD = {"tau": {}, "tau_marginal": {"head": "marginal"}}


@dataclass(frozen=True, kw_only=True)
class BlockStage(DraftingStage):
    """Settings that the stages of block drafters share. These stages train "backbone", "head" or both."""

    lists_tokens = True
    records_training = True

    objective: ObjectiveConfig
    head_rank: int = setting(
        BlockDrafter.head_rank,
        "rank of a low-rank head, at most the drafter's width; files of a low rank are smaller",
        least=1,
    )

    def __post_init__(self) -> None:
        if HEADS[self.head].trains_candidates and self.objective.loss == "forward-kl":
            got = f"got head {quoted(self.head)} and objective.loss 'forward-kl'"
            raise ValueError(f"{got}, expected 'cross-entropy' or 'cross-entropy-l1': its distribution has candidates only")
        if HEADS[self.head].trains_candidates and self.objective.vocabulary:
            got = f"got head {quoted(self.head)} and objective.vocabulary {self.objective.vocabulary}"
            raise ValueError(f"{got}, expected 0: its candidates are the likeliest tokens of the whole vocabulary")
        if self.data.prompt_weight and (self.objective.dpace or self.objective.prompts):
            name = "dpace" if self.objective.dpace else "prompts"
            got = f"got data.prompt_weight {self.data.prompt_weight} and objective.{name} true"
            raise ValueError(f"{got}, expected only one of them: objective.{name} replaces the weights of tokens")

    def make_sums(self, verifier: ModelConfig, drafter: BlockDrafter) -> SumsFunction:
        return partial(drafting_sums, settings=self.objective, verifier=verifier, drafter=drafter, attention=self.attention)

    def make_held_out_sums(self, verifier: ModelConfig, drafter: BlockDrafter) -> SumsFunction:
        """Returns the objective on answers, over the whole vocabulary and without D-PACE's weights, to compare runs."""
        decay = 0.0 if self.objective.dpace else self.objective.decay
        objective = dataclasses.replace(self.objective, vocabulary=0, dpace=False, decay=decay, prompts=False)
        return dataclasses.replace(self, objective=objective).make_sums(verifier, drafter)

    def check_corpus(
        self, drafter: BlockDrafter, verifier: ModelConfig, corpus: Corpus, tokenizer: Tokenizer | None
    ) -> None:
        """Raises ValueError if the mask token occurs in the training data: the recipe is probably for another verifier."""
        counts_v = corpus.token_counts(verifier.vocab_size)
        mask = drafter.mask_token_id
        better = choices.mask_token(tokenizer, counts_v, verifier.eos_token_ids)
        if "backbone" in self.trains and counts_v[mask] and not counts_v[better]:
            times = f"{counts_v[mask]:,} times in the training data"
            raise ValueError(f"got mask_token_id {mask}, which occurs {times}, expected an unused token, such as {better}")
