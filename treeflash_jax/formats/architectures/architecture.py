"""Model families: how keys and tensors in their files correspond to fields and weights of this package."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from treeflash_jax.core.checks import INT32
from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats import quant_methods
from treeflash_jax.formats.architectures import rope
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers (`models.layer_kinds`)


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of config.json and the field of ModelConfig that stores its value.

    Attributes:
      name: key in config.json.
      field: field of ModelConfig.
      kind: int (at least 1), float (above 0) or bool.
      most: largest value of an int.
      default: value if the key is missing, as in the family's configuration class in transformers; None: the key is
        required. If it is a function of the config's keys and the fields read so far, it also replaces null.
    """

    name: str
    field: str
    kind: type = int
    most: int = INT32
    default: Any = None

    def read(self, keys: Keys, fields: Mapping[str, Any]) -> Any:
        if callable(self.default) and self.name not in keys:
            return self.default(keys, fields)
        default = None if callable(self.default) else self.default
        if self.kind is int:
            return keys.integer(self.name, default, most=self.most)
        return {float: keys.number, bool: keys.truth}[self.kind](self.name, default)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model family. Keys of its config.json are read, inert, refused (`keys.NUMERIC_KEYS`) or ignored with a warning.

    Attributes:
      model_type: value of `model_type` in config.json and in ModelConfig.
      class_name: value of `architectures` in config.json.
      keys: keys that correspond to one field of ModelConfig each, for reading and writing.
      constants: fields of ModelConfig that are fixed for the family.
      only: keys with their implemented values; a missing key has the first of these.
      layer_types: values of the key `layer_types` that are implemented.
      inert: keys without effect on a forward pass.
      derive: function of the config's keys and the fields read so far. It returns fields of ModelConfig that depend on
        several keys, such as the dense layers of a mixture of experts. It may raise ValueError.
      derived: keys that `derive` reads.
      write: function of a ModelConfig; returns the keys for the fields of `derive`.
      layer: location on disk of each weight of a layer, by its name here, for all kinds of layers; tensor names lack the
        prefix "model.layers.0.".
      outside: location on disk of the other weights.
      rotated: share of a head that is rotated if a file does not state it. Families with 1 always rotate whole heads.
      rope_theta: base of the rotary embedding if a file does not state it.
      rope: other rope settings, by key, for files that state none.
      adapt_tensors: function of a config and a file's tensors by name. It renames, splits or leaves out tensors, and
        returns the tensors that `layer` and `outside` name.
      mtp: location on disk of the weights of a multi-token prediction layer, except its decoder layer; {}: files of the
        family have no such layer.
      is_written: whether files of the family can be written.
      layouts: alternatives to `layer`. The names of a file's tensors determine which layout it has.
      gguf: value of `general.architecture` in the family's GGUF files; None: such files are not read.
      gguf_sizes: for sizes that only this family has, keys of config.json with the metadata keys of their values.
      gguf_keys: function of the metadata of the family's GGUF files, without the family's name in keys, and of the tensors.
        It returns metadata as of a model with one kind of layer, and keys of config.json for other layers. It may raise
        ValueError.
      gguf_names: names of tensors in GGUF layers that the package gguf does not know, by the names in `layer`.
      gguf_reads: function of a tensor's name and a config; returns whether the tensor is read.
      gguf_rotates_pairs: whether GGUF files order query and key matrices for a rotation of neighbouring elements.
    """

    model_type: str
    class_name: str
    keys: tuple[Key, ...]
    constants: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    layer_types: Collection[str] = (FULL,)
    inert: frozenset[str]
    derive: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] = lambda keys, fields: {}
    derived: tuple[str, ...] = ()
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    layer: dict[str, Entry]
    outside: dict[str, Entry]
    layouts: tuple[dict[str, Entry], ...] = ()
    rotated: float = 1.0
    rope_theta: float = 10_000.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    adapt_tensors: Callable[[ModelConfig, dict[str, Any]], dict[str, Any]] = lambda config, tensors: tensors
    mtp: dict[str, Entry] = field(default_factory=dict)
    is_written: bool = True
    gguf: str | None = None
    gguf_sizes: Mapping[str, str] = field(default_factory=dict)
    gguf_keys: Callable[[Keys, Mapping[str, Any]], tuple[dict[str, Any], dict[str, Any]]] | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_reads: Callable[[str, ModelConfig], bool] = lambda name, config: True
    gguf_rotates_pairs: bool = False

    def read(self, keys: Keys, also_known: Collection[str] = ()) -> ModelConfig:
        """Returns the config of a config.json. The caller reads the keys `also_known`.

        Raises ValueError for a key or value that is not implemented, and for a missing size.
        """
        known = {key.name for key in self.keys} | {"model_type", "eos_token_id", "layer_types", quant_methods.KEY}
        keys.check_known(known.union(rope.KEYS, self.only, self.derived, self.inert, also_known))
        keys.check_only(self.only)
        if quant_methods.KEY not in self.derived:
            quant_methods.check_config(keys)
        fields: dict[str, Any] = {}
        for key in self.keys:
            fields[key.field] = key.read(keys, fields)
        types = keys.value(list[str] | None, "layer_types", None, "a list of names")
        num_layers = fields["num_layers"]
        others = sorted({*(types or ())} - {*self.layer_types})
        keys.expect(not others, "layer_types", others, f"only {', '.join(map(repr, self.layer_types))}")
        keys.expect(types is None or len(types) == num_layers, "layer_types", types, f"one for each of {num_layers} layers")
        heads = fields["num_heads"]
        kv_heads = fields["num_kv_heads"]
        head_dim = fields["head_dim"]
        keys.expect(heads % kv_heads == 0, "num_attention_heads", heads, f"a multiple of {kv_heads} key/value heads")
        keys.expect(head_dim % 2 == 0, "head_dim", head_dim, "an even number (its halves are rotated)")
        fields |= self.constants
        fields |= self.derive(keys, fields)
        if "rope" not in fields:
            fields["rope"] = rope.read(keys, head_dim, fields["max_positions"], self.rotated, self.rope_theta, self.rope)
        return ModelConfig(
            **fields,
            model_type=self.model_type,
            eos_token_ids=keys.ids("eos_token_id", fields["vocab_size"] - 1, required=False),
        )

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Returns config.json for a config, as transformers would write it; without `architectures` and dtype.

        Raises ValueError if the family can only be read.
        """
        if not self.is_written:
            raise ValueError(f"got a model of type {self.model_type!r} to write, expected another: this one is only read")
        eos = list(config.eos_token_ids)
        return {
            "model_type": self.model_type,
            **{key.name: getattr(config, key.field) for key in self.keys},
            **{key: self.only[key][0] for key in ("hidden_act", "attention_bias") if self.only[key][0] is not None},
            **rope.write(config),
            **self.write(config),
            "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        }

    def entries(self, specs: Mapping[str, Any], names: Collection[str] = ()) -> dict[str, Any]:
        """Returns the location on disk of each weight of a verifier.

        Args:
          specs: tree of Spec, in which "groups" contains the layers.
          names: names of the file's tensors, which determine the layout; empty if files are being written.
        """
        entries = {name: entry for name, entry in self.outside.items() if name in specs}
        return entries | {"groups": self.layer_entries(specs["groups"], "model.", names)}

    def layer_entries(
        self, groups: list[list[dict[str, Any]]], prefix: str, names: Collection[str] = ()
    ) -> list[list[dict[str, Entry]]]:
        """Returns the location on disk of each weight of a stack of layers, like `entries`."""
        stored = {re.sub(r"\.\d+\.", ".{}.", name.partition(".layers.")[2].partition(".")[2]) for name in names}
        layers = list(chain.from_iterable(groups))
        weights = {name for specs in layers for name in specs}
        table = max((self.layer, *self.layouts), key=lambda layout: sum(layout[name].name in stored for name in weights))
        entries = (
            {name: replace(table[name], name=f"{prefix}layers.{index}.{table[name].name}") for name in specs}
            for index, specs in enumerate(layers)
        )
        return [[next(entries) for _ in group] for group in groups]
