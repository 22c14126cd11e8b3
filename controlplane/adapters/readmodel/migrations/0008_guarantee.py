from django.db import migrations, models


class Migration(migrations.Migration):
    """The rows are made again by the projection's new version; nothing was promised before."""

    dependencies = [("readmodel", "0007_history")]

    operations = [
        migrations.AddField(
            "version", "guaranteed_percent", models.IntegerField(default=0), preserve_default=False
        ),
    ]
