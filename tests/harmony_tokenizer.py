"""A tokenizer of bytes with harmony's tokens, and a chat template with its channels."""

from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treeflash_jax.formats.tokenizer import BYTES_OF, Tokenizer

NAMES = "<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|> <|constrain|>".split()
TEMPLATE = """{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}{#- tools: <|channel|>commentary -#}"""


def make() -> Tokenizer:
    inner = Inner(models.BPE({character: byte for character, byte in BYTES_OF.items()}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|return|>", additional_special_tokens=NAMES)
    fast.chat_template = TEMPLATE
    return Tokenizer(fast)
