"""Settings of sampling: one value per prompt."""

import pytest
from answers import TREE

CHATS = [[{"role": "user", "content": text}] for text in ("Tom has 3 apples and 4 pears.", "Add 5 and 6.", "Name 2 cats.")]


def test_every_prompt_has_its_own_settings(tiny):
    """The third prompt joins the batch later."""
    text = tiny.generate(CHATS[:1], max_new_tokens=40, batch_size=2, **TREE)[0].text
    settings = {
        "max_new_tokens": [40, 3, 30], "temperature": [0.0, 0.8, 1.2], "top_k": [0, 9, 0], "top_p": [1.0, 1.0, 0.95],
        "min_p": [0.0, 0.2, 0.01], "seed": [1, 2, 3], "stop": [[text[-8:]], [], []],
        "stop_ids": [[], [2], [*range(12, 20)]],
    }  # fmt: skip
    together = tiny.generate(CHATS, batch_size=2, **settings, **TREE)
    for number, (chat, result) in enumerate(zip(CHATS, together, strict=True)):
        own = {name: values[number] for name, values in settings.items()}
        [alone] = tiny.generate([chat], batch_size=2, **own, **TREE)
        assert (result.ids, result.text, result.finished) == (alone.ids, alone.text, alone.finished)
    assert [result.finished for result in together] == ["stop", "length", "stop"], "by a string, the limit, an id"
    assert together[0].text == text[: text.index(text[-8:])]


def test_a_batch_has_room_for_the_stop_ids_of_waiting_prompts(tiny):
    scheduler = tiny.prepare(CHATS, batch_size=2, stop_ids=[[], [2], [*range(20)]]).schedule()
    assert scheduler.sizes.stop_ids == 24


def test_every_seed_prompt_and_sample_has_draws_of_its_own(tiny):
    """The first sample is the answer without `samples`; with a list of seeds, a prompt's place does not count."""
    settings = {"temperature": 1.0, "max_new_tokens": 12, "batch_size": 2, **TREE}
    sampled = [tiny.generate([CHATS[0]] * 2, samples=2, seed=seed, **settings) for seed in (7, 8)]
    assert len({str(result.ids) for results in sampled for result in results}) == 8
    alone, listed = (tiny.generate([CHATS[0]] * 2, seed=seed, **settings) for seed in (7, [7, 7]))
    assert [result.ids for result in alone] == [sampled[0][0].ids, sampled[0][2].ids]
    assert listed[0].ids == listed[1].ids == alone[0].ids


@pytest.mark.parametrize("seeds", [5, [5, 6]])
def test_indices_count_besides_seeds(tiny, seeds):
    """With the same index, a prompt of a larger set has its answer again, alone."""
    settings = {"temperature": 1.0, "max_new_tokens": 12, "batch_size": 2, **TREE}
    several = tiny.generate(CHATS[:2], seed=seeds, indices=[3, 4], **settings)
    seed = seeds if isinstance(seeds, int) else seeds[1]
    [alone] = tiny.generate(CHATS[1:2], seed=seed, indices=[4], **settings)
    assert alone.ids == several[1].ids != tiny.generate(CHATS[1:2], seed=seed, **settings)[0].ids
