"""Training of drafters. The commands are modules of this folder: `python -m train.pair --help`."""

from importlib.util import find_spec

if find_spec("tomli_w") is None or find_spec("matplotlib") is None:  # needed first, and last
    raise ModuleNotFoundError('training needs packages that are not installed: pip install -e ".[train]"')
