"""The kinds of layers, by their names in `ModelConfig.layer_types`, the same as in transformers."""

from treeflash_jax.models.attention_layer import AttentionLayer
from treeflash_jax.models.delta_layer import DeltaLayer
from treeflash_jax.models.layer_protocol import LayerKind

KINDS: dict[str, LayerKind] = {
    "full_attention": AttentionLayer(),
    "sliding_attention": AttentionLayer(is_windowed=True),
    "linear_attention": DeltaLayer(),
}
