"""n-gram drafters: `ngram_config` in config.json, and no weights. One ships under the name "ngram"."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from treeflash_jax.drafters.ngram_drafter import NgramDrafter
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.trees.tree_inputs import MAX_NODES


class Ngram(Dialect):
    """The dialect of n-gram drafters: a few sizes, each with a default."""

    name = "ngram"
    part = "drafter"
    kind = "ngram"
    marks = ("ngram_config",)

    def read_config(self, path: Path, keys: Keys) -> NgramDrafter:
        sizes = keys.table("ngram_config", required=True)
        usual = NgramDrafter()
        sizes.check_known({"longest", "shortest", "num_depths", "num_nodes"})
        longest = sizes.integer("longest", usual.longest, most=64)
        return NgramDrafter(
            longest=longest,
            shortest=sizes.integer("shortest", min(usual.shortest, longest), most=longest),
            num_depths=sizes.integer("num_depths", usual.num_depths, most=MAX_NODES - 1),
            num_nodes=sizes.integer("num_nodes", usual.num_nodes, most=MAX_NODES),
        )

    def opened(self, path: Path, config: NgramDrafter) -> AbstractContextManager[dict[str, Tensor]]:
        return nullcontext({})

    def entries(self, config: NgramDrafter, specs: Any, names: Collection[str]) -> dict[str, Any]:
        return {}
