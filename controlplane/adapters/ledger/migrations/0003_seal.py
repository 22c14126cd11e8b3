"""Checkpoints, tiles and keys of the sealed logs, and what keeps checkpoints unchanged."""

from django.db import migrations, models

from controlplane.adapters.ledger import guards


class Migration(migrations.Migration):
    dependencies = [
        ("ledger", "0002_price"),
    ]

    operations = [
        migrations.CreateModel(
            name="SealingKey",
            fields=[
                ("line", models.CharField(max_length=255, primary_key=True, serialize=False)),
                ("at", models.FloatField()),
            ],
            options={
                "db_table": "ledger_sealing_key",
            },
        ),
        migrations.CreateModel(
            name="Verification",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("at", models.FloatField()),
                ("actor", models.CharField(max_length=255)),
                ("intact", models.BooleanField()),
                ("report", models.TextField()),
            ],
            options={
                "db_table": "ledger_verification",
            },
        ),
        migrations.CreateModel(
            name="Checkpoint",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("log", models.CharField(max_length=16)),
                ("first", models.BigIntegerField()),
                ("size", models.BigIntegerField()),
                ("note", models.TextField()),
                ("archive", models.TextField(default="")),
            ],
            options={
                "db_table": "ledger_checkpoint",
                "constraints": [
                    models.UniqueConstraint(fields=("log", "size"), name="ledger_checkpoint_size"),
                    models.UniqueConstraint(
                        fields=("log", "first"), name="ledger_checkpoint_first"
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Tile",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("log", models.CharField(max_length=16)),
                ("level", models.IntegerField()),
                ("index", models.BigIntegerField()),
                ("hashes", models.BinaryField()),
            ],
            options={
                "db_table": "ledger_tile",
                "constraints": [
                    models.UniqueConstraint(
                        fields=("log", "level", "index"), name="ledger_tile_place"
                    )
                ],
            },
        ),
        migrations.RunPython(guards.create, migrations.RunPython.noop),
    ]
