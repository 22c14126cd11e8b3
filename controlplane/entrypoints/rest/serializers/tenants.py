"""Tenants, their keys and budgets."""

from typing import Any

from rest_framework import serializers

from controlplane.domain.budget import PERIODS, UNITS
from controlplane.domain.budget import SCOPES as SCOPES_OF_BUDGETS
from controlplane.domain.policy import ALL_SCOPES, ROLES
from controlplane.domain.tenant import TIERS
from controlplane.entrypoints.rest.fields import (
    Body,
    Boolean,
    Choice,
    Known,
    KnownTexts,
    Number,
    Order,
    Text,
    Texts,
)
from controlplane.entrypoints.rest.serializers.common import ListQuery, ReceiptSerializer


class BudgetRuleSerializer(serializers.Serializer[Any]):
    """Amounts are texts: tokens in digits, money as a decimal."""

    budget_id = serializers.CharField()
    scope = serializers.ChoiceField(SCOPES_OF_BUDGETS)
    target = serializers.CharField(help_text="The key (a record's subject) or model; else empty.")
    unit = serializers.ChoiceField(UNITS)
    limit = serializers.CharField()
    period = serializers.ChoiceField(PERIODS)


class BudgetSerializer(BudgetRuleSerializer):
    """``limit`` = ``spent`` + ``reserved`` + ``remaining``, unless it was lowered below the two."""

    spent = serializers.CharField(help_text="By finished requests of this period.")
    reserved = serializers.CharField(help_text="The most that running requests may still use.")
    remaining = serializers.CharField()
    forgiven = serializers.CharField(help_text="Spent before the reset, and not counted.")


class TenantSerializer(serializers.Serializer[Any]):
    tenant_id = serializers.CharField()
    name = serializers.CharField()
    tier = serializers.ChoiceField(TIERS)
    suspended = serializers.BooleanField()
    suspended_reason = serializers.CharField()
    budgets = BudgetRuleSerializer(many=True)
    num_keys = serializers.IntegerField(help_text="Live ones.")
    captures_text = serializers.BooleanField(
        help_text="Prompts and answers are kept, encrypted: only if the tenant opted in."
    )
    created_at = serializers.FloatField()


class TenantOrder(Order):
    name = Text()
    tier = Known(TIERS, required=False, default="standard")


class TenantChange(Order):
    tier = Known(TIERS)


class CaptureOrder(Order):
    captures_text = Boolean()


class ErasureOrder(Body):
    """Why is required: what is erased is never read again."""

    reason = Text(max_length=500, help_text="Kept in the audit.")


class SaidSerializer(serializers.Serializer[Any]):
    role = serializers.CharField(help_text="A message's; or prompt, or tokens.")
    text = serializers.CharField()


class RequestTextSerializer(serializers.Serializer[Any]):
    request_id = serializers.CharField()
    tenant_id = serializers.CharField()
    endpoint = serializers.CharField()
    prompt = SaidSerializer(many=True)
    answers = serializers.ListField(child=serializers.CharField(), help_text="One a choice.")
    truncated = serializers.ListField(
        child=serializers.ChoiceField(("prompt", "answers")),
        help_text="What was longer than the 128 KiB that are kept of each.",
    )


class TenantQuery(ListQuery):
    tier = Choice(TIERS, required=False)


class BudgetOrder(Order):
    """What is left out means: of the whole tenant, in tokens, each month."""

    scope = Known(SCOPES_OF_BUDGETS, required=False, default="tenant")
    target = Text(required=False, default="", allow_blank=True, max_length=255)
    unit = Known(UNITS, required=False, default="tokens")
    limit = Text(max_length=40, help_text='Tokens like "1000000", or money like "12.50".')
    period = Known(PERIODS, required=False, default="month")


class BudgetQuery(ListQuery):
    """With ``subject`` or ``model``, only those that a request of the two would have to fit."""

    subject = Text(required=False, max_length=255, help_text="Key id, jwt:<sub> or user:<name>.")
    model = Text(required=False, max_length=63)


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
    applies = BudgetRuleSerializer(
        many=True, help_text="The budgets its requests must fit, all of them."
    )


class KeyOrder(Order):
    name = Text(max_length=200)
    role = Choice(ROLES, required=False, default="developer")
    scopes = KnownTexts(
        ALL_SCOPES,
        required=False,
        allow_empty=False,
        help_text="What it is for; left out: inference.",
    )
    models = Texts(required=False, help_text="Names the key may ask for; none means all.")
    expires_at = Number(required=False, allow_null=True)


class RotateOrder(Order):
    previous_valid_until = Number(
        required=False, help_text="When the old secret ends, 0 for at once; left out: in 24 hours."
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
    role = serializers.ChoiceField(ROLES)
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
