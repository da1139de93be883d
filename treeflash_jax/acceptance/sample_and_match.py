"""Sample-and-match: samples a token of the verifier at every node, and walks down while a child has the sampled token.

Each node's sample is exact, and the tree only determines how far one pass can walk. So the output has the verifier's
distribution for every tree that does not depend on the noise. For deterministic trees, no lossless rule accepts more.
Samples at equal positions use the same noise in all trees, so the output equals one-token decoding with that noise.
At temperature 0, this is greedy matching.

Shape suffixes: b batch, n tree nodes, p places of an accepted path (depths + root), v vocabulary.

Source: TreeFlash (arXiv 2606.03819) and DDTree (arXiv 2604.12989), verification; SpecInfer (arXiv 2305.09781), naive
sampling.
"""

import jax
import jax.numpy as jnp

from treeflash_jax.acceptance.rule import Rule
from treeflash_jax.acceptance.target import Acceptance, Noise, TargetDistribution, deepest_match, path_to
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.trees import DraftTree, Proposal


class SampleAndMatch(Rule):
    distributions = ("deterministic", "one path", "paths", "delayed", "without-replacement", "skeleton")
    needs = "a tree that does not depend on the verifier's noise"

    def reach_probabilities(self, tree: DraftTree, proposal: Proposal | None, target: TargetDistribution) -> jax.Array:
        """Returns the verifier's probability of each node's path, [b, n]; 1 for the root, 0 in padding."""
        log_p_bnn = target.gather(
            jnp.broadcast_to(tree.tokens_bn[:, None], (*tree.tokens_bn.shape, tree.tokens_bn.shape[1]))
        )
        log_p_bn = jnp.take_along_axis(log_p_bnn, tree.parent_bn[:, None], axis=1)[:, 0].at[:, 0].set(0)
        above_bn = tree.parent_bn
        for _ in range(tree.parent_bn.shape[1].bit_length()):  # each step doubles the number of ancestors in the sum
            log_p_bn += pick(log_p_bn, above_bn)
            above_bn = pick(above_bn, above_bn)
        return jnp.where(tree.valid_bn, jnp.exp(log_p_bn), 0)

    def accept(self, tree: DraftTree, proposal: Proposal | None, target: TargetDistribution, noise: Noise) -> Acceptance:
        """Accepts the deepest node whose path matches the samples. The sample at that node is the bonus token.

        Args:
          tree: tree whose siblings have distinct tokens.
          noise: `gumbel_bpv` with at least as many depths as the tree.
        """
        length = noise.gumbel_bpv.shape[1]
        picks_bn = target.sample(pick(noise.gumbel_bpv, tree.depth_bn))
        last_b = deepest_match(tree, (tree.tokens_bn == pick(picks_bn, tree.parent_bn)) & tree.valid_bn, length)
        return path_to(tree, last_b, jnp.take_along_axis(picks_bn, last_b[:, None], axis=1)[:, 0], length)
