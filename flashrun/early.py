"""What is plainly wrong with a command line, found before torch is loaded, which takes seconds.

Only where no parser is needed to see it: all of this is checked again, with everything else, once
torch's parser is there (:mod:`flashrun.checks`).
"""

from __future__ import annotations

import difflib
import os
import zipfile
from collections.abc import Mapping, Sequence

from flashrun.config import COMMANDS, OPTIONS, load_settings
from flashrun.errors import UsageError

_GIVE_FILE = "give the path of a Python file"
_MAINS = ("__main__.py", "__main__.pyc")  # what python runs of a folder or a zip file

_OTHER_TARGETS = ("PET_MODULE", "PET_NO_PYTHON", "PET_RUN_PATH")  # what is run is no script then
_OWN = {"--config": "config"} | {
    flag: option.name
    for option in OPTIONS
    if not option.is_switch
    for flag in (option.flag, f"--{option.name}")
}


def refuse(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """
    Raises:
        UsageError: what is wrong, where it was given, what would be right.
    """
    flags: dict[str, str] = {}
    for token in argv:
        if not token.startswith("-"):
            break
        name, equals, value = token.partition("=")
        # A switch or a value of its own may follow; and an abbreviation may be one of ours.
        if not equals or not name.startswith("--"):
            return
        if name in _OWN:
            flags[_OWN[name]] = value
        elif any(known.startswith(name) for known in _OWN):
            return
    else:
        return
    config = flags.get("config", environ.get("FLASHRUN_CONFIG", ""))
    if os.path.exists(config) and not os.path.isfile(config):
        return  # a pipe can be read once
    load_settings(flags, environ)
    if not any(variable in environ for variable in _OTHER_TARGETS):
        check_script(token)


def check_script(target: str) -> None:
    """Raises UsageError."""
    near = difflib.get_close_matches(target, COMMANDS, n=1, cutoff=0.75)
    meant = f"did you mean 'flashrun {near[0]}'?" if near else _GIVE_FILE
    check_file(target, "the script", meant)


def check_file(path: str, what: str, meant: str = _GIVE_FILE) -> None:
    """Raises UsageError."""
    if path == "-":
        return
    if not os.path.lexists(path):
        raise UsageError(f"{what} {path!r} does not exist (looked from {os.getcwd()}); {meant}")
    if not os.path.exists(path):
        raise UsageError(
            f"{what} {path!r} links to {os.readlink(path)!r}, which does not exist; {_GIVE_FILE}"
        )
    if not os.access(path, os.R_OK):
        raise UsageError(f"{what} {path!r} cannot be read; look at its permissions")
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in _MAINS):
            raise UsageError(f"{what} {path!r} is a folder without __main__.py; give a file in it")
    elif os.path.isfile(path) and zipfile.is_zipfile(path):  # a pipe must not be read here
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except zipfile.BadZipFile:
            return  # looks like one at its end only; python takes it for a script
        if not any(name in names for name in _MAINS):
            raise UsageError(f"{what} {path!r} is a zip file without __main__.py; give one with it")
