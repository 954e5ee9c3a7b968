"""Reads the command line with torch's own parser, up to the script's name and no further.

argparse's REMAINDER looks at what follows the script (a first ``--`` is dropped, ``--log x`` is
"ambiguous"), so the script is found here first, by walking the arguments with what the parser knows
of its options, and only what stands before it is parsed.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from flashrun.config import OPTIONS, nearest
from flashrun.errors import UsageError

_CONFIG = "--config"


def make_parser(environ: Mapping[str, str]) -> ArgumentParser:
    """torch's parser with a group of our own; errors become UsageError.

    Raises:
        UsageError: a PET_* default that the parser itself cannot take.
    """
    from torch.distributed.run import get_args_parser

    try:
        parser: ArgumentParser = get_args_parser()
    except ValueError as error:  # argparse_util.check_env: int(os.environ["PET_…"])
        names = sorted(name for name in environ if name.startswith("PET_"))
        raise UsageError(
            f"environment, one of {', '.join(names)}: {error}; switches take 0 or 1"
        ) from None
    parser.prog = "flashrun"
    parser.description = (
        "Runs a training script on every GPU of every node as torchrun does (the same flags and"
        " environment), faster and without leaving anything behind."
    )
    parser.epilog = (
        "flashrun exec -- PROGRAM … runs a program that calls torch.distributed.run itself;"
        " flashrun status and flashrun nodes [HOST:PORT] show a running job."
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    group = parser.add_argument_group("flashrun", "also FLASHRUN_<NAME>, or a key of --config")
    group.add_argument(_CONFIG, metavar="FILE", help="YAML file with any of these settings")
    for option in OPTIONS:
        names = sorted({option.flag, option.flag.replace("_", "-"), f"--{option.name}"})
        if option.is_switch:
            off = {f"--no-{option.key}", f"--no_{option.name}"}
            group.add_argument(
                *names, dest=option.name, action="store_const", const="1", help=option.help
            )
            group.add_argument(*sorted(off), dest=option.name, action="store_const", const="0")
        else:
            group.add_argument(*names, dest=option.name, metavar=option.metavar, help=option.help)

    def refuse(message: str) -> NoReturn:
        raise UsageError(message)

    parser.error = refuse  # type: ignore[method-assign]
    return parser


def _own_options() -> set[str]:
    return {option.name for option in OPTIONS} | {"config", "version", "help"}


def _resolve(name: str, actions: Mapping[str, Action]) -> str:
    """The full name of a long option that may be abbreviated.

    An abbreviation that torchrun understands means here what it means there: flashrun's own options
    are considered only if none of torch's fits.
    """
    if name in actions:
        return name
    own = _own_options()
    for of_torch in (True, False):
        hits = {
            known: action
            for known, action in actions.items()
            if known.startswith(name) and (action.dest not in own) == of_torch
        }
        if len({id(action) for action in hits.values()}) == 1:
            return min(hits)
        if hits:
            raise UsageError(f"{name} could be {', '.join(sorted(hits))}; write it out")
    long = [known for known in actions if known.startswith("--")]
    hint = nearest(name, long)
    raise UsageError(
        f"unknown option {name}; {hint if hint.endswith('?') else 'see flashrun --help'}"
    )


def split_at_script(parser: ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what is before the script, with option names written out; the script and what follows).

    Raises:
        UsageError: an option that is unknown, ambiguous or lacks its value.
    """
    actions: dict[str, Action] = parser._option_string_actions
    head: list[str] = []
    index = 0
    while index < len(argv):
        token = argv[index]
        index += 1
        if token == "--":
            return head, list(argv[index:])
        if not token.startswith("-") or token == "-":
            return head, list(argv[index - 1 :])
        name, equals, _ = token.partition("=")
        if token.startswith("--"):
            full = _resolve(name, actions)
            needs_value = actions[full].nargs != 0
            token = full + token[len(name) :]
        else:
            needs_value, equals = _short(token, actions)
        head.append(token)
        if needs_value and not equals:
            if index == len(argv):
                raise UsageError(f"{token} needs a value; give {token}=VALUE")
            # Joined, so that a value that begins with a dash is not taken for an option.
            if token.startswith("--"):
                head[-1] = f"{token}={argv[index]}"
            elif argv[index].startswith("-"):
                head[-1] = f"{token}{argv[index]}"
            else:
                head.append(argv[index])
            index += 1
    return head, []


def _short(token: str, actions: Mapping[str, Action]) -> tuple[bool, str]:
    """(whether the last option of ``-mr3`` takes a value, "" if that is still to come)."""
    for position in range(1, len(token)):
        action = actions.get(f"-{token[position]}")
        if action is None:
            raise UsageError(
                f"unknown option -{token[position]} in {token}; {nearest(token, list(actions))}"
            )
        if action.nargs != 0:
            return True, token[position + 1 :]
    return False, ""


class Origins:
    """Says where the value of an option came from, for error messages."""

    def __init__(
        self, parser: ArgumentParser, head: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self._flags = {a.dest: a.option_strings for a in parser._actions if a.option_strings}
        self._given = {token.partition("=")[0] for token in head}
        self._given |= {token[:2] for token in head if not token.startswith("--")}
        self._environ = environ

    def __call__(self, name: str) -> str:
        flags = self._flags.get(name, [f"--{name.replace('_', '-')}"])
        for flag in flags:
            if flag in self._given:
                return flag
        variable = f"PET_{name.upper()}"
        if variable in self._environ:
            return f"environment, {variable}"
        return next((flag for flag in flags if flag.startswith("--")), flags[0])


def parse_head(
    parser: ArgumentParser, head: Sequence[str], rest: Sequence[str], environ: Mapping[str, str]
) -> Namespace:
    """Parse what is before the script; ``rest`` is taken as it is.

    Raises:
        UsageError: a value that its option does not take, or no script.
    """
    script = rest[0] if rest else "script"  # --help and --version need none
    try:
        args: Namespace = parser.parse_args([*head, "--", script])
    except UsageError as error:
        raise UsageError(_with_place(str(error), parser, head, environ)) from None
    if not rest and not args.version:
        raise UsageError("no script given; usage: flashrun [options] SCRIPT [its arguments]")
    args.training_script = rest[0] if rest else ""
    args.training_script_args = list(rest[1:])
    return args


def _with_place(
    message: str, parser: ArgumentParser, head: Sequence[str], environ: Mapping[str, str]
) -> str:
    """argparse names the option; say so if the value came from the environment instead."""
    origins = Origins(parser, head, environ)
    for action in parser._actions:
        names = "/".join(action.option_strings)
        if names and message.startswith(f"argument {names}:"):
            text = message.split(": ", 1)[1]
            if text.startswith("invalid int value"):
                text += "; give a whole number"
            elif text.startswith("invalid float value"):
                text += "; give a number"
            return f"{origins(action.dest)}: {text}"
    return message


def settings_of(args: Namespace) -> dict[str, Any]:
    """flashrun's own flags as given: field name -> text, None if not given."""
    return {name: getattr(args, name) for name in ("config", *(o.name for o in OPTIONS))}
