"""Files quantised to groups: tensors of each format bit by bit, whole verifiers, and what is refused in one line."""

import json
from functools import partial

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA, FOLDERS, needs_8_devices
from model_files import assert_same, change_json
from published_configs import QWEN3_4B, parse
from quantized_files import AWQ, FORMATS, GPTQ, MODELOPT, NVFP4, PACK, change, make_folders
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.formats import gguf_blocks, gguf_reader, model_files, storage
from treeflash_jax.formats.grouped_tensors import E2M1, GroupedTensor, map_parts
from treeflash_jax.formats.quant_methods import METHODS

SOURCE = FOLDERS["verifier"]
# Random tensors and what the reference code makes of them: transformers 5.24 (mxfp4), compressed-tensors 0.20.1 (g_idx:
# 0.12.2), nvidia-modelopt 0.47.0, autoawq 0.2.9, gptqmodel 7.7.0.
HELD = dict(np.load(DATA / "quantized.npz"))
CASES = {
    "pack": "compressed-tensors", "pack asymmetric": "compressed-tensors", "pack channels": "compressed-tensors",
    "pack asymmetric channels": "compressed-tensors", "pack 8 bits": "compressed-tensors", "nvfp4": "compressed-tensors",
    "pack g_idx": "compressed-tensors", "modelopt": "modelopt", "awq": "awq", "gptq": "gptq", "gptq_v2": "gptq",
    "gptq 8 bits": "gptq", "mxfp4": "mxfp4",
}  # fmt: skip
KINDS = {"uint8": "U8", "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}


class OnDisk:
    """An array with what tensors of safetensors files have."""

    def __init__(self, values):
        self.values = values

    def get_shape(self):
        return self.values.shape

    def get_dtype(self):
        return KINDS[self.values.dtype.name]

    def __getitem__(self, index):
        assert index is ... or all(type(at) is slice for at in index), "indices of the library"
        return self.values[index]


def read_case(case: str, **extra: np.ndarray) -> tuple[GroupedTensor, np.ndarray]:
    """Returns the weight that a case's tensors, and `extra` ones, are joined to, and the reference's."""
    parts = {name.partition("/")[2]: x for name, x in HELD.items() if name.startswith(f"{case}/")}
    expected, separator = parts.pop("expected"), "_" if case == "mxfp4" else "."
    if case in ("nvfp4", "modelopt"):
        parts["weight_scale"] = parts["weight_scale"].view(jnp.float8_e4m3fn)
    parts |= extra
    stated = {"bits": 8 if "8 bits" in case else 4, "checkpoint_format": case.split()[0]}
    [tensor] = METHODS[CASES[case]].join(stated, {f"x{separator}{part}": OnDisk(x) for part, x in parts.items()}).values()
    return tensor, expected


def recombined(tensor: GroupedTensor) -> np.ndarray:
    """Computes a weight from its parts, element by element in float64, and rounds it to float32."""
    at = (slice(None),) * len(tensor.get_shape())
    codes = tensor.codes[at]

    def per_element(part, outer=None, divides=False):
        wide = part[at].astype(np.float32).repeat(codes.shape[-1] // part.get_shape()[-1], -1)
        if outer is None:
            return wide
        factor = outer[at].astype(np.float32).repeat(codes.shape[-1] // outer.get_shape()[-1], -1)
        return wide / factor if divides else wide * factor

    numbers = E2M1[codes] if tensor.code_book == "e2m1" else codes.astype(np.float64)
    zeros = tensor.zeros if isinstance(tensor.zeros, int) else per_element(tensor.zeros)
    wide = (numbers - zeros) * per_element(tensor.scales, tensor.outer, tensor.is_divisor).astype(np.float64)
    if tensor.minimums is not None:
        wide -= per_element(tensor.minimums, tensor.outer_minimums)
    result = np.empty(codes.shape, np.float32)
    result[..., slice(None) if tensor.order is None else tensor.order] = wide
    return result


def check_parts(tensor: GroupedTensor) -> None:
    """The parts have the shapes and types that they state, and codes are in the range of their book."""
    *rows, inputs = tensor.get_shape()
    for name, columns in (("codes", inputs), ("scales", inputs // tensor.group), ("zeros", inputs // tensor.group),
                          ("minimums", inputs // tensor.group), ("outer", None), ("outer_minimums", None)):  # fmt: skip
        part = getattr(tensor, name)
        if part is not None and not isinstance(part, int):
            values = part[(slice(None),) * (len(rows) + 1)]
            assert values.shape == tuple(part.get_shape()) == (*rows, columns or values.shape[-1]), name
            assert columns or (inputs // tensor.group) % values.shape[-1] == 0
            kinds = {**KINDS, "int8": "I8", "float8_e8m0fnu": "F8_E8M0"}
            assert kinds[values.dtype.name] == part.get_dtype(), name
    if tensor.code_book != "int8":
        assert tensor.codes.get_dtype() == "U8" and tensor.codes[...].max() == 15


@pytest.mark.parametrize("case", CASES)
def test_tensors_are_those_of_the_reference(case):
    tensor, expected = read_case(case)
    whole, part = (slice(None),) * expected.ndim, (slice(1, 3),) * (expected.ndim - 1) + (slice(3, 11),)
    np.testing.assert_array_equal(tensor[whole], expected)
    np.testing.assert_array_equal(tensor[part], expected[part])
    np.testing.assert_array_equal(tensor[:], expected)
    np.testing.assert_array_equal(recombined(tensor), expected)
    check_parts(tensor)
    assert (tensor.order is not None) == (case in ("pack g_idx", "gptq_v2", "gptq 8 bits"))


@pytest.mark.parametrize("kind", gguf_blocks.TYPES)
def test_blocks_of_gguf_files_are_those_of_the_package(kind):
    type = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type]
    raw = np.random.default_rng(0).integers(0, 256, (6, 2, size)).astype(np.uint8)
    floats = {"Q6_K": [(208, 210)], "Q4_0": [(0, 2)], "Q8_0": [(0, 2)]}.get(kind, [(0, 2), (2, 4)])
    for begin, end in floats:
        raw[..., begin:end] = np.random.default_rng(begin).normal(size=(6, 2, 1)).astype("<f2").view(np.uint8)
    raw, order = raw.reshape(6, -1), np.array([3, 1, 0, 2, 5, 4])
    expected = gguf.dequantize(raw, type)
    for stored, shape, ordered in ((None, (6, 2 * block), expected), (order, (6, 2 * block), expected[order]),
                                   (None, (2, 3, 2 * block), expected.reshape(2, 3, -1))):  # fmt: skip
        tensor = gguf_blocks.grouped(gguf_reader.GgufTensor(raw, type, shape, stored))
        at = (slice(1, 2),) * (len(shape) - 1) + (slice(5, 40),)
        np.testing.assert_array_equal(tensor[:], ordered)
        np.testing.assert_array_equal(tensor[at], ordered[at])
        np.testing.assert_array_equal(recombined(tensor), ordered)
        check_parts(tensor)


@pytest.mark.parametrize("form", FORMATS)
def test_verifiers_are_the_dense_ones_expanded(form, tmp_path, monkeypatch):
    """Some layers are left wide, and pieces end inside groups and words."""
    monkeypatch.setattr(storage, "READ_AT_ONCE", 500)
    folder, dense = make_folders(tmp_path, SOURCE, form, kept=("k_proj", "layers.1.mlp.down"))
    assert_same(model_files.load_verifier(folder), model_files.load_verifier(dense))
    narrow = partial(model_files.load_verifier, dtype=jnp.bfloat16)
    assert_same(narrow(folder), narrow(dense))
    assert [model_files.open_files(place, "verifier").stored_scheme() for place in (folder, dense)] == ["int4", None]


def test_a_language_model_that_drafts(tmp_path):
    assert_same(*map(model_files.load_drafter, make_folders(tmp_path, SOURCE, "awq")))


@pytest.mark.parametrize("source", ["qwen3_5", "qwen3_next", "apart"])
@pytest.mark.parametrize("form", ["pack-quantized", "modelopt"])
def test_hybrids_and_experts(source, form, tmp_path):
    """Names of image-and-text files, maps that are split by key heads, a tensor for each expert, and the drafter."""
    folder = DATA / ("qwen3_moe" if source == "apart" else "hybrid") / source
    places = make_folders(tmp_path, folder, form, kept=("conv1d",))
    assert_same(*map(model_files.load_verifier, places))
    if source == "qwen3_5":
        assert_same(*map(model_files.load_drafter, places))


def test_groups_of_inputs_that_are_not_set_are_consecutive():
    tensor, expected = read_case("pack", weight_g_idx=np.full(64, -1, np.int32))
    np.testing.assert_array_equal(tensor[:], expected)


def test_outputs_are_selected_part_by_part():
    tensor, expected = read_case("pack asymmetric")
    selected = map_parts(lambda part: OnDisk(part[...][::2]), tensor)
    np.testing.assert_array_equal(selected[:], expected[::2])
    assert isinstance(selected, GroupedTensor)


@needs_8_devices
def test_a_mesh_reads_slices(tmp_path):
    folder, _ = make_folders(tmp_path, SOURCE, "awq")
    assert_same(*(model_files.load_verifier(folder, mesh=mesh)[1] for mesh in (None, tf.make_mesh(2, 4))))


def test_int8_rounds_groups_again(tmp_path, caplog):
    folder, _ = make_folders(tmp_path, SOURCE, "gptq")
    layer = model_files.load_verifier(folder, quantize="int8")[1]["groups"][0][0]
    assert "holds quantised weights; quantize='int8' rounds them again" in caplog.text
    assert layer["up"].values.dtype == jnp.int8


def test_modelopt_states_its_method_in_a_file_of_its_own(tmp_path, caplog):
    folder, dense = make_folders(tmp_path, SOURCE, "modelopt")
    change_json(folder / "config.json", quantization_config=None)
    stated = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = folder / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": stated}))
    change(folder, {f"{UP}.input_scale": np.ones((), np.float32), f"{UP}.k_scale": np.ones((), np.float32)})
    assert_same(model_files.load_verifier(folder), model_files.load_verifier(dense))
    [warning] = caplog.messages
    assert "_scale, are not read: neither is quantised here" in warning
    beside.write_text(json.dumps({"quantization": stated | {"quant_algo": "FP8"}}))
    refused(lambda: model_files.load_verifier(folder), "hf_quant_config.json", "quant_algo", "'FP8'", "NVFP4")


def test_biases_of_zeros_that_a_family_does_not_have(damaged, caplog):
    """Old GPTQ files have one for each matrix."""
    folder = damaged("gptq")
    expected = model_files.load_verifier(folder)
    change(folder, {f"{UP}.bias": np.zeros(128, np.float16)})
    assert_same(model_files.load_verifier(folder), expected)
    change(folder, {f"{UP}.bias": np.eye(1, 128, dtype=np.float16)[0]})
    refused(lambda: model_files.load_verifier(folder), "unknown tensors", f"{UP}.bias")
    change(folder, {f"{UP}.bias": None})


def test_formats_may_be_mixed(tmp_path):
    """Files of compressed-tensors: one module in NVFP4, one in FP8, the others in whole numbers."""
    folder, dense = make_folders(tmp_path, SOURCE, "pack-quantized")
    change_json(
        folder / "config.json",
        quantization_config=PACK
        | {
            "format": "mixed-precision",
            "config_groups": {
                form: {"format": form, "weights": WEIGHTS}
                for form in ("pack-quantized", "nvfp4-pack-quantized", "float-quantized")
            },
        },
    )
    parts, meant = FORMATS["nvfp4-pack-quantized"][1](np.random.default_rng(1), 128, 64)
    drop = dict.fromkeys(("weight_shape", "weight_zero_point", "weight_g_idx"))
    change(folder, {f"{UP}.{part}": x for part, x in (drop | parts).items()})
    values, scales = np.ones((64, 128), jnp.float8_e4m3fn), np.full((64, 1), 0.5, np.float32)
    parts = FORMATS["pack-quantized"][1](np.random.default_rng(1), 64, 128)[0]
    change(folder, {f"{DOWN}.{part}": None for part in parts})
    change(folder, {f"{DOWN}.weight": values, f"{DOWN}.weight_scale": scales})
    change(dense, {f"{UP}.weight": meant, f"{DOWN}.weight": np.full((64, 128), 0.5, np.float32)})
    assert_same(model_files.load_verifier(folder), model_files.load_verifier(dense))
    assert model_files.open_files(folder, "verifier").stored_scheme() == "int4"


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group"}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def ones(*shape, dtype=np.int32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize("form, part, value, words", [
    ("pack-quantized", "weight_scale", None, ("no tensor", "weight_scale", "expected both")),
    ("pack-quantized", "weight_packed", None, ("no tensor", "weight_packed", "expected both")),
    ("pack-quantized", "weight_shape", None, ("no tensor", "weight_shape")),
    ("pack-quantized", "weight_packed", ones(128, 8, dtype=np.int64), ("[128, 8] of type I64", "expected", "type I32")),
    ("pack-quantized", "weight_packed", ones(127, 8), ("[127, 8]", "expected [128, any]")),
    ("pack-quantized", "weight_packed", ones(128, 6), ("6 words for 64 inputs", "4 or 8 bits")),
    ("pack-quantized", "weight_scale", ones(128, 5, dtype=np.float16), ("5 scales for 64 inputs", "whole groups")),
    ("pack-quantized", "weight_scale", ones(1, 4, dtype=np.float16), ("[1, 4]", "[128, any]")),
    ("pack-quantized", "weight_scale", np.full((128, 4), np.nan, np.float16), (f"{UP}.weight", "holds NaN or infinity")),
    ("pack-quantized", "weight_zero_point", ones(15, 4), ("[15, 4]", "expected [16, 4]")),
    ("pack-quantized", "weight_g_idx", ones(64), ("weight_g_idx", "groups of other sizes than 16")),
    ("pack-quantized", "weight_g_idx", ones(63), ("[63]", "expected [64]")),
    ("pack-quantized", "weight_shape", np.array([128, 60]), ("[64]", "[60]")),
    ("pack-quantized", "weight_shape", np.array([128]), ("weight_shape", "[1]", "expected [2]")),
    ("nvfp4-pack-quantized", "weight_global_scale", None, ("no tensor", "weight_shape")),
    ("nvfp4-pack-quantized", "weight_global_scale", ones(2, dtype=np.float32), ("[2]", "one number")),
    ("nvfp4-pack-quantized", "weight_zero_point", ones(16, 4), ("weight_zero_point", "NVFP4")),
    ("nvfp4-pack-quantized", "weight_packed", ones(128, 30, dtype=np.uint8), ("[128, 30]", "whole groups")),
    ("nvfp4-pack-quantized", "weight_packed", ones(32, dtype=np.uint8), ("[32]", "whole groups")),
    ("nvfp4-pack-quantized", "weight_scale", ones(128, 4, dtype=np.float16), ("type F16", "[128, 4] of type F8_E4M3")),
    ("nvfp4-pack-quantized", "weight_scale", ones(128, 2, dtype=jnp.float8_e4m3fn), ("[128, 2]", "expected [128, 4]")),
    ("modelopt", "weight_scale_2", None, ("no tensor", "weight_scale_2")),
    ("modelopt", "weight", ones(128, 32, dtype=np.int8), ("type I8", "expected type U8")),
    ("modelopt", "weight_scale", None, ("no tensor", "weight_scale")),
    ("awq", "scales", None, ("no tensor", "scales", "expected both")),
    ("awq", "qzeros", None, ("no tensor", "qzeros")),
    ("awq", "qweight", ones(62, 16), ("4 scales for 62 inputs",)),
    ("awq", "qweight", ones(64, 15), ("[4, 128]", "expected [any, 120]")),
    ("awq", "qweight", ones(32, 16), (f"{UP}.weight has shape [128, 32]", "expected [128, 64]")),
    ("awq", "scales", ones(4, 128), ("type I32", "expected [any, 128] of type F16")),
    ("gptq", "qzeros", ones(4, 15), ("[4, 15]", "expected [4, 16]")),
    ("gptq", "qweight", None, ("no tensor", "qweight")),
    ("gptq", "g_idx", np.arange(64, dtype=np.int32), ("g_idx", "groups of other sizes")),
    ("gptq", "g_idx", -ones(64), ("g_idx", "groups of other sizes")),
    ("gptq", "g_idx", np.full(64, 2**31 - 1, np.int32), ("g_idx", "groups of other sizes")),
    ("gptq", "qweight", ones(0, 128), ("4 scales for 0 inputs",)),
    ("gptq", "scales", ones(3, 128, dtype=np.float16), ("3 scales for 64 inputs", "whole groups")),
])  # fmt: skip
def test_damaged_files(form, part, value, words, damaged):
    folder = damaged(form)
    whole = (folder / "model.safetensors").read_bytes()
    try:
        change(folder, {f"{UP}.{part}": value})
        refused(lambda: model_files.load_verifier(folder), str(folder), *words)
    finally:
        (folder / "model.safetensors").write_bytes(whole)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Returns a function that makes a folder in a format, or gives the one it made."""
    made = {}

    def folder(form):
        if form not in made:
            made[form] = make_folders(tmp_path_factory.mktemp("damaged"), SOURCE, form)[0]
        return made[form]

    return folder


def test_lists_of_wide_modules_that_the_tensors_contradict(damaged):
    folder = damaged("pack-quantized")
    for entry, words in ((UP, ("model.layers.0.mlp.up_proj.weight", "not quantised")), ("re:.*down", ("down_proj",)),
                         ("re:(", ("re:(", "regular expression"))):  # fmt: skip
        change_json(folder / "config.json", quantization_config=PACK | {"ignore": ["lm_head", entry]})
        refused(lambda: model_files.load_verifier(folder), str(folder), *words)
    change_json(folder / "config.json", quantization_config=PACK)


@pytest.mark.parametrize("config, words", [
    (PACK | {"format": "int-quantized"}, ("format", "'int-quantized'", "pack-quantized")),
    (PACK | {"format": "marlin-24"}, ("'marlin-24'",)),
    (PACK | {"format": "mixed-precision", "config_groups": {"g": {"format": "mxfp4-pack-quantized"}}}, ("mxfp4-pack",)),
    (PACK | {"config_groups": {"g": {"weights": WEIGHTS | {"num_bits": 3}}}}, ("group", "num_bits = 3", "expected 4")),
    (PACK | {"config_groups": {"g": {"weights": WEIGHTS | {"type": "float"}}}}, ("type = 'float'",)),
    (PACK | {"config_groups": {"g": {"weights": WEIGHTS | {"strategy": "block"}}}}, ("strategy = 'block'",)),
    (PACK | {"config_groups": {"g": 4}}, ("g = ", "an object")),
    (PACK | {"config_groups": ["g"]}, ("config_groups", "an object")),
    (PACK | {"transform_config": {"rotations": 1}}, ("transform_config",)),
    (MODELOPT | {"quant_algo": "FP8"}, ("quant_algo", "'FP8'", "'NVFP4'", "bfloat16")),
    (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, ("'MIXED_PRECISION'",)),
    (MODELOPT | {"group_size": 32}, ("group_size = 32", "16")),
    (AWQ | {"bits": 3}, ("bits", "3", "4")),
    (AWQ | {"version": "gemv"}, ("version", "'gemv'", "'gemm'")),
    (AWQ | {"version": None, "format": "gemv_fast"}, ("version", "'gemv_fast'", "'gemm'")),
    (GPTQ | {"bits": 3}, ("bits", "3", "4 or 8")),
    (GPTQ | {"bits": True}, ("bits", "4 or 8")),
    (GPTQ | {"bits": [4]}, ("bits", "4 or 8")),
    (GPTQ | {"checkpoint_format": "marlin"}, ("checkpoint_format", "'marlin'", "'gptq'")),
    (GPTQ | {"checkpoint_format": ["gptq"]}, ("checkpoint_format", "'gptq'")),
    (GPTQ | {"pack_dtype": "int16"}, ("pack_dtype",)),
])  # fmt: skip
def test_other_bits_and_schemes_are_refused_by_name(config, words):
    refused(lambda: parse("verifier", QWEN3_4B | {"quantization_config": config}), "quantization_config", *words)


@pytest.mark.parametrize("config", [PACK, NVFP4, MODELOPT, AWQ, GPTQ])
def test_configurations_are_read(config):
    assert parse("verifier", QWEN3_4B | {"quantization_config": config}) == parse("verifier", QWEN3_4B)
