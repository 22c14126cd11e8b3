from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("readmodel", "0008_guarantee"),
    ]

    operations = [
        migrations.AddField(
            model_name="tenant",
            name="captures_text",
            field=models.BooleanField(default=False),
        ),
        migrations.AddField(
            model_name="tenant",
            name="text_generation",
            field=models.IntegerField(default=0),
        ),
    ]
