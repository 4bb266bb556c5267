"""`postgrad plot RUN [RUN ...] [FILE]`: the page's charts as a picture."""

from pathlib import Path

from postgrad.errors import ConfigError, did_you_mean

HELP = """usage: postgrad plot RUN [RUN ...] [FILE] [--poster] [--title WORDS] [--smoothing 0.6]

Draws the charts that postgrad view shows of a run, of several runs over each other, into one picture. FILE is curves.png in the
(first) run folder unless given; its ending chooses the format: .png, .svg or .pdf.

  --poster          one picture for people instead: the reward, what was held out, answers of the first and the last step
  --title WORDS     what stands over the poster; the run's name, method and data unless given
  --smoothing 0.6   how much the lines are smoothed, from 0 to below 1"""

ENDINGS = (".png", ".svg", ".pdf")


def run(words: list[str]) -> int:
    if not words or "-h" in words or "--help" in words:
        print(HELP)
        return 0
    paths, poster, smoothing, title = read(words)
    file = paths.pop() if paths and paths[-1].suffix in ENDINGS and not paths[-1].is_dir() else None
    if not paths:
        raise ConfigError("which run? postgrad plot RUN [RUN ...] [FILE]")
    for path in paths:
        if not path.is_dir():
            wrong = path.suffix and path == paths[-1] and len(paths) > 1
            raise ConfigError(
                f"{path}: pictures are written as .png, .svg or .pdf"
                if wrong
                else f"no run folder {path}"
            )
    if poster and len(paths) > 1:
        raise ConfigError("--poster shows one run; leave the others out, or --poster")
    from postgrad.view.picture import draw_panels, draw_poster

    file = file or paths[0] / "curves.png"
    print(draw_poster(paths[0], file, title) if poster else draw_panels(paths, file, smoothing))
    return 0


def read(words: list[str]) -> tuple[list[Path], bool, float, str]:
    paths: list[Path] = []
    poster, smoothing, title, waiting = False, 0.6, "", list(words)
    while waiting:
        word = waiting.pop(0)
        key, _, value = word.partition("=")
        if key == "--poster":
            poster = True
        elif key == "--title":
            title = value or (waiting.pop(0) if waiting else "")
        elif key == "--smoothing":
            value = value or (waiting.pop(0) if waiting else "")
            try:
                smoothing = float(value)
            except ValueError:
                smoothing = -1.0
            if not 0 <= smoothing < 1:
                raise ConfigError(
                    f"--smoothing {value} is out of range; it must be at least 0 and below 1"
                )
        elif word.startswith("-"):
            raise ConfigError(
                f"plot does not know {key}; {did_you_mean(key, ('--poster', '--smoothing', '--title'))}"
            )
        else:
            paths.append(Path(word))
    if title and not poster:
        raise ConfigError("--title goes with --poster; the other charts have their own titles")
    return paths, poster, smoothing, title
