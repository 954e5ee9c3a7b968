"""What the control plane costs while nothing happens: bytes and requests per node and second.

    python benchmarks/control_traffic.py                  # 8, 128 and 1,280 nodes; 4 minutes

Real coordinators (`flashrun.control.coordinator`) and, where that many threads can be had, real
recovery posts and leads (`flashrun.control.recovery_post`), with the default timing, as threads of
a few processes, at one real TCPStore on loopback. More than 256 nodes don't join, since all their
processors would be this one's: their job is there, and their agents are new. What each of their
connections has carried is read from the kernel (TCP_INFO) before and after a quiet time: payload
bytes of both directions, and the packets with data that the nodes have sent, which are their
requests. None of this depends on how fast the machine is; the processor time of the store does, and
is given as well.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bars import facts

HERE = Path(__file__).parent
SPAWN: Any = multiprocessing.get_context("spawn")
PROCESSES = 4
SLOTS = 8
# struct tcp_info (linux/tcp.h)
BYTES_ACKED, BYTES_RECEIVED, DATA_SEGS_OUT = 120, 128, 156


def prepare() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(256 << 10)
    from flashrun.rendezvous.server import look_up_no_names

    look_up_no_names()


def serve(told: Connection) -> None:
    prepare()
    from flashrun.rendezvous.server import open_listener
    from flashrun.rendezvous.server import serve as serve_store

    listener = open_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = serve_store(listener)
    told.send(port)
    while told.recv() == "time":
        used = resource.getrusage(resource.RUSAGE_SELF)
        told.send(used.ru_utime + used.ru_stime)
    del server


def carried(port: int) -> tuple[int, int, int]:
    """(bytes sent, bytes received, packets with data sent) of this process's links to a port."""
    sent = received = packets = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            link = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with link:
            try:
                if link.family == socket.AF_UNIX or link.getpeername()[1] != port:
                    continue
            except OSError:
                continue
            info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        sent += struct.unpack_from("<Q", info, BYTES_ACKED)[0]
        received += struct.unpack_from("<Q", info, BYTES_RECEIVED)[0]
        packets += struct.unpack_from("<I", info, DATA_SEGS_OUT)[0]
    return sent, received, packets


def begin_running(total: int, port: int) -> None:
    """Leave a job of so many nodes in the store as it is while it runs."""
    from flashrun.control.plan_book import PREFIX, PlanBook
    from flashrun.control.records import Member, Plan, job_to_json, member_to_json
    from flashrun.rendezvous.table import RankTable, assign_ranks
    from flashrun.rendezvous.tcp_kv import connect

    kv = connect("127.0.0.1", port, 30.0)
    members = [
        Member(f"n{i}", i + 1, SLOTS, "r", "127.0.0.1", host=i == 0, state="running", round=0)
        for i in range(total)
    ]
    kv.put(f"{PREFIX}job", job_to_json(job_of(total)))
    kv.put(f"{PREFIX}leader", json.dumps({"order": 1, "term": 1, "by": "x"}).encode())
    for member in members:
        kv.increment(f"{PREFIX}count")
        kv.put(f"{PREFIX}node/{member.order}", member_to_json(member))
        kv.increment(f"{PREFIX}beat/{member.order}")
    ranks = assign_ranks([m.seat for m in members])
    table = RankTable(0, 0, 0, "traffic", total * SLOTS, "127.0.0.1", port, True, ranks, "token")
    book = PlanBook(kv, PREFIX)
    book.read()
    book.write(Plan(serial=1, phase="running", table=table), "x")


def job_of(total: int) -> Any:
    from flashrun.control.records import Job

    return Job("traffic", "flash", "elastic", total, total, 0, "in-place", "0", "0")


def nodes(
    number: int, total: int, port: int, recovery: bool, told: Connection, running: bool = False
) -> None:
    """Plays the nodes number, number + PROCESSES, …

    Args:
        running: they are those that the store knows, with new agents.
    """
    prepare()
    from flashrun.control.coordinator import Coordinator
    from flashrun.control.events import Connected, Membership, Node, Start
    from flashrun.control.recovery import Limits
    from flashrun.control.recovery_lead import Place
    from flashrun.control.recovery_post import RecoveryPost
    from flashrun.control.recovery_store import control_store
    from flashrun.rendezvous.endpoint import parse_endpoint

    job = job_of(total)
    begin = time.monotonic()
    coordinators = {}
    for node in range(number, total, PROCESSES):
        membership = Membership(job, parse_endpoint(f"127.0.0.1:{port}", port), is_host=node == 0)
        coordinator = Coordinator(
            membership, Node(f"n{node}", SLOTS, "r"), wake=lambda: None,
            host_store=lambda host, wanted: port,
            resume=Connected("127.0.0.1", port, node == 0, node + 1) if running else None,
        )  # fmt: skip
        coordinator.start()
        coordinators[f"n{node}"] = coordinator, membership
    posts = []
    for name, (coordinator, membership) in coordinators.items():
        connected: Any = None
        while True:
            event = coordinator.events.get(timeout=600)
            if isinstance(event, Connected):
                connected = event
            elif isinstance(event, Start):
                break
        if recovery:
            opened = control_store(membership, connected, lambda line: None)
            place = Place(event.table, name, Limits())
            post = RecoveryPost(opened, place, 0, lambda batch: None, lambda line: None)
            post.start()
            posts.append(post)
    told.send(time.monotonic() - begin)
    while told.recv() == "count":
        told.send(carried(port))
    for post in posts:
        post.close(0)
    for coordinator, _ in coordinators.values():
        coordinator.close()
    told.send("bye")
    os._exit(0)


def once(
    total: int, recovery: bool, settle: float, seconds: float, running: bool
) -> dict[str, float]:
    """Per node and second."""
    ours, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=serve, args=(theirs,))
    server.start()
    port = ours.recv()
    ends = []
    if running:
        begin_running(total, port)
    for number in range(min(PROCESSES, total)):
        mine, other = SPAWN.Pipe()
        told = (number, total, port, recovery, other, running)
        SPAWN.Process(target=nodes, args=told).start()
        ends.append(mine)
    formed = max(end.recv() for end in ends)

    def count() -> tuple[float, list[int]]:
        ours.send("time")
        used = ours.recv()
        for end in ends:
            end.send("count")
        return used, [sum(part) for part in zip(*(end.recv() for end in ends), strict=True)]

    time.sleep(settle)  # what follows on the start is not idle
    began = time.monotonic()
    used, before = count()
    time.sleep(seconds)
    lasted = time.monotonic() - began
    later, after = count()
    for end in ends:
        end.send("end")
        end.recv()
    ours.send("end")
    server.join()
    sent, received, packets = ((b - a) / lasted / total for a, b in zip(before, after, strict=True))
    return {
        "requests": packets, "bytes to the store": sent, "bytes from the store": received,
        "requests at the store": packets * total, "start, s": formed,
        "store's processor": (later - used) / lasted,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 128, 1280])
    parser.add_argument("--posts", type=int, default=128, help="most nodes with recovery posts")
    parser.add_argument("--joins", type=int, default=256, help="most nodes that join for it")
    parser.add_argument("--settle", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "control_traffic.json")
    options = parser.parse_args()
    began = facts()
    raw: dict[str, Any] = {}
    for total in options.nodes:
        for recovery in (False, True):
            if recovery and total > options.posts:
                continue
            name = f"{total} nodes" + (", with the recovery's" if recovery else ", membership only")
            running = total > options.joins
            raw[name] = once(total, recovery, options.settle, options.seconds, running)
            told = ", ".join(f"{key} {value:.3g}" for key, value in raw[name].items())
            print(f"{name}: {told}", flush=True)
    options.out.write_text(json.dumps({**began, "raw": raw}, indent=1) + "\n")


if __name__ == "__main__":
    main()
