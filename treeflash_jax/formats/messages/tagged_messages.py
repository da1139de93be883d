"""Thoughts and calls between tags, as in Qwen's templates: <think> and <tool_call>, around JSON or <function=NAME>."""

import json
from collections.abc import Sequence

from treeflash_jax.formats.messages import tags
from treeflash_jax.formats.messages.message_format import Demands, Function, MessageFormat, MessageReader, Tag
from treeflash_jax.formats.messages.tag_reader import BARE, CALL, THINK, TagReader
from treeflash_jax.formats.tokenizer import Tokenizer

LINES = {"type": "regex", "pattern": "\n{0,2}"}  # line breaks between thoughts and answer


class TaggedMessages(MessageFormat):
    """Answers with tags. Without tags in the template, an answer is plain text: this format fits every template."""

    def __init__(self, tokenizer: Tokenizer, template: str):
        super().__init__(tokenizer, template)
        self.writes_calls = CALL[0] in template
        self._has_thoughts = THINK[0] in template or THINK[1] in template

    @classmethod
    def fits(cls, template: str) -> bool:
        return True

    def reader(
        self, prompt_ids: Sequence[int], functions: Sequence[Function], stop: Sequence[str], *, has_thoughts: bool
    ) -> MessageReader:
        begins_in_thought = self._has_thoughts and self._begins_in_thought(prompt_ids)
        functions = functions if self.writes_calls else ()
        return TagReader(
            reads_thoughts=has_thoughts and self._has_thoughts, functions=functions, begins_in_thought=begins_in_thought
        )

    def answer_tag(self, prompt_ids: Sequence[int], demands: Demands) -> Tag:
        answer = tags.content_or_calls(demands, [*map(self._call_tag, demands.functions)], CALL[0], "\n")
        if self._begins_in_thought(prompt_ids):
            answer = tags.sequence(tags.any_text(THINK[1]), tags.const(THINK[1]), LINES, answer)
        return answer

    def _begins_in_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Returns whether the prompt has opened thoughts, as some chat templates do."""
        return self.tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False).rstrip().endswith(THINK[0])

    def _call_tag(self, function: Function) -> Tag:
        if BARE[0] in self.template:
            begin, end = f"{CALL[0]}\n{BARE[0]}{function.name}>\n", f"{BARE[1]}\n{CALL[1]}"
            content = tags.arguments(function, "qwen_xml_parameter")
        else:
            begin, end = f'{CALL[0]}\n{{"name": {json.dumps(function.name)}, "arguments": ', f"}}\n{CALL[1]}"
            content = tags.arguments(function)
        return {"type": "tag", "begin": begin, "content": content, "end": end}
