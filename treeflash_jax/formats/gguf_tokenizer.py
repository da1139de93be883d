"""The tokenizer of a GGUF file, rebuilt with Hugging Face's library.

Source: ggml-org/llama.cpp, src/llama-vocab.cpp (pre-tokenizers and their defaults).
"""

import json
from typing import Any

from treeflash_jax.core.checks import INT32
from treeflash_jax.core.error_text import warn
from treeflash_jax.formats.gguf_reader import File

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# Tokens with these texts end an answer, even if the file gives them another type.
_ENDS = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜>
    [e~[""".split()
)
_INSIDE = {  # ends that occur inside answers if the vocabulary has all others, too
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}, {"<|flush|>", "<|call|>"}),
    "</s>": ({"<|tool_response>"},),
}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3, _QWEN_2 = _WORDS.replace("DIGITS", "{1,3}"), _WORDS.replace("DIGITS", "")
_PRE = {  # pre-tokenizer for each value of tokenizer.ggml.pre
    "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3",
    "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2",
    "smollm": "smollm",
    "gpt-2": "gpt-2",
}  # fmt: skip


def tokenizer_arguments(file: File) -> dict[str, Any]:
    """Returns the arguments of `PreTrainedTokenizerFast` for a file's tokenizer; {} if it has none.

    Raises ValueError for a kind of tokenizer that is not implemented, and for a damaged vocabulary.
    """
    if not {"tokenizer.ggml.model", "tokenizer.ggml.tokens"} & file.metadata.keys():
        return {}
    settings: dict[str, Any] = {"tokenizer_object": _tokenizer(file)}  # checks the vocabulary for other settings
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = file.metadata["tokenizer.ggml.tokens"]
    settings |= {names[role]: tokens[i] for role, i in special_ids(file).items()}
    if "tokenizer.chat_template" in file.metadata:
        settings["chat_template"] = file.keys.value(str, "tokenizer.chat_template", None, "a text")
    return settings | {"clean_up_tokenization_spaces": False}


def tokenizer_files(file: File) -> dict[str, str]:
    """Returns the texts of tokenizer_config.json and tokenizer.json, by name; {} if the file has no tokenizer.

    Raises ValueError as `tokenizer_arguments` does.
    """
    settings = tokenizer_arguments(file)
    if not settings:
        return {}
    tokenizer_json = settings.pop("tokenizer_object").to_str()
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    return {"tokenizer_config.json": json.dumps(settings, indent=2) + "\n", "tokenizer.json": tokenizer_json}


def _tokenizer(file: File) -> Any:
    """Returns the `tokenizers.Tokenizer` of a file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    keys = file.keys
    says = "'gpt2' (byte-level BPE) or 'gemma4'"
    kind = keys.value(str, "tokenizer.ggml.model", None, says, choices=lambda: ("gpt2", "gemma4"))
    if kind == "gpt2":
        kind = _PRE[keys.value(str, "tokenizer.ggml.pre", None, f"one of {list(_PRE)}", choices=lambda: tuple(_PRE))]
    tokens = keys.value(list[str], "tokenizer.ggml.tokens", None, "the texts of the vocabulary")
    if "tokenizer.ggml.token_type" not in keys:
        warn(f"{keys.where}: got no tokenizer.ggml.token_type, by which control tokens such as <|im_end|> differ from text")
    kinds = keys.value(list[int], "tokenizer.ggml.token_type", [1] * len(tokens), "types from 0 to 6", least=0, most=6)
    pairs = keys.value(list[str], "tokenizer.ggml.merges", None, "pairs of tokens like 'a b'", min_length=1)
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in pairs]
    has_merged = all(len(merge) == 2 and {*merge, "".join(merge)} <= vocab.keys() for merge in merges)
    if len(vocab) != len(tokens) or len(kinds) != len(tokens) or not has_merged:
        raise ValueError(f"{keys.where}: got a damaged vocabulary (repeated tokens, or lists that do not match)")
    keys.check_only({"tokenizer.ggml.add_eos_token": (False,)})
    if kind == "gemma4":
        unknown_id = special_ids(file).get("unknown")
        unknown = None if unknown_id is None else tokens[unknown_id]
        tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.normalizer = normalizers.Replace(" ", "▁")  # this kind has no pre-tokenizer
    else:
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind == "llama3"))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.pre_tokenizer, tokenizer.normalizer = _pre_tokenizer(kind)
    ends = end_ids(file)
    tokenizer.add_tokens([
        AddedToken(token, special=number == _CONTROL or i in ends, normalized=False)
        for i, (token, number) in enumerate(zip(tokens, kinds, strict=True))
        if number in (_CONTROL, _USER_DEFINED) or i in ends
    ])  # fmt: skip
    bos = special_ids(file).get("bos")
    if keys.truth("tokenizer.ggml.add_bos_token", kind in ("llama3", "gemma4")) and bos is not None:
        template = processors.TemplateProcessing(single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)])
        tokenizer.post_processor = template
    return tokenizer


def special_ids(file: File) -> dict[str, int]:
    """Returns a file's ids of the "bos", "eos", "unknown" and "padding" tokens. Raises ValueError for bad ids."""
    keys = file.keys
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    named = {role: f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "unknown", "padding")}
    most = len(tokens) - 1 if tokens else INT32
    return {role: keys.integer(key, least=0, most=most) for role, key in named.items() if key in keys}


def end_ids(file: File) -> list[int]:
    """Returns the ids that end an answer: ids that the metadata names as ends, and ids of tokens with known texts."""
    named = [file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    tokens = file.keys.value(list[Any] | None, "tokenizer.ggml.tokens", None, "a list") or []
    ends = {token: i for i, token in enumerate(tokens) if isinstance(token, str) and token in _ENDS}
    inside = {token for token, end_sets in _INSIDE.items() if any(end_set <= ends.keys() for end_set in end_sets)}
    return [i for i in named if i is not None] + [i for token, i in ends.items() if token not in inside]


def _pre_tokenizer(kind: str) -> tuple[Any, Any]:
    """Returns a pre-tokenizer and the normaliser of its input; None if there is no normaliser."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if kind in ("gpt-2", "smollm"):
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        return (words if kind == "gpt-2" else pre_tokenizers.Sequence([digits, words])), None
    pattern = _LLAMA_3 if kind == "llama3" else _QWEN_2
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, letters]), normalizers.NFC() if kind == "qwen2" else None
