"""The log's tables, written by hand: see ``tables``. Migrations of this app only ever add."""

from django.db import migrations, models

from controlplane.adapters.eventstore import tables


class Migration(migrations.Migration):
    initial = True
    dependencies = ()
    operations = (
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunPython(tables.create, migrations.RunPython.noop)],
            state_operations=[
                migrations.CreateModel(
                    name="Event",
                    fields=[
                        ("position", models.BigIntegerField(primary_key=True, serialize=False)),
                        ("stream", models.TextField()),
                        ("version", models.BigIntegerField()),
                        ("type", models.TextField()),
                        ("schema_version", models.IntegerField()),
                        ("data", models.BinaryField()),
                        ("actor", models.TextField()),
                        ("correlation_id", models.TextField()),
                        ("causation_id", models.TextField()),
                        ("address", models.TextField()),
                        ("reason", models.TextField()),
                        ("recorded_at", models.FloatField()),
                        ("hash", models.BinaryField()),
                    ],
                    options={
                        "constraints": [
                            models.UniqueConstraint(
                                fields=("stream", "version"), name="eventstore_stream_version"
                            )
                        ],
                    },
                ),
                migrations.CreateModel(
                    name="Head",
                    fields=[
                        ("id", models.IntegerField(primary_key=True, serialize=False)),
                        ("position", models.BigIntegerField()),
                        ("hash", models.BinaryField()),
                    ],
                ),
                migrations.CreateModel(
                    name="IdempotencyKey",
                    fields=[
                        ("key", models.TextField(primary_key=True, serialize=False)),
                        ("body_hash", models.TextField()),
                        ("status", models.IntegerField()),
                        ("body", models.BinaryField()),
                        ("position", models.BigIntegerField()),
                        ("used_at", models.FloatField(db_index=True)),
                    ],
                ),
                migrations.CreateModel(
                    name="Lease",
                    fields=[
                        ("name", models.TextField(primary_key=True, serialize=False)),
                        ("holder", models.TextField()),
                        ("epoch", models.BigIntegerField()),
                        ("expires_at", models.FloatField()),
                    ],
                ),
            ],
        ),
    )
