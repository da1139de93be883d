"""A method of quantised files and a form of messages that a program adds, without an edit to the package."""

import harmony_tokenizer
import numpy as np
import quantized_files
from conftest import FOLDERS
from model_files import assert_same, change_json
from refusals import refused

from treeflash_jax.formats import messages, model_files
from treeflash_jax.formats.grouped_tensors import ComputedTensor, GroupedTensor
from treeflash_jax.formats.messages import tags
from treeflash_jax.formats.messages.message_format import Content, Demands, MessageFormat, Thought, TokenReader
from treeflash_jax.formats.quant_methods import METHODS
from treeflash_jax.formats.quant_methods.quant_method import QuantMethod, join_modules

NOTE = ("<|note|>", "<|/note|>")


class ByChannel(QuantMethod):
    """Whole numbers of 8 bits with a step per output."""

    name = "by-channel"

    def check(self, config):
        config.check_only({"bits": (8,)})

    def join(self, config, tensors):
        return join_modules(tensors, "codes", ("step",), self.join_module)

    def join_module(self, module):
        codes = module.checked_tensor("codes", ("I8",), (None, None))
        outputs, inputs = codes.get_shape()
        step = module.checked_tensor("step", ("F32",), (outputs,))
        scales = ComputedTensor((outputs, 1), "F32", lambda rows: step[rows[0]][:, None])
        return GroupedTensor(code_book="int8", group=inputs, codes=codes, scales=scales)


def write(rng, outputs, inputs):
    codes = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    step = rng.uniform(1e-4, 1e-3, outputs).astype(np.float32)
    return {"codes": codes, "step": step}, codes.astype(np.float32) * step[:, None]


def test_a_method_of_quantised_files(monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, "by-channel", ByChannel())
    monkeypatch.setitem(quantized_files.FORMATS, "by-channel", ({"quant_method": "by-channel", "bits": 8}, write))
    folder, dense = quantized_files.make_folders(tmp_path, FOLDERS["verifier"], "by-channel")
    assert_same(model_files.load_verifier(folder), model_files.load_verifier(dense))
    change_json(folder / "config.json", quantization_config={"quant_method": "by-channel", "bits": 4})
    refused(lambda: model_files.load_verifier(folder), "bits", "expected 8")


class Notes(MessageFormat):
    """Thoughts anywhere in an answer, each between two special tokens."""

    stop_names = ("<|over|>", "<|missing|>")

    @classmethod
    def fits(cls, template):
        return NOTE[0] in template

    def reader(self, prompt_ids, functions, stop, *, has_thoughts):
        return NoteReader(self.tokenizer, NOTE, stop)

    def answer_tag(self, prompt_ids, demands):
        return tags.sequence(tags.const(NOTE[0]), tags.any_text(), tags.const(NOTE[1]), demands.content)


class NoteReader(TokenReader):
    kind = Content

    def _read(self, id):
        if id not in self._markers:
            return self._extend_text(id)
        parts = self._end()
        self.kind = Thought if self._markers[id] == NOTE[0] else Content
        self._begin_text()
        return parts

    def _end(self):
        return self._new_parts(self._text.text)

    def _new_parts(self, text):
        return self._send_new(text, self.kind)


def test_a_form_of_messages(monkeypatch):
    monkeypatch.setattr(messages, "FORMATS", [*messages.FORMATS])
    messages.FORMATS.insert(0, Notes)
    tokenizer = harmony_tokenizer.make([*NOTE, "<|over|>"], "<|over|>", "{#- <|note|> -#}")
    form = messages.find_format(tokenizer)
    assert isinstance(form, Notes) and [*form.stop_ids] == tokenizer.encode("<|over|>")
    ids = tokenizer.encode("<|note|>Hm, é.<|/note|>Yes!<|note|>Oh")
    for stop, answer in (("no",), "Yes!"), (("s!",), "Ye"):
        reader = form.reader([], [], stop, has_thoughts=True)
        parts = reader.feed(ids[:5], "") + reader.feed(ids[5:], "", is_last=True)
        texts = {kind: "".join(part.text for part in parts if type(part) is kind) for kind in (Thought, Content)}
        assert texts == {Thought: "Hm, é.Oh", Content: answer}
    assert form.answer_tag([], Demands(content=tags.const("Yes")))["elements"][-1] == tags.const("Yes")
