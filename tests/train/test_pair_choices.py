"""What training chooses by rule, mask token, layers and attention, and backbones that are refused."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import toy_training
from refusals import refused

from train import drafter
from train.runtime import loop, run_config
from train.stages import choices
from treeflash_jax.core.devices import Device, describe
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.config import ModelConfig


class Inner:
    """Of a Hugging Face tokenizer, what the rules read."""

    bos_token_id, eos_token_id, pad_token_id, unk_token_id = 0, 1, 1, None

    def __init__(self, special, size, template=""):
        self.size, self.chat_template = size, template
        self.added_tokens_decoder = {i: SimpleNamespace(content=name, special=True) for i, name in special.items()}

    def __len__(self):
        return self.size


SPECIAL = {0: "<s>", 1: "</s>", 2: "<user>", 3: "<file_sep>", 4: "<|reserved_4|>", 5: "<|mask|>"}


@pytest.mark.parametrize(("used", "size", "expected"), [
    ((), 24, 5),  # the one called mask
    ((5,), 24, 4),  # a reserved one
    ((4, 5), 24, 20),  # a row that no text has
    ((4, 5), 20, 3),  # another special token, but none of the roles or of the template
    ((3, 4, 5), 20, 6),  # an ordinary one that does not occur
    ((3, 4, 5, *range(6, 20)), 20, 7),  # the rarest
])  # fmt: skip
def test_a_mask_token_is_one_that_never_occurs(used, size, expected):
    counts_v = np.zeros(size, np.int64)
    counts_v[list(used)] = 9
    counts_v[7] //= 3
    assert choices.mask_token(Tokenizer(Inner(SPECIAL, 20, "{{ '<user>' }}")), counts_v) == expected


def test_published_and_real_choices():
    """Qwen3's is the id after its tokenizer's last; SmolLM2's layers are its recipe's."""
    qwen = Tokenizer(Inner({0: "<s>", 1: "</s>", 2: "<|fim_pad|>"}, 151_669))
    assert choices.mask_token(qwen, np.zeros(151_936, np.int64)) == 151_669
    assert choices.mask_token(Tokenizer.load(locate("tiny")), np.zeros(2048, np.int64), (2,)) == 3
    assert choices.mask_token(None, np.array([1, 0, 0]), (1,)) == 2
    assert choices.tapped_layers(30) == (1, 8, 14, 20, 27) and choices.tapped_layers(6) == (1, 2, 3)
    assert [choices.drafter_layers(layers) for layers in (6, 30, 36, 80)] == [2, 3, 4, 5]
    for layers in range(1, 100):
        taps = choices.tapped_layers(layers)
        assert len(set(taps)) == len(taps) and layers // 2 <= max(taps) < layers
    llama = ModelConfig(num_layers=30, model_type="llama", qk_norm=False, **toy_training.SIZES)
    assert choices.initial_layers(llama, 3) == (27, 28, 29)
    assert choices.initial_layers(toy_training.MODEL, 2) == (1, 2)
    qwen2 = ModelConfig(num_layers=30, model_type="qwen2", qk_norm=False, qkv_bias=True, **toy_training.SIZES)
    experts = replace(toy_training.MODEL, num_experts=4, experts_per_token=2, expert_size=8)
    for model in (qwen2, experts):
        assert choices.initial_layers(model, 2) == (), "only layers like a drafter's are copied"


def backbone(toy, tmp_path, *more):
    """Settings of a backbone for the toy verifier of three layers, whose answers have ids 4 to 63."""
    words = (f"run={tmp_path}/run", "objective.loss=cross-entropy", "num_layers=1", "block_size=4", *more)
    return run_config.load(drafter.DrafterStage, toy_training.write_stage(toy.parent, without=("drafter",)), words)


def test_backbones_that_cannot_learn_are_refused(toy, tmp_path, monkeypatch):
    unused = "got mask_token_id 9, which occurs ", "times in the training data, expected an unused token, such as 0"
    copies = "expected 1 verifier layers from 0 to 2, or none"
    for more, words in (
        (("mask_token_id=9",), unused),
        (("mask_token_id=3", "initial_layers=[3]"), ("got initial_layers [3]", copies)),
        (("mask_token_id=3", "initial_layers=[1, 2]"), ("got initial_layers [1, 2]", copies)),
    ):
        refused(partial(drafter.main, backbone(toy, tmp_path, *more)), *words)
        assert not (tmp_path / "run").exists()
    experts = replace(toy_training.MODEL, num_experts=4, experts_per_token=2, expert_size=8)
    stage = backbone(toy, tmp_path, "mask_token_id=3", "initial_layers=[1]")
    refused(lambda: stage.drafter_config(experts, None), "of another kind than a drafter's")
    monkeypatch.setattr(choices, "mask_token", lambda *_: 9)  # if all occur, the rarest serves
    monkeypatch.setattr(loop, "fit", Mock(side_effect=ValueError("training begins")))
    refused(partial(drafter.main, backbone(toy, tmp_path, "mask_token_id=9")), "training begins")


def test_training_attends_with_the_kernel_of_the_device():
    choose = choices.attention
    assert choose(Device("tpu", "TPU v5 lite")) == "splash" and choose(Device("cpu", "cpu")) == "chunked"
    capabilities = {"8.0": "cudnn", "12.1": "cudnn", "7.5": "chunked", "gfx942": "chunked", "": "chunked"}
    gpus = {name: SimpleNamespace(platform="gpu", device_kind="NVIDIA", compute_capability=name) for name in capabilities}
    assert {name: choose(describe(gpu)) for name, gpu in gpus.items()} == capabilities
    assert choose(Device("cpu"), "splash") == "splash" and choose(Device("tpu"), "chunked") == "chunked"
    for backend, name in (("tpu", "cudnn"), ("gpu", "splash"), ("cpu", "cudnn")):
        words = f"got attention '{name}' on a {backend}, expected 'auto' or 'chunked'"
        refused(partial(choose, Device(backend, compute_capability="9.0"), name), words)
