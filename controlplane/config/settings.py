"""Django's settings, all derived from ``environment``."""

import secrets
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from controlplane.adapters.private_files import kept_private
from controlplane.application import failpoints
from controlplane.config.environment import environment
from controlplane.entrypoints.processes.command_help import needs_no_new_folder

ENV = environment()
BASE_DIR = Path(__file__).resolve().parents[2]
DATA_DIR = ENV.data_dir.resolve()
failpoints.arm(ENV.fail_at)


def _secret_key() -> str:
    """The configured key, or one made once and kept readable by this user only. A command that
    works on the data that there is, or on none, begins no folder for it: it signs nothing."""
    if ENV.secret_key:
        return ENV.secret_key
    if not DATA_DIR.exists() and needs_no_new_folder(sys.argv):
        return secrets.token_urlsafe(50)
    path = DATA_DIR / "secret_key"
    try:
        return kept_private(path, lambda: secrets.token_urlsafe(50))
    except OSError as error:
        sys.exit(f"{path} cannot be read or made ({error.strerror}): set ENGINE_SECRET_KEY.")


def _sqlite() -> dict[str, Any]:
    """Small pages: the write-ahead log takes whole ones, and an append changes three."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(DATA_DIR / "engine.sqlite3"),
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 5,
            "init_command": "PRAGMA page_size=2048; PRAGMA journal_mode=WAL; "
            "PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint=2000; "
            "PRAGMA foreign_keys=ON; PRAGMA busy_timeout=5000",
        },
    }


def _postgres(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "OPTIONS": {
            "options": "-c lock_timeout=2s -c idle_in_transaction_session_timeout=30s"
            " -c synchronous_commit=on"
        },
    }


SECRET_KEY = _secret_key()
DEBUG = ENV.debug
ALLOWED_HOSTS = ENV.hosts()
SQLITE = _sqlite()
DATABASES = {"default": _postgres(ENV.database_url) if ENV.database_url else SQLITE}

INSTALLED_APPS = [
    "daphne",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "channels",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "controlplane.adapters.eventstore",
    "controlplane.adapters.ledger",
    "controlplane.adapters.readmodel",
    "controlplane.adapters.access",
    "controlplane.entrypoints.processes",
]
MIDDLEWARE = [
    "controlplane.entrypoints.rest.middleware.identify",
    "controlplane.entrypoints.rest.middleware.secure",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
# Signing in by OpenID Connect: off, and not even loaded, unless there is a provider.
if ENV.oidc_issuer:
    ENV.oidc_role_map()
    INSTALLED_APPS += [
        "allauth",
        "allauth.account",
        "allauth.socialaccount",
        "allauth.socialaccount.providers.openid_connect",
    ]
    MIDDLEWARE.append("allauth.account.middleware.AccountMiddleware")
    ACCOUNT_ADAPTER = "controlplane.entrypoints.oidc.adapter.AccountAdapter"
    ACCOUNT_EMAIL_VERIFICATION = "none"
    ACCOUNT_DEFAULT_HTTP_PROTOCOL = "https" if ENV.https else "http"
    SOCIALACCOUNT_ADAPTER = "controlplane.entrypoints.oidc.adapter.SocialAdapter"
    SOCIALACCOUNT_LOGIN_ON_GET = True
    SOCIALACCOUNT_STORE_TOKENS = False
    LOGIN_REDIRECT_URL = "/"
    SOCIALACCOUNT_PROVIDERS = {
        "openid_connect": {
            "OAUTH_PKCE_ENABLED": True,
            "APPS": [
                {
                    "provider_id": "oidc",
                    "name": ENV.oidc_name,
                    "client_id": ENV.oidc_client_id,
                    "secret": ENV.oidc_client_secret,
                    "settings": {"server_url": ENV.oidc_issuer, "fetch_userinfo": False},
                }
            ],
        }
    }
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": ["django.template.context_processors.request"]},
    }
]
ROOT_URLCONF = "controlplane.config.urls"
ASGI_APPLICATION = "controlplane.config.asgi.web"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
STATIC_URL = "/static/"
WHITENOISE_USE_FINDERS = True
WHITENOISE_ALLOW_ALL_ORIGINS = False
PASSWORD_HASHERS = ["django.contrib.auth.hashers.Argon2PasswordHasher"]
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.core.RedisChannelLayer",
        "CONFIG": {"hosts": [ENV.redis_url]},
    }
    if ENV.redis_url
    else {"BACKEND": "channels.layers.InMemoryChannelLayer"}
}
SEALING_KEY = ENV.sealing_key
OPERATOR_TENANT = ENV.operator_tenant
CLI_ROLE = ENV.cli_role
GATEWAY_URL = ENV.public_gateway_url()
WEB_HOST, WEB_PORT = ENV.web_host, ENV.web_port
CLUSTER_ID = ENV.cluster_id
CURRENCY = ENV.currency
JWT_ISSUERS = ENV.jwt_issuers
NATS_URL = ENV.nats_url
NATS_CREDS = ENV.nats_creds
FRONTEND_DIR = (ENV.frontend_dir or BASE_DIR / "frontend" / "dist").resolve()
# Behind a proxy that ends TLS, redirects to it, and decides about subdomains.
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = ENV.https
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if ENV.https else None
SECURE_HSTS_SECONDS = 365 * 24 * 3600 if ENV.https else 0
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W008", "security.W021"]
# The built dashboard, beside the API: files with a hash in their name never change.
WHITENOISE_ROOT = FRONTEND_DIR if FRONTEND_DIR.is_dir() else None
WHITENOISE_IMMUTABLE_FILE_TEST = r"^.+[.-][0-9A-Za-z_-]{8,}\.[a-z0-9]+$"
CSRF_FAILURE_VIEW = "controlplane.entrypoints.rest.problems.csrf_failure"
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"
# Bodies are capped at 1 MiB by the edge guard and again by the parsers.
DATA_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024
REST_FRAMEWORK: dict[str, Any] = {
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.entrypoints.rest.security.BearerAuthentication",
        "controlplane.entrypoints.rest.security.CookieAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["controlplane.entrypoints.rest.security.Policy"],
    "DEFAULT_PARSER_CLASSES": ["controlplane.entrypoints.rest.parsing.StrictJSONParser"],
    "DEFAULT_RENDERER_CLASSES": ["controlplane.entrypoints.rest.rendering.JSONRenderer"],
    "EXCEPTION_HANDLER": "controlplane.entrypoints.rest.problems.exception_handler",
    "URL_FORMAT_OVERRIDE": None,
    "UNAUTHENTICATED_USER": "django.contrib.auth.models.AnonymousUser",
}
SPECTACULAR_SETTINGS: dict[str, Any] = {
    "TITLE": "Engine control plane",
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "controlplane.entrypoints.rest.documenting.introduce",
    ],
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PERMISSIONS": ["controlplane.entrypoints.rest.security.Policy"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,  # a list of the values that stand below it
    "COMPONENT_SPLIT_REQUEST": True,
    "COMPONENT_SPLIT_PATCH": False,
    "ENUM_NAME_OVERRIDES": {
        "RoleEnum": "controlplane.domain.policy.ROLES",
        "TenantTierEnum": "controlplane.domain.tenant.TIERS",
        "ReplicaStateEnum": "controlplane.entrypoints.rest.serializers.fleet.REPLICA_STATES",
        "PeriodEnum": "controlplane.domain.budget.PERIODS",
        "NodeStatusEnum": "controlplane.entrypoints.rest.serializers.fleet.NODE_STATUSES",
        "PlacedTierEnum": "controlplane.entrypoints.rest.serializers.fleet.TIERS",
        "VersionStatusEnum": "controlplane.entrypoints.rest.serializers.catalog.VERSION_STATUSES",
    },
}
