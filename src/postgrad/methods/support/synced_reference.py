"""A reference that follows the policy: every N steps it gets the policy's weights, or a mix.

TR-DPO and TRL's sync_ref_model are this; so are the resets of ProRL, without those of the
optimizer.
"""

from dataclasses import dataclass

from postgrad.config.schema import setting
from postgrad.errors import NoEffect
from postgrad.methods.method import Method, MethodSettings
from postgrad.methods.ports import Role


@dataclass
class ReferenceSettings(MethodSettings):
    """Settings of every method with a reference."""

    reference_sync_every: int = setting(
        0,
        "steps between two updates of the reference from the policy; 0: the reference is the "
        "starting model at every step",
        at_least=0,
    )
    reference_mixup: float = setting(
        1.0,
        "share of the policy's weights in the updated reference; 1 copies the policy",
        above=0.0,
        at_most=1.0,
        only_with="method.reference_sync_every",
    )


def synced_role(sync_every: int, share: float) -> Role:
    """Return the role of the starting model, or of a copy that follows the policy from there."""
    if not sync_every:
        return Role("frozen")
    return Role("synced", sync_every=sync_every, share=share)


def reference_role(settings: ReferenceSettings) -> Role:
    return synced_role(settings.reference_sync_every, settings.reference_mixup)


def check_reference(method: Method) -> None:
    """Raise ConfigError for a reference of the user's own class, which the settings do not move."""
    role = method.roles().get("reference")
    every = method.settings.reference_sync_every
    if every and role is not None and role != reference_role(method.settings):
        raise NoEffect(
            f"method.reference_sync_every={every} has no effect: {type(method).__name__}.roles() "
            "has another reference; remove it"
        )
