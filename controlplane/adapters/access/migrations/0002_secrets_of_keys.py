"""A key has several secrets: a row is one secret, and whether a key is good is in the log."""

from typing import Any

from django.db import migrations, models
from django.db.models import F


def own_ids(apps: Any, schema_editor: Any) -> None:
    """A key's first secret bears the key's own id. A revoked key needs none."""
    secrets = apps.get_model("access", "ApiKeySecret").objects
    secrets.filter(revoked=True).delete()
    secrets.update(key_id=F("secret_id"))


class Migration(migrations.Migration):
    dependencies = [("access", "0001_initial")]

    operations = [
        migrations.RenameField("apikeysecret", "key_id", "secret_id"),
        migrations.AddField(
            "apikeysecret",
            "key_id",
            models.CharField(default="", max_length=32),
            preserve_default=False,
        ),
        # Named, since PostgreSQL still has the index of the primary key that had this name before.
        migrations.AddIndex(
            "apikeysecret", models.Index(fields=["key_id"], name="access_secret_of_key")
        ),
        migrations.RunPython(own_ids, migrations.RunPython.noop),
        migrations.RemoveField("apikeysecret", "scopes"),
        migrations.RemoveField("apikeysecret", "expires_at"),
        migrations.RemoveField("apikeysecret", "revoked"),
    ]
