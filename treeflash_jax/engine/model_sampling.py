"""Sampling as the verifier's own generation_config.json recommends it: the setting `sampling="model"`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeflash_jax.core.checks import clipped
from treeflash_jax.engine.generate_config import GenerateConfig

TAKEN = "temperature top_k top_p min_p repetition_penalty".split()
# Keys without an effect on the distribution of a token; lengths and stop ids have settings of their own.
INERT = """do_sample bos_token_id eos_token_id pad_token_id decoder_start_token_id max_length max_new_tokens
    transformers_version use_cache cache_implementation num_return_sequences output_scores output_logits
    output_attentions output_hidden_states return_dict_in_generate trust_remote_code""".split()


def take_recommended(config: GenerateConfig, recommended: Mapping[str, Any]) -> tuple[GenerateConfig, str]:
    """Returns settings with the recommended values in place of defaults, and a line that tells which.

    Args:
      recommended: content of generation_config.json. With `do_sample` and without a temperature, that is 1, as in
        transformers.

    Raises ValueError for values outside the limits of the settings.
    """
    values = {name: recommended[name] for name in TAKEN if recommended.get(name) is not None}
    if recommended.get("do_sample"):
        values.setdefault("temperature", 1.0)
    if recommended.get("do_sample") is False:
        values["temperature"] = 0.0
    values = {name: value for name, value in values.items() if getattr(config, name) == getattr(GenerateConfig, name)}
    try:
        config = replace(config, **values)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None
    note = ", ".join(f"{name} {value}" for name, value in values.items()) or "nothing"
    others = [name for name in recommended if not name.startswith("_") and name not in (*TAKEN, *INERT)]
    # 0, 1 and empty values turn every setting of transformers off.
    others = [name for name in others if recommended[name] not in (None, False, 0, 1, "", [], {})]
    ignored = f"; not implemented and ignored: {', '.join(others)}" if others else ""
    return config, clipped(f"sampling 'model' takes {note} from generation_config.json{ignored}")
