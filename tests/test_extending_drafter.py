"""Extending the library by a drafter, its file dialect and the stage that trains it, without an edit to it."""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from answers import drafted_as_plain
from extending import CHAT, goes_through_everything
from flax import struct
from refusals import refused

import treeflash_jax as tf
from train import step_memory
from train.stages import drafting, registry
from treeflash_jax import drafters, trees
from treeflash_jax.core import parameters
from treeflash_jax.core.parameters import Entry, Spec
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters.ngram_join import join_ngrams
from treeflash_jax.formats import model_files
from treeflash_jax.formats.dialects import DIALECTS, dialect

# A drafter: after each token, the tokens of a table; it remembers the last token it was shown.


@struct.dataclass
class LastToken(drafters.State):
    token_b: jax.Array

    def axes(self):
        return LastToken(("batch",))

    def grow(self, capacity):
        return self

    def cut(self, length_b):
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BigramDrafter(drafters.Drafter):
    kind = dialect = "bigram"
    settings = ("depths", "ngrams")
    reads_tokens = True
    taps = (0,)

    vocab_size: int
    num_depths: int = 3
    num_nodes: int = 4
    ngrams: int = 0

    def configured(self, depths=3, **settings):
        return replace(self, num_depths=depths, **settings)

    def fitted(self, verifier):
        assert self.vocab_size == verifier.vocab_size
        return self

    def specs(self):
        return {"next": Spec((self.vocab_size,), (None,))}

    def init(self, batch, capacity, dtype):
        return LastToken(jnp.full(batch, -1, jnp.int32))

    def extend(self, params, verifier_params, state, new):
        last_b = jnp.take_along_axis(new.tokens_bt, jnp.maximum(new.count_b - 1, 0)[:, None], axis=1)[:, 0]
        return LastToken(jnp.where(new.count_b > 0, last_b, state.token_b))

    def draft(self, inputs):
        """A path along the table; nothing at all where the state does not hold the anchor."""
        token_b, path = inputs.anchor_b, []
        for _ in range(self.num_depths):
            token_b = inputs.params["next"][token_b].astype(jnp.int32)
            path.append(token_b)
        tokens_bi11 = jnp.stack(path, axis=1)[:, :, None, None]
        is_known_b = inputs.state.token_b == inputs.anchor_b
        log_probs = jnp.where(is_known_b[:, None, None, None], jnp.log(0.9), -jnp.inf) + jnp.zeros(tokens_bi11.shape)
        last = jnp.arange(tokens_bi11.shape[1])[None, :, None, None] == tokens_bi11.shape[1] - 1
        table = trees.TransitionTable(tokens_bi11, log_probs, jnp.where(last, -1, 0) + jnp.zeros_like(tokens_bi11))
        return join_ngrams(table, inputs, self.ngrams)


def bigram_of(text: list[int], vocab_size: int) -> dict[str, jax.Array]:
    table = np.zeros(vocab_size, np.float32)
    table[text[:-1]] = text[1:]
    return {"next": jnp.asarray(table)}


# A file dialect: folders that hold such a table.


class BigramFiles(dialect.Dialect):
    name, part, marks = "bigram", "drafter", ("bigram_config",)

    def read_config(self, path, keys):
        return BigramDrafter(vocab_size=keys.table("bigram_config").integer("size"))

    def entries(self, config, specs, names):
        return {"next": Entry("bigram.table")}

    def to_hf(self, config):
        return {"bigram_config": {"size": config.vocab_size}}


TEXTS = [[7, 8, 9, 10] * n + [5, 6] for n in (1, 2, 40)]  # the last is longer than a chunk of the prefill


@pytest.fixture
def bigram(monkeypatch):
    monkeypatch.setitem(DIALECTS, "bigram", BigramFiles())


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_drafter(bigram, trained, prompts):
    """Its tokens come in the right order, whatever the length of a prompt: else it would draft nothing."""
    verifier, texts = trained.verifier, TEXTS[:prompts]
    plain = trained.generate(texts, max_new_tokens=24, builder="none")
    weights = Weights(trained.weights.verifier, bigram_of(texts[0] + plain[0].ids, verifier.vocab_size))
    config = BigramDrafter(vocab_size=verifier.vocab_size)
    model = tf.TreeFlash(verifier, weights, drafter=config, stop_ids=trained.stop_ids)
    for how in ({}, {"ngrams": 0}, {"builder": "walk"}, {"temperature": 1.0, "seed": 3}):
        expected = trained.generate(texts, max_new_tokens=24, **how | {"builder": "none"})
        results = drafted_as_plain(model, texts, {"nodes": 4} | how, plain=expected, max_new_tokens=24)
        assert how or results[0].tau > 1.2


@pytest.mark.slow
def test_a_dialect_and_the_drafter_in_it(bigram, tiny, tmp_path, capsys):
    plain = tiny.generate(CHAT, max_new_tokens=12, builder="none")[0]
    own = bigram_of(plain.prompt_ids + plain.ids, tiny.verifier.vocab_size)
    folder, config = tmp_path / "drafter", BigramDrafter(vocab_size=tiny.verifier.vocab_size)
    model_files.save_drafter(folder, config, own, dialect="bigram", dtype=jnp.float32)
    model = tf.load("tiny", drafter=folder)
    assert model.drafter == config
    np.testing.assert_array_equal(model.weights.drafter["next"], own["next"])
    refused(lambda: model.generate(CHAT, shortlist=4), "got shortlist 4, but drafters of kind 'bigram' have no")
    goes_through_everything(model, folder, tmp_path, capsys, {"nodes": 4, "depths": 2})


# A stage that trains it: the table learns the mean of the tokens that follow.


@dataclass(frozen=True, kw_only=True)
class BigramStage(drafting.DraftingStage):
    stage: Literal["bigram"] = "bigram"
    size: int
    trains = ("next",)

    def drafter_config(self, verifier, start):
        return BigramDrafter(vocab_size=self.size)

    def fresh(self, drafter, weights, stored):
        return parameters.initialize(drafter.specs(), jax.random.key(self.loop.seed), scale=self.init_scale)

    def make_sums(self, verifier, drafter):
        def sums(params, frozen, batch, keys_b):
            here_bt, after_bt = batch.tokens_bt[:, :-1], batch.tokens_bt[:, 1:]
            weight_bt = batch.weights_bt[:, 1:] * (batch.segments_bt[:, 1:] == batch.segments_bt[:, :-1])
            error_bt = jnp.square(params["next"][here_bt] - after_bt)
            return {"loss": (jnp.sum(weight_bt * error_bt), jnp.sum(weight_bt))}

        return sums


@pytest.mark.slow
def test_a_drafter_is_trained_and_exported(bigram, monkeypatch, tmp_path):
    monkeypatch.setitem(registry.STAGES, "bigram", BigramStage)
    toy_training.write(tmp_path)
    toml = toy_training.write_stage(tmp_path, 'stage = "bigram"', "size = 64", without=("objective", "drafter"))
    run, evaluate = tmp_path / "run", "evaluate={prompts = 1, nodes = [4], new_tokens = 4}"
    often = "loop.log_every=1", "optimizer.learning_rate=6"
    settings = registry.read_stage(toml, [f"run={run}", "loop.steps=12", *often, evaluate])
    drafting.train(settings)
    log = toy_training.read_log(run)
    assert log[-1]["loss"] < 0.5 * log[0]["loss"] and log[-1]["held_out/tau_4"] >= 1
    model = toy_training.exported(run, tmp_path / "verifier")
    assert "| depths | 3 |" in (tmp_path / "out" / "README.md").read_text()
    rounded = model_files.load_drafter(run / "model")[1]["next"]  # in bfloat16
    np.testing.assert_allclose(model.weights.drafter["next"], rounded, rtol=1e-2)
    assert np.asarray(rounded).max() > 10
    compiled = step_memory.compile_step(settings, "tiny", jax.devices()[:1])
    assert compiled["trains"] == ["next"] and compiled["flops_per_step"] == 0, "it has no products"
