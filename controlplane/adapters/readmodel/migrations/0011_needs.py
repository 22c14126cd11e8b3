from django.db import migrations, models


class Migration(migrations.Migration):
    """The rows are made again by the projections' new versions."""

    dependencies = [("readmodel", "0010_demand")]

    operations = [
        migrations.AddField("version", "needs", models.JSONField(default=dict)),
        migrations.AddField("node", "host", models.JSONField(default=dict)),
    ]
