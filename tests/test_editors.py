"""What editors, `help` and notebooks see of the library: names, signatures, types and pictures."""

import inspect
import pydoc
import re
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints
from xml.etree import ElementTree

import write_keywords

import treeflash_jax as tf
from treeflash_jax.acceptance import RULES
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.engine import loading
from treeflash_jax.engine.settings import generate_config, keywords
from treeflash_jax.engine.settings.keywords import LoadOptions
from treeflash_jax.engine.settings.model_options import ModelOptions
from treeflash_jax.trees import BUILDERS

HOSTILE = '<b>&amp; "quoted" </pre><script>'


def test_the_package_lists_public_names_only_and_ships_types():
    assert set(dir(tf)) == {*tf.__all__, "__version__"}
    assert all(getattr(tf, name) for name in dir(tf))
    assert (resources.files("treeflash_jax") / "py.typed").is_file()


def test_help_explains_each_keyword_argument_once_beside_plain_types():
    shown = pydoc.plain(pydoc.render_doc(tf.GenerateConfig))
    assert "Annotated" not in shown and "nodes: int | None = None" in shown
    assert all(field.metadata["section"] in generate_config.SECTIONS for field in fields(tf.GenerateConfig))
    for described, settings in {tf.GenerateSettings: tf.GenerateConfig, tf.load: ModelOptions}.items():
        text = inspect.getdoc(described)
        for field in fields(settings):
            assert len(re.findall(rf"^  {field.name}: {re.escape(field.metadata['help'][:30])}", text, re.MULTILINE)) == 1


def test_keyword_arguments_have_the_types_of_settings_and_files_are_as_written():
    model = tf.TreeFlash
    for function in (model.generate, model.generate_each, model.stream, model.warmup, model.prepare):
        assert get_type_hints(function)["settings"] == Unpack[tf.GenerateSettings]
    assert get_type_hints(tf.load)["options"] == Unpack[LoadOptions]
    assert without_choices(tf.GenerateSettings) == get_type_hints(tf.GenerateConfig)
    assert without_choices(LoadOptions) | {"verifier": str | Path | None} == get_type_hints(ModelOptions)
    loading_source, advice = Path(loading.__file__).read_text(), "run PYTHONPATH=. python tests/write_keywords.py"
    assert Path(keywords.__file__).read_text() == write_keywords.keywords_source(), advice
    assert loading_source == write_keywords.loading_source(loading_source), advice


def without_choices(keywords: type) -> dict[str, Any]:
    """Returns the types of keyword arguments without the names that editors offer."""
    kinds = get_type_hints(keywords)
    for name, kind in kinds.items():
        if any(get_origin(part) is Literal for part in get_args(kind)):
            kinds[name] = Union[tuple(part for part in get_args(kind) if get_origin(part) is not Literal)]  # noqa: UP007
    return kinds


def test_editors_offer_the_names_of_kinds_and_type_checkers_accept_those_of_users():
    for name, known in {"builder": ("none", *BUILDERS), "acceptance": tuple(RULES), "head": tuple(HEADS)}.items():
        offered, *others = get_args(get_type_hints(tf.GenerateSettings)[name])
        assert get_args(offered) == known and others == [str, NoneType]
    settings = get_type_hints(tf.GenerateSettings)
    assert all(get_origin(get_args(settings[name])[0]) is Literal for name in ("attention", "sampling", "draft_vocabulary"))
    assert get_args(get_args(get_type_hints(LoadOptions)["quantize"])[0]) == ("int8", "fp8", "int4", "mxfp4", "none")


def test_settings_are_shown_by_what_differs_from_the_defaults():
    assert repr(tf.GenerateConfig(temperature=1, nodes=None, stop="x")) == "GenerateConfig(temperature=1.0, stop=('x',))"


def parse(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<html>{html}</html>")  # raises where tags or escapes are wrong


def test_results_are_shown_as_html():
    about = {"prompt_ids": [1], "ids": [5, 6, 7], "builder": "best-first", "accept_lengths": [2], "finished": "stop"}
    about |= {"seconds": 1.0, "compile_seconds": 0.0, "tokens_per_second": 3.0}
    page = parse(tf.Result(text=HOSTILE, **about)._repr_html_())
    assert page.find(".//pre").text == HOSTILE
    assert [cell.text for cell in page.iter("th")] == ["tokens", "rounds", "tau", "tokens/s", "builder", "finished"]
    assert [cell.text for cell in page.iter("td")] == ["3", "1", "2.00", "3", "best-first", "stop"]
    assert get_type_hints(tf.Result)["text"] is str, "also without a tokenizer"
    assert parse(tf.Result(text="", **about)._repr_html_()).find(".//pre").text == "5 6 7"


def test_results_are_shown_as_text_with_the_answer_first(trained):
    results = trained.generate([[3, 4]] * 2, max_new_tokens=20, builder="none")
    assert results[0].text == "", "of a model without a tokenizer"
    shown = repr(replace(results[0], text="hello", draft_again=print))
    clipped = ", ".join(map(str, results[0].ids[:6]))
    assert shown.startswith(f"Result(text='hello', ids=[{clipped}, ...], prompt_ids=[3, 4], builder='none'")
    assert len(shown) < 400 and "draft_again" not in shown
    answers = [" ".join(map(str, result.ids)) for result in results]
    assert [answer.text for answer in parse(results._repr_html_()).iter("pre")] == answers


def test_models_are_shown_with_what_they_are(tiny, trained):
    pair = r"verifier=tiny \(qwen3, [\d.]+ M parameters\), drafter=tiny \(block, [\d.]+ M parameters\)"
    assert re.fullmatch(rf"TreeFlash\({pair}, dtype=float32, device=cpu\)", repr(tiny))
    alone = tf.TreeFlash(trained.verifier, trained.weights.replace(drafter=None))
    assert "drafter=None, dtype=float32" in repr(alone)


def test_trees_are_shown_as_text_and_html():
    nodes = {"labels": ["a", HOSTILE, "c", "d"], "parents": [0, 0, 0, 1], "accepted": [True, True, False, True]}
    tree = tf.DrawnTree(**nodes, probabilities=[1.0, 0.5, 0.25, 0.125], bonus="bonus <e>")
    assert str(tree).splitlines() == [
        "a   (anchor; 4 nodes, accepted nodes marked ●, then bonus <e>)",
        f"├─● {HOSTILE}  0.50",
        "│  └─● d  0.12",
        "└─  c  0.25",
    ]
    page = parse(tree._repr_html_())
    assert "".join(page.itertext()) == str(tree)
    green = [node.text for node in page.iter("b")]
    assert green == [line.lstrip("├└│─ ") for line in str(tree).splitlines() if "●" in line]
