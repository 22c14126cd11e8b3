"""The tables of the log, for migrations and for reading by hand; the store itself speaks SQL."""

from django.db import models


class Event(models.Model):
    """One fact. Database triggers refuse to change or delete it."""

    position = models.BigIntegerField(primary_key=True)
    stream = models.TextField()
    version = models.BigIntegerField()
    type = models.TextField()
    schema_version = models.IntegerField()
    data = models.BinaryField()
    actor = models.TextField()
    correlation_id = models.TextField()
    causation_id = models.TextField()
    address = models.TextField()
    reason = models.TextField()
    recorded_at = models.FloatField()
    hash = models.BinaryField()

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["stream", "version"], name="eventstore_stream_version"),
        )


class Head(models.Model):
    """One row: the last position and its hash. Every append locks it, which orders commits."""

    id = models.IntegerField(primary_key=True)
    position = models.BigIntegerField()
    hash = models.BinaryField()


class IdempotencyKey(models.Model):
    """A caller's key, what it was used for, and what was answered; forgotten after 24 h."""

    key = models.TextField(primary_key=True)
    body_hash = models.TextField()
    status = models.IntegerField()
    body = models.BinaryField()
    position = models.BigIntegerField()
    used_at = models.FloatField(db_index=True)


class Lease(models.Model):
    """Who leads what, until when; the epoch grows with each change of holder."""

    name = models.TextField(primary_key=True)
    holder = models.TextField()
    epoch = models.BigIntegerField()
    expires_at = models.FloatField()
