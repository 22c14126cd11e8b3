"""Triggers that keep checkpoints as they are: what is signed is neither changed nor deleted.

Only ``archive`` may change, once its segment's rows lie elsewhere.
"""

from typing import Any

_SAID = "checkpoints are immutable"
_CHANGED = " OR ".join(f"OLD.{name} <> NEW.{name}" for name in ("log", "first", "size", "note"))
_GUARDS = {
    "sqlite": [
        "CREATE TRIGGER ledger_checkpoint_no_update BEFORE UPDATE ON ledger_checkpoint "
        f"WHEN {_CHANGED} BEGIN SELECT RAISE(ABORT, '{_SAID}'); END",
        "CREATE TRIGGER ledger_checkpoint_no_delete BEFORE DELETE ON ledger_checkpoint "
        f"BEGIN SELECT RAISE(ABORT, '{_SAID}'); END",
    ],
    "postgresql": [
        "CREATE FUNCTION ledger_checkpoint_immutable() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_SAID}'; END $$",
        "CREATE TRIGGER ledger_checkpoint_no_update BEFORE UPDATE ON ledger_checkpoint "
        f"FOR EACH ROW WHEN ({_CHANGED}) EXECUTE FUNCTION ledger_checkpoint_immutable()",
        "CREATE TRIGGER ledger_checkpoint_no_delete BEFORE DELETE ON ledger_checkpoint "
        "FOR EACH ROW EXECUTE FUNCTION ledger_checkpoint_immutable()",
        "CREATE TRIGGER ledger_checkpoint_no_truncate BEFORE TRUNCATE ON ledger_checkpoint "
        "FOR EACH STATEMENT EXECUTE FUNCTION ledger_checkpoint_immutable()",
    ],
}


def create(apps: Any, schema_editor: Any) -> None:
    for statement in _GUARDS[schema_editor.connection.vendor]:
        schema_editor.execute(statement, None)
