"""Every check with worked-out numbers, on the real modules."""

import pytest

from . import vectors_advantages, vectors_losses, vectors_other
from .mutation import real_modules

CHECKS = {
    name: function
    for module in (vectors_advantages, vectors_losses, vectors_other)
    for name, function in vars(module).items()
    if name.startswith("check_")
}


@pytest.mark.parametrize("name", CHECKS)
def test_vector(name):
    CHECKS[name](real_modules())
