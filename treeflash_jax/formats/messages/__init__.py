"""Formats in which models write their answers: thoughts, calls of functions and text. Each format has a file.

Formats do not depend on a server's protocol: answers are parsed to parts, and constrained by structural tags. To add one,
list a subclass of `message_format.MessageFormat` in FORMATS, or insert it in a program: `FORMATS.insert(0, Mine)`.
"""

from treeflash_jax.formats.messages.gemma import Gemma
from treeflash_jax.formats.messages.harmony import Harmony
from treeflash_jax.formats.messages.message_format import MessageFormat
from treeflash_jax.formats.messages.tagged_messages import TaggedMessages
from treeflash_jax.formats.tokenizer import Tokenizer

FORMATS: list[type[MessageFormat]] = [Harmony, Gemma, TaggedMessages]  # the first that fits is used; the last fits all


def find_format(tokenizer: Tokenizer) -> MessageFormat:
    """Returns the format in which the tokenizer's model writes its answers, which its chat template determines."""
    template = str(tokenizer.inner.chat_template or "")
    return next(kind for kind in FORMATS if kind.fits(template))(tokenizer, template)
