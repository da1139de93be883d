"""The kinds of layers by name, for `ModelConfig.layer_types`. Kinds that transformers has are named as there."""

from treeflash_jax.models.attention_layer import AttentionLayer
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.delta_layer import DeltaLayer
from treeflash_jax.models.layer_protocol import LayerKind

KINDS: dict[str, LayerKind] = {
    "full_attention": AttentionLayer(),
    "sliding_attention": AttentionLayer(is_windowed=True),
    "linear_attention": DeltaLayer(),
    "shared_full_attention": AttentionLayer(shares="full_attention"),  # this kind and the next are not in transformers
    "shared_sliding_attention": AttentionLayer(is_windowed=True, shares="sliding_attention"),
}


def find_sources(config: ModelConfig) -> tuple[int, ...]:
    """Returns, for each layer, the index of the layer whose state it reads.

    A layer that shares reads the state of the last earlier layer of the kind that it shares. All other layers read the
    state that they keep. So do sharing layers with no such earlier layer: the caller gives them a state of another model.
    """
    last: dict[str, int] = {}
    sources = []
    for layer, name in enumerate(config.kinds):
        if KINDS[name].shares is None:
            last[name] = layer
        sources.append(last.get(KINDS[name].shares or name, layer))
    return tuple(sources)
