"""Whether two nodes see the same file, and who changed it first: by tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flashrun.worker.replay import sharing
from flashrun.worker.replay.registry import Line, Registry, Stamp
from flashrun.worker.replay.sharing import Facts, Spot, first_of, same_file

OLD, NEW = Stamp(7, 100, 1_000_000_123, 1_000_000_123), Stamp(7, 120, 5_000_000_456, 5_000_000_456)
ELSE = Stamp(8, 120, 5_000_000_789, 5_000_000_789)
WHOLE_SECONDS = Stamp(7, 120, 5_000_000_000, 5_000_000_000)
ROOT = Stamp(2, 4096, 11, 500_000_011)
FOLDER = Stamp(3, 4096, 700_000_077, 700_000_077)
FOLDER_NEW = Stamp(3, 4096, 5_100_000_077, 5_100_000_077)


def facts(
    kernel: str, kind: str, file: Stamp | None, folder: Stamp | None = FOLDER, device: int = 40,
    mounted: str = "/nas",
) -> Facts:  # fmt: skip
    """Of /nas/run/x. On "/" there is a disk that every node has alike."""
    spots = [("/nas/run/x", file), ("/nas/run", folder), ("/nas", FOLDER)]
    known = []
    for path, stamp in spots:
        if stamp is not None:
            inside = path == mounted or path.startswith(mounted + "/")
            kind_of, mount, its_device = (kind, 9, device) if inside else ("ext4", 1, 1)
            known.append(Spot(path, kind_of, mount, its_device, stamp))
    return Facts(kernel, (*known, Spot("/", "ext4", 1, 1, ROOT)))


def line(path: str, was: Stamp | None, folder: Stamp | None = FOLDER, kept: str = "/k") -> Line:
    return Line(path, None if was is None else kept, was, folder)


CREATED = line("/nas/run/x", None)
OVERWRITTEN = line("/nas/run/x", OLD)

SAME: list[Any] = [
    # what, line there, here, there, is it the same?
    ("saved on NFS", CREATED, facts("b", "nfs4", NEW), facts("a", "nfs4", NEW), True),
    ("overwritten on NFS", OVERWRITTEN, facts("b", "nfs4", NEW), facts("a", "nfs4", NEW), True),
    ("a server is a node", CREATED, facts("b", "nfs4", NEW), facts("a", "xfs", NEW), True),
    ("deleted on NFS", OVERWRITTEN, facts("b", "nfs4", None, FOLDER_NEW),
     facts("a", "nfs4", None, FOLDER_NEW), True),
    ("the folder proves it", CREATED, facts("b", "nfs4", OLD, FOLDER_NEW),
     facts("a", "nfs4", NEW, FOLDER_NEW), True),
    ("another file", CREATED, facts("b", "nfs4", ELSE), facts("a", "nfs4", NEW), None),
    ("disks of two machines", CREATED, facts("b", "ext4", NEW), facts("a", "ext4", NEW), False),
    ("a copied disk", OVERWRITTEN, facts("b", "xfs", OLD), facts("a", "xfs", OLD), False),
    ("not yet changed", OVERWRITTEN, facts("b", "nfs4", OLD), facts("a", "nfs4", OLD), None),
    ("times of whole seconds", CREATED, facts("b", "nfs", WHOLE_SECONDS),
     facts("a", "nfs", WHOLE_SECONDS), None),
    ("stale here", OVERWRITTEN, facts("b", "nfs", OLD), facts("a", "nfs", None, FOLDER_NEW), None),
    ("one kernel, one disk", OVERWRITTEN, facts("a", "tmpfs", OLD), facts("a", "tmpfs", OLD), True),
    ("one kernel, two disks", CREATED, facts("a", "tmpfs", NEW),
     facts("a", "tmpfs", NEW, device=41), False),
    ("one kernel, one NFS", CREATED, facts("a", "nfs", OLD), facts("a", "nfs", NEW), True),
    ("one kernel, NFS mounted twice", CREATED, facts("a", "nfs", NEW),
     facts("a", "nfs", NEW, device=41), True),
    ("mounted only there", CREATED, facts("b", "nfs", None, None, mounted="/nas/run"),
     facts("a", "nfs", NEW, mounted="/nas/run"), None),
    ("one kernel, mounted only there", CREATED, facts("a", "tmpfs", None, None, mounted="/nas/run"),
     facts("a", "tmpfs", NEW, mounted="/nas/run"), False),
    ("no kernel known", CREATED, facts("", "ext4", NEW), facts("", "ext4", NEW), None),
    ("who knows what that is", CREATED, facts("b", "fuse.x", ELSE), facts("a", "fuse.x", NEW),
     None),
]  # fmt: skip


@pytest.mark.parametrize(("told", "mine", "theirs", "wanted"), [case[1:] for case in SAME],
                         ids=[case[0].replace(" ", "-") for case in SAME])  # fmt: skip
def test_the_same_file(told: Line, mine: Facts, theirs: Facts, wanted: bool | None) -> None:
    assert same_file("/nas/run/x", mine, theirs, {told.path: told}.get) is wanted
    assert Facts.of(mine.to_json()) == mine


def at(changed: int, inode: int = 7) -> Stamp:
    return Stamp(inode, 100, changed, changed)


def none(folder_changed: int | None) -> Line:
    return line("/x", None, None if folder_changed is None else at(folder_changed, 3))


SECOND = 1_000_000_000
FIRST: list[Any] = [
    # what, lines, how far clocks may be apart, which is first
    ("one", [line("/x", at(5))], 0, 0),
    ("nothing twice", [none(5), none(9)], 0, 0),
    ("made there, then changed here", [line("/x", at(9)), none(5)], 0, 1),
    ("removed here, then made there", [line("/x", at(5)), none(9)], 0, 0),
    ("in one moment", [line("/x", at(5)), none(5)], 0, None),
    ("no folder known", [line("/x", at(5)), none(None)], 0, None),
    ("changed there, then here", [line("/x", at(9)), line("/x", at(5))], 0, 1),
    ("both saw the same", [line("/x", at(5)), line("/x", at(5))], 0, 0),
    ("the same, but only one has it", [line("/x", at(5), kept="left:9"), line("/x", at(5))], 0, 1),
    ("in one moment, two", [line("/x", at(5)), line("/x", at(5, 8))], 0, None),
    ("clocks of two machines", [line("/x", at(9)), none(5)], 2 * SECOND, None),
    ("farther than these", [line("/x", at(9 * SECOND)), none(5 * SECOND)], 2 * SECOND, 1),
    ("nothing known of it", [Line("/x", "/k"), none(5)], 0, None),
    ("three", [line("/x", at(9)), line("/x", at(7)), none(5)], 0, 2),
    ("three, made last", [line("/x", at(9)), line("/x", at(7)), none(8)], 0, 1),
]


@pytest.mark.parametrize(("lines", "apart", "wanted"), [case[1:] for case in FIRST],
                         ids=[case[0].replace(" ", "-") for case in FIRST])  # fmt: skip
def test_the_first(lines: list[Line], apart: int, wanted: int | None) -> None:
    assert first_of(lines, apart) is (None if wanted is None else lines[wanted])


def test_real_files(tmp_path: Path) -> None:
    """What a registry says and what `look` finds fit together, also as two machines see it."""
    root = tmp_path / "view"
    (root / "kept").mkdir(parents=True)
    registry = Registry(root)
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    Path(old).write_text("as it was")
    for path in (old, new):
        with registry.locked() as add:
            add(registry.keep(path, 5, in_place=True))
    Path(old).write_text("changed")
    Path(new).write_text("made")
    again = Registry(root)
    again.refresh()
    assert again.lines == registry.lines
    told = again.lines
    assert told[new].kept is None and Path(str(told[old].kept)).read_text() == "as it was"
    for path in (old, new):
        seen = sharing.look(path)
        assert [spot.path for spot in seen.spots][:2] == [path, str(tmp_path)]
        assert seen.spots[-1].path == "/"
        assert same_file(path, seen, seen, told.get) is True
        remote = [Facts(kernel, tuple(Spot(s.path, "nfs4", s.mount, s.device, s.stamp)
                                      for s in seen.spots)) for kernel in ("a", "b")]  # fmt: skip
        assert same_file(path, *remote, told.get) is True
    gone = str(tmp_path / "gone")
    assert sharing.look(gone).spots[0].path == str(tmp_path)
    os.unlink(new)
    assert sharing.look(new).spots[0].path == str(tmp_path)


def test_folders_that_go(tmp_path: Path) -> None:
    root = tmp_path / "view"
    (root / "kept").mkdir(parents=True)
    registry = Registry(root)
    folder = tmp_path / "folder"
    folder.mkdir()
    for in_place, moves, kept in ((True, False, str(folder)), (False, False, "folder:"),
                                  (True, True, "moved:")):  # fmt: skip
        assert registry.keep(str(folder), 5, in_place, moves).kept == kept
