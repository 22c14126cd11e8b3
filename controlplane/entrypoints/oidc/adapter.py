"""Signing in to the dashboard by OpenID Connect: what we add to django-allauth, and what we refuse.

allauth does the dance (state, PKCE, the code for the token). Ours is the judgement::

    ID token  --signature, iss, aud, exp, owner: the same verifier as for bearer tokens-->  claims
    owner     --a tenant here, or the operators' own-->   what the user is confined to
    role      --ENGINE_OIDC_ROLE_CLAIM, ENGINE_OIDC_ROLES-->  the user's role, anew at each login
    sub       --allauth's account table-->                the user; a new one is made

allauth trusts an ID token that came from the token endpoint over TLS without checking who signed
it; here it is checked. A user made this way is named ``oidc:<name>`` and has no password, so no
name at the provider can take over a local user. Whoever is refused lands on the login page, which
says why, and the refusal is in the audit.
"""

import time
from functools import cache
from typing import Any
from urllib.parse import urlencode

import jwt
from allauth.account.adapter import DefaultAccountAdapter
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialLogin
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponseRedirect

from controlplane.adapters.access import users
from controlplane.adapters.access.issuers import IssuerConfig, KeySet, is_safe_url
from controlplane.adapters.access.jwt_tokens import BadToken, Claims, JwtVerifier
from controlplane.entrypoints.rest import auditing
from controlplane.entrypoints.rest.identity import tenant_state

SESSION_SECONDS = 12 * 3600
MAX_NAME = 100


class Refused(ImmediateHttpResponse):
    """Back to the login page, which says why."""

    def __init__(self, code: str) -> None:
        super().__init__(HttpResponseRedirect(f"/login?{urlencode({'error': code})}"))
        self.code = code


@cache
def verifier(issuer: str, jwks_url: str) -> JwtVerifier:
    """Of the provider's ID tokens; keeps its keys."""
    env = settings.ENV
    config = IssuerConfig(
        issuer=issuer,
        audience=env.oidc_client_id,
        algorithms=tuple(env.oidc_algorithms.split(",")),
        jwks_url=jwks_url,
        role_claim=env.oidc_role_claim,
        roles=env.oidc_role_map(),
    )
    return JwtVerifier([KeySet(config)])


class OidcAdapter(OpenIDConnectOAuth2Adapter):
    """allauth's, with an ID token that is verified."""

    def _decode_id_token(self, app: Any, id_token: str) -> dict[str, Any]:
        config = self.openid_config
        if config["issuer"].rstrip("/") != settings.ENV.oidc_issuer.rstrip("/"):
            raise OAuth2Error("the provider is another issuer")
        if not is_safe_url(config["jwks_uri"]):
            raise OAuth2Error("the provider's keys are not at a safe address")
        judge = verifier(config["issuer"], config["jwks_uri"])
        try:
            claims = judge.verify(id_token, time.time())
        except BadToken as error:
            raise OAuth2Error(error.code) from error
        believed: dict[str, Any] = jwt.decode(id_token, options={"verify_signature": False})
        return {**believed, "engine_claims": claims._asdict()}


class AccountAdapter(DefaultAccountAdapter):
    """Nobody signs up but through the provider, and a session ends the same day: what the provider
    takes away from a user is only seen at the next login."""

    def login(self, request: HttpRequest, user: User) -> None:
        super().login(request, user)
        request.session.set_expiry(SESSION_SECONDS)

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False


class SocialAdapter(DefaultSocialAccountAdapter):
    """Judges a login before it counts."""

    def on_authentication_error(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        self._refuse(request, "oidc_failed", "The provider's answer was not accepted.")

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        data = sociallogin.account.extra_data.get("id_token") or {}
        if "engine_claims" not in data or sociallogin.state.get("process") not in (None, "login"):
            self._refuse(request, "oidc_failed", "The provider sent no ID token.")
        claims = Claims(**data.pop("engine_claims"))
        role = claims.role if claims.scopes != ("inference",) else settings.ENV.oidc_default_role
        tenant_id = self._tenant(request, claims)
        if not role:
            self._refuse(request, "oidc_no_role", "The provider gives this user no role here.")
        user = self._user(request, sociallogin, data)
        self._save(request, user, role, tenant_id)
        if not sociallogin.is_existing:
            sociallogin.connect(request, user)
        name = user.get_username()
        auditing.signed_in(auditing.meta(request, f"user:{name}"), name, "oidc")

    def _tenant(self, request: HttpRequest, claims: Claims) -> str:
        owner = tenant_state(claims.owner)
        if not owner.exists or owner.deleted:
            self._refuse(request, "oidc_no_tenant", "The owner is no tenant of this installation.")
        return "" if claims.owner == settings.OPERATOR_TENANT else claims.owner

    def _user(self, request: HttpRequest, sociallogin: SocialLogin, data: dict[str, Any]) -> User:
        if sociallogin.is_existing:
            known: User = sociallogin.user
            return known
        name = str(data.get("preferred_username") or data.get("email") or data["sub"])
        username = f"oidc:{name}"
        if len(name) > MAX_NAME or not name.isprintable():
            self._refuse(request, "oidc_failed", "The provider's name for the user cannot be kept.")
        if User.objects.filter(username=username).exists():
            self._refuse(request, "oidc_name_taken", "Another user of the provider has this name.")
        made = User(username=username)
        made.set_unusable_password()
        made.save()
        return made

    def _save(self, request: HttpRequest, user: User, role: str, tenant_id: str) -> None:
        known = users.principal_of(user)
        if known is not None and (known.role, known.tenant_id) == (role, tenant_id):
            return
        meta = auditing.meta(request, f"oidc:{settings.ENV.oidc_issuer}")
        auditing.user_saved(meta, user.get_username(), role, tenant_id)
        users.save_role(user, role, tenant_id)

    def _refuse(self, request: HttpRequest, code: str, detail: str) -> None:
        auditing.refuse(auditing.meta(request, "anonymous"), "SignIn", "session", code, detail)
        raise Refused(code)
