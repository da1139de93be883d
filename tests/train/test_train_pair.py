"""A drafter in one command: rules, refusals, stage files, a kill between stages, and the line that uses the result."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import toy_training

import treeflash_jax as tf
from train import choices, compose, config, data, drafter, loop, measure, pair
from train.records import Source
from treeflash_jax import cli
from treeflash_jax.drafters.block.config import fresh_layers
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.pairs import locate
from treeflash_jax.verifiers.config import ModelConfig

THINGS = ("pens", "cows", "apples", "books", "coins")
SMALL = [
    "steps=6", "head_steps=4", "mesh.data=1", "block_size=4", "num_layers=1", "respond.max_new_tokens=12",
    "respond.temperatures=[0]", "drafter.evaluate.prompts=0", "head.evaluate.prompts=0", "drafter.loop.save_every=2",
    "measure.prompts=2", "measure.new_tokens=6", "measure.nodes=[4]", "measure.temperatures=[0]",
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "asked.jsonl"
    lines = [{"turns": [f"A box holds {3 + i} {THINGS[i % 5]}. How many do 3 boxes hold?"]} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings_of(prompts, out, *more):
    return config.load(pair.PairConfig, None, ["verifier=tiny", f"prompts={prompts}", f"out={out}", *SMALL, *more])


@pytest.mark.slow
def test_one_command_makes_a_drafter_and_goes_on_where_it_was_killed(prompts, tmp_path, monkeypatch, capsys):
    """Killed before the head; the same command then ends, and the last line it prints runs."""
    monkeypatch.setattr(measure, "DTYPES", {})
    monkeypatch.setattr(measure, "ATTENTION", {})
    settings, ran, real = settings_of(prompts, tmp_path / "pair"), [], dict(pair.MAINS)
    loaded, load = {}, tf.load

    def load_once(*, verifier, drafter, **named):
        if (verifier, drafter) not in loaded:
            loaded[verifier, drafter] = load(verifier=verifier, drafter=drafter, **named)
        return loaded[verifier, drafter]

    monkeypatch.setattr(tf, "load", lambda _=None, **named: load_once(**named))  # keeps the compiled programs

    def killed(stage):
        raise KeyboardInterrupt

    def watched(name):
        def main(stage):
            ran.append(name)
            real[name](stage)

        return main

    monkeypatch.setattr(pair, "MAINS", {name: watched(name) for name in real} | {"head": killed})
    with pytest.raises(KeyboardInterrupt):
        pair.main(settings)
    assert ran == ["respond", "drafter"]
    shown = capsys.readouterr().out
    for line in (
        "mask_token_id = 3: <|mask|>, which the training data does not have",
        "target_layer_ids = 1, 2, 3: 3 of the verifier's 6 layers by the published rule",
        "block_size = 4: as given",
        "compute_dtype = float32: this CPU has no bfloat16 instructions",
        "loop.steps = 6: as given",
        "sources.0.hold_out = 4: every so-many-th of 12 prompts",
    ):
        assert line in shown
    monkeypatch.setattr(pair, "MAINS", {name: watched(name) for name in real})
    pair.main(settings)
    assert ran == ["respond", "drafter", "head", "export", "measure"], "what was finished was not run again"
    *_, line = [line.strip() for line in capsys.readouterr().out.splitlines() if "treeflash generate" in line]
    words = shlex.split(line)
    assert words[:6] == ["treeflash", "generate", "--verifier", "tiny", "--drafter", str(tmp_path / "pair" / "model")]
    assert cli.main([*words[1:], "--max-new-tokens", "3"]) == 0
    for name, kind in pair.KINDS.items():
        stage = config.load(kind, tmp_path / "pair" / f"{name}.toml")
        if name in ("drafter", "head"):
            assert (stage.loop.steps, stage.mesh.data) == ({"drafter": 6, "head": 4}[name], 1)
    measured = json.loads((tmp_path / "pair" / "measured.json").read_text())
    assert measured["prompts"] == 2 and measured["options"] == {"nodes": 4} and measured["comparable"]
    [greedy] = measured["temperatures"]
    assert greedy["same"] == 2 and greedy["tau"] >= 1 and greedy["speedup"] > 0
    card = (tmp_path / "pair" / "model" / "README.md").read_text()
    [line] = [line.strip() for line in card.splitlines() if "tf.load(" in line]
    monkeypatch.setattr(tf, "load", load)
    scope = {"tf": tf}
    exec(line, scope)
    assert scope["model"].drafter.block_size == 4 and scope["model"].drafter.head == "mlp"
    with pytest.raises(ValueError, match="holds a run with other settings .loop.steps was 6, now 7."):
        pair.main(replace(settings, steps=7))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("drafter.loop.stesp=3",), "unknown setting loop.stesp; did you mean loop.steps"),
        (("respond.temperature=0",), "unknown setting temperature; did you mean temperatures"),
        (("measure.nodes=[]",), "got no nodes"),
        (("target_layer_ids=[0, 1]",), r"target_layer_ids \[0, 1\], all in the first half of the verifier's 6 layers"),
        (("target_layer_ids=[1, 6]",), r"reads verifier layers \[6\]"),
        (("mask_token_id=5000",), "mask id 5000 lies outside"),
        (("num_prompts=3",), "got 3 prompts, expected at least 8"),
    ],
)
def test_mistakes_show_up_before_anything_runs(prompts, tmp_path, more, message):
    with pytest.raises(ValueError, match=message) as caught:
        pair.main(settings_of(prompts, tmp_path / "pair", *more))
    assert "\n" not in str(caught.value) and not (tmp_path / "pair").exists()


def test_minutes_size_answers_and_steps_by_their_speed(prompts, tmp_path, monkeypatch):
    """45 % of the time goes to answers, 35 % to the backbone, 15 % to the head."""
    result = SimpleNamespace(ids=[1] * 32, seconds=8.0)
    model = SimpleNamespace(generate=lambda ids, **named: [result] * len(ids))
    monkeypatch.setattr(pair.respond, "load_model", lambda stage: model)
    monkeypatch.setattr(pair.respond, "collect_prompts", lambda stage, model: [SimpleNamespace(ids=[1])] * 2000)
    verifier = compose.Verifier.open("tiny")
    settings = settings_of(prompts, tmp_path, "minutes=10", "respond.batch=4")
    stage = compose.respond_stage(settings, verifier).stage
    choice = pair.answers_in_time(stage, settings)
    assert choice.value == int(0.45 * 600 * (4 * 32 / 8) / stage.max_new_tokens)
    assert pair.answers_in_time(stage, replace(settings, minutes=1000.0)) is None, "all of them"
    assert compose.respond_stage(settings, verifier, choices.Choice(9, "timed")).stage.sources[0].limit == 9

    log = tmp_path / "timing-head"
    written = [{"step": 1, "tokens_per_second": 100.0}, {"step": 2, "tokens_per_second": 512.0}, {"step": 3}]

    def timed(stage):
        assert stage.run == str(log) and stage.loop.steps == pair.TIMED_STEPS and stage.evaluate.prompts == 0
        log.mkdir()
        (log / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))

    monkeypatch.setitem(pair.MAINS, "head", timed)
    answers = compose.Answers(count=900, rows=80_000, mask=choices.Choice(3, "unused"))
    trained = compose.drafter_stage(settings, verifier, stage, answers).stage
    assert trained.head == "mlp" and trained.objective.vocabulary == 4 * trained.data.row_tokens
    made = compose.head_stage(replace(settings, head_steps=0), verifier, stage, answers, trained).stage
    assert made.keep_head and made.objective.vocabulary == 0
    alone = compose.drafter_stage(replace(settings, drafter={"head": "marginal"}), verifier, stage, answers).stage
    assert not compose.head_stage(settings, verifier, stage, answers, alone).stage.keep_head
    assert made.loop.steps == 3 * 80_000 // 8
    assert pair.steps_in_time("head", made, replace(settings, minutes=1e6)) is None
    choice = pair.steps_in_time("head", made, settings)
    assert choice.value == int(0.15 * 600 / (made.loop.batch * made.data.row_tokens / 512)) and not log.exists()
    made = compose.head_stage(settings, verifier, stage, answers, trained, choice)
    assert made.stage.loop.steps == choice.value and f"loop.steps = {choice.value}: {choice.reason}" in made.lines


# The rules


class Inner:
    """Of a Hugging Face tokenizer, what the rules read."""

    bos_token_id, eos_token_id, pad_token_id, unk_token_id = 0, 1, 1, None

    def __init__(self, special, size, template=""):
        self.size, self.chat_template = size, template
        self.added_tokens_decoder = {i: SimpleNamespace(content=name, special=True) for i, name in special.items()}

    def __len__(self):
        return self.size


SPECIAL = {0: "<s>", 1: "</s>", 2: "<user>", 3: "<file_sep>", 4: "<|reserved_4|>", 5: "<|mask|>"}


@pytest.mark.parametrize(
    ("used", "size", "expected"),
    [
        ((), 24, 5),  # the one called mask
        ((5,), 24, 4),  # a reserved one
        ((4, 5), 24, 20),  # a row that no text has
        ((4, 5, 20), 24, 21),
        ((4, 5), 20, 3),  # another special token, but none of the roles or of the template
        ((3, 4, 5), 20, 19),  # an ordinary one that does not occur
        ((3, 4, 5, *range(6, 20)), 20, 7),  # the rarest
    ],
)
def test_a_mask_token_is_one_that_never_occurs(used, size, expected):
    counts_v = np.zeros(size, np.int64)
    counts_v[list(used)] = 9
    counts_v[7] //= 3
    assert choices.mask_token(Tokenizer(Inner(SPECIAL, 20, "{{ '<user>' }}")), counts_v).value == expected


def test_published_and_real_choices():
    """Qwen3's is the row after its tokenizer's last; SmolLM2's layers are those of its recipe."""
    qwen = Tokenizer(Inner({0: "<s>", 1: "</s>", 2: "<|fim_pad|>"}, 151_669))
    assert choices.mask_token(qwen, np.zeros(151_936, np.int64)).value == 151_669
    assert choices.mask_token(Tokenizer.load(locate("tiny")), np.zeros(2048, np.int64), (2,)).value == 3
    assert choices.mask_token(None, np.array([1, 0, 0]), (1,)).value == 2
    assert choices.tapped_layers(30).value == (1, 8, 14, 20, 27) and choices.tapped_layers(6).value == (1, 2, 3)
    assert [choices.drafter_layers(layers).value for layers in (6, 30, 36, 80)] == [2, 3, 4, 5]
    for layers in range(1, 100):
        taps = choices.tapped_layers(layers).value
        assert len(set(taps)) == len(taps) and layers // 2 <= max(taps) < layers


def test_only_like_layers_are_copied():
    llama = ModelConfig(num_layers=30, model_type="llama", qk_norm=False, **toy_training.SIZES)
    assert choices.initial_layers(llama, 3).value == (27, 28, 29)
    assert choices.initial_layers(toy_training.MODEL, 2).value == (1, 2)
    qwen2 = ModelConfig(num_layers=30, model_type="qwen2", qk_norm=False, qkv_bias=True, **toy_training.SIZES)
    experts = replace(toy_training.MODEL, num_experts=4, experts_per_token=2, expert_size=8)
    for model in (qwen2, experts):
        assert choices.initial_layers(model, 2).value == ()
        drafter_ = replace(toy_training.DRAFTER, layers=fresh_layers(model, 2))
        with pytest.raises(
            ValueError, match=r"got initial_layers \[0, 1\], expected none: the layers of this verifier are of"
        ):
            choices.check_initial((0, 1), drafter_, model)


# What training refuses


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return toy_training.write(tmp_path_factory.mktemp("toy")).parent


def backbone(toy, tmp_path, *more):
    """Settings of a backbone for the toy verifier of three layers, whose answers have ids 4 to 63."""
    words = [f"run={tmp_path}/run", f"verifier={toy}/verifier", "loop.batch=8", "optimizer.learning_rate=1e-2", *more]
    words += ["objective.loss=cross-entropy", "objective.anchors=4", "objective.chunk=2", "data.row_tokens=32"]
    (tmp_path / "x.toml").write_text(f'[[sources]]\npath = "{toy}/responses.jsonl"\nformat = "responses"\n')
    return config.load(drafter.DrafterStage, tmp_path / "x.toml", [*words, "num_layers=1", "block_size=4"])


def test_backbones_that_cannot_learn_are_refused(toy, tmp_path, monkeypatch, capsys):
    unused = r"got mask_token_id 9, which occurs \d+ times in the training data, expected an unused token, such as 3 "
    spanning = r"got target_layer_ids \[0\], all in the first half .* such as \[1\]"
    copies = r"got initial_layers \[{}\], expected 1 verifier layers from 0 to 2, one for each layer of the backbone"
    for more, message in (
        (("mask_token_id=9",), unused),
        (("mask_token_id=3", "target_layer_ids=[0]"), spanning),
        (("mask_token_id=3", "initial_layers=[3]"), copies.format(3)),
        (("mask_token_id=3", "initial_layers=[1, 2]"), copies.format("1, 2")),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            drafter.main(backbone(toy, tmp_path, *more))
        assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
    monkeypatch.setattr(choices, "mask_token", lambda *_: choices.Choice(9, "rare"))
    monkeypatch.setattr(loop, "fit", lambda stage, *, params, **_: params)
    drafter.main(backbone(toy, tmp_path, "mask_token_id=9", "mesh.data=1"))
    assert "warning: got mask_token_id 9, which occurs" in capsys.readouterr().out


def test_counts_are_of_every_document(toy):
    source = Source(path=str(toy / "responses.jsonl"), format="responses", hold_out=10)
    corpus = data.open_sources([source], data.DataConfig(row_tokens=32), None, 0)
    lines = [json.loads(line) for line in (toy / "responses.jsonl").read_text().splitlines()]
    ids = [i for line in lines for i in line["prompt"] + line["response"]]
    assert corpus.token_counts(70).tolist() == np.bincount(ids, minlength=70).tolist()
