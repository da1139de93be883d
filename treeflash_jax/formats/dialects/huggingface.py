"""Folders of verifiers in the form of transformers: config.json and safetensors."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from treeflash_jax.formats import architectures, quant_methods, storage
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.models.config import ModelConfig


class HuggingFace(Dialect):
    """The dialect of verifiers on the Hub."""

    name = "huggingface"
    part = "verifier"

    def read_config(self, path: Path, keys: Keys) -> ModelConfig:
        keys = architectures.text_keys(keys)
        return architectures.recognise(keys).read(keys)

    def select(self, path: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Joins quantised weights with their scales, and leaves out the copy of a tied table.

        Raises ValueError if the copy differs from the table. Also raises the errors of `quant_methods.join` and
        `adapt_tensors`.
        """
        architecture = ARCHITECTURES[config.model_type]
        outside = architecture.outside
        try:
            tensors = architecture.adapt_tensors(config, quant_methods.join(path, tensors))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        embed = outside["embed"].name
        unembed = outside["unembed"].name
        if config.tie_embeddings and {embed, unembed} <= tensors.keys():
            if not storage.are_equal(tensors[embed], tensors.pop(unembed)):
                got = f"{unembed} differs from {embed}, although config.json ties them"
                raise ValueError(f"{path}: {got}; set tie_word_embeddings to false there")
        return tensors

    def entries(self, config: ModelConfig, specs: Any, names: Collection[str]) -> dict[str, Any]:
        return ARCHITECTURES[config.model_type].entries(specs, names)

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        architecture = ARCHITECTURES[config.model_type]
        return {"architectures": [architecture.class_name], **architecture.to_hf(config)}
