"""The tables of the inference ledger; ``store`` writes them, everyone else only reads.

A row of ``InferenceRequest`` is inserted at admission (the intent, which is also the reservation)
and completed exactly once (the terminal record). While ``outcome`` is empty the request is live
and what it reserves counts against the tenant's budgets, so a reservation cannot outlive its
request: there is no second row that could be left behind.
"""

from django.db import models
from django.db.models import Q


class InferenceRequest(models.Model):
    """Times are Unix seconds (UTC), ``*_ms`` milliseconds, all else token counts or names."""

    request_id = models.CharField(max_length=64, unique=True)
    tenant_id = models.CharField(max_length=63)
    subject = models.CharField(max_length=255)
    endpoint = models.CharField(max_length=32)
    requested_model = models.CharField(max_length=255)
    route = models.CharField(max_length=63)
    arm = models.CharField(max_length=63)
    version_id = models.CharField(max_length=127)
    latency_class = models.CharField(max_length=16)
    num_prompt_tokens = models.BigIntegerField()
    max_output_tokens = models.BigIntegerField()
    reserved_tokens = models.BigIntegerField()
    reserved_price = models.BigIntegerField(default=0, db_default=0)  # picodollars
    at = models.FloatField()
    day = models.CharField(max_length=10)
    gateway = models.CharField(max_length=127)
    # The ``user`` that the request named, as it came; empty if it named none.
    end_user = models.CharField(max_length=255, default="", db_default="")
    # The price it was admitted under, in picodollars per token (see ``domain.money``). These have
    # a default of the database, so that a gateway of the release before can still write its rows.
    price_input = models.BigIntegerField(default=0, db_default=0)
    price_cached_input = models.BigIntegerField(default=0, db_default=0)
    price_output = models.BigIntegerField(default=0, db_default=0)
    progress_tokens = models.BigIntegerField(default=0)
    # The terminal record; ``position`` counts terminal records without a gap, in commit order.
    position = models.BigIntegerField(null=True, unique=True)
    outcome = models.CharField(max_length=16, default="")
    finish_reason = models.CharField(max_length=32, default="")
    error_code = models.CharField(max_length=64, default="")
    node_id = models.CharField(max_length=63, default="")
    replica_id = models.CharField(max_length=255, default="")
    num_cached_tokens = models.BigIntegerField(default=0)
    num_output_tokens = models.BigIntegerField(default=0)
    price = models.BigIntegerField(default=0, db_default=0)  # of it all, in picodollars
    ttft_ms = models.FloatField(null=True)
    queue_ms = models.FloatField(null=True)
    duration_ms = models.FloatField(null=True)
    ended_at = models.FloatField(null=True)
    attempts = models.IntegerField(default=0)
    # SHA-256 (hex) of nonce and ciphertext of its captured text; empty if none was captured.
    text_hash = models.CharField(max_length=64, default="", db_default="")

    class Meta:
        db_table = "ledger_request"
        indexes = (
            models.Index(fields=("tenant_id", "id"), name="ledger_request_tenant"),
            models.Index(
                fields=("tenant_id",), name="ledger_request_live", condition=Q(outcome="")
            ),
            # For the list of requests: without them a rare value means reading the whole ledger.
            models.Index(fields=("version_id", "id"), name="ledger_request_version"),
            models.Index(fields=("requested_model", "id"), name="ledger_request_asked_for"),
            models.Index(fields=("outcome", "id"), name="ledger_request_outcome"),
        )


class Usage(models.Model):
    """What was used on the UTC ``day`` that requests were admitted, as budgets ask for it.

    ``scope`` and ``target`` are a budget's: the tenant's whole use, that of one key, of one model.
    """

    tenant_id = models.CharField(max_length=63)
    scope = models.CharField(max_length=8)
    target = models.CharField(max_length=255)
    day = models.CharField(max_length=10)
    num_requests = models.BigIntegerField(default=0)
    num_prompt_tokens = models.BigIntegerField(default=0)
    num_output_tokens = models.BigIntegerField(default=0)
    # Both parts of ``money.split``, added up apart.
    price_milli = models.BigIntegerField(default=0, db_default=0)
    price_pico = models.BigIntegerField(default=0, db_default=0)

    class Meta:
        db_table = "ledger_usage"
        constraints = (
            models.UniqueConstraint(
                fields=("tenant_id", "scope", "target", "day"), name="ledger_usage_one_row"
            ),
        )


class Attempt(models.Model):
    """One try of one choice of a request on one replica, written with the terminal record.

    Times are Unix seconds and milliseconds. Of a request whose gateway died there are those that
    the nodes still knew of.
    """

    request_id = models.CharField(max_length=64)
    position = models.BigIntegerField(db_index=True)  # of the terminal record
    choice = models.IntegerField()
    attempt = models.IntegerField()
    node_id = models.CharField(max_length=63)
    replica_id = models.CharField(max_length=255)
    outcome = models.CharField(max_length=16)
    error_code = models.CharField(max_length=64)
    num_cached_tokens = models.BigIntegerField()
    num_output_tokens = models.BigIntegerField()
    queue_ms = models.FloatField(null=True)
    started_at = models.FloatField()
    duration_ms = models.FloatField()

    class Meta:
        db_table = "ledger_attempt"


class Dispatch(models.Model):
    """Why a replica was chosen for an attempt, of requests that are explained; ``data`` is the JSON
    of a ``dispatch.record.Dispatch``, ``position`` that of the terminal record it came with."""

    request_id = models.CharField(max_length=64)
    position = models.BigIntegerField(db_index=True)
    data = models.TextField()

    class Meta:
        db_table = "ledger_dispatch"


class CapturedText(models.Model):
    """What a request asked and was answered, encrypted under its tenant's key of ``generation``
    (see ``application.capture``); ``position`` is that of its terminal record."""

    request_id = models.CharField(max_length=64, unique=True)
    tenant_id = models.CharField(max_length=63)
    position = models.BigIntegerField(db_index=True)
    generation = models.IntegerField()
    nonce = models.BinaryField()
    ciphertext = models.BinaryField()
    at = models.FloatField(db_index=True)

    class Meta:
        db_table = "ledger_text"


class Rollup(models.Model):
    """Usage by all that one may ask for; see ``rollup``. ``hour`` counts hours since 1970, UTC."""

    tenant_id = models.CharField(max_length=63)
    hour = models.BigIntegerField()
    subject = models.CharField(max_length=255)
    end_user = models.CharField(max_length=255)
    version_id = models.CharField(max_length=127)
    route = models.CharField(max_length=63)
    arm = models.CharField(max_length=63)
    num_requests = models.BigIntegerField()
    num_failed = models.BigIntegerField()
    num_prompt_tokens = models.BigIntegerField()
    num_cached_tokens = models.BigIntegerField()
    num_output_tokens = models.BigIntegerField()
    price_milli = models.BigIntegerField()
    price_pico = models.BigIntegerField()

    class Meta:
        db_table = "ledger_rollup"
        constraints = (
            models.UniqueConstraint(
                fields=(
                    "tenant_id", "hour", "subject", "end_user", "version_id", "route", "arm"
                ),
                name="ledger_rollup_one_row",
            ),
        )  # fmt: skip
        indexes = (models.Index(fields=("hour",), name="ledger_rollup_hour"),)


class RollupHead(models.Model):
    """One row: the position of the last terminal record that the roll-ups hold."""

    position = models.BigIntegerField(default=0)

    class Meta:
        db_table = "ledger_rollup_head"


class Check(models.Model):
    """One row: what the last check of all totals found; see ``reconcile``."""

    at = models.FloatField()
    position = models.BigIntegerField()
    num_records = models.BigIntegerField()
    num_totals = models.BigIntegerField()
    num_differences = models.BigIntegerField()
    differences = models.JSONField()
    seconds = models.FloatField()

    class Meta:
        db_table = "ledger_check"


class Head(models.Model):
    """One row, the number of terminal records; its row lock puts settling processes in order."""

    position = models.BigIntegerField(default=0)

    class Meta:
        db_table = "ledger_head"


class Gateway(models.Model):
    """A gateway process; ``beat`` grows while it lives, whatever any clock says."""

    gateway = models.CharField(max_length=127, primary_key=True)
    host = models.CharField(max_length=127)
    pid = models.IntegerField()
    beat = models.BigIntegerField(default=0)

    class Meta:
        db_table = "ledger_gateway"


class Checkpoint(models.Model):
    """A sealed segment of a log and the signed note that seals it; never changed."""

    log = models.CharField(max_length=16)
    first = models.BigIntegerField()
    size = models.BigIntegerField()
    note = models.TextField()
    # The signed mark of a segment whose rows were put into an archive and removed here.
    archive = models.TextField(default="")

    class Meta:
        db_table = "ledger_checkpoint"
        constraints = (
            models.UniqueConstraint(fields=("log", "size"), name="ledger_checkpoint_size"),
            # Of two that seal at once one fails here.
            models.UniqueConstraint(fields=("log", "first"), name="ledger_checkpoint_first"),
        )


class Tile(models.Model):
    """Up to 256 hashes of a log's Merkle tree; see ``application.tiles``."""

    log = models.CharField(max_length=16)
    level = models.IntegerField()
    index = models.BigIntegerField()
    hashes = models.BinaryField()

    class Meta:
        db_table = "ledger_tile"
        constraints = (
            models.UniqueConstraint(fields=("log", "level", "index"), name="ledger_tile_place"),
        )


class SealingKey(models.Model):
    """A public key that has signed here, as ``notes`` writes it."""

    line = models.CharField(max_length=255, primary_key=True)
    at = models.FloatField()

    class Meta:
        db_table = "ledger_sealing_key"


class Verification(models.Model):
    """What a check of everything found; ``report`` is JSON."""

    at = models.FloatField()
    actor = models.CharField(max_length=255)
    intact = models.BooleanField()
    report = models.TextField()

    class Meta:
        db_table = "ledger_verification"
