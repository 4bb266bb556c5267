"""`postgrad plot RUN [FILE]`: the run's curves as a picture."""

from pathlib import Path

from postgrad.errors import ConfigError

HELP = """usage: postgrad plot RUN [FILE]

Draws the curves of a run folder and answers from its first and last step. FILE is curves.png in the run folder unless given;
its ending chooses the format (png, svg, pdf)."""


def run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    folder = Path(words[0])
    if not folder.is_dir():
        raise ConfigError(f"no run folder {folder}")
    from postgrad.training.picture import draw_run

    file = Path(words[1]) if len(words) > 1 else folder / "curves.png"
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{file}: pictures are written as .png, .svg or .pdf")
    print(draw_run(folder, file))
    return 0
