"""Drafters whose network runs once per level, on a small recurrent network with attention over its own path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_trees import eagle_2, grow, paths
from jax import lax
from scipy.special import log_softmax

from treeflash_jax.drafters.lanes import LaneExpander, LaneState, Level, scratch_specs
from treeflash_jax.drafters.ngram_drafter import Continuations
from treeflash_jax.drafters.ngram_join import JoinedExpander
from treeflash_jax.models import vocab
from treeflash_jax.models.attention import tree_attention
from treeflash_jax.models.caches import Cache
from treeflash_jax.models.kv_cache import KVState

BATCH, VOCAB, DRAFT_VOCAB, WIDTH, DEPTHS, SLOTS, CHILDREN = 3, 29, 17, 8, 4, 6, 5
LENGTHS = [0, 2, 6]
ANCHORS = jnp.asarray([3, 4, 5], jnp.int32)
pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture
def shared() -> dict:
    """Weights of the network, the keys and values of three texts, and which tokens it may draft."""
    rng = np.random.default_rng(0)
    params = {name: jax.device_put(rng.normal(size=(WIDTH, WIDTH))) for name in ("q", "k", "v")}
    params["embed"] = jax.device_put(rng.normal(size=(VOCAB, WIDTH)))
    params["unembed"] = jax.device_put(rng.normal(size=(DRAFT_VOCAB, WIDTH)))
    keys, values = (jax.device_put(rng.normal(size=(BATCH, 1, 1, SLOTS, WIDTH))) for _ in range(2))
    params["context"] = Cache((KVState(keys, values),), jnp.asarray(LENGTHS, jnp.int32), groups=((0,),))
    params["first"] = jax.device_put(rng.normal(size=(BATCH, WIDTH)))
    params["ids"] = jnp.asarray(np.sort(rng.choice(VOCAB, DRAFT_VOCAB, replace=False)), jnp.int32)
    return params


def step(shared: dict, level: Level) -> LaneState:
    """A small recurrent network: embedding, carry, position, and attention over the path and the text."""
    x_bwd = jnp.tanh(level.carry + shared["embed"][level.token_bw] + jnp.sin(level.position_bw.astype(float))[..., None])
    q_bwhe, k_bwke, v_bwke = (jnp.einsum("bwd,de->bwe", x_bwd, shared[name])[:, :, None] for name in ("q", "k", "v"))
    [[earlier_k, earlier_v]] = level.earlier
    keys_bxke, values_bxke = level.join(earlier_k, k_bwke), level.join(earlier_v, v_bwke)
    prefix, length_b = shared["context"].layers[0], shared["context"].length_b
    mixed_bwhe = tree_attention(q_bwhe, keys_bxke, values_bxke, level.seen_bwx, prefix, length_b)
    hidden_bwd = x_bwd + mixed_bwhe[:, :, 0]
    return LaneState(hidden_bwd, ((k_bwke, v_bwke),), *offered(shared, hidden_bwd))


def offered(shared: dict, hidden_bwd: jax.Array) -> tuple[jax.Array, jax.Array]:
    return vocab.likeliest(shared["unembed"], hidden_bwd, CHILDREN, jnp.ones(BATCH), shared["ids"])


def expander(shared: dict, depths: int = DEPTHS, step=step) -> LaneExpander:
    first = LaneState(shared["first"][:, None], (), *offered(shared, shared["first"][:, None]))
    context = shared["context"]
    return LaneExpander(shared, context.length_b, first, step=step, scratch=scratch_specs(context), num_depths=depths)


class Rollout:
    """The network along single paths of one sequence, in NumPy, without lanes or a scratch."""

    def __init__(self, shared: dict, b: int):
        self.params, self.b, self.known = jax.tree.map(np.asarray, shared), b, {}

    def children(self, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities after a path of drafted tokens, likeliest first."""
        if path not in self.known:
            log_probs = log_softmax(self._hidden(path) @ self.params["unembed"].T)
            best = np.argsort(-log_probs)[:CHILDREN]
            self.known[path] = self.params["ids"][best], log_probs[best]
        return self.known[path]

    def _hidden(self, path: tuple[int, ...]) -> np.ndarray:
        params, b, length = self.params, self.b, LENGTHS[self.b]
        hidden, cached = params["first"][b], params["context"].layers[0]
        keys, values = ([*x[b, 0, :length]] for x in cached.read())
        for depth, token in enumerate(path):
            x = np.tanh(hidden + params["embed"][token] + np.sin(length + depth))
            keys, values = [*keys, x @ params["k"]], [*values, x @ params["v"]]
            weights = np.exp(np.stack(keys) @ (x @ params["q"]) / np.sqrt(WIDTH))
            hidden = x + weights @ np.stack(values) / np.sum(weights)
        return hidden


@pytest.mark.parametrize(("nodes", "lanes"), [(14, 3), (14, 13), (6, 1)])
def test_the_tree_is_the_ledger_of_eagle_2_over_paths_run_alone(shared, nodes, lanes):
    built = jax.jit(lambda shared: grow("best-first", expander(shared), ANCHORS, nodes, lanes=lanes))(shared)
    for b in range(BATCH):
        rollout = Rollout(shared, b)
        expected = eagle_2(lambda path, rollout=rollout: zip(*rollout.children(path), strict=True), DEPTHS, nodes, lanes)
        got = dict(zip(paths(built, b)[1:], built.log_prob_bn[b, 1:].tolist(), strict=False))
        assert got.keys() == expected.keys()
        np.testing.assert_allclose([got[path] for path in expected], [*expected.values()], atol=1e-10)


@pytest.mark.parametrize("depths", [1, 2, DEPTHS])
@pytest.mark.parametrize("name", ["best-first", "walk"])
def test_the_network_runs_once_per_level_and_not_below_the_deepest(shared, name, depths):
    runs = []

    def counted(shared, level):
        jax.debug.callback(lambda width: runs.append(int(width)), level.token_bw.shape[1])
        return step(shared, level)

    built = jax.jit(lambda shared: grow(name, expander(shared, depths, counted), ANCHORS, 7, lanes=2))(shared)
    jax.block_until_ready(built)
    jax.effects_barrier()
    assert runs == [2 if name == "best-first" else 1] * (depths - 1)
    assert int(built.depth_bn.max()) == depths


def test_on_other_platforms_than_a_cpu_no_level_is_a_branch(shared, monkeypatch):
    """A GPU would wait for the host at each of them."""
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    program = jax.jit(lambda shared: grow("best-first", expander(shared), ANCHORS, 14, lanes=3)).lower(shared).compile()
    assert " conditional(" not in program.as_text()


def test_the_network_runs_below_tokens_of_n_grams(shared):
    """Below a token that it cannot draft itself, it drafts the next tokens of a rollout, and the n-gram still agrees."""
    foreign = next(token for token in range(VOCAB) if token not in shared["ids"])
    match = np.full((BATCH, 1, DEPTHS), foreign), np.full((BATCH, 1), 3), np.zeros((BATCH, 1)), np.zeros(BATCH)

    @jax.jit
    def run(shared, match):
        joined, first = JoinedExpander(expander(shared), Continuations(*match)), jnp.int32(0)
        state = joined.start(1)
        below = joined.follow_token(first, state, jnp.full((BATCH, 1), foreign))
        return *below, joined.continues_below(first, state, joined.children(first, state)[0])

    lanes, agrees_bwm, goes_on = run(shared, match)
    assert agrees_bwm.all() and goes_on.all()
    for b in range(BATCH):
        tokens, log_probs = Rollout(shared, b).children((foreign,))
        np.testing.assert_array_equal(lanes.tokens_bwc[b, 0], tokens)
        np.testing.assert_allclose(lanes.log_probs_bwc[b, 0], log_probs)
