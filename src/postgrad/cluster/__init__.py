"""Where the models of a run live: in this process, in child processes, or on a Ray cluster.

Every backend gives the driver the same ports (policy, engine, models by role), so a method does
not depend on the backend. May import methods, rollout, model, verifiers and everything below.

    backends         opens the models of a run, or an engine alone, on the configured backend
    generators       models that generate text for a role: local, served, or fake
    remote_roles     role paths that no process of the run loads: servers, the engine itself
    engines          builds the engine of a run or an evaluation
    host             builds all models of a run in one process

    remote_ports     the driver's ports of models in another process
    ports            the worker's side: the methods of each port, and failures as messages
    wire             values as bytes: safetensors and JSON, no pickle
    child_process    calls the ports in a child process
    child_main       the program of the child process

    ray_backend      opens models and engines on Ray
    ray_connection   starts or joins a Ray cluster, with token authentication
    ray_resources    CPU cores and GPUs of each actor
    placement        reserves devices of one node for workers that divide an engine
    actor_pool       creates actors, calls them and waits for them
    worker_group     actors that train sharded models together
    engine_pool      actors with an engine each; lost ones are restarted
    weights_ref      weights that stay in Ray's object store, in parts
    rank_actor       the actor that holds models or an engine
    verifier_pool    actors that run verifiers
    verifier_actor   the actor that holds a pool of verifier processes
"""
