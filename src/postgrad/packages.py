"""Which optional packages are installed."""

import importlib.util


def is_installed(module: str) -> bool:
    """Returns whether a module can be imported.

    A plain folder of that name in the working directory, such as the one that wandb writes, is no
    package, although Python would import it as an empty one.
    """
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
