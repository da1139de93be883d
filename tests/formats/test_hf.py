"""Hugging Face folders: the same bits back, the published names, any sharding, and one clear line for every bad file."""

import json
import shutil
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import random_weights
from model_files import assert_same, change_json, change_tensors
from published_configs import without
from refusals import refused
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import treeflash_jax as tf
from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Entry, Spec, is_spec
from treeflash_jax.drafters.block.block_drafter import BlockDrafter
from treeflash_jax.drafters.eagle3_drafter import Eagle3Drafter
from treeflash_jax.drafters.language_model_drafter import LanguageModelDrafter
from treeflash_jax.formats import dialects, model_files, storage
from treeflash_jax.models import decoder
from treeflash_jax.models.config import ModelConfig, Rope

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LLAMA3 = Rope(theta=5e5, kind="llama3", factor=8.0, original_max_positions=64)
MODEL = ModelConfig(
    vocab_size=12, hidden_size=8, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6,
    max_positions=64, eos_token_ids=(2,),
)  # fmt: skip
MODELS = {
    "untied": MODEL,
    "tied": replace(MODEL, tie_embeddings=True),
    "llama": replace(MODEL, model_type="llama", qk_norm=False, rope=LLAMA3, rms_norm_eps=1e-5, eos_token_ids=(1, 2)),
    "qwen2": replace(
        MODEL, model_type="qwen2", qk_norm=False, qkv_bias=True, hidden_size=24, tie_embeddings=True,
        rope=Rope(kind="yarn", factor=2.0, original_max_positions=32, attention_factor=1.1, beta_fast=8.0, truncate=False),
    ),
}  # fmt: skip
PLAIN = BlockDrafter(
    layers=replace(MODEL, num_layers=2, eos_token_ids=()), block_size=4, mask_token_id=11, taps=(0, 2),
    num_target_layers=3, head="marginal", thinking=True,
)  # fmt: skip
DRAFTER = replace(PLAIN, head="mlp", num_nodes=10, drafter_temperature=0.5)
LAYER = {  # of the tiny drafter above, [out, in]
    "self_attn.q_proj.weight": [24, 8], "self_attn.k_proj.weight": [12, 8], "self_attn.v_proj.weight": [12, 8],
    "self_attn.o_proj.weight": [8, 24], "self_attn.q_norm.weight": [6], "self_attn.k_norm.weight": [6],
    "mlp.gate_proj.weight": [20, 8], "mlp.up_proj.weight": [20, 8], "mlp.down_proj.weight": [8, 20],
    "input_layernorm.weight": [8], "post_attention_layernorm.weight": [8],
}  # fmt: skip
OUTSIDE = {"norm.weight": [8], "hidden_norm.weight": [8], "fc.weight": [8, 16]}
HEAD = {
    "ar_approximation.ug.weight": [40, 16], "ar_approximation.ug.bias": [40], "ar_approximation.d.weight": [8, 20],
    "ar_approximation.norm.weight": [8],
}  # fmt: skip


def drafter_params(config, dtype=jnp.float32):
    return random_weights(config.specs(), dtype=dtype)


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """Folders of a verifier and the drafter that fits it."""
    model_files.save_verifier(tmp_path / "verifier", MODEL, random_weights(decoder.specs(MODEL)), jnp.float32)
    model_files.save_drafter(tmp_path / "drafter", DRAFTER, drafter_params(DRAFTER), dtype=jnp.float32)
    return tmp_path / "verifier", tmp_path / "drafter"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_verifiers_are_read_back_in_the_dtype_on_disk(tmp_path, name, dtype):
    config = MODELS[name]
    params = random_weights(decoder.specs(config))
    model_files.save_verifier(tmp_path, config, params, dtype)
    assert ("unembed" in params) == (not config.tie_embeddings)
    assert_same(model_files.load_verifier(tmp_path, dtype=dtype), (config, jax.tree.map(lambda x: x.astype(dtype), params)))


NAMED = ("meta-llama/Llama-3.1-8B-Instruct", "LlamaForCausalLM")  # a drafter's verifier
OURS = {"num_nodes": 10, "drafter_temperature": 0.5, "tau": 2.5}  # which no other program reads
BLOCK = replace(PLAIN, layers=replace(PLAIN.layers, rope=LLAMA3), verifier=NAMED, candidates=9, **OURS)
WRITTEN = {
    "language_model": LanguageModelDrafter(layers=MODELS["llama"], num_depths=5, **OURS),
    "speculators": Eagle3Drafter(
        layers=replace(MODELS["llama"], num_layers=1), target_hidden_size=8, draft_vocab_size=12, own_embedding=True,
        taps=(0, 2), num_taps=2, verifier=NAMED, **OURS,
    ),
    "treeflash": replace(BLOCK, head="lowrank", head_rank=3),
    "dflash": BLOCK,
    "speculators-dflash": BLOCK,
    "speculators-dspark": replace(BLOCK, head="lowrank", head_rank=3, shifted=True),
}  # fmt: skip


@pytest.mark.parametrize("other", ["rope_parameters", "rope_theta rope_scaling"])
@pytest.mark.parametrize("dialect", WRITTEN)
def test_every_dialect_states_what_other_programs_read(tmp_path, dialect, other):
    """Both rope schemas, each enough without the keys of the other; tapped layers as the dialect counts; mask and dtype.

    And what only we read: `OURS`, and the number of candidates.
    """
    assert {*WRITTEN} == {*dialects.written()} - {"mtp"}, "no other program reads folders of mtp"
    config = WRITTEN[dialect]
    params = drafter_params(config, jnp.bfloat16)
    model_files.save_drafter(tmp_path, config, params, dialect=dialect)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["dtype"] == "bfloat16"
    if "speculators" in dialect:
        algorithm = "eagle3" if dialect == "speculators" else dialect.removeprefix("speculators-")
        ids = raw["eagle_aux_hidden_state_layer_ids" if algorithm == "eagle3" else "aux_hidden_state_layer_ids"]
        assert ids == [1, 3], "the layers that these outputs enter"
        method = {"proposal_type": "greedy", "speculative_tokens": config.num_depths}
        method |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
        assert raw["speculators_version"] and raw["speculators_config"] == {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": NAMED[0], "architectures": [NAMED[1]]},
        }
        assert raw["speculators_model_type"] == algorithm and raw["draft_vocab_size"] == config.layers.vocab_size
        assert raw.get("mask_token_id") == (None if algorithm == "eagle3" else 11)
    elif dialect != "language_model":
        assert raw["dflash_config"] == {"mask_token_id": 11, "target_layer_ids": [0, 2]}, "the layers themselves"
    table = raw["transformer_layer_config"] if "speculators" in dialect else raw
    assert table["rope_theta"] == 5e5 == table["rope_parameters"]["rope_theta"]
    for key in other.split():
        del table[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_same(model_files.load_drafter(tmp_path, dtype=jnp.bfloat16), (config, params))


def test_equal_weights_give_equal_files(tmp_path):
    """Byte for byte: what writes safetensors puts their metadata in any order."""
    specs, entries = {"x": Spec((2, 3), (None, None))}, {"x": Entry("a.é.weight", (1, 0))}
    written = set()
    for number in range(8):
        path = tmp_path / f"{number}.safetensors"
        storage.save(path, specs, entries, {"x": np.arange(6.0).reshape(2, 3)}, np.float32)
        assert storage.is_own(path)
        written.add(path.read_bytes())
    assert len(written) == 1
    with safe_open(path, framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("a.é.weight"), np.arange(6.0).reshape(2, 3).T)
        assert file.metadata()["format"] == "pt"


def test_tensors_have_the_published_names_shapes_and_axes(tmp_path):
    """Names and shapes are those in the state dicts of the released PyTorch classes."""
    names = {f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in LAYER.items()} | OUTSIDE
    params = drafter_params(DRAFTER)
    model_files.save_drafter(tmp_path / "dflash", PLAIN, drafter_params(PLAIN), dialect="dflash")
    assert {name: list(x.shape) for name, x in load_file(tmp_path / "dflash/model.safetensors").items()} == names
    model_files.save_drafter(tmp_path, DRAFTER, params, dtype=jnp.float32)
    disk, layer, head = load_file(tmp_path / WEIGHTS), params["backbone"]["groups"][0][1], params["head"]
    assert {name: list(x.shape) for name, x in disk.items()} == {f"model.{n}": shape for n, shape in names.items()} | HEAD

    on_disk = {name: disk[f"model.layers.1.{name}"] for name in LAYER}
    np.testing.assert_array_equal(on_disk["self_attn.q_proj.weight"], np.reshape(layer["q"], (24, 8)))
    np.testing.assert_array_equal(on_disk["self_attn.o_proj.weight"], np.reshape(layer["o"], (8, 24)))
    np.testing.assert_array_equal(on_disk["mlp.gate_proj.weight"], layer["gate"])
    np.testing.assert_array_equal(disk["model.fc.weight"], params["backbone"]["fc"].T)
    up_and_gate = disk["ar_approximation.ug.weight"].reshape(2, 20, 2, 8)  # [up | gate, ffn, embedding | hidden, d]
    np.testing.assert_array_equal(up_and_gate[:, :, 0], np.moveaxis(head["token_ug"], 0, 2))
    np.testing.assert_array_equal(up_and_gate[:, :, 1], np.moveaxis(head["hidden_ug"], 0, 2))
    np.testing.assert_array_equal(disk["ar_approximation.ug.bias"], np.ravel(head["bias"]))


def test_dflash_as_the_speculators_library_writes_it(tmp_path):
    """With copies of the verifier's tables and settings of training."""
    params = drafter_params(PLAIN)
    model_files.save_drafter(tmp_path, PLAIN, params, dialect="speculators-dflash", dtype=jnp.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "speculators_config" not in raw, "the verifier is not known"
    tables = {"embed_tokens.weight": np.ones((12, 8), np.float32), "t2d": np.ones(12, bool)}
    change_tensors(tmp_path, lambda tensors: tensors | tables)
    raw |= {"speculators_config": {"verifier": {"name_or_path": "a/b", "architectures": []}}, "max_anchors": 512}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_same(model_files.load_drafter(tmp_path), (replace(PLAIN, verifier=("a/b",)), params))
    for change, message in (
        ({"draft_vocab_size": 11}, "missing: 2, the first is d2t"),
        ({"draft_vocab_size": 13}, "draft_vocab_size = 13"),
        ({"sample_from_anchor": True, "shift_label": False}, "sample_from_anchor True"),
        ({"projector_type": "domino"}, "projector_type = 'domino' is not implemented"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "target_layer_ids"),
        ({"emb_dim": 4}, "got key 'emb_dim', which changes numbers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        refused(lambda: model_files.load_drafter(tmp_path), message)


PARTS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def split_in_two(folder: Path, lost: int = 0) -> None:
    """Rewrites model.safetensors as an index and two parts, the second without its first `lost` tensors."""
    tensors = load_file(folder / WEIGHTS)
    save_file(dict([*tensors.items()][::2]), folder / PARTS[0])
    save_file(dict([*tensors.items()][1 + 2 * lost :: 2]), folder / PARTS[1])
    index = {"metadata": {}, "weight_map": {key: PARTS[i % 2] for i, key in enumerate(tensors)}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()


def test_two_parts_read_like_one_file(pair):
    """The index decides if a part holds a stale copy of a tensor."""
    for read, folder in zip((model_files.load_verifier, model_files.load_drafter), pair, strict=True):
        whole = read(folder)
        split_in_two(folder)
        stale = {name: 0 * x for name, x in load_file(folder / PARTS[1]).items()}
        save_file(load_file(folder / PARTS[0]) | stale, folder / PARTS[0])
        assert_same(read(folder), whole)


def test_loading_onto_a_mesh(pair):
    """Shards read their own slices; sizes the mesh does not divide (2 key/value heads over 4) are replicated."""
    mesh = tf.make_mesh(2, 4)
    specs = [decoder.specs(MODEL), DRAFTER.specs()]
    plain = [model_files.load_verifier(pair[0])[1], *model_files.load_drafter(pair[1])[1:]]
    placed = [model_files.load_verifier(pair[0], mesh=mesh)[1], *model_files.load_drafter(pair[1], mesh=mesh)[1:]]
    assert_same(placed, plain)

    def check(spec: Spec, x: jax.Array) -> None:
        assert x.sharding == sharding.sharding(spec.axes, spec.shape, mesh)
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(x)[shard.index])

    jax.tree.map(check, specs, placed, is_leaf=is_spec)
    layer = placed[0]["groups"][0][0]
    local = {name: layer[name].addressable_shards[0].data.shape for name in ("q", "k", "o", "gate", "down")}
    assert local == {"q": (1, 6, 8), "k": (2, 6, 8), "o": (8, 1, 6), "gate": (5, 8), "down": (8, 5)}
    assert placed[0]["embed"].addressable_shards[0].data.shape == (3, 8)
    assert placed[1]["head"]["token_ug"].addressable_shards[0].data.shape == (8, 2, 5)


def test_a_tied_file_may_repeat_its_table(tmp_path):
    config = MODELS["tied"]
    model_files.save_verifier(tmp_path, config, random_weights(decoder.specs(config)), jnp.float32)
    change_tensors(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].copy()})
    assert "unembed" not in model_files.load_verifier(tmp_path)[1]
    change_tensors(tmp_path, lambda t: t | {"lm_head.weight": t["lm_head.weight"] + 1})
    refused(lambda: model_files.load_verifier(tmp_path), "lm_head.weight differs from model.embed_tokens.weight")


def test_a_whole_file_comes_before_parts(tmp_path):
    """As in transformers: a folder that was saved again in one file keeps the parts of the first time."""
    config = MODELS["tied"]
    model_files.save_verifier(tmp_path, config, random_weights(decoder.specs(config)), jnp.float32)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "part.safetensors"}}')
    assert "embed" in model_files.load_verifier(tmp_path)[1]


def test_stop_ids_of_both_files_are_united(tmp_path):
    assert model_files.stop_ids(tmp_path, MODEL) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert model_files.stop_ids(tmp_path, MODEL) == (2, 7)


def in_place_of(name: str, make):
    return lambda folder: ((folder / name).unlink(), make(folder / name))


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
DAMAGE = {
    "missing tensor": (partial(change_tensors, change=lambda t: without(t, NORM)), (NORM, "missing")),
    "extra tensor": (partial(change_tensors, change=lambda t: t | {"model.odd": t[NORM]}), ("model.odd", "unknown")),
    "transposed tensor": (partial(change_tensors, change=lambda t: t | {UP: t[UP].T.copy()}), (UP, "[8, 20]", "[20, 8]")),
    "integers": (partial(change_tensors, change=lambda t: t | {NORM: t[NORM].astype(np.int32)}), (NORM, "I32")),
    "truncated": (truncate, (WEIGHTS, "damaged")),
    "junk": (lambda folder: (folder / WEIGHTS).write_text("<html></html>" * 20), (WEIGHTS, "damaged")),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), (WEIGHTS, "not found")),
    "part without a listed tensor": (partial(split_in_two, lost=1), (PARTS[1], "no tensor")),
    "deep index": (
        in_place_of(WEIGHTS, lambda path: path.with_name(INDEX).write_text("[" * 200_000)),
        (INDEX, "nested too"),
    ),
    "folder for weights": (in_place_of(WEIGHTS, Path.mkdir), (WEIGHTS,)),
    "folder for a config": (in_place_of("config.json", Path.mkdir), ("config.json",)),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json", "not found")),
    "no folder": (shutil.rmtree, ("not found", "folder")),
}


@pytest.mark.parametrize("which", ["verifier", "drafter"])
@pytest.mark.parametrize("damage, words", DAMAGE.values(), ids=DAMAGE)
def test_damaged_folders(pair, which, damage, words):
    folder, read = {"verifier": (pair[0], model_files.load_verifier), "drafter": (pair[1], model_files.load_drafter)}[which]
    read(folder)
    damage(folder)
    refused(lambda: read(folder), str(folder), *words)
    refused(lambda: tf.load(verifier=pair[0], drafter=pair[1]), str(folder), *words)


def test_swapped_folders(pair):
    refused(lambda: model_files.load_verifier(pair[1]), "drafter", "dflash_config")
    assert model_files.load_drafter(pair[0])[0].kind == "language_model"
    refused(lambda: tf.load(verifier=pair[1], drafter=pair[0]), "dflash_config")


DFLASH = {"mask_token_id": 11, "target_layer_ids": [0, 2]}


@pytest.mark.parametrize("part, change, words", [
    ("verifier", {"hidden_size": 16}, ("hidden size", "8", "16")),
    ("verifier", {"num_hidden_layers": 4}, ("layers", "3", "4")),
    ("verifier", {"vocab_size": 13}, ("vocabulary", "12", "13")),
    ("drafter", {"dflash_config": DFLASH | {"target_layer_ids": [0, 3]}}, ("[3]", "0 to 2")),
    ("drafter", {"dflash_config": DFLASH | {"mask_token_id": 12}}, ("mask id 12", "12")),
])  # fmt: skip
def test_mismatched_pairs_are_refused_before_any_weight_is_read(pair, part, change, words):
    change_json(pair[part == "drafter"] / "config.json", **change)
    for folder in pair:
        truncate(folder)
    refused(lambda: tf.load(verifier=pair[0], drafter=pair[1]), "does not fit", *words)


def test_saving_refuses_weights_of_another_model(tmp_path):
    params = random_weights(decoder.specs(replace(MODEL, intermediate_size=24)))
    refused(lambda: model_files.save_verifier(tmp_path, MODEL, params), "mlp.down_proj.weight", "(8, 24)", "(8, 20)")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("mesh", [None, (1, 4)])
def test_large_tensors_are_read_in_pieces(tmp_path, monkeypatch, order, mesh):
    """Pieces follow the outermost axis on disk, and their last one may be shorter."""
    weight, path = np.arange(7 * 12, dtype=np.float32).reshape(7, 12), tmp_path / WEIGHTS
    specs, entries = {"x": Spec((7, 12), (None, "ffn"))}, {"x": Entry("x", order)}
    storage.save(path, specs, entries, {"x": weight}, np.float32)
    monkeypatch.setattr(storage, "READ_AT_ONCE", 24)
    with safe_open(path, framework="np") as file:
        tensors = {"x": file.get_slice("x")}
        loaded = storage.load(path, tensors, specs, entries, jnp.bfloat16, mesh and tf.make_mesh(*mesh))
    np.testing.assert_array_equal(loaded["x"], weight.astype(jnp.bfloat16))


def test_saving_holds_one_tensor_at_a_time(tmp_path):
    names = [f"w{i}" for i in range(8)]
    specs = {name: Spec((512, 512), (None, None)) for name in names}
    params = {name: np.full((512, 512), i, np.float32) for i, name in enumerate(names)}
    tracemalloc.start()
    storage.save(tmp_path / WEIGHTS, specs, {name: Entry(name, order=(0, 1)) for name in names}, params, jnp.float32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20, "of 8 MiB"
    assert all((load_file(tmp_path / WEIGHTS)[name] == params[name]).all() for name in names)
