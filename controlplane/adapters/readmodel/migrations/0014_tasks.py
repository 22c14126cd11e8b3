from django.db import migrations, models


class Migration(migrations.Migration):
    """The rows are made again by the projection's new version."""

    dependencies = [("readmodel", "0013_engine")]

    operations = [
        migrations.AddField("version", "task", models.TextField(default="generate")),
        migrations.AddField("version", "max_inputs", models.IntegerField(default=2048)),
    ]
