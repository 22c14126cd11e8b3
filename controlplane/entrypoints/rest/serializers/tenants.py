"""Tenants, their keys and budgets."""

from typing import Any

from rest_framework import serializers

from controlplane.domain.policy import ALL_SCOPES, ROLES
from controlplane.domain.tenant import TIERS
from controlplane.entrypoints.rest.fields import (
    Choice,
    Integer,
    Number,
    Order,
    Text,
    Texts,
)
from controlplane.entrypoints.rest.serializers.common import ListQuery, ReceiptSerializer

PERIODS = ("day", "month", "total")


class TenantSerializer(serializers.Serializer[Any]):
    tenant_id = serializers.CharField()
    name = serializers.CharField()
    tier = serializers.ChoiceField(TIERS)
    suspended = serializers.BooleanField()
    suspended_reason = serializers.CharField()
    budget_tokens = serializers.IntegerField(allow_null=True)
    budget_period = serializers.ChoiceField(PERIODS)
    num_keys = serializers.IntegerField(help_text="Live ones.")
    created_at = serializers.FloatField()


class TenantOrder(Order):
    name = Text()
    tier = Text(required=False, default="standard")


class TenantChange(Order):
    tier = Text()


class SuspendOrder(Order):
    reason = Text(required=False, max_length=500, allow_blank=True, default="")


class TenantQuery(ListQuery):
    tier = Choice(TIERS, required=False)


class BudgetSerializer(serializers.Serializer[Any]):
    tokens = serializers.IntegerField(allow_null=True, help_text="Null: no budget.")
    period = serializers.ChoiceField(PERIODS)
    spent = serializers.IntegerField(help_text="Tokens of finished requests this period.")
    reserved = serializers.IntegerField(help_text="Tokens held for running requests.")
    remaining = serializers.IntegerField(allow_null=True)


class BudgetOrder(Order):
    tokens = Integer(type_code="invalid_budget", allow_null=True)
    period = Text(required=False, default="month")


class KeySerializer(serializers.Serializer[Any]):
    key_id = serializers.CharField()
    tenant_id = serializers.CharField()
    name = serializers.CharField()
    last4 = serializers.CharField()
    scopes = serializers.ListField(child=serializers.ChoiceField(ALL_SCOPES))
    role = serializers.ChoiceField(ROLES)
    models = serializers.ListField(child=serializers.CharField(), help_text="Empty: all.")
    expires_at = serializers.FloatField(allow_null=True)
    suspended = serializers.BooleanField()
    suspended_reason = serializers.CharField()
    revoked = serializers.BooleanField()
    created_at = serializers.FloatField()
    rotated_at = serializers.FloatField(allow_null=True)
    last_used_at = serializers.FloatField(
        allow_null=True, help_text="Of the newest secret; written at most once a minute."
    )
    previous_valid_until = serializers.FloatField(
        allow_null=True, help_text="Until when the secret before the newest is good; null: none."
    )
    previous_last_used_at = serializers.FloatField(allow_null=True)


class KeyOrder(Order):
    name = Text(max_length=200)
    role = Text(required=False, default="developer")
    scopes = Texts(required=False)
    models = Texts(required=False, help_text="Names the key may ask for; none means all.")
    expires_at = Number(required=False, allow_null=True)


class RotateOrder(Order):
    previous_valid_until = Number(
        required=False, help_text="When the old secret ends; left out: in 24 hours."
    )


class IssuedKeySerializer(ReceiptSerializer):
    """``secret`` is shown this once; a replay by Idempotency-Key says null."""

    key_id = serializers.CharField()
    secret = serializers.CharField(allow_null=True)
    last4 = serializers.CharField()


class KeyQuery(ListQuery):
    revoked = serializers.BooleanField(required=False, allow_null=True, default=None)


class TicketOrder(Order):
    tenant = Text()


class TicketSerializer(serializers.Serializer[Any]):
    ticket = serializers.CharField()
    expires_at = serializers.FloatField()
    gateway_url = serializers.CharField()


class LoginOrder(Order):
    username = Text(max_length=150)
    password = Text(max_length=1000)


class SessionSerializer(serializers.Serializer[Any]):
    username = serializers.CharField()
    role = serializers.CharField()
    tenant_id = serializers.CharField(allow_blank=True, help_text="Empty: the whole fleet.")
    csrf_token = serializers.CharField()


class SignInMethodSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    url = serializers.CharField(help_text="Where the browser goes.")


class SignInMethodsSerializer(serializers.Serializer[Any]):
    """Besides user name and password."""

    methods = SignInMethodSerializer(many=True)


class StatusSerializer(serializers.Serializer[Any]):
    position = serializers.IntegerField(help_text="Of the read model.")
    head = serializers.IntegerField(help_text="Of the log.")
    projection_lag = serializers.IntegerField(help_text="Events between the two.")
    leader = serializers.CharField(allow_null=True, help_text="Holder of the controller's lease.")
    gateway_url = serializers.CharField()
    version = serializers.CharField()
    cluster_id = serializers.CharField()
    currency = serializers.CharField(help_text="Of all prices and amounts.")
    ready = serializers.BooleanField()
