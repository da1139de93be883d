"""Models for commands. Unlike `tf.load`, commands have a default verifier."""

import sys
from typing import Unpack

from treeflash_jax.engine import loading
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.settings import pairs
from treeflash_jax.engine.settings.keywords import LoadOptions


def verifier_for_command(name: str | None) -> str:
    """Returns the name of the verifier. None: the default, with a printed note if it is tiny."""
    if name is None:
        name, why = pairs.default_verifier()
        if why:
            print(f"treeflash: loading the toy pair tiny, since {why}", file=sys.stderr)
    return name


def load_for_command(verifier: str | None = None, **options: Unpack[LoadOptions]) -> TreeFlash:
    """Loads a model like `tf.load`, by default the verifier that `verifier_for_command` chooses."""
    return loading.load(verifier=verifier_for_command(verifier), **options)
