"""Suggestions for unknown names: words of other libraries, and typing mistakes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# What users of transformers, vLLM, OpenAI's API and llama.cpp type, by our names. The first name that is known counts.
ALIASES = {
    "max_new_tokens": "max_tokens max_length max_completion_tokens max_output_tokens n_predict num_tokens new_tokens",
    "samples": "n num_return_sequences num_samples n_samples best_of",
    "temperature": "do_sample sample temp",
    "verifier": "model model_id model_name model_name_or_path pretrained_model_name_or_path target_model base_model m",
    "pair": "model verifier drafter",
    "shape": "model verifier",
    "drafter": "draft draft_model assistant_model speculative_model",
    "nodes": "tree_size num_nodes num_draft_tokens num_speculative_tokens num_assistant_tokens draft_tokens",
    "block_size": "gamma draft_length block",
    "acceptance": "rule verification",
    "stop": "stop_strings stop_sequences stop_words",
    "stop_ids": "eos_token_id eos_token_ids stop_token_ids eos",
    "log_probs": "logprobs logprob output_scores return_logprobs",
    "seed": "random_seed rng generator",
    "dtype": "torch_dtype data_type precision",
    "quantize": "quantization load_in_8bit load_in_4bit quant",
    "mesh": "tensor_parallel_size tensor_parallel device_map devices tp",
    "prompt": "p text input inputs",
    "chat": "message messages user question",
    "prompt_file": "file input_file prompts prompts_file",
    "out": "output output_file o",
}


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that an unknown one stands for or resembles, or None. Names have underscores, no hyphens."""
    known = list(known)
    for ours, theirs in ALIASES.items():
        if ours in known and name in theirs.split():
            return ours
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return close[0] if close else None


def suggesting(function: Function) -> Function:
    """Makes a function, or a class, answer unknown keyword arguments with a ValueError that suggests a known one."""
    if isinstance(function, type):
        function.__init__ = suggesting(function.__init__)
        return function
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                meant = suggestion(name, known)
                raise ValueError(f"got unknown argument {name!r}" + (f"; did you mean {meant}?" if meant else ""))
        return function(*args, **keywords)

    return checked
