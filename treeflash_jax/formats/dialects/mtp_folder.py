"""Multi-token prediction layers: the tensors "mtp.*" in a verifier's files, or in a separate folder.

A separate folder has these tensors, and the verifier's config.json with one layer.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeflash_jax.drafters.mtp_drafter import MtpDrafter, layer_sizes
from treeflash_jax.formats import architectures, quant_methods
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.dialects.dialect import OUR_FIELDS, OUR_KEY, Dialect, read_our_fields, write_our_fields
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor

PREFIX = "mtp."


class Mtp(Dialect):
    """The dialect of multi-token prediction layers, for families with `Architecture.mtp`."""

    name = "mtp"
    part = "drafter"
    kind = "mtp"

    def recognises(self, path: Path, keys: Keys) -> bool:
        return False  # `dialects.recognise` decides, because these folders are also verifiers

    def read_config(self, path: Path, keys: Keys) -> MtpDrafter:
        keys = architectures.text_keys(keys)
        sizes = architectures.recognise(keys).read(keys, [OUR_KEY])
        return MtpDrafter(layers=layer_sizes(sizes), **read_our_fields(keys, OUR_FIELDS))

    def select(self, path: Path, config: MtpDrafter, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        selected = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        if not selected:
            raise ValueError(f"{path}: got no tensors {PREFIX}*, expected those of a layer of multi-token prediction")
        return quant_methods.join(path, selected)

    def entries(self, config: MtpDrafter, specs: Any, names: Collection[str]) -> dict[str, Any]:
        architecture = ARCHITECTURES[config.layers.model_type]
        groups = architecture.layer_entries(specs["groups"], PREFIX, names)
        return {**architecture.mtp, "groups": groups}

    def to_hf(self, config: MtpDrafter) -> dict[str, Any]:
        architecture = ARCHITECTURES[config.layers.model_type]
        raw = replace(architecture, is_written=True).to_hf(config.layers)  # a tensor per expert, as in some models' files
        raw |= {"mtp_num_hidden_layers": 1, **write_our_fields(config, OUR_FIELDS)}
        return {"architectures": [architecture.class_name.replace("ForCausalLM", "MTP")], **raw}
