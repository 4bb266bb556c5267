"""Actors on Ray ask for the devices that their models need."""

import os

import pytest
from refused import refused
from tiny_runs import config_of

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")

from postgrad.cluster.ray_connection import import_ray, start_local  # noqa: E402
from postgrad.cluster.resources import actor_resources, check_capacity  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    before = dict(os.environ)
    # Ray believes that this machine has two Ascend devices.
    os.environ["RAY_OVERRIDE_RESOURCES"] = '{"NPU": 2}'
    start_local(import_ray(), num_cpus=4)
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


def test_ascend_actors_ask_for_npus(tiny):
    """On a cluster with two NPUs that do not exist: Ray assigns them by number."""
    config = config_of("grpo", tiny, "cluster=ray", "cluster.workers=3", "model.threads=1")
    config.model.device = "npu"
    options = actor_resources(config, "policy", {"policy": 1.0})
    assert options == {"num_gpus": 0, "num_cpus": 1, "resources": {"NPU": 1, "policy": 1}}
    with refused("too_large", "cluster.workers", shows="3 NPUs.* has 2"):
        check_capacity(ray, config)
    config.cluster.workers = 2
    check_capacity(ray, config)

    class Probe:
        def assigned(self):
            devices = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
            return ray.get_runtime_context().get_assigned_resources(), devices

    actor = ray.remote(Probe).options(**actor_resources(config, "policy", {})).remote()
    assigned, devices = ray.get(actor.assigned.remote(), timeout=600)
    ray.kill(actor)
    assert assigned["NPU"] == 1 and devices in ("0", "1")
