"""Where the models of a run live: in this process, in child processes, or on a Ray cluster.

Every backend gives the driver the same ports (policy, engine, models by role), so a method does
not depend on the backend. May import methods, rollout, model, verifiers and everything below.

    backends         opens the models of a run, or an engine alone, on the configured backend
    host             builds models in one process, from the configuration alone
    engines          builds the engine of a run or an evaluation
    generators       models that generate text for a role: local, served, or fake

    ports            calls to models in another process: RemotePort, and the worker's side
    wire             values as bytes: safetensors and JSON, no pickle
    child_process    calls the ports in a child process
    child_main       the program of the child process

    ray_backend      opens models and engines on Ray
    ray_connection   starts or joins a Ray cluster, with token authentication
    resources        CPU cores and GPUs of each actor; devices of one node for divided engines
    meshes           how the ranks of each group of workers divide its models
    actor_pool       creates actors, calls them and waits for them
    worker_group     actors that train sharded models together
    engine_pool      actors with an engine each; lost ones are restarted
    rank_actor       the actor that holds models or an engine
    stored           weights and large tensors in Ray's object store: the driver passes references
    verifier_pool    actors that run verifiers
    verifier_actor   the actor that holds a pool of verifier processes
"""
