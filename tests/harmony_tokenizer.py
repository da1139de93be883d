"""A tokenizer of bytes with special tokens and a chat template: those of harmony, or others."""

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treeflash_jax.formats.tokenizer import BYTES_OF, Tokenizer

NAMES = "<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|> <|constrain|>".split()
TEMPLATE = """{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}{#- tools: <|channel|>commentary -#}"""


def make(names: list[str] = NAMES, end: str = "<|return|>", template: str = TEMPLATE) -> Tokenizer:
    inner = Inner(models.BPE({character: byte for character, byte in BYTES_OF.items()}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end, additional_special_tokens=names)
    fast.chat_template = template
    return Tokenizer(fast)
