/**
 * The public API in memory, as far as the dashboard uses it.
 *
 * `handle(request)` is the network boundary that the tests replace `fetch` with and that
 * `fakeserver.mjs` serves; `onEvent` tells of every event that a write appends.
 */
import { budget, model, newState, T0, tenant, version } from "./data.mjs";

const PASSWORD = "correct horse";
const CSRF = "csrf-1";

class Refusal extends Error {
  constructor(status, code, detail, errors = []) {
    super(detail);
    Object.assign(this, { status, code, errors });
  }
}

export class FakeBackend {
  constructor({ gatewayUrl = "http://gateway.test", state = newState() } = {}) {
    this.state = { weights: { ...WEIGHTS, beta: 2 }, ...state };
    this.gatewayUrl = gatewayUrl;
    this.user = null;
    this.role = "admin";
    this.calls = [];
    this.methods = [];
    this.past = [];
    this.onEvent = () => {};
  }

  /** `{method, path, query, headers, body}` -> `{status, headers, body}`. */
  handle(request) {
    this.calls.push(request);
    try {
      return this.answer(request);
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      const { status, code, errors } = error;
      const titles = { 401: "Not authenticated", 404: "Not found", 412: "Precondition failed" };
      const problem = {
        type: "about:blank",
        title: titles[status] ?? "Bad request",
        status,
        code,
        detail: error.message,
        request_id: "req-fake",
        errors,
      };
      return { status, headers: { "Content-Type": "application/problem+json" }, body: problem };
    }
  }

  answer(request) {
    const path = request.path.replace(/^\/api\/v1\//, "").replace(/\/$/, "");
    const parts = path.split("/").map(decodeURIComponent);
    if (parts[0] === "session" && parts[1] === "methods") return ok({ methods: this.methods });
    if (parts[0] === "session") return this.session(request);
    if (this.user === null) throw new Refusal(401, "not_authenticated", "Log in.");
    if (request.method === "GET") return this.readAsOf(parts, request.query);
    if (request.headers["x-csrftoken"] !== CSRF) {
      throw new Refusal(403, "csrf_failed", "Send the CSRF token as X-CSRFToken.");
    }
    return this.write(parts, request);
  }

  session({ method, body }) {
    if (method === "DELETE") {
      this.user = null;
      return { status: 204, headers: {} };
    }
    if (method === "POST") {
      if (body.password !== PASSWORD) {
        throw new Refusal(401, "invalid_credentials", "User name or password is wrong.");
      }
      this.user = body.username;
    }
    if (this.user === null) throw new Refusal(401, "not_authenticated", "Nobody is logged in.");
    return ok({ username: this.user, role: this.role, tenant_id: "", csrf_token: CSRF });
  }

  // --- the past -------------------------------------------------------------------------------

  readAsOf(parts, query) {
    const now = this.state;
    if (query.as_of !== undefined) this.state = this.stateAt(query.as_of);
    try {
      return this.read(parts, query);
    } finally {
      this.state = now;
    }
  }

  /** The state before the first write after a position or a time, with the events until then. */
  stateAt(asOf) {
    const position = /^\d+$/.test(asOf) ? Number(asOf) : this.lastUntil(Date.parse(asOf) / 1000);
    if (position > this.state.position) throw new Refusal(400, "invalid_as_of", "Not yet.");
    const then = this.past.find((state) => state.position >= position) ?? this.state;
    const events = then.events.filter((event) => event.position <= position);
    return { ...then, position, events };
  }

  lastUntil(seconds) {
    return this.state.events.findLast((event) => event.recorded_at <= seconds)?.position ?? 0;
  }

  // --- reads ----------------------------------------------------------------------------------

  read([kind, id, sub], query) {
    const found = () => this.find(kind, id);
    if (kind === "status") return ok(this.status());
    if (kind === "audit") return this.page(this.audit(query), query, "after");
    if (kind === "verification") return ok(this.state.verification);
    if (kind === "checkpoints") {
      const results = this.state.checkpoints.filter(({ log }) => !query.log || log === query.log);
      return ok({ next: null, previous: null, results: results.slice(0, Number(query.limit)) });
    }
    if (kind === "events") return this.page(this.events(query), query, "after");
    if (kind === "requests" && sub === "attempts") return ok(attemptsOf(found()));
    if (kind === "requests" && sub === "dispatch") return ok(dispatchOf(found()));
    if (kind === "requests" && id) return ok(found());
    if (kind === "usage" && id === "check") return ok({ last: CHECK });
    if (kind === "routing") {
      const etag = { ETag: `"${this.versionOf("routing", "weights")}"` };
      return ok({ weights: this.state.weights, defaults: WEIGHTS }, etag);
    }
    if (kind === "retention") return ok({ next: null, previous: null, results: RETENTION });
    if (kind === "usage") return ok(usageOf(query));
    if (kind === "requests") return this.page(this.requests(query), query, "after");
    if (kind === "decisions" && sub === "replay") return ok(this.replay(found()));
    if (kind === "decisions" && id) return ok(found());
    if (kind === "decisions") return this.page(this.state.decisions, query, "before");
    if (kind === "scalings") return this.page(this.state.scalings, query, "before");
    if (kind === "preloads") return this.list(this.state.preloadTotals);
    if (kind === "placements") {
      return this.list(this.state.nodes.flatMap((node) => node.replicas));
    }
    if (!id) return this.list(this.state[kind] ?? missing(kind));
    if (kind === "tenants" && sub === "keys") return this.list(this.state.keys[id] ?? []);
    if (kind === "tenants" && sub === "budgets") return this.list(found().budgets.map(counted));
    return this.tagged(found(), kind, id);
  }

  audit({ q = "", outcome }) {
    const has = (entry) => JSON.stringify(entry).toLowerCase().includes(q.toLowerCase());
    return this.state.audit.filter((e) => has(e) && (!outcome || e.outcome === outcome));
  }

  /** The newest decision is decided otherwise now. */
  replay({ decision_id, position, planned_from }) {
    const about = { decision_id, position, planned_from, inputs_recorded: true };
    if (decision_id !== this.state.decisions[0].decision_id) {
      return { ...about, equal: true, differences: [] };
    }
    const path = "started[0].candidates[0].score";
    return { ...about, equal: false, differences: [{ path, stored: 0.81, replayed: 0.5 }] };
  }

  find(kind, id) {
    const names = ["node_id", "tenant_id", "decision_id", "request_id", "name"];
    const row = this.state[kind]?.find((each) => names.some((name) => each[name] === id));
    return row ?? missing(`${kind.slice(0, -1)} '${id}'`);
  }

  status() {
    return {
      position: this.state.position,
      head: this.state.position,
      projection_lag: 0,
      leader: "controller-c1",
      gateway_url: this.gatewayUrl,
      version: "0.1.0",
      cluster_id: "engine",
      currency: "USD",
      ready: true,
    };
  }

  events({ stream, type, actor, order, after }) {
    const rows = this.state.events.filter(
      (event) =>
        (!stream || event.stream === stream) &&
        (!type || event.type === type) &&
        (!actor || event.actor === actor),
    );
    if (order !== "desc") return rows.filter((event) => event.position > Number(after ?? 0));
    return rows.filter((event) => !after || event.position < Number(after)).reverse();
  }

  requests({ request_id, tenant: tenant_id, model: name, outcome, after }) {
    return this.state.requests.filter(
      (row) =>
        (!request_id || row.request_id === request_id) &&
        (!tenant_id || row.tenant_id === tenant_id) &&
        (!name || [row.version_id, row.requested_model].includes(name)) &&
        (!outcome || row.outcome === outcome) &&
        (!after || row.position < Number(after)),
    );
  }

  page(rows, query, cursor) {
    const limit = Number(query.limit ?? 50);
    const results = rows.slice(0, limit);
    const last = results.at(-1)?.position;
    const next =
      rows.length > limit ? `?${new URLSearchParams({ ...query, [cursor]: last })}` : null;
    return ok({ next, previous: null, results }, this.at());
  }

  list(results) {
    return ok({ count: results.length, next: null, previous: null, results }, this.at());
  }

  tagged(body, kind, id) {
    return ok(body, { ...this.at(), ETag: `"${this.versionOf(kind, id)}"` });
  }

  at() {
    return { "X-Log-Position": String(this.state.position) };
  }

  versionOf(kind, id) {
    return this.state.versions[`${kind}/${id}`] ?? 1;
  }

  // --- writes ---------------------------------------------------------------------------------

  write(parts, request) {
    const [kind, id] = parts;
    this.past.push(structuredClone(this.state));
    if (kind === "events") return this.undo(Number(id), request);
    if (kind === "tickets") return ok(this.ticket(), {}, 201);
    if (kind === "verification") return ok(this.verify(), {}, 202);
    if (kind === "routing") return this.weigh(request);
    if (!id) return this.create(kind, request);
    const expected = request.headers["if-match"];
    const actual = this.versionOf(kind, id);
    if (expected && expected !== `"${actual}"`) {
      throw new Refusal(412, "version_conflict", `${id} is at version ${actual}.`);
    }
    const [type, extra] = this.change(parts, request);
    return this.appended(kind, id, type, request.body ?? {}, extra);
  }

  /** As the server does: a dry run says the event and changes nothing; omega sums to 1. */
  weigh({ query, headers, body }) {
    const { reason = "", ...changes } = body;
    const version = this.versionOf("routing", "weights");
    if (headers["if-match"] && headers["if-match"] !== `"${version}"`) {
      throw new Refusal(412, "version_conflict", `weights is at version ${version}.`);
    }
    const before = this.state.weights;
    const after = { ...before, ...changes };
    if (Math.abs(after.omega.reduce((sum, one) => sum + one, 0) - 1) > 1e-9) {
      throw new Refusal(400, "invalid_weight", "omega sums to 1.");
    }
    const dry_run = query.dry_run === "true";
    const data = { before, after, reason };
    const receipt = { id: "weights", version: version + 1, changed: true, dry_run };
    const plan = { ...receipt, events: [{ type: "RoutingWeightsSet", data }] };
    if (dry_run) return ok(plan);
    this.state.weights = after;
    this.state.versions["routing/weights"] = version + 1;
    this.append("routing-weights", "RoutingWeightsSet", data, `user:${this.user}`);
    return ok(plan, this.at());
  }

  /** At once, and with what a test has put there as `found`. */
  verify() {
    const finding = this.state.found ?? null;
    const at = Date.now() / 1000;
    const done = { at, actor: "user:admin", intact: finding === null, finding };
    this.state.verification = { ...this.state.verification, ...done };
    return this.state.verification;
  }

  /** Only a change of tier can be undone here. */
  undo(position, { query, headers, body }) {
    const undone = this.state.events.find((event) => event.position === position);
    const later = this.state.events.find((event) => event.undoes === position);
    if (later) {
      throw new Refusal(409, "already_undone", `It was undone at position ${later.position}.`);
    }
    if (undone.type !== "TenantTierChanged") {
      throw new Refusal(409, "not_undoable", "The key's secret was erased when it was revoked.");
    }
    const tenant_id = undone.stream.slice("tenant-".length);
    const data = { tenant_id, tier: "free" };
    const version = this.versionOf("tenants", tenant_id);
    const plan = {
      id: tenant_id,
      version: version + 1,
      changed: true,
      dry_run: query.dry_run === "true",
      events: [{ type: "TenantTierChanged", data: { ...data, at: 0 } }],
      undoes: position,
      commands: [{ type: "ChangeTier", data }],
    };
    if (plan.dry_run) return ok(plan);
    if (headers["if-match"] !== `"${version}"`) {
      throw new Refusal(412, "version_conflict", `${tenant_id} is at version ${version}.`);
    }
    this.find("tenants", tenant_id).tier = "free";
    this.state.versions[`tenants/${tenant_id}`] = version + 1;
    this.append(undone.stream, undone.type, { ...data, ...body }, "user:admin", position);
    return ok(plan, this.at());
  }

  ticket() {
    const expires_at = Date.now() / 1000 + 600;
    return { ticket: "tkt_fake", expires_at, gateway_url: this.gatewayUrl };
  }

  create(kind, { body }) {
    if (!/^[a-z0-9][a-z0-9._-]{0,62}$/.test(body.name ?? "")) {
      const detail = "A name is 1 to 63 of a-z, 0-9, '.', '_' and '-'.";
      throw new Refusal(400, "invalid_name", detail, [{ pointer: "/name", detail, code: "x" }]);
    }
    const now = Date.now() / 1000;
    if (kind === "tenants") {
      this.state.tenants.push(tenant(body.name, { tier: body.tier, num_keys: 0, created_at: now }));
      this.state.keys[body.name] = [];
      return this.appended(kind, body.name, "TenantCreated", body);
    }
    if (kind === "models") {
      if (this.state.models.some((each) => each.name === body.name)) {
        return ok({ id: body.name, changed: false, dry_run: false, events: [] }, this.at(), 201);
      }
      this.state.models.push(model(body.name, [], { created_at: now }));
      return this.appended(kind, body.name, "ModelRegistered", body);
    }
    this.state.routes.push({ ...body, created_at: now, updated_at: now });
    return this.appended(kind, body.name, "RouteCreated", body);
  }

  refuseIfInUse(row, name) {
    const others = row.versions.filter((each) => !each.retired && each.version !== name);
    if (row.default_version !== name || others.length === 0) return;
    const use = `${row.name}@${name} is the default of ${row.name}`;
    throw new Refusal(409, "in_use", `${use}; make another version the default first.`);
  }

  change([kind, id, sub, subId, action], { method, body }) {
    const row = this.find(kind, id);
    switch (`${method} ${kind} ${sub ?? ""} ${action ?? ""}`.trim()) {
      case "POST nodes drain":
        row.draining = true;
        return ["NodeDrainStarted"];
      case "POST nodes undrain":
        row.draining = false;
        return ["NodeDrainEnded"];
      case "DELETE nodes":
        this.state.nodes = this.state.nodes.filter((each) => each !== row);
        return ["NodeRemoved"];
      case "PUT routes":
        Object.assign(row, body);
        return ["RouteArmsChanged"];
      case "DELETE routes":
        this.state.routes = this.state.routes.filter((route) => route !== row);
        return ["RouteDeleted"];
      case "POST models versions":
        row.versions.push(
          version(id, body.version, { ...body, status: "loading", ready_replicas: 0 }),
        );
        row.default_version ??= body.version;
        return ["ModelVersionAdded"];
      case "POST models versions scale":
        Object.assign(byVersion(row, subId), body);
        return ["ModelVersionScaled"];
      case "PUT models versions price":
        byVersion(row, subId).price = body;
        return ["ModelPriceSet"];
      case "POST models versions retire":
        this.refuseIfInUse(row, subId);
        Object.assign(byVersion(row, subId), { retired: true, status: "retired" });
        return ["ModelVersionRetired"];
      case "POST models versions default":
        row.default_version = subId;
        return ["ModelDefaultVersionSet"];
      case "POST models aliases":
        row.aliases.push(body.alias);
        return ["ModelAliasAdded"];
      case "DELETE models aliases":
        row.aliases = row.aliases.filter((alias) => alias !== subId);
        return ["ModelAliasRemoved"];
      case "PUT models access":
        row.access = { public: body.public, tenants: body.tenants, roles: body.roles };
        return ["ModelAccessChanged"];
      default:
        return this.changeTenant(row, `${method} ${sub ?? ""}`.trim(), subId, body, action);
    }
  }

  changeTenant(row, order, keyId, body, action) {
    const keys = this.state.keys[row.tenant_id] ?? missing("order");
    const others = () => row.budgets.filter((each) => each.budget_id !== keyId);
    switch (order) {
      case "PATCH":
        row.tier = body.tier;
        return ["TenantTierChanged"];
      case "PUT capture":
        row.captures_text = body.captures_text;
        return [row.captures_text ? "TenantCaptureStarted" : "TenantCaptureStopped"];
      case "POST erase-text":
        return ["TenantTextErased"];
      case "POST suspend":
        Object.assign(row, { suspended: true, suspended_reason: body.reason });
        return ["TenantSuspended"];
      case "POST resume":
        row.suspended = false;
        return ["TenantResumed"];
      case "PUT budgets":
        row.budgets = [...others(), budget(keyId, body)];
        return ["TenantBudgetSet"];
      case "DELETE budgets":
        row.budgets = others();
        return ["TenantBudgetSet"];
      case "POST budgets":
        return ["TenantBudgetReset"];
      case "DELETE keys":
        keys.find((key) => key.key_id === keyId).revoked = true;
        return ["ApiKeyRevoked"];
      case "POST keys":
        return keyId
          ? this.changeKey(byKey(keys, keyId), action, body)
          : this.issueKey(row, keys, body);
      default:
        return missing("order");
    }
  }

  changeKey(key, action, body) {
    if (action === "rotate") {
      Object.assign(key, { last4: "cret", previous_valid_until: body.previous_valid_until });
      const secret = `sk_${key.key_id}.newer-secret`;
      return ["ApiKeyRotated", { key_id: key.key_id, last4: key.last4, secret }];
    }
    Object.assign(key, { suspended: action === "suspend", suspended_reason: body.reason });
    return [key.suspended ? "ApiKeySuspended" : "ApiKeyResumed"];
  }

  issueKey(row, keys, { name, role, scopes, models, expires_at }) {
    const key_id = (0xa1b2c3d4e500 + keys.length).toString(16);
    const shown = { key_id, last4: "cret" };
    const created_at = Date.now() / 1000;
    keys.push({
      ...shown,
      tenant_id: row.tenant_id,
      name,
      role,
      scopes,
      models,
      expires_at: expires_at ?? null,
      suspended: false,
      suspended_reason: "",
      revoked: false,
      created_at,
      rotated_at: null,
      last_used_at: null,
      previous_valid_until: null,
      previous_last_used_at: null,
      applies: row.budgets,
    });
    row.num_keys += 1;
    return ["ApiKeyIssued", { ...shown, secret: `sk_${key_id}.top-secret` }];
  }

  appended(kind, id, type, data, extra = {}) {
    const key = `${kind}/${id}`;
    this.state.versions[key] = this.versionOf(kind, id) + 1;
    this.append(`${kind.slice(0, -1)}-${id}`, type, data, `user:${this.user}`);
    const receipt = { id, version: this.state.versions[key], changed: true, dry_run: false };
    return ok({ ...receipt, events: [], ...extra }, this.at(), extra.secret ? 201 : 200);
  }

  append(stream, type, data, actor, undoes = null) {
    this.state.position += 1;
    const { position } = this.state;
    const recorded_at = Date.now() / 1000;
    const hash = position.toString(16).padStart(64, "0");
    const { reason = "" } = data;
    const about = { actor, reason, undoes, recorded_at, hash };
    const event = { position, stream, version: 1, type, data, ...about };
    this.state.events.push(event);
    this.onEvent(event);
    return event;
  }
}

function ok(body, headers = {}, status = 200) {
  return { status, headers: { "Content-Type": "application/json", ...headers }, body };
}

function missing(what) {
  throw new Refusal(404, "not_found", `There is no ${what}.`);
}

function byVersion(row, name) {
  return row.versions.find((each) => each.version === name) ?? missing("version");
}

function byKey(keys, id) {
  return keys.find((each) => each.key_id === id) ?? missing("key");
}

function attemptsOf({ node_id, replica_id, num_output_tokens, started_at, duration_ms }) {
  const one = { choice: 0, replica_id, num_cached_tokens: 16, queue_ms: 3.5, started_at };
  const lost = { attempt: 1, node_id: "n9", outcome: "error", error_code: "node_lost" };
  const served = { attempt: 2, node_id, outcome: "ok", error_code: "" };
  const results = [
    { ...one, ...lost, num_output_tokens: 0, duration_ms: 12 },
    { ...one, ...served, num_output_tokens, duration_ms },
  ];
  return { next: null, previous: null, results };
}

/** Kept of the requests that the second node served. */
function dispatchOf({ request_id, outcome, node_id, replica_id, started_at }) {
  const kept = node_id === "n2";
  const seen = { request_id, outcome, share: 0.01, is_sampled: kept, is_whole: true };
  const cost = (latency, utilization) => ({
    queue_s: latency - 0.3,
    prefill_s: 0.1,
    decode_s: 0.2,
    thermal: 1,
    distance_s: 0,
    latency,
    utilization,
    loading: 0,
    cost: latency + utilization,
  });
  const candidate = (at, replica, terms) => ({
    node_id: at,
    replica_id: replica,
    cost: terms.cost,
    health: 0.7,
    terms,
  });
  const hot = { node_id: "n3", replica_id: "smollm2.v1.g3.2", code: "too_hot" };
  const one = {
    choice: 0,
    attempt: 1,
    at: started_at,
    why: "sampled",
    position: 12,
    formula: 1,
    replica_id,
    node_id,
    weights: WEIGHTS,
    request: { num_prompt_tokens: 31, max_output_tokens: 256, max_wait_s: 60 },
    num_replicas: 3,
    replicas: [],
    num_candidates: 2,
    candidates: [
      candidate(node_id, replica_id, cost(0.3, 0.25)),
      candidate("n1", "smollm2.v1.g3.1", cost(0.9, 0.25)),
    ],
    num_rejected: 1,
    rejected: [{ ...hot, detail: "83.5 C, the limit is 83 C" }],
    sentences: [`${replica_id} on ${node_id} was the cheapest of 2 that could take the request.`],
    recomputed: { equal: true, comparable: true, differences: [] },
  };
  return { ...seen, dispatches: kept ? [one] : [] };
}

const CHECK = {
  at: T0 + 3_000,
  position: 12,
  num_records: 12,
  num_totals: 9,
  num_differences: 0,
  differences: [],
  seconds: 0.042,
};

const WEIGHTS = {
  alpha: 1,
  beta: 0.5,
  gamma: 1,
  omega: [0.3, 0.3, 0.1, 0.3],
  t_safe: 75,
  t_max: 83,
  stale_s: 6,
  prefix: 1,
  hop_s: 0.02,
};

const RETENTION = [
  { kind: "requests", days: 396, default_days: 396, goes: true, removed_upto: 12_000 },
  { kind: "text", days: null, default_days: 30, goes: true, removed_upto: 0 },
];

function usageOf({ group_by, since }) {
  const sums = {
    num_requests: 12,
    num_failed: 0,
    num_prompt_tokens: 1_450,
    num_cached_tokens: 192,
    num_output_tokens: 1_152,
    price: "0.0009",
  };
  const names = { day: "2026-11-29", tenant: "acme", route: "chat", arm: "a" };
  const group = Object.fromEntries(group_by.split(",").map((name) => [name, names[name] ?? "x"]));
  const results = [{ ...sums, group }];
  return { position: 12, behind: 0, since, until: null, count: 1, total: sums, results };
}

function counted(rule) {
  const [spent, reserved] = [1_284_310, 2_560];
  const remaining = Math.max(0, Number(rule.limit) - spent - reserved);
  const figures = { spent, reserved, remaining, forgiven: 0 };
  const texts = Object.entries(figures).map(([name, value]) => [name, String(value)]);
  return { ...rule, ...Object.fromEntries(texts) };
}
