"""Training of drafters. The commands are modules of this folder: `python -m train.pair --help`."""

from importlib.util import find_spec

if find_spec("tomli_w") is None:  # the first of its packages that a command needs
    raise ModuleNotFoundError('training needs packages that are not installed: pip install -e ".[train]"')
