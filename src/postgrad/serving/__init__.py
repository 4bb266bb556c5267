"""`postgrad serve`: models behind OpenAI's HTTP interface, on the native engine.

    options.py            the command's options
    app.py                the HTTP application: routes, streaming
    http.py               the guard, errors and events of OpenAI's HTTP; agents use them too
    requests.py           parses and checks requests
    responses.py          builds responses, complete or streamed
    responses_request.py  parses the requests of /v1/responses
    responses_api.py      builds their responses
    generate.py           the endpoint with tokens in and tokens out
    model_text.py         requests to token ids, token ids to text
    detokenizer.py        token ids to text, piece by piece
    served_model.py       a model with its tokenizer and its worker; loads new weights
    memory.py             a lack of memory as one line with the command's options
    worker.py             one thread per model that decodes all requests together
    servers_file.py       the file that lists running servers

May import rollout, model, data, config, files and net.
"""
