"""A tokenizer of bytes with Gemma's tokens, and a chat template with its turns and its empty channel of thoughts."""

import harmony_tokenizer

from treeflash_jax.formats.tokenizer import Tokenizer

NAMES = '<|turn> <turn|> <|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <|think|>'
TEMPLATE = """{%- for message in messages %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content }}<turn|>
{% endfor -%}{%- if add_generation_prompt %}<|turn>model
{% if not enable_thinking %}<|channel>thought
<channel|>{% endif %}{% endif -%}{#- tools: <|tool_call> -#}"""


def make() -> Tokenizer:
    return harmony_tokenizer.make(NAMES.split(), "<turn|>", TEMPLATE)
