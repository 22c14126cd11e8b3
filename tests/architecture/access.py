"""Every way in and its access rule, found by walking what is really served.

``rules()`` is the table in the README; what has no rule shows as MISSING, which fails a test.
"""

from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from controlplane.domain.policy import RESOURCES, Rule

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = "controlplane.entrypoints.processes.management.commands"
MISSING = "MISSING"


class Way(NamedTuple):
    """One way in. ``rule``: what it asks for, "open", or MISSING."""

    surface: str
    address: str
    rule: str


def ways() -> Iterator[Way]:
    yield from web_addresses()
    yield from websockets()
    yield from gateway_paths()
    yield from commands()
    yield from subjects()


def rules() -> Iterator[tuple[str, str, str]]:
    """Rows of the table: addresses of one surface with one rule share a row."""
    together: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for way in ways():
        together[way.surface, way.rule].append(f"`{way.address}`")
    for (surface, rule), addresses in together.items():
        yield surface, ", ".join(addresses), rule


def said(rule: Any) -> str:
    if rule is None:
        return "open"
    known = isinstance(rule, Rule) and rule.resource in RESOURCES
    return f"{rule.action} {rule.resource}" if known else MISSING


# --- HTTP -------------------------------------------------------------------------------------
def patterns(found: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(address, callback)`` of every URL pattern of the web process."""
    urls = import_module("django.urls")
    for one in urls.get_resolver().url_patterns if found is None else found:
        if isinstance(one, urls.URLResolver):
            yield from patterns(one.url_patterns, prefix + str(one.pattern))
        else:
            yield prefix + str(one.pattern), one.callback


def web_addresses() -> Iterator[Way]:
    for address, callback in patterns():
        shown = "/" + address.replace("<str:", "<").replace("^(?P<path>.*)$", "…").replace(
            "/^", "/"
        )
        yield Way("web", shown, rule_of_view(callback))


def rule_of_view(callback: Any) -> str:
    """Open only if it says so: a view by its permission class, a function by its mark."""
    security = import_module("controlplane.entrypoints.rest.security")
    view = getattr(callback, "cls", None)
    if view is None:
        return "open" if getattr(callback, "is_open", False) else MISSING
    asked = set(view.permission_classes)
    if asked == {security.Open}:
        return "open"
    if asked != {security.Policy} or view.resource not in RESOURCES:
        return MISSING
    writes = any(hasattr(view, name) for name in ("post", "put", "patch", "delete"))
    verbs = [verb for verb, has in (("read", hasattr(view, "get")), ("write", writes)) if has]
    return f"{' or '.join(verbs)} {view.resource}"


def gateway_paths() -> Iterator[Way]:
    app = import_module("controlplane.entrypoints.openai.app")
    for path, rule in app.RULES.items():
        yield Way("gateway", path, said(rule))


# --- the rest ---------------------------------------------------------------------------------
def websockets() -> Iterator[Way]:
    routing = import_module("controlplane.entrypoints.live.routing")
    for pattern in routing.patterns(hub=None):
        consumer = getattr(pattern.callback, "consumer_class", None)
        if consumer is not None:
            rule = said(Rule("read", consumer.resource))
        else:
            rule = "refused" if pattern.callback is routing.refuse else MISSING
        yield Way("websocket", f"/{pattern.pattern}" if str(pattern.pattern) else "…", rule)


def commands() -> Iterator[Way]:
    folder = ROOT / COMMANDS.replace(".", "/")
    base = import_module("controlplane.entrypoints.processes.ruled_command")
    for path in sorted(folder.glob("[a-z]*.py")):
        command = import_module(f"{COMMANDS}.{path.stem}").Command
        ruled = issubclass(command, base.RuledCommand) and command.rule is not None
        yield Way("command", f"manage.py {path.stem}", said(command.rule) if ruled else MISSING)


def subjects() -> Iterator[Way]:
    """Each kind of subject there is, with what the credentials of node ``n`` let it do there."""
    credentials = import_module("controlplane.adapters.natsbus.credentials")
    allowed = credentials.node_permissions("n")
    for subject in bus_subjects():
        own = [
            verb
            for verb, granted in (("publish", allowed.publish), ("subscribe", allowed.subscribe))
            if any(covers(one, subject) for one in granted)
        ]
        rule = f"node n may {' and '.join(own)}; the control plane all" if own else MISSING
        if not own and subject in credentials.CONTROL_ONLY:
            rule = "the control plane only"
        yield Way("bus", subject, rule)


def bus_subjects() -> list[str]:
    """Of node ``n``, made by every function and bucket that the wire contract defines."""
    subjects = import_module("gpuagent.wire.subjects")
    made = []
    for name, value in vars(subjects).items():
        if callable(value):
            parameters = value.__code__.co_varnames[: value.__code__.co_argcount]
            made.append(value(*("n" if p == "node_id" else "gw" for p in parameters)))
        elif name.endswith("_BUCKET"):
            prefix = "$O" if value == subjects.TOKENIZER_BUCKET else "$KV"
            made.append(f"$O.{value}.C.x" if prefix == "$O" else f"$KV.{value}.n")
        elif name.endswith("_ALL"):
            made.append(value)
    return sorted(set(made))


def covers(pattern: str, subject: str) -> bool:
    """Whether a granted subject, which may have wildcards, takes in this one."""
    granted, asked = pattern.split("."), subject.split(".")
    for position, token in enumerate(granted):
        if token == ">":
            return len(asked) > position
        if position >= len(asked) or (token not in ("*", asked[position])):
            return False
    return len(granted) == len(asked)
