"""Bad GGUF files: one clear line for each, whatever is wrong with it."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_files import F32, write_small
from refusals import mistake, refused

from treeflash_jax.cli.commands import main
from treeflash_jax.formats import gguf_reader


@pytest.fixture
def small(tmp_path, own_cache) -> Path:
    """A good file, to be damaged."""
    return write_small(tmp_path / "small.gguf")


def cut(path: Path, end: int | None) -> Path:
    path.write_bytes(path.read_bytes()[:end])
    return path


def patched(path: Path, at: int, number: int) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + 4] = struct.pack("<I", number)
    path.write_bytes(data)
    return path


def type_at(path: Path) -> int:
    """The place of the type of the tensor output_norm.weight: after its name, its one axis and their number."""
    return path.read_bytes().index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8


def moved(path: Path, change: int) -> Path:
    """Changes the offset of the tensor output_norm.weight, which follows its type."""
    at = type_at(path) + 4
    return patched(path, at, struct.unpack_from("<I", path.read_bytes(), at)[0] + change)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
ONES = np.ones(64, np.float32), F32
REFUSED = {
    "no file": (lambda p: p.unlink() or p, "not found"),
    "empty": (lambda p: cut(p, 0), "empty"),
    "magic": (lambda p: p.write_bytes(b"<html></html>") and p, "is no GGUF file"),
    "two bytes": (lambda p: cut(p, 2), "is no GGUF file"),
    "version 1": (lambda p: patched(p, 4, 1), "got version 1, expected a little-endian GGUF file of version 2 or 3"),
    "big-endian": (lambda p: patched(p, 4, 3 << 24), "big-endian"),
    "cut in the weights": (lambda p: cut(p, -200), "cut off"),
    "a part": (lambda p: write_small(p, {"split.count": 3}), "gguf-split --merge"),
    "unknown type": (lambda p: patched(p, type_at(p), 99), "output_norm.weight has type 99"),
    "misaligned": (lambda p: moved(p, 4), "tensor output_norm.weight at byte"),
    "overlapping": (lambda p: moved(p, -64), "expected another name at a multiple of 32 that is at least"),
    "a tensor twice": (
        lambda p: p.write_bytes(p.read_bytes().replace(b"blk.1.attn_norm.", b"blk.0.attn_norm.")) and p,
        "expected another name",
    ),
    "alignment": (lambda p: write_small(p, {"general.alignment": True}), "general.alignment = True"),
    "not for weights": (lambda p: patched(p, type_at(p), 26), "output_norm.weight has type 26"),
    "architecture": (lambda p: write_small(p, {"general.architecture": "gemma3"}), "'gemma3', expected 'qwen3' or 'llama'"),
    "missing tensor": (lambda p: write_small(p, lose="blk.1.ffn_up.weight"), "missing: 1, the first is blk.1.ffn_up"),
    "missing table": (lambda p: write_small(p, lose="token_embd.weight"), "missing: 1, the first is token_embd.weight"),
    "extra tensor": (lambda p: write_small(p, **{"blk.0.attn_q.bias": ONES}), "tensors: 1, the first is blk.0.attn_q"),
    "rope divisors": (lambda p: write_small(p, **{"rope_freqs.weight": ONES}), "rope_freqs.weight has shape [64]"),
    "missing size": (lambda p: write_small(p, changes={"block_count": None}), "llama: got block_count = None"),
    "more layers": (lambda p: write_small(p, changes={"block_count": 10**9}), "num_hidden_layers = 1000000000, expected"),
    "lengths": (lambda p: write_small(p, changes={"attention.value_length": 8}), "value_length 8, expected 16"),
    "linear": (lambda p: write_small(p, changes={"rope.scaling.type": "linear"}), "rope.scaling.type 'linear'"),
    "a factor without a type": (lambda p: write_small(p, changes={"rope.scaling.factor": 4.0}), "scaling.factor = 4.0"),
    "attention without a type": (lambda p: write_small(p, changes={"rope.scaling.attn_factor": 1.5}), "attn_factor = 1.5"),
    "yarn without a factor": (lambda p: write_small(p, changes={"rope.scaling.type": "yarn"}), "scaling.factor = None"),
    "half of yarn": (lambda p: write_small(p, changes=YARN | {"rope.scaling.yarn_ext_factor": 0.5}), "ext_factor = 0.5"),
    "yarn and divisors": (
        lambda p: write_small(p, changes=YARN, **{"rope_freqs.weight": (np.ones(8, np.float32), F32)}),
        "rope_freqs.weight beside",
    ),
    "false for zero": (lambda p: write_small(p, changes={"expert_count": False}), "llama: expert_count = False"),
    "a long value": (lambda p: write_small(p, changes={"tensor_data_layout": "x" * 5000}), "data_layout = 'xxx"),
    "a key that changes numbers": (lambda p: write_small(p, changes={"logit_scale": 2.0}), "llama: got key 'logit_scale'"),
    "vocab_size": (lambda p: write_small(p, changes={"vocab_size": 7}), "vocab_size 7"),
    "other tokens": (lambda p: write_small(p, {"tokenizer.ggml.tokens": ["a"]}), "tokens 1"),
    "tokenizer": (lambda p: write_small(p, {"tokenizer.ggml.model": "llama"}), "model = 'llama', expected one of 'gpt2'"),
    "pre-tokenizer": (lambda p: write_small(p, {"tokenizer.ggml.pre": "tekken"}), "tokenizer.ggml.pre = 'tekken'"),
    "no tokens": (lambda p: write_small(p, {"tokenizer.ggml.tokens": None}), "tokenizer.ggml.tokens = None"),
    "types of tokens": (lambda p: write_small(p, {"tokenizer.ggml.token_type": [1]}), "damaged vocabulary"),
    "no merges": (lambda p: write_small(p, {"tokenizer.ggml.merges": None}), "ggml.merges = None, expected pairs"),
    "merges": (lambda p: write_small(p, {"tokenizer.ggml.merges": ["abc"]}), "damaged vocabulary"),
    "merges of numbers": (lambda p: write_small(p, {"tokenizer.ggml.merges": [1, 2]}), "ggml.merges = 1, expected pairs"),
    "unknown type of token": (lambda p: write_small(p, {"tokenizer.ggml.token_type": [77]}), "token_type = 77, expected"),
    "template of numbers": (lambda p: write_small(p, {"tokenizer.chat_template": 3}), "chat_template = 3, expected a text"),
    "a number of tokens": (lambda p: write_small(p, {"tokenizer.ggml.tokens": 3}), "ggml.tokens = 3, expected a list"),
    "eos": (lambda p: write_small(p, {"tokenizer.ggml.eos_token_id": 9999}), "eos_token_id = 9999"),
    "closing texts": (lambda p: write_small(p, {"tokenizer.ggml.add_eos_token": True}), "add_eos_token"),
}  # fmt: skip


@pytest.mark.parametrize("damage, words", REFUSED.values(), ids=REFUSED)
def test_bad_files_get_one_line(small, damage, words, capsys):
    assert damage(small) == small
    command = ["generate", "--verifier", str(small), "--drafter", "none", "--prompt", "a"]
    assert len(mistake(capsys, main, command, words)) < 500


def test_every_cut_of_a_header_is_refused(small):
    """Whatever the place: no other error, and no endless loop."""
    data = small.read_bytes()
    for end in (*range(4, 300, 7), *range(1000, 40_000, 3001)):
        small.write_bytes(data[:end])
        refused(lambda: gguf_reader.read(small), "cut off")
