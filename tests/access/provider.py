"""A small OpenID Connect provider: discovery, authorize, token and keys, on this machine.

Whoever comes to ``/authorize`` is ``claims`` at once; the code is good once, for the client that
asked, with its PKCE verifier. ``forge`` changes the ID token after it was made.
"""

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from tests.access.issuer import Issuer

CLIENT_ID, CLIENT_SECRET = "engine-dashboard", "the-client-secret"


class Provider(Issuer):
    def __init__(self) -> None:
        super().__init__()
        self.claims: dict[str, Any] = {}
        self.forge: Callable[[str], str] = lambda token: token
        self._codes: dict[str, dict[str, str]] = {}
        self.seen: list[str] = []

    def discovery(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/jwks.json",
            "userinfo_endpoint": f"{self.url}/userinfo",
            "token_endpoint_auth_methods_supported": ["client_secret_post"],
        }

    def authorize(self, query: dict[str, str]) -> str:
        """Where the browser is sent; raises KeyError for what is missing."""
        assert query["client_id"] == CLIENT_ID and query["response_type"] == "code"
        assert query["code_challenge_method"] == "S256" and "openid" in query["scope"]
        code = secrets.token_urlsafe(16)
        self._codes[code] = query
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def exchange(self, form: dict[str, str]) -> dict[str, Any]:
        asked = self._codes.pop(form["code"])
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == asked["code_challenge"]
        assert (form["client_id"], form["client_secret"]) == (CLIENT_ID, CLIENT_SECRET)
        assert form["redirect_uri"] == asked["redirect_uri"]
        token = self.forge(self.sign(aud=CLIENT_ID, **self.claims))
        return {"access_token": "opaque", "token_type": "Bearer", "id_token": token}

    @contextmanager
    def serving(self) -> Iterator["Provider"]:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                provider.seen.append(parts.path)
                if parts.path == "/authorize":
                    query = {name: one for name, (one, *_) in parse_qs(parts.query).items()}
                    self.send_response(302)
                    self.send_header("Location", provider.authorize(query))
                    self.end_headers()
                elif parts.path == "/.well-known/openid-configuration":
                    self._json(provider.discovery())
                elif parts.path == "/jwks.json":
                    self._json(json.loads(provider.document()))
                else:
                    self.send_error(404)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {name: one for name, (one, *_) in parse_qs(body).items()}
                self._json(provider.exchange(form))

            def _json(self, value: Any) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
