"""EAGLE-3 drafters, in the forms in which they are published.

    eagle3       layer under "midlayer."; EAGLE repository, AngelSlim, SpecForge
    speculators  layer under "layers.0.", sizes in `transformer_layer_config`; new files have this form
    deepspec     layer under "layers.0.", sizes beside `ttt_length`

The forms differ in the meaning of layer ids and of `norm_output`. Here, ids are outputs of layers; in speculators files, an
id is the input of the layer with this number. If no ids are given, inputs 2, L // 2 and L - 3 are read. In speculators
files, `norm_output` means that the next step reads the normalised output. In SpecForge's files, it means that the
vocabulary table does, which it always does.

Source: SafeAILab/EAGLE, Tencent/AngelSlim, sgl-project/SpecForge, vllm-project/speculators, deepseek-ai/DeepSpec.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeflash_jax.core.checks import INT32
from treeflash_jax.core.parameters import Entry
from treeflash_jax.drafters.eagle3_drafter import Eagle3Drafter
from treeflash_jax.formats import architectures, tensor_files
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.architectures.dense import LINEAR
from treeflash_jax.formats.dialects import speculators
from treeflash_jax.formats.dialects.dialect import OUR_FIELDS, OUR_KEY, Dialect, read_our_fields, write_our_fields
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.models.config import ModelConfig

OUTSIDE = {
    "fc": Entry("fc.weight", **LINEAR),
    "norm": Entry("norm.weight"),
    "unembed": Entry("lm_head.weight", order=(0, 1)),
    "embed": Entry("embed_tokens.weight", order=(0, 1)),
    "offsets": Entry("d2t"),
    "input_norm": Entry("input_norm.weight"),
}
OPTIONS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
INERT = ("embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init")
_STATED_FIELDS = (*OUR_FIELDS, "thinking")
_MODEL_TYPES = ("llama", "qwen3")  # model types that the layer may have


class Eagle3(Dialect):
    """Files of the EAGLE repository, AngelSlim and SpecForge. The other dialects derive from this class."""

    name = "eagle3"
    part = "drafter"
    kind = "eagle3"
    marks: tuple[str, ...] = ("draft_vocab_size",)
    prefix = "midlayer."
    layer_type: str | None = "llama"  # model_type of the layer if files have none; None: such files are refused
    ids_key = "eagle_aux_hidden_state_layer_ids"
    ids_are_inputs = False
    is_nested = False  # whether the layer's sizes are in an object inside config.json
    norm_is_optional = False  # whether `norm_output` says that the next step reads the normalised output
    known: tuple[str, ...] = (  # accepted keys besides the layer's
        *"draft_vocab_size eagle_config target_model_type target_hidden_size num_target_layers auto_map".split(), *OPTIONS
    )  # fmt: skip

    def read_config(self, path: Path, keys: Keys) -> Eagle3Drafter:
        folder = path if path.is_dir() else path.parent
        if (folder / "pytorch_model.bin").exists() and not any(folder.glob("model*.safetensors*")):  # could run code
            raise ValueError(
                f"{folder}: got pytorch_model.bin, expected model.safetensors: convert it with safetensors.torch.save_file"
            )
        layers = self._layers(keys)
        target = keys.integer("target_hidden_size") if "target_hidden_size" in keys else layers.hidden_size
        draft_vocab_size = keys.integer("draft_vocab_size", layers.vocab_size, most=layers.vocab_size)
        options = {name: keys.truth(name, False) for name in OPTIONS if name != "norm_output" or self.norm_is_optional}
        if options["fc_norm"] and options["norm_before_fc"]:
            raise ValueError(f"{keys.where}: got fc_norm and norm_before_fc, expected one of them")
        if not self.norm_is_optional:
            keys.check_only({"norm_output": (True, None)})
        inside = keys.table("eagle_config")
        inside.check_known({self.ids_key, "use_aux_hidden_state"})
        inside.check_only({"use_aux_hidden_state": (True, None)})
        ids = None
        if self.ids_key in inside or self.ids_key in keys:
            ids = (inside if self.ids_key in inside else keys).ids(self.ids_key, INT32)
        is_output = not self.ids_are_inputs or ids is None or 0 not in ids  # input 0 is not the output of a layer
        keys.expect(is_output, self.ids_key, ids, "ids from 1: they are read as inputs of layers")
        taps = ids
        if ids is not None and self.ids_are_inputs:
            taps = tuple(i - 1 for i in ids)
        return Eagle3Drafter(
            layers=layers,
            target_hidden_size=target,
            taps=taps,
            num_taps=3 if ids is None else len(ids),
            draft_vocab_size=draft_vocab_size,
            own_embedding=target != layers.hidden_size or "embed_tokens.weight" in tensor_files.names(folder),
            verifier=speculators.read_verifier(keys),
            **options,
            **read_our_fields(keys, _STATED_FIELDS),
        )

    def _layers(self, keys: Keys) -> ModelConfig:
        """Returns the sizes of the layer. Raises ValueError for several layers, and for keys that are not implemented."""
        known = {*self.known, OUR_KEY}
        if self.is_nested:
            keys.check_known(known)
            inside = keys.table("transformer_layer_config", required=True)
            known = set()
        else:
            inside = Keys({"model_type": self.layer_type, **keys.raw}, keys.where)
        num_layers = inside.integer("num_hidden_layers", 1)
        keys.expect(num_layers == 1, "num_hidden_layers", num_layers, "1: only one layer is implemented")
        architecture = architectures.recognise(inside)
        known_types = " or ".join(map(repr, _MODEL_TYPES))
        keys.expect(architecture.model_type in _MODEL_TYPES, "model_type", architecture.model_type, known_types)
        sizes = Keys({"num_hidden_layers": 1, **inside.raw, "tie_word_embeddings": False}, inside.where)
        return architecture.read(sizes, known)

    def select(self, path: Path, config: Eagle3Drafter, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Leaves out buffers of training, and lists that contain all tokens."""
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("verifier_")}
        return speculators.without_lists(path, config, tensors)

    def entries(self, config: Eagle3Drafter, specs: Any, names: Collection[str]) -> dict[str, Any]:
        prefix = self.prefix
        for stored in ("midlayer.", "layers.0."):
            if any(name.startswith(stored) for name in names):
                prefix = stored
                break
        layer = {**ARCHITECTURES[config.layers.model_type].layer, "hidden_norm": Entry("hidden_norm.weight")}
        entries: dict[str, Any] = {name: OUTSIDE[name] for name in specs if name in OUTSIDE}
        entries["layer"] = {name: replace(layer[name], name=prefix + layer[name].name) for name in specs["layer"]}
        if "fc_norm" in specs:
            entries["fc_norm"] = [Entry(f"fc_norm.{i}.weight") for i in range(len(specs["fc_norm"]))]
        return entries


class SpeculatorsEagle3(Eagle3):
    """Files of vLLM's speculators library."""

    name = "speculators"
    marks = ("speculators_model_type", "transformer_layer_config")
    prefix = "layers.0."
    ids_are_inputs = is_nested = norm_is_optional = True
    known = (*speculators.KEYS, *OPTIONS, "eagle_aux_hidden_state_layer_ids", *INERT)

    def recognises(self, path: Path, keys: Keys) -> bool:
        return super().recognises(path, keys) and keys.raw["speculators_model_type"] == "eagle3"

    def to_hf(self, config: Eagle3Drafter) -> dict[str, Any]:
        architecture = ARCHITECTURES[config.layers.model_type]
        return {
            "architectures": ["Eagle3Speculator"],
            **speculators.describe("eagle3", config.num_depths, config.verifier),
            "transformer_layer_config": architecture.to_hf(config.layers),
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            **{name: getattr(config, name) for name in OPTIONS},
            "tie_word_embeddings": False,
            **({} if config.taps is None else {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps]}),
            **write_our_fields(config, _STATED_FIELDS),
        }


class DeepSpec(Eagle3):
    """Files of DeepSpec: drafters with embedding and vocabulary tables, which draft all tokens of the vocabulary."""

    name = "deepspec"
    marks = ("target_layer_ids", "ttt_length")
    prefix = "layers.0."
    layer_type = None
    ids_key = "target_layer_ids"
    known = tuple("target_layer_ids ttt_length target_hidden_size num_target_layers norm_before_residual auto_map".split())

    def read_config(self, path: Path, keys: Keys) -> Eagle3Drafter:
        keys.ids(self.ids_key, INT32)  # refuses null, for which DeepSpec has no rule
        return super().read_config(path, keys)
