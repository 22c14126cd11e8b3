"""The event log's Django application."""

from django.apps import AppConfig


class EventStoreConfig(AppConfig):
    name = "controlplane.adapters.eventstore"
    label = "eventstore"
