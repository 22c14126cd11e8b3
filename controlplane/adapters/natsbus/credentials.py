"""Who may say what on the bus: keys, credentials and the server's configuration.

NATS "decentralised" authentication is a chain of signed claims, so a new node needs a file and not
a reload of the server::

    operator key  --signs-->  account claim  --signs-->  user claim  (one per node, one for control)

The server trusts the operator and is preloaded with the accounts; a user proves its claim by
signing a nonce with its own key. The three seeds live in one directory, made once, readable by
this user only. A claim is a JWT with algorithm ``ed25519-nkey``.

What node ``n1`` may do, and nothing else (a claim that allows anything denies the rest):

==========  =======================================================================================
publish     its telemetry, its frames, its observed state, tokenizer chunks, and the JetStream
            calls that read its *own* desired state (the direct-get subject ends in the key)
subscribe   its generate, cancel and resend subjects, its own desired key (a hint to look), and its
            own inbox: the client must be opened with ``inbox_prefix=node_inbox(node_id)``
==========  =======================================================================================

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

from gpuagent.wire import subjects

ACCOUNT_NAME = "engine"
MAX_PAYLOAD_BYTES = 1024 * 1024
MAX_FILE_STORE_BYTES = 4 * 1024**3
MAX_STREAMS = 32

_NODE_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")  # a '.' would be a second subject token


class InvalidNodeId(ValueError):
    """The id cannot stand in a subject without naming somebody else's."""


@dataclass(frozen=True)
class Permissions:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


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
    desired, observed = f"KV_{subjects.DESIRED_BUCKET}", f"KV_{subjects.OBSERVED_BUCKET}"
    tokenizers = f"OBJ_{subjects.TOKENIZER_BUCKET}"
    own_key = f"$KV.{subjects.DESIRED_BUCKET}.{node}"
    own_observed = f"$KV.{subjects.OBSERVED_BUCKET}.{node}"
    return Permissions(
        publish=(
            subjects.telemetry(node),
            subjects.frames("*", node),
            own_observed,
            f"$O.{subjects.TOKENIZER_BUCKET}.C.*",
            f"$O.{subjects.TOKENIZER_BUCKET}.M.*",
            f"$JS.API.DIRECT.GET.{desired}.{own_key}",
            f"$JS.API.DIRECT.GET.{observed}.{own_observed}",
            f"$JS.API.STREAM.INFO.{desired}",
            f"$JS.API.STREAM.INFO.{observed}",
            f"$JS.API.STREAM.INFO.{tokenizers}",
            f"$JS.API.STREAM.MSG.GET.{tokenizers}",
            f"$JS.API.DIRECT.GET.{tokenizers}.>",
        ),
        subscribe=(
            subjects.generate(node),
            subjects.cancel(node),
            subjects.resend(node),
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


def _kept_seed(path: Path, prefix: int) -> bytes:
    """The seed in ``path``, made on first use; of two processes at once the first one wins."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return path.read_bytes().strip()
    with os.fdopen(handle, "wb") as file:
        file.write(_new_seed(prefix))
        file.flush()
        os.fsync(file.fileno())
    return path.read_bytes()


class Authority:
    """Issues every claim of one cluster from the seeds in ``directory``."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory = directory
        self._operator = self._keys("operator", nkeys.PREFIX_BYTE_OPERATOR)
        self._account = self._keys("account", nkeys.PREFIX_BYTE_ACCOUNT)
        self._system = self._keys("system", nkeys.PREFIX_BYTE_ACCOUNT)

    def _keys(self, name: str, prefix: int) -> nkeys.KeyPair:
        return nkeys.from_seed(_kept_seed(self.directory / f"{name}.nk", prefix))

    def control_creds(self) -> str:
        """Credentials of the control plane's processes: everything inside the account."""
        return self._creds("control", CONTROL_PERMISSIONS)

    def node_creds(self, node_id: str) -> str:
        """Credentials of one node; raises InvalidNodeId."""
        return self._creds(f"node-{node_id}", node_permissions(node_id))

    def write_control_creds(self) -> Path:
        return _write_private(self.directory / "control.creds", self.control_creds())

    def write_node_creds(self, node_id: str) -> Path:
        creds = self.node_creds(node_id)
        return _write_private(self.directory / f"node-{node_id}.creds", creds)

    def _creds(self, name: str, permissions: Permissions) -> str:
        seed = _new_seed(nkeys.PREFIX_BYTE_USER)
        subject = _public(nkeys.from_seed(seed))
        claim = _sign(self._account, subject, name, _user_claim(permissions))
        return (
            f"-----BEGIN NATS USER JWT-----\n{claim}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed.decode()}\n------END USER NKEY SEED------\n"
        )

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
        accounts = ((self._account, ACCOUNT_NAME, True), (self._system, "system", False))
        return "".join(
            f"  {_public(keys)}: {self._account_claim(keys, name, jetstream)}\n"
            for keys, name, jetstream in accounts
        )

    def _account_claim(self, keys: nkeys.KeyPair, name: str, jetstream: bool) -> str:
        claim = {
            "type": "account",
            "limits": _account_limits(jetstream),
            "default_permissions": {"pub": {}, "sub": {}},
        }
        return _sign(self._operator, _public(keys), name, claim)

    def write_server_config(
        self, port: int, host: str = "127.0.0.1", monitor_port: int | None = None
    ) -> Path:
        """Write ``nats.conf`` beside the keys, JetStream's files below it; returns its path."""
        config = self.server_config(self.directory / "jetstream", port, host, monitor_port)
        return _write_private(self.directory / "nats.conf", config)


def _write_private(path: Path, text: str) -> Path:
    """Replace ``path`` atomically with ``text``, readable by this user only."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    handle = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
    return path
