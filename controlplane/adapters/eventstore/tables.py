"""The log's tables as SQL, for both databases.

Django's own CREATE TABLE was not kept: on SQLite it makes ``position`` a bigint, which is not the
row id, so that every append would write a second B-tree.
"""

from typing import Any

_TABLES = """
CREATE TABLE eventstore_event (
    position {int8} PRIMARY KEY,
    stream text NOT NULL,
    version {int8} NOT NULL,
    type text NOT NULL,
    schema_version integer NOT NULL,
    data {bytes} NOT NULL,
    actor text NOT NULL,
    correlation_id text NOT NULL,
    causation_id text NOT NULL,
    address text NOT NULL,
    reason text NOT NULL,
    recorded_at {float8} NOT NULL,
    hash {bytes} NOT NULL,
    CONSTRAINT eventstore_stream_version UNIQUE (stream, version)
);
CREATE TABLE eventstore_head (
    id integer PRIMARY KEY CHECK (id = 1),
    position {int8} NOT NULL,
    hash {bytes} NOT NULL
);
CREATE TABLE eventstore_idempotencykey (
    key text PRIMARY KEY,
    body_hash text NOT NULL,
    status integer NOT NULL,
    body {bytes} NOT NULL,
    position {int8} NOT NULL,
    used_at {float8} NOT NULL
);
CREATE INDEX eventstore_idempotencykey_used_at ON eventstore_idempotencykey (used_at);
CREATE TABLE eventstore_lease (
    name text PRIMARY KEY,
    holder text NOT NULL,
    epoch {int8} NOT NULL,
    expires_at {float8} NOT NULL
)
"""
_TYPES = {
    "sqlite": {"int8": "integer", "bytes": "blob", "float8": "real"},
    "postgresql": {"int8": "bigint", "bytes": "bytea", "float8": "double precision"},
}
_GUARDS = {
    "sqlite": [
        "CREATE TRIGGER eventstore_event_no_update BEFORE UPDATE ON eventstore_event "
        "BEGIN SELECT RAISE(ABORT, 'events are immutable'); END",
        "CREATE TRIGGER eventstore_event_no_delete BEFORE DELETE ON eventstore_event "
        "BEGIN SELECT RAISE(ABORT, 'events are immutable'); END",
    ],
    "postgresql": [
        "CREATE FUNCTION eventstore_immutable() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'events are immutable'; END $$",
        "CREATE TRIGGER eventstore_event_no_change BEFORE UPDATE OR DELETE ON eventstore_event "
        "FOR EACH ROW EXECUTE FUNCTION eventstore_immutable()",
        "CREATE TRIGGER eventstore_event_no_truncate BEFORE TRUNCATE ON eventstore_event "
        "FOR EACH STATEMENT EXECUTE FUNCTION eventstore_immutable()",
    ],
}


def create(apps: Any, schema_editor: Any) -> None:
    """Make the tables, then the triggers that refuse to change or delete an event."""
    vendor = schema_editor.connection.vendor
    for statement in _TABLES.format(**_TYPES[vendor]).split(";"):
        schema_editor.execute(statement)
    for statement in _GUARDS[vendor]:
        schema_editor.execute(statement, None)
