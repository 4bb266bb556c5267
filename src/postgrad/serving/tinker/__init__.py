"""`postgrad serve MODEL --train`: LoRA training over HTTP, for the official `tinker` client.

    app.py           the HTTP application: routes, authentication, limits
    requests.py      the JSON bodies of requests
    protobuf.py      the protobuf wire format
    messages.py      the protobuf messages: training data in, tensors out
    service.py       what each request does
    records.py       sessions, training clients and samplers
    sampling.py      sampling parameters of requests
    listings.py      training runs, checkpoints and downloads
    worker.py        one thread that runs all work on the model
    futures.py       results that clients poll for
    trained_model.py the base model: training passes, optimizer steps, sampling
    adapters.py      LoRA adapters that share one base model
    losses.py        Tinker's losses
    checkpoints.py   saved adapters on disk

May import what serving may, and algorithms and doctor.
"""
