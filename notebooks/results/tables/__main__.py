"""Writes the tables of the README files from the JSON files beside this folder and from the declared settings.

    python notebooks/results/tables

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES. A test fails if a page
and the results disagree.
"""

import re
import sys

import drafters
import estimates
import phases
import speeds
import training
from forms import RESULTS, TABLES

ROOT = RESULTS.parent.parent
MODULES = drafters, estimates, phases, speeds, training  # importing them fills TABLES
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in RESULTS.glob("*.md") if page.name != "README.md"),
    *sorted(page for part in ("notebooks", "train", "treeflash_jax") for page in (ROOT / part).rglob("README.md")),
]


def rendered(text: str) -> str:
    """Returns a page with its tables generated again."""
    made = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
    return made.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the package beside the pages, whichever is installed
    main()
