"""Trains a selector, which chooses the delayed tree of every answer and round from a list of trees.

    python -m train.selector configs/tiny/selector.toml out=runs/selector

Prompts are answered with trees of the list in turn. Every few rounds, each tree of the list is drawn a few times and
verified, and labelled by the number of tokens that the rule is expected to accept of it. A small network is fitted to the
labels, with p = softmax(scores) and expected numbers E of the trees:

    ratio = sum_a p_a E_a / E of the best single tree for the sampling settings
    loss = mean(-log ratio) + TAIL_WEIGHT * (mean of max(0, 1 - ratio)^2 over the TAIL_SHARE of roots where it is largest)

All trees take a round as long, so the ratio is also that of tokens per second. Writes labels (OUT/train-*,
OUT/held_out-*) and the selector (OUT/model). A command that was stopped continues when it is run again; labels of other
settings or weights are not read.

Shape suffixes: b batch, o roots (rounds that were labelled), f features, a trees of the list.

Source: delayed tree expansion (arXiv 2602.16994), section 5, which leaves weight and share of the tail open.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train import respond
from train.data import answers
from train.runtime import hosts, run_config, watch
from treeflash_jax import acceptance
from treeflash_jax.core import files, parameters, sharding
from treeflash_jax.core.settings import setting
from treeflash_jax.decoding import accepting, choosing, loops, rounds
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.schedule.batching import SamplingSizes, make_batch, round_capacity
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.plan import digest_pair
from treeflash_jax.formats import selector_folder
from treeflash_jax.trees.sampled import tree_selector
from treeflash_jax.trees.sampled.tree_selector import SelectorConfig

TAIL_WEIGHT, TAIL_SHARE = 1.0, 0.1
LEARNING_RATE, STEPS = 3e-3, 1000  # of the fit, on all labels at once
PARTS = "train", "held_out"  # of the prompts
COLUMNS = "features_of", "expected_oa", "setting_o"  # of the labels; the last has indices of sampling settings
Labels = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class SelectorStage(respond.RespondConfig):
    """Settings that this stage adds to those of `train.respond`, which say what prompts are answered, and how."""

    out: str = setting(help="folder of labels and selector")
    trees: tuple[tuple[int, int, int], ...] = setting(help="trunk, number of branches and their length, of every tree")
    acceptance: str = setting("traversal", "acceptance rule", choices=lambda: tuple(acceptance.RULES))
    temperatures: tuple[float, ...] = setting((0.6, 1.0), "sampling temperatures", min_length=1, least=0)
    top_p: tuple[float, ...] = setting((0.9, 1.0), "values of top-p, each with all temperatures", above=0, most=1)
    batch: int = setting(8, "number of prompts answered together", least=1, most=2**16)
    every: int = setting(5, "rounds from one label of an answer to the next", least=1)
    draws: int = setting(4, "draws of every tree that a label averages", least=1)


def main(settings: SelectorStage) -> None:
    out = files.absolute(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    with hosts.held(out / "run.lock", f"out={settings.out}"):
        model = respond.load_model(settings)
        pair = digest_pair(model.verifier, model.drafter)
        config = SelectorConfig(trees=settings.trees, rule=settings.acceptance, pair=pair)
        plan = model.plan(GenerateConfig(builder="delayed", acceptance=config.rule, nodes=config.num_nodes))
        plan = replace(plan, num_nodes=config.num_nodes, shape=replace(plan.shape, selector=config))
        prompts = {name: respond.collect_prompts(settings, model, held_out=name == "held_out") for name in PARTS}
        origin = digest_origin(settings, model)
        labels = {name: record(model, settings, plan, prompts[name], out / f"{name}-{origin}") for name in PARTS}
        weights = fit(labels["train"], config)
        with files.filled(out / "model", overwrite=True) as folder:
            selector_folder.save(folder, config, weights)
        hosts.say(f"{describe(weights, labels, config)}\nselector in {out / 'model'}, for builder=delayed")


def always(config: SelectorConfig, index: Any) -> dict[str, jax.Array]:
    """Returns the weights of a selector that always chooses the same tree."""
    weights = {name: jnp.zeros(spec.shape) for name, spec in tree_selector.specs(config).items()}
    return weights | {f"bias_{len(tree_selector.WIDTHS)}": jax.nn.one_hot(index, len(config.trees))}


def digest_origin(settings: SelectorStage, model: TreeFlash) -> str:
    """Returns a digest of what all labels depend on: settings except for `out` and sources, and the weights of the pair."""
    values = {
        field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in ("out", "sources")
    }
    digest = hashlib.sha256(repr((values, answers.read_inputs(settings))).encode())
    for leaf in jax.tree.leaves(sharding.to_host(model.weights.drafter)):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def record(
    model: TreeFlash, settings: SelectorStage, plan: DecodePlan, prompts: Sequence[respond.Prompt], folder: Any
) -> Labels:
    """Returns the labels of the prompts: read from files of the folder, or recorded there, a file for each batch."""
    folder.mkdir(exist_ok=True)
    capacity = round_capacity(len(prompts[-1].ids) + settings.max_new_tokens + 1 + plan.path_length)
    parts = []
    with watch.Bar("prompts", len(prompts)) as bar:
        for first in range(0, len(prompts), settings.batch):
            ids = [prompt.ids for prompt in prompts[first : first + settings.batch]]
            path = folder / f"{first:06}-{hashlib.sha256(repr(ids).encode()).hexdigest()[:16]}.npz"
            if not path.exists():
                labels, content = record_batch(model, settings, plan, prompts, first, capacity), io.BytesIO()
                np.savez_compressed(content, **labels)
                files.write(path, content.getvalue())
            with path.open("rb") as file:
                parts.append(dict(np.load(file)))
            bar.show(first + settings.batch)
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def record_batch(
    model: TreeFlash, settings: SelectorStage, plan: DecodePlan, prompts: Sequence[Any], first: int, capacity: int
) -> Labels:
    """Answers a batch of the prompts with one of the trees, and labels every `settings.every`-th round."""
    number_b = np.arange(len(prompts))[first : first + settings.batch]
    samplings = [*product(settings.temperatures, settings.top_p)]
    setting_b = number_b % len(samplings)
    temperature, top_p = zip(*(samplings[i] for i in setting_b), strict=True)
    requests = model.settings_and_requests(
        [prompts[i].ids for i in number_b], indices=number_b, temperature=temperature, top_p=top_p,
        max_new_tokens=settings.max_new_tokens, seed=settings.seed,
    )[1]  # fmt: skip
    rows = requests + [None] * (settings.batch - len(requests))
    batch = make_batch(rows, SamplingSizes.fit(requests), capacity=capacity, dtype=model.dtype, mesh=model.mesh)
    tree = first // settings.batch % len(settings.trees)
    choice = sharding.place(always(plan.shape.selector, tree), model.mesh, over_batch=False)
    weights = model.weights.replace(selector=choice)
    runner = Runner(plan, weights, model.mesh)
    parts = []
    state = runner.call(loops.prefill, weights, *batch, plan=plan.shared)
    while (is_live_b := ~np.asarray(state.done_b)[: len(requests)]).any() or not parts:
        columns = *runner.call(label, weights, state, plan=plan, draws=settings.draws), setting_b
        live = [np.asarray(x_b)[: len(requests)][is_live_b] for x_b in columns]
        parts.append(dict(zip(COLUMNS, live, strict=True)))
        state = runner.call(loops.decode, weights, state, jnp.int32(settings.every), plan=plan)
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@partial(jax.jit, static_argnames=("plan", "draws"))
def label(weights: Weights, state: DecodeState, *, plan: DecodePlan, draws: int) -> tuple[jax.Array, jax.Array]:
    """Returns the selector's inputs [b, f], and the tokens that the next round is expected to commit with each tree [b, a].

    The number is the rule's exact expectation given the drawn tree, averaged over draws.
    """
    expander, config = rounds.draft_expander(weights, state, plan), plan.shape.selector

    def expected_length(numbers: jax.Array) -> jax.Array:
        key_b = jax.vmap(jax.random.fold_in, (0, None))(state.sampling.key_b, numbers[1])
        drawn = state.replace(sampling=state.sampling.replace(key_b=key_b))
        tree, proposal = rounds.build_tree(weights.replace(selector=always(config, numbers[0])), drawn, expander, plan)
        target = accepting.make_target(rounds.verify_tree(weights, state, tree, plan).logits_bnv, state.sampling)
        return jnp.sum(acceptance.RULES[plan.rule].weights(tree, proposal, target), axis=1)

    count = len(config.trees)
    length_xb = jax.lax.map(expected_length, jnp.indices((count, draws)).reshape(2, -1).T)
    return choosing.make_features(state, expander), jnp.mean(length_xb.reshape(count, draws, -1), axis=1).T


def compute_loss(scores_oa: jax.Array, expected_oa: jax.Array, base_o: jax.Array) -> jax.Array:
    """Computes the loss of the module's docstring; `base_o` is the expected number of the best single tree."""
    ratio_o = jnp.sum(jax.nn.softmax(scores_oa) * expected_oa, axis=1) / base_o
    shortfall_o = jnp.square(jnp.maximum(0, 1 - ratio_o))
    worst = jax.lax.top_k(shortfall_o, max(1, round(TAIL_SHARE * ratio_o.size)))[0]
    return jnp.mean(-jnp.log(ratio_o)) + TAIL_WEIGHT * jnp.mean(worst)


def find_best(labels: Labels) -> np.ndarray:
    """Returns the tree of the most expected tokens for each sampling setting."""
    is_setting_so = np.arange(labels["setting_o"].max() + 1)[:, None] == labels["setting_o"]
    return np.argmax(is_setting_so @ labels["expected_oa"], axis=1)


def fit(labels: Labels, config: SelectorConfig) -> dict[str, jax.Array]:
    """Returns the weights of a selector that is fitted to the labels."""
    features_of, expected_oa, setting_o = (labels[name] for name in COLUMNS)
    base_o = expected_oa[np.arange(setting_o.size), find_best(labels)[setting_o]]
    mean_f, spread_f = np.mean(features_of, axis=0), np.maximum(np.std(features_of, axis=0), 1e-3)
    optimizer = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, STEPS), weight_decay=1e-2)

    def loss(weights: Any, features_of: jax.Array, *others: jax.Array) -> jax.Array:
        return compute_loss(tree_selector.score_trees(weights, features_of), *others)

    @jax.jit
    def run(carry: Any, *arrays: jax.Array) -> Any:
        def step(carry: Any, _: Any) -> Any:
            grads = jax.grad(loss)(carry[0], *arrays)
            updates, moments = optimizer.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), moments), None

        return jax.lax.scan(step, carry, length=STEPS)[0][0]

    weights = parameters.initialize(tree_selector.specs(config), jax.random.key(0), scale=0.1)
    weights = run((weights, optimizer.init(weights)), (features_of - mean_f) / spread_f, expected_oa, base_o)
    matrix = weights["matrix_0"] / spread_f[:, None]  # of features as they are
    return weights | {"matrix_0": matrix, "bias_0": weights["bias_0"] - mean_f @ matrix}


def describe(weights: Any, labels: dict[str, Labels], config: SelectorConfig) -> str:
    """Returns the mean expected tokens of a round on held-out prompts, of the selector and of every tree alone."""
    features_of, expected_oa, setting_o = (labels["held_out"][name] for name in COLUMNS)
    chosen_o = np.argmax(tree_selector.score_trees(weights, features_of), axis=1)
    choices = {"selector": chosen_o, "best tree of each sampling setting": find_best(labels["train"])[setting_o]}
    for index, tree in enumerate(config.trees):
        choices[f"{list(tree)}, chosen {np.mean(chosen_o == index):.0%}"] = np.full_like(chosen_o, index)
    lines = [f"expected tokens per round, of {chosen_o.size} held-out rounds"]
    rows = np.arange(chosen_o.size)
    return "\n".join(lines + [f"  {np.mean(expected_oa[rows, index_o]):.3f} {name}" for name, index_o in choices.items()])


if __name__ == "__main__":
    run_config.run_command(main, SelectorStage, __doc__)
