"""Where an etcd cluster is and how to get in: from the command line and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashrun.rendezvous.endpoint import EndpointError, join_host_port, parse_endpoint

ETCD_PORT = 2379
PASSWORD_VARIABLE = "ETCD_PASSWORD"  # the name, not the secret
_QUICK_S = 5.0  # of a call of one who has other things to look at
_KEYS = ("protocol", "ca_cert", "ssl_cert", "ssl_cert_key", "user", "password_file", "read_timeout")


@dataclass(frozen=True)
class EtcdTiming:
    """Seconds.

    Attributes:
        call: in which a call has to succeed, retries included.
        attempt: the most for one attempt at one member; then the next member is asked.
        keepalive: between the pings on a connection with an open watch. A server answers pings
            that come faster than its ``--grpc-keepalive-min-time`` (5 s) by hanging up.
        ping: how long the answer to a ping may take; then the member is given up.
    """

    call: float = 30.0
    attempt: float = 2.0
    keepalive: float = 6.0
    ping: float = 3.0


@dataclass(frozen=True)
class EtcdConfig:
    """An etcd cluster.

    Attributes:
        endpoints: ``host:port`` of the members; all that there are, so that any may fail.
        prefix: what our keys begin with.
        tls: speak TLS; ``ca``: file with the certificates to trust (None: the system's).
        cert, key: files of our own certificate (mTLS).
    """

    endpoints: tuple[str, ...]
    prefix: str = "/flashrun/"
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    timing: EtcdTiming = EtcdTiming()

    @property
    def where(self) -> str:
        return f"etcd at {', '.join(self.endpoints)}"

    def quick(self) -> EtcdConfig:
        """For who has other things to look at while the cluster does not answer."""
        call = min(self.timing.call, _QUICK_S)
        return replace(self, timing=replace(self.timing, call=call))


def prefix_of(run_id: str) -> str:
    """What all keys of the jobs of this id begin with."""
    return f"/flashrun/{run_id}/"


def etcd_config(
    endpoints: str, conf: Mapping[str, object], environ: Mapping[str, str], prefix: str
) -> EtcdConfig:
    """Read ``--rdzv-endpoint`` and ``--rdzv-conf`` (torch's names for its etcd backend, and more).

    Args:
        endpoints: ``host:port,host:port``; each may begin with ``http://`` or ``https://``.
        conf: protocol (http or https), ca_cert, ssl_cert, ssl_cert_key (files), user,
            password_file, read_timeout (seconds for one call, retries included).
        environ: ETCD_PASSWORD. A password is not taken from the command line, which
            everybody on the machine can read.

    Raises:
        EndpointError: what is wrong and what would be right; never shows the password.
    """
    if "password" in conf:
        raise EndpointError(
            "--rdzv-conf password=… can be read by everybody on this machine (ps). Give "
            f"password_file=PATH, or the environment variable {PASSWORD_VARIABLE}."
        )
    schemes, names = set(), []
    for part in filter(None, (text.strip() for text in endpoints.split(","))):
        scheme, found, rest = part.rpartition("://")
        if found:
            schemes.add(scheme)
        if "@" in rest:
            raise EndpointError(
                "An etcd endpoint holds no user or password. Give --rdzv-conf=user=NAME and "
                f"password_file=PATH, or the environment variable {PASSWORD_VARIABLE}."
            )
        endpoint = parse_endpoint(rest.rstrip("/"), ETCD_PORT)
        names.append(join_host_port(endpoint.host, endpoint.port))
    if not names:
        raise EndpointError(
            "etcd needs the addresses of its members; give --rdzv-endpoint=HOST:PORT,HOST:PORT,…"
        )
    if "protocol" in conf:
        schemes.add(str(conf["protocol"]).strip().lower())
    if len(schemes) > 1 or not schemes <= {"http", "https"}:
        raise EndpointError(
            f"The etcd endpoints name the protocols {', '.join(sorted(schemes))}; give http or "
            "https, the same for all."
        )
    files = {name: _file(name, conf.get(name)) for name in ("ca_cert", "ssl_cert", "ssl_cert_key")}
    if (files["ssl_cert"] is None) != (files["ssl_cert_key"] is None):
        raise EndpointError("--rdzv-conf: ssl_cert and ssl_cert_key belong together; give both")
    tls = "https" in schemes or any(files.values())
    if tls and "http" in schemes:
        raise EndpointError("--rdzv-conf: certificates need protocol=https (or https:// endpoints)")
    user = str(conf["user"]) if "user" in conf else None
    password_file = _file("password_file", conf.get("password_file"))
    password = environ.get(PASSWORD_VARIABLE)
    if password_file is not None:
        password = password_file.read_text().rstrip("\n")
    if user is not None and password is None:
        raise EndpointError(
            f"--rdzv-conf user={user} needs a password: password_file=PATH, or the environment "
            f"variable {PASSWORD_VARIABLE}."
        )
    return EtcdConfig(
        endpoints=tuple(dict.fromkeys(names)),
        prefix=prefix,
        tls=tls,
        ca=files["ca_cert"],
        cert=files["ssl_cert"],
        key=files["ssl_cert_key"],
        user=user,
        password=password if user is not None else None,
        timing=EtcdTiming(call=_seconds("read_timeout", conf.get("read_timeout"), 30.0)),
    )


def _file(name: str, value: object) -> Path | None:
    if value is None:
        return None
    path = Path(str(value))
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise EndpointError(
            f"--rdzv-conf {name}={value}: can't be read ({error.strerror}). Give the path of a "
            "file that exists on this node."
        ) from error


def _seconds(name: str, value: object, default: float) -> float:
    if value is None:
        return default
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise EndpointError(f"--rdzv-conf {name}={value}: must be a positive number of seconds")
    return seconds
