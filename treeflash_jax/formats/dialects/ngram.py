"""n-gram drafting: `ngram_config` in config.json, and no weights. The folder that ships is known as "ngram"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from treeflash_jax.drafters.ngram import NgramConfig
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.trees.shape import MOST_NODES


class Ngram(Dialect):
    """Sizes of what is looked up; each has a default."""

    name = "ngram"
    part = "drafter"
    kind = "ngram"
    marks = ("ngram_config",)

    def read_config(self, path: Path, keys: Keys) -> NgramConfig:
        own, usual = keys.table("ngram_config", required=True), NgramConfig()
        own.check_known({"longest", "shortest", "num_depths", "num_nodes"})
        longest = own.whole("longest", usual.longest, most=64)
        return NgramConfig(
            longest=longest,
            shortest=own.whole("shortest", min(usual.shortest, longest), most=longest),
            num_depths=own.whole("num_depths", usual.num_depths, most=MOST_NODES - 1),
            num_nodes=own.whole("num_nodes", usual.num_nodes, most=MOST_NODES),
        )

    def opened(self, path: Path, config: NgramConfig) -> AbstractContextManager[Mapping[str, Tensor]]:
        return nullcontext({})

    def entries(self, config: NgramConfig, specs: Any, names: Collection[str]) -> dict[str, Any]:
        return {}
