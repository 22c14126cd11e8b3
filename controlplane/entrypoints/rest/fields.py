"""Serializer fields that take a value only in its own JSON type, and name every unknown field.

DRF's own fields read ``"12"``, ``1.0`` and ``true`` as integers and drop what they do not know;
here each is a 400 with a pointer to the place.
"""

import re
from collections.abc import Mapping
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.exceptions import ErrorDetail, ValidationError

from controlplane.application.catalog_file import memory_bytes
from controlplane.domain.audit import redacted
from controlplane.domain.errors import Invalid

_INTEGER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_DECIMAL = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,9})?", re.ASCII)
MAX_POSITION = 2**63 - 1


def refuse(code: str, detail: str) -> ValidationError:
    return ValidationError([ErrorDetail(detail, code=code)])


def _of_type(value: Any, kinds: type | tuple[type, ...], name: str, code: str) -> Any:
    if isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool)):
        return value
    raise refuse(code, f"Must be {name}.")


class Text(serializers.CharField):
    def __init__(self, **options: Any) -> None:
        super().__init__(trim_whitespace=False, **options)

    def to_internal_value(self, data: Any) -> str:
        return super().to_internal_value(_of_type(data, str, "a string", "invalid_type"))


class Reason(Text):
    """Why somebody wants it, for the audit; a key or token pasted into it is not kept."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=500, required=False, **options)

    def to_internal_value(self, data: Any) -> str:
        return redacted(super().to_internal_value(data))


class Choice(serializers.ChoiceField):
    def to_internal_value(self, data: Any) -> Any:
        return super().to_internal_value(_of_type(data, str, "a string", "invalid_type"))


class Known(serializers.ChoiceField):
    """A text out of a few, which the description lists; another one is for the domain to refuse,
    with its own code and sentence."""

    def __init__(self, choices: Any, **options: Any) -> None:
        super().__init__(choices, **options)
        self._text = Text(max_length=200)

    def to_internal_value(self, data: Any) -> str:
        return str(self._text.run_validation(data))


class Integer(serializers.IntegerField):
    def to_internal_value(self, data: Any) -> int:
        return int(_of_type(data, int, "an integer", "invalid_type"))


class Number(serializers.FloatField):
    def to_internal_value(self, data: Any) -> float:
        return float(_of_type(data, (int, float), "a number", "invalid_type"))


class Boolean(serializers.BooleanField):
    def to_internal_value(self, data: Any) -> bool:
        return bool(_of_type(data, bool, "true or false", "invalid_type"))


class Texts(serializers.ListField):
    """A list of at most 100 strings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(child=Text(max_length=200), max_length=100, **options)

    def to_internal_value(self, data: Any) -> list[str]:
        return list(super().to_internal_value(_of_type(data, list, "a list", "invalid_type")))


class KnownTexts(serializers.ListField):
    """``Texts`` out of a few, which the description lists."""

    def __init__(self, choices: Any, **options: Any) -> None:
        super().__init__(child=Known(choices), max_length=100, **options)

    def to_internal_value(self, data: Any) -> list[str]:
        return list(super().to_internal_value(_of_type(data, list, "a list", "invalid_type")))


@extend_schema_field(
    {
        "oneOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)? *([KMGT]i?B|B)$"},
        ]
    }
)
class Memory(serializers.Field[int, Any, int, Any]):
    """Bytes, or a text like ``1.5GiB``, as in the YAML of models."""

    def __init__(self, param: str, **options: Any) -> None:
        super().__init__(**options)
        self.param = param

    def to_internal_value(self, data: Any) -> int:
        value = _of_type(
            data, (int, str), "a number of bytes, or a text like 1.5GiB", "invalid_type"
        )
        try:
            return memory_bytes(value, self.param)
        except Invalid as error:
            raise refuse(error.code, error.message) from None

    def to_representation(self, value: int) -> int:
        return value


class Body(serializers.Serializer[Any]):
    """A request body: an object with known fields only."""

    unknown_code = "unknown_field"

    def to_internal_value(self, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValidationError(
                {"non_field_errors": [ErrorDetail("Must be an object.", code="invalid_type")]}
            )
        self._refuse_unknown(data)
        return super().to_internal_value(data)

    def _refuse_unknown(self, data: Mapping[str, Any]) -> None:
        known = {name for name, field in self.fields.items() if not field.read_only}
        unknown = sorted(set(data) - known)
        if unknown:
            detail = f"Unknown; known are {', '.join(sorted(known)) or 'none'}."
            error = ErrorDetail(detail, code=self.unknown_code)
            raise ValidationError({name[:100]: [error] for name in unknown[:20]})


class Order(Body):
    """A body that changes something; ``reason`` is kept in the event for the audit."""

    reason = Reason(allow_blank=True, help_text="Kept in the audit.")


class ReasonOrder(Order):
    """An order that says no more than why; empty if it does not."""

    reason = Reason(allow_blank=True, default="")


class Query(Body):
    """The query string of a read, as an allowlist; ``limit`` has its own code."""

    unknown_code = "unknown_filter"


class QueryInteger(serializers.IntegerField):
    """ASCII digits only; anything else, or out of range, is ``code``."""

    def __init__(self, code: str, low: int, high: int, **options: Any) -> None:
        super().__init__(min_value=low, max_value=high, **options)
        self.code, self.low, self.high = code, low, high

    def to_internal_value(self, data: Any) -> int:
        value = int(data) if _INTEGER.fullmatch(str(data)) else self.low - 1
        if not self.low <= value <= self.high:
            raise refuse(self.code, f"An integer from {self.low} to {self.high}.")
        return value


class QueryNumber(serializers.FloatField):
    """A plain decimal number; anything else is ``invalid_number``."""

    def to_internal_value(self, data: Any) -> float:
        if not _DECIMAL.fullmatch(str(data)):
            raise refuse("invalid_number", "A number, such as 1700000000.5.")
        return float(data)


def limit_field(default: int = 100, high: int = 1000) -> QueryInteger:
    return QueryInteger("invalid_limit", 1, high, required=False, default=default)


def position_field(code: str = "invalid_cursor", **options: Any) -> QueryInteger:
    return QueryInteger(code, 0, MAX_POSITION, required=False, **options)
