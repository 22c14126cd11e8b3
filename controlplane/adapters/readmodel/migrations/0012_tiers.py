from django.db import migrations, models


class Migration(migrations.Migration):
    """The rows are made again by the projections' new versions."""

    dependencies = [("readmodel", "0011_needs")]

    operations = [
        migrations.AddField("version", "residency", models.TextField(default="resident")),
        migrations.AddField("replica", "tier", models.TextField(default="resident")),
    ]
