"""A rank that fails because another one is gone: the one that is gone is named."""

import re
import socket
from collections.abc import Sequence

import pytest
from tables import tabled

from postgrad.cluster.actor_pool import Worker, WorkerLost
from postgrad.cluster.ports import LOST_PEER, attempt
from postgrad.cluster.rank_actor import interface_of
from postgrad.cluster.wire import encode
from postgrad.cluster.worker_group import WorkerGroup
from postgrad.errors import RunError

GLOO = (
    "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer "
    "[10.0.0.2]:40001. This means that the remote worker was closed."
)


def raise_error(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), (LOST_PEER, "Connection closed by peer [10.0.0.2]:40001")),
        (RuntimeError("shapes differ"), ("error", "RuntimeError: shapes differ")),
        (RunError(GLOO), ("error", GLOO)),  # our own errors say what they mean
    ],
)
def test_failed_collective_operations_have_a_status_of_their_own(error, expected):
    import torch.distributed  # noqa: F401

    status, message = attempt(lambda: raise_error(error))
    place = r" \(test_lost_peer.py, line \d+\)$"  # this file's code is a user's code
    assert (status, re.sub(place, "", message)) == expected


class Answers(WorkerGroup):
    """Ranks that answer with these statuses; the last one is lost if `died` is not None."""

    def __init__(self, statuses: Sequence[Sequence[str]], died: bool | None) -> None:
        self.statuses = statuses
        self.died = died
        self.label = "policy"
        self.workers = []

    def wait_all(self, pending, call_name, limit_s, deadline=None):
        yield from map(encode, self.statuses)
        if self.died is not None:
            raise WorkerLost(Worker("policy 1", None), "died during policy.update", self.died)


@tabled("statuses, died, message")
def test_the_cause_is_raised_and_not_what_followed_from_it(statuses, died, message):
    with pytest.raises(RunError, match=message):
        Answers(statuses, died)._check_statuses({}, "policy.update", 1.0)


def test_ranks_that_answer_raise_nothing():
    Answers([["ok", ""], ["ok", ""]], None)._check_statuses({}, "policy.update", 1.0)


def test_interface_of_an_address():
    names = [name for _, name in socket.if_nameindex()]
    assert interface_of("127.0.0.1") in names
    assert interface_of("203.0.113.9") == ""  # an address of the documentation's network
