"""Settings of verifiers and drafters: frozen dataclasses, read from a Hugging Face `config.json`.

Every key of a config file is used, known to be inert at inference, or refused: a value that would change the numbers
and is not implemented must never be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from treeflash_jax.checks import INT32, Bounds, fit, quoted

HeadName = str
MOST_NODES = 4096  # of a draft tree

# Published names of the correction in `treeflash_config.ar_approximation`; "linear" is the paper's ablation.
HEAD_OF_FILE: dict[str | None, HeadName] = {None: "marginal", "swiglu": "mlp", "linear": "linear", "lowrank": "lowrank"}
FILE_OF_HEAD: dict[str, str | None] = {head: name for name, head in HEAD_OF_FILE.items()}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding; `llama3` slows low frequencies by `factor`, `longrope` each by a divisor of its own."""

    theta: float = 10_000.0
    kind: Literal["default", "llama3", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and numerics of a stack of decoder layers (Qwen3 dense, Llama, or the layers of a DFlash drafter).

    Example:
      >>> config = ModelConfig.from_hf(json.loads(Path("Qwen3-4B/config.json").read_text()))
      >>> config.num_layers
      36
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    max_positions: int = 2048
    tie_embeddings: bool = False
    qk_norm: bool = True
    model_type: str = "qwen3"
    eos_token_ids: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Sizes of the runs of identical layers. All layers are alike in the models supported today: one run."""
        return (self.num_layers,)

    @staticmethod
    def from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Reads a verifier's config.

        Raises:
          ValueError: an architecture, key or value that is not implemented, or a missing size.
        """
        if "dflash_config" in raw:
            raise ValueError(f"{where}: got a drafter's config (it has dflash_config), expected a verifier's")
        _refuse_unknown(raw, _MODEL_KEYS | _INERT_KEYS, where)
        return _model_config(raw, where)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A DFlash block drafter and the head on top of it.

    Attributes:
      layers: sizes of the drafter's own decoder layers.
      block_size: drafted block, anchor included; draft depths run 1 .. block_size - 1.
      mask_token_id: the token that fills the block's open slots.
      target_layer_ids: 0-based verifier layers whose output (residual stream) the drafter reads, in file order.
      num_target_layers: layers of the verifier this drafter was trained for.
      head: how a drafted token depends on the one before it.
      num_nodes: default budget of verified rows, root included (`treeflash_config.candidate_tokens`).
      drafter_temperature: default temperature of the draft distribution.
      sampled_above: rows of at least this temperature get a sampled tree where no builder is asked for, as measured for
        this pair; None: no row does.
    """

    kind: ClassVar[str] = "block"
    layers: ModelConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    head: HeadName = "marginal"
    num_nodes: int = 16
    drafter_temperature: float = 1.0
    sampled_above: float | None = None

    @property
    def num_depths(self) -> int:
        return self.block_size - 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.target_layer_ids

    @staticmethod
    def from_hf(raw: Mapping[str, Any], where: str = "config.json") -> DrafterConfig:
        """Reads a drafter's config in either published dialect (DFlash, TreeFlash).

        Raises:
          ValueError: not a drafter's config, or a key or value that is not implemented.
        """
        if "dflash_config" not in raw:
            raise ValueError(f"{where}: got no dflash_config, expected a DFlash or TreeFlash drafter's config")
        _refuse_unknown(raw, _MODEL_KEYS | _INERT_KEYS | _DRAFTER_KEYS, where)
        dflash = _object(raw, "dflash_config", where)
        treeflash = _object(raw, "treeflash_config", where)
        dflash_at, treeflash_at = f"{where}: dflash_config", f"{where}: treeflash_config"
        _refuse_unknown(dflash, {"mask_token_id", "target_layer_ids", "block_size"}, dflash_at)
        _refuse_unknown(treeflash, _TREEFLASH_KEYS, treeflash_at)
        layers = _model_config(raw, where)
        num_target_layers = _int(raw, "num_target_layers", where)
        head = treeflash.get("ar_approximation")
        if not isinstance(head, str | None) or head not in HEAD_OF_FILE:
            raise ValueError(f"{treeflash_at}: got ar_approximation {quoted(head)}, expected one of {list(HEAD_OF_FILE)}")
        ids = dflash.get("target_layer_ids")
        if ids is None:
            ids = default_target_layers(num_target_layers, layers.num_layers)
        return DrafterConfig(
            layers=layers,
            block_size=_int({**dflash, **raw}, "block_size", where, least=2, most=MOST_NODES),
            mask_token_id=_int(dflash, "mask_token_id", dflash_at, least=0),
            target_layer_ids=_ids(ids, "target_layer_ids", dflash_at, INT32),
            num_target_layers=num_target_layers,
            head=HEAD_OF_FILE[head],
            num_nodes=_int(treeflash, "candidate_tokens", treeflash_at, most=MOST_NODES, default=16),
            drafter_temperature=_float(treeflash, "drafter_temperature", treeflash_at, default=1.0),
            sampled_above=_float(treeflash, "sampled_above", treeflash_at) if "sampled_above" in treeflash else None,
        )

    def check_fits(self, verifier: ModelConfig) -> None:
        """Raises ValueError where this drafter was made for another verifier."""

        def expect(what: str, got: Any, expected: Any) -> None:
            if got != expected:
                raise ValueError(
                    f"drafter does not fit the verifier: {what} is {got} in the drafter and {expected} in the verifier; "
                    "load the drafter that was trained for this verifier"
                )

        expect("hidden size", self.layers.hidden_size, verifier.hidden_size)
        expect("number of verifier layers", self.num_target_layers, verifier.num_layers)
        expect("vocabulary size", self.layers.vocab_size, verifier.vocab_size)
        outside = [i for i in self.target_layer_ids if not 0 <= i < verifier.num_layers]
        if outside:
            raise ValueError(
                f"drafter does not fit the verifier: it reads verifier layers {outside}, "
                f"but the verifier has layers 0 to {verifier.num_layers - 1}"
            )
        if not 0 <= self.mask_token_id < verifier.vocab_size:
            raise ValueError(
                f"drafter does not fit the verifier: mask id {self.mask_token_id} lies outside "
                f"the verifier's vocabulary of {verifier.vocab_size}"
            )


def default_target_layers(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Verifier layers a drafter reads where its config names none. Source: DFlash (arXiv 2602.06036) section 4."""
    if num_features == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_features - 1)
    return tuple(round(1 + i * step) for i in range(num_features))


_MODEL_KEYS = frozenset(
    """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings tie_word_embeddings
    eos_token_id hidden_act attention_bias mlp_bias use_sliding_window layer_types pretraining_tp
    partial_rotary_factor rope_interleaved""".split()
)
_ROPE_KEYS = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"),
}
_TREEFLASH_KEYS = frozenset("candidate_tokens ar_approximation drafter_temperature sampled_above".split())
_DRAFTER_KEYS = frozenset("dflash_config treeflash_config block_size num_target_layers auto_map".split())
# No influence on the numbers of a forward pass (training, bookkeeping, generation defaults that are read elsewhere).
# `sliding_window` and `max_window_layers` act only through `use_sliding_window` and `layer_types`, which are checked.
_INERT_KEYS = frozenset(
    """architectures attention_dropout bos_token_id pad_token_id sep_token_id decoder_start_token_id cls_token_id
    dtype torch_dtype initializer_range max_window_layers sliding_window transformers_version use_cache _name_or_path
    _attn_implementation _attn_implementation_autoset return_dict output_hidden_states output_attentions torchscript
    chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type task_specific_params tokenizer_class
    prefix finetuning_task is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder use_bfloat16
    name_or_path unsloth_version unsloth_fixed is_llama_config transformers.js_config
    max_sequence_length""".split()
)


def _refuse_unknown(raw: Mapping[str, Any], known: frozenset[str] | set[str], where: str) -> None:
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise ValueError(
            f"{where}: unknown key {quoted(unknown[0])} might change the numbers; expected {sorted(known)[:6]} ..."
        )


def _value(kind: Any, raw: Mapping[str, Any], key: str, where: str, default: Any, says: str, **bounds: float) -> Any:
    return fit(kind, raw.get(key, default), f"{key} =", Bounds(says=says, **bounds), where)


def _int(
    raw: Mapping[str, Any], key: str, where: str, *, least: int = 1, most: int = INT32, default: int | None = None
) -> int:
    says = f"a whole number of at least {least}" + ("" if most == INT32 else f" and at most {most}")
    return _value(int, raw, key, where, default, says, least=least, most=most)


def _float(raw: Mapping[str, Any], key: str, where: str, *, default: float | None = None) -> float:
    return _value(float, raw, key, where, default, "a number above 0", above=0)


def _bool(raw: Mapping[str, Any], key: str, where: str) -> bool:
    return _value(bool, raw, key, where, False, "true or false")


def _object(raw: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    if raw.get(key) is None and key != "dflash_config":
        return {}
    return _value(dict[str, Any], raw, key, where, None, "an object")


def _ids(value: Any, key: str, where: str, most: int) -> tuple[int, ...]:
    says = f"ids (whole numbers from 0 to {most})"
    ids = value if isinstance(value, list | tuple) else [value]
    return fit(Sequence[int], ids, f"{key} =", Bounds(least=0, most=most, nonempty=True, says=says), where)


def _model_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    model_type = raw.get("model_type")
    if model_type not in ("qwen3", "llama"):
        raise ValueError(f"{where}: got model_type {quoted(model_type)}, expected 'qwen3' (dense) or 'llama'")

    def only(key: str, *accepted: Any) -> None:
        if raw.get(key, accepted[0]) not in accepted:
            raise ValueError(f"{where}: {key} = {quoted(raw[key])} is not implemented, expected {accepted[0]!r}")

    only("hidden_act", "silu", "swish")
    only("attention_bias", False, None)
    only("mlp_bias", False, None)
    only("use_sliding_window", False, None)
    only("pretraining_tp", 1, None)
    only("partial_rotary_factor", 1.0, None)
    only("rope_interleaved", False, None)
    layer_types = _value(list[str] | None, raw, "layer_types", where, None, "a list of names")
    if kinds := sorted({*(layer_types or ())} - {"full_attention"}):
        raise ValueError(f"{where}: layer_types {quoted(kinds)} are not implemented, expected only 'full_attention'")

    hidden_size = _int(raw, "hidden_size", where)
    num_layers = _int(raw, "num_hidden_layers", where)
    num_heads = _int(raw, "num_attention_heads", where)
    num_kv_heads = num_heads if raw.get("num_key_value_heads") is None else _int(raw, "num_key_value_heads", where)
    if num_heads % num_kv_heads:
        raise ValueError(f"{where}: got {num_heads} heads over {num_kv_heads} key/value heads, expected a multiple")
    if layer_types is not None and len(layer_types) != num_layers:
        raise ValueError(f"{where}: got {len(layer_types)} layer_types for {num_layers} layers")
    rope, head_dim = _rope(raw, where), _head_dim(raw, model_type, hidden_size, num_heads, where)
    if rope.kind == "longrope" and len(rope.divisors) != head_dim // 2:
        raise ValueError(f"{where}: got {len(rope.divisors)} divisors in short_factor, expected {head_dim // 2}")
    vocab_size = _int(raw, "vocab_size", where)
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_int(raw, "intermediate_size", where),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_float(raw, "rms_norm_eps", where, default=1e-6),
        rope=rope,
        max_positions=_int(raw, "max_position_embeddings", where),
        tie_embeddings=_bool(raw, "tie_word_embeddings", where),
        qk_norm=model_type == "qwen3",
        model_type=model_type,
        eos_token_ids=token_ids(raw.get("eos_token_id"), where, vocab_size),
    )


def _head_dim(raw: Mapping[str, Any], model_type: str, hidden_size: int, num_heads: int, where: str) -> int:
    """Explicit, or what the architecture defaults to."""
    if raw.get("head_dim") is None and model_type == "llama" and hidden_size % num_heads:
        raise ValueError(f"{where}: got hidden_size {hidden_size} over {num_heads} heads, expected a multiple")
    default = 128 if model_type == "qwen3" else hidden_size // num_heads
    head_dim = default if raw.get("head_dim") is None else _int(raw, "head_dim", where)
    if head_dim % 2:
        raise ValueError(f"{where}: got head_dim {head_dim}, expected an even number (its halves are rotated)")
    return head_dim


def token_ids(value: int | list[int] | None, where: str, vocab_size: int) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as Hugging Face files spell stop ids."""
    return () if value is None or value == [] else _ids(value, "eos_token_id", where, vocab_size - 1)


def _rope(raw: Mapping[str, Any], where: str) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before)."""
    old, new = (_object(raw, key, where) for key in ("rope_scaling", "rope_parameters"))
    if old and new and old != new:
        raise ValueError(f"{where}: got rope_scaling beside other rope_parameters, expected one of them")
    settings = old | new
    if settings.get("partial_rotary_factor") == 1.0:
        del settings["partial_rotary_factor"]
    thetas = {_float(source, "rope_theta", where) for source in (raw, settings) if source.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise ValueError(f"{where}: got rope_theta both {' and '.join(map(str, sorted(thetas)))}, expected one")
    theta = thetas.pop() if thetas else 10_000.0
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ValueError(f"{where}: got rope type {quoted(kind)}, expected one of {list(_ROPE_KEYS)}")
    _refuse_unknown(
        settings, {"rope_type", "type", "rope_theta", *_ROPE_KEYS[kind]}, f"{where}: rope settings of type {kind!r}"
    )
    if kind == "default":
        return Rope(theta=theta)
    if kind == "longrope":
        return Rope(theta=theta, kind="longrope", divisors=_rope_divisors(settings, where))
    low, high = _float(settings, "low_freq_factor", where), _float(settings, "high_freq_factor", where)
    if low >= high:
        raise ValueError(
            f"{where}: got low_freq_factor {low} and high_freq_factor {high}, expected the low one to be lower"
        )
    return Rope(
        theta=theta,
        kind="llama3",
        factor=_float(settings, "factor", where),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_int(settings, "original_max_position_embeddings", where),
    )


def _rope_divisors(settings: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """Of `longrope` where it is the same at every length, as GGUF files have it."""
    divisors = _value(tuple[float, ...], settings, "short_factor", where, None, "a list of numbers above 0", above=0)
    if settings.get("long_factor") != settings["short_factor"] or settings.get("attention_factor") != 1.0:
        raise ValueError(
            f"{where}: rope type 'longrope' is implemented only with long_factor = short_factor and attention_factor 1.0"
        )
    return divisors
