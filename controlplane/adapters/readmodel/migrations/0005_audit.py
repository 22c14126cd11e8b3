"""What an order changed, and what a refused one asked for; filled by the rebuild."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("readmodel", "0004_engine_options")]

    operations = [
        migrations.AddField(
            "auditentry", name, models.JSONField(default=dict), preserve_default=False
        )
        for name in ("before", "after", "asked")
    ] + [
        migrations.AddField(
            "auditentry", "detail", models.TextField(default=""), preserve_default=False
        )
    ]
