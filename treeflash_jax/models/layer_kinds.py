"""The kinds of layers by name. `ModelConfig.layer_types` uses the same names: those of transformers, if it has the kind."""

from treeflash_jax.models.attention_layer import AttentionLayer
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.delta_layer import DeltaLayer
from treeflash_jax.models.layer_protocol import LayerKind

KINDS: dict[str, LayerKind] = {
    "full_attention": AttentionLayer(),
    "sliding_attention": AttentionLayer(is_windowed=True),
    "linear_attention": DeltaLayer(),
    "shared_full_attention": AttentionLayer(shares="full_attention"),  # not in transformers, nor is the next
    "shared_sliding_attention": AttentionLayer(is_windowed=True, shares="sliding_attention"),
}


def find_sources(config: ModelConfig) -> tuple[int, ...]:
    """Returns, for each layer, the index of the layer whose state it reads.

    A layer that shares reads the last layer before it of the kind it shares. All others read their own state, and so do
    sharing layers with no such layer before them: their caller gives them another model's state as their own.
    """
    last: dict[str, int] = {}
    sources = []
    for layer, name in enumerate(config.kinds):
        if KINDS[name].shares is None:
            last[name] = layer
        sources.append(last.get(KINDS[name].shares or name, layer))
    return tuple(sources)
