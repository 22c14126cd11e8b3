"""What the API reference says of each operation: its group, one line, and what a caller must know.

In one place, so that it is read and written as the page that it becomes. ``documenting`` looks an
operation up here by its id, and one that is not here does not start::

    @read("models_list", …)   ->  group Models, "List the models", "Those that the caller may use …"
"""

from typing import NamedTuple

INTRODUCTION = """\
Models, routes, tenants and nodes of one installation; every change is an event in the log.

**Who may call.** Send an API key with an `admin:read` or `admin:write` scope
(`Authorization: Bearer sk_…`), a token of a configured identity provider, or the dashboard's
session cookie. What a role may do is the same on every surface. This page and `/api/schema` need a
login too: `curl -H "Authorization: Bearer $KEY" $URL/api/schema`.

**Writes** answer with a receipt. `?dry_run=true` says which events there would be and changes
nothing; `If-Match` with the ETag last seen makes an edit a 412 where somebody was faster;
`Idempotency-Key` makes a resend safe for 24 hours; `reason` (or `X-Reason`) is kept for the audit.
A write's `X-Log-Position` given to a read as `?min_position=` waits until the read shows it.

**Reads** take `?as_of=`, a log position or an ISO 8601 time with its offset: the answer is what it
was then. Lists are paged by `limit` and `offset`, or by the position in `next`.

**Refusals** are `application/problem+json` with a stable `code`; `errors` names the fields. What no
later try can mend has no `Retry-After`. Times are Unix seconds (UTC), memory is in bytes.

Inference itself is the OpenAI API of the gateway (`/v1/…`), not described here.
"""

GROUPS = (
    ("Models", "What can be served: models, their versions, aliases, access and prices."),
    ("Routes", "Names that split traffic between versions, and the weights that choose replicas."),
    ("Tenants", "Who is served, in which tier."),
    ("Keys", "API keys of a tenant. A secret is shown once."),
    ("Budgets", "What a tenant, a key or a model may use in a period, in tokens or in money."),
    ("Fleet", "Nodes, their devices, and which replica is where."),
    ("Decisions", "Why something was placed, scaled or loaded ahead, and what else was possible."),
    ("Requests", "The inference ledger: one record for each request, and why it went where."),
    ("Usage", "Sums of the ledger, and the check that they equal their records."),
    ("Log", "Every event, the audit of orders, undo and export."),
    ("Proof", "Signed checkpoints of the log, and their verification."),
    ("Configuration", "The whole catalog as one YAML file, and how long what is kept."),
    ("Session", "Logging in, and the state of the installation."),
)


class Operation(NamedTuple):
    group: str
    summary: str
    description: str = ""


OPERATIONS = {
    # --- models
    "models_list": Operation(
        "Models",
        "List the models",
        "Those that the caller's tenant and role may use, each with its versions and how they "
        "stand in the fleet.",
    ),
    "models_register": Operation(
        "Models",
        "Register a model",
        "A name that clients may ask for. It serves nothing until a version is added.",
    ),
    "models_retrieve": Operation("Models", "Show a model", "With its versions."),
    "models_set_access": Operation(
        "Models",
        "Say who may use a model",
        "Everybody, or the listed tenants; and, where roles are listed, only callers of those. It "
        "holds on every gateway within a second.",
    ),
    "versions_list": Operation(
        "Models", "List a model's versions", "Each with its specification, replicas and price."
    ),
    "versions_add": Operation(
        "Models",
        "Add a version",
        "Weights and how to serve them; it cannot be changed afterwards, only scaled, priced and "
        "retired. `version`, `source` and `gpu_memory` are enough. The first version becomes the "
        "model's default. The planner places its replicas at once; a version that fits nowhere "
        "shows why in `reason`.",
    ),
    "versions_retrieve": Operation("Models", "Show a version"),
    "versions_retire": Operation(
        "Models",
        "Retire a version",
        "Its replicas finish what runs and leave. No request is sent to it any more; its records "
        "stay. Refused (`in_use`) while a route has an arm of it, and while it is the model's "
        "default and other versions are live.",
    ),
    "versions_scale": Operation(
        "Models",
        "Change how many replicas a version has",
        "Between the two the autoscaler decides by load; a minimum of 0 lets it leave when idle.",
    ),
    "versions_set_price": Operation(
        "Models",
        "Set a version's price",
        "Of a million tokens, for requests admitted from now on. Records keep the price of their "
        "time.",
    ),
    "versions_make_default": Operation(
        "Models", "Make a version the default", "What the model's own name stands for from now on."
    ),
    "aliases_list": Operation("Models", "List a model's aliases"),
    "aliases_add": Operation(
        "Models", "Add an alias", "Another name for the model's default version."
    ),
    "aliases_remove": Operation("Models", "Remove an alias"),
    # --- routes
    "routes_list": Operation("Routes", "List the routes"),
    "routes_create": Operation(
        "Routes",
        "Create a route",
        "A name that splits its requests between versions by weight: an A/B test, a canary.\n\n"
        "**Sticky by default:** the same user gets the same arm for as long as the weights hold, "
        "and a change of weights moves only the share that it must. The user is the request's "
        "`user` field, else its API key; so one client that names no users always sees one arm. "
        "With `sticky` false each request draws anew.\n\n"
        "The arms' versions are live, and either all generate or all embed.",
    ),
    "routes_retrieve": Operation("Routes", "Show a route"),
    "routes_change": Operation(
        "Routes",
        "Change a route's arms",
        "All arms are replaced. Where the route is sticky, only the users whose share has moved "
        "see another arm. Leaving `sticky` out makes it sticky.",
    ),
    "routes_delete": Operation("Routes", "Delete a route", "Its name is then unknown to clients."),
    "routing_weights_retrieve": Operation(
        "Routes",
        "Show the weights that choose replicas",
        "With the defaults. Of the replicas that can take a request, the one of least "
        "`alpha * latency + beta * utilization + gamma * loading` gets it.",
    ),
    "routing_weights_change": Operation(
        "Routes",
        "Change the weights that choose replicas",
        "Only what is said changes. In effect on every gateway at once; requests in flight stay "
        "where they are.",
    ),
    # --- tenants
    "tenants_list": Operation("Tenants", "List the tenants"),
    "tenants_create": Operation(
        "Tenants", "Create a tenant", "Its name is its id from then on. The tier sets its limits."
    ),
    "tenants_retrieve": Operation("Tenants", "Show a tenant"),
    "tenants_change": Operation("Tenants", "Change a tenant's tier"),
    "tenants_delete": Operation(
        "Tenants", "Delete a tenant", "Refused while it has live keys. Its records stay."
    ),
    "tenants_suspend": Operation(
        "Tenants",
        "Suspend a tenant",
        "Its keys and tokens are refused everywhere within a second.",
    ),
    "tenants_resume": Operation("Tenants", "Resume a suspended tenant"),
    "tenants_capture": Operation(
        "Tenants",
        "Keep a tenant's prompts and answers, or stop",
        "Off unless the tenant opted in. What is kept is encrypted with a key of this tenant.",
    ),
    "tenants_erase_text": Operation(
        "Tenants",
        "Erase a tenant's captured text",
        "The key is destroyed when the answer is there; nothing brings the text back.",
    ),
    "tickets_create": Operation(
        "Tenants",
        "Get a ticket for the gateway",
        "A short-lived token to use models as this tenant, for browsers: the playground has one.",
    ),
    # --- keys
    "keys_list": Operation("Keys", "List a tenant's keys", "Without their secrets."),
    "keys_issue": Operation(
        "Keys",
        "Create a key",
        "The answer shows the `secret` this once; it is stored as a hash. Its scopes say what it "
        "is for: `inference` (the default) to use models, `admin:read` and `admin:write` for this "
        "API within its role, `text:read` for captured text. Its `models` are names of models, "
        "routes or aliases that there are.",
    ),
    "keys_revoke": Operation("Keys", "Revoke a key", "For good, on every process within a second."),
    "keys_rotate": Operation(
        "Keys",
        "Make a new secret",
        "The old one stays good until `previous_valid_until`, or until the next rotation: a key "
        "has two secrets at most. Send an `Idempotency-Key`: then a retry does not rotate again.",
    ),
    "keys_suspend": Operation("Keys", "Suspend a key"),
    "keys_resume": Operation("Keys", "Resume a suspended key"),
    # --- budgets
    "budgets_list": Operation(
        "Budgets", "List a tenant's budgets", "With what is spent, reserved and left of each."
    ),
    "budgets_retrieve": Operation("Budgets", "Show a budget"),
    "budgets_set": Operation(
        "Budgets",
        "Set a budget",
        "Makes it, or replaces it whole. A request must fit all budgets that are about it: the "
        "most it may use is reserved first, and what it did not use is given back. In effect on "
        "every gateway once the answer is there. Its `target` is a model that there is, or a key "
        "of the tenant, `jwt:<sub>` or `user:<name>`.",
    ),
    "budgets_remove": Operation("Budgets", "Remove a budget"),
    "budgets_reset": Operation(
        "Budgets", "Start a budget's period anew", "What was spent so far no longer counts."
    ),
    # --- fleet
    "nodes_list": Operation("Fleet", "List the nodes", "With their devices and replicas."),
    "nodes_retrieve": Operation("Fleet", "Show a node"),
    "nodes_remove": Operation(
        "Fleet", "Remove a node", "One that is not ready; an agent that reports again joins anew."
    ),
    "nodes_drain": Operation(
        "Fleet",
        "Drain a node",
        "What runs is finished, its replicas are placed elsewhere, and it gets no new work.",
    ),
    "nodes_undrain": Operation("Fleet", "Let a drained node take work again"),
    "placements_list": Operation(
        "Fleet",
        "List the replicas",
        "Where each is, whether it is wanted, acknowledged and observed, and what it measured.",
    ),
    "placements_explain": Operation(
        "Fleet",
        "Explain why a replica is where it is",
        "The decision that placed it, with every device that was possible and its score.",
    ),
    "placements_repack": Operation(
        "Fleet",
        "Propose moves that free whole devices",
        "A plan only: nothing is moved. `max_moves` bounds it.",
    ),
    "placements_what_if": Operation(
        "Fleet",
        "Try another fleet or load",
        "The product's own planner on a fork of the log: lose or add nodes, other numbers of "
        "replicas, a multiple of the load. Nothing is changed.",
    ),
    # --- decisions
    "decisions_list": Operation("Decisions", "List the placement decisions", "Newest first."),
    "decisions_retrieve": Operation(
        "Decisions", "Show a decision", "With its sentences, candidates and rejections."
    ),
    "decisions_replay": Operation(
        "Decisions",
        "Make a decision again from what it saw",
        "The recorded inputs go through the planner once more; the answer says whether the outcome "
        "is the same, bit for bit.",
    ),
    "scalings_list": Operation(
        "Decisions", "List what was scaled", "With the readings that each change was made from."
    ),
    "forecasts_list": Operation(
        "Decisions", "List the forecasts", "And what came of the one before each."
    ),
    "preloads_list": Operation(
        "Decisions", "List the loads ahead", "Whether a request came for each, or none did."
    ),
    "preloads_totals": Operation("Decisions", "Sum up the loads ahead by version"),
    # --- requests
    "requests_list": Operation(
        "Requests",
        "List the inference requests",
        "Newest first, those that run included. A request is here before its answer is complete.",
    ),
    "requests_retrieve": Operation("Requests", "Show a request"),
    "attempts_list": Operation(
        "Requests", "List a request's attempts", "Each try on each replica, the lost ones included."
    ),
    "requests_dispatch": Operation(
        "Requests",
        "Explain why a request went where it went",
        "Every candidate with the terms of its cost, and the rule that lost each of the others. "
        "Kept of a sampled share, of what failed over or found no replica, and of one request a "
        "second beside.",
    ),
    "requests_text": Operation(
        "Requests",
        "Read a request's captured text",
        "Needs the scope `text:read`. Each reading is on record before the text is given.",
    ),
    # --- usage
    "usage_list": Operation(
        "Usage",
        "Sum up usage",
        "Grouped as asked, up to the position it names; exact, from the ledger's records.",
    ),
    "usage_check": Operation(
        "Usage",
        "Show the last check of the totals",
        "Every total, recounted from its records, as often as the controller does it.",
    ),
    # --- log
    "events_list": Operation(
        "Log", "List the events", "By position, in either order; filtered by stream, type or actor."
    ),
    "events_undo": Operation(
        "Log",
        "Undo an event",
        "Gives the order that takes it back, and the log shows what it undoes; nothing is erased. "
        "`?dry_run=true` says what would be ordered. Who may do it is who may make the change.",
    ),
    "audit_list": Operation(
        "Log",
        "List the orders, done and refused",
        "Newest first: who, from where, what it changed, or why it was refused.",
    ),
    "audit_export": Operation(
        "Log",
        "Export events or requests",
        "Streamed, whole or filtered; `after` resumes. With `manifest=true` the signed manifest of "
        "that file: beside it, as `manifest.json`, `python -m controlplane.verify DIR --key FILE` "
        "checks both without the database.",
    ),
    # --- proof
    "checkpoints_list": Operation("Proof", "List the signed checkpoints"),
    "checkpoints_keys": Operation("Proof", "Show the public keys that checkpoints are signed with"),
    "checkpoints_inclusion": Operation(
        "Proof", "Prove that a record is in the log", "An RFC 6962 audit path."
    ),
    "checkpoints_consistency": Operation(
        "Proof", "Prove that the log only grew", "An RFC 6962 consistency proof of two sizes."
    ),
    "verification_retrieve": Operation("Proof", "Show the last verification"),
    "verification_start": Operation(
        "Proof",
        "Verify the logs now",
        "Both logs, from their records. The answer comes at once, the result with a later read.",
    ),
    # --- configuration
    "catalog_export": Operation(
        "Configuration",
        "Export the catalog as YAML",
        "Tenants with their budgets, models, routes, and the installation's weights and retention, "
        "in the form that applying takes. Keys are named, without their secrets. Who may read it "
        "sees the days of retention too, as in the events: one file and one hash for all readers.",
    ),
    "catalog_apply": Operation(
        "Configuration",
        "Apply a YAML file",
        "Makes the catalog what the file says, of what it names; applied again it changes nothing. "
        "`?dry_run=true` says what would change. Sizes may be written like `1.5GiB`.",
    ),
    "retention_list": Operation("Configuration", "List how long what is kept"),
    "retention_retrieve": Operation("Configuration", "Show how long one kind is kept"),
    "retention_set": Operation(
        "Configuration",
        "Change how long one kind is kept",
        "Requests leave for a verified archive; captured text is deleted.",
    ),
    # --- session
    "session_retrieve": Operation("Session", "Show who is logged in"),
    "session_create": Operation(
        "Session",
        "Log in",
        "Sets the session cookie. Open to everybody; after five failures a name has to wait.",
    ),
    "session_delete": Operation("Session", "Log out"),
    "session_methods": Operation(
        "Session", "List the other ways to log in", "Open to everybody: the login page shows them."
    ),
    "status_retrieve": Operation(
        "Session", "Show the state of the installation", "Log head, lag, leader, gateway, version."
    ),
}
