"""`postgrad push FOLDER|RUN user/name`: publish a model on a hub."""

from pathlib import Path

from postgrad.errors import ConfigError, did_you_mean

HELP = """usage: postgrad push FOLDER|RUN user/name [private=false] [step=best] [lora=keep] [--card]

Uploads a model folder to the Hugging Face hub, or to the server that HF_ENDPOINT names. The token is HF_TOKEN's or that of `hf auth login`.

  FOLDER|RUN     a model folder (postgrad export makes one), a checkpoint, or a run folder
  private=true   the repository is private unless you say private=false; one that is there already stays as it is
  step=          of a run: latest, best, or a number
  lora=keep      only the adapter of a run with model.lora.rank; lora=merge, the default, is the whole model
  --card         print the model card and upload nothing

The model card (README.md) is written from the run folder: base model, method, data, settings, metrics, config.yaml; a README.md in
the folder is left as it is. When the connection breaks, the same command goes on: files that arrived are not sent again."""

KEYS = ("private", "step", "lora")


def run(words: list[str]) -> int:
    if not words or "-h" in words or "--help" in words:
        print(HELP)
        return 0
    given = dict(
        word.split("=", 1) for word in words if "=" in word and word.partition("=")[0] in KEYS
    )
    plain = [word for word in words if word.partition("=")[0] not in KEYS and word != "--card"]
    for word in plain:
        key = word.partition("=")[0]
        if (word.startswith("-") or "=" in word) and not Path(word).exists():
            raise ConfigError(f"push does not know {key}; {did_you_mean(key, (*KEYS, '--card'))}")
    if len(plain) != 2:
        raise ConfigError(
            f"push wants a folder and a name: postgrad push FOLDER user/name; it got {' '.join(plain) or 'nothing'}"
        )
    for key, known in (("private", ("true", "false")), ("lora", ("merge", "keep"))):
        if key in given and given[key] not in known:
            raise ConfigError(
                f"{key}={given[key]} is not one of its values; {did_you_mean(given[key], known)}"
            )
    from postgrad.publish.card import model_card
    from postgrad.publish.push import find_parcel, push

    parcel = find_parcel(plain[0], given.get("step", "latest"), given.get("lora", "merge"))
    if "--card" in words:
        print(model_card(plain[1], parcel.run, parcel.step))
        return 0
    address = push(parcel, plain[1], given.get("private", "true") == "true", print)
    print(f"pushed: {address}")
    return 0
