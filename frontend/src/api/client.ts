/**
 * The typed client of the public admin API. The dashboard has no other way to the server.
 *
 * Reads carry `min_position`: the newest log position this page has seen (from its own writes and
 * from live events), so that a list never shows a state older than what the user was just told.
 */
import createClient, { type Middleware } from "openapi-fetch";
import { networkProblem, ProblemError, problemFrom } from "./problem";
import type { paths } from "./schema";

let csrfToken = "";
let seenPosition = 0;
let onUnauthorized: () => void = () => {};

export function setCsrfToken(token: string): void {
  csrfToken = token;
}

export function setUnauthorizedHandler(handler: () => void): void {
  onUnauthorized = handler;
}

/** Later reads wait until the read model has reached `position`. */
export function notePosition(position: number): void {
  if (position > seenPosition) seenPosition = position;
}

export function forgetPosition(): void {
  seenPosition = 0;
}

const isWrite = (request: Request) => request.method !== "GET" && request.method !== "HEAD";

/** The lists of the read model; the log, the ledger and the session are read where they are kept. */
const OF_READ_MODEL = /\/api\/v1\/(nodes|placements|models|routes|tenants|decisions)\//;

const headers: Middleware = {
  onRequest({ request }) {
    if (isWrite(request)) {
      request.headers.set("X-CSRFToken", csrfToken);
      return request;
    }
    if (seenPosition === 0 || !OF_READ_MODEL.test(request.url)) return request;
    const url = new URL(request.url);
    if (url.searchParams.has("as_of")) return request;
    url.searchParams.set("min_position", String(seenPosition));
    return new Request(url, request);
  },
  onResponse({ request, response }) {
    if (isWrite(request)) notePosition(Number(response.headers.get("X-Log-Position") ?? 0));
    if (response.status === 401) onUnauthorized();
    return undefined;
  },
};

export const client = createClient<paths>({
  baseUrl: globalThis.location?.origin ?? "http://localhost",
  credentials: "same-origin",
  fetch: (request) => globalThis.fetch(request),
});
client.use(headers);

interface Answer {
  data?: unknown;
  error?: unknown;
  response: Response;
}

/** Run a call; throw ProblemError unless it succeeded. Gives the body and the response. */
export async function answered<A extends Answer>(
  call: Promise<A>,
): Promise<{ data: NonNullable<A["data"]>; response: Response }> {
  const answer = await call.catch(() => {
    throw new ProblemError(networkProblem());
  });
  if (!answer.response.ok) {
    throw new ProblemError(problemFrom(answer.error, answer.response.status));
  }
  return { data: answer.data as NonNullable<A["data"]>, response: answer.response };
}

/** Run a call and give its body. */
export async function body<A extends Answer>(call: Promise<A>): Promise<NonNullable<A["data"]>> {
  return (await answered(call)).data;
}

/** A body with the ETag that an edit sends back as If-Match. */
export interface Tagged<T> {
  value: T;
  etag: string;
}

export async function tagged<A extends Answer>(
  call: Promise<A>,
): Promise<Tagged<NonNullable<A["data"]>>> {
  const { data, response } = await answered(call);
  return { value: data, etag: response.headers.get("ETag") ?? "" };
}

export function ifMatch(etag: string): Record<string, string> {
  return etag ? { "If-Match": etag } : {};
}

/** A fresh Idempotency-Key: a resend of the same order by the network is carried out once. */
export function idempotencyKey(): Record<string, string> {
  return { "Idempotency-Key": randomId() };
}

/** `crypto.randomUUID` exists only in secure contexts; dashboards are also opened over http. */
function randomId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
