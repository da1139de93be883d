"""Trees of a verifier's true marginals: the marginals, the likeliest paths, and the count on an answer."""

import itertools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from conftest import RANDOM_MODEL, random_pair

from treeflash_jax.models import decoder

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "notebooks/results/true_marginals.py"))


@jax.jit
def distributions(weights, ids_bt: jax.Array) -> jax.Array:
    """The verifier's distribution of the token after each text."""
    positions = jnp.broadcast_to(jnp.arange(ids_bt.shape[1]), ids_bt.shape)
    out = decoder.forward(weights, RANDOM_MODEL, ids_bt, positions, decoder.causal_mask(*ids_bt.shape))
    return jax.nn.softmax(decoder.logits(weights, RANDOM_MODEL, out.hidden_btd[:, -1]))


def test_marginals_average_over_continuations():
    weights, text, size = random_pair().weights.verifier, jnp.array([[5, 9, 2]]), RANDOM_MODEL.vocab_size
    weights = weights | {"norm": 4.0 * weights["norm"]}  # far from uniform
    first = distributions(weights, text)[0]
    texts = jnp.concatenate([jnp.tile(text, (size, 1)), jnp.arange(size)[:, None]], axis=1)
    second = first @ distributions(weights, texts)
    sizes = dict(config=RANDOM_MODEL, samples=2000, depths=2)
    ids, probabilities = SCRIPT["marginals"](weights, jnp.pad(text, ((0, 0), (0, 5))), 3, jax.random.key(0), **sizes)
    for exact, kept, estimate, tolerance in zip((first, second), ids, probabilities, (1e-5, 0.01), strict=True):
        np.testing.assert_allclose(estimate, exact[kept], atol=tolerance)
        assert np.isclose(exact[kept[0]], jnp.max(exact), atol=tolerance) and jnp.max(exact) > 0.1


def test_trees_hold_the_likeliest_paths_and_an_answer_is_followed_as_far_as_they_hold_it():
    probabilities = -np.sort(-np.random.default_rng(0).dirichlet(np.full(5, 0.5), size=3), axis=1)
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(5), (3, 1)), axis=1)
    likelihoods = {
        path: np.prod([probabilities[depth, list(ids[depth]).index(token)] for depth, token in enumerate(path)])
        for depths in (1, 2, 3)
        for path in itertools.product(range(5), repeat=depths)
    }
    for nodes in (2, 8, 16):
        paths = sorted(likelihoods, key=likelihoods.get, reverse=True)[: nodes - 1]
        tree = jax.device_get(SCRIPT["build"](ids, jnp.asarray(probabilities), nodes=nodes))
        for answer in itertools.product(range(5), repeat=3):
            assert SCRIPT["accepted"](tree, [*answer, 0]) == max(n for n in range(4) if n == 0 or answer[:n] in paths)
