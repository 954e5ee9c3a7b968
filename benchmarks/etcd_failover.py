"""How long the control plane is silent when etcd members fail, and what a watch loses by it.

Three real members on loopback. One client writes numbers without a pause, another watches them;
the fault is repeated, with etcd's default timers and with fast ones. Silence is the longest time
between two acknowledged writes (two events seen) around the fault.

    python benchmarks/etcd_failover.py            # about 3 minutes
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bars import facts

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests import etcd  # noqa: E402

CALL = etcd.EtcdTiming(call=60.0)  # the package's own settings otherwise


def killed(cluster: etcd.Cluster, traffic: etcd.Traffic) -> None:
    leader = cluster.leader()
    leader.kill()
    traffic.await_more(50, 60)
    leader.start()


def frozen(cluster: etcd.Cluster, traffic: etcd.Traffic) -> None:
    leader = cluster.leader()
    leader.freeze()
    try:
        traffic.await_more(50, 60)
    finally:
        leader.signal(signal.SIGCONT)


def all_gone(cluster: etcd.Cluster, traffic: etcd.Traffic) -> None:
    cluster.kill()
    for member in cluster.members:
        member.start()
    traffic.await_more(50, 60)


FAULTS: dict[str, Callable[[etcd.Cluster, etcd.Traffic], None]] = {
    "leader killed": killed,
    "leader frozen": frozen,
    "all killed, and started again at once": all_gone,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "etcd_failover.json")
    options = parser.parse_args()
    began = facts()
    raw: list[dict[str, object]] = []
    for timers in ("default", "fast"):
        for fault, strike in FAULTS.items():
            silences: dict[str, list[float]] = {"writes": [], "events": []}
            events = lost = 0
            for _ in range(options.repeat):
                with (
                    tempfile.TemporaryDirectory() as folder,
                    etcd.Cluster(Path(folder), 3, fast=timers == "fast") as cluster,
                ):
                    traffic = etcd.Traffic(cluster.config(timing=CALL))
                    try:
                        traffic.await_more(50)
                        strike(cluster, traffic)
                        traffic.await_more(20, 60)
                    finally:
                        traffic.finish()
                    gaps = traffic.longest_gap()
                    silences["writes"].append(gaps[0])
                    silences["events"].append(gaps[1])
                    events += len(traffic.seen)
                    lost += traffic.lost() + traffic.resynced
            entry = {"timers": timers, "fault": fault, "events": events, "lost": lost}
            for what, values in silences.items():
                entry[f"silence of {what} [s]"] = {
                    "median": statistics.median(values), "worst": max(values), "raw": values
                }  # fmt: skip
            raw.append(entry)
            shown = ", ".join(
                f"{what} silent {statistics.median(values):.2f} s (worst {max(values):.2f})"
                for what, values in silences.items()
            )
            print(f"{timers} timers, {fault}: {shown}; {lost} of {events} events lost", flush=True)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({**began, "results": raw}, indent=1) + "\n")


if __name__ == "__main__":
    main()
