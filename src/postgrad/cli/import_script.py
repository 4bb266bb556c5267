"""`postgrad import SCRIPT`"""

from pathlib import Path

from postgrad.cli.arguments import Parser
from postgrad.errors import ConfigError

DESCRIPTION = """\
Prints the postgrad train command that equals a launch script of verl, LUFFY, BuPO or Classmate-CoT,
or the config of a TRL script, and lists the settings without an equivalent. Nothing is executed."""


def make_parser() -> Parser:
    parser = Parser("import SCRIPT", DESCRIPTION)
    parser.add_argument(
        "script", metavar="SCRIPT", help="shell script, or Python file with a config"
    )
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv, help_if_empty=True)
    from postgrad.config.compose import compose
    from postgrad.config.import_script import read_settings, translate
    from postgrad.methods import find_method

    path = Path(arguments.script).expanduser()
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a text file; give a shell script or a .py file"
        ) from error
    result = translate(*read_settings(text))
    print(result.command)
    for line in result.missing:
        print(f"# no equivalent: {line}")
    required = {"model.path": "tiny", "data.train": "arithmetic:1"}
    known = {key: value for key, value in result.overrides.items() if "$" not in value}
    overrides = {**required, **known}
    try:
        config = compose(
            result.recipe,
            [f"{key}={value}" for key, value in overrides.items()],
            lambda name: find_method(name).Settings,
        )
        find_method(config.method.name)(config).check()
    except ConfigError as error:
        print(f"# the command needs a change: {error}")
    return 0
