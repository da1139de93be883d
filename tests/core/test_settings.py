"""Settings declared by the fields of dataclasses: options, checks, help, and settings in tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
from refusals import mistake, refused

from treeflash_jax.cli.arguments import Parser
from treeflash_jax.core.checks import UnknownSetting, refuse_unknown
from treeflash_jax.core.setting_options import add_options, option_values
from treeflash_jax.core.setting_tables import build, describe
from treeflash_jax.core.settings import changed, setting, validate

COLOURS = {"red": None}


@dataclass(frozen=True, kw_only=True)
class Toy:
    place: str = setting(help="where it stands", unit="folder")
    size: int = setting(3, "how large it is, in 10 % steps", unit="steps")
    rate: float | Sequence[float] = setting(0.5, "how fast it is")
    rows: int | Literal["auto"] | None = setting(None, "how many rows it has", unit="rows", unset="as many as fit")
    kind: Literal["a", "b"] = setting("a", "what it is")
    colour: str | None = setting(None, "what it looks like", choices=lambda: tuple(COLOURS))
    names: Sequence[str] = setting((), "what it is called", unset="no name", unit="name")
    ids: Sequence[int] | None = setting(None, "what it is made of", unit="ids")
    extra: Mapping[str, Any] | None = setting(None, "what else it has", unit="json")
    loud: bool = setting(False, "whether it is heard")


def parsed(*words: str, **how: object) -> dict[str, object]:
    parser = Parser(prog="toy")
    add_options(parser, Toy, **how)
    return option_values(parser.parse_args(words), Toy)


def test_options_are_read_as_the_types_of_their_fields(monkeypatch):
    plain = dict(size=3, rate=0.5, rows=None, kind="a", colour=None, names=[], ids=None, extra=None, loud=False)
    assert parsed("--place", "x") == {"place": "x"} | plain
    words = "--place x --size 4 --rate 2 --rows auto --kind b --colour red --names p --names q --loud --ids".split()
    values = dict(place="x", size=4, rate=2.0, rows="auto", kind="b", colour="red", names=["p", "q"], loud=True)
    assert parsed(*words, "3 4,5", "--extra", '{"a": [1]}') == values | {"ids": (3, 4, 5), "extra": {"a": [1]}}
    assert parsed("--place", "x", "--rows", "7")["rows"] == 7
    monkeypatch.setitem(COLOURS, "blue", None)
    assert parsed("--place", "x", "--colour", "blue")["colour"] == "blue", "what a registry gained later"


def test_a_command_may_take_some_fields_or_lists_of_values():
    assert parsed("--rate", "1", "2", chosen=["rate", "size"], several=["rate"], size=9) == {"size": 9, "rate": [1.0, 2.0]}


@pytest.mark.parametrize("words, said", [
    (["--size", "1"], "the following arguments are required: --place"),
    (["--place", "x", "--size", "y"], "--size: got size 'y', expected an integer"),
    (["--place", "x", "--rows", "many"], "--rows: got rows 'many', expected an integer or 'auto'"),
    (["--place", "x", "--rows", "9" * 5000], "expected an integer or 'auto'"),
    (["--place", "x", "--colour", "green"], "--colour: got 'green', expected one of red (see"),
    (["--place", "x", "--ids", "x"], "--ids: got ids 'x', expected an integer"),
    (["--place", "x", "--extra", "[1]"], "--extra: got extra [1], expected a dictionary"),
    (["--place", "x", "--extra", "{1"], "--extra: not valid JSON"),
])  # fmt: skip
def test_mistakes_are_one_line(capsys, words, said):
    assert mistake(capsys, lambda words: parsed(*words), words, said).startswith("toy: error: ")


def test_help_has_units_defaults_and_what_must_be_given(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: toy [options] --place FOLDER ")
    assert "--size STEPS how large it is, in 10 % steps (default: 3)" in text
    assert "--rows ROWS|auto how many rows it has (default: as many as fit)" in text
    assert "--names NAME what it is called (default: no name)" in text
    assert "--loud whether it is heard" in text and "--kind {a,b} what it is (default: a)" in text


@dataclass(frozen=True, kw_only=True)
class Checked:
    size: int | Sequence[int] = setting(3, "how large it is", least=1, most=9)

    def __post_init__(self):
        validate(self)


def test_values_are_checked_and_converted_when_they_are_given():
    assert Checked(size=np.array([1, 2])).size == (1, 2) and type(Checked(size=np.int8(4)).size) is int
    assert changed(Checked()) == {} and changed(Checked(size=4)) == {"size": 4}
    for size in (0, 10, [3, 10], 2.5, "3", None):
        refused(lambda size=size: Checked(size=size), "got size", "expected")


@dataclass(frozen=True, kw_only=True)
class Nested:
    inner: Checked = Checked()
    rows: tuple[Checked, ...] = setting((), "checked rows", min_length=1)
    free: dict[str, Any] = setting(help="anything", default_factory=dict)
    name: str


def test_tables_are_built_from_nested_dicts():
    raw = {"name": "x", "inner": {"size": 4}, "rows": [{"size": 1}, {}], "free": {"a": {"b": 1}}}
    rows = Checked(size=1), Checked()
    assert build(Nested, raw) == Nested(name="x", inner=Checked(size=4), rows=rows, free={"a": {"b": 1}})
    assert build(Nested, {"name": "x"}) == Nested(name="x")


@pytest.mark.parametrize("raw, said", [
    ({}, "file: got no name, expected a value"),
    ({"nam": "x"}, "file: got unknown setting nam; did you mean name?"),
    ({"name": "x", "inner": {"sise": 1}}, "got unknown setting inner.sise; did you mean inner.size?"),
    ({"name": "x", "rows": [{}, {"sise": 1}]}, "got unknown setting rows.1.sise; did you mean rows.size?"),
    ({"name": "x", "zzz": 1}, "got unknown setting zzz; expected one of free, name, inner.size, rows.size"),
    ({"name": "x", "inner": {"size": 0}}, "got inner.size = 0, expected at least 1"),
    ({"name": "x", "rows": [{"size": "y"}]}, "got rows.0.size = 'y'"),
    ({"name": "x", "rows": []}, "got rows = [], expected a list of tables"),
    ({"name": "x", "inner": 3}, "got inner = 3, expected a dictionary"),
])  # fmt: skip
def test_wrong_tables_are_named(raw, said):
    refused(lambda: build(Nested, raw, "file"), said)


@dataclass(frozen=True, kw_only=True)
class Kinds:
    count: int = setting(0)
    rate: float = setting(0.0)
    loud: bool = setting(False)
    word: str = setting("x")
    span: tuple[int, int] | None = setting(None)
    mixed: float | Sequence[float] | Literal["auto"] = setting("auto")
    bias: Mapping[int, float] | None = setting(None)


def test_files_and_command_lines_may_write_numbers_as_texts_and_texts_as_numbers():
    raw = {
        "count": 1e3,
        "rate": "1e-3",
        "loud": "yes",
        "word": 7,
        "span": ["1", 2],
        "mixed": ["1", 2],
        "bias": {"5": "0.5"},
    }
    values = dict(count=1000, rate=0.001, loud=True, word="7", span=(1, 2), mixed=(1.0, 2.0), bias={5: 0.5})
    assert build(Kinds, raw) == Kinds(**values)
    assert build(Kinds, {"mixed": "auto", "loud": False}) == Kinds() and build(Kinds, {"mixed": "2"}).mixed == 2.0


@pytest.mark.parametrize("name, value, said", [
    ("count", True, "True, expected an integer"),
    ("count", 2.5, "2.5, expected an integer"),
    ("rate", "nan", "'nan', expected a finite number"),
    ("rate", 10**400, "expected a number"),
    ("loud", "maybe", "'maybe', expected true or false"),
    ("word", "", "'', expected at least 1 character"),
    ("word", "\ud800", "expected a text of whole characters"),
    ("span", [1], "[1], expected a list of 2"),
    ("mixed", [0.5, "x"], "'x', expected a number"),
    ("mixed", "x", "'x', expected a number or a list or 'auto'"),
    ("bias", {"x": 1}, "'x', expected an integer"),
    ("bias", [1], "[1], expected a dictionary"),
])  # fmt: skip
def test_values_of_other_types_are_named(name, value, said):
    refused(lambda: build(Kinds, {name: value}), f"got {name} = ", said)


def test_descriptions_have_every_setting_in_full():
    assert describe(Nested).splitlines() == [
        "  free: anything.",
        "  name:  (required).",
        "  inner.size: how large it is (default: 3).",
        "  rows[].size: how large it is (default: 3).",
    ]


def test_unknown_arguments_are_type_errors_that_suggest():
    with pytest.raises(UnknownSetting, match="got unknown argument 'sise'; did you mean size?"):
        refuse_unknown(["sise"], ["size"])
    with pytest.raises(UnknownSetting, match="got unknown argument 'bemas'; beams is not supported"):
        refuse_unknown(["bemas"], ["size"], {"beams": "is not supported"})
