"""The read model's Django application: can be dropped and rebuilt from the log at any time."""

from django.apps import AppConfig


class ReadModelConfig(AppConfig):
    name = "controlplane.adapters.readmodel"
    label = "readmodel"
