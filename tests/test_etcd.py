"""What is etcd's own: members that fail, answers that get lost, certificates, users."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flashrun.rendezvous.endpoint import EndpointError
from flashrun.rendezvous.etcd_config import PASSWORD_VARIABLE, EtcdConfig, EtcdTiming, etcd_config
from flashrun.rendezvous.kv import StoreLost, StoreRefused
from tests import etcd, helpers

pytestmark = pytest.mark.skipif(etcd.why_not() is not None, reason=str(etcd.why_not()))

SECRET = "b3tter-not-shown"
ONCE = EtcdTiming(call=1.0, attempt=0.5)


def store_of(config: EtcdConfig, lines: list[str] | None = None):  # type: ignore[no-untyped-def]
    from flashrun.rendezvous.etcd_store import EtcdStore

    return EtcdStore(config, (lambda line: None) if lines is None else lines.append)


# --- members fail ---------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> Iterator[etcd.Cluster]:
    """For one test: a member that was started again counts as left behind by it."""
    with etcd.Cluster(tmp_path, 3) as cluster:
        yield cluster


@pytest.fixture
def traffic(three: etcd.Cluster) -> Iterator[etcd.Traffic]:
    found = etcd.Traffic(three.config())
    try:
        found.await_more(20)
        yield found
    finally:
        found.finish()
    assert found.lost() == 0
    assert found.resynced == 0


def test_the_leader_is_killed(three: etcd.Cluster, traffic: etcd.Traffic) -> None:
    """A few times: the member that a client talks to is the leader in some."""
    for _ in range(2):
        leader = three.leader()
        leader.kill()
        traffic.await_more(100)
        leader.start()
        traffic.await_more(20)


def test_the_leader_freezes_and_thaws(three: etcd.Cluster, traffic: etcd.Traffic) -> None:
    """It carries out late what it had taken; nothing of that is done a second time."""
    for _ in range(2):
        leader = three.leader()
        leader.freeze()
        traffic.await_more(100)
        leader.signal(signal.SIGCONT)
        traffic.await_more(50)


def test_all_members_go_and_come_back_with_their_data(
    three: etcd.Cluster, traffic: etcd.Traffic
) -> None:
    lines = traffic.lines
    three.kill()
    helpers.wait_until(lambda: any("no answer" in line for line in lines), "a line that says so")
    three.start()
    traffic.await_more(100)
    assert any("answers again after" in line for line in lines), lines


def test_one_member_of_the_endpoint_never_was_there(three: etcd.Cluster) -> None:
    """Whichever a client begins with."""
    gone = f"127.0.0.1:{helpers.free_port()}"
    endpoints = three.config().endpoints[:1]
    for order in ((gone, *endpoints), (*endpoints, gone)):
        with store_of(three.config(endpoints=order)) as store:
            store.put("a", b"1")
            assert store.get("a") == b"1"


def test_a_cluster_that_has_no_ipv4(tmp_path: Path) -> None:
    cluster = etcd.Cluster(tmp_path)
    (member,) = cluster.members
    member.arguments = [word.replace("127.0.0.1", "[::1]") for word in member.arguments]
    try:
        member.start()
        config = etcd_config(f"http://[::1]:{member.port}", {}, {}, "/test/")
        with store_of(replace(config, timing=etcd.FAST)) as store:
            store.put("a", b"1")
            assert store.get("a") == b"1"
    finally:
        cluster.kill()


def test_a_proxy_in_the_environment_is_not_for_us(
    three: etcd.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{helpers.free_port()}")
    with store_of(three.config()) as store:
        store.put("a", b"1")


@pytest.mark.slow
def test_a_silent_watch_notices_that_its_member_is_frozen(three: etcd.Cluster) -> None:
    """Nothing else asks that member anything: by pings alone. And the pings are not so fast that
    the server hangs up (its minimum is 5 s)."""
    lines: list[str] = []
    with store_of(three.config(), lines) as reader, store_of(three.config()) as writer:
        watch = reader.watch("k")
        assert watch.get(25.0) == []
        assert lines == []
        name = reader._link.member().name
        frozen = next(m for m in three.members if name.endswith(f":{m.port}"))
        frozen.freeze()
        writer.put("k", b"1")
        assert [event.value for event in watch.get(15.0)] == [b"1"]
        frozen.signal(signal.SIGCONT)


def test_a_lease_outlives_an_election(three: etcd.Cluster) -> None:
    with store_of(three.config()) as store:
        lease = store.lease(1)
        store.put("leased", b"1", lease)
        watch = store.watch("leased")
        leader = three.leader()
        leader.kill()
        assert watch.get(2.0) == []
        leader.start()
        assert not lease.lost.is_set()
        assert lease.remaining_s() > 0


# --- answers that get lost --------------------------------------------------------------------


def test_a_write_whose_answer_is_lost_is_done_once(three: etcd.Cluster) -> None:
    """The server carries it out, the client hears nothing and sends it again; meanwhile somebody
    else has written, so that doing it again would show."""
    proxy = etcd.Proxy(three.members[0].port)
    through = three.config(endpoints=(f"127.0.0.1:{proxy.port}",))
    with store_of(through) as store, store_of(three.config()) as other:
        store.put("k", b"start")
        watch = other.watch("k")
        cases: list[tuple[Callable[[], object], object, tuple[str, bytes] | None]] = [
            (lambda: store.put("k", b"put"), None, ("put", b"put")),
            (lambda: store.compare_and_swap("k", b"other", b"cas"), True, ("put", b"cas")),
            (lambda: store.delete("k"), None, ("delete", b"")),
            (lambda: store.compare_and_swap("k", None, b"late"), False, None),
        ]
        for ask, answer, effect in cases:
            proxy.swallow()
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(ask)
                assert proxy.swallowed.wait(20)
                if effect is not None:
                    assert [(e.kind, e.value) for e in watch.get(20)] == [effect]
                other.put("k", b"other")
                assert [e.value for e in watch.get(20)] == [b"other"]
                if effect is None:  # what it compares with is so at its second attempt
                    other.delete("k")
                    assert [e.kind for e in watch.get(20)] == ["delete"]
                proxy.cut()
                assert asked.result(20) == answer
            assert watch.get(0.1) == []
    proxy.close()


# --- certificates -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> etcd.Certificates:
    return etcd.make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls(
    tmp_path_factory: pytest.TempPathFactory, certificates: etcd.Certificates
) -> Iterator[etcd.Cluster]:
    folder = tmp_path_factory.mktemp("tls")
    with etcd.Cluster(folder, certificates=certificates, mutual=True) as cluster:
        yield cluster


def test_tls_with_certificates_of_both_sides(tls: etcd.Cluster) -> None:
    with store_of(tls.config()) as store:
        watch = store.watch()
        store.put("a", b"1")
        assert watch.get(20)[0].value == b"1"


def test_tls_of_the_server_alone(tmp_path: Path, certificates: etcd.Certificates) -> None:
    with etcd.Cluster(tmp_path, certificates=certificates) as cluster:
        assert cluster.config().cert is None
        with store_of(cluster.config()) as store:
            store.put("a", b"1")
            assert store.get("a") == b"1"


@pytest.mark.parametrize("mistake", ["authority", "client", "no client", "no tls", "name"])
def test_a_wrong_certificate_is_said_with_the_remedy(
    tls: etcd.Cluster, certificates: etcd.Certificates, mistake: str
) -> None:
    config = tls.config()
    error: type[Exception] = StoreRefused  # at once: no waiting would change it
    says = "ca_cert holds the authority"
    if mistake == "authority":
        config = replace(config, ca=certificates.other_ca)
    elif mistake == "client":
        config = replace(config, cert=certificates.other_client, key=certificates.other_key)
        says = "signed by the authority that they trust"
    elif mistake == "no client":
        config = replace(config, cert=None, key=None)
        says = "whether they want a certificate of ours (ssl_cert"
    elif mistake == "name":
        config = replace(config, endpoints=(f"localhost:{tls.members[0].port}",))
        says = "name the hosts as the endpoint does"
    else:
        config = replace(config, tls=False, ca=None, cert=None, key=None, timing=ONCE)
        error, says = StoreLost, "protocol=https"
    with store_of(config) as store, pytest.raises(error) as caught:
        store.put("a", b"1")
    text = str(caught.value)
    assert says in text
    assert config.endpoints[0] in text
    assert "the write of 'a'" in text


def test_a_wrong_endpoint_is_said_with_the_remedy() -> None:
    port = helpers.free_port()
    config = EtcdConfig((f"127.0.0.1:{port}",), timing=ONCE)
    with store_of(config) as store, pytest.raises(StoreLost) as caught:
        store.get("a")
    text = str(caught.value)
    assert f"etcd at 127.0.0.1:{port} did not answer within 1 s" in text
    assert "waiting for the value of 'a'" in text
    assert "refused" in text and "etcdctl endpoint health" in text


# --- users ------------------------------------------------------------------------------------


@pytest.fixture
def users(tmp_path: Path) -> Iterator[etcd.Cluster]:
    """A cluster with users; ``trainer`` may read and write under /test/."""
    with etcd.Cluster(tmp_path) as cluster:
        member = cluster.members[0]

        def auth(method: str, request: str, **fields: object) -> None:
            cluster.ask(member, "AuthStub", method, request, **fields)

        for user, role in (("root", "root"), ("trainer", "train")):
            auth("UserAdd", "AuthUserAddRequest", name=user, password=SECRET)
            auth("RoleAdd", "AuthRoleAddRequest", name=role)
            auth("UserGrantRole", "AuthUserGrantRoleRequest", user=user, role=role)
        allowed = {"permType": 2, "key": b"/test/", "range_end": b"/test0"}
        auth("RoleGrantPermission", "AuthRoleGrantPermissionRequest", name="train", perm=allowed)
        auth("AuthEnable", "AuthEnableRequest")
        yield cluster


def test_a_user_is_logged_in_again_after_a_restart(users: etcd.Cluster) -> None:
    lines: list[str] = []
    with store_of(users.config(user="trainer", password=SECRET), lines) as store:
        watch = store.watch("a")
        lease = store.lease(1)
        store.put("a", b"1", lease)
        assert [event.value for event in watch.get(20)] == [b"1"]
        member = users.members[0]
        member.kill()
        member.start()  # it has forgotten the token
        store.put("a", b"2", lease)
        assert [event.value for event in watch.get(20)] == [b"2"]
        assert store.get("a") == b"2"
        assert watch.get(1.6) == []  # the lease is renewed as the user, too
    assert SECRET not in " ".join(lines)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"user": "trainer", "password": "wr0ng-secret"}, "Check the user and the password"),
        ({"user": "nobody", "password": "wr0ng-secret"}, "Check the user and the password"),
        ({}, "--rdzv-conf=user=NAME"),
        ({"user": "trainer", "password": SECRET, "prefix": "/other/"}, "readwrite /other/"),
    ],
    ids=["password", "user", "none", "prefix"],
)
def test_who_may_not_is_told_at_once(
    users: etcd.Cluster, changes: dict[str, str], says: str
) -> None:
    with store_of(users.config(**changes)) as store:
        for ask in (lambda: store.get("a"), lambda: store.put("a", b"1")):
            with pytest.raises(StoreRefused) as caught:
                ask()
            text = str(caught.value)
            assert says in text
            assert users.config().endpoints[0] in text
            shown = "".join(traceback.format_exception(caught.value)) + repr(store.__dict__)
            assert SECRET not in shown and "wr0ng" not in shown


def test_a_watch_that_is_not_permitted_ends(users: etcd.Cluster) -> None:
    config = users.config(user="trainer", password=SECRET, prefix="/other/")
    with store_of(config) as store:
        watch = store.watch("a", 1)
        with pytest.raises(StoreRefused, match="readwrite /other/"):
            watch.get(20)


def test_a_user_where_there_are_none(three: etcd.Cluster) -> None:
    lines: list[str] = []
    with store_of(three.config(user="trainer", password=SECRET), lines) as store:
        store.put("a", b"1")
    assert any("has no users" in line for line in lines)
    assert SECRET not in " ".join(lines)


# --- configuration ----------------------------------------------------------------------------


def test_configuration(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text(SECRET + "\n")
    conf = {"user": "u", "password_file": str(secret), "ca_cert": str(secret), "read_timeout": "7"}
    config = etcd_config("https://a:1, [::1],b", conf, {}, "/p/")
    assert config.endpoints == ("a:1", "[::1]:2379", "b:2379")
    assert config.tls and config.password == SECRET and config.timing.call == 7.0
    assert SECRET not in repr(config)
    from_environment = etcd_config("a", {"user": "u"}, {PASSWORD_VARIABLE: SECRET}, "/p/")
    assert from_environment.password == SECRET and not from_environment.tls
    assert etcd_config("a", {"protocol": "https"}, {}, "/p/").tls


@pytest.mark.parametrize(
    ("endpoints", "conf", "says"),
    [
        ("", {}, "HOST:PORT,HOST:PORT"),
        ("a", {"password": SECRET}, "password_file=PATH"),
        ("http://u:" + SECRET + "@a:1", {}, "holds no user or password"),
        ("a", {"user": "u"}, PASSWORD_VARIABLE),
        ("a", {"ssl_cert": __file__}, "give both"),
        ("a", {"ca_cert": "/none"}, "can't be read"),
        ("http://a,https://b", {}, "the same for all"),
        ("http://a", {"ca_cert": __file__}, "https"),
        ("a", {"read_timeout": "x"}, "seconds"),
    ],
)
def test_a_wrong_configuration_is_said(endpoints: str, conf: dict[str, str], says: str) -> None:
    with pytest.raises(EndpointError) as caught:
        etcd_config(endpoints, conf, {}, "/p/")
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)
