/**
 * The whole product pretended on one port: admin API, live feed, gateway and the built dashboard.
 *
 *     npm run build && npm run fakeserver        # http://127.0.0.1:8000, admin / correct horse
 */
import { createReadStream, existsSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { FakeBackend } from "./fake/backend.mjs";
import { accept } from "./fake/websocket.mjs";

const DIST = fileURLToPath(new URL("../dist", import.meta.url));
const TYPES = { ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml" };
const port = Number(process.env.PORT ?? 8000);
const backend = new FakeBackend();
const watchers = new Set();

backend.onEvent = (event) => {
  for (const send of watchers) send(liveEvent(event));
};

/** The frame's own `type` is "event", so the event's travels as `event_type`. */
function liveEvent({ type, ...fields }) {
  return { ...fields, type: "event", event_type: type };
}

async function bodyOf(request) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  return chunks.length > 0 ? JSON.parse(Buffer.concat(chunks)) : undefined;
}

async function api(request, response, url) {
  const answer = backend.handle({
    method: request.method,
    path: url.pathname,
    query: Object.fromEntries(url.searchParams),
    headers: request.headers,
    body: await bodyOf(request),
  });
  response.writeHead(answer.status, answer.headers);
  response.end(answer.body === undefined ? undefined : JSON.stringify(answer.body));
}

function file(response, pathname) {
  const wanted = join(DIST, normalize(pathname));
  const path = extname(wanted) && existsSync(wanted) ? wanted : join(DIST, "index.html");
  const type = TYPES[extname(path)] ?? (extname(path) === ".html" ? "text/html" : undefined);
  response.writeHead(200, type ? { "Content-Type": type } : {});
  createReadStream(path).pipe(response);
}

function live(request, socket) {
  const at = () => ({ position: backend.state.position, at: Date.now() / 1000 });
  const send = accept(
    request,
    socket,
    (text) => {
      const { type, after } = JSON.parse(text);
      if (type !== "subscribe") return;
      send({ type: "hello", ...at() });
      const missed = backend.state.events.filter(
        (event) => after !== null && event.position > after,
      );
      for (const event of missed) send(liveEvent(event));
      watchers.add(send);
    },
    () => {
      clearInterval(beat);
      watchers.delete(send);
    },
  );
  const beat = setInterval(() => {
    send({ type: "heartbeat", ...at() });
    for (const node of backend.state.nodes) send(telemetryOf(node));
  }, 1000);
}

let generated = 0;

function telemetryOf(node) {
  const wave = (index) => 0.45 + 0.4 * Math.sin(Date.now() / 9000 + index + node.node_id.length);
  generated += 40;
  const devices = node.devices.map((device) => ({
    index: device.index,
    utilization: wave(device.index * 2),
    memory_used_bytes: device.memory_bytes / 3,
    memory_total_bytes: device.memory_bytes,
    foreign_bytes: device.index === 1 ? 3e8 : 0,
    temperature_c: 52 + 12 * wave(device.index),
    power_w: 0,
  }));
  const replicas = node.replicas.map((replica) => ({
    ...replica,
    num_running: 2,
    num_waiting: 1,
    generated_tokens: generated,
  }));
  return { type: "telemetry", node_id: node.node_id, at: Date.now() / 1000, devices, replicas };
}

const WORDS =
  "Paged attention keeps the keys and values of a sequence in blocks, so memory is used where tokens are. ".split(
    /(?<= )/,
  );

function gateway(request, socket) {
  let timer;
  const send = accept(
    request,
    socket,
    (text) => {
      const message = JSON.parse(text);
      if (message.type === "auth") send({ type: "ready", tenant: "acme" });
      if (message.type === "generate") timer = generate(send, message);
      if (message.type === "cancel") timer?.finish("cancelled");
    },
    () => timer?.finish("cancelled"),
  );
}

function generate(send, { id, request }) {
  const request_id = "req-00000000000000000000000000000abc";
  const limit = Math.min(request.max_tokens ?? 64, 120);
  let count = 0;
  send({
    type: "started",
    id,
    request_id,
    model: request.model,
    version_id: "smollm2@v1",
    node: "n1",
  });
  const step = setInterval(() => {
    send({ type: "delta", id, index: count, text: WORDS[count % WORDS.length], num_tokens: 1 });
    count += 1;
    if (count >= limit) finish("length");
  }, 25);
  function finish(finish_reason) {
    clearInterval(step);
    const usage = { prompt_tokens: 42, completion_tokens: count, total_tokens: 42 + count };
    send({ type: "done", id, finish_reason, usage, ttft_ms: 25, duration_ms: count * 25 });
  }
  return { finish };
}

const server = createServer((request, response) => {
  const url = new URL(request.url, "http://localhost");
  if (url.pathname.startsWith("/api/")) return api(request, response, url);
  return file(response, url.pathname);
});
server.on("upgrade", (request, socket) => {
  if (request.url === "/ws/live") live(request, socket);
  else gateway(request, socket);
});
server.listen(port, "127.0.0.1", () => {
  const url = `http://127.0.0.1:${server.address().port}`;
  backend.gatewayUrl = url;
  console.log(`${url}  admin / correct horse`);
});

let ticks = 0;
setInterval(() => {
  const n = ticks++;
  backend.append(
    n % 2 ? "node-n1" : "tenant-acme",
    n % 2 ? "ReplicaStateChanged" : "ApiKeyIssued",
    { state: "loading" },
    "agent:n1",
  );
}, 4000).unref();
