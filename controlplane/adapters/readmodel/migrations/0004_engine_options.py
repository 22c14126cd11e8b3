from django.db import migrations, models


class Migration(migrations.Migration):
    """The rows are made again by the projection's new version; until then they say "none"."""

    dependencies = [("readmodel", "0003_keys")]

    operations = [
        migrations.AddField(
            "version", "speculation", models.TextField(default="none"), preserve_default=False
        ),
        migrations.AddField("version", "swap_bytes", models.BigIntegerField(null=True)),
        migrations.AddField(
            "version", "disaggregation", models.TextField(default="none"), preserve_default=False
        ),
    ]
