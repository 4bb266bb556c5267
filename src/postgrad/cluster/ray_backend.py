"""Models on a Ray cluster, behind the ports of process.py: groups of ranks that train together, and engines that stand alone.

A call's arguments are encoded once and put into the object store; the actors get a reference. Every wait has a limit and names whom it
waits for: a death is noticed within seconds, silence after cluster.wait_s.
"""

import atexit
import importlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from postgrad.cluster.child_process import START_S, RemoteEngine, RemoteModel
from postgrad.cluster.engines import (
    build_remote_engine,
    engine_config,
    is_remote,
    shares_weights,
)
from postgrad.cluster.host import SPEAKING
from postgrad.cluster.rank import ENGINE, POLICY, Rank
from postgrad.cluster.remote_roles import is_elsewhere
from postgrad.cluster.wire import decode, encode
from postgrad.config.compose import to_yaml
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import ConfigError, RunError
from postgrad.files import acquire_lock, is_locked
from postgrad.methods.base import Role
from postgrad.model.device import is_gpu

GRACE_S = 5.0  # after one rank has failed the others get this long to answer, too
ANSWER_S = 5.0  # a cluster that is to be joined must take a connection within this
ENGINE_RESTARTS = 3  # times per run that a lost engine is started again
TOKENS = "postgrad-ray-"  # begins the names of the folders that hold them
VERIFIER = "verifier"  # the one pool that is not a model's


def import_ray() -> Any:
    """Ray, set up before its import: quiet, with a token, no reports to anybody. Raises ConfigError where it is missing."""
    late = "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # what Ray will do anyway, without its warning
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            "cluster=ray needs one more package: pip install 'postgrad[cluster]'"
        ) from error
    if late:  # somebody imported Ray before: it read its settings then, and would start servers it cannot talk to
        ray._raylet.Config.initialize("")
    return ray


@contextmanager
def connected(config: Config | EngineConfig) -> Iterator[Any]:
    """Ray, joined at cluster.address, or started on this machine for as long as the context lasts. One that is joined already is used."""
    if config.cluster.address:
        os.environ.setdefault(
            "RAY_NUM_REDIS_GET_RETRIES", "3"
        )  # seconds to join; a cluster that is there answers at once
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    try:
        with _own_sigterm():
            _join(ray, config.cluster.address) if config.cluster.address else start_local(ray)
        yield ray
    finally:
        ray.shutdown()


def start_local(ray: Any, num_cpus: int | None = None) -> None:
    """A cluster on this machine: loopback only, no dashboard, a token of its own in a file that only this user reads."""
    if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_token_file())
    # Without this Ray listens on the address that other machines see; its processes read the variable, this one has read it.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # workers import what this process can
    try:
        with _no_chatter():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level="ERROR",
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
            )
    except Exception as error:
        raise RunError(f"Ray did not start on this machine: {_first_line(error)}") from error
    finally:
        os.environ["PYTHONPATH"] = before


@cache
def _token_file() -> Path:
    """One token for as long as this process lives: Ray reads it once, and a second cluster of the process must go by the same."""
    _forget_tokens_of_the_dead()
    folder = tempfile.TemporaryDirectory(prefix=TOKENS)  # nobody else may look inside
    atexit.register(folder.cleanup)
    token = Path(folder.name) / "token"
    file = acquire_lock(token)  # the lock ends with the process, even after a kill
    atexit.register(file.close)
    file.write(secrets.token_hex(32))
    file.flush()
    token.chmod(0o600)
    return token


def _forget_tokens_of_the_dead() -> None:
    """Remove the token folders that killed processes left: old enough to be locked by their process, and not locked."""
    for token in Path(tempfile.gettempdir()).glob(f"{TOKENS}*/token"):
        try:
            status = token.stat()
            old = time.time() - status.st_mtime > START_S
            if status.st_uid == os.getuid() and old and not is_locked(token):
                shutil.rmtree(token.parent, ignore_errors=True)
        except OSError:  # another process has removed it
            continue


def _join(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"cluster.address={address} is not host:port; `ray start --head` prints it, e.g. 10.0.0.1:6379"
        )
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address={address}: nobody answers there ({error}); start it with ray start --head"
        ) from error
    try:
        with _no_chatter():
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except Exception as error:
        raise ConfigError(
            f"cluster.address={address} answers and refuses us; is it Ray, and is the cluster's token in RAY_AUTH_TOKEN or "
            f"RAY_AUTH_TOKEN_PATH? ({_first_line(error)})"
        ) from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray exits without a word on SIGTERM, also after it has started; here it stays what it was: a stop as by Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as stop:
        raise KeyboardInterrupt from stop
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextmanager
def _no_chatter() -> Iterator[None]:
    """Ray's core writes to stderr while it connects, whatever level it is told; what fails is raised and needs no chatter."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def needs_of(config: Config | EngineConfig, name: str, cluster: dict[str, float]) -> dict[str, Any]:
    """What one actor takes of the cluster: a GPU, or the cores its threads run on; and one of the resource `name`, where there is one.

    Verifiers take a core for each child process.
    """
    on_gpu = is_gpu(config.model.device) and name != VERIFIER
    cores = config.model.threads
    if name == VERIFIER and isinstance(config, Config):
        cores = config.reward.workers
    needs: dict[str, Any] = (
        {"num_gpus": 1, "num_cpus": 1} if on_gpu else {"num_gpus": 0, "num_cpus": cores}
    )
    return needs | ({"resources": {name: 1}} if name in cluster else {})


class Worker:
    """One actor with its name; `handle` changes when it is made anew."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name, self.handle = name, handle


Arrivals = Generator[tuple[Any, Worker, Any], float | None, None]


class WorkerLost(Exception):
    """An actor that died or fell silent."""

    def __init__(self, member: Worker, how: str) -> None:
        super().__init__(f"the {member.name} worker {how}")
        self.member = member


class WeightsRef(Mapping[str, Tensor]):
    """Weights that stay in the object store: engines get the reference; whoever looks inside fetches them."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self.ray, self.reference = ray, reference
        self.here: dict[str, Tensor] | None = None

    def _fetched(self) -> dict[str, Tensor]:
        if self.here is None:
            self.here = decode(self.ray.get(self.reference))
        assert self.here is not None
        return self.here

    def __getitem__(self, name: str) -> Tensor:
        return self._fetched()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetched())

    def __len__(self) -> int:
        return len(self._fetched())


class Actors:
    """What a group of ranks and a set of engines share: making actors, calling them, waiting for them."""

    def __init__(
        self,
        ray: Any,
        config: Config | EngineConfig,
        label: str,
        size: int,
        hosts: Sequence[str],
    ) -> None:
        self.ray, self.config, self.label, self.hosts = ray, config, label, list(hosts)
        self.text, self.wait_s = ray.put(to_yaml(config)), config.cluster.wait_s
        self.needs = needs_of(config, label, ray.cluster_resources())
        self.lock = threading.RLock()
        self.members = [
            Worker(f"{label} {i}" if size > 1 else label, self.make()) for i in range(size)
        ]

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        raise NotImplementedError

    def make(self) -> Any:
        return (
            self.ray.remote(Rank).options(**self.needs, max_restarts=0, max_concurrency=1).remote()
        )

    def send(
        self, member: Worker, request: bytes | Any, parts: Sequence[Any] = ()
    ) -> tuple[Any, Any]:
        """References of (how it went, the result)."""
        return member.handle.call.options(num_returns=2).remote(request, *parts)

    def arrived(self, pending: dict[Any, Worker], what: str, limit_s: float) -> Arrivals:
        """(reference, member, value) in the order of arrival. Raises Lost; a limit can be shortened by sending it in."""
        pending = dict(pending)
        deadline = time.monotonic() + limit_s
        while pending:
            done, _ = self.ray.wait(
                list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic())
            )
            if not done:
                member = next(iter(pending.values()))
                setting = " (cluster.wait_s)" if limit_s == self.wait_s else ""
                raise WorkerLost(
                    member, f"did not answer {what} within {limit_s:g} s{setting}; it was stopped"
                )
            member = pending.pop(done[0])
            try:
                value = self.ray.get(done[0])
            except self.ray.exceptions.RayActorError as error:
                raise WorkerLost(member, f"died during {what}") from error
            except self.ray.exceptions.RayError as error:
                raise RunError(
                    f"{what} on the {member.name} worker: {_first_line(error)}"
                ) from error
            sooner = yield done[0], member, value
            if sooner is not None:
                deadline = min(deadline, time.monotonic() + sooner)

    def close(self) -> None:
        for member in self.members:
            self.ray.kill(member.handle)


class WorkerGroup(Actors):
    """Ranks that hold models together. One that is lost ends them all: the run stops by name and can be continued."""

    def __init__(
        self,
        ray: Any,
        config: Config | EngineConfig,
        label: str,
        size: int,
        hosts: Sequence[str],
    ) -> None:
        super().__init__(ray, config, label, size, hosts)
        self.broken = ""
        try:
            point = self._one(self.members[0].handle.meeting_point.remote(), self.members[0])
            started = {
                m.handle.start.remote(self.text, self.hosts, rank, size, point): m
                for rank, m in enumerate(self.members)
            }
            self._statuses(started, "start", START_S)
        except BaseException:
            self.close()
            raise

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        """The first rank's answer; what is generated is divided over the ranks."""
        what = f"{port}.{method}"
        with self.lock:
            if self.broken:
                raise RunError(f"{self.broken}; {what} cannot be asked")
            if method == "generate":
                return self._divided(port, *arguments)
            parts = (
                [arguments[0].reference]
                if arguments and isinstance(arguments[0], WeightsRef)
                else []
            )
            request = self.ray.put(encode([port, method, [] if parts else list(arguments)]))
            sent = {m: self.send(m, request, parts) for m in self.members}
            self._statuses({status: m for m, (status, _) in sent.items()}, what, self.wait_s)
            result = sent[self.members[0]][1]
            return (
                WeightsRef(self.ray, result)
                if method == "weights"
                else decode(self._one(result, self.members[0]))
            )

    def _divided(self, port: str, requests: list[Any], sampling: Any) -> list[Any]:
        shares = share_requests(requests, len(self.members))
        sent = {
            m: self.send(m, encode([port, "generate", [[requests[i] for i in share], sampling]]))
            for m, share in zip(self.members, shares, strict=True)
        }
        self._statuses(
            {status: m for m, (status, _) in sent.items()}, f"{port}.generate", self.wait_s
        )
        return merged(
            [
                (share, decode(self._one(sent[m][1], m)))
                for m, share in zip(self.members, shares, strict=True)
            ]
        )

    def _statuses(self, pending: dict[Any, Worker], what: str, limit_s: float) -> None:
        """Wait until all have answered. Where one failed the others may hang in an exchange with it: they get GRACE_S."""
        failure: Exception | None = None
        arrivals = self.arrived(pending, what, limit_s)
        try:
            entry = next(arrivals, None)
            while entry is not None:
                kind, words = decode(entry[2])
                if kind != "ok" and failure is None:
                    failure = ConfigError(words) if kind == "config" else RunError(words)
                entry = arrivals.send(GRACE_S) if failure is not None else next(arrivals, None)
        except StopIteration:
            pass
        except WorkerLost as lost:
            self.broken = str(lost)
            self.close()
            if failure is None:
                raise RunError(f"{lost}; the same command continues the run") from lost
        if failure is not None:
            raise failure

    def _one(self, reference: Any, member: Worker) -> Any:
        try:
            return next(self.arrived({reference: member}, "its answer", max(self.wait_s, START_S)))[
                2
            ]
        except WorkerLost as lost:
            self.broken = str(lost)
            self.close()
            raise RunError(f"{lost}; the same command continues the run") from lost


class Engines(Actors):
    """Engines that stand alone, each over a whole model. One that is lost is made anew, gets the weights, and repeats its share.

    Each trajectory has its own seed, so what is repeated is the same, and the division over engines changes nothing.
    """

    def __init__(
        self,
        ray: Any,
        config: Config | EngineConfig,
        label: str,
        size: int,
        hosts: Sequence[str],
    ) -> None:
        super().__init__(ray, config, label, size, hosts)
        self.left = ENGINE_RESTARTS
        self.weights = None
        try:
            self._all({m: self._start(m) for m in self.members}, "start", START_S)
        except WorkerLost as lost:
            self.close()
            raise RunError(str(lost)) from lost
        except BaseException:
            self.close()
            raise

    def call(self, port: str, method: str, *arguments: Any) -> Any:
        with self.lock:
            if method == "publish":
                weights = arguments[0]
                far = isinstance(weights, WeightsRef)
                self.weights = (port, weights.reference if far else self.ray.put(encode(weights)))
                self._ask(dict.fromkeys(self.members), f"{port}.publish")
                return None
            requests, sampling = arguments
            shares = dict(
                zip(self.members, share_requests(requests, len(self.members)), strict=True)
            )
            asked = {
                m: encode([port, method, [[requests[i] for i in share], sampling]])
                for m, share in shares.items()
                if share
            }
            found = self._ask(asked, f"{port}.{method}")
            return merged([(shares[m], decode(data)) for m, data in found.items()])

    def _ask(self, asked: Mapping[Worker, bytes | None], what: str) -> dict[Worker, bytes]:
        """Everybody's result, after as many restarts as are left; a request of None publishes the weights."""
        send = lambda m: self._publish(m) if asked[m] is None else self.send(m, asked[m])  # noqa: E731
        sent = {member: send(member) for member in asked}
        out: dict[Worker, bytes] = {}
        while sent:
            member, (status, result) = next(iter(sent.items()))
            try:
                kind, words = decode(self._get(status, member, what))
                if kind != "ok":
                    raise ConfigError(words) if kind == "config" else RunError(words)
                out[member] = self._get(result, member, what)
                del sent[member]
            except WorkerLost as lost:
                self._restart(member, lost)
                sent[member] = send(member)
        return out

    def _get(self, reference: Any, member: Worker, what: str) -> Any:
        return next(self.arrived({reference: member}, what, self.wait_s))[2]

    def _restart(self, member: Worker, lost: WorkerLost) -> None:
        self.ray.kill(member.handle)
        if self.left == 0:
            raise RunError(
                f"{lost}, after {ENGINE_RESTARTS} restarts; the same command continues the run"
            ) from lost
        self.left -= 1
        print(
            f"{lost}; it is started anew and repeats its share ({self.left} restarts left)",
            file=sys.stderr,
        )
        member.handle = self.make()
        try:
            self._all({member: self._start(member)}, "start", START_S)
            if self.weights is not None:
                kind, words = decode(self._get(self._publish(member)[0], member, "engine.publish"))
                if kind != "ok":
                    raise RunError(words)
        except WorkerLost as again:
            self._restart(member, again)

    def _start(self, member: Worker) -> Any:
        return member.handle.start.remote(self.text, self.hosts, 0, 1, None)

    def _publish(self, member: Worker) -> Any:
        assert self.weights is not None
        port, reference = self.weights
        return self.send(member, encode([port, "publish", []]), [reference])

    def _all(self, pending: dict[Worker, Any], what: str, limit_s: float) -> None:
        for _, _, value in self.arrived(
            {reference: m for m, reference in pending.items()}, what, limit_s
        ):
            kind, words = decode(value)
            if kind != "ok":
                raise ConfigError(words) if kind == "config" else RunError(words)


@contextmanager
def place_on_ray(
    config: Config, roles: dict[str, Role]
) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """(policy, engine, models by role) on the cluster. Roles of cluster.pools have workers of their own; others stand with the policy.

    With a pool for them the verifiers stand beside the models, under their pool's name.
    """
    here = {name: role for name, role in roles.items() if not is_elsewhere(role.path)}
    pools = {name: size for name, size in config.cluster.pools.items() if name != VERIFIER}
    for name in pools:
        if name not in here:
            known = ", ".join([*here, VERIFIER])
            raise ConfigError(
                f"cluster.pools.{name}: this run has no such role to place; its roles are {known}"
            )
    engines = config.cluster.engines
    with connected(config) as ray:
        _check_room(ray, config, config.cluster.workers + engines + sum(pools.values()))
        groups: list[Actors] = []
        try:
            staying = [name for name in here if name not in pools]
            beside = [] if engines or is_remote(config) else [ENGINE]
            crew = WorkerGroup(
                ray, config, POLICY, config.cluster.workers, [POLICY, *beside, *staying]
            )
            groups.append(crew)
            models = {name: _port(crew, name, here[name]) for name in staying}
            for name, size in pools.items():
                kind = Engines if here[name].kind in SPEAKING else WorkerGroup
                groups.append(kind(ray, config, name, size, [name]))
                models[name] = _port(groups[-1], name, here[name])
            if engines:
                groups.append(Engines(ray, engine_config(config), ENGINE, engines, [ENGINE]))
            engine: Any = RemoteEngine(
                groups[-1] if engines else crew, shares_weights(config) and not engines
            )
            if VERIFIER in config.cluster.pools:
                from postgrad.cluster.verifier_pool import Verifiers

                models[VERIFIER] = Verifiers(ray, config)
                groups.append(models[VERIFIER])
            if is_remote(config):
                engine = build_remote_engine(config)
            yield RemoteModel(crew, POLICY), engine, models
        finally:
            for group in groups:
                group.close()


@contextmanager
def engine_on_ray(config: EngineConfig) -> Iterator[Any]:
    """Only engines, for whom nothing is trained: as many as cluster.engines, else as cluster.workers."""
    with connected(config) as ray:
        size = config.cluster.engines or config.cluster.workers
        _check_room(ray, config, size)
        engines = Engines(ray, config, ENGINE, size, [ENGINE])
        try:
            yield RemoteEngine(engines, shares_weights=False)
        finally:
            engines.close()


def _port(group: Any, name: str, role: Role) -> Any:
    return RemoteEngine(group, False, name) if role.kind in SPEAKING else RemoteModel(group, name)


def _check_room(ray: Any, config: Config | EngineConfig, actors: int) -> None:
    """Refuse more workers than the cluster has room for: Ray would wait for ever."""
    needs, there = needs_of(config, "", {}), ray.cluster_resources()
    judging = needs_of(config, VERIFIER, {})
    verifiers = config.cluster.pools.get(VERIFIER, 0)  # an evaluation has none of these actors
    verifiers = verifiers if isinstance(config, Config) else 0
    for key, resource, word in (("num_gpus", "GPU", "GPUs"), ("num_cpus", "CPU", "CPU cores")):
        wanted, has = actors * needs[key] + verifiers * judging[key], there.get(resource, 0.0)
        if wanted > has:
            parts = f"cluster.workers={config.cluster.workers}, cluster.engines={config.cluster.engines}"
            raise ConfigError(
                f"{actors + verifiers} workers ({parts} and cluster.pools) want {wanted:g} {word}, the Ray cluster has {has:g}; "
                "ask for fewer, or join a larger cluster with cluster.address"
            )


def share_requests(requests: Sequence[Any], size: int) -> list[list[int]]:
    """Which requests each of `size` engines gets: whole ones, with nearly equal numbers of continuations."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for i in sorted(range(len(requests)), key=lambda i: (-len(requests[i].seeds), i)):
        target = loads.index(min(loads))
        shares[target].append(i)
        loads[target] += len(requests[i].seeds)
    return [sorted(share) for share in shares]


def merged(found: Sequence[tuple[list[int], list[Any]]]) -> list[Any]:
    """Results by the numbers of their requests, in the order of the requests."""
    by_number = {
        i: result for share, results in found for i, result in zip(share, results, strict=True)
    }
    return [by_number[i] for i in sorted(by_number)]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
