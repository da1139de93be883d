"""The record of a model family: its keys in config.json, its tensors, and the fields and weights they map to."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from treeflash_jax.core.checks import quoted
from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures import rope
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models.config import ModelConfig

MOST_LAYERS = 1000
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")  # in the name of a tensor


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of config.json and the field of ModelConfig that holds its value.

    Attributes:
      name: in config.json.
      field: of ModelConfig.
      kind: int (at least 1), float (above 0) or bool.
      default: of a missing key; None: the key is required. A function of the fields read so far stands for null, too.
    """

    name: str
    field: str
    kind: type = int
    default: Any = None

    def read(self, keys: Keys, fields: Mapping[str, Any]) -> Any:
        if callable(self.default) and self.name not in keys:
            try:
                return self.default(fields)
            except ValueError as error:
                raise ValueError(f"{keys.where}: {error}") from None
        default = None if callable(self.default) else self.default
        return {int: keys.whole, float: keys.number, bool: keys.truth}[self.kind](self.name, default)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model family. Every key of its config.json is used, known to be inert, or refused.

    Attributes:
      model_type: its name in config.json, and in ModelConfig.
      class_name: `architectures` in config.json.
      keys: keys that become fields of ModelConfig as they are; both directions.
      constants: fields of ModelConfig that the family fixes.
      only: keys with the values that are implemented; an absent key means the first one.
      layer_types: names in the key `layer_types` that are implemented.
      inert: keys that no number of a forward pass depends on.
      derive: fields of ModelConfig that take more than one key, such as the layers of each kind in a mixture of experts;
        it is given the config's keys and the fields read so far, and may raise ValueError.
      derived: the keys that `derive` reads.
      write: keys for these fields, from a ModelConfig.
      layer: place on disk of each weight of a layer, by our name, for all kinds of layers; names follow "model.layers.0.".
      outside: place on disk of the other weights.
      layouts: other forms of `layer` that files may have; the tensors that they hold say which one it is.
      gguf: `general.architecture` of the family's GGUF files; None: they are not read.
      gguf_sizes: sizes that only this family's GGUF files state, by their keys: fields of ModelConfig.
      gguf_rotates_pairs: these files order query and key matrices for a rotation of neighbouring elements.
    """

    model_type: str
    class_name: str
    keys: tuple[Key, ...]
    constants: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    layer_types: Collection[str] = ("full_attention",)
    inert: frozenset[str]
    derive: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] = lambda keys, fields: {}
    derived: tuple[str, ...] = ()
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    layer: Mapping[str, Entry]
    outside: Mapping[str, Entry]
    layouts: tuple[Mapping[str, Entry], ...] = ()
    gguf: str | None = None
    gguf_sizes: Mapping[str, str] = field(default_factory=dict)
    gguf_rotates_pairs: bool = False

    def read(self, keys: Keys, also_known: Collection[str] = (), names: Collection[str] = ()) -> ModelConfig:
        """Returns the sizes that a config.json states.

        Args:
          also_known: keys that the caller reads.
          names: names of the tensors beside the file, if there are any.

        Raises:
          ValueError: a key or value that is not implemented, a missing size, or more layers than the tensors have.
        """
        known = {key.name for key in self.keys} | {"model_type", "eos_token_id", "layer_types"}
        keys.check_known(known.union(rope.KEYS, self.only, self.derived, self.inert, also_known))
        keys.check_only(self.only)
        fields: dict[str, Any] = {}
        for key in self.keys:
            fields[key.field] = key.read(keys, fields)
        check_layers(keys.where, fields["num_layers"], names)
        self._check_layer_types(keys, fields["num_layers"])
        check_heads(keys.where, *(fields[name] for name in ("num_heads", "num_kv_heads", "head_dim")))
        fields |= self.constants
        fields |= self.derive(keys, fields)
        return ModelConfig(
            **fields,
            model_type=self.model_type,
            rope=rope.read(keys, fields["head_dim"], fields["max_positions"]),
            eos_token_ids=keys.stop_ids(fields["vocab_size"]),
        )

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Returns config.json for these sizes, as transformers would write it; without `architectures` and dtype."""
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
        """Returns the place on disk of each weight of a verifier.

        Args:
          specs: tree of Spec, of which "groups" holds the layers.
          names: of the tensors in the files, where the family has several layouts; empty where files are to be written.

        Raises:
          ValueError: tensors of several layouts, or of none.
        """
        entries = {name: entry for name, entry in self.outside.items() if name in specs}
        return entries | {"groups": self.layer_entries(specs["groups"], "model.", names)}

    def layer_entries(
        self, groups: list[list[dict[str, Any]]], prefix: str, names: Collection[str] = ()
    ) -> list[list[dict[str, Entry]]]:
        """Returns the place on disk of each weight of a stack of layers."""
        index = iter(range(sum(map(len, groups))))
        table = self._table({name for group in groups for specs in group for name in specs}, names)

        def one(specs: Mapping[str, Any]) -> dict[str, Entry]:
            at = f"{prefix}layers.{next(index)}."
            return {name: replace(table[name], name=at + table[name].name) for name in specs}

        return [[one(specs) for specs in group] for group in groups]

    def _table(self, weights: Collection[str], names: Collection[str]) -> Mapping[str, Entry]:
        """Returns the layout of `layer` that these tensors have."""
        tables = (self.layer, *self.layouts)
        stored = [{table[name].name for name in weights} for table in tables]  # names of tensors, by layout
        marks = [names_ - set.union(set(), *(other for other in stored if other != names_)) for names_ in stored]
        if not names or not any(marks):
            return self.layer
        kinds = {re.sub(r"\.\d+\.", ".{}.", name.partition(".layers.")[2].partition(".")[2]) for name in names}
        matches = [i for i, mark in enumerate(marks) if mark & kinds]
        if len(matches) != 1:
            shown = " or ".join(min(mark) for mark in marks)
            raise ValueError(f"got tensors of {'several' if matches else 'none'} of these layouts, expected one: {shown}")
        return tables[matches[0]]

    def spare(self, specs: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns names of tensors that no weight is read from; some files repeat a tied table."""
        return tuple(entry.name for name, entry in self.outside.items() if name not in specs)

    def _check_layer_types(self, keys: Keys, num_layers: int) -> None:
        kinds = keys.value(list[str] | None, "layer_types", None, "a list of names")
        if kinds is None:
            return
        if unknown := sorted({*kinds} - {*self.layer_types}):
            raise ValueError(
                f"{keys.where}: layer_types {quoted(unknown)} are not implemented, "
                f"expected only {', '.join(map(repr, self.layer_types))}"
            )
        if len(kinds) != num_layers:
            raise ValueError(f"{keys.where}: got {len(kinds)} layer_types for {num_layers} layers")


def check_layers(where: str, num_layers: int, names: Collection[str]) -> None:
    """Raises ValueError if a config states more layers than its tensors have: building them could take hours.

    Args:
      names: names of the tensors; without layers among them, the limit is MOST_LAYERS.
    """
    in_files = len({match[1] for name in names if (match := _LAYER.search(name))})
    if num_layers > (in_files or MOST_LAYERS):
        expected = f"{in_files}, as its tensors have" if in_files else f"at most {MOST_LAYERS:,}"
        raise ValueError(f"{where}: got {num_layers:,} layers, expected {expected}")


def check_heads(where: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises ValueError where heads cannot share keys and values evenly, or cannot be rotated."""
    if heads % kv_heads:
        raise ValueError(f"{where}: got {heads} heads over {kv_heads} key/value heads, expected a multiple")
    if head_dim % 2:
        raise ValueError(f"{where}: got head_dim {head_dim}, expected an even number (its halves are rotated)")
