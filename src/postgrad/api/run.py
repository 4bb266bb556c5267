"""Run: a run folder as an object, during training and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.data.rollout_folder import rollout_files
from postgrad.errors import Missing, NotInstalled, UnknownName, Unreadable

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from postgrad.api.page import Page
    from postgrad.api.sampler import Prompt, Sampler

FIRST_COLUMNS = ("text", "reward", "question", "uid", "group")  # of the rollouts


class Run:
    """A training run, opened by its folder: `postgrad.Run("runs/grpo-1a2b3c4d")`.

    Everything is read from the files of the folder, so a run that is still going on can be opened
    too. `train` returns a Run.

    Args:
        folder: the run folder.
        reward: the reward that `evaluate` uses by default; train() fills it in.
        interrupted: whether the run was stopped on request; train() fills it in.

    Raises:
        ConfigError: the folder is not a run.
    """

    def __init__(
        self, folder: str | Path, reward: str | None = None, interrupted: bool = False
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.interrupted = interrupted
        self.reward = reward
        self._sampler: Sampler | None = None
        if not (self.folder / "config.yaml").is_file():
            raise Unreadable(
                f"{self.folder} is not a run folder: it has no config.yaml; "
                "give the folder that postgrad train wrote, such as runs/NAME"
            )

    def __repr__(self) -> str:
        total = self.config["training"]["steps"]
        lines = self._lines()
        reward = next((line["reward/mean"] for line in lines[::-1] if "reward/mean" in line), None)
        last = max((int(line["step"]) for line in lines), default=0)
        text = f"Run({str(self.folder)!r}, step {last} of {total}"
        return text + (f", reward {reward:.3f})" if reward is not None else ")")

    # ---- what is in the folder

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.folder.name

    @property
    def config(self) -> dict[str, Any]:
        """All settings, as nested dicts."""
        from postgrad.config.stored import read_stored_config

        return read_stored_config(self.folder)

    @property
    def step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        from postgrad.training import checkpoint

        newest = checkpoint.latest(self.folder)
        return int(newest.name.removeprefix("step-")) if newest else 0

    @property
    def metrics(self) -> pandas.DataFrame:
        """One row per step with all metrics, validations included; the index is the step."""
        merged: dict[int, dict[str, float]] = {}
        for line in self._lines():
            merged.setdefault(int(line["step"]), {}).update(line)
        frame = _pandas().DataFrame(list(merged.values()), columns=None if merged else ["step"])
        return frame.set_index(frame["step"].astype(int)).drop(columns="step")

    def rollouts(self, step: int | None = None) -> pandas.DataFrame:
        """Return the trajectories of a step, one per row; the last step unless given.

        Columns: first text and reward, then question, uid, group, and per-token lists such as
        response, advantages and behavior_logprobs. Raises ConfigError if the step has none.
        """
        files = rollout_files(self.folder / "rollouts")
        if not files:
            raise Missing(f"{self.folder} has no rollouts yet; train a step first")
        wanted = max(files) if step is None else step
        if wanted not in files:
            raise UnknownName(
                f"{self.folder} has no rollouts of step {wanted}; "
                f"it has those of steps {min(files)} to {max(files)}",
                at="step",
            )
        import pyarrow.parquet as parquet

        _pandas()  # a clear error where it is missing
        table = parquet.read_table(files[wanted])
        first = [name for name in FIRST_COLUMNS if name in table.column_names]
        others = [name for name in table.column_names if name not in first]
        return table.select([*first, *others]).to_pandas()

    def checkpoint(self, step: int | str = "latest") -> Path:
        """Return the checkpoint of a step, of `latest` or of `best`.

        Its folder `policy` is the model.

        Raises ConfigError if there is no such checkpoint.
        """
        from postgrad.publish.export import find_folder

        return find_folder(str(self.folder), str(step))

    # ---- looking at it

    def plot(self, file: str | Path | None = None, smoothing: float = 0.6) -> Figure:
        """Draw the charts of the page; a notebook shows them. `file` also saves the picture."""
        from postgrad.view.picture import panels_figure, save_figure

        figure = panels_figure([self.folder], smoothing)
        if file is not None:
            save_figure(figure, Path(file))
        return figure

    def view(self, port: int | None = None) -> Page:
        """Serve the page of this run in the background and return it.

        A notebook shows it inline; elsewhere print its `url`. `stop()` ends it.
        """
        from postgrad.api.page import Page

        return Page(self.folder, port)

    # ---- using the trained model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        n: int = 1,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Responses of the newest checkpoint; arguments and result as of `postgrad.generate`.

        The model is loaded with the first call and again after a new checkpoint.
        """
        from postgrad.api.sampler import Sampler

        path = str(self.checkpoint() / "policy")
        if self._sampler is None or self._sampler.path != path:
            self._sampler = Sampler(path)
        return self._sampler.generate(
            prompts, n, temperature=temperature, max_tokens=max_tokens, seed=seed
        )

    def load(self, step: int | str = "latest") -> tuple[Any, Any]:
        """Return the transformers model and the tokenizer of a checkpoint."""
        from transformers import AutoConfig, AutoTokenizer

        from postgrad.model.load.formats import auto_class_of

        path = self.checkpoint(step) / "policy"
        auto_class = auto_class_of(AutoConfig.from_pretrained(path))
        return auto_class.from_pretrained(path), AutoTokenizer.from_pretrained(path)

    def save(self, folder: str | Path, step: int | str = "latest") -> Path:
        """Write the trained model as a Hugging Face folder, as `postgrad export` does.

        Raises ConfigError if the folder exists.
        """
        from postgrad.publish.export import ExportRequest, export

        request = ExportRequest(source=str(self.folder), out=Path(folder), step=str(step))
        return export(request, lambda note: None)

    def _lines(self) -> list[dict[str, float]]:
        from postgrad.training.log import read_metrics

        return read_metrics(self.folder)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise NotInstalled(
            "this needs the package pandas; pip install pandas", at="pandas"
        ) from error
    return pandas
