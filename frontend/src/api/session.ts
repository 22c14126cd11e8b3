import { queryOptions, useQuery } from "@tanstack/react-query";
import { useAsOf } from "./asOf";
import { body, client, setCsrfToken } from "./client";
import { ProblemError } from "./problem";
import type { Session } from "./types";

async function signedIn(call: Promise<Session>): Promise<Session> {
  const session = await call;
  setCsrfToken(session.csrf_token);
  return session;
}

/** The signed-in user, or null; only a failure to ask is an error. */
async function currentSession(): Promise<Session | null> {
  try {
    return await signedIn(body(client.GET("/api/v1/session/")));
  } catch (error) {
    if (error instanceof ProblemError && [401, 403].includes(error.status)) return null;
    throw error;
  }
}

export const sessionQuery = queryOptions({
  queryKey: ["session"],
  queryFn: currentSession,
  staleTime: Number.POSITIVE_INFINITY,
});

export const signInMethodsQuery = queryOptions({
  queryKey: ["sign-in-methods"],
  queryFn: async () => (await body(client.GET("/api/v1/session/methods/"))).methods,
  staleTime: Number.POSITIVE_INFINITY,
});

export function logIn(username: string, password: string): Promise<Session> {
  return signedIn(body(client.POST("/api/v1/session/", { body: { username, password } })));
}

export async function logOut(): Promise<void> {
  await body(client.DELETE("/api/v1/session/"));
}

export type Resource =
  | "tenant"
  | "key"
  | "budget"
  | "model"
  | "route"
  | "node"
  | "ticket"
  | "text"
  | "routing"
  | "verification";

const WRITES: Record<string, Resource[]> = {
  admin: [
    "tenant",
    "key",
    "budget",
    "model",
    "route",
    "node",
    "ticket",
    "text",
    "routing",
    "verification",
  ],
  operator: ["model", "route", "node", "ticket", "routing", "verification"],
  developer: ["key", "ticket"],
};

/** Whether to offer a change at all; the server's policy is what decides. */
export function mayWrite(session: Session | null | undefined, resource: Resource): boolean {
  return WRITES[session?.role ?? ""]?.includes(resource) ?? false;
}

/** Nothing can be changed in the past. */
export function useMayWrite(resource: Resource): boolean {
  const session = useQuery(sessionQuery).data;
  return useAsOf() === undefined && mayWrite(session, resource);
}
