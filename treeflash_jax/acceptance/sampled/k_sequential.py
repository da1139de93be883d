"""k-sequential selection: tests k i.i.d. draws in turn with p / (rho q), with the smallest rho that is lossless.

With beta(rho) = sum min(p / rho, q), rho in [1, k] solves 1 - (1 - beta)^k = rho beta. The rule accepts the first draw with
coin < p / (rho q). If there is none, it emits a token from [p - min(p / rho, q) (1 - (1 - beta)^k) / beta]+. Every larger
rho is lossless too, so bisection returns the upper end of its interval.

Shape suffixes: b batch, n tree nodes, c tokens of a node's support, x draws (n - 1).

Source: SpecTr (arXiv 2310.15141), k-SEQ.
"""

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.acceptance.sampled.draws import Draws, TopDownRule
from treeflash_jax.models.backend.indexing import pick


class KSequential(TopDownRule):
    distributions = ("one path", "paths", "delayed")
    needs = "siblings drawn independently, with replacement"

    def test_draws(self, draws: Draws) -> tuple[jax.Array, jax.Array]:
        """Returns min(1, p / (rho q)) of every draw, [b, x], and what is left of p on the support, [b, n, c]."""
        rho_bn, count_bn = _solve(draws)
        scaled_bx = draws.gather(draws.q_bnc) * pick(rho_bn, draws.parent_bx)
        chance_bx = jnp.minimum(draws.gather(draws.p_bnc) / jnp.where(scaled_bx > 0, scaled_bx, 1), 1)
        beta_bn = _beta(draws, rho_bn)
        hit_bn = -jnp.expm1(count_bn * jnp.log1p(-jnp.minimum(beta_bn, 1)))
        per_beta_bn = jnp.where(beta_bn > 0, hit_bn / jnp.where(beta_bn > 0, beta_bn, 1), 0)
        used_bnc = jnp.minimum(draws.p_bnc / rho_bn[..., None], draws.q_bnc) * per_beta_bn[..., None]
        return chance_bx * draws.is_draw_bx, jnp.maximum(draws.p_bnc - used_bnc, 0)


def _beta(draws: Draws, rho_bn: jax.Array) -> jax.Array:
    return jnp.sum(jnp.minimum(draws.p_bnc / rho_bn[..., None], draws.q_bnc), axis=-1)


def _solve(draws: Draws) -> tuple[jax.Array, jax.Array]:
    """Returns rho and the number of draws of every node, [b, n]. rho is 1 for one draw or none."""
    nodes_n = jnp.arange(draws.p_bnc.shape[1])
    is_here_bnx = (draws.parent_bx[:, None] == nodes_n[:, None]) & draws.is_draw_bx[:, None]
    count_bn = jnp.sum(is_here_bnx, axis=-1).astype(draws.p_bnc.dtype)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]):
        low_bn, high_bn = bounds
        middle_bn = (low_bn + high_bn) / 2
        beta_bn = _beta(draws, middle_bn)
        too_small_bn = -jnp.expm1(count_bn * jnp.log1p(-jnp.minimum(beta_bn, 1))) > middle_bn * beta_bn
        return jnp.where(too_small_bn, middle_bn, low_bn), jnp.where(too_small_bn, high_bn, middle_bn)

    one_bn = jnp.ones_like(count_bn)
    steps = jnp.finfo(count_bn.dtype).nmant + 2
    return lax.fori_loop(0, steps, halve, (one_bn, jnp.maximum(count_bn, 1)))[1], count_bn
