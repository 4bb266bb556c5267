"""A reference that follows the policy: every N steps it gets the policy's weights, or a mix.

TR-DPO and TRL's sync_ref_model are this; so are the resets of ProRL, without those of the
optimizer.
"""

from dataclasses import dataclass

from postgrad.config.schema import setting
from postgrad.methods.method import Method, MethodSettings
from postgrad.methods.ports import Role
from postgrad.methods.support.checks import refuse_unread


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
    )


def synced_role(sync_every: int, share: float) -> Role:
    """Returns the role of the starting model, or of a copy that follows the policy from there."""
    if not sync_every:
        return Role("frozen")
    return Role("synced", sync_every=sync_every, share=share)


def reference_role(settings: ReferenceSettings) -> Role:
    return synced_role(settings.reference_sync_every, settings.reference_mixup)


def check_reference(method: Method, reason: str, fix: str = "") -> None:
    """Refuses settings of a reference that have no effect. Raises ConfigError.

    Args:
        method: checked.
        reason: why it has no reference, if it has none, such as `with method.kl=none`.
        fix: the setting that adds a reference.
    """
    settings = method.settings
    names = ["reference_sync_every", "reference_mixup"]
    role = method.roles().get("reference")
    if role is None:
        refuse_unread("method", settings, names, reason, fix)
    elif role != reference_role(settings):
        reason = f"because {type(method).__name__}.roles() has a reference of its own"
        refuse_unread("method", settings, names, reason)
    elif not settings.reference_sync_every:
        reason = "with method.reference_sync_every=0"
        fix = "add method.reference_sync_every=100"
        refuse_unread("method", settings, ["reference_mixup"], reason, fix)
