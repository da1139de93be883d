"""Writes what editors show of keyword arguments, from the fields of GenerateConfig and ModelOptions.

    PYTHONPATH=. python tests/write_keywords.py

It writes treeflash_jax/engine/settings/keywords.py, and the arguments in the docstring of `tf.load`.
"""

import inspect
import re
import textwrap
from pathlib import Path

from treeflash_jax.core.setting_tables import describe
from treeflash_jax.core.settings import field_names
from treeflash_jax.engine import loading
from treeflash_jax.engine.settings import keywords
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.model_options import ModelOptions

FILE = '''"""Types of keyword arguments, for editors. `python tests/write_keywords.py` writes this file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from jax.sharding import Mesh

# Names that editors offer. Type checkers accept any other text, too: programs can register kinds of their own.
{choices}


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load`, whose docstring describes them."""

{load_types}


class GenerateSettings(TypedDict, total=False):
    """Keyword arguments of `generate`, `generate_each`, `stream` and `warmup`: the fields of GenerateConfig."""

{generate_types}
'''
LOAD_OPTIONS = [name for name in field_names(ModelOptions) if name != "verifier"]  # `verifier` is a positional argument


def types(cls: type, names: list[str]) -> str:
    """Returns the annotations of fields as source, one a line."""
    kinds = {name: kind for name, kind in inspect.get_annotations(cls).items() if name in names}
    named = choices(cls)
    lines = [
        f"    {name}: {f'{named[name][0]} | ' if name in named else ''}{inspect.formatannotation(kind)}"
        for name, kind in kinds.items()
    ]
    return re.sub(r"\b(\w+\.)+(?=[A-Z])", "", "\n".join(lines))  # without modules


def choices(cls: type) -> dict[str, tuple[str, list[str]]]:
    """Returns a name for the type of every text that has choices, and the choices."""
    found = {}
    for name, kind in inspect.get_annotations(cls).items():
        known = cls.__dataclass_fields__[name].metadata["checks"].get("choices")
        if known and kind == str | None:
            found[name] = "".join(word.title() for word in name.split("_")) + "Choice", [*known()]
    return found


def choices_source() -> str:
    """Returns the types of `choices` as source, with one choice a line."""
    source = []
    for title, words in (*choices(ModelOptions).values(), *choices(GenerateConfig).values()):
        lines = [f'    "{word}",' for word in words]
        source += [f"{title} = Literal[", *lines, "]"] if len(words) > 1 else [f'{title} = Literal["{words[0]}"]']
    return "\n".join(source)


def keywords_source() -> str:
    """Returns the content of engine/settings/keywords.py."""
    return FILE.format(
        choices=choices_source(),
        load_types=types(ModelOptions, LOAD_OPTIONS),
        generate_types=types(GenerateConfig, field_names(GenerateConfig)),
    )


def loading_source(source: str) -> str:
    """Returns the source of engine/loading.py with the arguments of `load` in its docstring."""
    verifier = f"verifier: {ModelOptions.__dataclass_fields__['verifier'].metadata['help']}."
    lines = textwrap.wrap(verifier, 80, initial_indent="      ", subsequent_indent="        ")
    arguments = "\n".join([*lines, textwrap.indent(describe(ModelOptions, LOAD_OPTIONS), "    ")])
    before, after = source.index("    Args:\n") + len("    Args:\n"), source.index("\n    Raises:")
    return f"{source[:before]}{arguments}\n{source[after:]}"


if __name__ == "__main__":
    Path(keywords.__file__).write_text(keywords_source(), encoding="utf-8")
    path = Path(loading.__file__)
    path.write_text(loading_source(path.read_text(encoding="utf-8")), encoding="utf-8")
