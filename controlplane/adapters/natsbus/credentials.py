"""Who may say what on the bus: keys, credentials and the server's configuration.

NATS "decentralised" authentication is a chain of signed claims, so a new node needs a file and not
a reload of the server::

    operator key  --signs-->  account claims: engine, nodes  --sign-->  user claims: control, nodes

The server trusts the operator and is preloaded with the accounts; a user proves its claim by
signing a nonce with its own key. The seeds live in one directory, made once, readable by this user
only. A claim is a JWT with algorithm ``ed25519-nkey``.

What node ``n1`` may do, and nothing else (a claim that allows anything denies the rest):

==========  =======================================================================================
publish     its telemetry, its frames, its closed counts, its observed state, tokenizer chunks, and
            the JetStream calls that read its *own* desired state (the subject ends in the key)
subscribe   its generate, cancel, resend and close subjects, its own desired key (a hint to look),
            and its own inbox: the client must be opened with ``inbox_prefix=node_inbox(node_id)``
==========  =======================================================================================

Nodes are in an **account of their own**. Of the engine's account it sees only what
``SERVICES_OF_ENGINE`` and ``STREAMS_OF_ENGINE`` name, and shows it ``STREAMS_OF_NODES``.
Permissions check the subject of a message, but not the subject that it asks the reply to be sent
to. In one account a node could therefore let the server itself send an answer to
``$JS.API.STREAM.DELETE.KV_desired``, or to another node's desired key (both tried and seen to
work). Across accounts an answer comes out where the question was asked.

Rejected: a consumer on the desired bucket. Its filter travels in the request's body, where no
permission can see it, so a node could read every other node's desired state. A plain subscription
to ``$KV.desired.<node>`` plus a direct get at start, on reconnect and every minute does the same.
"""

import base64
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys

from controlplane.adapters.private_files import kept_private, write_private
from gpuagent.wire import subjects

MAX_PAYLOAD_BYTES = 1024 * 1024
MAX_FILE_STORE_BYTES = 4 * 1024**3
MAX_STREAMS = 32

DESIRED, OBSERVED = f"KV_{subjects.DESIRED_BUCKET}", f"KV_{subjects.OBSERVED_BUCKET}"
TOKENIZERS = f"OBJ_{subjects.TOKENIZER_BUCKET}"
ALL_STREAMS = (DESIRED, OBSERVED, TOKENIZERS)

# Between the accounts. A service is asked and answers; a stream is only heard.
SERVICES_OF_ENGINE = (
    f"$JS.API.DIRECT.GET.{DESIRED}.$KV.{subjects.DESIRED_BUCKET}.*",
    *(f"$JS.API.STREAM.INFO.{name}" for name in ALL_STREAMS),
    f"$JS.API.STREAM.MSG.GET.{TOKENIZERS}",
    f"$KV.{subjects.OBSERVED_BUCKET}.*",
    f"$O.{subjects.TOKENIZER_BUCKET}.C.*",
    f"$O.{subjects.TOKENIZER_BUCKET}.M.*",
)
STREAMS_OF_ENGINE = (
    subjects.generate("*"),
    subjects.cancel("*"),
    subjects.resend("*"),
    subjects.close("*"),
    f"$KV.{subjects.DESIRED_BUCKET}.*",
)
STREAMS_OF_NODES = (
    subjects.telemetry("*"),
    subjects.frames("*", "*"),
    subjects.closed("*", "*"),
)

_NODE_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")  # a '.' would be a second subject token


class InvalidNodeId(ValueError):
    """The id cannot stand in a subject without naming somebody else's."""


@dataclass(frozen=True)
class Permissions:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


# Subjects that no node may use, its own name in them or not: how a gateway listens to all nodes.
CONTROL_ONLY = frozenset(
    {subjects.TELEMETRY_ALL, subjects.frames_of("gw"), subjects.closed_of("gw")}
)

CONTROL_PERMISSIONS = Permissions((">",), (">",))


def checked_node_id(node_id: str) -> str:
    """``node_id`` if it is one subject token without wildcards; raises InvalidNodeId."""
    if not _NODE_ID.fullmatch(node_id):
        raise InvalidNodeId(f"{node_id!r} is not 1 to 63 of a-z, 0-9, '_' and '-'")
    return node_id


def node_inbox(node_id: str) -> str:
    """The inbox prefix that node ``node_id`` must open its connection with."""
    return f"_INBOX_{node_id}"


def node_permissions(node_id: str) -> Permissions:
    """Least privilege of one node; see the table in the module docstring."""
    node = checked_node_id(node_id)
    own_key = f"$KV.{subjects.DESIRED_BUCKET}.{node}"
    return Permissions(
        publish=(
            subjects.telemetry(node),
            subjects.frames("*", node),
            subjects.closed("*", node),
            f"$KV.{subjects.OBSERVED_BUCKET}.{node}",
            f"$O.{subjects.TOKENIZER_BUCKET}.C.*",
            f"$O.{subjects.TOKENIZER_BUCKET}.M.*",
            f"{subjects.NODE_JETSTREAM}.DIRECT.GET.{DESIRED}.{own_key}",
            *(f"{subjects.NODE_JETSTREAM}.STREAM.INFO.{name}" for name in ALL_STREAMS),
            f"{subjects.NODE_JETSTREAM}.STREAM.MSG.GET.{TOKENIZERS}",
        ),
        subscribe=(
            subjects.generate(node),
            subjects.cancel(node),
            subjects.resend(node),
            subjects.close(node),
            own_key,
            f"{node_inbox(node)}.>",
        ),
    )


# --- claims -----------------------------------------------------------------------------------
def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _public(keys: nkeys.KeyPair) -> str:
    return str(keys.public_key.decode())


def _sign(signer: nkeys.KeyPair, subject: str, name: str, claim: dict[str, Any]) -> str:
    """A NATS JWT over ``claim`` for the public key ``subject``, signed by ``signer``."""
    body = {
        "iat": int(time.time()),
        "iss": _public(signer),
        "name": name,
        "sub": subject,
        "nats": {**claim, "version": 2},
    }
    digest = hashlib.sha256(_json(body)).digest()
    body["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    head = _base64url(_json({"typ": "JWT", "alg": "ed25519-nkey"}))
    signed = f"{head}.{_base64url(_json(body))}"
    return f"{signed}.{_base64url(signer.sign(signed.encode()))}"


def _account_limits(jetstream: bool) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "subs": -1,
        "data": -1,
        "payload": -1,
        "imports": -1,
        "exports": -1,
        "wildcards": True,
        "conn": -1,
        "leaf": 0,
    }
    if jetstream:
        limits |= {
            "mem_storage": 0,
            "disk_storage": MAX_FILE_STORE_BYTES,
            "streams": MAX_STREAMS,
            "consumer": -1,
        }
    return limits


def _exports(kind: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"name": name, "subject": name, "type": kind} for name in names]


def _imports(kind: str, names: tuple[str, ...], account: str) -> list[dict[str, Any]]:
    """The other account's exports under the same subjects, its JetStream under another prefix.

    Every account has a ``$JS.API`` of its own, which answers that JetStream is not enabled here.
    """
    return [
        {**export, "account": account, "local_subject": _local(export["subject"])}
        for export in _exports(kind, names)
    ]


def _local(subject: str) -> str:
    renamed = subject.replace("$JS.API.", f"{subjects.NODE_JETSTREAM}.", 1)
    numbers = iter(range(1, 10))
    return ".".join(f"${next(numbers)}" if token == "*" else token for token in renamed.split("."))


def _user_claim(permissions: Permissions) -> dict[str, Any]:
    return {
        "type": "user",
        "pub": {"allow": list(permissions.publish)},
        "sub": {"allow": list(permissions.subscribe)},
        "subs": -1,
        "data": -1,
        "payload": MAX_PAYLOAD_BYTES,
        "allowed_connection_types": ["STANDARD"],
    }


# --- keys -------------------------------------------------------------------------------------
def _new_seed(prefix: int) -> bytes:
    return bytes(nkeys.encode_seed(os.urandom(32), prefix))


class Authority:
    """Issues every claim of one cluster from the seeds in ``directory``."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory = directory
        self._operator = self._keys("operator", nkeys.PREFIX_BYTE_OPERATOR)
        self._engine = self._keys("account", nkeys.PREFIX_BYTE_ACCOUNT)
        self._nodes = self._keys("nodes", nkeys.PREFIX_BYTE_ACCOUNT)
        self._system = self._keys("system", nkeys.PREFIX_BYTE_ACCOUNT)

    def _keys(self, name: str, prefix: int) -> nkeys.KeyPair:
        path = self.directory / f"{name}.nk"
        seed = kept_private(path, lambda: _new_seed(prefix).decode())
        return nkeys.from_seed(seed.encode())

    def control_creds(self) -> str:
        """Credentials of the control plane's processes: everything in the engine's account."""
        return _creds(self._engine, "control", CONTROL_PERMISSIONS)

    def node_creds(self, node_id: str) -> str:
        """Credentials of one node; raises InvalidNodeId."""
        return _creds(self._nodes, f"node-{node_id}", node_permissions(node_id))

    def write_control_creds(self) -> Path:
        return write_private(self.directory / "control.creds", self.control_creds())

    def write_node_creds(self, node_id: str) -> Path:
        creds = self.node_creds(node_id)
        return write_private(self.directory / "nodes" / f"{node_id}.creds", creds)

    def server_config(
        self, store_dir: Path, port: int, host: str = "127.0.0.1", monitor_port: int | None = None
    ) -> str:
        """The whole nats.conf: JetStream that syncs every write, and whom to trust.

        ``sync_interval: always`` because a shorter interval loses acknowledged writes and even
        freshly created streams at a power cut; monitoring stays on loopback.
        """
        operator = _sign(
            self._operator,
            _public(self._operator),
            "engine-operator",
            {"type": "operator", "system_account": _public(self._system)},
        )
        monitor = f"http: 127.0.0.1:{monitor_port}\n" if monitor_port else ""
        return (
            f"listen: {host}:{port}\n{monitor}"
            f"max_payload: {MAX_PAYLOAD_BYTES}\nmax_connections: 1000\n"
            'write_deadline: "5s"\nping_interval: "5s"\n'
            f"jetstream {{\n  store_dir: {json.dumps(str(store_dir))}\n"
            f"  sync_interval: always\n  max_memory_store: 64MB\n"
            f"  max_file_store: {MAX_FILE_STORE_BYTES}\n}}\n"
            f"operator: {operator}\nsystem_account: {_public(self._system)}\n"
            f"resolver: MEMORY\nresolver_preload: {{\n{self._preload()}}}\n"
        )

    def _preload(self) -> str:
        accounts: tuple[tuple[nkeys.KeyPair, str, bool, dict[str, Any]], ...] = (
            (self._engine, "engine", True, self._engine_links()),
            (self._nodes, "nodes", False, self._nodes_links()),
            (self._system, "system", False, {}),
        )
        return "".join(
            f"  {_public(keys)}: {self._account_claim(keys, name, jetstream, links)}\n"
            for keys, name, jetstream, links in accounts
        )

    def _engine_links(self) -> dict[str, Any]:
        exports = _exports("service", SERVICES_OF_ENGINE) + _exports("stream", STREAMS_OF_ENGINE)
        return {
            "exports": exports,
            "imports": _imports("stream", STREAMS_OF_NODES, _public(self._nodes)),
        }

    def _nodes_links(self) -> dict[str, Any]:
        engine = _public(self._engine)
        services = _imports("service", SERVICES_OF_ENGINE, engine)
        return {
            "exports": _exports("stream", STREAMS_OF_NODES),
            "imports": services + _imports("stream", STREAMS_OF_ENGINE, engine),
        }

    def _account_claim(
        self, keys: nkeys.KeyPair, name: str, jetstream: bool, links: dict[str, Any]
    ) -> str:
        claim = {
            "type": "account",
            "limits": _account_limits(jetstream),
            "default_permissions": {"pub": {}, "sub": {}},
            **links,
        }
        return _sign(self._operator, _public(keys), name, claim)

    def write_server_config(
        self, port: int, host: str = "127.0.0.1", monitor_port: int | None = None
    ) -> Path:
        """Write ``nats.conf`` beside the keys, JetStream's files below it; returns its path."""
        config = self.server_config(self.directory / "jetstream", port, host, monitor_port)
        return write_private(self.directory / "nats.conf", config)


def _creds(account: nkeys.KeyPair, name: str, permissions: Permissions) -> str:
    """A new user key of ``account`` and the claim for it, in the form that clients read."""
    seed = _new_seed(nkeys.PREFIX_BYTE_USER)
    subject = _public(nkeys.from_seed(seed))
    claim = _sign(account, subject, name, _user_claim(permissions))
    return (
        f"-----BEGIN NATS USER JWT-----\n{claim}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed.decode()}\n------END USER NKEY SEED------\n"
    )
