"""A Llama with llama3 rope scaling against logits that transformers 5.8.1 computed (float32, random weights)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from conftest import DATA

from treeflash_jax.formats import models
from treeflash_jax.models import verifier

FOLDER = DATA / "llama"


def test_llama_logits_and_features():
    config, params = models.load_verifier(FOLDER)
    expected = np.load(FOLDER / "expected.npz")
    assert config.rope.kind == "llama3" and not config.qk_norm
    tokens = jnp.asarray(expected["prompt"])
    size = tokens.shape[1]  # well past the 32 positions after which the scaling acts
    positions = jnp.arange(size)[None]
    out = verifier.forward(params, config, tokens, positions, verifier.causal_mask(1, size), taps=(0,))
    np.testing.assert_allclose(verifier.logits(params, out.hidden_btd), expected["logits"], atol=1e-4)
    np.testing.assert_allclose(out.features_btj, expected["after_first_layer"], atol=1e-4)
    assert models.stop_ids(FOLDER, config) == (3, 4)
