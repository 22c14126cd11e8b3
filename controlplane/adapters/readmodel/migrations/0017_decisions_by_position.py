from django.db import migrations, models


class Migration(migrations.Migration):
    """A rebuild reads the decisions of a stretch of the log."""

    dependencies = [("readmodel", "0016_retiers")]

    operations = [
        migrations.AlterField("decisionabout", "position", models.BigIntegerField(db_index=True)),
    ]
