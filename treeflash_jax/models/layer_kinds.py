"""The kinds of layers, by their names in `ModelConfig.layer_types`: those of transformers if it has the kind."""

from treeflash_jax.models.attention_layer import AttentionLayer
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.delta_layer import DeltaLayer
from treeflash_jax.models.layer_protocol import LayerKind

KINDS: dict[str, LayerKind] = {
    "full_attention": AttentionLayer(),
    "sliding_attention": AttentionLayer(is_windowed=True),
    "linear_attention": DeltaLayer(),
    "shared_full_attention": AttentionLayer(shares="full_attention"),  # ours, as the next
    "shared_sliding_attention": AttentionLayer(is_windowed=True, shares="sliding_attention"),
}


def find_sources(config: ModelConfig) -> tuple[int, ...]:
    """Returns, for each layer, the layer whose state it reads: itself, or the last one before it of the kind it shares.

    A layer without one before it reads what its caller gives as its own: another model's.
    """
    last: dict[str, int] = {}
    sources = []
    for layer, name in enumerate(config.kinds):
        if KINDS[name].shares is None:
            last[name] = layer
        sources.append(last.get(KINDS[name].shares or name, layer))
    return tuple(sources)
