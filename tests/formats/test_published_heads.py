"""Files of block drafters with heads: what their keys mean, other names of tensors, copies, what is written and refused."""

import json
import re
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from answers import random_weights
from conftest import DATA, RANDOM_DRAFTER
from model_files import assert_same, change_tensors
from published_configs import TREEFLASH_4B, deepspec_folder, parse, without
from refusals import refused
from safetensors.numpy import load_file

import treeflash_jax as tf
from treeflash_jax.cli.commands import main
from treeflash_jax.drafters.block.heads.candidate_selector import CandidateSelectorSizes
from treeflash_jax.drafters.block.heads.gru import GruSizes
from treeflash_jax.drafters.block.heads.lilicorr import LiLiCorrSizes
from treeflash_jax.formats import dialects, model_files
from treeflash_jax.formats.keys import Keys

FOLDER, VERIFIER = DATA / "published", DATA / "conformance" / "a_treeflash" / "verifier"
DIALECTS = {
    "jetspec": "dflash", "domino": "domino", "dspark_gated": "dspark", "dspark_rnn": "dspark", "dflash2": "dflash2",
    "dspark_speculators": "speculators-dspark", "dflash2_speculators": "speculators-dflash2", "lilicorr": "lilicorr",
}  # fmt: skip


def read_raw(form: str) -> dict:
    return json.loads((FOLDER / form / "config.json").read_text())


def inside(raw: dict, *lost: str, **changes) -> dict:
    """config.json with another dflash_config."""
    return raw | {"dflash_config": without(raw["dflash_config"], *lost) | changes}


@pytest.mark.parametrize("form", DIALECTS)
def test_a_form_is_recognised(form):
    keys = Keys(read_raw(form), "config.json")
    assert dialects.recognise(FOLDER / form, keys, "drafter").name == DIALECTS[form]
    assert parse("drafter", read_raw(form)).taps == (1, 3)


def test_keys_of_published_files():
    """With the values of files on the Hub, on the sizes of the layers of Qwen3-4B's DFlash drafter."""
    layers = without(TREEFLASH_4B, "treeflash_config", "dflash_config", "block_size", "layer_types", "use_sliding_window")
    taps = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    domino = {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1, "gru_hidden_dim": 1024}
    domino |= {"emb_dim": 256}
    config = parse("drafter", layers | {"block_size": 16, "emb_dim": 256, "dflash_config": taps | domino})
    assert (config.head, config.head_rank, config.head_sizes) == ("gru", 256, GruSizes(1024, 1))
    assert (config.num_depths, config.candidates, config.lanes) == (16, 64, 16)
    selector = {"selector_rank": 256, "selector_top_k": 16, "conv_group_size": 16, "conv_kernel_size": 2, "block_size": 8}
    sliding = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "is_causal": False}
    config = parse("drafter", layers | sliding | {"dflash_config": taps | selector})
    assert (config.head, config.head_rank, config.head_sizes) == ("selector", 256, CandidateSelectorSizes(16))
    assert (config.num_depths, config.conv_group, config.causal_layers) == (7, 16, ())
    assert (config.sliding_layers, config.window, config.shared_window) == ((0, 1, 2, 3, 4), 2048, False)
    specforge = {"projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 256, "markov_head_type": "vanilla"}
    specforge |= {"enable_confidence_head": True, "confidence_head_alpha": 1.0, "confidence_head_with_markov": True}
    config = parse("drafter", layers | {"block_size": 7, "dflash_config": taps | specforge})
    assert (config.head, config.head_rank, config.num_depths, config.extras) == ("lowrank", 256, 7, ("shifted",))
    assert config.candidates == 64
    config = parse("drafter", layers | {"block_size": 7, "dflash_config": taps | specforge | {"sample_from_anchor": False}})
    assert (config.num_depths, config.shifted) == (6, False), "what a file states goes before what its writer usually means"


@pytest.mark.parametrize(("changes", "causal"), [
    ({}, (0,)), ({"is_causal": True}, (0, 1)), ({"is_causal": False}, ()), ({"causal": True}, (0, 1)),
    ({"causal_head": True, "is_causal": True}, (0, 1)),
])  # fmt: skip
def test_spellings_of_causal_blocks(changes, causal):
    """Without any, blocks of sliding layers alone are causal."""
    raw = without(read_raw("dflash2"), "is_causal") | {k: v for k, v in changes.items() if k == "is_causal"}
    raw |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    raw = inside(raw, **{k: v for k, v in changes.items() if k != "is_causal"})
    assert parse("drafter", raw).causal_layers == causal


@pytest.mark.parametrize(("changes", "width", "conv_group"), [
    ({}, 32, 0), ({"lilicorr_hidden_size": 0}, 64, 0), ({"lilicorr_hidden_size": 64}, 64, 0),
    ({"conv_kernel_size": 0, "conv_group_size": 0}, 32, 0), ({"conv_kernel_size": 2, "conv_group_size": 16}, 32, 16),
])  # fmt: skip
def test_sizes_of_lilicorr(changes, width, conv_group):
    """Embeddings are projected to a width other than the drafter's; 0 is no other width, and no convolution."""
    config = parse("drafter", inside(read_raw("lilicorr"), **changes))
    specs = config.specs()
    assert (config.head_sizes.width, config.head_sizes.mlp_width, config.conv_group) == (width, 2 * width, conv_group)
    assert ("token" in specs["head"]) == (width != 64)
    assert ("mlp_conv" in specs["backbone"]["groups"][0][0]) == (conv_group > 0)


def test_keys_of_the_speculators_library():
    raw = read_raw("dspark_speculators")
    assert (parse("drafter", raw).causal_layers, parse("drafter", raw).shared_window) == ((0,), True)
    assert parse("drafter", raw | {"sliding_window_non_causal": True}).causal_layers == ()
    assert parse("drafter", raw | {"sample_from_anchor": False}).num_depths == 7
    for form, shifted, causal in (("dspark_speculators", True, (0,)), ("dflash2_speculators", False, ())):
        config = parse("drafter", without(read_raw(form), "sample_from_anchor", "sliding_window_non_causal"))
        assert (config.shifted, config.causal_layers) == (shifted, causal), "defaults of the library"


MODELOPT = {"projector_type": "dspark", "markov_rank": 24, "use_confidence_head": True}
REFUSED = {
    "no alignment": (inside(read_raw("domino"), "shift_label"), "got no shift_label"),
    "no alignment of ModelOpt": (inside(read_raw("jetspec"), "causal_head", **MODELOPT), "got no shift_label"),
    "no layers": (read_raw("dspark_rnn") | {"target_layer_ids": None}, "target_layer_ids = None"),
    "two alignments": (inside(read_raw("domino"), sample_from_anchor=False), "True and sample_from_anchor False"),
    "two orders": (inside(read_raw("jetspec"), causal=False), "causal_head True and causal False"),
    "two orders outside": (read_raw("jetspec") | {"is_causal": False}, "causal_head True and is_causal False"),
    "another projector": (inside(read_raw("domino"), projector_type="causal_v6"), "projector_type = 'causal_v6'"),
    "two ranks": (read_raw("domino") | {"emb_dim": 25}, "got emb_dim 24 and emb_dim 25"),
    "no rank": (without(inside(read_raw("domino"), "emb_dim"), "emb_dim"), "emb_dim = None"),
    "no width": (inside(read_raw("domino"), "gru_hidden_dim"), "gru_hidden_dim = None"),
    "no GRU": (inside(read_raw("domino"), pure_draft_prefix_len=8), "pure_draft_prefix_len 8, expected at most 7"),
    "another Markov head": (read_raw("dspark_rnn") | {"markov_head_type": "fir"}, "markov_head_type 'fir'"),
    "no rank of tables": (read_raw("dspark_rnn") | {"markov_rank": 0}, "markov_rank = 0"),
    "three taps": (inside(read_raw("dflash2"), conv_kernel_size=3), "conv_kernel_size = 3"),
    "uneven groups": (inside(read_raw("dflash2"), conv_group_size=5), "conv_group_size 5"),
    "no candidates": (inside(read_raw("dflash2"), "selector_top_k"), "selector_top_k = None"),
    "a multiplier": (inside(read_raw("dflash2"), output_multiplier=0.2), "output_multiplier = 0.2"),
    "a cap": (inside(read_raw("dflash2"), final_logit_softcapping=20.0), "final_logit_softcapping = 20.0"),
    "a cap outside": (read_raw("dflash2") | {"final_logit_softcapping": 20.0}, "final_logit_softcapping"),
    "gemma": (read_raw("dspark_rnn") | {"attention_k_eq_v": True}, "attention_k_eq_v"),
    "a short window": (
        read_raw("dflash2") | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "use_sliding_window": True},
        "sliding_window 7, expected at least block_size 8",
    ),
    "no window": (read_raw("dflash2") | {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, "None"),
    "no scale": (inside(read_raw("lilicorr"), "lilicorr_logit_scale"), "lilicorr_logit_scale = None"),
    "odd heads": (inside(read_raw("lilicorr"), lilicorr_num_heads=5), "lilicorr_num_heads 5"),
    "a part of the vocabulary": (read_raw("dflash2_speculators") | {"draft_vocab_size": 96}, "draft_vocab_size = 96"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "words"), REFUSED.values(), ids=REFUSED)
def test_configs_that_are_refused(raw, words):
    refused(lambda: parse("drafter", raw), words)


def renamed(*pairs: tuple[str, str]):
    """Renames tensors as patterns say."""

    def rename(name: str) -> str:
        for pattern, new in pairs:
            name = re.sub(pattern, new, name)
        return name

    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


NAMES = {
    "early Domino": ("domino", renamed((r"^(prefix_gru|embed_proj)", r"logit_head.\1"))),
    "a confidence head": ("domino", lambda tensors: tensors | {"confidence_head.proj.weight": np.ones((1, 64))}),
    "ModelOpt": ("dspark_speculators", renamed((r"^markov_head\.", ""), (r"^confidence_head\.proj", "confidence_proj"))),
    "codebooks as modules": ("dflash2_speculators", renamed((r"(_codebook)$", r"\1.weight"))),
    "SGLang": ("lilicorr", renamed(
        (r"feature_mlp\.0\.", "feature_norm."), (r"feature_mlp\.1\.", "feature_mlp.up_proj."),
        (r"feature_mlp\.3\.", "feature_mlp.down_proj."), (r"(layers\.\d\.mlp)\.0\.", r"\1.up_proj."),
        (r"(lilicorr\.layers\.\d\.mlp)\.2\.", r"\1.down_proj."),
    )),
}  # fmt: skip


@pytest.mark.parametrize(("form", "change"), NAMES.values(), ids=NAMES)
def test_other_names_of_tensors(form, change, tmp_path):
    folder = shutil.copytree(FOLDER / form, tmp_path / form)
    before = load_file(folder / "model.safetensors").keys()
    change_tensors(folder, change)
    assert load_file(folder / "model.safetensors").keys() != before
    assert_same(model_files.load_drafter(folder), model_files.load_drafter(FOLDER / form))


def test_dflash2_files_of_z_lab_hold_the_same_tensors(tmp_path):
    folder = shutil.copytree(FOLDER / "dflash2_speculators", tmp_path / "drafter")
    shutil.copy(FOLDER / "dflash2" / "config.json", folder)
    assert_same(model_files.load_drafter(folder)[1], model_files.load_drafter(FOLDER / "dflash2_speculators")[1])


def test_copies_of_the_verifiers_tables_are_compared(tmp_path):
    tensors = load_file(FOLDER / "jetspec" / "model.safetensors") | load_file(FOLDER / "dspark_rnn" / "model.safetensors")
    folder = deepspec_folder(tmp_path / "drafter", "dspark_rnn", tensors)
    assert "embed" not in tf.load(verifier=VERIFIER, drafter=folder).weights.drafter
    for name in ("lm_head.weight", "embed_tokens.weight"):
        change_tensors(folder, lambda tensors, name=name: tensors | {name: tensors[name] + 1})
        refused(lambda: tf.load(verifier=VERIFIER, drafter=folder), f"{name} differs from")


def test_a_low_rank_head_is_written_as_dspark(tmp_path, capsys):
    """In the layout of speculators, unshifted as it was trained; again from there, bit for bit."""
    trained = replace(RANDOM_DRAFTER, head="lowrank", head_rank=8, verifier=("a/b", "Qwen3ForCausalLM"))
    params = random_weights(trained.specs())
    model_files.save_drafter(tmp_path / "ours", trained, params, dtype=jnp.float32)
    words = [str(tmp_path / "ours"), str(tmp_path / "dspark"), "--to", "speculators-dspark"]
    assert main(["convert", *words]) == 0
    raw = json.loads((tmp_path / "dspark/config.json").read_text())
    tensors = load_file(tmp_path / "dspark/model.safetensors")
    assert (raw["speculators_model_type"], raw["markov_head_type"], raw["markov_rank"]) == ("dspark", "vanilla", 8)
    assert (raw["sample_from_anchor"], raw["enable_confidence_head"]) == (False, False)
    [method] = raw["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == trained.num_depths
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "fc.weight"} < tensors.keys()
    config, again = model_files.load_drafter(tmp_path / "dspark")
    assert_same(again, params)
    assert config == trained
    shifted = replace(trained, shifted=True)
    model_files.save_drafter(tmp_path / "shifted", shifted, params, dialect="speculators-dspark", dtype=jnp.float32)
    assert model_files.read_drafter_config(tmp_path / "shifted").shifted
    for dialect, config, words in (
        ("dflash", replace(shifted, head="marginal"), "got a drafter with shifted"),
        ("treeflash", shifted, "got a drafter with shifted"),
        ("speculators-dspark", replace(trained, head="mlp"), "got a mlp head, expected lowrank"),
        ("domino", trained, "dialect 'domino'"),
    ):
        refused(lambda: model_files.writable(dialect, config).to_hf(config), words)  # noqa: B023


@pytest.mark.parametrize(("raw", "usual"), [
    (inside(read_raw("domino"), shift_label=False), 64), (read_raw("lilicorr"), 8),
], ids=["domino", "lilicorr"])  # fmt: skip
def test_a_drafter_keeps_its_candidates_in_our_own_files(raw, usual):
    """Its published number, and another. Without its head, it has that of a plain drafter, which files do not state."""
    ours, plain = dialects.DIALECTS["treeflash"], dialects.DIALECTS["dflash"]
    drafter = parse("drafter", raw)
    assert drafter.candidates == usual
    for config in (drafter, replace(drafter, candidates=16)):
        assert parse("drafter", ours.to_hf(config)) == config
        assert "treeflash_config" not in plain.to_hf(plain.without_head(config, {})[0])


@pytest.mark.parametrize(("head", "sizes"), [
    ("gru", GruSizes(12, 0)),
    ("selector", CandidateSelectorSizes(9)),
    ("lilicorr", LiLiCorrSizes(width=8, logit_scale=2.5)),
])  # fmt: skip
def test_sizes_of_heads_are_kept_in_our_own_files(head, sizes, tmp_path):
    drafter = replace(RANDOM_DRAFTER, head=head, head_sizes=sizes, head_rank=8)
    params = random_weights(drafter.specs())
    model_files.save_drafter(tmp_path, drafter, params, dtype=jnp.float32)
    assert_same(model_files.load_drafter(tmp_path), (drafter, params))
