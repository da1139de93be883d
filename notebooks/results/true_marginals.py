"""Measures tau of trees of a verifier's marginals, which a drafter without a head would learn from endless sampled answers.

    treeflash bench run ... --systems ar --out answers.jsonl
    python notebooks/results/true_marginals.py MODEL answers.jsonl PROMPTS... --nodes 4 8 16

The marginal of a depth is the verifier's distribution of that token, averaged over continuations sampled at temperature 1.
Trees are built best-first from products of marginals, as in DDTree; tau is counted on the greedy answers of the first
command. It is no upper bound: a sharper distribution may follow greedy answers further.

Shape suffixes: n continuations, t positions of the text, v vocabulary, d depths, c kept tokens; of trees, b batch, n nodes.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import treeflash_jax as tf
from treeflash_jax import trees
from treeflash_jax.bench import prompt_sets
from treeflash_jax.core import programs
from treeflash_jax.core.json_files import read_jsonl
from treeflash_jax.models import caches, decoder

KEPT = 32  # likeliest tokens of a depth
PIECE = 64  # texts are padded to multiples of it


@partial(programs.jit, static_argnames=("config", "samples", "depths"))
def marginals(weights, ids_1t, length, key, *, config, samples: int, depths: int):
    """Returns the likeliest tokens after the first `length` of a text and their probabilities, each [d, c]."""
    positions_1t = jnp.arange(ids_1t.shape[1])[None]
    text = decoder.forward(weights, config, ids_1t, positions_1t, decoder.causal_mask(1, ids_1t.shape[1]))
    dtype = text.hidden_btd.dtype
    cache = caches.allocate(config, samples, ids_1t.shape[1] + depths, dtype, can_cut=True)
    repeated = jax.tree.map(lambda new: jnp.repeat(new, samples, axis=0), text.new)
    cache = caches.commit(cache, repeated, jnp.full(samples, length))
    hidden_nd = jnp.repeat(text.hidden_btd[:, length - 1], samples, axis=0)
    kept = []
    for depth in range(depths):
        logits_nv = decoder.logits(weights, config, hidden_nd[:, None])[:, 0].astype(jnp.float32)
        kept.append(jax.lax.top_k(jnp.mean(jax.nn.softmax(logits_nv), axis=0), KEPT))
        tokens_n1 = jax.random.categorical(jax.random.fold_in(key, depth), logits_nv)[:, None]
        mask = jnp.ones((samples, 1, 1), bool)
        new = decoder.forward(weights, config, tokens_n1, cache.length_b[:, None], mask, cache)
        cache, hidden_nd = caches.commit(cache, new.new, jnp.ones(samples, jnp.int32)), new.hidden_btd[:, 0]
    probabilities, ids = (jnp.stack(values) for values in zip(*kept, strict=True))
    return ids, probabilities


@partial(programs.jit, static_argnames="nodes")
def build(ids_dc, probabilities_dc, *, nodes: int) -> trees.DraftTree:
    """Builds the best-first tree of marginals, as a block drafter without a head does."""
    below_dc = jnp.zeros_like(ids_dc).at[-1].set(-1)
    table = trees.TransitionTable(*(array[None, :, None] for array in (ids_dc, jnp.log(probabilities_dc), below_dc)))
    return trees.best_first(trees.TreeInputs(table, jnp.zeros(1, jnp.int32), nodes))[0]


def accepted(tree: trees.DraftTree, answer: list[int]) -> int:
    """Returns the number of the answer's first tokens that are a path of the tree, which is a tree of one sequence."""
    node = 0
    for depth, token in enumerate(answer):
        is_next = (tree.tokens_bn[0] == token) & (tree.parent_bn[0] == node) & (tree.depth_bn[0] == depth + 1)
        if not is_next.any():
            return depth
        node = int(is_next.argmax())
    return len(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("answers", help="output file of `treeflash bench run --systems ar`")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8])
    parser.add_argument("--samples", type=int, default=64, help="sampled continuations per position")
    parser.add_argument("--depths", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    model = tf.load(arguments.model, dtype=arguments.dtype)
    prompts = {prompt.id: prompt for prompt in prompt_sets.choose_prompts(arguments.prompts)}
    tokens, rounds = dict.fromkeys(arguments.nodes, 0), dict.fromkeys(arguments.nodes, 0)
    for _, record in read_jsonl(arguments.answers):
        if record["system"] != "ar":
            continue
        for turn, answer in enumerate(record["ids"]):
            chat = prompt_sets.make_chat(prompts[record["prompt_id"]], record["texts"][:turn])
            prompt, drafts = model.encode(chat), {}
            for nodes in arguments.nodes:
                root = 0
                while root < len(answer) - 1:
                    if root not in drafts:
                        text = [*prompt, *answer[: root + 1]]
                        padded = np.zeros((1, -(-len(text) // PIECE) * PIECE), np.int32)
                        padded[0, : len(text)] = text
                        sizes = dict(samples=arguments.samples, depths=arguments.depths)
                        key = jax.random.fold_in(jax.random.key(turn), root)
                        drafts[root] = marginals(
                            model.weights.verifier, padded, len(text), key, config=model.verifier, **sizes
                        )
                    tree = jax.device_get(build(*drafts[root], nodes=nodes))
                    gained = min(accepted(tree, answer[root + 1 :]) + 1, len(answer) - 1 - root)
                    root, tokens[nodes], rounds[nodes] = root + gained, tokens[nodes] + gained, rounds[nodes] + 1
        print(
            {nodes: round(tokens[nodes] / rounds[nodes], 3) for nodes in arguments.nodes}, record["prompt_id"], flush=True
        )


if __name__ == "__main__":
    main()
