"""Runs of the stages of block drafters: meshes, parts, samples and records give the same training; what they start from."""

import dataclasses
import shutil
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from answers import random_weights
from quantized_files import make_folders
from refusals import refused
from toy_training import MODEL, WITH_HEAD, make_batch

from train import drafter, head
from train.data import packing
from train.runtime import hosts, training_state, watch
from train.stages import drafting, evaluation, registry
from treeflash_jax.core import parameters, sharding
from treeflash_jax.core.devices import Device
from treeflash_jax.drafters.block import backbone as dflash
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.engine.device_memory import count_bytes, device_bytes
from treeflash_jax.formats import draft_vocabulary, model_files
from treeflash_jax.models import decoder, packed_attention, quantized


def run_stage(toy, run, *overrides):
    """Trains a head and returns the log without times."""
    head.main(toy_training.settings(toy, f"run={run}", *overrides))
    return toy_training.read_log(run)


def assert_same_losses(first, other, tolerance):
    names = ("step", "loss", "overlap", "top1", "grad_norm", "held_out/loss")
    first, other = ([{name: line[name] for name in names if name in line} for line in log] for log in (first, other))
    jax.tree.map(partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance), first, other)


@pytest.fixture(scope="module")
def one_device(toy, tmp_path_factory):
    return run_stage(toy, tmp_path_factory.mktemp("one") / "run", "loop.steps=50", "train_backbone=true")


@pytest.mark.slow
def test_a_mesh_parts_and_chunks_follow_one_device(toy, one_device, tmp_path):
    overrides = "loop.accumulate=2", "mesh.data=2", "mesh.fsdp=2", "mesh.model=2", "objective.chunk=4"
    log = run_stage(toy, tmp_path / "run", "loop.steps=50", "train_backbone=true", *overrides)
    assert log[-1]["loss"] < log[0]["loss"] * 0.9
    assert_same_losses(one_device, log, 1e-4)


@pytest.mark.slow
def test_samples_of_the_vocabulary_are_the_same_on_every_mesh(toy, tmp_path):
    words = ["loop.steps=6", "train_backbone=true", "objective.vocabulary=40"]
    first = run_stage(toy, tmp_path / "one", *words)
    for name, mesh in {"parts": ["mesh.data=2", "mesh.fsdp=2", "mesh.model=2"], "data": ["mesh.data=8"]}.items():
        assert_same_losses(first, run_stage(toy, tmp_path / name, *words, *mesh), 1e-4)


@pytest.mark.slow
def test_a_record_of_the_verifiers_outputs_gives_the_same_losses(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(drafting, "step_flops", lambda *_: 1.0)
    words = "loop.steps=4", "loop.evaluate_every=0"
    expected = run_stage(toy, tmp_path / "plain", *words)

    def run_recorded(name, folder, size=1):
        return run_stage(toy, tmp_path / name, *words, f"data.record={tmp_path / folder}", f"mesh.data={size}")

    assert_same_losses(expected, run_recorded("recording", "outputs"), 1e-5)
    assert "recording" in capsys.readouterr().out
    shutil.copytree(tmp_path / "outputs", tmp_path / "zeros")
    for path in (tmp_path / "zeros").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    for line, other in zip(expected, run_recorded("of zeros", "zeros"), strict=True):
        assert all(abs(line[key] - other[key]) > 1e-3 for key in line if key.endswith("loss")), "files are read"
    # Last, since programs for a mesh turn JAX's cache off.
    assert_same_losses(expected, run_recorded("recorded", "outputs", size=2), 1e-5)
    assert "recording" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [
    ("gru", ("train_backbone=true", "objective.base_weight=annealed", "objective.dpace=true")),
    ("selector", ("objective.loss=cross-entropy-l1",)),
])  # fmt: skip
def test_heads_of_other_recipes_learn_and_draft(toy, tmp_path, name, words):
    run_stage(toy, tmp_path / "run", f"head={name}", *words)
    made, weights = model_files.load_drafter(f"{tmp_path}/run/model")
    assert made.head == name and np.any(weights["head"][HEADS[name].scored[0]])
    toy_training.exported(tmp_path / "run", toy.parent / "verifier")


@pytest.mark.parametrize(("words", "got"), [
    ((), "objective.loss 'forward-kl', expected"),
    (("objective.loss=cross-entropy", "objective.vocabulary=40"), "objective.vocabulary 40, expected 0"),
])  # fmt: skip
def test_a_selector_has_no_forward_kl_and_no_sample_of_the_vocabulary(toy, words, got):
    refused(lambda: toy_training.settings(toy, "head=selector", *words), f"head 'selector' and {got}")


def test_state_lies_over_fsdp_and_model(toy):
    settings = toy_training.settings(toy, "train_backbone=true", "mesh.data=2", "mesh.fsdp=2", "mesh.model=2")
    mesh = hosts.make_mesh(settings.mesh)
    task = drafting.make_task(settings, MODEL, WITH_HEAD)
    transform = training_state.make_optimizer(settings.optimizer, 10, task.specs)
    state = training_state.abstract_state(task, transform, training_state.abstract_batch(2, 32), mesh)
    for tree in (state.params, state.optimizer[1][0].mu, state.optimizer[1][0].nu):
        assert tree["backbone"]["groups"][0][0]["gate"].sharding.spec == jax.P("model", "fsdp")
        assert tree["head"]["down"].sharding.spec == jax.P("model", "fsdp")
    assert state.params["backbone"]["norm"].sharding.spec == jax.P(None)
    assert sharding.partition(("batch", None), (8, 32), mesh) == jax.P(("data", "fsdp"), None)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gptq", "modelopt"])
def test_a_verifier_with_the_weights_of_its_files_teaches_as_the_expanded_one(toy, tmp_path, form):
    """Sums of a step, and copies of layers."""
    folder, _ = make_folders(tmp_path, toy.parent / "verifier", form)
    settings, batch = toy_training.settings(toy, "train_backbone=true"), make_batch([9, 12, 20, 7])
    params, keys_b = random_weights(WITH_HEAD.specs()), jax.random.split(jax.random.key(0), 2)
    toml = toy_training.write_stage(toy.parent, 'stage = "drafter"', without=("drafter",))
    copying = registry.read_stage(toml, ["num_layers=1", "mask_token_id=3", "initial_layers=[2]"])
    made = drafting.make_task(dataclasses.replace(settings, quantize="int4"), MODEL, WITH_HEAD)
    assert quantized.quantization_scheme(made.frozen_specs["verifier"]) == "int4", "without weights too"
    results = []
    for scheme in ("int4", None):
        _, weights = model_files.load_verifier(folder, quantize=scheme, wide_tables=True)
        task = drafting.make_task(settings, MODEL, WITH_HEAD, weights=weights)
        assert quantized.quantization_scheme(weights) == scheme and task.flops == made.flops
        assert count_bytes(task.frozen_specs["verifier"], jnp.float32) == device_bytes(weights), "a step widens none"

        @jax.jit
        def run(params, weights, task=task):
            frozen = training_state.gather({"verifier": weights}, task.frozen_specs, task.compute_dtype)
            return task.sums(params, frozen, batch, keys_b)

        copies = copying.fresh(copying.drafter_config(MODEL, None), weights, {})["backbone"]
        results.append((run(params, weights), copies))
    (sums, copies), (expected_sums, expected_copies) = results
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), sums, expected_sums)
    jax.tree.map(np.testing.assert_array_equal, copies, expected_copies)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(), ("mesh.data=2", "mesh.fsdp=2")], ids=str)
def test_runs_over_a_quantised_verifier_keep_its_weights(toy, tmp_path, mesh):
    """On one device, with outputs of the verifier recorded for each form of its weights."""
    folder, _ = make_folders(tmp_path, toy.parent / "verifier", "gptq")
    words = f"verifier={folder}", "loop.steps=6", "train_backbone=true", "evaluate={prompts=2,nodes=[4],new_tokens=4}"
    words += mesh or (f"data.record={tmp_path}/outputs",)
    expanded, kept = (run_stage(toy, tmp_path / name, *words, f"quantize={name}") for name in ("none", "int4"))
    assert_same_losses(expanded, kept, 1e-4)
    assert mesh or len([*(tmp_path / "outputs").iterdir()]) == 4
    refused(lambda: run_stage(toy, tmp_path / "none", *words, "quantize=int4"), "quantize")


@pytest.mark.parametrize("name", ["dpace", "prompts"])
def test_a_weight_of_prompts_that_the_objective_would_replace_is_refused(toy, name):
    refused(
        lambda: toy_training.settings(toy, "data.prompt_weight=0.5", f"objective.{name}=true"),
        f"got data.prompt_weight 0.5 and objective.{name} true, expected only one of them",
    )


@pytest.mark.parametrize("word", ["dpace=true", "prompts=true"])
def test_held_out_slots_are_those_of_answers_and_weigh_the_same(toy, word):
    equal, other = (toy_training.settings(toy, "objective.decay=0", *words) for words in ((), (f"objective.{word}",)))
    sums = [settings.make_held_out_sums(MODEL, WITH_HEAD) for settings in (equal, other)]
    assert sums[0].keywords == sums[1].keywords != other.make_sums(MODEL, WITH_HEAD).keywords


def test_of_experts_those_of_a_token_are_counted(toy):
    """As many products as in a dense layer of their joint width, plus the router's."""
    settings = toy_training.settings(toy)
    experts = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2, expert_size=12)
    sparse, dense = (
        drafting.make_task(settings, model, WITH_HEAD).flops
        for model in (experts, dataclasses.replace(MODEL, intermediate_size=24))
    )
    routed = MODEL.num_layers * settings.loop.batch * settings.data.sequence_length * 2 * MODEL.hidden_size * 2
    assert sparse == dense + routed


@pytest.mark.parametrize("kind, expected", [("tpu", "splash"), ("cpu", "chunked")])
def test_verifier_and_blocks_attend_as_the_device_does(toy, monkeypatch, kind, expected):
    """Chosen for the devices of the mesh, in the verifier and in the backbone, whose layers are traced once."""
    asked = []
    monkeypatch.setattr(packed_attention, "supports", lambda name, *arrays: bool(asked.append(name)))
    monkeypatch.setattr(sharding, "device", Device)
    task = drafting.make_task(toy_training.settings(toy), MODEL, WITH_HEAD, kind)
    asked.clear()  # the FLOPs were counted
    params, frozen = (parameters.abstract(specs, "float32", None) for specs in (task.specs, task.frozen_specs))
    jax.eval_shape(task.sums, params, frozen, make_batch((20, 20)), jax.random.split(jax.random.key(0), 2))
    assert set(asked) == {expected} and len(asked) >= 2


def test_copied_layers_read_the_context_as_the_verifier_does(toy):
    """A single layer, the one after the tap, has the verifier's own keys and values."""
    weights, batch = random_weights(decoder.specs(MODEL), 0), make_batch((17, 9, 14, 11, 12))
    toml = toy_training.write_stage(toy.parent, 'stage = "drafter"', without=("drafter",))
    stage = registry.read_stage(toml, ["num_layers=1", "mask_token_id=3", "target_layer_ids=[1, 0]", "initial_layers=[2]"])
    config = stage.drafter_config(MODEL, None)
    made = stage.fresh(config, weights, {})["backbone"]
    mask_btt = np.broadcast_to(np.tri(32, dtype=bool), (2, 32, 32))

    @jax.jit
    def read(weights, made):
        out = decoder.forward(weights, MODEL, batch.tokens_bt, batch.positions_bt, mask_btt, taps=config.taps)
        return out, dflash.context_kv(made, config.layers, out.features_btj, batch.positions_bt)

    out, context = read(weights, made)
    for got, expected in zip(context[0], out.new[2], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, made["groups"][0][0], weights["groups"][0][2])

    two = dataclasses.replace(stage, num_layers=2, initial_layers=(2, 0))
    made = two.fresh(two.drafter_config(MODEL, None), weights, {})["backbone"]
    jax.tree.map(np.testing.assert_array_equal, made["groups"][0][1], weights["groups"][0][0])


def test_a_head_goes_on_where_it_was(toy, tmp_path):
    weights = random_weights(WITH_HEAD.specs(), 1)
    model_files.save_drafter(tmp_path / "drafter", WITH_HEAD, weights)
    settings = toy_training.settings(toy, f"drafter={tmp_path}/drafter", "keep_head=true")
    made = drafting.read_drafter_config(settings, MODEL)
    stored = drafting.read_stored(settings, made)
    start = stored | settings.fresh(made, None, stored)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0.01), start, weights)
    settings = toy_training.settings(toy, "keep_head=true")
    refused(
        lambda: drafting.read_drafter_config(settings, MODEL),
        "got a drafter with head 'marginal' to be kept, expected 'mlp'",
    )
    start = dataclasses.replace(WITH_HEAD, shifted=True, causal_layers=(0,))
    refused(lambda: settings.drafter_config(MODEL, start), "got a drafter with shifted and causal_layers, expected")
    start, model = dataclasses.replace(WITH_HEAD, scales_embeddings=False), dataclasses.replace(MODEL, embedding_factor=3.0)
    refused(lambda: settings.drafter_config(model, start), "trained without the verifier's embedding factor")


def test_the_most_frequent_tokens_of_answers_are_listed_beside_the_drafter(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(draft_vocabulary, "SMALLEST", 0)
    settings = toy_training.settings(toy, "sources.0.hold_out=0")
    corpus = packing.load_corpus(settings.sources, settings.data, None, 0)
    draft_vocabulary.write(tmp_path, corpus.answer_counts(MODEL.vocab_size))
    answers = [token for line in toy_training.read_lines(settings.sources[0].path) for token in line["response"]]
    counts = np.bincount(answers, minlength=MODEL.vocab_size)
    listed = draft_vocabulary.read(tmp_path, MODEL.vocab_size)
    assert listed.size == MODEL.vocab_size // 6
    assert counts[listed].min() >= np.delete(counts, listed).max()


def test_answers_that_end_at_their_first_token_have_no_tau(monkeypatch):
    settings = SimpleNamespace(evaluate=evaluation.EvaluateConfig(nodes=(4,)), systems={"tau": {}})
    results = iter([[], [2, 3]])
    pair = SimpleNamespace(
        drafter=SimpleNamespace(settings={}, specs=dict),
        weights=SimpleNamespace(verifier={}),
        generate_each=lambda prompts, **how: [(0, SimpleNamespace(accept_lengths=next(results)))],
    )
    monkeypatch.setattr(evaluation, "held_out_prompts", lambda corpus, count: [[1, 2]])
    task = SimpleNamespace(specs={}, compute_dtype=np.float32)
    measure = evaluation.make_tau_measure(settings, task, pair, None, {})
    assert [measure({}, lambda words: None) for _ in range(2)] == [{}, {"held_out/tau_4": 2.5}]


@pytest.mark.slow
def test_a_backbone_and_its_head_learn_from_scratch_over_samples_of_the_vocabulary(toy, tmp_path, monkeypatch):
    reports = []
    monkeypatch.setattr(watch.Watch, "show", lambda self, done=None, note=None: reports.append(note))
    toml = toy_training.write_stage(toy.parent, 'stage = "drafter"', without=("drafter",))
    words = ["num_layers=1", "block_size=4", "mask_token_id=3", "head=mlp", f"run={tmp_path}/run"]
    words += ["evaluate.prompts=2", "evaluate.nodes=[4]", "evaluate.new_tokens=8"]
    refused(lambda: registry.read_stage(toml, words), "head 'mlp' and objective.base_weight 0")
    settings = registry.read_stage(toml, [*words, "objective.base_weight=0.5", "objective.vocabulary=40"])
    drafter.main(settings)
    log = toy_training.read_log(tmp_path / "run")
    assert log[-1]["loss"] < log[0]["loss"] and 1 <= log[-1]["held_out/tau_4"] <= 4
    assert log[-1]["held_out/tau_marginal_4"] >= 1
    assert {f"evaluating {done} of 2 prompts with trees of 4 nodes" for done in range(3)} <= set(reports)
    made, weights = model_files.load_drafter(f"{tmp_path}/run/model")
    assert made.head == "mlp" and np.any(weights["head"]["down"])
    exact = dataclasses.replace(settings, objective=dataclasses.replace(settings.objective, vocabulary=0))
    task, whole = (drafting.make_task(of, MODEL, made) for of in (settings, exact))
    parts = weights, {"verifier": random_weights(decoder.specs(MODEL), 0)}, make_batch((20, 20))
    keys = jax.random.split(jax.random.key(0), 2)
    held_out, all_tokens, some = (of(*parts, keys) for of in (task.held_out_sums, whole.sums, task.sums))
    jax.tree.map(np.testing.assert_array_equal, held_out, all_tokens)
    assert not np.array_equal(some["loss"], all_tokens["loss"])
