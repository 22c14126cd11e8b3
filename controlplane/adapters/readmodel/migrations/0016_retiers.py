from django.db import migrations, models


class Migration(migrations.Migration):
    """The rows are made again by the projections' new versions."""

    dependencies = [("readmodel", "0015_stuck")]

    operations = [
        migrations.AddField("replica", "tier_since", models.FloatField(default=0.0)),
        migrations.AddField("replica", "tier_reason", models.TextField(default="")),
        migrations.AddField("decision", "retiered", models.JSONField(default=list)),
    ]
