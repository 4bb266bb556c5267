"""The state of the training that reward functions of TRL read as `trainer_state`."""

from typing import NoReturn


class TrainerState:
    """How far the training is, under the names of transformers' TrainerState.

    Any other attribute raises AttributeError.

    Args:
        global_step: number of finished training steps: 0 while the first step is scored, N in the
            validation after step N.
        max_steps: number of steps of the run; None if there is no such number.
    """

    def __init__(self, global_step: int, max_steps: int | None = None) -> None:
        self.global_step = global_step
        if max_steps is not None:
            self.max_steps = max_steps

    def __repr__(self) -> str:
        return f"TrainerState({vars(self)})"

    def __getattr__(self, name: str) -> NoReturn:
        known = " and ".join(vars(self))
        raise AttributeError(f"trainer_state.{name} is not available; trainer_state has {known}")
