"""GGUF files: the weights, sizes and tokenizer that they mean, read in slices."""

import json
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA, needs_8_devices
from gguf_files import F32, LLAMA, MODELS, add, as_gguf, as_stored, digests, gguf, save_hf, vocabulary, write, write_small
from model_files import assert_same
from quantized_files import expand_kept
from safetensors.numpy import save_file

import treeflash_jax as tf
from treeflash_jax.bench.verdicts import describe_ends
from treeflash_jax.cli.commands import main
from treeflash_jax.core import error_text
from treeflash_jax.engine.device_memory import count_bytes, device_bytes
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats import gguf_blocks, gguf_reader, model_files
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import layers, quantized
from treeflash_jax.models.config import ModelConfig, Rope

WIDE = replace(LLAMA, hidden_size=256, intermediate_size=256, num_layers=1, head_dim=64)  # rows of whole K-quant blocks
EOS = {"tokenizer.ggml.eos_token_id": 2}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def small(tmp_path) -> Path:
    """A Llama file with a tokenizer."""
    return write_small(tmp_path / "small.gguf")


@pytest.mark.parametrize("kind, dtype", [("F32", jnp.float32), ("F16", jnp.float16), ("BF16", jnp.bfloat16)])
@pytest.mark.parametrize("name", MODELS)
def test_float_files_load_as_the_folder_they_were_made_of(tmp_path, name, kind, dtype):
    config, kind = MODELS[name], gguf.GGMLQuantizationType[kind]
    path = write(tmp_path / "x.gguf", config, as_gguf(save_hf(tmp_path, config, dtype), config, kind), EOS)
    assert model_files.read_verifier_config(path) == config
    for dtype_loaded in (jnp.float32, dtype):
        assert_same(*(model_files.load_verifier(place, dtype=dtype_loaded) for place in (path, tmp_path)))


def write_random_blocks(folder: Path, config: ModelConfig, kinds: str) -> Path:
    """Writes a file of these types in turn, and beside it a folder's model.safetensors of what it means.

    Random blocks, since the package cannot write K-quants: bytes below 0x3c make finite scales wherever they lie.
    """
    shapes = {name: x.shape for name, x in save_hf(folder, config).items()}
    random, turns = np.random.default_rng(0), cycle(gguf.GGMLQuantizationType[kind] for kind in kinds.split())
    kinds_by_name = {name: next(turns) if len(shape) == 2 else F32 for name, shape in shapes.items()}
    raw = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, (outputs, inputs) in ((name, shape) for name, shape in shapes.items() if len(shape) == 2):
        block, size = gguf.GGML_QUANT_SIZES[kinds_by_name[name]]
        raw[name] = random.integers(0, 0x3C, (outputs, inputs // block * size), np.uint8)
    stored = as_stored(raw, config)
    tensors = {name: (x, kind) for (name, x), kind in zip(stored.items(), kinds_by_name.values(), strict=True)}
    meant = {name: gguf.dequantize(x, kinds_by_name[name]) if x.ndim == 2 else x for name, x in raw.items()}
    assert all(np.isfinite(x).all() and np.std(x) > 0 for x in meant.values())
    save_file(meant, folder / "model.safetensors")
    return write(folder / "x.gguf", config, tensors)


@pytest.mark.parametrize(
    "kinds",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "Q4_K Q6_K Q5_0"],
)
@pytest.mark.parametrize("config", [WIDE, replace(WIDE, model_type="qwen3", qk_norm=True)], ids=["llama", "qwen3"])
def test_quantised_files_mean_what_they_dequantise_to(tmp_path, config, kinds):
    path = write_random_blocks(tmp_path, config, kinds)
    expected = model_files.load_verifier(tmp_path)[1]
    assert_same(model_files.load_verifier(path)[1], expected)
    if gguf_blocks.TYPES.keys() & kinds.split():
        kept = model_files.load_verifier(path, quantize="int4")[1]
        assert quantized.quantization_scheme(kept) in ("int8", "int4")
        assert_same(expand_kept(kept, jnp.float32), expected)
        specs = model_files.open_files(path, "verifier").find_specs(dtype=jnp.float32, quantize="int4")
        assert count_bytes(specs, jnp.float32) == device_bytes(kept) > 0, "before loading"


@needs_8_devices
def test_a_mesh_has_whole_groups_of_super_blocks(tmp_path):
    """Shards have 64 of the 256 inputs of a super-block, whose factors are repeated."""
    config, mesh = replace(WIDE, intermediate_size=512), tf.make_mesh(1, 8)
    path = write_random_blocks(tmp_path, config, "Q4_K Q6_K")
    kept = model_files.load_verifier(path, quantize="int4", mesh=mesh)[1]
    assert_same(expand_kept(jax.device_get(kept), jnp.float32), model_files.load_verifier(tmp_path)[1])
    specs = model_files.open_files(path, "verifier").find_specs(dtype=jnp.float32, mesh=mesh, quantize="int4")
    assert count_bytes(specs, jnp.float32, mesh) == device_bytes(kept)
    outer = kept["groups"][0][0]["down"].outer
    assert outer.shape[-1] == 8 and outer.addressable_shards[0].data.shape[-1] == 1


@needs_8_devices
@pytest.mark.parametrize("name", MODELS)
def test_a_mesh_reads_slices_and_gets_the_same(tmp_path, name, monkeypatch):
    config, read = MODELS[name], []
    tensors = as_gguf(save_hf(tmp_path, config), config, gguf.GGMLQuantizationType.Q5_0)
    path = write(tmp_path / "x.gguf", config, tensors)
    whole = model_files.load_verifier(path)[1]
    dequantize = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: read.append(len(data)) or dequantize(data, kind))
    placed = model_files.load_verifier(path, mesh=tf.make_mesh(2, 4))[1]
    assert_same(placed, whole)
    assert placed["embed"].addressable_shards[0].data.shape == (24, 64)
    assert max(read) <= config.intermediate_size, "no shard of the vocabulary or of the heads reads all rows"
    assert_same(*(model_files.load_verifier(path, mesh=mesh, quantize="int8") for mesh in (None, tf.make_mesh(1, 2))))


def test_rounding_quantised_weights_again_is_said(tmp_path, caplog):
    tensors = as_gguf(save_hf(tmp_path, LLAMA), LLAMA, gguf.GGMLQuantizationType.Q8_0)
    _, params = model_files.load_verifier(write(tmp_path / "x.gguf", LLAMA, tensors), quantize="int8")
    assert re.search("int8.*again", caplog.text)
    assert quantized.quantization_scheme(params) == "int8"


def test_rope_divisors_are_llama3_scaling(tmp_path):
    """The tensor stands for the config keys of Llama 3.1."""
    scaled = replace(LLAMA, rope=Rope(theta=5e5, kind="llama3", factor=8.0, original_max_positions=64))
    plain = layers.rope_frequencies(LLAMA.rope, LLAMA.head_dim)
    divisors = (plain / layers.rope_frequencies(scaled.rope, LLAMA.head_dim)).astype(np.float32)
    assert divisors.min() == 1 and divisors.max() == 8
    tensors = as_gguf(save_hf(tmp_path, scaled), LLAMA) | {"rope_freqs.weight": (divisors, F32)}
    path = write(tmp_path / "x.gguf", LLAMA, tensors, EOS)
    both = [model_files.load_verifier(path), model_files.load_verifier(tmp_path)]
    got, expected = (layers.rope_frequencies(config.rope, config.head_dim) for config, _ in both)
    np.testing.assert_allclose(got, expected, rtol=1e-7)
    main(["convert", str(path), str(tmp_path / "written")])
    assert_same(model_files.load_verifier(tmp_path / "written"), both[0])
    assert both[0][0].rope.kind == "longrope"


def test_yarn_of_llama_cpp(tmp_path):
    """Its attention factor is multiplied with the one of the scaling."""
    written = {"rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
    neutral = {"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.finetuned": True}
    config = MODELS["qwen2 with yarn"]
    tensors = as_gguf(save_hf(tmp_path, config), config)
    rope = model_files.read_verifier_config(write(tmp_path / "x.gguf", config, tensors, None, written | neutral)).rope
    factor = config.rope.attention_factor / 2
    assert rope == replace(config.rope, attention_factor=factor, beta_fast=16.0, beta_slow=2.0)
    without = {"rope.scaling.original_context_length": None}
    rope = model_files.read_verifier_config(write(tmp_path / "x.gguf", config, tensors, None, without)).rope
    assert rope.original_max_positions == config.max_positions


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "smollm", "gpt-2"])
def test_tokenizers_are_llama_cpps(tmp_path, pre):
    held = json.loads((DATA / "gguf_tokens.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.load(write(tmp_path / "x.gguf", LLAMA, {}, vocabulary(pre)))
    same_as = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
    assert digests(tokenizer, held["strings"]) == held["digests"][same_as.get(pre, pre)]
    for text in held["strings"]:
        ids = tokenizer.encode(text)
        assert tokenizer.inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    composed, apart = tokenizer.encode("caf\u00e9"), tokenizer.encode("cafe\u0301")
    assert (composed == apart) == (same_as.get(pre, pre) == "qwen2")
    silent = vocabulary(pre) | {"tokenizer.ggml.add_bos_token": None}
    begins = Tokenizer.load(write(tmp_path / "silent.gguf", LLAMA, {}, silent)).encode("a")[0] == 1
    assert begins == (same_as.get(pre, pre) == "llama-bpe"), "as in llama.cpp if the file does not say"


def test_tokens_have_their_roles(tmp_path):
    words = vocabulary("smollm") | {
        "tokenizer.chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}",
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    path = write_small(tmp_path / "x.gguf", words)
    tokenizer = Tokenizer.load(path)
    inner = tokenizer.inner
    assert (inner.bos_token, inner.eos_token, inner.pad_token) == ("<|im_start|>", "<|im_end|>", "<|mask|>")
    assert tokenizer.encode("a")[0] == inner.bos_token_id == 1
    assert inner.decode(tokenizer.encode_chat([{"role": "user", "content": "Hi"}])) == "user: Hi"
    assert tokenizer.decode(tokenizer.encode("<tool>x<|im_end|>")) == "<tool>x", "a token of the user's is text"
    config = model_files.read_verifier_config(path)
    assert config.eos_token_ids == model_files.stop_ids(path, config) == (0, 2), "the ends of a text and of a turn"
    assert tf.load(verifier=path).stop_ids == (0, 2)


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_tokens_that_end_answers_are_known_by_their_texts(tmp_path, kind):
    """Regression: those of an ordinary type did not end an answer, and <|endoftext|> did only as eos."""
    words = vocabulary("smollm")
    types = [kind] * 3 + words["tokenizer.ggml.token_type"][3:]
    path = write_small(tmp_path / "x.gguf", {"tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": None})
    model, tokenizer = tf.load(verifier=path), Tokenizer.load(path)
    assert words["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert model.stop_ids == (0, 2)
    assert tokenizer.encode("<|im_end|>") == [2] and tokenizer.decode([*tokenizer.encode("a"), 2, 0]) == "a"
    assert describe_ends(model) == "tokens that end an answer: 0 '<|endoftext|>', 2 '<|im_end|>'"


def test_an_end_that_is_inside_answers(tmp_path):
    """Messages of gpt-oss end with <|end|> before the answer does."""
    words = vocabulary("smollm")
    for others, ends in (([], (0, 2, 4)), (["<|return|>"], (0, 2, 4, 5)), (["<|return|>", "<|call|>"], (0, 2, 5, 6))):
        tokens = [*words["tokenizer.ggml.tokens"][:4], "<|end|>", *others]
        tokens += words["tokenizer.ggml.tokens"][len(tokens) :]
        path = write_small(tmp_path / "x.gguf", {"tokenizer.ggml.tokens": tokens})
        assert model_files.read_verifier_config(path).eos_token_ids == ends


def test_tokens_without_types_are_noted(tmp_path, caplog):
    """Also when the file is converted."""
    untyped = write_small(tmp_path / "untyped.gguf", {"tokenizer.ggml.token_type": None})
    for read in (Tokenizer.load, lambda path: model_files.convert_gguf(path, tmp_path / "out")):
        error_text.warn.cache_clear()
        caplog.clear()
        read(untyped)
        assert "untyped.gguf: got no tokenizer.ggml.token_type" in caplog.text


def test_unknown_metadata_is_noted(tmp_path, caplog):
    unknown = write_small(tmp_path / "small.gguf", changes={"key_of_next_month": 1})
    model_files.read_verifier_config(unknown)
    assert "llama: unknown keys ['key_of_next_month'] are ignored" in caplog.text


def test_files_without_a_tokenizer_take_ids(tmp_path):
    path = write(tmp_path / "x.gguf", LLAMA, as_gguf(save_hf(tmp_path, LLAMA), LLAMA), EOS)
    assert Tokenizer.load(path) is None
    model = tf.load(verifier=path)
    assert model.tokenizer is None and model.stop_ids == (2,)


def test_a_file_is_a_model_wherever_one_is_named(small, tmp_path, capsys):
    arguments = ["--drafter", "none", "--builder", "none", "--prompt", "One and two", "--max-new-tokens", "4", "--json"]
    assert main(["generate", "--verifier", str(small), *arguments]) == 0
    assert len(json.loads(capsys.readouterr().out)["ids"]) == 4
    assert locate(small) == small
    folder = tmp_path / "folder.gguf"  # a folder, whatever its name
    model_files.save_verifier(folder, *model_files.load_verifier(small))
    assert model_files.read_verifier_config(locate(folder)) == model_files.read_verifier_config(small)


def test_conversion_keeps_every_bit_and_the_text(small, tmp_path, capsys):
    target = tmp_path / "folder"
    assert main(["convert", str(small), str(target)]) == 0
    assert_same(model_files.load_verifier(target), model_files.load_verifier(small))
    assert model_files.stop_ids(target, model_files.read_verifier_config(target)) == (0, 2)
    assert Tokenizer.load(target).encode("It's 12.") == Tokenizer.load(small).encode("It's 12.")
    assert main(["convert", str(small), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert_same(*(model_files.load_verifier(path, dtype=jnp.bfloat16) for path in (tmp_path / "half", small)))
    for wrong in ([str(small), str(target)], [str(small), str(tmp_path / "new"), "--to", "dflash"], [str(target), "new"]):
        capsys.readouterr()
        assert main(["convert", *wrong]) == 2 and capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_numbers_of_every_kind_are_read(tmp_path):
    """Metadata of all types, arrays included, and an alignment of its own."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(64)
    values = {"a": -3, "b": 2**40, "c": 1.5, "d": True, "e": "漢\n", "f": [1, 2], "g": ["x", ""], "h": [0.25], "i": [True]}
    writer.add_int8("a", values["a"])
    writer.add_uint64("b", values["b"])
    writer.add_float64("c", values["c"])
    for key in "defghi":
        add(writer, key, values[key])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("u", np.arange(3, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = gguf_reader.read(tmp_path / "x.gguf")
    assert {key: file.metadata[key] for key in values} == values
    np.testing.assert_array_equal(file.tensors["t"][:], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(file.tensors["u"][1:], [1, 2])


def test_a_header_is_read_once_until_the_file_changes(tmp_path):
    path = write(tmp_path / "x.gguf", LLAMA, {})
    file = gguf_reader.read(path)
    assert gguf_reader.read(path) is file
    write(path, replace(LLAMA, num_layers=LLAMA.num_layers + 1), {})
    assert gguf_reader.read(path).metadata["llama.block_count"] == LLAMA.num_layers + 1
