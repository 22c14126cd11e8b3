"""``/sso/oidc/login/`` sends the browser to the provider, ``…/callback/`` takes it back.

allauth's own pages (sign up, passwords, connections) are not served.
"""

from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView, OAuth2LoginView
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import re_path
from django.views.decorators.http import require_safe

from controlplane.entrypoints.oidc.adapter import OidcAdapter
from controlplane.entrypoints.rest.security import is_open

PROVIDER = "oidc"


@is_open
@require_safe
def login(request: HttpRequest, provider_id: str = PROVIDER) -> HttpResponseBase:
    answer: HttpResponseBase = OAuth2LoginView.adapter_view(OidcAdapter(request, provider_id))(
        request
    )
    return answer


@is_open
@require_safe
def callback(request: HttpRequest, provider_id: str = PROVIDER) -> HttpResponseBase:
    answer: HttpResponseBase = OAuth2CallbackView.adapter_view(OidcAdapter(request, provider_id))(
        request
    )
    return answer


# The names are those that allauth looks up; it always gives its own provider's id.
urlpatterns = [
    re_path(f"^(?P<provider_id>{PROVIDER})/login/$", login, name="openid_connect_login"),
    re_path(
        f"^(?P<provider_id>{PROVIDER})/login/callback/$", callback, name="openid_connect_callback"
    ),
]
