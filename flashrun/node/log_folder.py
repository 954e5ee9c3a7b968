"""The log folder that torch's DefaultLogsSpecs makes in the temporary folder when none is given."""

from __future__ import annotations

import os
import shutil
import tempfile

from torch.distributed.launcher.api import LaunchConfig


def is_temporary(root: str) -> bool:
    """Whether DefaultLogsSpecs has made this folder because none was given."""
    if not os.path.basename(root).startswith("torchelastic_"):
        return False
    try:
        return os.path.dirname(root) == tempfile.gettempdir()
    except OSError:
        return False  # there is none, so the folder was given


def clean_up_logs(launch: LaunchConfig, succeeded: bool) -> None:
    """Remove the temporary log folder that torch's DefaultLogsSpecs makes when none is given.

    After a failure it stays if there is anything in it to read.
    """
    root = temporary_logs(launch)
    if not root:
        return
    if succeeded:
        shutil.rmtree(root, ignore_errors=True)
    else:
        remove_if_empty(root)


def temporary_logs(launch: LaunchConfig) -> str:
    """That folder; "" if one was given."""
    root = str(getattr(launch.logs_specs, "root_log_dir", ""))
    return root if is_temporary(root) else ""


def remove_if_empty(root: str) -> None:
    """Remove a log folder in which there is nothing to read."""
    try:
        full = any(
            os.path.getsize(os.path.join(folder, name)) > 0
            for folder, _, names in os.walk(root)
            for name in names
        )
    except FileNotFoundError:
        return  # somebody else is removing it
    if not full:
        shutil.rmtree(root, ignore_errors=True)
