"""The settings: one table for flags, environment and file; precedence; refusals that help."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashrun import messages
from flashrun.config import INTERNAL_VARIABLES, OPTIONS, PREFIX, Settings, load_settings
from flashrun.errors import UsageError
from flashrun.run import parse


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    assert load_settings({}, {}) == Settings()


@pytest.mark.parametrize("name", [option.name for option in OPTIONS])
def test_flag_beats_environment_beats_file(tmp_path: Path, name: str) -> None:
    three: dict[str, tuple[str, str, str]] = {
        "recovery": ("off", "restart", "in-place"),
        "spares": ("3", "2", "1"),
        "spare_timeout": ("0", "2.5", "7"),
        "grow": ("restart", "spare", "restart"),
        "max_retries": ("7", "6", "5"),
        "cordon_after": ("7", "6", "0"),
        "cordon_window": ("60", "90", "120"),
        "heartbeat_interval": ("0.5", "0.25", "0.125"),
        "detection_timeout": ("30", "20", "10"),
        "log_level": ("debug", "error", "warning"),
        "zygote": ("1", "0", "1"),
        "recovery_timeout": ("60", "90", "120"),
        "retain": ("off", "1000", "on"),
        "events": ("/tmp/a", "/tmp/b", "/tmp/c"),
    }
    flag, variable, line = three[name]
    file = write(tmp_path / "c.yaml", f"{name.replace('_', '-')}: {line}\n")
    read = next(option.read for option in OPTIONS if option.name == name)
    environ = {f"FLASHRUN_{name.upper()}": variable}

    def value(flags: dict[str, str], environ: dict[str, str]) -> object:
        return getattr(load_settings(flags, environ), name)

    assert value({"config": file}, {}) == read(line)
    assert value({}, {"FLASHRUN_CONFIG": file}) == read(line)
    assert value({"config": file}, environ) == read(variable)
    assert value({"config": file, name: flag}, environ) == read(flag)


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ({"recovery": "fast"}, {}, ["--recovery", "'fast'", "in-place, restart, off"]),
        ({"spares": "-1"}, {}, ["--spares", "whole number"]),
        ({"grow": "more"}, {}, ["--grow", "'more'", "spare, restart"]),
        ({"heartbeat_interval": "nan"}, {}, ["--heartbeat-interval", "seconds"]),
        ({}, {"FLASHRUN_SPARES": "many"}, ["environment, FLASHRUN_SPARES", "'many'"]),
        ({}, {"FLASHRUN_SPARE": "1"}, ["FLASHRUN_SPARE;", "did you mean 'FLASHRUN_SPARES'?"]),
        ({}, {"FLASHRUN_ZYGOTE": "perhaps"}, ["FLASHRUN_ZYGOTE", "true"]),
        ({"config": ""}, {}, ["--config", "no file"]),
        ({"config": "/no/such.yaml"}, {}, ["--config", "/no/such.yaml"]),
        ({}, {"FLASHRUN_CONFIG": "/no/such.yaml"}, ["FLASHRUN_CONFIG", "/no/such.yaml"]),
        ({"detection_timeout": "1"}, {}, ["detection timeout (1 s)", "heartbeat interval (5 s)"]),
    ],
)
def test_refusals(flags: dict[str, str], environ: dict[str, str], said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(flags, environ)
    for words in said:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spare: 1\n", ["unknown setting 'spare'", "did you mean 'spares'?"]),
        ("nproc_per_node: 2\n", ["'nproc_per_node'", "--nproc-per-node or PET_NPROC_PER_NODE"]),
        ("spares: lots\n", ["'spares'", "'lots'", "whole number"]),
        ("spares: true\n", ["'spares'", "whole number"]),
        ("- spares\n", ["holds a list", "spares: 1"]),
        ("spares: [\n", ["is not YAML"]),
        ("log_level: loud\n", ["'log_level'", "debug, info, warning, error"]),
    ],
)
def test_refused_files(tmp_path: Path, text: str, said: list[str]) -> None:
    file = write(tmp_path / "c.yaml", text)
    with pytest.raises(UsageError) as caught:
        load_settings({"config": file}, {})
    assert file in str(caught.value)
    for words in said:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_underscores_in_the_file_and_an_empty_file(tmp_path: Path) -> None:
    both = write(tmp_path / "c.yaml", "max_retries: 9\nlog-level: error\n")
    assert load_settings({"config": both}, {}) == Settings(max_retries=9, log_level="error")
    assert load_settings({"config": write(tmp_path / "e.yaml", "")}, {}) == Settings()


def test_yaml_takes_an_unquoted_off_for_false(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "recovery: off\nretain: off\nzygote: off\n")
    assert load_settings({"config": file}, {}) == Settings(
        recovery="off", retain="off", zygote=False
    )
    bad = write(tmp_path / "b.yaml", "log-level: off\n")
    with pytest.raises(UsageError, match="'log-level': False is not valid"):
        load_settings({"config": bad}, {})


def test_every_variable_of_our_processes_is_known() -> None:
    """A launcher inside a worker inherits them and must not refuse them."""
    values = {value for name, value in vars(messages).items() if name.isupper()}
    names = {value for value in values if isinstance(value, str) and value.startswith(PREFIX)}
    assert names
    assert names <= INTERNAL_VARIABLES | {option.variable for option in OPTIONS}


def test_internal_variables_are_not_settings() -> None:
    environ = {"FLASHRUN_RUN_DIR": "/tmp/x", "FLASHRUN_JOB_TAG": "x", "OTHER": "1"}
    assert load_settings({}, environ) == Settings()


def test_the_command_line_wins_over_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole command line, with its file."""
    script = write(tmp_path / "train.py", "")
    file = write(tmp_path / "c.yaml", "spares: 1\nmax-retries: 5\nlog-level: error\n")
    environ = {**os.environ, "FLASHRUN_SPARES": "2", "FLASHRUN_MAX_RETRIES": "6"}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch sets it for the workers
    made = parse([f"--config={file}", "--spares=3", "--log-dir=/dev/null", script], environ)
    assert made is not None
    settings = made.settings
    assert (settings.spares, settings.max_retries, settings.log_level) == (3, 6, "error")
