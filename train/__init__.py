"""Training of drafters. The commands are modules of this folder: `python -m train.pair --help`."""

from importlib.util import find_spec

if missing := [name for name in ("etils", "grain", "optax", "orbax", "tomli_w") if find_spec(name) is None]:
    raise ModuleNotFoundError(f'training needs {", ".join(missing)}; pip install -e ".[train]"')
