"""Which scripts are worth the zygote's imports."""

from __future__ import annotations

import sys

import pytest

from flashrun.node.eligibility import may_import_torch
from tests import helpers

_BROUGHT = """
import importlib, sys
from flashrun.node import start, zygote
before = zygote.loaded_names()
for name in zygote.PRELOADED:
    importlib.import_module(name)
new = zygote.loaded_names() - before - zygote.PRELOADED_TOO
print(sorted(n for n in new if not n.startswith("_")))
"""


@pytest.mark.parametrize(
    ("source", "may"),
    [
        ("", False),
        ("import os, sys\nfrom concurrent.futures import Future\nprint('torch')\n", False),
        ("from __future__ import annotations\nimport multiprocessing as mp\n", False),
        ("import torch\n", True),
        ("def main():\n    from torch.nn import Linear\n", True),
        ("import trainer\n", True),
        ("from .trainer import fit\n", True),
        ("from . import os\n", True),
        ("import os.path, numpy.random\n", True),
        ("import importlib\n", True),
        ("import runpy\n", True),
        ("__import__('to' + 'rch')\n", True),
        ("exec(open('train.py').read())\n", True),
        ("import (\n", False),
        ("x = '\0'\n", False),
    ],
)
def test_may_import_torch(source: str, may: bool) -> None:
    assert may_import_torch(source) is may


def test_what_preloading_brings_is_known() -> None:
    """Else a module of that name beside the script would be taken for the one in memory."""
    finished = helpers.run([sys.executable, "-c", _BROUGHT])
    assert (finished.status, finished.stdout) == (0, "[]\n"), finished.describe()
