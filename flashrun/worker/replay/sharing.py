"""Whether two nodes see the same file under a path, and which of several nodes changed it first.

Told by what both file systems say of it now, and said when a worker was the first to change it
(:class:`Stamp`), never by clocks of two nodes. Where it can't be told it is not guessed.

Two nodes see the same file if it, or a folder on the way to it, has the same inode, size and times
for both, and these times came about in this run, on the other node: no two file systems get such a
time by chance (a node that is a copy of another one's disk has the times of before). On one kernel
device and inode tell it. Disks of two kernels are never the same.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashrun.worker.replay.registry import Line, Stamp

# Kinds of file systems that only one kernel sees. Not those that a server may be behind.
_LOCAL = frozenset([
    "bcachefs", "btrfs", "devtmpfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hugetlbfs",
    "iso9660", "jfs", "ntfs3", "overlay", "proc", "ramfs", "reiserfs", "squashfs", "sysfs", "tmpfs",
    "vfat", "xfs", "zfs",
])  # fmt: skip
# Whose times come from one clock, the server's. In others each node may write its own.
_ONE_CLOCK = frozenset(["nfs", "nfs4"])
_CLOCKS_APART = 2_000_000_000  # ns
_COARSE = 1_000_000  # ns; a time without anything below proves nothing


@dataclass(frozen=True)
class Spot:
    """A file or folder as one node sees it now.

    Attributes:
        kind: of the file system.
        mount: number of the mount.
    """

    path: str
    kind: str
    mount: int
    device: int
    stamp: Stamp


@dataclass(frozen=True)
class Facts:
    """What one node says of a path.

    Attributes:
        kernel: identity of the running one; "": not known.
        spots: the path and the folders above it, as far as they exist, the deepest first.
    """

    kernel: str
    spots: tuple[Spot, ...]

    def to_json(self) -> list[Any]:
        spots = [[s.path, s.kind, s.mount, s.device, s.stamp.to_json()] for s in self.spots]
        return [self.kernel, spots]

    @classmethod
    def of(cls, said: list[Any]) -> Facts:
        """From JSON types."""
        kernel, spots = said
        return cls(kernel, tuple(Spot(p, k, m, d, Stamp(*stamp)) for p, k, m, d, stamp in spots))

    @property
    def local(self) -> bool:
        return bool(self.spots) and self.spots[0].kind in _LOCAL

    def is_mount(self, path: str) -> bool:
        """Whether a file system begins there."""
        at, *above = self.spots
        return at.path == path and bool(above) and above[0].mount != at.mount


# --- decisions


def same_file(
    path: str, mine: Facts, theirs: Facts, line_of: Callable[[str], Line | None]
) -> bool | None:
    """Whether `path` is the same file for both; None: it can't be told.

    Args:
        line_of: what that node has registered of a path.
    """
    here = {spot.path: spot for spot in mine.spots}
    one_kernel = bool(mine.kernel) and mine.kernel == theirs.kernel
    both_local = mine.local and theirs.local
    if both_local and not one_kernel:
        return False if mine.kernel and theirs.kernel else None
    for spot in theirs.spots:
        own = here.get(spot.path)
        if own is None:
            continue
        if _mounted_below(own, mine) or _mounted_below(spot, theirs):
            return False if both_local else None
        is_one = (own.device, own.stamp.inode) == (spot.device, spot.stamp.inode)
        if one_kernel and (is_one or both_local):
            return is_one
        if own.stamp == spot.stamp and _is_of_this_run(path, spot, line_of):
            return True
    return None


def _mounted_below(spot: Spot, facts: Facts) -> bool:
    """Whether another file system begins on the way from `spot` to the path."""
    return facts.spots[0].mount != spot.mount


def _is_of_this_run(path: str, spot: Spot, line_of: Callable[[str], Line | None]) -> bool:
    """Whether the time of its last change came about after a worker there had registered one."""
    if spot.stamp.changed % _COARSE == 0:
        return False
    if spot.path == path:
        line = line_of(path)
        before = None if line is None else line.was
    else:
        below = path[len(spot.path.rstrip("/")) + 1 :].partition("/")[0]
        line = line_of(os.path.join(spot.path, below))
        before = None if line is None else line.folder
    return line is not None and (before is None or before.changed != spot.stamp.changed)


def clocks_apart(mine: Facts, theirs: Facts) -> int:
    """By how much (ns) times may differ that two nodes have given to one file."""
    if mine.kernel and mine.kernel == theirs.kernel:
        return 0
    kinds = {facts.spots[0].kind for facts in (mine, theirs)}
    return 0 if kinds <= _ONE_CLOCK else _CLOCKS_APART


def first_of(lines: Sequence[Line], apart: int) -> Line | None:
    """Which of several nodes' lines about one file is the first; None: it can't be told.

    Who found nothing came before all that was there later; what is there has changed after the
    folder was seen without it. If instead what was there was there first, it has been removed in
    between, and the folder has changed after it.

    Args:
        apart: see `clocks_apart`.
    """
    nothing = [line for line in lines if line.kept is None]
    there = [line for line in lines if line.kept is not None]
    if len(lines) == 1 or not there:
        return lines[0]
    known = [(line.was, line) for line in there if line.was is not None]
    if len(known) < len(there):
        return None
    known.sort(key=lambda item: (item[0].changed, item[1].content is None))
    oldest, line = known[0]
    if any(was != oldest and was.changed - oldest.changed <= apart for was, _ in known):
        return None
    for none in nothing:
        if none.folder is not None and oldest.changed - none.folder.changed > apart:
            return none
    removed = [n.folder is not None and n.folder.changed - oldest.changed > apart for n in nothing]
    return line if all(removed) else None


# --- what this node sees


def kernel() -> str:
    """Identity of the running kernel; "": not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def look(path: str) -> Facts:
    """What this node sees at `path`, which leads through no links."""
    mounts = _mounts()
    spots = []
    at = ""
    # From the top down: after a folder was opened, NFS asks for names in it that were missing.
    for name in path.split("/")[bool(path == "/") :]:
        at = os.path.join(at, name) if at else "/"
        status = _status(at)
        if status is not None:
            mount, kind = _mount_of(at, mounts)
            spots.append(Spot(at, kind, mount, status.st_dev, Stamp.of(status)))
    return Facts(kernel(), tuple(reversed(spots)))


def _status(path: str) -> os.stat_result | None:
    """Opened where it can be: NFS asks the server then, also whether a name in a folder is new."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return status
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)
    return status


def _mounts() -> list[tuple[str, int, str]]:
    """Mount point, number and kind of each mount, in the order in which they were made."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for row in file:
            fields = row.split()
            point = fields[4].encode("utf-8", "surrogateescape")
            name = os.fsdecode(point.decode("unicode_escape").encode("latin-1"))
            found.append((name, int(fields[0]), fields[fields.index("-") + 1]))
    return found


def _mount_of(path: str, mounts: Sequence[tuple[str, int, str]]) -> tuple[int, str]:
    best, number, kind = -1, 0, ""
    for point, its_number, its_kind in mounts:
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and len(point) >= best:  # a later one covers an earlier one
            best, number, kind = len(point), its_number, its_kind
    return number, kind
