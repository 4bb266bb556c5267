"""The rows of the paged decode loop, and the prompts that they share. Needs no GPU."""

from dataclasses import dataclass, field

from postgrad.rollout.native.sequence import Sequence


@dataclass(eq=False)
class SharedPrompt:
    """A prompt, the pages of its tokens without the last, and the number of rows that use them."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    in_pages: bool = False  # its tokens are computed, or will be in the next prefill pass
    num_rows: int = 0

    @property
    def num_shared(self) -> int:
        """The number of tokens in the pages."""
        return len(self.tokens) - 1


@dataclass(eq=False, kw_only=True)
class PagedRow(Sequence):
    """One trajectory and the pages of its own tokens.

    `prompt` is in shared pages: that of the job, or that of the first turn, if the row continues
    an earlier one. Then the tokens since that prompt are in the row's own pages, and `num_kept` of
    them are computed already.
    """

    prompt: SharedPrompt
    pages: list[int] = field(default_factory=list)
    num_kept: int = 0
    num_checked: int = 0  # tokens in which stop strings were searched

    @property
    def num_earlier(self) -> int:
        """The number of its own tokens before the last token of the job's prompt."""
        return len(self.job.request.prompt) - len(self.prompt.tokens)

    @property
    def num_own(self) -> int:
        """The number of its own tokens before the token that it enters with."""
        return self.num_earlier + len(self.tokens)
