"""The read model's tables: one model for each row class of ``controlplane.projections``.

Fields have the rows' names. Only the projector writes here; everybody else reads. No foreign keys:
rows come in the order of the log, and a reader joins by id.
"""

from django.db import models


class Tenant(models.Model):
    tenant_id = models.TextField(primary_key=True)
    name = models.TextField()
    tier = models.TextField()
    created_at = models.FloatField()
    version = models.BigIntegerField()
    suspended = models.BooleanField()
    suspended_reason = models.TextField()
    budgets = models.JSONField(default=list)
    num_keys = models.IntegerField()
    captures_text = models.BooleanField(default=False)
    text_generation = models.IntegerField(default=0)


class ApiKey(models.Model):
    key_id = models.TextField(primary_key=True)
    tenant_id = models.TextField(db_index=True)
    name = models.TextField()
    last4 = models.TextField()
    scopes = models.JSONField()
    expires_at = models.FloatField(null=True)
    created_at = models.FloatField()
    role = models.TextField()
    secret_id = models.TextField()
    previous_secret_id = models.TextField()
    previous_until = models.FloatField()
    rotated_at = models.FloatField(null=True)
    suspended = models.BooleanField()
    suspended_reason = models.TextField()
    revoked = models.BooleanField()
    revoked_at = models.FloatField(null=True)
    models = models.JSONField()  # last, since from here on the name means this


class Model(models.Model):
    name = models.TextField(primary_key=True)
    created_at = models.FloatField()
    version = models.BigIntegerField()
    default_version = models.TextField(null=True)
    chosen_default = models.TextField()
    aliases = models.JSONField()
    access = models.JSONField()


class Version(models.Model):
    version_id = models.TextField(primary_key=True)
    model = models.TextField(db_index=True)
    version = models.TextField()
    source = models.TextField()
    format = models.TextField()
    sha256 = models.TextField()
    gpu_memory = models.BigIntegerField()
    tensor_parallel = models.IntegerField()
    max_batch = models.IntegerField()
    max_prompt_tokens = models.IntegerField()
    max_output_tokens = models.IntegerField()
    quantization = models.TextField()
    kv_cache_dtype = models.TextField()
    priority = models.TextField()
    min_replicas = models.IntegerField()
    max_replicas = models.IntegerField()
    policy = models.TextField()
    colocation = models.JSONField()
    draft_model = models.TextField()
    speculation = models.TextField()
    swap_bytes = models.BigIntegerField(null=True)
    disaggregation = models.TextField()
    guaranteed_percent = models.IntegerField()
    needs = models.JSONField(default=dict)
    residency = models.TextField(default="resident")
    engine = models.TextField(default="builtin")
    task = models.TextField(default="generate")
    max_inputs = models.IntegerField(default=2048)
    created_at = models.FloatField()
    added_at_position = models.BigIntegerField()
    price = models.JSONField(default=dict)
    retired = models.BooleanField()
    status = models.TextField()
    ready_replicas = models.IntegerField()
    desired_replicas = models.IntegerField()
    reason = models.TextField()
    stuck_replicas = models.IntegerField(default=0)
    retry_at = models.FloatField(null=True)


class Alias(models.Model):
    alias = models.TextField(primary_key=True)
    model = models.TextField(db_index=True)
    created_at = models.FloatField()


class Route(models.Model):
    name = models.TextField(primary_key=True)
    arms = models.JSONField()
    sticky = models.BooleanField()
    created_at = models.FloatField()
    updated_at = models.FloatField()
    version = models.BigIntegerField()


class Node(models.Model):
    node_id = models.TextField(primary_key=True)
    status = models.TextField()
    zone = models.TextField()
    boot_id = models.TextField()
    devices = models.JSONField()
    host = models.JSONField(default=dict)
    joined_at = models.FloatField()
    last_seen = models.FloatField()
    version = models.BigIntegerField()
    draining = models.BooleanField()
    drain_reason = models.TextField()
    acked_generation = models.BigIntegerField()
    desired_generation = models.BigIntegerField()
    stuck_since = models.FloatField(null=True)
    stuck_code = models.TextField(default="")
    stuck_reason = models.TextField(default="")


class Replica(models.Model):
    replica_id = models.TextField(primary_key=True)
    version_id = models.TextField(db_index=True)
    node_id = models.TextField(db_index=True)
    device_index = models.IntegerField()
    memory_bytes = models.BigIntegerField()
    desired = models.BooleanField()
    generation = models.BigIntegerField()
    decision_id = models.TextField()
    since = models.FloatField()
    state = models.TextField()
    reason = models.TextField()
    acked = models.BooleanField()
    observed = models.TextField(null=True)
    weights_bytes = models.BigIntegerField()
    kv_bytes = models.BigIntegerField()
    peak_bytes = models.BigIntegerField()
    load_seconds = models.FloatField()
    sha256 = models.TextField()
    tier = models.TextField(default="resident")
    waiting = models.TextField(default="")
    stuck_since = models.FloatField(null=True)
    stuck_code = models.TextField(default="")
    stuck_reason = models.TextField(default="")
    tier_since = models.FloatField(default=0.0)
    tier_reason = models.TextField(default="")


class LoadFailure(models.Model):
    key = models.TextField(primary_key=True)
    node_id = models.TextField()
    version_id = models.TextField()
    code = models.TextField()
    detail = models.TextField()
    num_failures = models.IntegerField()
    at = models.FloatField()
    retry_at = models.FloatField(null=True)


class Unplaced(models.Model):
    version_id = models.TextField(primary_key=True)
    num_missing = models.IntegerField()
    code = models.TextField()
    reason = models.TextField()
    rejections = models.JSONField()
    decision_id = models.TextField()


class Decision(models.Model):
    decision_id = models.TextField(primary_key=True)
    generation = models.BigIntegerField()
    position = models.BigIntegerField(unique=True)
    planned_from = models.BigIntegerField()
    at = models.FloatField()
    actor = models.TextField()
    started = models.JSONField()
    stopped = models.JSONField()
    unplaced = models.JSONField()
    retiered = models.JSONField(default=list)


class DecisionAbout(models.Model):
    key = models.TextField(primary_key=True)
    version_id = models.TextField()
    position = models.BigIntegerField(db_index=True)  # a rebuild reads by stretches

    class Meta:
        indexes = (
            models.Index(fields=["version_id", "position"], name="readmodel_decision_about"),
        )


class Scaling(models.Model):
    position = models.BigIntegerField(primary_key=True)
    version_id = models.TextField(db_index=True)
    at = models.FloatField()
    before = models.IntegerField()
    after = models.IntegerField()
    code = models.TextField()
    reason = models.TextField()
    readings = models.JSONField()
    until = models.FloatField()


class Forecast(models.Model):
    position = models.BigIntegerField(primary_key=True)
    at = models.FloatField()
    until = models.FloatField()
    expected = models.JSONField()
    came = models.JSONField()


class Preload(models.Model):
    position = models.BigIntegerField(primary_key=True)
    version_id = models.TextField(db_index=True)
    at = models.FloatField()
    outcome = models.TextField()
    loaded_at = models.FloatField(null=True)
    num_requests = models.BigIntegerField()
    ahead_s = models.FloatField(null=True)
    wasted_s = models.FloatField()


class AuditEntry(models.Model):
    position = models.BigIntegerField(primary_key=True)
    at = models.FloatField()
    actor = models.TextField(db_index=True)
    address = models.TextField()
    action = models.TextField(db_index=True)
    target = models.TextField(db_index=True)
    outcome = models.TextField()
    code = models.TextField()
    detail = models.TextField()
    reason = models.TextField()
    correlation_id = models.TextField()
    before = models.JSONField()
    after = models.JSONField()
    asked = models.JSONField()
    undoes = models.BigIntegerField(null=True)


class Checkpoint(models.Model):
    """One row: how far the log has been projected, and by which versions of the projections.

    ``rebuilds`` counts, so that a projector notices that its rows in memory are of an older build.
    """

    id = models.IntegerField(primary_key=True)
    position = models.BigIntegerField()
    hash = models.BinaryField()
    rebuilds = models.IntegerField()
    projections = models.TextField()


class Snapshot(models.Model):
    """A whole state at a position, to fold on from; see ``timeline``. May be deleted at any time.

    ``made_by`` changes with the code, ``log_hash`` is that of the event at ``position``.
    """

    kind = models.TextField()
    position = models.BigIntegerField()
    made_by = models.TextField()
    log_hash = models.BinaryField()
    state_hash = models.TextField()
    body = models.BinaryField()

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["kind", "position"], name="readmodel_snapshot_position"
            ),
        )
