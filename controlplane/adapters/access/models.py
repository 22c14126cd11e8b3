"""Erasable secrets and the people who log in. Nothing here is ever copied into the event log."""

from django.conf import settings
from django.db import models

from controlplane.domain.policy import ROLES


class ApiKeySecret(models.Model):
    """What is needed to recognise one secret of an API key; times are Unix seconds (UTC)."""

    secret_id = models.CharField(max_length=32, primary_key=True)
    key_id = models.CharField(max_length=32)
    tenant_id = models.CharField(max_length=63, db_index=True)
    hash = models.CharField(max_length=64)
    last_used_at = models.FloatField(null=True)

    class Meta:
        indexes = (models.Index(fields=("key_id",), name="access_secret_of_key"),)


class TextKeyRow(models.Model):
    """A tenant's data key of one generation (see ``text_keys``), wrapped; empty once destroyed."""

    key_id = models.CharField(max_length=80, primary_key=True)  # tenant and generation
    tenant_id = models.CharField(max_length=63, db_index=True)
    generation = models.IntegerField()
    wrapped = models.BinaryField()
    created_at = models.FloatField()
    destroyed_at = models.FloatField(null=True)


class DashboardUser(models.Model):
    """The role of a Django user; ``tenant_id`` empty means all tenants and the fleet."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL,
        on_delete=models.CASCADE,
        related_name="dashboard",
        primary_key=True,
    )
    role = models.CharField(max_length=16, choices=[(role, role) for role in ROLES])
    tenant_id = models.CharField(max_length=63, blank=True, default="")


class LoginFailures(models.Model):
    """Failed logins of one user name from one address since ``since`` (Unix seconds)."""

    who = models.CharField(max_length=64, primary_key=True)
    count = models.PositiveIntegerField(default=0)
    since = models.FloatField()
