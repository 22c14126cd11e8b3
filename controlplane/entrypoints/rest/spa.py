"""The built dashboard: ``index.html`` for every address that is not the API's.

Files with a hash in their name are served by whitenoise and cached for a year; ``index.html``
names them, so it is always asked for again.
"""

from pathlib import Path

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import resolve
from django.views.decorators.csrf import csrf_exempt

from controlplane.entrypoints.rest.problems import django_problem
from controlplane.entrypoints.rest.security import is_open

_NOT_BUILT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Engine</title>
<body><h1>The dashboard is not built yet</h1>
<p>Build it with <code>cd frontend &amp;&amp; npm ci &amp;&amp; npm run build</code> and reload,
or point <code>ENGINE_FRONTEND_DIR</code> at a built one.</p>
<p>The API works without it: see <a href="/api/docs">/api/docs</a>.</p></body></html>
"""


@is_open
@csrf_exempt  # it changes nothing, and who mistypes an address of the API shall read that
def index(request: HttpRequest, path: str = "") -> HttpResponseBase:
    """The dashboard's page; it reads the rest of the address itself."""
    if path.startswith(("api/", "ws/", "v1/", "sso/", "static/", "assets/")):
        return not_found(request)
    if request.method not in ("GET", "HEAD"):
        return django_problem(405, "method_not_allowed", "This address is only read.", request)
    page = Path(settings.FRONTEND_DIR) / "index.html"
    if not page.is_file():
        return HttpResponse(_NOT_BUILT)
    return HttpResponse(page.read_bytes(), headers={"Cache-Control": "no-cache"})


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponseBase:
    del exception
    hint = ' The address that there is ends in "/".' if _lacks_slash(request) else ""
    return django_problem(404, "not_found", f"There is nothing here.{hint}", request)


def _lacks_slash(request: HttpRequest) -> bool:
    path = request.path_info
    return not path.endswith("/") and resolve(f"{path}/").func is not index
