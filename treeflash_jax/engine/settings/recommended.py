"""Settings of a call, with those that the model's files recommend (generation_config.json) for `sampling="model"`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from treeflash_jax.core.checks import coerce
from treeflash_jax.core.error_text import clipped, warn
from treeflash_jax.core.settings import changed
from treeflash_jax.engine.settings.generate_config import GenerateConfig, with_settings

# Keys of generation_config.json: first the settings that `sampling="model"` takes, then keys that do not change the
# distribution of a token. Lengths and stop ids are separate settings.
RECOMMENDED_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
IGNORED_KEYS = """do_sample bos_token_id eos_token_id pad_token_id decoder_start_token_id max_length max_new_tokens
    transformers_version use_cache cache_implementation num_return_sequences output_scores output_logits
    output_attentions output_hidden_states return_dict_in_generate trust_remote_code""".split()


def call_settings(
    config: GenerateConfig | None, keywords: Mapping[str, Any], recommended: Mapping[str, Any], name: str
) -> GenerateConfig:
    """Returns the settings of a call: those given by name, of `config`, and with `sampling="model"` of the model.

    Args:
      name: name of the model, for the line that reports its settings.

    Raises UnknownSetting, and ValueError for wrong values.
    """
    coerce(GenerateConfig | None, config, "config", says="a GenerateConfig; settings are given by name")
    config = with_settings(config, keywords)
    if config.sampling == "model":
        config, note = take_recommended(config, recommended, keywords)
        warn(f"{name or 'the model'}: {note}")  # chats and servers come here for every answer
    return config


def take_recommended(
    config: GenerateConfig, recommended: Mapping[str, Any], keywords: Collection[str] = ()
) -> tuple[GenerateConfig, str]:
    """Returns settings with the model's own values in place of defaults (`sampling="model"`), and a line that reports them.

    Args:
      recommended: content of a generation_config.json. As in transformers, its temperature applies only if `do_sample` is
        true, and is then 1 if it is absent.
      keywords: names of the settings that the call gives. They stay as they are, even if they equal the defaults.

    Raises ValueError for values outside the limits of the settings.
    """
    values = {name: recommended[name] for name in RECOMMENDED_SETTINGS if recommended.get(name) is not None}
    if recommended.get("do_sample"):
        values.setdefault("temperature", 1.0)
    else:
        values.pop("temperature", None)
    values = {name: value for name, value in values.items() if name not in {*keywords, *changed(config)}}
    try:
        config = replace(config, **values)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None
    note = ", ".join(f"{name} {value}" for name, value in values.items()) or "nothing"
    unsupported = []
    for name, value in recommended.items():
        is_known = name.startswith("_") or name in (*RECOMMENDED_SETTINGS, *IGNORED_KEYS)
        if not is_known and value not in (None, False, 0, 1, "", [], {}):  # in transformers, these turn a setting off
            unsupported.append(name)
    ignored = f"; not implemented and ignored: {', '.join(unsupported)}" if unsupported else ""
    return config, clipped(f"sampling 'model' takes {note} from generation_config.json{ignored}")
