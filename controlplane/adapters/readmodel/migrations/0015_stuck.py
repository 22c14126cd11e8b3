from django.db import migrations, models

STUCK = (
    ("stuck_since", models.FloatField, {"null": True}),
    ("stuck_code", models.TextField, {"default": ""}),
    ("stuck_reason", models.TextField, {"default": ""}),
)


class Migration(migrations.Migration):
    """The rows are made again by the projections' new versions."""

    dependencies = [("readmodel", "0014_tasks")]

    operations = [
        *(
            migrations.AddField(table, name, kind(**options))
            for table in ("node", "replica")
            for name, kind, options in STUCK
        ),
        migrations.AddField("replica", "waiting", models.TextField(default="")),
        migrations.AddField("loadfailure", "retry_at", models.FloatField(null=True)),
        migrations.AddField("version", "stuck_replicas", models.IntegerField(default=0)),
        migrations.AddField("version", "retry_at", models.FloatField(null=True)),
    ]
