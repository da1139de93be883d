"""Prompts of `bench run`: files in every form of a chat, the published draw, and files that are refused."""

import random

import pytest
from refusals import refused
from toy_training import write_lines

import treeflash_jax as tf
from treeflash_jax.bench import prompt_sets, run
from treeflash_jax.bench.harness import System


@pytest.mark.parametrize("text, words", [
    ("", "prompts.jsonl: got no prompts"),
    ('{"id": null, "turns": ["x"]}\n', "prompts.jsonl:1: got id None"),
    ('{"id": "prompts-2", "turns": ["x"]}\n{"turns": ["x"]}\n', "prompts.jsonl:2: got id 'prompts-2'"),
    ('{"words": "x"}\n', "prompts.jsonl:1: got keys 'words', expected 'conversations' or 'messages'"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "prompts.jsonl:1: got no user turn"),
    ('{"messages": [{"role": "tool", "content": "x"}]}\n', "prompts.jsonl:1: got a message of the role 'tool'"),
    ('{"id": "a", "turns": ["x"]}\n\n{"id": "a", "turns": ["y"]}\n', "prompts.jsonl:3: got id 'a'"),
    ('{"id": "a", "turns": ["x", 3]}\n', "prompts.jsonl:1: got turns ['x', 3]"),
])  # fmt: skip
def test_bad_prompts_are_named_by_file_and_line(tmp_path, text, words):
    refused(lambda: prompt_sets.read_prompts(write_lines(tmp_path / "prompts.jsonl", [text])), words)


def test_training_files_are_prompt_files_too(tmp_path):
    """Every form of a chat gives the prompt that the published one gives; ids are invented where there are none."""
    forms = [
        {"id": "a", "turns": ["x", "y"], "reference": None},
        {"conversations": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "an answer"}]},
        {"messages": [{"role": "system", "content": "s"}, {"from": "human", "value": "x"}]},
        {"prompt": "x"},
    ]
    prompts = prompt_sets.read_prompts(write_lines(tmp_path / "mixed.jsonl", forms))
    expected = [("a", ("x", "y"), None), ("mixed-2", ("x",), None), ("mixed-3", ("x",), "s"), ("mixed-4", ("x",), None)]
    assert [(prompt.id, prompt.turns, prompt.system) for prompt in prompts] == expected
    assert prompts[1].hash == prompts[3].hash != prompts[2].hash
    first, answer, _ = prompt_sets.make_chat(prompts[0], ["Yes."])
    assert first == {"role": "user", "content": "x"} and answer == {"role": "assistant", "content": "Yes."}
    assert prompt_sets.make_chat(prompts[2], []) == [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]


def test_files_of_one_name_are_refused(tmp_path):
    """Names of files may be strings or paths."""
    path = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x"}])
    refused(lambda: prompt_sets.choose_prompts([str(path), path]), "expected files of different names")


def test_the_published_draw(tiny):
    every = prompt_sets.read_prompts(prompt_sets.BUNDLED)
    chosen = sorted(random.Random(42).sample(range(len(every)), 5))
    assert prompt_sets.draw(every, 5) == [every[i] for i in chosen]
    assert prompt_sets.draw(every, None) == prompt_sets.draw(every, 99) == every
    config = tf.GenerateConfig(builder="none", max_new_tokens=512)
    run.refuse_mismatches([System(name="ar", model=tiny, config=config)], every, [], "out")  # all fit
