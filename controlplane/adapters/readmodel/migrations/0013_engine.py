from django.db import migrations, models


class Migration(migrations.Migration):
    """The rows are made again by the projections' new versions."""

    dependencies = [("readmodel", "0012_tiers")]

    operations = [
        migrations.AddField("version", "engine", models.TextField(default="builtin")),
    ]
