"""Usage by what budgets ask for, instead of by version: counted again from the records."""

from collections import Counter
from typing import Any

from django.db import migrations, models

PICO_PER_MILLI = 10**9


def _count_by_scope(apps: Any, schema_editor: Any) -> None:
    _count(
        apps,
        schema_editor,
        lambda row: [
            {"tenant_id": row.tenant_id, "scope": scope, "target": target, "day": row.day}
            for scope, target in (
                ("tenant", ""),
                ("key", row.subject),
                ("model", row.version_id.partition("@")[0]),
            )
        ],
    )


def _count_by_version(apps: Any, schema_editor: Any) -> None:
    _count(
        apps,
        schema_editor,
        lambda row: [{"tenant_id": row.tenant_id, "version_id": row.version_id, "day": row.day}],
    )


def _count(apps: Any, schema_editor: Any, keys_of: Any) -> None:
    alias = schema_editor.connection.alias
    usage = apps.get_model("ledger", "Usage")
    ended = apps.get_model("ledger", "InferenceRequest").objects.using(alias).exclude(outcome="")
    totals: dict[tuple[tuple[str, str], ...], Counter[str]] = {}
    for row in ended.iterator(chunk_size=2000):
        for key in keys_of(row):
            total = totals.setdefault(tuple(sorted(key.items())), Counter())
            total["num_requests"] += 1
            total["num_prompt_tokens"] += row.num_prompt_tokens
            total["num_output_tokens"] += row.num_output_tokens
            total["price"] += row.price
    rows = []
    for key, total in totals.items():
        milli, pico = divmod(total.pop("price", 0), PICO_PER_MILLI)
        rows.append(usage(**dict(key), **total, price_milli=milli, price_pico=pico))
    usage.objects.using(alias).bulk_create(rows, batch_size=500)


def _usage(key: list[tuple[str, Any]], fields: tuple[str, ...]) -> Any:
    counter = "num_requests", "num_prompt_tokens", "num_output_tokens"
    priced = "price_milli", "price_pico"
    identity = models.BigAutoField(
        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
    )
    return migrations.CreateModel(
        name="Usage",
        fields=[
            ("id", identity),
            *key,
            *((name, models.BigIntegerField(default=0)) for name in counter),
            *((name, models.BigIntegerField(default=0, db_default=0)) for name in priced),
        ],
        options={
            "db_table": "ledger_usage",
            "constraints": [models.UniqueConstraint(fields=fields, name="ledger_usage_one_row")],
        },
    )


class Migration(migrations.Migration):
    dependencies = [("ledger", "0003_seal")]

    operations = [
        migrations.AddField(
            model_name="inferencerequest",
            name="reserved_price",
            field=models.BigIntegerField(default=0, db_default=0),
        ),
        migrations.RunPython(migrations.RunPython.noop, _count_by_version),
        migrations.DeleteModel("Usage"),
        _usage(
            [
                ("tenant_id", models.CharField(max_length=63)),
                ("scope", models.CharField(max_length=8)),
                ("target", models.CharField(max_length=255)),
                ("day", models.CharField(max_length=10)),
            ],
            ("tenant_id", "scope", "target", "day"),
        ),
        migrations.RunPython(_count_by_scope, migrations.RunPython.noop),
    ]
