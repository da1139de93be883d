"""Language models as drafters: the folder or file of a verifier, in that verifier's dialect.

Steering adds a key to config.json, and its published tensors to the model's tensors.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treeflash_jax.core.parameters import Entry
from treeflash_jax.drafters.language_model_drafter import LanguageModelDrafter
from treeflash_jax.drafters.steering import Steering
from treeflash_jax.formats.architectures.dense import AS_ON_DISK
from treeflash_jax.formats.dialects.dialect import OUR_FIELDS, OUR_KEY, Dialect, read_our_fields, write_our_fields
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor

STEERING = "steering"  # key of config.json: the fields of `Steering`


class LanguageModel(Dialect):
    """A verifier's dialect that is read and written as a drafter's. `dialects.recognise` wraps the dialect of the files."""

    name = "language_model"
    part = "drafter"
    kind = "language_model"

    def __init__(self, inner: Dialect):
        self.inner = inner

    def recognises(self, path: Path, keys: Keys) -> bool:
        return False  # `dialects.recognise` decides, because these folders are also verifiers

    def read_config(self, path: Path, keys: Keys) -> LanguageModelDrafter:
        of_model = {name: value for name, value in keys.raw.items() if name not in (STEERING, OUR_KEY)}
        layers = self.inner.read_config(path, Keys(of_model, keys.where))
        return LanguageModelDrafter(layers=layers, steering=read_steering(keys), **read_our_fields(keys, OUR_FIELDS))

    def opened(self, path: Path, config: LanguageModelDrafter) -> AbstractContextManager[dict[str, Tensor]]:
        return self.inner.opened(path, config.layers)

    def entries(self, config: LanguageModelDrafter, specs: Any, names: Collection[str]) -> Any:
        entries = self.inner.entries(config.layers, specs, names)
        return entries | ({"steering": steering_entries(config.layers.num_layers)} if config.steering else {})

    def to_hf(self, config: LanguageModelDrafter) -> dict[str, Any]:
        steered = {STEERING: asdict(config.steering)} if config.steering else {}
        return self.inner.to_hf(config.layers) | steered | write_our_fields(config, OUR_FIELDS)


def read_steering(keys: Keys) -> Steering | None:
    """Returns the steering in a config.json; None if there is none. Raises ValueError for a damaged value."""
    if STEERING not in keys:
        return None
    keys = keys.table(STEERING)
    keys.check_known({"taps", "width"})
    taps = keys.value(list[int], "taps", None, "three layers of the verifier", least=0)
    keys.expect(len(taps) == 3, "taps", taps, "three layers of the verifier")
    return Steering(taps=tuple(taps), width=keys.integer("width"))


def steering_entries(num_layers: int) -> dict[str, Any]:
    """Returns the location of each weight of steering. The maps to all layers are in one tensor."""
    return {
        "mix": Entry("guidance_embd_layer.orig.weight", **AS_ON_DISK),
        "mix_bias": Entry("guidance_embd_layer.orig.bias"),
        "norm": Entry("latent_mod_prep.norm.weight"),
        "norm_bias": Entry("latent_mod_prep.norm.bias"),
        "project": [
            Entry("latent_mod_prep.w_guide.weight", **AS_ON_DISK, part=(layer, num_layers), part_axis=0)
            for layer in range(num_layers)
        ],
    }
