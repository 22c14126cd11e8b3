"""Every HTTP address of the web process. A test fails on one without an access rule."""

from django.conf import settings
from django.urls import URLPattern, URLResolver, include, path, re_path

from controlplane.entrypoints.rest import health, spa


def oidc() -> list[URLPattern | URLResolver]:
    """Signing in by OpenID Connect, where it is configured."""
    if not settings.ENV.oidc_issuer:
        return []
    return [path("sso/", include("controlplane.entrypoints.oidc.urls"))]


urlpatterns: list[URLPattern | URLResolver] = [
    path("api/v1/", include("controlplane.entrypoints.rest.urls")),
    re_path("^api/schema/?$", health.Schema.as_view(), name="schema"),
    re_path("^api/docs/?$", health.Docs.as_view(url_name="schema"), name="docs"),
    path("livez", health.livez),
    path("readyz", health.readyz),
    path("metrics", health.Metrics.as_view()),
    *oidc(),
    path("", spa.index),
    re_path(r"^(?P<path>.*)$", spa.index),
]
handler400 = "controlplane.entrypoints.rest.problems.bad_request"
handler404 = "controlplane.entrypoints.rest.spa.not_found"
handler500 = "controlplane.entrypoints.rest.problems.server_error"
