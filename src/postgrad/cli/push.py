"""`postgrad push FOLDER|RUN user/name`: uploads a model to a hub."""

from typing import Literal

from postgrad.errors import Conflict


def push(
    source: str,
    name: str,
    *,
    private: bool = True,
    step: str = "latest",
    branch: str = "",
    lora: Literal["merge", "keep"] = "merge",
    card: bool = False,
) -> int:
    """Upload a model folder to the Hugging Face hub, or to the server that HF_ENDPOINT names. Uses
    the token in HF_TOKEN, or the one of `hf auth login`.

    Args:
        source [FOLDER|RUN]: model folder (postgrad export writes one), checkpoint or run folder
        name [user/name]: repository on the hub
        private: whether a new repository is private; an existing one is not changed
        step: checkpoint of a run: latest, best or a number; all: every checkpoint to a branch
            step-N, and the last one to main
        branch: branch of the repository; default: main
        lora: for a run with model.lora.rank: merge uploads the full model, keep only the adapter
        --card: print the model card and upload nothing

    The model card (README.md) is written from the run folder: base model, method, data, settings,
    metrics and config.yaml. An existing README.md in the folder is uploaded unchanged.
    If the connection breaks, the same command continues; files that arrived are not sent again.
    """
    from postgrad.publish.card import model_card
    from postgrad.publish.push import find_upload, find_uploads
    from postgrad.publish.push import push as upload_to

    if step == "all":
        if branch or card:
            raise Conflict("step=all names its own branches; remove branch= and --card")
        uploads = find_uploads(source, lora)
        targets = [(one, f"step-{one.step}") for one in uploads] + [(uploads[-1], "")]
        for one, own_branch in targets:
            print(f"pushed: {upload_to(one, name, private, print, own_branch)}")
        return 0
    upload = find_upload(source, step, lora)
    if card:
        print(model_card(name, upload.folder, upload.run, upload.step))
        return 0
    print(f"pushed: {upload_to(upload, name, private, print, branch)}")
    return 0
