"""Trains a tree selector, which chooses the delayed tree of every answer and round from a list of trees.

    python -m train.selector configs/tiny/selector.toml out=runs/selector

Prompts are answered with trees of the list in turn. Every few rounds, each tree of the list is drawn a few times and
verified. Its label is the number of tokens that the rule is expected to accept. A small network is fitted to the labels.
With p = softmax(scores), and E_a the label of tree a:

    ratio = sum_a p_a E_a / E of the best single tree for the sampling settings
    loss = mean(-log ratio) + TAIL_WEIGHT * (mean of max(0, 1 - ratio)^2 over the TAIL_SHARE of roots where it is largest)

Rounds take equally long with all trees, so the ratio is also that of tokens per second. Writes the tree selector,
OUT/model.

Shape suffixes: b batch, o roots (rounds that were labelled), f features, a trees of the list.

Source: delayed tree expansion (arXiv 2602.16994), section 5. It does not state weight and share of the tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train import respond
from train.runtime import hosts, run_config, watch
from treeflash_jax import acceptance
from treeflash_jax.core import files, parameters, sharding
from treeflash_jax.core.parameters import Params
from treeflash_jax.core.settings import setting
from treeflash_jax.decoding import accepting, loops, rounds, tree_choice
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.schedule.batching import SamplingSizes, make_batch, round_capacity
from treeflash_jax.engine.schedule.prefill import Prefill
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.plan import digest_pair
from treeflash_jax.formats import tree_selector_folder
from treeflash_jax.trees.sampled import tree_selector

TAIL_WEIGHT, TAIL_SHARE = 1.0, 0.1
LEARNING_RATE, STEPS = 3e-3, 1000  # for fitting the network; every step uses all labels
Labels = tuple[np.ndarray, np.ndarray, np.ndarray]  # features_of, expected_oa, setting_o: index of the sampling setting


@dataclass(frozen=True, kw_only=True)
class SelectorConfig(respond.RespondConfig):
    """Settings that this stage adds to those of `train.respond`, which choose the prompts and the way to answer them."""

    out: str = setting(help="folder of the selector")
    trees: tuple[tuple[int, int, int], ...] = setting(help="trunk, number of branches and their length, of every tree")
    acceptance: str = setting("traversal", "acceptance rule", choices=lambda: tuple(acceptance.RULES))
    temperatures: tuple[float, ...] = setting((0.6, 1.0), "sampling temperatures", min_length=1, least=0)
    top_p: tuple[float, ...] = setting((0.9, 1.0), "values of top-p, each with all temperatures", above=0, most=1)
    batch: int = setting(8, "number of prompts answered together", least=1, most=2**16)
    every: int = setting(5, "rounds from one label of an answer to the next", least=1)
    draws: int = setting(4, "draws of every tree that a label averages", least=1)

    @property
    def samplings(self) -> list[tuple[float, float]]:
        """All combinations of a temperature and a top-p."""
        return [*product(self.temperatures, self.top_p)]


def main(settings: SelectorConfig) -> None:
    hosts.connect()
    if jax.process_count() > 1:
        raise ValueError(f"got {jax.process_count()} processes, expected one")
    out = files.absolute(settings.out)
    with (
        hosts.held(out.with_name(f"{out.name}.lock"), f"out={settings.out}"),
        files.filled(out / "model", overwrite=True) as folder,
    ):
        model = respond.load_answering_model(settings)
        plan = make_plan(model, settings)
        train_prompts, held_out_prompts = collect_prompts(settings, model)
        train = collect_labels(model, settings, plan, train_prompts)
        held_out = collect_labels(model, settings, plan, held_out_prompts)
        weights = fit(train, plan.shape.selector, len(settings.samplings))
        tree_selector_folder.save(folder, plan.shape.selector, weights)
    result = describe(weights, train, held_out, len(settings.samplings))
    hosts.say(f"{result}; selector in {settings.out}/model, for builder=delayed")


def make_plan(model: TreeFlash, settings: SelectorConfig) -> DecodePlan:
    """Returns the plan of rounds whose tree a selector chooses from the list."""
    pair = digest_pair(model.verifier, model.drafter)
    config = tree_selector.TreeSelectorConfig(trees=settings.trees, rule=settings.acceptance, pair=pair)
    plan = model.plan(GenerateConfig(builder="delayed", acceptance=config.rule, nodes=config.num_nodes))
    return replace(plan, num_nodes=config.num_nodes, shape=replace(plan.shape, selector=config))


def collect_prompts(settings: SelectorConfig, model: TreeFlash) -> list[list[respond.SourcePrompt]]:
    """Returns the prompts for training and those held out.

    Raises the errors of `respond.collect_prompts`, and ValueError for fewer prompts than sampling settings.
    """
    parts = [respond.collect_prompts(settings, model, held_out=is_held_out) for is_held_out in (False, True)]
    for kind, prompts in zip(("training", "held-out"), parts, strict=True):
        if len(prompts) < len(settings.samplings):
            raise ValueError(
                f"got {len(prompts)} {kind} prompts, expected at least {len(settings.samplings)}, one for each temperature "
                "with each top_p; give more prompts, another sources.0.hold_out, or fewer temperatures or top_p"
            )
    return parts


def fixed_choice_weights(config: tree_selector.TreeSelectorConfig, index: Any) -> dict[str, jax.Array]:
    """Returns the weights of a selector that always chooses the same tree."""
    weights = {name: jnp.zeros(spec.shape) for name, spec in tree_selector.specs(config).items()}
    return weights | {f"bias_{len(tree_selector.WIDTHS)}": jax.nn.one_hot(index, len(config.trees))}


def collect_labels(
    model: TreeFlash, settings: SelectorConfig, plan: DecodePlan, prompts: Sequence[respond.SourcePrompt]
) -> Labels:
    """Answers the prompts, each batch with one of the trees. Returns labels for every `settings.every`-th round.

    Raises ValueError if no round has one of the sampling settings, because its answers end at their first token.
    """
    capacity = round_capacity(len(prompts[-1].ids) + settings.max_new_tokens + 1 + plan.path_length)
    samplings = settings.samplings
    trees = cycle(range(len(settings.trees)))
    parts: list[list[np.ndarray]] = []
    with watch.Bar("prompts", len(prompts)) as bar:
        for start in range(0, len(prompts), settings.batch):
            index_b = np.arange(len(prompts))[start : start + settings.batch]
            setting_b = index_b % len(samplings)
            temperature, top_p = zip(*(samplings[i] for i in setting_b), strict=True)
            _, requests = model.settings_and_requests(
                [prompts[i].ids for i in index_b], indices=index_b, temperature=temperature, top_p=top_p,
                max_new_tokens=settings.max_new_tokens, seed=settings.seed,
            )  # fmt: skip
            slots = requests + [None] * (settings.batch - len(requests))
            batch = make_batch(slots, SamplingSizes.fit(requests), capacity=capacity, dtype=model.dtype, mesh=model.mesh)
            choice = fixed_choice_weights(plan.shape.selector, next(trees))
            choice = sharding.place(choice, model.mesh, over_batch=False)
            weights = model.weights.replace(tree_selector=choice)
            runner = Runner(plan, weights, model.mesh)
            state = Prefill(runner, batch).read_all()
            is_live_b = ~np.asarray(state.done_b)[: len(requests)]
            while is_live_b.any():
                features_bf, expected_ba = runner.call(label_roots, weights, state, plan=plan, draws=settings.draws)
                labels = features_bf, expected_ba, setting_b
                parts.append([np.asarray(x_b)[: len(requests)][is_live_b] for x_b in labels])
                state = runner.call(loops.decode, weights, state, jnp.int32(settings.every), plan=plan)
                is_live_b = ~np.asarray(state.done_b)[: len(requests)]
            bar.show(start + settings.batch)
    labelled_settings = {index for *_, setting_o in parts for index in setting_o.tolist()}
    for index, (temperature, top_p) in enumerate(samplings):
        if index not in labelled_settings:
            got = f"got no round with temperature {temperature} and top_p {top_p}, expected at least one"
            raise ValueError(f"{got}; give more prompts or more max_new_tokens")
    return tuple(np.concatenate(x) for x in zip(*parts, strict=True))


@partial(jax.jit, static_argnames=("plan", "draws"))
def label_roots(weights: Weights, state: DecodeState, *, plan: DecodePlan, draws: int) -> tuple[jax.Array, jax.Array]:
    """Returns the selector's inputs [b, f], and the expected number of tokens of each tree, averaged over draws [b, a]."""
    expander = rounds.draft_expander(weights, state, plan)
    config = plan.shape.selector

    def expected_length(numbers: jax.Array) -> jax.Array:
        key_b = jax.vmap(jax.random.fold_in, (0, None))(state.sampling.key_b, numbers[1])
        drawn = state.replace(sampling=state.sampling.replace(key_b=key_b))
        choosing = weights.replace(tree_selector=fixed_choice_weights(config, numbers[0]))
        tree, proposal = rounds.build_tree(choosing, drawn, expander, plan)
        target = accepting.make_target(rounds.verify_tree(weights, state, tree, plan).logits_bnv, state.sampling)
        return jnp.sum(acceptance.RULES[plan.rule].reach_probabilities(tree, proposal, target), axis=1)

    count = len(config.trees)
    length_xb = jax.lax.map(expected_length, jnp.indices((count, draws)).reshape(2, -1).T)
    return tree_choice.make_features(state, expander), jnp.mean(length_xb.reshape(count, draws, -1), axis=1).T


def compute_loss(scores_oa: jax.Array, expected_oa: jax.Array, base_o: jax.Array) -> jax.Array:
    """Computes the loss in the module's docstring. `base_o` is E of the best single tree."""
    ratio_o = jnp.sum(jax.nn.softmax(scores_oa) * expected_oa, axis=1) / base_o
    shortfall_o = jnp.square(jnp.maximum(0, 1 - ratio_o))
    worst = jax.lax.top_k(shortfall_o, max(1, round(TAIL_SHARE * ratio_o.size)))[0]
    return jnp.mean(-jnp.log(ratio_o)) + TAIL_WEIGHT * jnp.mean(worst)


def find_best(expected_oa: np.ndarray, setting_o: np.ndarray, num_settings: int) -> np.ndarray:
    """Returns, for each sampling setting, the tree with the largest expected number of tokens."""
    is_setting_so = np.arange(num_settings)[:, None] == setting_o
    return np.argmax(is_setting_so @ expected_oa, axis=1)


def fit(labels: Labels, config: tree_selector.TreeSelectorConfig, num_settings: int) -> dict[str, jax.Array]:
    """Returns the weights of a selector that is fitted to the labels."""
    features_of, expected_oa, setting_o = labels
    base_o = expected_oa[np.arange(setting_o.size), find_best(expected_oa, setting_o, num_settings)[setting_o]]
    mean_f, spread_f = np.mean(features_of, axis=0), np.maximum(np.std(features_of, axis=0), 1e-3)
    optimizer = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, STEPS), weight_decay=1e-2)

    def loss(weights: Params) -> jax.Array:
        return compute_loss(tree_selector.score_trees(weights, (features_of - mean_f) / spread_f), expected_oa, base_o)

    def step(_: Any, carry: Any) -> Any:
        weights, moments = carry
        grads = jax.grad(loss)(weights)
        updates, moments = optimizer.update(grads, moments, weights)
        return optax.apply_updates(weights, updates), moments

    weights = parameters.initialize(tree_selector.specs(config), jax.random.key(0), scale=0.1)
    weights, _ = jax.lax.fori_loop(0, STEPS, step, (weights, optimizer.init(weights)))
    matrix = weights["matrix_0"] / spread_f[:, None]  # for features that are not normalised
    return weights | {"matrix_0": matrix, "bias_0": weights["bias_0"] - mean_f @ matrix}


def describe(weights: Params, train: Labels, held_out: Labels, num_settings: int) -> str:
    """Describes the mean expected tokens of held-out rounds, for the selector and for the best tree of training."""
    features_of, expected_oa, setting_o = held_out
    selected_o = jnp.argmax(tree_selector.score_trees(weights, features_of), axis=1)
    best_o = find_best(*train[1:], num_settings)[setting_o]
    selected = np.mean(expected_oa[np.arange(setting_o.size), selected_o])
    best = np.mean(expected_oa[np.arange(setting_o.size), best_o])
    return f"expected tokens of {setting_o.size} held-out rounds: {selected:.3f}, of the best single tree {best:.3f}"


if __name__ == "__main__":
    run_config.run_command(main, SelectorConfig, __doc__)
