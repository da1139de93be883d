"""Names and prose of the source: docstrings begin with a verb or a noun, and words that stop a reader are not used."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("treeflash_jax", "train") for path in (ROOT / folder).rglob("*.py"))
OPENINGS = {"What", "Whether", "Of", "How", "Where", "Which", "Who", "Whatever"}
WORDS = re.compile(
    r"\b(so many|nobody|somebody|laws?|lawful|(?<!matrix )rows?|came true|come true|comes true|a person|(?<!no )dear)\b",
    re.IGNORECASE,
)
VARIABLES = {"found", "own", "one", "rest", "said", "about", "rows", "row"}


def violations(source: str) -> list[str]:
    tree, problems = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (doc := ast.get_docstring(node)):
            name, line = getattr(node, "name", "module"), getattr(node, "lineno", 1)
            if doc.split()[0].strip(",.:") in OPENINGS:
                problems.append(f"{line}: docstring of {name} begins with {doc.split()[0]!r}")
            problems += [f"{line}: {name}: {match.group()!r} in its docstring" for match in WORDS.finditer(doc)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and re.search(r"_of$|(^|_)rows?($|_)|Rows?$", node.name):
            problems.append(f"{node.lineno}: name {node.name}")
        names = [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []
        names += [node.arg] if isinstance(node, ast.arg) else []
        problems += [f"{node.lineno}: variable {name}" for name in names if name in VARIABLES]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            problems += [f"{token.start[0]}: {match.group()!r} in a comment" for match in WORDS.finditer(token.string)]
    return problems


def test_names_and_prose_are_plain():
    problems = {str(path.relative_to(ROOT)): violations(path.read_text(encoding="utf-8")) for path in FILES}
    assert not {path: named for path, named in problems.items() if named}


def test_what_is_not_plain_is_named():
    source = 'def shape_of(rows):\n    """What so many rows need."""\n    found = 1  # nobody\n    return found\n'
    assert len(violations(source)) == 7
