"""Fields that requests of several protocols share, and fields that are refused."""

import functools
import inspect
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import create_model

from treeflash_jax.core.checks import expect
from treeflash_jax.engine.settings.generate_config import MAX_TOP_LOG_PROBS, GenerateConfig, number_types
from treeflash_jax.serve.protocols.constraint_fields import FAIL_FAST, ConstraintFields
from treeflash_jax.serve.server_call import MOST_SAMPLES

Ids = Annotated[list[int], FAIL_FAST]
Objects = Annotated[list[dict[str, Any]], FAIL_FAST]
B = TypeVar("B", bound="Body")
# Unsupported fields that would change an answer, each with the value that changes nothing.
UNSUPPORTED = {
    "add_generation_prompt": True, "allowed_token_ids": None, "audio": None, "background": False, "bad_words": [],
    "best_of": 1, "container": None, "context_management": [], "conversation": None, "dry_multiplier": 0,
    "dynatemp_range": 0, "function_call": "none", "functions": [], "include_stop_str_in_output": False,
    "length_penalty": 1, "logits_processors": [], "lora": [], "lora_path": None, "mcp_servers": [], "min_keep": 0,
    "mirostat": 0, "modalities": ["text"], "prompt_embeds": None, "prompt_logprobs": None,
    "skip_special_tokens": True, "stop_token_ids": [],
    "suffix": None, "tfs_z": 1, "top_n_sigma": -1, "truncate_prompt_tokens": None,
    "truncation": "disabled", "typical_p": 1, "use_beam_search": False, "web_search_options": None, "xtc_probability": 0,
}  # fmt: skip


class Body(ConstraintFields):
    """Fields of all requests. `with_numbers` adds a field for every setting that is a number of a request.

    Attributes:
      length_fields: names of the fields for the largest number of new tokens; the first one that is given applies.
      unsupported: refused fields that would change an answer, each with the value that changes nothing.
    """

    model: str | None = None
    stream: bool | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], FAIL_FAST] | None = None
    n: int | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    numbers: ClassVar[tuple[str, ...]] = ()
    length_fields: ClassVar[tuple[str, ...]] = ("max_tokens",)
    unsupported: ClassVar[dict[str, Any]] = UNSUPPORTED

    @property
    def length_field(self) -> str:
        """Name of the field with the largest number of new tokens."""
        for name in self.length_fields:
            if getattr(self, name) is not None:
                return name
        return self.length_fields[0]

    def sent_names(self) -> dict[str, str]:
        """Returns the names of fields that differ from our name of the setting, by our name."""
        names = {"max_new_tokens": self.length_field, "min_new_tokens": "min_tokens", "samples": "n"}
        return names | {name: field for field, (name, _) in self.constraints().items()}

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the client gives, by their names here. Raises ValueError for unsupported fields."""
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported:
                is_neutral = value is None or value == self.unsupported[name]
                expect(is_neutral, name, value, "none: it is not supported")
        expect((self.n or 1) <= MOST_SAMPLES, "n", self.n, f"at most {MOST_SAMPLES}")
        settings = {name: getattr(self, name) for name in self.numbers}
        if settings.get("top_k") == -1:  # vLLM's clients send -1 to turn it off
            settings["top_k"] = 0
        settings |= {
            "samples": self.n,
            "stop": self.stop,
            "logit_bias": self.logit_bias,
            "seed": None if self.seed is None else self.seed % 2**32,
            "min_new_tokens": self.min_tokens,
            "max_new_tokens": getattr(self, self.length_field),
            "stop_ids": () if self.ignore_eos else None,
        }
        given = {name: value for name, value in settings.items() if value is not None}
        return given | self.constraint()


def with_numbers(body: type[B], config: type[GenerateConfig]) -> type[B]:
    """Returns a class of bodies that also has a field for every setting that is a number of a request."""
    fields: dict[str, Any] = {}
    for name, number_type in number_types(config).items():
        if name not in body.model_fields:
            fields[name] = (number_type | None, None)
    body_kind = create_model(body.__name__, __base__=body, __doc__=body.__doc__, **fields)
    body_kind.numbers = tuple(number_types(config))
    return body_kind


def check_template(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the arguments of a chat template.

    Raises ValueError for arguments of the rendering function: a template sent with the request could run for ever.
    """
    arguments = dict(arguments or {})
    reserved = sorted(arguments.keys() & _renderer_arguments()) if arguments else []
    expect(not reserved, "chat_template_kwargs", reserved, "variables of the model's chat template only")
    return arguments


def top_settings(top: int, name: str) -> dict[str, Any]:
    """Returns the settings for log-probabilities with `top` likeliest tokens. Raises ValueError if the field is wrong."""
    expect(0 <= top <= MAX_TOP_LOG_PROBS, name, top, f"0 to {MAX_TOP_LOG_PROBS}")
    return {"log_probs": True, "top_log_probs": top}


@functools.cache
def _renderer_arguments() -> set[str]:
    """Returns the arguments of transformers' function that renders chats, except `documents`, which templates read."""
    from transformers import PreTrainedTokenizerBase  # imported late, after loading a tokenizer has set the log level

    return {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
