"""Gemma 4's assistants: the drafters published beside each model of the family (`*-assistant`).

Source: transformers, models gemma4_assistant and gemma4_unified_assistant.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from treeflash_jax.core.parameters import Entry
from treeflash_jax.drafters.assistant_drafter import AssistantDrafter
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.architectures.dense import AS_ON_DISK, INERT
from treeflash_jax.formats.architectures.gemma4 import GEMMA4, GEMMA4_UNIFIED
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.models.config import ModelConfig

FAMILIES = {"gemma4_assistant": GEMMA4, "gemma4_unified_assistant": GEMMA4_UNIFIED}
TEXT_ONLY = {"hidden_size_per_layer_input": (0,), "enable_moe_block": (False,), "use_double_wide_mlp": (False,)}
OUTSIDE = {
    "pre_projection": Entry("pre_projection.weight", **AS_ON_DISK),
    "post_projection": Entry("post_projection.weight", **AS_ON_DISK),
    "centroids": Entry("masked_embedding.centroids.weight", **AS_ON_DISK),
    "clusters": Entry("masked_embedding.token_ordering", order=(0, 1), row_axes=2),
}
KEYS = {"model_type", "text_config", "backbone_hidden_size", "tie_word_embeddings", "eos_token_id"}
CLUSTER_KEYS = {"use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"}


class Assistant(Dialect):
    """The dialect of assistants."""

    name = "assistant"
    part = "drafter"
    marks = ("backbone_hidden_size",)

    def read_config(self, path: Path, keys: Keys) -> AssistantDrafter:
        keys.check_known(INERT | KEYS | CLUSTER_KEYS)
        keys.check_only({"tie_word_embeddings": (True,)})
        model_type = keys.value(str, "model_type", None, "a name")
        keys.expect(model_type in FAMILIES, "model_type", model_type, " or ".join(FAMILIES))
        text = keys.table("text_config", required=True)
        layers = _read_layers(Keys({"tie_word_embeddings": True, **text.raw}, text.where), model_type)
        clusters: dict[str, Any] = {}
        if keys.truth("use_ordered_embeddings", False):
            number = keys.integer("num_centroids", 2048, most=layers.vocab_size)
            is_even = layers.vocab_size % number == 0
            keys.expect(is_even, "num_centroids", number, f"a divisor of the vocabulary of {layers.vocab_size}")
            top = keys.integer("centroid_intermediate_top_k", 32, most=number)
            clusters = {"num_clusters": number, "top_clusters": top}
            clusters["children"] = min(AssistantDrafter.children, top * (layers.vocab_size // number))
        return AssistantDrafter(layers=layers, target_hidden_size=keys.integer("backbone_hidden_size"), **clusters)

    def select(self, path: Path, config: AssistantDrafter, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Raises ValueError unless the clusters contain every token exactly once."""
        name, vocab_size = OUTSIDE["clusters"].name, config.layers.vocab_size
        if config.num_clusters and name in tensors:
            ids_v = np.asarray(tensors[name][0:vocab_size])
            if not np.array_equal(np.sort(ids_v), np.arange(vocab_size)):
                raise ValueError(f"{path}: got repeated ids in tensor {name}, expected each token once")
        return tensors

    def entries(self, config: AssistantDrafter, specs: Any, names: Collection[str]) -> dict[str, Any]:
        architecture = ARCHITECTURES[config.layers.model_type]
        return architecture.entries(specs, names) | {name: OUTSIDE[name] for name in specs if name in OUTSIDE}


def _read_layers(text: Keys, model_type: str) -> ModelConfig:
    """Returns the sizes of layers, which must all share keys and values.

    Layers with a window see the last `sliding_window` committed positions, as many as a cache of the verifier keeps. In
    transformers, they see one more.
    """
    family = FAMILIES[model_type]
    text.check_only({"model_type": (family.model_type,), **TEXT_ONLY})
    number = text.integer("num_hidden_layers")
    shared = text.integer("num_kv_shared_layers", number, least=0) or number
    text.expect(shared == number, "num_kv_shared_layers", shared, f"{number}, all layers")
    sizes = family.read(Keys({**text.raw, "num_kv_shared_layers": 0}, text.where))
    return replace(
        sizes,
        layer_types=tuple(f"shared_{kind}" for kind in sizes.kinds),
        sizes=tuple((f"shared_{kind}", of_kind) for kind, of_kind in sizes.sizes),
        window=sizes.window + 1,
    )
