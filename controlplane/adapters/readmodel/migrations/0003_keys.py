"""What API keys have since: a role, a list of models, two secrets, and a pause. The defaults only
fill the columns until the projections, whose versions have changed, are rebuilt."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("readmodel", "0002_price")]

    operations = [
        migrations.AddField("apikey", "role", models.TextField(default=""), preserve_default=False),
        migrations.AddField(
            "apikey", "models", models.JSONField(default=list), preserve_default=False
        ),
        migrations.AddField(
            "apikey", "secret_id", models.TextField(default=""), preserve_default=False
        ),
        migrations.AddField(
            "apikey", "previous_secret_id", models.TextField(default=""), preserve_default=False
        ),
        migrations.AddField(
            "apikey", "previous_until", models.FloatField(default=0.0), preserve_default=False
        ),
        migrations.AddField("apikey", "rotated_at", models.FloatField(null=True)),
        migrations.AddField(
            "apikey", "suspended", models.BooleanField(default=False), preserve_default=False
        ),
        migrations.AddField(
            "apikey", "suspended_reason", models.TextField(default=""), preserve_default=False
        ),
    ]
